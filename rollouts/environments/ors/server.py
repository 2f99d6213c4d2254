"""An ORS server as a client sees it: where it is, what it offers, and sessions in it.

Invariant: what may be asked again is asked again, and nothing else. A request that cannot have arrived, one that a
starting server turned away, and one that changes nothing are repeated; a tool call of which the server may have heard
is only ever resumed by the number that the server gave it. Secrets and keys are in no message and no repr.

Deadlines are its callers'. It knows no trajectory and no sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.dtypes import Message, Prompt
from rollouts.environments.ors.keepalive import EVERY, KeepAlive, Listed
from rollouts.environments.ors.wire import (
    Block,
    CallAnswer,
    Events,
    Listing,
    ORSError,
    ScoreAnswer,
    Secret,
    messages_of,
    read,
    secrets_header,
    text_of,
)
from rollouts.errors import ConfigError, EndpointUnavailable, EnvironmentFailure, boundary
from rollouts.transport import Lost, Transport, Unsent, shown

__all__ = ["ORSServer", "ORSSession", "ORSTask"]

_RETRIED = frozenset({429, 502, 503, 504})
_ATTEMPTS = 4
_LONGEST_PAUSE = 10.0
_REQUEST_SECONDS = 60.0
"""For the whole body of an answer; a server that waits for an environment to start says so after 25."""

_SILENCE = 30.0
"""Seconds without a byte after which a stream is dead; a server says something every 10."""

_KEEP_ALIVE = KeepAlive()


@attrs.frozen
class ORSTask:
    """A task by its own description, or by its place in a split."""

    spec: Mapping[str, Any] | None = None
    split: str | None = None
    index: int | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> ORSTask:
        """The task that a prompt's metadata names: ``task_spec``, or ``split`` and ``index``.

        Raises:
            ConfigError: it names none.
        """
        known = prompt.metadata
        if isinstance(known.get("task_spec"), Mapping):
            return cls(spec=known["task_spec"])
        if isinstance(known.get("split"), str) and isinstance(known.get("index"), int):
            return cls(split=known["split"], index=known["index"])
        raise ConfigError.of(
            "Prompt.metadata", dict(known), 'the key "task_spec" with an object, or "split" and "index"'
        )

    def to_wire(self) -> dict[str, Any]:
        return {"task_spec": self.spec} if self.spec is not None else {"split": self.split, "index": self.index}


class ORSServer:
    """Where environments are; one for all rollouts, in any event loop.

    Args:
        base_url: of a server of one's own, or of a cloud of them.
        environment: the environment's name there; by default the server's first.
        deployment: in a cloud, which server is meant, e.g. ``"Organization/EnvironmentName"``.
        api_key: of a cloud; with one, session numbers are the server's and not ours.
        secrets: handed to the environment of each session, by name: a value, or a value and the hosts it may go to.
        missing_secrets: names of secrets that there is no value for; messages of failures say them.
        starting_seconds: how long a server that says that it is starting is waited for (the deadline of an
            environment's start, ``Limits.step_seconds``, bounds it too).
        ping_seconds: how often a session gives a sign of life.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        environment: str | None = None,
        deployment: str | None = None,
        api_key: str | None = None,
        secrets: Mapping[str, Secret] | None = None,
        missing_secrets: Sequence[str] = (),
        starting_seconds: float = 600.0,
        ping_seconds: float = EVERY,
    ) -> None:
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ConfigError.of("ORSServer.base_url", base_url, "a URL that starts with http:// or https://")
        self.base_url = base_url.rstrip("/")
        self.environment = environment
        self.deployment = deployment
        self.missing_secrets = tuple(missing_secrets)
        self.starting_seconds = starting_seconds
        self.ping_seconds = ping_seconds
        self._api_key = api_key
        self._secrets = dict(secrets or {})
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = weakref.WeakKeyDictionary()
        self._takes_secrets_in_body: bool | None = None

    def __repr__(self) -> str:
        return f"<ORSServer {shown(self.base_url)}, environment {self.environment or 'the first'}>"

    # -- what it offers --

    async def name(self) -> str:
        """The environment's name, asked for once where none was given."""
        if self.environment is None:
            names = read(list[str], await self.ask("GET", "/list_environments"), "environments")
            if not names:
                raise ORSError(f"{shown(self.base_url)} serves no environment")
            self.environment = names[0]
        return self.environment

    async def splits(self) -> list[str]:
        """Names of the splits."""
        entries = read(list[dict[str, Any]], await self._ask_here("GET", "/splits"), "splits")
        return [str(entry.get("name")) for entry in entries]

    async def task_specs(self, split: str, *, limit: int | None = None, seed: int | None = None) -> list[Any]:
        """The descriptions of a split's tasks; one by one where the environment cannot list them.

        Args:
            split: its name.
            limit: at most so many.
            seed: shuffle them first.

        Raises:
            ConfigError: there is no such split; the message has those that there are.
            EnvironmentFailure: the server is not there, or fails.
        """
        with boundary(EnvironmentFailure, f"{self!r}: tasks of {split!r}"):
            known = await self.splits()
            if split not in known:
                raise ConfigError.of("split", split, f"one of {', '.join(known)} ({shown(self.base_url)})")
            try:
                answer = await self._ask_here("POST", "/tasks", {"split": split})
                specs = list(read(dict[str, Any], answer, "tasks")["tasks"])
                return [specs[index] for index in _chosen(len(specs), limit, seed)]
            except ORSError as error:
                if error.status != 400:
                    raise
            answer = await self._ask_here("POST", "/num_tasks", {"split": split})
            count = int(read(dict[str, Any], answer, "num_tasks")["num_tasks"])
            found = []
            for index in _chosen(count, limit, seed):
                answer = await self._ask_here("POST", "/task", {"split": split, "index": index})
                found.append(read(dict[str, Any], answer, "task")["task"])
            return found

    async def prompts(self, split: str, *, limit: int | None = None, seed: int | None = None) -> list[Prompt]:
        """The tasks of a split as prompts: each names its task, whose words come from the session.

        Raises:
            ConfigError: as :meth:`task_specs`.
        """
        specs = await self.task_specs(split, limit=limit, seed=seed)
        name = self.deployment or await self.name()
        return [
            Prompt(
                f"[{name}:{split}:{spec_digest(spec)}]",
                metadata={"env_name": name, "split": split, "task_spec": spec, "task_hash": spec_digest(spec)},
            )
            for spec in specs
        ]

    async def session(self, task: ORSTask) -> ORSSession:
        """Begin a session; whoever has it closes it."""
        session = ORSSession(self, await self.name())
        try:
            await session.create(task)
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await session.close()
            raise
        return session

    # -- requests --

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
        retry = _Retry(self.starting_seconds)
        data = b"" if body is None else msgspec.json.encode(body)
        while True:
            try:
                headers = self.headers(session, secret=path == "/create")
                async with self._pool().open(method, self.base_url + path, headers, data) as answer:
                    payload = await _within(_REQUEST_SECONDS, answer.read)
                    if answer.status < 300 or (retry.lost and answer.status == done):
                        return payload
                    problem = self._refusal(f"{method} {path}", answer.status, payload)
                    again = answer.status in _RETRIED
                    starting = answer.headers.get("X-Backend-State") == "starting"
                    after = answer.headers.get("Retry-After")
            except EndpointUnavailable as error:
                problem, again, starting, after = ORSError(self._plain(str(error))), True, False, None
                retry.lost = retry.lost or isinstance(error, Lost)
            if not again or not await retry.pause(starting, after):
                raise problem

    async def stream(self, path: str, body: dict[str, Any], session: str) -> str:
        """One request whose answer is streamed; where the stream breaks, it is resumed and never sent anew.

        Raises:
            ORSError: it was refused, what it started raised, or it cannot be resumed.
        """
        retry = _Retry(self.starting_seconds)
        task_id: str | None = None
        while True:
            sent = body if task_id is None else {**body, "task_id": task_id}
            starting, after = False, None
            try:
                headers = {**self.headers(session), "Accept": "text/event-stream"}
                async with self._pool().open(
                    "POST", self.base_url + path, headers, msgspec.json.encode(sent)
                ) as answer:
                    if answer.status == 200:
                        parts: list[str] = []
                        events = Events()
                        while more := await _within(_SILENCE, answer.some):
                            for event, data in events.feed(more):
                                if event == "task_id":
                                    task_id, retry.failures = data.strip(), 0
                                elif event == "error":
                                    raise ORSError(self._said(data or "an error without words"))
                                elif event in ("chunk", "end"):
                                    parts.append(data)
                                if event == "end":
                                    return "".join(parts)
                        problem = ORSError(f"POST {path}: the stream ended before its end")
                        again = task_id is not None
                    else:
                        problem = self._refusal(f"POST {path}", answer.status, await answer.read())
                        starting = answer.headers.get("X-Backend-State") == "starting"
                        after = answer.headers.get("Retry-After")
                        again = answer.status in _RETRIED and (task_id is not None or starting)
            except EndpointUnavailable as error:
                problem = ORSError(self._plain(str(error)))
                again = task_id is not None or isinstance(error, Unsent)
            if not again or not await retry.pause(starting, after):
                raise problem

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

    async def secrets_in_body(self) -> dict[str, Any]:
        """Secrets as a field of the body, for servers of ``ors-sdk``, which read no header and tell no version."""
        if not self._secrets:
            return {}
        if self._takes_secrets_in_body is None:
            try:
                await self.ask("GET", "/version")
                self._takes_secrets_in_body = False
            except ORSError as error:
                if error.status is None:
                    raise
                self._takes_secrets_in_body = True
        values = {name: secret if isinstance(secret, str) else secret[0] for name, secret in self._secrets.items()}
        return {"secrets": values} if self._takes_secrets_in_body else {}

    async def new_number(self) -> str:
        """The number of a new session: ours, or in a cloud the server's."""
        if not self._api_key:
            return uuid.uuid4().hex
        events = Events().feed(await self.ask("POST", "/create_session", {}))
        number = next((data.strip() for event, data in events if event == "task_id"), None)
        if not number:
            raise ORSError("POST /create_session: no session number came")
        return number

    async def forget(self, number: str) -> None:
        """Give a cloud's session number back."""
        if self._api_key:
            await self.ask("POST", "/delete_session", session=number)

    async def _ask_here(self, method: str, path: str, body: Any = None) -> bytes:
        """Ask about the environment, outside of any session of a rollout."""
        path = f"/{await self.name()}{path}"
        if not self._api_key:
            return await self.ask(method, path, body)
        number = await self.new_number()
        try:
            return await self.ask(method, path, body, session=number)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await self.forget(number)

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
        missing = ", ".join(self.missing_secrets)
        return self._plain(words)[:1000] + (f" (secrets without a value, so not sent: {missing})" if missing else "")

    def _pool(self) -> Transport:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = Transport(connect_seconds=5.0)
        return self._pools[loop]

    async def aclose(self) -> None:
        """Close this event loop's connections; they close with the loop otherwise."""
        await self._pool().aclose()


class ORSSession:
    """One environment on the server, from its creation to its deletion."""

    def __init__(self, server: ORSServer, environment: str) -> None:
        self.server = server
        self.environment = environment
        self._number: str | None = None
        self._listed: Listed | None = None

    def __repr__(self) -> str:
        return f"<ORSSession {self._number} of {self.server!r}>"

    async def create(self, task: ORSTask) -> None:
        """Make the environment; its setup goes on when this returns."""
        server = self.server
        self._number = number = await server.new_number()
        body = {"env_name": self.environment, **task.to_wire(), **await server.secrets_in_body()}
        await server.ask("POST", "/create", body, session=number, done=400)
        self._listed = Listed(f"{server.base_url}/ping", server.headers(number), server.ping_seconds)
        _KEEP_ALIVE.add(self._listed)

    async def listing(self) -> Listing:
        """The tools, those of this task among them."""
        return read(Listing, await self._ask("/task_tools"), "tools")

    async def opening(self, listing: Listing) -> tuple[list[Message], int]:
        """The messages of the prompt, and how many blocks in it cannot be shown."""
        if listing.message_block_types is not None:
            return messages_of(await self._ask("/messages"), "messages")
        text, hidden = text_of(read(list[Block], await self._ask("/prompt"), "prompt"))
        return [Message("user", text)], hidden

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallAnswer:
        """Run a tool once.

        Raises:
            ORSError: the tool raised, or nobody knows what became of it.
        """
        what = f"tool {name!r}"
        try:
            text = await self._stream("/call", {"name": name, "input": dict(arguments)})
        except ORSError as error:
            raise ORSError(f"{what}: {error}", status=error.status) from error
        return read(CallAnswer, text, what)

    async def score_group(self, candidates: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        """A reward for each candidate, given as messages of the standard; the environment compares them.

        Raises:
            ORSError: it cannot, it failed, or the number of scores is another.
        """
        body = {"candidates": [{"messages": list(messages)} for messages in candidates]}
        text = await self._stream("/score_group", body)
        scores = [score.reward for score in read(ScoreAnswer, text, "score_group").scores]
        if len(scores) != len(candidates):
            raise ORSError(f"score_group: got {len(scores)} scores; expected {len(candidates)}")
        return scores

    async def close(self) -> None:
        """Delete the environment."""
        if self._listed is not None:
            _KEEP_ALIVE.discard(self._listed)
        if self._number is not None:
            number, self._number = self._number, None
            try:
                await self.server.ask("POST", "/delete", session=number)
            finally:
                await self.server.forget(number)

    async def _ask(self, path: str) -> bytes:
        self._alive()
        return await self.server.ask("GET", f"/{self.environment}{path}", session=self._number)

    async def _stream(self, path: str, body: dict[str, Any]) -> str:
        self._alive()
        assert self._number is not None, "a session is used between its creation and its end"
        return await self.server.stream(f"/{self.environment}{path}", body, self._number)

    def _alive(self) -> None:
        if self._listed is not None:
            self._listed.heard = time.monotonic()


@attrs.define
class _Retry:
    """How often something was tried, and when it is given up."""

    starting_seconds: float
    failures: int = 0
    lost: bool = False
    """Whether an attempt may have arrived without an answer."""
    began: float = attrs.field(factory=time.monotonic)

    async def pause(self, starting: bool, after: str | None) -> bool:
        """Wait for the next attempt; ``False`` when there is to be none."""
        if starting:
            if time.monotonic() - self.began >= self.starting_seconds:
                return False
        else:
            self.failures += 1
            if self.failures >= _ATTEMPTS:
                return False
        wanted = (
            float(after) if after is not None and after.strip().isdigit() else 0.25 * 2 ** max(0, self.failures - 1)
        )
        await anyio.sleep(min(wanted, _LONGEST_PAUSE))
        return True


async def _within(seconds: float, wait: Callable[[], Awaitable[bytes]]) -> bytes:
    with anyio.move_on_after(seconds):
        return await wait()
    raise Lost(f"nothing came for {seconds:g} s", stale=False)


def spec_digest(spec: Any) -> str:
    """Sixteen letters that tell tasks apart."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def _chosen(count: int, limit: int | None, seed: int | None) -> list[int]:
    order = list(range(count))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order if limit is None else order[:limit]
