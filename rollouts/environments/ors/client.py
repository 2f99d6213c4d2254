"""A client of an ORS server: its environments, splits and tasks, and sessions on it.

Invariant: an unknown environment or split is an error before any task runs, and the message lists the valid names.
Callers set the deadlines. This module knows no trajectory and no sample.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Prompt, Tool
from rollouts.environments.ors.connection import Connection
from rollouts.environments.ors.keepalive import EVERY
from rollouts.environments.ors.session import ORSSession, create_session_id, delete_session_id
from rollouts.environments.ors.wire import Listing, ORSError, Secret, read, tools_of
from rollouts.errors import ConfigError, EnvironmentFailure, without_password

__all__ = ["ORSServer", "ORSTask", "spec_digest"]

_MAX_CACHED_OFFERS = 512


@attrs.frozen
class ORSTask:
    """A task, identified by its specification or by its index in a split."""

    spec: Mapping[str, Any] | None = None
    split: str | None = None
    index: int | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> ORSTask:
        """Read the task from a prompt's metadata: ``task_spec``, or ``split`` and ``index``.

        Raises:
            ConfigError: the metadata has no task.
        """
        metadata = prompt.metadata
        if isinstance(metadata.get("task_spec"), Mapping):
            return cls(spec=metadata["task_spec"])
        if isinstance(metadata.get("split"), str) and isinstance(metadata.get("index"), int):
            return cls(split=metadata["split"], index=metadata["index"])
        raise ConfigError.of(
            "Prompt.metadata", dict(metadata), 'the key "task_spec" with an object, or "split" and "index"'
        )

    def to_wire(self) -> dict[str, Any]:
        return {"task_spec": self.spec} if self.spec is not None else {"split": self.split, "index": self.index}


class ORSServer:
    """A client of an ORS server, shared by all rollouts; usable in any event loop.

    Args:
        base_url: URL of a single server or of a cloud.
        environment: the environment's name on the server; by default the server's first.
        deployment: the server within a cloud, e.g. ``"Organization/EnvironmentName"``.
        api_key: key of a cloud; a cloud creates the session ids itself.
        secrets: passed to the environment of each session, by name: a value, or a value and its allowed hosts.
        missing_secrets: names of secrets without a value; listed in error messages.
        starting_seconds: how long to retry while the server reports that it is starting (also bounded by
            ``Limits.step_seconds``, the deadline of an environment's start).
        ping_seconds: interval of a session's keep-alive pings.

    Raises:
        ConfigError: ``base_url`` is not an HTTP URL.
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
        self._connection = Connection(
            base_url=base_url,
            api_key=api_key,
            deployment=deployment,
            secrets=secrets or {},
            missing_secrets=missing_secrets,
            starting_seconds=starting_seconds,
        )
        self.environment = environment
        self.ping_seconds = ping_seconds
        self._takes_secrets_in_body: bool | None = None
        self._offers: collections.OrderedDict[bytes, _CachedOffer] = collections.OrderedDict()

    def __repr__(self) -> str:
        return f"<ORSServer {without_password(self._connection.url)}, environment {self.environment or 'the first'}>"

    # -- what it offers --

    async def name(self) -> str:
        """The environment's name; by default requested from the server, once."""
        if self.environment is None:
            names = read(list[str], await self._connection.request("GET", "/list_environments"), "environments")
            if not names:
                raise ORSError(f"{without_password(self._connection.url)} serves no environment")
            self.environment = names[0]
        return self.environment

    async def splits(self) -> list[str]:
        """Names of the splits."""
        entries = read(list[dict[str, Any]], await self._request_environment("GET", "/splits"), "splits")
        return [str(entry.get("name")) for entry in entries]

    async def task_specs(self, split: str, *, limit: int | None = None, rng: random.Random | None = None) -> list[Any]:
        """The specifications of a split's tasks; requested one by one if the environment cannot list them.

        Args:
            split: the split's name.
            limit: maximum number of tasks.
            rng: shuffles the tasks before the limit applies.

        Raises:
            ConfigError: the split does not exist; the message lists the existing ones.
            EnvironmentFailure: the server is unreachable or fails.
        """
        with boundary(EnvironmentFailure, f"{self!r}: tasks of {split!r}", before_work=True):
            known = await self.splits()
            if split not in known:
                raise ConfigError.of(
                    "split", split, f"one of {', '.join(known)} ({without_password(self._connection.url)})"
                )
            try:
                payload = await self._request_environment("POST", "/tasks", {"split": split})
                specs = list(read(dict[str, Any], payload, "tasks")["tasks"])
                return [specs[index] for index in _indices(len(specs), limit, rng)]
            except ORSError as error:
                if error.status != 400:
                    raise
            payload = await self._request_environment("POST", "/num_tasks", {"split": split})
            count = int(read(dict[str, Any], payload, "num_tasks")["num_tasks"])
            specs = []
            for index in _indices(count, limit, rng):
                payload = await self._request_environment("POST", "/task", {"split": split, "index": index})
                specs.append(read(dict[str, Any], payload, "task")["task"])
            return specs

    async def prompts(self, split: str, *, limit: int | None = None) -> list[Prompt]:
        """The tasks of a split as prompts. A prompt identifies its task; the session provides the messages.

        Raises:
            ConfigError: as :meth:`task_specs`.
        """
        specs = await self.task_specs(split, limit=limit)
        name = self._connection.deployment or await self.name()
        return [
            Prompt(
                f"[{name}:{split}:{spec_digest(spec)}]",
                metadata={"env_name": name, "split": split, "task_spec": spec, "task_hash": spec_digest(spec)},
            )
            for spec in specs
        ]

    async def session(self, task: ORSTask) -> ORSSession:
        """Create a session. The caller closes it."""
        session = ORSSession(self._connection, await self.name(), self.ping_seconds)
        try:
            await session.create({**task.to_wire(), **await self._secrets_in_body()})
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5), contextlib.suppress(ORSError):
                await session.close()  # its error would hide why the creation failed
            raise
        return session

    async def offer(self, session: ORSSession, task: ORSTask) -> tuple[Listing, tuple[Tool, ...]]:
        """The tools of a task, cached: its first session requests them, concurrent sessions wait for the result.

        Raises:
            ORSError: a tool's input schema is invalid, or the request failed.
        """
        key = msgspec.json.encode(task.to_wire())
        cached = self._offers.setdefault(key, _CachedOffer())
        self._offers.move_to_end(key)
        if len(self._offers) > _MAX_CACHED_OFFERS:
            self._offers.popitem(last=False)
        if cached.offer is None:
            async with cached.lock:
                if cached.offer is None:
                    listing = await session.listing()
                    cached.offer = listing, tools_of(listing)
        return cached.offer

    async def aclose(self) -> None:
        """Close this event loop's connections; otherwise they close with the loop."""
        await self._connection.aclose()

    async def _secrets_in_body(self) -> dict[str, Any]:
        """Secrets as a field of the body, for servers of ``ors-sdk``: they ignore the header and have no /version."""
        values = self._connection.secret_values
        if not values:
            return {}
        if self._takes_secrets_in_body is None:
            try:
                await self._connection.request("GET", "/version")
                self._takes_secrets_in_body = False
            except ORSError as error:
                if error.status is None:
                    raise
                self._takes_secrets_in_body = True
        return {"secrets": values} if self._takes_secrets_in_body else {}

    async def _request_environment(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request about the environment; a cloud requires a session id, which is deleted afterwards."""
        path = f"/{await self.name()}{path}"
        if not self._connection.has_key:
            return await self._connection.request(method, path, body)
        session_id = await create_session_id(self._connection)
        try:
            return await self._connection.request(method, path, body, session_id=session_id)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await delete_session_id(self._connection, session_id)


@attrs.define(eq=False)
class _CachedOffer:
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    offer: tuple[Listing, tuple[Tool, ...]] | None = None


def spec_digest(spec: Any) -> str:
    """A hash of a task specification: 16 hex digits of its SHA-256."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def _indices(count: int, limit: int | None, rng: random.Random | None) -> list[int]:
    order = list(range(count))
    if rng is not None:
        rng.shuffle(order)
    return order if limit is None else order[:limit]
