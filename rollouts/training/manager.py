"""The group scheduler: keeps groups in flight and returns whole batches.

It enforces these laws:

4. Accounting (:mod:`rollouts.training.ledger`): every prompt taken from the buffer ends in exactly one place: in a
   batch, dropped by the filter, recorded as failed, or back in the buffer. Long rollouts are not discarded: groups in
   flight when a batch is full stay in flight for the next one. On close they go back to the buffer, and their finished
   rollouts are kept.
5. Groups: a batch contains whole groups of exactly ``n_samples_per_prompt`` rollouts of one prompt, ordered by
   ``group_index``; a group index is never used for two prompts.
6. A bad rollout is data (:mod:`rollouts.training.group_runner`): a failed group is counted and recorded. A broken law
   stops the run.

This module does not know models, the network or agents; it calls a ``generate_fn``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import caller_here, deadline, pauses
from rollouts.concurrency.times import now
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, RolloutsError, at
from rollouts.training.batch_report import BatchReport
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.fail_fast import FailFast
from rollouts.training.failures import FailureStats
from rollouts.training.group_runner import GroupRunner
from rollouts.training.ledger import Ledger, group_index
from rollouts.training.metrics import Accounting, RunMetrics
from rollouts.training.rollout_log import OnGroup, Recorder, RolloutLog
from rollouts.training.running_groups import GROUPS_A_TURN, RunningGroups
from rollouts.training.slots import Slots
from rollouts.training.staleness import Staleness, StalenessPolicy
from rollouts.training.types import Group, Sample

if TYPE_CHECKING:
    from rollouts.training.manager_state import ManagerState

__all__ = ["AsyncRolloutManager"]

_BLOCKED_SECONDS = 1.0
"""Interval of the checks whether a pause has ended, while no group is in flight."""


class AsyncRolloutManager:
    """Generates batches of groups from a buffer of prompts.

    As an async context manager it keeps rollouts in flight between batches::

        async with AsyncRolloutManager(config, data_buffer) as manager:
            samples = await manager.generate_batch()

    :meth:`stream` generates while the caller trains on a batch.

    Without the context, each :meth:`generate_batch` cancels the groups in flight, returns their prompts to the buffer
    (which hands them out first) and keeps their finished rollouts. A group is returned only once: the next call waits
    for it, so that there is no bias against long rollouts.

    Args:
        config: sizes, functions, deadlines and failure policies.
        data_buffer: source of the prompts.
        on_group: called in a worker thread with every settled group, kept, dropped or failed, e.g. to write it to disk.
        rollout_log: records each event before it counts, e.g. in a journal.

    Attributes:
        failures: lost attempts by cause, and their lengths compared with those of sound attempts.
        metrics: metrics of the last batch.
        staleness: the announced policy versions, and the bound on the age of a group.
        slots: admits rollouts; it counts the running and the waiting ones.
    """

    def __init__(
        self,
        config: RolloutConfig,
        data_buffer: DataBuffer,
        *,
        on_group: OnGroup | None = None,
        rollout_log: RolloutLog | None = None,
    ) -> None:
        if not isinstance(config, RolloutConfig):
            raise ConfigError.of("AsyncRolloutManager.config", config, "a RolloutConfig, before the data buffer")
        if not isinstance(data_buffer, DataBuffer):
            raise ConfigError.of("AsyncRolloutManager.data_buffer", data_buffer, "a DataBuffer")
        self.config = config
        self.failures = FailureStats(config.failure_budget, config.failure_window)
        self.metrics: dict[str, float] = {}
        self.batches = 0
        self.staleness = Staleness()
        ledger = self._ledger = Ledger(data_buffer)
        self._fail_fast = FailFast(config, self.failures)
        self._filling = self._streaming = False  # whether a caller waits for a batch, and whether stream() is open
        self._recorder = Recorder(rollout_log, on_group, self._fail_fast.stop)
        self._running = RunningGroups()
        self.slots = Slots(config.in_flight, self._start_groups)
        self._tasks: TaskGroup | None = None
        self._from_request = caller_here()  # calls start_soon inside the deadlines of the last request
        self._report = BatchReport(config, self._ledger, self.staleness, self.failures, self.slots)
        is_needed = functools.partial(ledger.is_needed, config.spare_groups)
        self._runner = GroupRunner(config, self.failures, rollout_log, ledger.failed_attempts, is_needed, self.slots)

    def __repr__(self) -> str:
        return f"<AsyncRolloutManager {self.batches} batches · {self.accounting}>"

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this manager is open already")
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        await self._running.end_all(tasks)  # an error of the body propagates without an exception group
        self.accounting.check()

    @property
    def data_buffer(self) -> DataBuffer:
        """Source of the prompts."""
        return self._ledger.data_buffer

    @property
    def accounting(self) -> Accounting:
        """Number of prompts by state; adds up at every moment."""
        return self._ledger.accounting

    @property
    def run_metrics(self) -> RunMetrics:
        """Totals over the settled groups."""
        return self._ledger.totals

    @property
    def ready_groups(self) -> tuple[Group, ...]:
        """Accepted groups that are in no batch yet, oldest first."""
        return tuple(sorted(self._ledger.ready, key=lambda group: group.group_index))

    def withdraw(self, is_stale: Callable[[Group], bool]) -> list[Group]:
        """Remove and return ready groups that are stale; they count as dropped, with the reason ``"stale"``."""
        stale = [group for group in self._ledger.ready if is_stale(group)]
        self._ledger.drop_ready(stale, "stale")
        return stale

    async def put_back(self, group_indices: Set[int]) -> None:
        """Cancel groups in flight; their prompts go back to the buffer, and their finished rollouts are kept."""
        await self._running.cancel(group_indices)

    def finished_rollouts(self, group_index: int) -> dict[int, list[Sample]]:
        """Return the finished rollouts of a group that went back to the buffer, by number in the group."""
        return dict(self._ledger.finished_rollouts.get(group_index, {}))

    def add_finished_rollouts(self, group_index: int, rollouts: Mapping[int, list[Sample]]) -> None:
        """Add rollouts that another process finished; the group then generates only the missing ones."""
        self._ledger.finished_rollouts[group_index] = dict(rollouts)

    def waiting_for(self, count: int = 1) -> list[str]:
        """Return global pauses first, then the longest waits with their start time and source line."""
        from rollouts.concurrency.wait_report import longest  # here: only a watched run asks for it

        return longest(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the manager and its buffer as plain values; may be called at any moment."""
        return self._ledger.state(self.batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; ready groups and finished rollouts are not generated again.

        Raises:
            ConfigError: the state is damaged or of other data, or this manager has already begun.
        """
        from rollouts.training.manager_state import ManagerState  # here: most runs continue from their journal

        self._check_not_begun()  # before the buffer is restored
        self.restore(ManagerState.load(state, self.data_buffer))

    def restore(self, state: ManagerState) -> None:
        """Restore a state whose buffer is already restored; raises as :meth:`load_state_dict`."""
        self._check_not_begun()
        self.batches = state.batches
        self._ledger.restore(state)
        self._fail_fast.any_success = self.accounting.in_batch + self.accounting.ready + self.accounting.dropped > 0

    def _check_not_begun(self) -> None:
        if self.accounting.taken or self._tasks is not None:
            raise ConfigError.of("load_state_dict()", repr(self), "a manager that has not begun")

    async def generate_batch(self) -> list[Sample]:
        """Generate until ``batch_size`` groups are accepted.

        Returns:
            ``batch_size * n_samples_per_prompt`` samples (more where rollouts fork), by group index, then index.

        Raises:
            DataExhausted: the buffer has too few prompts left; accepted groups stay in :attr:`ready_groups`.
            FilterFailure: ``patience`` groups in a row were rejected, at least half of them by the filter.
            GenerateFailure: the first groups all failed for one cause; or ``patience`` groups in a row were rejected,
                most of them failed; or a group failed with ``on_failure="stop"``; or ``failure_budget`` is used up; or
                the batch was not filled within ``batch_seconds``: groups accepted or in flight are kept.
        """
        began = time.monotonic()
        if not self._streaming:  # a stream counts from its last batch on, since it generates while the caller trains
            self.slots.take_metrics(1.0)
        while True:
            is_open = self._tasks is not None
            async with contextlib.nullcontext() if is_open else self:
                await self._gather_groups(finish_restarted=not is_open)
            version, groups = self.staleness.current, self._choose_groups()
            assert groups is not None, "a batch is sealed when it is ready"
            numbers = await self._report.of_groups(groups)
            if version == self.staleness.current and {*map(id, groups)} <= {*map(id, self._ledger.ready)}:
                break  # none of them was dropped meanwhile, and none has become too old
        # No await from here on, so that a batch that is counted cannot be lost to a cancellation.
        return self._seal_batch(groups, numbers, time.monotonic() - began)

    def announce_version(self, version: str) -> None:
        """Record the policy version in use from now on, so that the staleness of tokens can be computed.

        Raises:
            ConfigError: the name was announced before.
        """
        self.staleness.announce(version)
        if self._streaming:
            self._start_groups()

    def wake(self) -> None:
        """Let a batch that is being filled ask the buffer again, which has new prompts."""
        self._running.wake()

    async def stream(
        self, *, max_staleness: int | None = None, policy: StalenessPolicy = "drop"
    ) -> AsyncGenerator[list[Sample], None]:
        """Yield batches until the data are exhausted; generation continues while the caller trains on a batch.

        Call :meth:`announce_version` when the policy has new weights, at most once for each batch.
        ``over_sampling_factor`` limits how far generation runs ahead; with ``policy="pace"`` the bound does, too, and
        with ``in_flight`` the bound alone.

        Args:
            max_staleness: maximum number of versions between the weights that sampled a token and the current ones.
            policy: how the bound is enforced; see :mod:`rollouts.training.staleness`.

        Yields:
            Batches as :meth:`generate_batch` returns them; :attr:`metrics` then contains the staleness of tokens
            (``staleness/…``) and the idle seconds of trainer and generator (``idle/…``).

        Raises:
            FilterFailure, GenerateFailure: as :meth:`generate_batch`.
            ConfigError: an invalid bound or policy, or tokens of a version that was never announced.
        """
        if self._tasks is None or self._streaming:
            raise RuntimeError("a stream needs the manager open (async with), and to itself")
        self.staleness.max_staleness, self.staleness.policy = max_staleness, policy
        self._streaming = True
        self.slots.take_metrics(1.0)
        try:
            while True:
                self.staleness.training = False  # a caller that requests a batch is done with the last one
                try:
                    samples = await self.generate_batch()
                except DataExhausted:
                    return
                self.staleness.training = True
                self._start_groups()
                yield samples
        finally:
            self._streaming = self.staleness.training = False

    async def _gather_groups(self, *, finish_restarted: bool = False) -> None:
        """Wait until enough groups for a batch are ready, and optionally until all restarted groups are settled."""
        if not self.accounting.in_flight:
            self._fail_fast.begin_call()
        with deadline(self.config.batch_seconds) as limit:  # ``async with self`` ends outside: groups may close slowly
            self._from_request = caller_here()
            await self._drop_stale()
            self._filling = True
            try:
                await self._fill_batch(finish_restarted)
            finally:
                self._filling = False
        if limit.caught:
            raise self._fail_fast.out_of_time(self.accounting)

    async def _fill_batch(self, finish_restarted: bool) -> None:
        while self._choose_groups() is None or (finish_restarted and self._ledger.restarted):
            _raise(self._fail_fast.verdict(self.accounting, self.run_metrics.mean_reward))
            self._top_up()
            if self.accounting.in_flight:
                await self._running.next_end()
                await self._drop_stale()
            elif _is_blocked():
                with boundary(RolloutsError, "no group starts during a pause", kind="a_pause"):
                    await anyio.sleep(_BLOCKED_SECONDS)
            else:
                _raise(self._fail_fast.take_error())
                raise self._fail_fast.out_of_data(self.accounting, self.data_buffer)
        _raise(self._fail_fast.take_error())

    def _choose_groups(self) -> list[Group] | None:
        return self.staleness.choose(self._ledger.ready, self._ledger.started, self.config.batch_size)

    async def _drop_stale(self) -> None:
        """Drop ready groups that are too old; they were recorded as kept, and are recorded again as dropped."""
        if not self.staleness.drops:
            return
        for group in [group for group in self.ready_groups if self.staleness.too_old(self.staleness.age(group))]:
            await self._recorder.settled(attrs.evolve(group, outcome="dropped", reason="too old"))
            self._ledger.drop_ready([group], "too old")
            self._report.length_bias.dropped.add(1, group.samples)

    def _seal_batch(self, groups: Sequence[Group], numbers: Mapping[str, float], seconds: float) -> list[Sample]:
        samples = [sample for group in groups for sample in group.samples]
        counts = self.accounting
        counts = attrs.evolve(counts, ready=counts.ready - len(groups), in_batch=counts.in_batch + len(groups))
        # Each of these may raise, e.g. a sampler or a full disk: the groups then stay ready.
        of_run = self._report.of_run(samples, seconds if self._streaming else None, counts)
        metrics = {"batch": self.batches, "seconds": seconds, "ended": round(now(), 4), **numbers, **of_run}
        self._recorder.sealed(self.batches, groups, metrics, counts)
        self._ledger.seal(groups)
        self.metrics = metrics
        self.batches += 1
        return samples

    def _top_up(self) -> None:
        if self._tasks is None:
            raise RuntimeError("the manager was closed while this batch was being filled")
        if _is_blocked() or (self._fail_fast.all_failed and self.accounting.in_flight):
            return  # while all failed, no further prompt is spent before one of the groups in flight succeeds
        pending = self.accounting.ready + self.accounting.in_flight
        wanted = self.config.max_inflight_groups - pending - self._ledger.not_replaced
        room = self.staleness.room(pending, self.config.batch_size) if self._streaming else None
        if room is not None:  # slots bound the rollouts, so that every group may start that can be trained in time
            wanted = min(wanted, room) if self.config.in_flight is None else room
        for _ in range(min(wanted, GROUPS_A_TURN)):
            prompt = self._take() if self.slots.has_room() else None
            if prompt is None:
                return
            finished = self._ledger.finished_rollouts.get(index := group_index(prompt), ())
            self.slots.open(index, self.config.n_samples_per_prompt - len(finished))
            self._report.idle.stop()
            scope = self._running.begin(index)
            self._from_request(self._tasks.start_soon, self._run_group, prompt, index, scope)
        if wanted > GROUPS_A_TURN:
            self._running.call_in_next_turn(self._tasks, self._start_groups)

    def _start_groups(self) -> None:
        """Start groups outside a request, e.g. for a free slot. An error, e.g. of the data, ends the next batch."""
        try:
            if self._filling and self._choose_groups() is None:
                _raise(self._fail_fast.verdict(self.accounting, self.run_metrics.mean_reward))
                self._top_up()
            elif self._streaming and self._tasks is not None and self._fail_fast.may_run_ahead:
                self._top_up()
        except Exception as error:  # noqa: BLE001
            self._fail_fast.stop(error)
            self._running.wake()

    def _take(self) -> Prompt | None:
        """Take a prompt and record it in the same step, so that draws and outcomes have one order in the log."""
        if (prompt := self._ledger.take(self.staleness.current)) is not None:
            try:
                self._recorder.taken(prompt, self.data_buffer)
            except Exception as error:  # noqa: BLE001 - generate_batch raises it
                self._fail_fast.stop(error)
                self._ledger.put_back(prompt)
                self._ledger.landed(prompt)
                return None
        return prompt

    async def _run_group(self, prompt: Prompt, index: int, scope: anyio.CancelScope) -> None:
        """Run one group in a scope that :meth:`put_back` cancels; account for it, also on errors and cancellation."""
        finished = self._ledger.finished_rollouts.setdefault(index, {})
        settled = False
        try:
            with scope:
                await self._running.turn_to_start()
                with at(f"group {index}"):
                    group = await self._runner.run(prompt, finished)
                    await self._recorder.settled(group, functools.partial(self._ledger.observe, group))
                    self._ledger.account_for(group)
                    settled = True
                    self._fail_fast.saw(group)
        except Exception as error:  # noqa: BLE001 - a broken law: generate_batch raises it, not the task group
            self._fail_fast.stop(error)
        finally:
            if not settled:
                self._ledger.put_back(prompt)
            self._ledger.landed(prompt)
            if not self.accounting.in_flight:
                self._report.idle.start()
            self._running.end(index)
            self.slots.close(index)
        if settled and self._streaming:
            self._start_groups()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _is_blocked() -> bool:
    """Whether a global pause keeps new groups from starting: each would only wait, too."""
    return any(pause.blocks_new_work for pause in pauses())
