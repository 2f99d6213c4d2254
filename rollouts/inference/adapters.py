"""LoRA adapters as policy versions: which one a request names, and servers that have lost theirs.

Invariant: a reply that named an adapter is stored under the adapter's name as its version, and was sampled by it: the
server refuses unknown names, an adapter is loaded again only from an unchanged folder, and the base weights are those
of the first reply. A rollout has one adapter from its first request on, unless an update moves it to a newer one.

A family is all adapters named ``NAME`` or ``NAME-vN``; the highest N is the newest. This process knows it from its own
updates (``adapter_updates.py``); without any, it asks the servers.
"""

from __future__ import annotations

import re
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import anyio
import anyio.to_thread
import attrs

from rollouts.base.peft import checksum_of
from rollouts.dtypes import Completion, Endpoint, VersionSpan
from rollouts.errors import EndpointError, EndpointRefused
from rollouts.inference.adapter_routes import AdapterRoutes
from rollouts.inference.base import CompletionRequest, PolicyWrapper, describe_as
from rollouts.inference.call import Call
from rollouts.inference.resumable import InterruptiblePolicy
from rollouts.inference.routing import Worker
from rollouts.inference.sending import Sender
from rollouts.inference.servers import Servers
from rollouts.inference.totals import Totals
from rollouts.inference.unreachable import Reachability

__all__ = ["AdapterSender", "AdapterVersion", "Family", "RolloutAdapter", "family_of"]

REFRESH_SECONDS = 1.0
"""How old the list of a server's adapters may be when a rollout begins, in a process that updates none."""


@attrs.define
class AdapterVersion:
    """One adapter of a family."""

    name: str
    folder: str
    """As the servers know it."""
    checksum: str | None
    """Of its files when it was loaded or first seen; ``None`` if this process cannot read them."""
    loaded_here: bool = False
    """Whether this process loaded it, and so unloads it."""


@attrs.define(eq=False)
class Family:
    """The adapters of one family on the servers of one endpoint, as far as this process knows them."""

    name: str
    versions: dict[str, AdapterVersion] = attrs.field(factory=dict)
    current: str = ""
    """The newest that this process has loaded on all servers."""
    present: dict[str, set[str]] = attrs.field(factory=lambda: defaultdict(set))
    """Adapters that the server at each URL is known to have."""
    base: str | None = None
    """Weight version of the base model, from the first reply."""
    superseded: set[str] = attrs.field(factory=set)
    """Adapters whose rollouts continue with the current one."""
    rollouts: weakref.WeakSet[RolloutAdapter] = attrs.field(factory=weakref.WeakSet)
    senders: weakref.WeakSet[AdapterSender] = attrs.field(factory=weakref.WeakSet)

    def number(self, name: str) -> int | None:
        """The version of a member of the family, -1 for its plain name; ``None`` for any other adapter."""
        if name == self.name:
            return -1
        match = re.fullmatch(rf"{re.escape(self.name)}-v(\d+)", name)
        return None if match is None else int(match[1])

    def newest(self, names: Iterable[str]) -> str:
        """The member with the highest version; empty if there is none."""
        members = [(number, name) for name in names if (number := self.number(name)) is not None]
        return max(members, default=(0, ""))[1]

    def resolved(self, name: str) -> str:
        """The adapter that a request for ``name`` gets."""
        return self.current if name in self.superseded else name

    def in_use(self) -> set[str]:
        """The adapters that rollouts and requests of this process name."""
        rollouts = {rollout.adapter for rollout in list(self.rollouts)}
        return {self.resolved(name) for name in rollouts} | {call.adapter for call in self.calls()}

    def calls(self) -> list[Call]:
        """The calls of this process that are being sent."""
        return [call for sender in list(self.senders) for call in list(sender.calls)]

    async def learn(self, name: str, folder: str) -> None:
        """Record an adapter that a server lists."""
        if name not in self.versions:
            self.versions.setdefault(name, AdapterVersion(name, folder, await readable_checksum(folder)))


_FAMILIES: dict[tuple[tuple[str, ...], str], Family] = {}


def family_of(endpoint: Endpoint) -> Family:
    """The family of an endpoint, the same for all its clients of this process."""
    assert endpoint.lora is not None, "an endpoint with adapters"
    return _FAMILIES.setdefault((endpoint.base_url, endpoint.lora), Family(endpoint.lora))


async def readable_checksum(folder: str) -> str | None:
    """The checksum of an adapter's folder; ``None`` if this process cannot read it."""
    try:
        return await anyio.to_thread.run_sync(checksum_of, Path(folder))
    except OSError:
        return None


class RolloutAdapter(PolicyWrapper):
    """The policy of one rollout. While this object lives, its adapter stays loaded.

    A rollout that continues earlier turns has the adapter that sampled their last token; any other has the newest.
    """

    def __init__(self, inner: InterruptiblePolicy, endpoint: Endpoint) -> None:
        super().__init__(inner)
        self.inner: InterruptiblePolicy = inner
        self._family = family_of(endpoint)
        self.adapter = ""
        """Empty before the first request."""
        describe_as(self, inner)
        self._family.rollouts.add(self)

    def __repr__(self) -> str:
        return f"<RolloutAdapter {self.adapter or 'of no request yet'}>"

    async def interrupt(self) -> None:
        await self.inner.interrupt()

    async def complete(self, request: CompletionRequest) -> Completion:
        """See :class:`rollouts.inference.base.Policy`."""
        family = self._family
        if not self.adapter:
            continued = request.version if family.number(request.version) is not None else ""
            self.adapter = continued or family.current
        self.adapter = family.resolved(self.adapter)
        completion = await self.inner.complete(attrs.evolve(request, adapter=self.adapter))
        if not self.adapter and completion.versions:
            self.adapter = completion.versions[-1].version
        return completion


class AdapterSender(Sender):
    """Sends requests that name an adapter, after it has made sure that the server has it."""

    def __init__(self, servers: Servers, reachability: Reachability, totals: Totals) -> None:
        super().__init__(servers, reachability, totals)
        self.family = family_of(servers.endpoint)
        self.calls: set[Call] = set()
        self._routes = AdapterRoutes(servers.endpoint, servers.transport)
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._listed_at: dict[str, float] = {}
        self._checked: set[str] = set()
        """URLs of servers that are known to read the adapter of a request."""
        self.family.senders.add(self)

    async def check(self) -> None:
        """See :meth:`Sender.check`."""
        for worker in self.servers.workers.all:
            if not worker.unreachable:
                await self._make_sure(self.family.resolved(await self._newest(worker)), worker)

    async def _send(self, call: Call, worker: Worker, new_connection: bool) -> Completion:
        self.calls.add(call)
        try:
            await self._choose(call, worker)
            try:
                return await super()._send(call, worker, new_connection)
            except EndpointRefused:
                if call.running is not None or not await self._is_lost(call.adapter, worker):
                    raise
            await self._choose(call, worker)  # loads it again
            return await super()._send(call, worker, new_connection=True)
        finally:
            self.calls.discard(call)

    async def _choose(self, call: Call, worker: Worker) -> None:
        """Set the adapter of an attempt, and load it if the server has lost it."""
        while True:
            # Set before the first wait: an adapter that a call names is not unloaded.
            call.adapter = name = self.family.resolved(call.adapter or await self._newest(worker))
            await self._make_sure(name, worker)
            if self.family.resolved(name) == name:  # else an update came between
                break
        # A separate prefix cache for each content: vLLM 0.32.0 takes adapters of one name and folder for one
        # (v1/core/kv_cache_utils.py: _gen_lora_extra_hash_keys).
        version = self.family.versions.get(name)
        call.namespace = name if version is None or version.checksum is None else version.checksum

    async def _newest(self, worker: Worker) -> str:
        """The newest adapter of the family.

        Raises:
            EndpointRefused: the server has none.
        """
        if self.family.current:
            return self.family.current
        if time.monotonic() - self._listed_at.get(worker.url, -REFRESH_SECONDS) >= REFRESH_SECONDS:
            await self._list(worker)
        name = self.family.newest(self.family.present[worker.url])
        if not name:
            family = self.family.name
            raise EndpointRefused(
                f"{worker.name} has no LoRA adapter {family!r} or {family}-vN (Endpoint.lora): load one with"
                f" update_weights(endpoint, lora=FOLDER, name='{family}-v0')"
            )
        return name

    async def _list(self, worker: Worker) -> None:
        listed = await self._routes.listed(worker.url)
        members = {name: folder for name, folder in listed.items() if self.family.number(name) is not None}
        for name, folder in members.items():
            await self.family.learn(name, folder)
        self.family.present[worker.url] = set(members)
        self._listed_at[worker.url] = time.monotonic()

    async def _make_sure(self, name: str, worker: Worker) -> None:
        """Load an adapter that a server does not have.

        Raises:
            EndpointRefused: its folder is not known, has changed, or the server refuses it.
        """
        if name in self.family.present[worker.url] and worker.url in self._checked:
            return
        async with self._locks[worker.url]:
            if name not in self.family.present[worker.url]:
                await self._list(worker)
                if name not in self.family.present[worker.url]:
                    await self._load(name, worker)
            if worker.url not in self._checked:
                await self._routes.check_reads_adapters(worker.url)
                self._checked.add(worker.url)

    async def _load(self, name: str, worker: Worker) -> None:
        known = self.family.versions.get(name)
        if known is None:
            raise EndpointRefused(
                f"{worker.name} does not have the LoRA adapter {name!r}, with which this rollout began, and its folder"
                f" is not known: load it with update_weights(endpoint, lora=FOLDER, name={name!r})"
            )
        if known.checksum != await readable_checksum(known.folder):
            raise EndpointRefused(
                f"{worker.name} does not have the LoRA adapter {name!r}, and {known.folder} has changed since it was"
                " loaded: each version needs a folder that stays as it is"
            )
        await self._routes.load(worker.url, name, known.folder)
        self.family.present[worker.url].add(name)

    async def _is_lost(self, name: str, worker: Worker) -> bool:
        """Whether a server that refused a request does not have its adapter."""
        try:
            listed = await self._routes.listed(worker.url)
        except EndpointError:
            return False
        if name in listed:
            return False
        self.family.present[worker.url].clear()
        self._checked.discard(worker.url)
        return True

    def _named(self, completion: Completion, call: Call) -> Completion:
        """The completion with its adapter as the version of its tokens.

        Raises:
            EndpointRefused: the base weights changed, so that the adapter's name means another function.
        """
        if not completion.versions:
            return completion
        if self.family.base is None:
            self.family.base = completion.versions[0].version
        for span in completion.versions:
            if span.version != self.family.base:
                raise EndpointRefused(
                    f"{completion.server} has the base weights {span.version!r}; expected {self.family.base!r}, as in"
                    f" the replies of {call.adapter!r} before: adapters of other weights need another Endpoint.lora"
                )
        return attrs.evolve(completion, versions=(VersionSpan(call.adapter, 0, len(completion.tokens)),))
