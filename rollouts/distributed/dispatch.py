"""The manager's side: distribute groups among worker processes, and replace workers that die.

Invariant: the rollouts of one group go to one worker. Every requested rollout returns once or fails: a rollout whose
worker died fails with :class:`~rollouts.errors.GenerateFailure`, and the config's failure policy retries it. If a
worker cannot be replaced, the others do its work. Scheduling, accounting, filter and journal belong to the manager.

With a range of workers, the run begins when the minimum has started; the other slots start when there is room, and get
the next groups. A worker that leaves gets no new rollouts, has :data:`LEAVE_SECONDS` to finish, and costs no attempt:
other workers play the rest. Its slot stays empty while the minimum is there.

A worker without a sign of life (stopped, or in a native deadlock) loses its rollouts to the other workers. The number
of a request is a fencing number: a rollout that another worker gets has a new number, and a late result with the old
number is refused.

This module does not know transports: :mod:`processes` and :mod:`ray` each provide one. "Worker" means a process or
actor that plays rollouts, never an inference server or a thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.agent.turn_log import TurnLog
from rollouts.base.validators import is_int
from rollouts.concurrency.fair_turns import FairTurns
from rollouts.distributed.messages import PICKLED, OrderFormat, Request, received_sample, received_turn
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, EndpointAway, GenerateFailure, RolloutsError, TokenMismatchError, shortened
from rollouts.runs.record_bytes import Columns, read_framed
from rollouts.training.config import RolloutConfig
from rollouts.training.types import Sample

__all__ = ["LEAVE_SECONDS", "MESSAGE_BYTES", "SILENT_SECONDS", "Connect", "Dispatcher", "Link", "LinkLost", "Workers"]

_DEATHS_WITHOUT_RESULT = 3
"""Deaths in a row in one slot, without a record from any of its workers, after which the run fails."""
_NEXT_START_SECONDS = 10.0
"""Pause between attempts to replace a worker while others are alive."""
SILENT_SECONDS = 5.0
LEAVE_SECONDS = 20.0
"""Time of a worker that leaves to finish its rollouts; schedulers usually kill a process 30 s after SIGTERM."""
MESSAGE_BYTES = 1 << 24
"""A message to a worker has no further requests after so many bytes; a worker reads at most 64 MiB at once."""
_TICKS = 5
"""Silence is counted in waits of a fifth of the limit: a stopped parent then counts one wait, not its whole pause."""
_REPLACED_AFTER = 12
"""A worker that is silent for this multiple of the limit is killed and replaced."""
_REMEMBERED_GROUPS = 20_000
"""More groups than are in flight; a group may have no rollout in flight for a while, e.g. before a replacement."""
_MOST_DEPARTURES = 20
"""Departures of its worker that a rollout survives without costing an attempt: a worker that leaves under every rollout
that it gets would otherwise be asked for ever."""
_TRANSIT_SECONDS = 60.0
"""Added to a rollout's deadline, for the messages to its worker and back."""


class LinkLost(RolloutsError):
    """The worker at the other end has ended."""


class WorkerSilent(GenerateFailure):
    """The worker that played a rollout gave no sign of life; another worker gets the rollout."""


class WorkerLeft(GenerateFailure):
    """The worker of a rollout left, or its slot stays empty; another worker gets the rollout."""


class SlotEmpty(GenerateFailure):
    """The slot of a rollout that no worker has got is empty, while another has a worker."""


class Link(Protocol):
    """A connection to one worker that is ready."""

    async def send(self, message: bytes) -> None:
        """Send a message; raises LinkLost."""

    async def receive(self) -> bytes:
        """Wait for a message; raises LinkLost, whose text gives the reason."""
        ...

    async def beat(self) -> None:
        """Wait for the next sign of life; a worker that plays rollouts gives one several times per limit."""

    async def aclose(self) -> None:
        """End the worker, if it has not ended."""


Connect: TypeAlias = Callable[[int], Awaitable[Link]]
"""Starts the worker with a number; raises ConfigError if it cannot start."""

Workers: TypeAlias = int | tuple[int, int]
"""A number of workers, all of which must start before the run begins; or the minimum and the maximum."""

Record: TypeAlias = tuple[dict[str, Any], Columns | None]


@attrs.define(eq=False)
class _PendingRequest:
    """The records of one request that a worker plays."""

    error: RolloutsError | None = None
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


class _State(IntEnum):
    """State of a slot. A new group goes to the lowest state that a slot has."""

    ALIVE = 0
    STARTING = 1
    SILENT = 2
    LEAVING = 3
    """Its worker finishes its rollouts and gets no others."""
    EMPTY = 4
    """Its worker left, and the others suffice."""
    FAILED = 5
    """No worker could start; the next attempt is later."""


@attrs.define(eq=False)
class _Slot:
    """One of the worker positions: the worker that fills it now, and its requests."""

    number: int
    state: _State = _State.STARTING
    pending: dict[int, _PendingRequest] = attrs.field(factory=dict)
    requests: dict[int, bytes] = attrs.field(factory=dict)
    """Encoded requests that are not sent yet."""
    cancelled: list[int] = attrs.field(factory=list)
    wanted: anyio.Event = attrs.field(factory=anyio.Event)
    leaves: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when the worker of now leaves."""
    released: anyio.Event = attrs.field(factory=anyio.Event)
    has_started: bool = False
    deaths_without_result: int = 0

    @property
    def alive(self) -> bool:
        return self.state is _State.ALIVE

    async def orders(self) -> tuple[list[bytes], list[int]]:
        """Wait for requests or cancellations; return all of them, but no more requests than a message should have."""
        while not (self.cancelled or (self.requests and not self.leaves.is_set())):
            self.wanted = anyio.Event()
            await self.wanted.wait()
        requests: list[bytes] = []
        size = 0
        while self.requests and size < MESSAGE_BYTES and not self.leaves.is_set():  # others wait for the next worker
            requests.append(self.requests.pop(next(iter(self.requests))))
            size += len(requests[-1])
        cancelled, self.cancelled = self.cancelled, []
        return requests, cancelled

    def submit(self, number: int, request: bytes) -> _PendingRequest:
        self.requests[number] = request
        self.pending[number] = pending = _PendingRequest()
        self.wanted.set()
        return pending

    def release(self, number: int, *, ended: bool) -> None:
        """Forget a request; cancel it in the worker unless it ended."""
        pending = self.pending.pop(number)
        if self.requests.pop(number, None) is None and not ended and pending.error is None:
            self.cancelled.append(number)
            self.wanted.set()
        self.released.set()

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


class Dispatcher:
    """Plays rollouts in workers while its context is open.

    ::

        async with in_processes(factory, workers=4) as workers:
            config = workers.config(factory())
            async with AsyncRolloutManager(config, data_buffer) as manager: ...

    Args:
        connect: starts a worker.
        workers: number of workers, or the minimum and the maximum.
        silent_seconds: time without a sign of life after which a worker's rollouts go to the others.
        orders: the format of messages to workers.
        refills: whether the slot of a worker that left is open for the next one at once, where workers join by
            themselves; by default it stays empty while the minimum is there.

    Attributes:
        rollouts: number of rollouts that workers returned.
        messages: number of messages received.
        bytes: size of those messages.
        deaths: number of workers that died.
        departures: number of workers that left.
        given_away: number of rollouts that a silent worker lost to the others.
        refused: number of late records of such rollouts.

    Raises:
        ConfigError: on entering, if the minimum of workers cannot start.
    """

    def __init__(
        self,
        connect: Connect,
        workers: Workers,
        *,
        silent_seconds: float = SILENT_SECONDS,
        orders: OrderFormat = PICKLED,
        refills: bool = False,
    ) -> None:
        if not 0 < silent_seconds < float("inf"):
            raise ConfigError.of("silent_seconds", silent_seconds, "a number of seconds > 0")
        self._minimum, maximum = _checked(workers)
        self._connect = connect
        self._orders = orders
        self._refills = refills
        self._slots = [_Slot(number) for number in range(maximum)]
        self._changed = anyio.Event()
        self._entered = False
        self._group_slots: dict[int, _Slot] = {}
        self._numbers = itertools.count()
        self._tasks: TaskGroup | None = None
        self._broken: RolloutsError | None = None
        self.rollouts = 0
        self.messages = 0
        self.bytes = 0
        self.deaths = 0
        self.departures = 0
        self.given_away = 0
        self.refused = 0
        self._silent_seconds = silent_seconds
        self._turns = FairTurns()

    def __repr__(self) -> str:
        loads = ", ".join(str(len(slot.pending)) for slot in self._slots)
        alive = sum(slot.alive for slot in self._slots)
        return f"<Dispatcher: {loads} rollouts in {alive} of {len(self._slots)} workers, {self.deaths} deaths>"

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the workers that get new groups."""
        return tuple(slot.number for slot in self._slots if slot.alive)

    def numbers(self) -> dict[str, int]:
        """Gauges of the workers, for telemetry."""
        return {
            "workers": len(self.alive),
            "workers_most": len(self._slots),
            "outstanding": sum(len(slot.pending) for slot in self._slots),
            "worker_deaths": self.deaths,
            "worker_departures": self.departures,
        }

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for slot in self._slots:
                self._tasks.start_soon(self._supervise, slot)
            while self._broken is None and sum(slot.has_started for slot in self._slots) < self._minimum:
                await self._changed.wait()
            if self._broken is not None:
                raise self._broken
            self._entered = True
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)

    def drain(self, number: int) -> None:
        """Let a worker leave: it finishes its rollouts for at most :data:`LEAVE_SECONDS`, and others play the rest.

        Its slot stays empty while the minimum of workers is there. Without a worker in the slot, nothing changes.

        Raises:
            ConfigError: no slot has this number.
        """
        if not is_int(number, 0) or number >= len(self._slots):
            raise ConfigError.of("drain(number)", number, f"the number of a worker, 0 to {len(self._slots) - 1}")
        slot = self._slots[number]
        if slot.state in (_State.ALIVE, _State.SILENT):
            self._leave(slot)

    def config(self, config: RolloutConfig) -> RolloutConfig:
        """The config with generation and reward in the workers.

        A reward that scores whole groups runs in this process, as the filter does.
        """
        seconds = config.rollout_seconds + _TRANSIT_SECONDS + (0.0 if config.group_rm else config.reward_seconds)
        reward_fn = config.reward_fn if config.group_rm else None
        return attrs.evolve(config, generate_fn=self.generate, reward_fn=reward_fn, rollout_seconds=seconds)

    async def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Play one rollout per prompt, in sequence; the ``generate_fn`` of :meth:`config`.

        Raises:
            GenerateFailure: the worker died.
            ConfigError: a worker reported a config error, or workers cannot start.
            EndpointAway: no server answered a worker for too long.
        TokenMismatchError: a law was broken in a worker.
        """
        return [sample for prompt in prompts for sample in await self._play(prompt)]

    async def _play(self, prompt: Prompt) -> list[Sample]:
        log: TurnLog | None = prompt.turn_log
        if log is not None:
            log = await log.claim()
        if self._tasks is None:
            raise RuntimeError("Dispatcher.generate: workers play only while the context is open")
        if self._broken is not None:
            raise self._broken
        was_silent, departures = False, 0
        while True:
            try:
                return await self._play_once(prompt, log)
            except SlotEmpty:
                continue
            except WorkerLeft:  # probably not the rollout's fault either
                departures += 1
                if departures > _MOST_DEPARTURES:
                    raise
            except WorkerSilent:  # probably not the rollout's fault: once more, without costing an attempt
                if was_silent:
                    raise
                was_silent = True
            if log is not None:
                await log.claim()  # a second claim ends the logging of this rollout
                log = None

    async def _play_once(self, prompt: Prompt, log: TurnLog | None) -> list[Sample]:
        number, ended = next(self._numbers), False
        request = self._orders.encode(Request(number, prompt, log is not None, log.turns if log is not None else ()))
        slot = self._slot_for(prompt.group_index)
        pending = slot.submit(number, request)
        try:
            samples = await _receive_samples(pending, prompt, log)
            ended = True
        finally:
            slot.release(number, ended=ended)
        self.rollouts += 1
        return samples

    def _slot_for(self, group: int | None) -> _Slot:
        """The slot of a group; for a new group, or without its worker, the one with the fewest requests."""
        slot = None if group is None else self._group_slots.get(group)
        if slot is None or not slot.alive:
            slot = min(self._slots, key=lambda one: (one.state, len(one.pending)))
        if group is not None:
            self._group_slots[group] = slot
            if len(self._group_slots) > _REMEMBERED_GROUPS:
                del self._group_slots[next(iter(self._group_slots))]
        return slot

    # -- supervision --

    async def _supervise(self, slot: _Slot) -> None:
        """Keep a worker in this slot: start one, and another when it dies."""
        try:
            while self._broken is None:
                link = await self._connected(slot)
                if link is None:
                    continue
                slot.leaves, slot.has_started = anyio.Event(), True
                self._set(slot, _State.ALIVE)
                _give_unsent(self._slots)
                try:
                    lost = await self._serve(slot, link)
                finally:
                    self._set(slot, _State.STARTING)
                if lost is None:
                    await self._left(slot)
                    continue
                self.deaths += 1
                slot.deaths_without_result += 1
                slot.fail(GenerateFailure(str(lost)))
                if slot.deaths_without_result >= _DEATHS_WITHOUT_RESULT:
                    deaths = slot.deaths_without_result
                    error = ConfigError(f"{deaths} workers in a row died before they returned a rollout: {lost}")
                    await self._pause(slot, error, needs=self._minimum)
        except RolloutsError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours: raised to the callers, not by the task group
            broken = TokenMismatchError(f"supervising worker {slot.number} raised {type(error).__name__}: {error}")
            broken.__cause__ = error
            self._break(broken)

    async def _connected(self, slot: _Slot) -> Link | None:
        """Start a worker for this slot; ``None``, after a pause, if that fails and others can do its work."""
        try:
            return await self._connect(slot.number)
        except ConfigError as error:
            await self._pause(slot, error, needs=1 if self._entered else self._minimum)
            return None

    async def _pause(self, slot: _Slot, error: ConfigError, *, needs: int) -> None:
        """Wait before the next start in this slot; raises the error if fewer than ``needs`` other slots have hope."""
        self._set(slot, _State.FAILED)
        if sum(other.state is not _State.FAILED for other in self._slots) < needs:
            raise error
        slot.give_away(WorkerLeft(str(error)))
        await anyio.sleep(_NEXT_START_SECONDS)
        self._set(slot, _State.STARTING)

    async def _left(self, slot: _Slot) -> None:
        """Give a worker's rollouts to the others, and wait until the slot is needed again."""
        self.departures += 1
        self._set(slot, _State.EMPTY)
        slot.give_away(WorkerLeft(f"worker {slot.number} left"))
        slot.cancelled.clear()
        while not self._refills and sum(other.state <= _State.SILENT for other in self._slots) >= self._minimum:
            await self._changed.wait()
        self._set(slot, _State.STARTING)

    def _leave(self, slot: _Slot) -> None:
        self._set(slot, _State.LEAVING)
        slot.leaves.set()
        slot.give_away(WorkerLeft(f"worker {slot.number} leaves"), unsent=True)

    def _set(self, slot: _Slot, state: _State) -> None:
        if slot.state is not state:
            slot.state = state
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _break(self, error: RolloutsError) -> None:
        self._broken = self._broken or error
        for slot in self._slots:
            slot.fail(self._broken)
        self._notify()

    async def _serve(self, slot: _Slot, link: Link) -> LinkLost | None:
        """Send and receive until the worker has ended; return the reason, ``None`` if it left."""
        lost: list[LinkLost] = []

        async def send() -> None:
            try:
                while True:
                    await link.send(self._orders.join(*await slot.orders()))
            except LinkLost:
                return  # receive() reports the reason

        async def receive() -> None:
            try:
                while True:
                    await self._read(slot, await link.receive())
            except LinkLost as error:
                if not slot.leaves.is_set():
                    self._set(slot, _State.STARTING)  # before the cleanup: no new group may come here
                lost.append(error)
                tasks.cancel_scope.cancel()

        async def leave() -> None:
            await slot.leaves.wait()
            with anyio.move_on_after(LEAVE_SECONDS):
                await slot.finished()
            slot.give_away(WorkerLeft(f"worker {slot.number} left"))
            tasks.cancel_scope.cancel()

        async def watch() -> None:
            waits = 0
            while waits < _TICKS * _REPLACED_AFTER:
                with anyio.move_on_after(self._silent_seconds / _TICKS) as wait:
                    await link.beat()
                if not wait.cancelled_caught:
                    waits = 0
                    if slot.state is _State.SILENT:
                        self._set(slot, _State.ALIVE)
                    continue
                waits += 1
                others = any(other.alive for other in self._slots if other is not slot)
                if waits >= _TICKS and others and not slot.leaves.is_set():
                    self._set(slot, _State.SILENT)
                    error = WorkerSilent(f"worker {slot.number} gave no sign of life for {self._silent_seconds:g} s")
                    self.given_away += slot.give_away(error)
            self._set(slot, _State.STARTING)
            seconds = self._silent_seconds * _REPLACED_AFTER
            lost.append(LinkLost(f"worker {slot.number} gave no sign of life for {seconds:g} s and is replaced"))
            tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                tasks.start_soon(receive)
                tasks.start_soon(watch)
                tasks.start_soon(leave)
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()
        return None if slot.leaves.is_set() else lost[0]

    async def _read(self, slot: _Slot, message: bytes) -> None:
        """Take the records of a message; raises LinkLost if it has something else."""
        self.messages += 1
        self.bytes += len(message)
        records = read_framed(message)
        while True:
            await self._turns.passed()  # a record ends a rollout, whose checks follow in the next turn of the loop
            record = _next(records, slot.number)
            if record is None:
                return
            slot.deaths_without_result = 0
            fields, columns = record
            if fields["kind"] == "leaving":
                self._leave(slot)
                continue
            pending = slot.pending.get(fields["number"])
            if pending is not None and pending.error is None:
                pending.put((fields, columns))
            else:  # it was given to another worker, or its caller was cancelled
                self.refused += 1


def _give_unsent(slots: Sequence[_Slot]) -> None:
    """Give away the requests that wait for workers in slots without one: a new worker filled another."""
    for slot in slots:
        if slot.state in (_State.STARTING, _State.EMPTY, _State.FAILED):
            slot.give_away(SlotEmpty(f"another worker started before worker {slot.number}"), unsent=True)


def _next(records: Iterator[Record], worker: int) -> Record | None:
    """The next record of a message; raises LinkLost for anything else."""
    try:
        record = next(records, None)
        if record is not None:
            _ = record[0]["kind"], int(record[0]["number"])
    except Exception as error:
        raise LinkLost(f"worker {worker} sent no record, but {shortened(error)}") from error
    return record


def _checked(workers: Workers) -> tuple[int, int]:
    """The minimum and the maximum."""
    bounds = workers if isinstance(workers, tuple) else (workers, workers)
    if len(bounds) != 2 or not all(is_int(bound, 1) for bound in bounds) or bounds[0] > bounds[1]:
        raise ConfigError.of("workers", workers, "an integer >= 1, or a tuple of a minimum and a maximum")
    return bounds


async def _receive_samples(pending: _PendingRequest, prompt: Prompt, log: TurnLog | None) -> list[Sample]:
    """Wait for the samples of a request; save its turns in the log as they arrive."""
    samples: list[Sample] = []
    while True:
        fields, columns = await pending.next()
        match fields["kind"]:
            case "turn" if log is not None and columns is not None:
                await log.save(received_turn(fields["of"], columns))
            case "reset" if log is not None:
                await log.claim()  # a second claim ends the logging of this rollout
            case "broken":
                raise _BROKEN.get(fields["error"], TokenMismatchError)(fields["message"])
            case "sample" if columns is not None:
                samples.append(received_sample(fields["sample"], columns, prompt))
                if len(samples) == fields["branches"]:
                    return samples


_BROKEN: dict[str, type[RolloutsError]] = {"ConfigError": ConfigError, "EndpointAway": EndpointAway}
