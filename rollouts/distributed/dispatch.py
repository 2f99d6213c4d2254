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

While the deadlines of a rollout are paused in its worker, because it waits for a server, those around it are paused
here, as in one process.

A worker that gets no answer from the inference servers while another does (:mod:`server_reports`) is cut off: the
others play its rollouts, which costs no attempt, and it ends. If no other worker plays, its outage is the run's.

This module does not know transports: :mod:`processes` and :mod:`ray` each provide one. "Worker" means a process or
actor that plays rollouts, never an inference server or a thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.agent.turn_log import TurnLog
from rollouts.base.validators import is_int
from rollouts.concurrency.fair_turns import FairTurns
from rollouts.distributed.messages import (
    PICKLED,
    OrderFormat,
    Request,
    RunEnds,
    received_error,
    received_sample,
    received_turn,
)
from rollouts.distributed.slots import (
    PendingRequest,
    Record,
    Slot,
    SlotEmpty,
    State,
    WorkerLeft,
    WorkerSilent,
    WorkerSlots,
)
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, EndpointAway, GenerateFailure, RolloutsError, TokenMismatchError, shortened
from rollouts.runs.record_bytes import read_framed
from rollouts.training.config import RolloutConfig
from rollouts.training.types import Sample

__all__ = ["LEAVE_SECONDS", "SILENT_SECONDS", "Connect", "Dispatcher", "Link", "LinkLost", "Workers"]

_LOG = logging.getLogger(__name__)

_DEATHS_WITHOUT_RESULT = 3
"""Deaths in a row in one slot, without a record from any of its workers, after which the run fails."""
_NEXT_START_SECONDS = 10.0
"""Pause between attempts to replace a worker while others are alive."""
SILENT_SECONDS = 5.0
LEAVE_SECONDS = 20.0
"""Time of a worker that leaves to finish its rollouts; schedulers usually kill a process 30 s after SIGTERM."""
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


@attrs.define(eq=False)
class _Stay:
    """The time of one worker in a slot."""

    slots: WorkerSlots
    slot: Slot
    link: Link
    silent_seconds: float
    tasks: TaskGroup = attrs.field(init=False)
    lost: LinkLost | None = None
    """Why it ended, unless it left."""

    def end(self, reason: LinkLost) -> None:
        self.lost = self.lost or reason
        self.tasks.cancel_scope.cancel()

    async def send(self, orders: OrderFormat) -> None:
        try:
            while True:
                await self.link.send(orders.join(*await self.slot.orders()))
        except LinkLost:
            return  # the receiving side reports the reason

    async def watch(self) -> None:
        """Give the rollouts of a silent worker to the others, and end it if it stays silent."""
        slot, seconds, waits = self.slot, self.silent_seconds, 0
        while waits < _TICKS * _REPLACED_AFTER:
            if await self._beats(seconds / _TICKS):
                waits = 0
                if slot.state is State.SILENT:
                    self.slots.set_present(slot)
                continue
            waits += 1
            if waits >= _TICKS:
                error = WorkerSilent(f"worker {slot.number} gave no sign of life for {seconds:g} s")
                self.slots.set_silent(slot, error)
        self.slots.set(slot, State.STARTING)
        seconds *= _REPLACED_AFTER
        self.end(LinkLost(f"worker {slot.number} gave no sign of life for {seconds:g} s and is replaced"))

    async def _beats(self, seconds: float) -> bool:
        """Whether the worker gives a sign of life within some seconds."""
        with anyio.move_on_after(seconds) as wait:
            await self.link.beat()
        return not wait.cancelled_caught

    async def leave(self) -> None:
        """Wait until the worker leaves, and for its rollouts; others play the rest."""
        await self.slot.leaves.wait()
        with anyio.move_on_after(LEAVE_SECONDS):
            await self.slot.finished()
        self.slot.give_away(WorkerLeft(f"worker {self.slot.number} left"))
        self.tasks.cancel_scope.cancel()


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
        cut_off: number of workers that inference servers did not answer while they answered others.
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
        self._slots = WorkerSlots(maximum)
        self._entered = False
        self._group_slots: dict[int, Slot] = {}
        self._numbers = itertools.count()
        self._tasks: TaskGroup | None = None
        self._broken: RolloutsError | None = None
        self.rollouts = self.messages = self.bytes = 0
        self.deaths = self.departures = self.cut_off = self.refused = 0
        self._silent_seconds = silent_seconds
        self._turns = FairTurns()  # of results that arrive together

    def __repr__(self) -> str:
        loads = ", ".join(str(len(slot.pending)) for slot in self._slots)
        alive = len(self.alive)
        return f"<Dispatcher: {loads} rollouts in {alive} of {len(self._slots)} workers, {self.deaths} deaths>"

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the workers that get new groups."""
        return self._slots.alive

    @property
    def given_away(self) -> int:
        """Number of rollouts that a silent worker lost to the others."""
        return self._slots.given_away

    async def changed(self) -> None:
        """Wait until a worker starts or ends, or its state changes."""
        await self._slots.changed()

    def numbers(self) -> dict[str, int]:
        """Gauges of the workers, for telemetry."""
        return {
            "workers": len(self.alive),
            "workers_most": len(self._slots),
            "outstanding": sum(len(slot.pending) for slot in self._slots),
            "worker_deaths": self.deaths,
            "worker_departures": self.departures,
            "workers_cut_off": self.cut_off,
        }

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for slot in self._slots:
                self._tasks.start_soon(self._supervise, slot)
            while self._broken is None and sum(slot.has_started for slot in self._slots) < self._minimum:
                await self.changed()
            if self._broken is not None:
                raise self._broken
            self._entered = True
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)
        self._slots.close()

    def drain(self, number: int) -> None:
        """Let a worker leave: it finishes its rollouts for at most :data:`LEAVE_SECONDS`, and others play the rest.

        Its slot stays empty while the minimum of workers is there. Without a worker in the slot, nothing changes.

        Raises:
            ConfigError: no slot has this number.
        """
        if not is_int(number, 0) or number >= len(self._slots):
            raise ConfigError.of("drain(number)", number, f"the number of a worker, 0 to {len(self._slots) - 1}")
        slot = self._slots[number]
        if slot.state in (State.ALIVE, State.AWAY, State.SILENT):
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
            EndpointAway: no server answered for too long, and no other worker plays or may try; or a budget is spent.
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
        except EndpointAway as error:
            others = {*self.alive} - {slot.number}
            if isinstance(error, RunEnds) or not others or not self._slots.reports.may_try(slot.number):
                raise
            self._cut_off(slot, str(error))
            raise WorkerLeft(f"worker {slot.number} is cut off: {error}") from error
        finally:
            slot.release(number, ended=ended)
        self.rollouts += 1
        return samples

    def _slot_for(self, group: int | None) -> Slot:
        """The slot of a group; for a new group, or without its worker, the one with the fewest requests."""
        slot = None if group is None else self._group_slots.get(group)
        if slot is None or not slot.alive:
            slot = self._slots.of_new_group()
        if group is not None:
            self._group_slots[group] = slot
            if len(self._group_slots) > _REMEMBERED_GROUPS:
                del self._group_slots[next(iter(self._group_slots))]
        return slot

    # -- supervision --

    async def _supervise(self, slot: Slot) -> None:
        """Keep a worker in this slot: start one, and another when it dies."""
        try:
            while self._broken is None:
                link = await self._connected(slot)
                if link is None:
                    continue
                slot.leaves, slot.has_started = anyio.Event(), True
                self._slots.set(slot, State.ALIVE)
                self._slots.give_unsent()
                try:
                    lost = await self._serve(slot, link)
                finally:
                    self._slots.reports.forget(slot.number)
                    self._slots.set(slot, State.STARTING)
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

    async def _connected(self, slot: Slot) -> Link | None:
        """Start a worker for this slot; ``None``, after a pause, if that fails and others can do its work."""
        try:
            return await self._connect(slot.number)
        except ConfigError as error:
            await self._pause(slot, error, needs=1 if self._entered else self._minimum)
            return None

    async def _pause(self, slot: Slot, error: ConfigError, *, needs: int) -> None:
        """Wait before the next start in this slot; raises the error if fewer than ``needs`` other slots have hope."""
        self._slots.set(slot, State.FAILED)
        if sum(other.state is not State.FAILED for other in self._slots) < needs:
            raise error
        slot.give_away(WorkerLeft(str(error)))
        await anyio.sleep(_NEXT_START_SECONDS)
        self._slots.set(slot, State.STARTING)

    async def _left(self, slot: Slot) -> None:
        """Give a worker's rollouts to the others, and wait until the slot is needed again."""
        pause, slot.pause = slot.pause, 0.0
        self.departures += not pause
        self._slots.set(slot, State.EMPTY)
        slot.give_away(WorkerLeft(f"worker {slot.number} left"))
        slot.cancelled.clear()
        if not self._refills:
            await anyio.sleep(pause)
        while not self._refills and sum(other.state <= State.SILENT for other in self._slots) >= self._minimum:
            await self.changed()
        self._slots.set(slot, State.STARTING)

    def _cut_off(self, slot: Slot, reason: str) -> None:
        """Let the others play the rollouts of a worker that no server answers, and end it."""
        if slot.state in (State.ALIVE, State.AWAY, State.SILENT):
            self.cut_off += 1
            slot.pause = self._slots.reports.cut_off(slot.number)
            given = slot.give_away(WorkerLeft(f"worker {slot.number} is cut off: {reason}"))
            text = "worker %d is cut off from servers that answer other workers, which get its %d rollouts: %s"
            _LOG.warning(text, slot.number, given, reason)
            self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        self._slots.set(slot, State.LEAVING)
        slot.leaves.set()
        slot.give_away(WorkerLeft(f"worker {slot.number} leaves"), unsent=True)

    def _break(self, error: RolloutsError) -> None:
        """Fail the rollouts of all workers, now and later."""
        self._broken = self._broken or error
        for slot in self._slots:
            slot.fail(self._broken)
        self._slots.notify()

    async def _serve(self, slot: Slot, link: Link) -> LinkLost | None:
        """Send and receive until the worker has ended; return the reason, ``None`` if it left."""
        stay = _Stay(self._slots, slot, link, self._silent_seconds)
        try:
            async with anyio.create_task_group() as stay.tasks:
                stay.tasks.start_soon(stay.send, self._orders)
                stay.tasks.start_soon(self._receive, stay)
                stay.tasks.start_soon(stay.watch)
                stay.tasks.start_soon(stay.leave)
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()
        return None if slot.leaves.is_set() else stay.lost

    async def _receive(self, stay: _Stay) -> None:
        try:
            while True:
                await self._read(stay.slot, await stay.link.receive())
        except LinkLost as error:
            if not stay.slot.leaves.is_set():
                self._slots.set(stay.slot, State.STARTING)  # before the cleanup: no new group may come here
            stay.end(error)

    def _report(self, slot: Slot, fields: Mapping[str, Any]) -> None:
        """Take a worker's report of the inference servers."""
        if slot.state in (State.ALIVE, State.AWAY, State.SILENT):
            self._slots.reports.take(slot.number, fields)
            if slot.state is not State.SILENT:
                self._slots.set_present(slot)
            idle = any(other.alive and not other.pending for other in self._slots)
            for number, reason in self._slots.reports.over(idle).items():
                self._cut_off(self._slots[number], reason)

    async def _read(self, slot: Slot, message: bytes) -> None:
        """Take the records of a message; raises LinkLost if it has something else."""
        self.messages += 1
        self.bytes += len(message)
        records = read_framed(message)
        while True:
            await self._turns.passed()  # a record ends a rollout, whose checks follow in the next turn of the loop
            record = _next(records, slot.number)
            if record is None:
                return
            fields, columns = record
            if fields["kind"] == "leaving":
                self._leave(slot)
                continue
            if fields["kind"] == "servers":
                self._report(slot, fields)
                continue
            if fields["kind"] == "clocks":
                slot.take_clocks(fields)
                continue
            slot.deaths_without_result = 0
            pending = slot.pending.get(fields["number"])
            if pending is not None and pending.error is None:
                pending.put((fields, columns))
            else:  # it was given to another worker, or its caller was cancelled
                self.refused += 1


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


async def _receive_samples(pending: PendingRequest, prompt: Prompt, log: TurnLog | None) -> list[Sample]:
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
                raise received_error(fields)
            case "sample" if columns is not None:
                samples.append(received_sample(fields["sample"], columns, prompt))
                if len(samples) == fields["branches"]:
                    return samples
