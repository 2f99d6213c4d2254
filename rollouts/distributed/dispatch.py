"""The manager's side: shares groups out among workers, and replaces workers that die.

Invariant: the rollouts of one group go to one worker. Every rollout that is asked for comes back once, or fails: one
whose worker died fails as :class:`~rollouts.errors.GenerateFailure` and is tried again as the config says. Where a
worker cannot be replaced, the others do its work. Scheduling, accounting, filter and journal are the manager's.

This module knows no transport; :mod:`workers` and :mod:`ray` bring one each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.agent.turn_log import TurnLog, claim_turn_log
from rollouts.distributed.messages import Request, order, read_records, returned
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, GenerateFailure, RolloutsError, TokenMismatchError
from rollouts.runs.record_bytes import Columns, turn_of
from rollouts.training.config import RolloutConfig
from rollouts.training.types import Sample

__all__ = ["Connect", "Dispatcher", "Link", "LinkLost"]

_DEATHS_WITHOUT_RESULT = 3
"""Deaths in a row, of one worker and those that took its place, without a single record from any."""
_NEXT_START_SECONDS = 10.0
"""Between attempts to replace a worker while others are at work."""
_WAY_SECONDS = 60.0
"""Of a rollout's deadline here, for the way to its worker and back."""


class LinkLost(RolloutsError):
    """The worker at the other end is gone."""


class Link(Protocol):
    """The way to one worker that is ready."""

    async def send(self, message: bytes) -> None:
        """Raises LinkLost."""

    async def receive(self) -> bytes:
        """Raises LinkLost, which says why."""
        ...

    async def aclose(self) -> None:
        """End the worker, if it has not ended."""


Connect: TypeAlias = Callable[[int], Awaitable[Link]]
"""Starts the worker of a number; raises ConfigError if it cannot start."""

Record: TypeAlias = tuple[dict[str, Any], Columns | None]


@attrs.define(eq=False)
class _Call:
    """One rollout that is played elsewhere."""

    error: RolloutsError | None = None
    _records: deque[Record] = attrs.field(factory=deque)
    _news: anyio.Event = attrs.field(factory=anyio.Event)

    def put(self, record: Record) -> None:
        self._records.append(record)
        self._news.set()

    def fail(self, error: RolloutsError) -> None:
        self.error = error
        self._news.set()

    async def next(self) -> Record:
        while not self._records:
            if self.error is not None:
                raise self.error
            self._news = anyio.Event()
            await self._news.wait()
        return self._records.popleft()


@attrs.define(eq=False)
class _Worker:
    """The place of one worker, whoever holds it now."""

    number: int
    calls: dict[int, _Call] = attrs.field(factory=dict)
    requests: dict[int, bytes] = attrs.field(factory=dict)
    """Not sent yet."""
    cancelled: list[int] = attrs.field(factory=list)
    wanted: anyio.Event = attrs.field(factory=anyio.Event)
    started: anyio.Event = attrs.field(factory=anyio.Event)
    alive: bool = False
    deaths_without_result: int = 0

    async def orders(self) -> bytes:
        """Wait for something to say, and take all there is."""
        while not (self.requests or self.cancelled):
            self.wanted = anyio.Event()
            await self.wanted.wait()
        requests, self.requests = self.requests, {}
        cancelled, self.cancelled = self.cancelled, []
        return order(list(requests.values()), cancelled)

    def ask(self, number: int, request: bytes) -> _Call:
        self.requests[number] = request
        self.calls[number] = call = _Call()
        self.wanted.set()
        return call

    def leave(self, number: int, *, ended: bool) -> None:
        """Nobody waits for this call any more."""
        call = self.calls.pop(number)
        if self.requests.pop(number, None) is None and not ended and call.error is None:
            self.cancelled.append(number)
            self.wanted.set()

    def fail(self, error: RolloutsError) -> None:
        """Fail all calls."""
        for call in self.calls.values():
            call.fail(error)
        self.cancelled.clear()


class Dispatcher:
    """Plays rollouts in workers while its context lasts.

    ::

        async with in_processes(factory, workers=4) as workers:
            config = workers.config(factory())
            async with AsyncRolloutManager(config, data_buffer) as manager: ...

    Args:
        connect: starts a worker.
        workers: how many.

    Attributes:
        rollouts: that came back.
        messages: that they came in.
        bytes: that those held.
        deaths: of workers.

    Raises:
        ConfigError: on entering, if a worker cannot start.
    """

    def __init__(self, connect: Connect, workers: int) -> None:
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ConfigError.of("workers", workers, "an integer >= 1")
        self._connect = connect
        self._workers = [_Worker(number) for number in range(workers)]
        self._homes: dict[int, _Worker] = {}
        self._members: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._tasks: TaskGroup | None = None
        self._broken: RolloutsError | None = None
        self.rollouts = 0
        self.messages = 0
        self.bytes = 0
        self.deaths = 0

    def __repr__(self) -> str:
        loads = ", ".join(str(len(worker.calls)) for worker in self._workers)
        return f"<Dispatcher: {loads} rollouts in {len(self._workers)} workers, {self.deaths} deaths>"

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            for worker in self._workers:
                self._tasks.start_soon(self._keep, worker)
            for worker in self._workers:
                await worker.started.wait()
            if self._broken is not None:
                raise self._broken
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

    def config(self, config: RolloutConfig) -> RolloutConfig:
        """The same config, whose rollouts are generated and scored in the workers.

        A reward that scores whole groups is called here, as the filter is.
        """
        seconds = config.rollout_seconds + _WAY_SECONDS + (0.0 if config.group_rm else config.reward_seconds)
        reward_fn = config.reward_fn if config.group_rm else None
        return attrs.evolve(config, generate_fn=self.generate, reward_fn=reward_fn, rollout_seconds=seconds)

    async def generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Play one rollout for each prompt, one after the other; the ``generate_fn`` of :meth:`config`.

        Raises:
            GenerateFailure: its worker died.
            ConfigError: no rollout can survive what a worker said, or workers cannot start.
            TokenMismatchError: a law was broken in a worker.
        """
        log = await claim_turn_log()
        return [sample for prompt in prompts for sample in await self._played(prompt, log)]

    async def _played(self, prompt: Prompt, log: TurnLog | None) -> list[Sample]:
        if self._tasks is None:
            raise RuntimeError("workers play while their context lasts")
        if self._broken is not None:
            raise self._broken
        number, ended = next(self._numbers), False
        request = Request(number, prompt, log is not None, log.turns if log is not None else ()).to_bytes()
        with self._home(prompt.group_index) as worker:
            call = worker.ask(number, request)
            try:
                samples = await _answer(call, prompt, log)
                ended = True
            finally:
                worker.leave(number, ended=ended)
        self.rollouts += 1
        return samples

    @contextlib.contextmanager
    def _home(self, group: int | None) -> Iterator[_Worker]:
        """The worker of a group while it has rollouts in work; the one with the fewest for a new group."""
        worker = self._homes.get(group) if group is not None else None
        if worker is None or not worker.alive:
            worker = min(self._workers, key=lambda one: (not one.alive, len(one.calls)))
        if group is None:
            yield worker
            return
        self._homes[group] = worker
        self._members[group] += 1
        try:
            yield worker
        finally:
            self._members[group] -= 1
            if not self._members[group]:
                del self._members[group], self._homes[group]

    # -- keeping workers --

    async def _keep(self, worker: _Worker) -> None:
        """Have a worker in this place, and another when it dies."""
        try:
            while self._broken is None:
                link = await self._started(worker)
                if link is None:
                    continue
                worker.alive = True
                worker.started.set()
                try:
                    lost = await self._serve(worker, link)
                finally:
                    worker.alive = False
                self.deaths += 1
                worker.deaths_without_result += 1
                if worker.deaths_without_result >= _DEATHS_WITHOUT_RESULT:
                    raise ConfigError(
                        f"{worker.deaths_without_result} workers in a row died before a rollout came back: {lost}"
                    )
                worker.fail(GenerateFailure(str(lost)))
        except RolloutsError as error:
            self._break(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours, raised where somebody waits, not by the task group
            broken = TokenMismatchError(f"keeping worker {worker.number} raised {type(error).__name__}: {error}")
            broken.__cause__ = error
            self._break(broken)
        finally:
            worker.started.set()

    async def _started(self, worker: _Worker) -> Link | None:
        """A worker for this place; ``None``, after a pause, if there is none now and others can do its work."""
        try:
            return await self._connect(worker.number)
        except ConfigError as error:
            if not any(other.alive for other in self._workers) or not worker.started.is_set():
                raise
            worker.fail(GenerateFailure(str(error)))
            await anyio.sleep(_NEXT_START_SECONDS)
            return None

    def _break(self, error: RolloutsError) -> None:
        self._broken = self._broken or error
        for worker in self._workers:
            worker.fail(self._broken)

    async def _serve(self, worker: _Worker, link: Link) -> LinkLost:
        """Send and receive until the worker is gone; why it is."""
        lost: list[LinkLost] = []

        async def send() -> None:
            try:
                while True:
                    await link.send(await worker.orders())
            except LinkLost:
                return  # the receiver finds out why

        async def receive() -> None:
            try:
                while True:
                    self._read(worker, await link.receive())
            except LinkLost as error:
                worker.alive = False  # no new group comes here from now on
                lost.append(error)
                tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                tasks.start_soon(receive)
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()
        return lost[0]

    def _read(self, worker: _Worker, message: bytes) -> None:
        self.messages += 1
        self.bytes += len(message)
        worker.deaths_without_result = 0
        for fields, columns in read_records(message):
            call = worker.calls.get(fields["number"])
            if call is not None:  # else its caller has given up
                call.put((fields, columns))


async def _answer(call: _Call, prompt: Prompt, log: TurnLog | None) -> list[Sample]:
    """The samples of a call; its turns go into the log as they come."""
    samples: list[Sample] = []
    while True:
        fields, columns = await call.next()
        match fields["kind"]:
            case "turn" if log is not None and columns is not None:
                await log.save(turn_of(fields["of"], columns))
            case "reset" if log is not None:
                await log.claim()  # by a second episode, which ends the keeping
            case "broken":
                raise _BROKEN.get(fields["error"], TokenMismatchError)(fields["message"])
            case "sample" if columns is not None:
                samples.append(returned(fields["sample"], columns, prompt))
                if len(samples) == fields["branches"]:
                    return samples


_BROKEN: dict[str, type[RolloutsError]] = {"ConfigError": ConfigError}
