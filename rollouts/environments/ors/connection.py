"""Requests to an ORS server: sent once, or again where that is safe.

Invariant: what may be asked again is asked again, and nothing else. A request that cannot have arrived, one that a
starting server turned away, and one that changes nothing are repeated; a call of which the server may have heard is
only ever resumed by the number that the server gave it. Secrets and keys are in no message and no repr.

It knows no task and no tool.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.dtypes import without_password
from rollouts.environments.ors.wire import Events, ORSError, Secret, secrets_header
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient, Response

__all__ = ["Connection"]

_RETRIED = frozenset({429, 502, 503, 504})
_ATTEMPTS = 4
_LONGEST_PAUSE = 10.0
_ANSWER_SECONDS = 60.0
"""For an answer to begin, or one that is not streamed to end; who waits for an environment says so after 25."""
_SILENCE = 30.0
"""At least so many seconds without a byte, and at most twice as many, and a stream is dead; a server says something
every 10."""
_LAST_BYTES = 0.2
"""Seconds that a stream may stay open after its result: a connection that was not read to the end is lost."""


class Connection:
    """Where a server is, and what proves who asks.

    Args:
        base_url: where.
        api_key: of a cloud.
        deployment: in a cloud, which server is meant.
        secrets: handed to environments that are made.
        missing_secrets: names of secrets that there is no value for; complaints of the server are said with them.
        starting_seconds: how long a server that says that it is starting is waited for.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        deployment: str | None,
        secrets: Mapping[str, Secret],
        missing_secrets: Sequence[str],
        starting_seconds: float,
    ) -> None:
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ConfigError.of("ORSServer.base_url", base_url, "a URL that starts with http:// or https://")
        self.url = base_url.rstrip("/")
        self._shown = without_password(self.url)
        self.deployment = deployment
        self._api_key = api_key
        self._secrets = dict(secrets)
        self._missing = tuple(missing_secrets)
        self._starting_seconds = starting_seconds
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, HttpClient] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Connection to {self._shown}>"

    @property
    def has_key(self) -> bool:
        """Whether it is a cloud's, which numbers sessions itself."""
        return bool(self._api_key)

    @property
    def secret_values(self) -> dict[str, str]:
        return {name: secret if isinstance(secret, str) else secret[0] for name, secret in self._secrets.items()}

    async def ask(
        self, method: str, path: str, body: Any = None, *, session: str | None = None, done: int | None = None
    ) -> bytes:
        """One request that may be repeated.

        Args:
            method: GET or POST.
            path: after the base URL.
            body: encoded as JSON.
            session: the number of a session.
            done: a status that says, at a second attempt, that the first one had arrived.

        Raises:
            ORSError: it was refused, or there is no answer after all attempts.
        """
        retry = _Retry(self._starting_seconds)
        headers = self.headers(session, secret=path == "/create")
        data = b"" if body is None else msgspec.json.encode(body)
        while True:
            again, lost, problem = True, True, None
            retry.pause_as_told = None
            with anyio.move_on_after(_ANSWER_SECONDS):
                try:
                    async with self._pool().open(method, self.url + path, headers, data) as answer:
                        payload = await answer.read()
                    if answer.status < 300 or (retry.lost and answer.status == done):
                        return payload
                    problem, lost = self._refusal(f"{method} {self._shown}{path}", answer.status, payload), False
                    again = answer.status in _RETRIED
                    retry.told(answer)
                except EndpointUnavailable as error:
                    problem, lost = ORSError(self._plain(str(error))), isinstance(error, ConnectionLost)
            retry.lost = retry.lost or lost
            if not again or not await retry.pause():
                raise problem or ORSError(f"{method} {self._shown}{path}: no answer within {_ANSWER_SECONDS:g} s")

    async def stream(self, path: str, body: dict[str, Any], session: str) -> str:
        """One request whose answer is streamed; where the stream breaks, it is resumed and never sent anew.

        Raises:
            ORSError: it was refused, what it started raised, or it cannot be resumed.
        """
        retry = _Retry(self._starting_seconds)
        what = f"POST {self._shown}{path}"
        headers = {**self.headers(session), "Accept": "text/event-stream"}
        run = _Run()
        while True:
            sent = msgspec.json.encode(body if run.task_id is None else {**body, "task_id": run.task_id})
            again, problem = False, None
            retry.pause_as_told = None
            with anyio.move_on_after(_ANSWER_SECONDS) as patience:
                try:
                    async with self._pool().open("POST", self.url + path, headers, sent) as answer:
                        if answer.status == 200:
                            await self._follow(answer, run, retry, patience)
                            problem = ORSError(f"{what}: the stream ended before its end")
                        else:
                            problem = self._refusal(what, answer.status, await answer.read())
                            retry.told(answer)
                            again = answer.status in _RETRIED and retry.starting
                except EndpointUnavailable as error:
                    problem, again = ORSError(self._plain(str(error))), isinstance(error, ConnectFailed)
            if run.result is not None:
                return run.result
            resumes = run.task_id is not None and (problem is None or problem.status in (None, *_RETRIED))
            if not (again or resumes) or not await retry.pause():
                raise problem or ORSError(f"{what}: it fell silent")

    async def _follow(self, answer: Response, run: _Run, retry: _Retry, patience: anyio.CancelScope) -> None:
        """Read a stream to its end; what comes after the result is none of it."""
        parts: list[str] = []
        events = Events()
        while more := await answer.read_chunk():
            now = anyio.current_time()
            if patience.deadline < now + _SILENCE:  # setting it costs as much as reading
                patience.deadline = now + 2 * _SILENCE
            for event, text in events.feed(more):
                if event == "task_id":
                    run.task_id, retry.failures = text.strip(), 0
                elif event == "error":
                    raise ORSError(self._said(text or "an error without words"))
                elif event == "chunk":
                    parts.append(text)
                elif event == "end":
                    run.result = "".join((*parts, text))
                    patience.deadline = now + _LAST_BYTES
                    while await answer.read_chunk():
                        pass
                    return

    def headers(self, session: str | None, *, secret: bool = False) -> dict[str, str]:
        """What goes with a request; secrets with the one that makes an environment only."""
        headers = {"Content-Type": "application/json"}
        if session is not None:
            headers["X-Session-ID"] = session
        if self._api_key:
            headers["X-API-Key"] = self._api_key
        if self.deployment:
            headers["X-Deployment"] = self.deployment
        if secret and self._secrets:
            headers["X-Secrets"] = secrets_header(self._secrets)
        return headers

    def _refusal(self, what: str, status: int, payload: bytes) -> ORSError:
        try:
            detail = msgspec.json.decode(payload)
            detail = detail.get("detail", detail) if isinstance(detail, dict) else detail
        except (msgspec.DecodeError, ValueError):
            detail = payload[:400].decode(errors="replace")
        return ORSError(f"{what}: status {status}: {self._said(str(detail))}", status=status)

    def _plain(self, text: str) -> str:
        """Words without our secrets."""
        for secret in self._secrets.values():
            value = secret if isinstance(secret, str) else secret[0]
            text = text.replace(value, "***") if value else text
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return text

    def _said(self, words: str) -> str:
        """What a server complains of, and what may be the reason."""
        missing = ", ".join(self._missing)
        return self._plain(words)[:1000] + (f" (secrets without a value, so not sent: {missing})" if missing else "")

    def _pool(self) -> HttpClient:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = HttpClient(connect_seconds=5.0)
        return self._pools[loop]

    async def aclose(self) -> None:
        """Close this event loop's connections; they close with the loop otherwise."""
        await self._pool().aclose()


@attrs.define
class _Run:
    """A call that a server runs."""

    task_id: str | None = None
    """The number that it gave it, to be resumed by."""
    result: str | None = None


@attrs.define
class _Retry:
    """How often something was tried, and when it is given up."""

    starting_seconds: float
    failures: int = 0
    lost: bool = False
    """Whether an attempt may have arrived without an answer."""
    starting: bool = False
    """The server's last word was that it is starting."""
    pause_as_told: float | None = None
    began: float = attrs.field(factory=time.monotonic)

    def told(self, answer: Response) -> None:
        """What a refusal says of another attempt."""
        self.starting = answer.headers.get("X-Backend-State") == "starting"
        after = answer.headers.get("Retry-After", "").strip()
        self.pause_as_told = float(after) if after.isdigit() else None

    async def pause(self) -> bool:
        """Wait for the next attempt; ``False`` when there is to be none."""
        if self.starting:
            if time.monotonic() - self.began >= self.starting_seconds:
                return False
        else:
            self.failures += 1
            if self.failures >= _ATTEMPTS:
                return False
        wanted = 0.25 * 2 ** max(0, self.failures - 1) if self.pause_as_told is None else self.pause_as_told
        self.starting = False
        await anyio.sleep(min(wanted, _LONGEST_PAUSE))
        return True
