"""Requests to an ORS server, with retries where they are safe.

Invariant: a request is retried only if it cannot have arrived, a starting server rejected it, or it is idempotent. A
call that may have arrived is never sent again, only resumed by its task id. No message and no repr contains a secret.

This module knows no task and no tool.
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

from rollouts.environments.ors.wire import Events, ORSError, Secret, secrets_header
from rollouts.errors import ConfigError, EndpointUnavailable, without_password
from rollouts.http.client import ConnectFailed, ConnectionLost, HttpClient, Response

__all__ = ["Connection"]

_RETRIED = frozenset({429, 502, 503, 504})
_ATTEMPTS = 4
_LONGEST_PAUSE = 10.0
_ANSWER_SECONDS = 60.0
"""Deadline for the start of a stream, or for a whole response without one; a server that is still starting an
environment responds after 25 s."""
_SILENCE = 30.0
"""A stream without a byte for 30 to 60 seconds is dead; servers send a ping every 10."""
_LAST_BYTES = 0.2
"""Seconds to wait for a stream's end after its result: a connection that is not read to the end cannot be reused."""


@attrs.define(eq=False, kw_only=True, repr=False)
class Connection:
    """URL, credentials and connection pools of a server. Arguments as :class:`ORSServer`.

    Raises:
        ConfigError: ``base_url`` is not an HTTP URL.
    """

    url: str = attrs.field(alias="base_url")
    _api_key: str | None
    deployment: str | None
    _secrets: Mapping[str, Secret]
    _missing: Sequence[str] = attrs.field(alias="missing_secrets")
    _starting_seconds: float
    _pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, HttpClient] = attrs.field(
        init=False, factory=weakref.WeakKeyDictionary
    )

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise ConfigError.of("ORSServer.base_url", self.url, "a URL that starts with http:// or https://")
        self.url = self.url.rstrip("/")

    @property
    def _shown(self) -> str:
        return without_password(self.url)

    def __repr__(self) -> str:
        return f"<Connection to {self._shown}>"

    @property
    def has_key(self) -> bool:
        """Whether there is an API key: then the server is a cloud, which creates session ids itself."""
        return bool(self._api_key)

    @property
    def secret_values(self) -> dict[str, str]:
        return {name: secret if isinstance(secret, str) else secret[0] for name, secret in self._secrets.items()}

    async def request(
        self, method: str, path: str, body: Any = None, *, session_id: str | None = None, done: int | None = None
    ) -> bytes:
        """Send a request that may be retried; return the body of the response.

        Args:
            method: GET or POST.
            path: appended to the base URL.
            body: encoded as JSON.
            session_id: of the session, if any.
            done: a status that, on a retry, means that an earlier attempt succeeded.

        Raises:
            ORSError: the server refused the request, or no attempt got a response.
        """
        retry = _Retry(self._starting_seconds)
        headers = self.headers(session_id, secret=path == "/create")
        data = b"" if body is None else msgspec.json.encode(body)
        while True:
            again, lost, problem = True, True, None
            retry.retry_after = None
            with anyio.move_on_after(_ANSWER_SECONDS):
                try:
                    async with self._pool().open(method, self.url + path, headers, data) as response:
                        payload = await response.read()
                    if response.status < 300 or (retry.lost and response.status == done):
                        return payload
                    problem, lost = self._refusal(f"{method} {self._shown}{path}", response.status, payload), False
                    again = response.status in _RETRIED
                    retry.read_headers(response)
                except EndpointUnavailable as error:
                    problem, lost = ORSError(self._redacted(str(error))), isinstance(error, ConnectionLost)
            retry.lost = retry.lost or lost
            if not again or not await retry.pause():
                raise problem or ORSError(f"{method} {self._shown}{path}: no answer within {_ANSWER_SECONDS:g} s")

    async def stream(self, path: str, body: dict[str, Any], session_id: str) -> str:
        """Send a request with a streamed response; return its result. A broken stream is resumed, never sent again.

        Raises:
            ORSError: the server refused the request, the call raised, or the stream cannot be resumed.
        """
        retry = _Retry(self._starting_seconds)
        what = f"POST {self._shown}{path}"
        headers = {**self.headers(session_id), "Accept": "text/event-stream"}
        run = _Run()
        while True:
            sent = msgspec.json.encode(body if run.task_id is None else {**body, "task_id": run.task_id})
            again, problem = False, None
            retry.retry_after = None
            with anyio.move_on_after(_ANSWER_SECONDS) as scope:
                try:
                    async with self._pool().open("POST", self.url + path, headers, sent) as response:
                        if response.status == 200:
                            await self._follow(response, run, retry, scope)
                            problem = ORSError(f"{what}: the stream ended without a result")
                        else:
                            problem = self._refusal(what, response.status, await response.read())
                            retry.read_headers(response)
                            again = response.status in _RETRIED and retry.starting
                except EndpointUnavailable as error:
                    problem, again = ORSError(self._redacted(str(error))), isinstance(error, ConnectFailed)
            if run.result is not None:
                return run.result
            resumes = run.task_id is not None and (problem is None or problem.status in (None, *_RETRIED))
            if not (again or resumes) or not await retry.pause():
                raise problem or ORSError(f"{what}: the stream timed out")

    async def _follow(self, response: Response, run: _Run, retry: _Retry, scope: anyio.CancelScope) -> None:
        """Read a stream to its end; bytes after the result are ignored."""
        parts: list[str] = []
        events = Events()
        while more := await response.read_chunk():
            now = anyio.current_time()
            if scope.deadline < now + _SILENCE:  # not on each chunk: setting it costs as much as reading
                scope.deadline = now + 2 * _SILENCE
            for event, text in events.feed(more):
                if event == "task_id":
                    run.task_id, retry.failures = text.strip(), 0
                elif event == "error":
                    raise ORSError(self._error_text(text or "an error without a message"))
                elif event == "chunk":
                    parts.append(text)
                elif event == "end":
                    run.result = "".join((*parts, text))
                    scope.deadline = now + _LAST_BYTES
                    while await response.read_chunk():
                        pass
                    return

    def headers(self, session_id: str | None, *, secret: bool = False) -> dict[str, str]:
        """The headers of a request; ``secret`` adds the secrets, which only the creation of an environment needs."""
        headers = {"Content-Type": "application/json"}
        if session_id is not None:
            headers["X-Session-ID"] = session_id
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
        return ORSError(f"{what}: status {status}: {self._error_text(str(detail))}", status=status)

    def _redacted(self, text: str) -> str:
        """Replace secrets and the API key by ``***``."""
        for secret in self._secrets.values():
            value = secret if isinstance(secret, str) else secret[0]
            text = text.replace(value, "***") if value else text
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return text

    def _error_text(self, text: str) -> str:
        """A server's error message without secrets, with the names of missing secrets as a possible cause."""
        missing = ", ".join(self._missing)
        return self._redacted(text)[:1000] + (f" (secrets without a value, so not sent: {missing})" if missing else "")

    def _pool(self) -> HttpClient:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = HttpClient(connect_seconds=5.0)
        return self._pools[loop]

    async def aclose(self) -> None:
        """Close this event loop's connections; otherwise they close with the loop."""
        await self._pool().aclose()


@attrs.define
class _Run:
    """A call that runs on the server."""

    task_id: str | None = None
    """The id from the server by which the call is resumed."""
    result: str | None = None


@attrs.define
class _Retry:
    """Retry state of one request."""

    starting_seconds: float
    failures: int = 0
    lost: bool = False
    """An attempt may have arrived, but its response was lost."""
    starting: bool = False
    """The last response reported that the server is starting."""
    retry_after: float | None = None
    """Seconds, from the header ``Retry-After`` of the last response."""
    began: float = attrs.field(factory=time.monotonic)

    def read_headers(self, response: Response) -> None:
        """Read ``X-Backend-State`` and ``Retry-After``."""
        self.starting = response.headers.get("X-Backend-State") == "starting"
        after = response.headers.get("Retry-After", "").strip()
        self.retry_after = float(after) if after.isdigit() else None

    async def pause(self) -> bool:
        """Wait before the next attempt; return ``False`` if no attempt is left."""
        if self.starting:
            if time.monotonic() - self.began >= self.starting_seconds:
                return False
        else:
            self.failures += 1
            if self.failures >= _ATTEMPTS:
                return False
        seconds = 0.25 * 2 ** max(0, self.failures - 1) if self.retry_after is None else self.retry_after
        self.starting = False
        await anyio.sleep(min(seconds, _LONGEST_PAUSE))
        return True
