"""An ORS server as a client sees it: what it offers, and sessions in it.

Invariant: everything wrong with a name or a split is said before a task is taken, with what there is. Deadlines are its
callers'. It knows no trajectory and no sample.
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
from rollouts.dtypes import Prompt, Tool, without_password
from rollouts.environments.ors.connection import Connection
from rollouts.environments.ors.keepalive import EVERY
from rollouts.environments.ors.session import ORSSession, forget, new_session_id
from rollouts.environments.ors.wire import Listing, ORSError, Secret, read, tools_of
from rollouts.errors import ConfigError, EnvironmentFailure

__all__ = ["ORSServer", "ORSTask", "spec_digest"]

_LISTINGS_KEPT = 512


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
        self._connection = Connection(
            base_url,
            api_key=api_key,
            deployment=deployment,
            secrets=secrets or {},
            missing_secrets=missing_secrets,
            starting_seconds=starting_seconds,
        )
        self.environment = environment
        self.ping_seconds = ping_seconds
        self._takes_secrets_in_body: bool | None = None
        self._listings: collections.OrderedDict[bytes, _Asked] = collections.OrderedDict()

    def __repr__(self) -> str:
        return f"<ORSServer {without_password(self._connection.url)}, environment {self.environment or 'the first'}>"

    # -- what it offers --

    async def name(self) -> str:
        """The environment's name, asked for once where none was given."""
        if self.environment is None:
            names = read(list[str], await self._connection.ask("GET", "/list_environments"), "environments")
            if not names:
                raise ORSError(f"{without_password(self._connection.url)} serves no environment")
            self.environment = names[0]
        return self.environment

    async def splits(self) -> list[str]:
        """Names of the splits."""
        entries = read(list[dict[str, Any]], await self._ask_here("GET", "/splits"), "splits")
        return [str(entry.get("name")) for entry in entries]

    async def task_specs(self, split: str, *, limit: int | None = None, rng: random.Random | None = None) -> list[Any]:
        """The descriptions of a split's tasks; one by one where the environment cannot list them.

        Args:
            split: its name.
            limit: at most so many.
            rng: shuffle them first.

        Raises:
            ConfigError: there is no such split; the message has those that there are.
            EnvironmentFailure: the server is not there, or fails.
        """
        with boundary(EnvironmentFailure, f"{self!r}: tasks of {split!r}"):
            known = await self.splits()
            if split not in known:
                raise ConfigError.of(
                    "split", split, f"one of {', '.join(known)} ({without_password(self._connection.url)})"
                )
            try:
                answer = await self._ask_here("POST", "/tasks", {"split": split})
                specs = list(read(dict[str, Any], answer, "tasks")["tasks"])
                return [specs[index] for index in _chosen(len(specs), limit, rng)]
            except ORSError as error:
                if error.status != 400:
                    raise
            answer = await self._ask_here("POST", "/num_tasks", {"split": split})
            count = int(read(dict[str, Any], answer, "num_tasks")["num_tasks"])
            found = []
            for index in _chosen(count, limit, rng):
                answer = await self._ask_here("POST", "/task", {"split": split, "index": index})
                found.append(read(dict[str, Any], answer, "task")["task"])
            return found

    async def prompts(self, split: str, *, limit: int | None = None) -> list[Prompt]:
        """The tasks of a split as prompts: each names its task, whose words come from the session.

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
        """Begin a session; whoever has it closes it."""
        session = ORSSession(self._connection, await self.name(), self.ping_seconds)
        try:
            await session.create({**task.to_wire(), **await self._secrets_in_body()})
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5), contextlib.suppress(ORSError):
                await session.close()  # what it says is not why the session could not be made
            raise
        return session

    async def offer(self, session: ORSSession, task: ORSTask) -> tuple[Listing, tuple[Tool, ...]]:
        """The tools of a task, asked for by the first of its sessions; others of the same moment wait for it.

        Raises:
            ORSError: a tool's input schema is none, or the server does not say.
        """
        key = msgspec.json.encode(task.to_wire())
        asked = self._listings.setdefault(key, _Asked())
        self._listings.move_to_end(key)
        if len(self._listings) > _LISTINGS_KEPT:
            self._listings.popitem(last=False)
        if asked.offer is None:
            async with asked.lock:
                if asked.offer is None:
                    listing = await session.listing()
                    asked.offer = listing, tools_of(listing)
        return asked.offer

    async def aclose(self) -> None:
        """Close this event loop's connections; they close with the loop otherwise."""
        await self._connection.aclose()

    async def _secrets_in_body(self) -> dict[str, Any]:
        """Secrets as a field of the body, for servers of ``ors-sdk``, which read no header and tell no version."""
        values = self._connection.secret_values
        if not values:
            return {}
        if self._takes_secrets_in_body is None:
            try:
                await self._connection.ask("GET", "/version")
                self._takes_secrets_in_body = False
            except ORSError as error:
                if error.status is None:
                    raise
                self._takes_secrets_in_body = True
        return {"secrets": values} if self._takes_secrets_in_body else {}

    async def _ask_here(self, method: str, path: str, body: Any = None) -> bytes:
        """Ask about the environment, outside of any session of a rollout."""
        path = f"/{await self.name()}{path}"
        if not self._connection.has_key:
            return await self._connection.ask(method, path, body)
        number = await new_session_id(self._connection)
        try:
            return await self._connection.ask(method, path, body, session=number)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await forget(self._connection, number)


@attrs.define(eq=False)
class _Asked:
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    offer: tuple[Listing, tuple[Tool, ...]] | None = None


def spec_digest(spec: Any) -> str:
    """Sixteen letters that tell tasks apart."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def _chosen(count: int, limit: int | None, rng: random.Random | None) -> list[int]:
    order = list(range(count))
    if rng is not None:
        rng.shuffle(order)
    return order if limit is None else order[:limit]
