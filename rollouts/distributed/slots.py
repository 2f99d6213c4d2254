"""Positions of workers: the requests of each, and which worker gets a new group.

Invariant: a request is in one slot, and ends once: by its records, or by an error. The deadlines around a request are
paused while its worker says that those of the rollout are. This module knows neither links nor prompts;
:mod:`dispatch` fills and empties the slots.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import anyio
import attrs

from rollouts.concurrency.deadlines import Clocks, listed_pause
from rollouts.distributed.server_reports import ServerReports
from rollouts.errors import GenerateFailure, RolloutsError
from rollouts.runs.record_bytes import Columns

__all__ = [
    "MESSAGE_BYTES",
    "PendingRequest",
    "Record",
    "Slot",
    "SlotEmpty",
    "State",
    "WorkerLeft",
    "WorkerSilent",
    "WorkerSlots",
]

MESSAGE_BYTES = 1 << 24
"""A message to a worker has no further requests after so many bytes; a worker reads at most 64 MiB at once."""


class WorkerSilent(GenerateFailure):
    """The worker that played a rollout gave no sign of life; another worker gets the rollout."""


class WorkerLeft(GenerateFailure):
    """The worker of a rollout left, or its slot stays empty; another worker gets the rollout."""


class SlotEmpty(GenerateFailure):
    """The slot of a rollout that no worker has got is empty, while another has a worker."""


Record: TypeAlias = tuple[dict[str, Any], Columns | None]


@attrs.define(eq=False)
class PendingRequest:
    """The records of one request that a worker plays."""

    error: RolloutsError | None = None
    clocks: Clocks = attrs.field(factory=Clocks)
    """The deadlines around the task that waits for them."""
    _records: deque[Record] = attrs.field(factory=deque)
    _changed: anyio.Event = attrs.field(factory=anyio.Event)

    def put(self, record: Record) -> None:
        self._records.append(record)
        self._changed.set()

    def fail(self, error: RolloutsError) -> None:
        self.error = error
        self._changed.set()

    async def next(self) -> Record:
        while not self._records:
            if self.error is not None:
                raise self.error
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._records.popleft()


class State(IntEnum):
    """State of a slot. A new group goes to the lowest state that a slot has."""

    ALIVE = 0
    AWAY = 1
    """Its worker waits for an inference server."""
    STARTING = 2
    SILENT = 3
    LEAVING = 4
    """Its worker finishes its rollouts and gets no others."""
    EMPTY = 5
    """Its worker left, and the others suffice."""
    FAILED = 6
    """No worker could start; the next attempt is later."""


@attrs.define(eq=False)
class Slot:
    """One of the worker positions: the worker that fills it now, and its requests."""

    number: int
    state: State = State.STARTING
    pending: dict[int, PendingRequest] = attrs.field(factory=dict)
    requests: dict[int, bytes] = attrs.field(factory=dict)
    """Encoded requests that are not sent yet."""
    cancelled: list[int] = attrs.field(factory=list)
    wanted: anyio.Event = attrs.field(factory=anyio.Event)
    leaves: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when the worker of now leaves."""
    released: anyio.Event = attrs.field(factory=anyio.Event)
    pause: float = 0.0
    """Seconds before the next start, because the worker is cut off."""
    has_started: bool = False
    deaths_without_result: int = 0

    @property
    def alive(self) -> bool:
        return self.state is State.ALIVE

    async def orders(self) -> tuple[list[bytes], list[int]]:
        """Wait for requests or cancellations; return all of them, but no more requests than a message should have."""
        while not (self.cancelled or (self.requests and not self.leaves.is_set())):
            self.wanted = anyio.Event()
            await self.wanted.wait()
        requests: list[bytes] = []
        size = 0
        if not self.leaves.is_set():  # else they wait for the next worker
            for request in self.requests.values():
                requests.append(request)
                size += len(request)
                if size >= MESSAGE_BYTES:
                    break
            for number in list(itertools.islice(self.requests, len(requests))):
                del self.requests[number]
        cancelled, self.cancelled = self.cancelled, []
        return requests, cancelled

    def submit(self, number: int, request: bytes) -> PendingRequest:
        self.requests[number] = request
        self.pending[number] = pending = PendingRequest()
        self.wanted.set()
        return pending

    def release(self, number: int, *, ended: bool) -> None:
        """Forget a request; cancel it in the worker unless it ended."""
        pending = self.pending.pop(number)
        pending.clocks.resume()
        if self.requests.pop(number, None) is None and not ended and pending.error is None:
            self.cancelled.append(number)
            self.wanted.set()
        self.released.set()

    def take_clocks(self, fields: Mapping[str, Any]) -> None:
        """Pause and resume deadlines as the worker says; a report of other fields or requests changes nothing."""
        for name, change in (("paused", Clocks.pause), ("running", Clocks.resume)):
            numbers = fields.get(name)
            for number in numbers if isinstance(numbers, list) else ():
                if isinstance(number, int) and number in self.pending:
                    change(self.pending[number].clocks)

    async def finished(self) -> None:
        """Wait until the worker plays no request."""
        while self.pending.keys() - self.requests.keys():
            self.released = anyio.Event()
            await self.released.wait()

    def fail(self, error: RolloutsError) -> None:
        """Fail all pending requests."""
        for pending in self.pending.values():
            pending.fail(error)
        self.cancelled.clear()

    def give_away(self, error: WorkerSilent | WorkerLeft | SlotEmpty, *, unsent: bool = False) -> int:
        """Fail the pending requests, and cancel them in the worker when it reads again. Return their number.

        Args:
            error: the reason.
            unsent: only the requests that the worker does not have.
        """
        of = self.requests if unsent else self.pending
        numbers = [number for number in of if self.pending[number].error is None]
        for number in numbers:
            self.pending[number].fail(error)
            if self.requests.pop(number, None) is None:
                self.cancelled.append(number)
        self.wanted.set()
        return len(numbers)


class WorkerSlots:
    """The slots of one run, and what their workers report of the inference servers.

    Args:
        count: number of slots.

    Attributes:
        reports: of the workers.
        given_away: number of rollouts that silent workers lost to the others.
    """

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]
        self._outage = _OutageOfAll()
        self._changed = anyio.Event()
        self.reports = ServerReports()
        self.given_away = 0

    def __repr__(self) -> str:
        return f"<WorkerSlots: {', '.join(slot.state.name for slot in self._slots)}>"

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the slots whose workers get new groups."""
        return tuple(slot.number for slot in self._slots if slot.alive)

    def of_new_group(self) -> Slot:
        """The best slot, of those the one with the fewest requests."""
        return min(self._slots, key=lambda one: (one.state, len(one.pending)))

    def set(self, slot: Slot, state: State) -> None:
        """Change the state of a slot."""
        if slot.state is not state:
            slot.state = state
            self._outage.look(self._slots, self.reports.reason)
            self.notify()

    def set_present(self, slot: Slot) -> None:
        """The worker of a slot gives signs of life."""
        self.set(slot, State.AWAY if self.reports.is_away(slot.number) else State.ALIVE)

    def set_silent(self, slot: Slot, error: WorkerSilent) -> None:
        """Give the requests of a silent worker away, if another worker may get them and it does not leave."""
        if slot.leaves.is_set() or not any(other.alive for other in self._slots if other is not slot):
            return
        self.set(slot, State.SILENT)
        self.given_away += slot.give_away(error)

    def give_unsent(self) -> None:
        """Give away the requests that wait for workers in slots without one: a new worker filled another."""
        for slot in self._slots:
            if slot.state in (State.STARTING, State.EMPTY, State.FAILED):
                slot.give_away(SlotEmpty(f"another worker started before worker {slot.number}"), unsent=True)

    def notify(self) -> None:
        """Wake every :meth:`changed`."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Wait until a state changes."""
        await self._changed.wait()

    def close(self) -> None:
        """End the pause that is listed."""
        self._outage.close()


class _OutageOfAll:
    """Lists a pause while no worker is answered, so that no new group starts in the manager's process."""

    def __init__(self) -> None:
        self._listed: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        return f"<OutageOfAll: {'not ' if self._listed is None else ''}listed>"

    def look(self, slots: Sequence[Slot], reason_of: Callable[[int], str]) -> None:
        """Begin or end the pause: a new group would go to a worker that waits for a server.

        Args:
            slots: of all workers.
            reason_of: returns why the worker with a number waits.
        """
        away = [slot for slot in slots if slot.state is State.AWAY]
        if not away or any(slot.alive for slot in slots):
            self.close()
        elif self._listed is None:
            self._listed = contextlib.ExitStack()
            what = f"no worker is answered: {reason_of(away[0].number)}"
            waiting = functools.partial(_pending, slots)
            self._listed.enter_context(listed_pause(what, waiting, blocks_new_work=True))

    def close(self) -> None:
        """End the pause."""
        if self._listed is not None:
            self._listed.close()
            self._listed = None


def _pending(slots: Sequence[Slot]) -> int:
    return sum(len(slot.pending) for slot in slots)
