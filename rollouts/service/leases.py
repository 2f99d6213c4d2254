"""Leases of whole groups: a consumer takes groups, trains on them, and acknowledges them.

Invariants:

1. A group is in at most one acknowledged lease.
2. A lease that is not acknowledged returns its groups, whole, after its time or when the log is opened again.
3. A token is a fencing number: tokens grow, also over restarts. A token whose lease has ended changes nothing.
4. An acknowledgement is on disk before :meth:`Leases.acknowledge` returns. Repeating it changes nothing, also after a
   restart.
5. Versions are announced in order; repeating the last one changes nothing. A group that is too old when it would be
   delivered, for the first time or after its lease returned, is dropped and counted instead.
6. At most ``groups_in_work`` groups are ready or leased, unless more were restored.

The only clock is that of the event loop, which does not change with the clock of the machine. Where the groups come
from, and how they are stored, is not known here.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import attrs

from rollouts.base.validators import is_int, is_number
from rollouts.errors import ConfigError, DataExhausted, RolloutsError
from rollouts.service.lease_log import LeaseLog
from rollouts.training.staleness import Staleness
from rollouts.training.types import Sample

__all__ = ["Lease", "LeaseLost", "Leases"]

_TOKENS = 1 << 32
"""Tokens of one opening of the log."""
_MOST_STEPS = 1 << 63
_LEASE_SECONDS = 600.0
_MOST_SECONDS = 604_800.0


class LeaseLost(RolloutsError):
    """The lease of this token has ended: its time is over, or it was released, or the log was opened again."""


@attrs.frozen(eq=False)
class Lease:
    """Groups that one consumer has."""

    token: int
    groups: tuple[int, ...]
    """Indices of the groups, in order."""
    samples: tuple[Sample, ...]
    """Samples of whole groups, by group, then by rollout."""
    consumer: str


@attrs.define(eq=False)
class _Held:
    """A lease that has not ended."""

    lease: Lease
    groups: Mapping[int, tuple[Sample, ...]]
    ends: float
    """Time of the event loop, in seconds."""
    is_written: bool = False
    """Whether its acknowledgement is being written, so that it does not return its groups."""


class Leases:
    """Groups that are ready, leased and acknowledged, with a log that survives the process.

    Args:
        path: file of the log.
        groups_in_work: most groups that are ready or leased.
        max_staleness: maximum number of versions between the weights that sampled a token and the current ones.
        batch_size: number of groups that are added at once, when there is room for all of them.
        run: names the run whose groups these are; a log belongs to one run.

    Attributes:
        acknowledged: token of the acknowledged lease of each group, by index.
        dropped: number of dropped groups by reason.

    Raises:
        ConfigError: an argument is invalid, another process writes to the log, or the log is of another run.
        JournalError: the log is damaged, or cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        groups_in_work: int,
        max_staleness: int | None = None,
        batch_size: int = 1,
        run: str | None = None,
    ) -> None:
        if not is_int(groups_in_work, 1):
            raise ConfigError.of("groups_in_work", groups_in_work, "an integer >= 1")
        if not is_int(batch_size, 1) or batch_size > groups_in_work:
            raise ConfigError.of("batch_size", batch_size, f"an integer from 1 to groups_in_work, {groups_in_work}")
        self.groups_in_work = groups_in_work
        self._batch_size = batch_size
        self.acknowledged: dict[int, int] = {}
        self.dropped: Counter[str] = Counter()
        self._staleness = Staleness(max_staleness=max_staleness)
        self._versions: list[str] = []
        self._version_is_stored = True
        self._settled_tokens: set[int] = set()
        self._dropped_groups: set[int] = set()
        self._ready: dict[int, tuple[Sample, ...]] = {}
        self._held: dict[int, _Held] = {}
        self._end: RolloutsError | None = None
        self._end_trace: TracebackType | None = None
        self._changed = anyio.Event()
        self._writing = anyio.Lock()
        self._next_token = _TOKENS
        self._log = LeaseLog(Path(path), functools.partial(self._replay, run, path))
        try:
            self._log.append({"kind": "opened", "run": run})
        except BaseException:
            self._log.close()
            raise

    def __repr__(self) -> str:
        return (
            f"<Leases: {len(self._ready)} groups ready, {self.leased} leased, {len(self.acknowledged)} acknowledged, "
            f"{self.dropped.total()} dropped>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()

    def _replay(self, run: str | None, path: str | Path, record: Mapping[str, Any]) -> None:
        """Apply a record of an earlier process."""
        match record["kind"]:
            case "opened":
                if run is not None and (name := record.get("run")) not in (None, run):
                    raise ConfigError.of("leases", f"{path} of the run {name}", f"the log of this run, {run}")
                self._next_token += _TOKENS
            case "acknowledged":
                self._settled_tokens.add(record["token"])
                self.acknowledged.update(dict.fromkeys(record["groups"], record["token"]))
            case "dropped":
                self._dropped_groups.update(record["groups"])
                self.dropped[record["reason"]] += len(record["groups"])
            case "version" if record["name"] != self.version:  # it is there twice, if a wait for it was cancelled
                self._versions.append(record["name"])
                self._staleness.announce(record["name"])

    # -- the producer --

    @property
    def room(self) -> int:
        """Number of groups that may be added."""
        return self.groups_in_work - len(self._ready) - self.leased

    @property
    def leased(self) -> int:
        """Number of groups that consumers have."""
        return sum(len(held.lease.groups) for held in self._held.values())

    @property
    def ready(self) -> int:
        """Number of groups that may be leased."""
        return len(self._ready)

    @property
    def version(self) -> str | None:
        """The last announced version."""
        return self._versions[-1] if self._versions else None

    @property
    def ended(self) -> RolloutsError | None:
        """Why no more groups come; ``None`` while they do."""
        return self._end

    async def room_for(self, groups: int) -> None:
        """Wait until some groups may be added."""
        while self.room < groups:
            await self._changed.wait()

    def add(self, groups: Mapping[int, Sequence[Sample]]) -> None:
        """Make groups ready.

        Args:
            groups: the samples of whole groups by index. They are stored, so that another process can restore them.

        Raises:
            ConfigError: there is no room, or a group was added before.
        """
        if len(groups) > self.room:
            raise ConfigError.of("groups", len(groups), f"at most {self.room}, the room of {self!r}")
        leased = {number for held in self._held.values() for number in held.lease.groups}
        for number in groups:
            if number in self._ready or number in leased or self.is_done(number):
                raise ConfigError.of("group", number, "an index that was not added before")
        self._add(groups)

    def restore(self, groups: Mapping[int, Sequence[Sample]]) -> None:
        """Make the groups of an earlier process ready that are neither acknowledged nor dropped."""
        self._add({number: samples for number, samples in groups.items() if not self.is_done(number)})

    def is_done(self, group: int) -> bool:
        """Whether a group was acknowledged or dropped."""
        return group in self.acknowledged or group in self._dropped_groups

    def finish(self, error: RolloutsError | None = None) -> None:
        """No more groups come; :meth:`take` raises the error, or DataExhausted, when no group is left."""
        self._end = error or DataExhausted("every group was acknowledged or dropped, and no more groups come")
        self._end_trace = self._end.__traceback__
        self._notify()

    def _add(self, groups: Mapping[int, Sequence[Sample]]) -> None:
        for number, samples in groups.items():
            self._staleness.observe(_versions(samples), earlier=bool(self._versions))
            self._ready[number] = tuple(samples)
        self._notify()

    # -- the consumer --

    async def take(
        self,
        groups: int,
        *,
        lease_seconds: float = _LEASE_SECONDS,
        wait_seconds: float = 0.0,
        consumer: str = "",
    ) -> Lease | None:
        """Lease the oldest ready groups.

        Args:
            groups: number of groups, at most ``groups_in_work - batch_size + 1``: with so many ready, a batch may have
                no room. At the end of the data, the lease has the rest.
            lease_seconds: time after which the groups return unless the lease is acknowledged or renewed.
            wait_seconds: longest wait for groups.
            consumer: a name for :meth:`held`.

        Returns:
            The lease; ``None`` if too few groups were ready in time.

        Raises:
            DataExhausted: every group was acknowledged or dropped, and no more groups come.
            ConfigError: an argument is invalid.
            JournalError: the log cannot be written.
        """
        most = self.groups_in_work - self._batch_size + 1
        if not is_int(groups, 1) or groups > most:
            numbers = f"groups_in_work, {self.groups_in_work}, - batch_size, {self._batch_size}, + 1"
            raise ConfigError.of("groups", groups, f"an integer from 1 to {most} ({numbers})")
        _check_seconds(lease_seconds)
        if not is_number(wait_seconds) or wait_seconds < 0:
            raise ConfigError.of("wait_seconds", wait_seconds, "a number of seconds >= 0")
        until = anyio.current_time() + wait_seconds
        while True:
            self._return_ended()
            await self._drop_stale()
            if len(self._ready) >= groups or (self._end is not None and self._ready):
                return self._lend(groups, lease_seconds, consumer)
            if self._end is not None and not self._held:
                raise self._end.with_traceback(self._end_trace)  # else each raise lengthens the last one's
            if (left := until - anyio.current_time()) <= 0:
                return None
            ends = (held.ends for held in self._held.values() if not held.is_written)
            next_end = min(ends, default=math.inf) - anyio.current_time()
            with anyio.move_on_after(max(0.0, min(left, next_end))):
                await self._changed.wait()

    async def acknowledge(self, token: int, *, step: int | None = None) -> None:
        """Record that a lease was trained on; returns when the record is on disk.

        Args:
            token: of the lease.
            step: the trainer's step, stored with the record.

        Raises:
            LeaseLost: the lease has ended; nothing changed.
            ConfigError: the step is not an integer >= 0; nothing changed.
            JournalError: the log cannot be written; it is unknown whether the record is stored. No further call writes.
        """
        if step is not None and not (is_int(step, 0) and step < _MOST_STEPS):
            raise ConfigError.of("step", step, "an integer >= 0 of 64 bits, or None")  # else the log refuses the record
        async with self._writing:
            if token in self._settled_tokens:
                return
            held = self._current(token)
            held.is_written = True
            groups = held.lease.groups
            record = {"kind": "acknowledged", "token": token, "groups": groups, "step": step}
            settle, keep = functools.partial(self._settle, token, groups), functools.partial(self._keep, held)
            await self._log.store(record, settle, keep)

    def renew(self, token: int, *, lease_seconds: float = _LEASE_SECONDS) -> None:
        """Let a lease end some seconds from now.

        Raises:
            LeaseLost: the lease has ended.
        """
        _check_seconds(lease_seconds)
        self._current(token).ends = anyio.current_time() + lease_seconds
        self._notify()

    def release(self, token: int) -> None:
        """Return the groups of a lease.

        Raises:
            LeaseLost: the lease has ended.
        """
        held = self._current(token)
        if held.is_written:
            raise LeaseLost(f"lease {token} is being acknowledged")
        self._return(held)

    def lease(self, token: int) -> Lease:
        """The lease of a token; raises LeaseLost if it has ended."""
        return self._current(token).lease

    def held(self, consumer: str | None = None) -> list[Lease]:
        """The leases that have not ended, of one consumer or of all."""
        self._return_ended()
        return [held.lease for held in self._held.values() if consumer in (None, held.lease.consumer)]

    async def announce_version(self, version: str) -> None:
        """Record the version of the weights from now on, before servers use it; the record is on disk on return.

        Raises:
            ConfigError: it is an earlier version.
            JournalError: the log cannot be written.
        """
        if not isinstance(version, str) or not version:
            raise ConfigError.of("version", version, "a name")
        async with self._writing:
            if self._versions[-1:] != [version]:
                self._staleness.announce(version)
                self._versions.append(version)
                self._version_is_stored = False
            if not self._version_is_stored:
                await self._log.store({"kind": "version", "name": version}, functools.partial(self._stored, version))

    # -- inside --

    def _lend(self, groups: int, lease_seconds: float, consumer: str) -> Lease:
        lent = {number: self._ready.pop(number) for number in sorted(self._ready)[:groups]}
        samples = tuple(sample for group in lent.values() for sample in group)
        lease = Lease(self._next_token, tuple(lent), samples, consumer)
        self._next_token += 1
        self._held[lease.token] = _Held(lease, lent, anyio.current_time() + lease_seconds)
        return lease

    def _current(self, token: int) -> _Held:
        self._return_ended()
        held = self._held.get(token)
        if held is None:
            raise LeaseLost(f"lease {token} has ended, and its groups are ready again or belong to another lease")
        return held

    def _return_ended(self) -> None:
        now = anyio.current_time()
        for held in [held for held in self._held.values() if held.ends <= now and not held.is_written]:
            self._return(held)

    def _return(self, held: _Held) -> None:
        del self._held[held.lease.token]
        self._ready.update(held.groups)
        self._notify()

    async def _drop_stale(self) -> None:
        while stale := [number for number, samples in self._ready.items() if self._is_stale(samples)]:
            for number in stale:
                del self._ready[number]
            self._dropped_groups.update(stale)
            self.dropped["too old"] += len(stale)
            self._notify()
            async with self._writing:  # meanwhile, a version may be announced
                await self._log.store({"kind": "dropped", "groups": stale, "reason": "too old"})

    def _is_stale(self, samples: Iterable[Sample]) -> bool:
        return self._staleness.drops and self._staleness.too_old(self._staleness.age_of(_versions(samples)))

    def _settle(self, token: int, groups: Iterable[int]) -> None:
        self._settled_tokens.add(token)
        self.acknowledged.update(dict.fromkeys(groups, token))
        self._held.pop(token, None)
        self._notify()

    def _keep(self, held: _Held) -> None:
        held.is_written = False
        self._notify()

    def _stored(self, version: str) -> None:
        self._version_is_stored = version == self.version

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _versions(samples: Iterable[Sample]) -> list[str]:
    return [span.version for sample in samples for span in sample.read_record("versions")]


def _check_seconds(lease_seconds: float) -> None:
    if not is_number(lease_seconds) or not 0 < lease_seconds <= _MOST_SECONDS:
        expected = f"a number of seconds > 0, and at most {_MOST_SECONDS:g} (a week): renew the lease"
        raise ConfigError.of("lease_seconds", lease_seconds, expected)
