"""The group scheduler: keeps groups in work, and hands out whole batches.

Laws kept here:

4. Accounting: every prompt taken from the buffer ends in exactly one place: in a batch, dropped by the filter,
   recorded as failed, or back in the buffer. Nothing is thrown away for being long: groups in flight when a batch is
   full stay in flight for the next one; when the manager closes they go back, and their finished rollouts are kept.
5. Groups: a batch holds whole groups of exactly ``n_samples_per_prompt`` rollouts of one prompt, ordered by
   ``group_index``; a group index is never used for two prompts.
6. A bad rollout is data (:mod:`rollouts.training.group_runner`): a group that failed is counted and recorded. A broken
   law stops the run.

This module knows no model, no network and no agent: it is handed a ``generate_fn``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
from anyio.abc import TaskGroup

from rollouts.concurrency.boundary import abandoned, call_foreign, function_name, waits
from rollouts.concurrency.cancellation import left_behind
from rollouts.concurrency.deadlines import deadline, pauses
from rollouts.concurrency.wait_report import where
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, FilterFailure, GenerateFailure, RolloutsError, at
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.failures import FailureStats, cause_of
from rollouts.training.group_runner import GroupRunner
from rollouts.training.manager_state import ManagerState
from rollouts.training.metrics import Accounting, IdleClock, RunMetrics, batch_metrics
from rollouts.training.rollout_log import RolloutLog
from rollouts.training.staleness import Staleness, StalenessPolicy
from rollouts.training.types import Group, Sample

__all__ = ["AsyncRolloutManager"]

OnGroup = Callable[[Group], None]

_RECORD_SECONDS = 60.0
"""Deadline of recording one settled group; it is shielded, so that what is recorded and what is counted agree."""


class AsyncRolloutManager:
    """Fills batches from a buffer of prompts.

    Use it as an async context manager, and rollouts in flight live on between batches::

        async with AsyncRolloutManager(config, data_buffer) as manager:
            samples = await manager.generate_batch()

    :meth:`stream` keeps groups in work while the caller trains on a batch.

    Without the context each :meth:`generate_batch` ends what is in flight, hands its prompts back to the buffer (they
    come out first the next time) and keeps the rollouts of theirs that are finished. A group is handed back once: the
    next call waits for it, so that long rollouts are not left out for being long.

    Args:
        config: what to do; may also be given second.
        data_buffer: where prompts come from.
        on_group: called in a worker thread with every settled group, kept, dropped or failed, e.g. to write it to disk.
        rollout_log: writes what happens to a journal, before it counts.

    Attributes:
        accounting: where every prompt went; adds up at every moment.
        run_metrics: totals over the settled groups.
        failures: lost attempts by cause, and how they differ from the sound ones.
        metrics: the numbers of the last batch.
        staleness: the policy versions that were announced, and how old a group may be.
    """

    def __init__(
        self,
        config: RolloutConfig | DataBuffer,
        data_buffer: DataBuffer | RolloutConfig,
        *,
        on_group: OnGroup | None = None,
        rollout_log: RolloutLog | None = None,
    ) -> None:
        if isinstance(config, DataBuffer):
            config, data_buffer = data_buffer, config
        if not isinstance(config, RolloutConfig):
            raise ConfigError.of("AsyncRolloutManager.config", config, "a RolloutConfig")
        if not isinstance(data_buffer, DataBuffer):
            raise ConfigError.of("AsyncRolloutManager.data_buffer", data_buffer, "a DataBuffer")
        self.config = config
        self.data_buffer = data_buffer
        self.accounting = Accounting()
        self.run_metrics = RunMetrics()
        self.failures = FailureStats(config.failure_budget, config.failure_window)
        self.metrics: dict[str, float] = {}
        self.batches = 0
        self.staleness = Staleness()
        self._streaming = False
        self._started: dict[int, int] = {}
        self._idle = IdleClock()
        self._on_group = on_group
        self._rollout_log = rollout_log
        self._attempts: dict[int, int] = {}  # that failed, of rollouts in flight
        self._ready: list[Group] = []
        self._finished_rollouts: dict[int, dict[int, list[Sample]]] = {}  # of groups in flight or handed back
        self._again: set[int] = set()
        self._rejected_in_a_row = 0
        self._dropped_for_batch = 0
        self._failure_causes: Counter[str] = Counter()
        self._broken: BaseException | None = None
        self._settled = anyio.Event()
        self._turnstile = anyio.Lock(fast_acquire=True)
        self._tasks: TaskGroup | None = None
        self._player = GroupRunner(config, self.failures, rollout_log, self._attempts, self._is_scarce)

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
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)  # the body's own error goes on as it is, in no exception group
        self.accounting.check()

    @property
    def ready_groups(self) -> tuple[Group, ...]:
        """Accepted groups that are in no batch yet, oldest first."""
        return tuple(sorted(self._ready, key=lambda group: group.group_index))

    def withdraw(self, is_stale: Callable[[Group], bool]) -> list[Group]:
        """Take accepted groups that are in no batch out again; they count as dropped, with the reason ``"stale"``."""
        stale = [group for group in self._ready if is_stale(group)]
        taken = {group.group_index for group in stale}
        self._ready = [group for group in self._ready if group.group_index not in taken]
        self.accounting.ready -= len(stale)
        self.accounting.dropped += len(stale)
        for group in stale:
            self.data_buffer.settle(group.prompt)
        self.run_metrics.reasons["stale"] += len(stale)
        return stale

    def finished_rollouts(self, group_index: int) -> dict[int, list[Sample]]:
        """The finished rollouts of a group that went back to the buffer, by their number in the group."""
        return dict(self._finished_rollouts.get(group_index, {}))

    def add_finished_rollouts(self, group_index: int, rollouts: Mapping[int, list[Sample]]) -> None:
        """Give rollouts that were finished elsewhere; the group goes on with those that are missing."""
        self._finished_rollouts[group_index] = dict(rollouts)

    def waiting_for(self, count: int = 1) -> list[str]:
        """What all stand still for at this moment; then who waits longest for what, since when, in which line."""
        still = [str(standstill) for standstill in pauses()[:count]]
        return still + [f"{wait}, in {where(wait)}" for wait in waits()[: count - len(still)]]

    def state_dict(self) -> dict[str, Any]:
        """Where the manager and its buffer stand, as plain values; may be asked for at any moment."""
        return ManagerState(
            accounting=attrs.evolve(self.accounting),
            batches=self.batches,
            ready={group.group_index: list(group.samples) for group in self._ready},
            finished=self._finished_rollouts,
            attempts=self._attempts,
            totals=self.run_metrics.to_dict(),
        ).to_dict(self.data_buffer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was asked: what was ready or finished then is not generated again.

        Raises:
            ConfigError: it is damaged, was saved over other data, or this manager is at work.
        """
        self.restore(ManagerState.load(state, self.data_buffer))

    def restore(self, state: ManagerState) -> None:
        """Take over a state whose buffer is set already."""
        if self.accounting.taken or self._tasks is not None:
            raise ConfigError.of("load_state_dict()", repr(self), "a manager that has not begun")
        self.accounting, self.batches = state.accounting, state.batches
        for number, samples in sorted(state.ready.items()):
            self._ready.append(Group(self.data_buffer.take_by_index(number), tuple(samples), "kept"))
        self._finished_rollouts = state.finished
        self._attempts.update(state.attempts)
        self.run_metrics.load(state.totals)
        self.accounting.check()

    async def generate_batch(self) -> list[Sample]:
        """Generate until ``batch_size`` groups are accepted.

        Returns:
            ``batch_size * n_samples_per_prompt`` samples (more where rollouts fork), by group index, then index.

        Raises:
            DataExhausted: the buffer ran dry first; finished groups stay in :attr:`ready_groups`.
            FilterFailure: the filter rejected ``patience`` groups in a row.
            GenerateFailure: that many in a row were lost, mostly to failures; or ``on_failure="stop"``; or the batch
                was not filled within ``batch_seconds``: what is accepted and in flight serves the next call.
        """
        began = time.monotonic()
        with deadline(self.config.batch_seconds) as limit:
            if self._tasks is not None:
                await self._gather_groups()
            else:
                async with self:
                    await self._gather_groups(finish_again=True)
        if limit.caught:
            raise GenerateFailure(
                f"{len(self._ready)} of {self.config.batch_size} groups were accepted within "
                f"{self.config.batch_seconds:g} s; they are kept; {self.accounting}"
            )
        # Nothing is awaited from here on: a batch that is counted is a batch that is handed out.
        return self._seal_batch(time.monotonic() - began)

    def announce_version(self, version: str) -> None:
        """Say which weights the policy has from now on, so that the age of tokens can be told.

        Raises:
            ConfigError: the name was announced before.
        """
        self.staleness.announce(version)
        if self._streaming and self._tasks is not None:
            self._top_up()

    async def stream(
        self, *, max_staleness: int | None = None, policy: StalenessPolicy = "drop"
    ) -> AsyncGenerator[list[Sample], None]:
        """Batches for ever, or until the data end; generation goes on while the caller trains on one of them.

        Call :meth:`announce_version` when the policy has new weights, at most once for each batch. How far generation
        runs ahead is set by ``over_sampling_factor``, and with ``policy="pace"`` by the bound as well.

        Args:
            max_staleness: how many versions may lie between the weights that sampled a token and those of now.
            policy: what keeps to that; see :mod:`rollouts.training.staleness`.

        Yields:
            What :meth:`generate_batch` returns; :attr:`metrics` then also tells the ages of tokens (``staleness/…``)
            and the seconds that either side was idle (``idle/…``).

        Raises:
            FilterFailure, GenerateFailure: as :meth:`generate_batch`.
            ConfigError: the bound or the policy is none, or tokens are of a version that was never announced.
        """
        if self._tasks is None or self._streaming:
            raise RuntimeError("a stream needs the manager open (async with), and to itself")
        self.staleness.max_staleness, self.staleness.policy = max_staleness, policy
        self._streaming = True
        try:
            while True:
                self.staleness.training = False  # whoever asks has done with the last batch, announced or not
                try:
                    samples = await self.generate_batch()
                except DataExhausted:
                    return
                self.staleness.training = True
                self._top_up()
                yield samples
        finally:
            self._streaming = self.staleness.training = False

    async def _gather_groups(self, *, finish_again: bool = False) -> None:
        """Wait until enough groups for a batch are ready; also for those that were handed back before, if asked."""
        await self._drop_stale()
        while self._chosen() is None or (finish_again and self._again):
            self._raise_if_broken()
            self._raise_if_hopeless()
            self._top_up()
            if not self.accounting.in_flight:
                raise DataExhausted(
                    f"{len(self._ready)} of {self.config.batch_size} groups are accepted and no prompt is left: "
                    f"{self.data_buffer!r}; {self.accounting}"
                )
            if self._settled.is_set():
                self._settled = anyio.Event()
            await self._settled.wait()
            await self._drop_stale()
        self._raise_if_broken()

    def _chosen(self) -> list[Group] | None:
        return self.staleness.choose(self._ready, self._started, self.config.batch_size)

    async def _drop_stale(self) -> None:
        """Drop accepted groups that have become too old; they were recorded as kept, and are recorded again."""
        if not self.staleness.drops:
            return
        for group in [group for group in self.ready_groups if self.staleness.too_old(group)]:
            with anyio.CancelScope(shield=True):
                await self._record(attrs.evolve(group, outcome="dropped", reason="too old"))
                self._ready = [other for other in self._ready if other is not group]
                self.data_buffer.settle(group.prompt)
                self.run_metrics.reasons["too old"] += 1
                self.accounting.ready -= 1
                self.accounting.dropped += 1

    def _seal_batch(self, seconds: float) -> list[Sample]:
        groups = self._chosen()
        assert groups is not None, "a batch is sealed when it is ready"
        samples = [sample.pack() for group in groups for sample in group.samples]
        numbers = batch_metrics(samples) | self.staleness.metrics(samples)
        if self._streaming:
            numbers |= {"idle/trainer_seconds": seconds, "idle/generator_seconds": self._idle.take()}
        for group in groups:
            self.data_buffer.settle(group.prompt)
        taken = {group.group_index for group in groups}
        self._ready = [group for group in self._ready if group.group_index not in taken]
        self.accounting.ready -= len(groups)
        self.accounting.in_batch += len(groups)
        self.accounting.check()
        self.metrics = {
            "batch": self.batches,
            "seconds": seconds,
            **numbers,
            **self.run_metrics.take_lengths(),
            **self.failures.metrics(),
            "abandoned_threads": len(abandoned()),
            "abandoned_coroutines": len(left_behind()),
            **{f"prompts/{name}": count for name, count in attrs.asdict(self.accounting).items()},
        }
        if self._rollout_log is not None:
            self._rollout_log.sealed(self.batches, sorted(taken), self.metrics, self.accounting)
        self.batches += 1
        self._dropped_for_batch = 0
        return samples

    # -- keeping groups in work --

    def _top_up(self) -> None:
        if self._tasks is None:
            raise RuntimeError("the manager was closed while this batch was being filled")
        pending = len(self._ready) + self.accounting.in_flight
        wanted = self.config.groups_in_work - pending
        room = self.staleness.room(pending, self.config.batch_size) if self._streaming else None
        for _ in range(wanted if room is None else min(wanted, room)):
            try:
                (prompt,) = self.data_buffer.get_prompts(1)
            except DataExhausted:
                return
            self._idle.stop()
            self.accounting.taken += 1
            self.accounting.in_flight += 1
            self._started[_group_index(prompt)] = self.staleness.current
            if _group_index(prompt) in self._finished_rollouts:
                self._again.add(_group_index(prompt))
            self._tasks.start_soon(self._run_group, prompt)

    async def _run_group(self, prompt: Prompt) -> None:
        """Play one group to its end, and account for it whatever happens."""
        finished = self._finished_rollouts.setdefault(_group_index(prompt), {})
        settled = False
        try:
            if self._rollout_log is not None:
                self._rollout_log.taken(prompt)
            async with self._turnstile:  # groups begin one after another: together they would hold up the event loop
                await anyio.lowlevel.checkpoint()
            with at(f"group {prompt.group_index}"):
                group = await self._player.run(prompt, finished)
                with anyio.CancelScope(shield=True):
                    await self._record(group)
                    self._settle(group)
                    settled = True
                    del self._finished_rollouts[_group_index(prompt)]
        except Exception as error:  # noqa: BLE001 - a broken law: generate_batch raises it, not the task group
            self._broken = self._broken or error
        finally:
            self._again.discard(_group_index(prompt))
            if not settled:
                self.data_buffer.put_back([prompt])
                self.accounting.in_flight -= 1
                self.accounting.returned += 1
            del self._started[_group_index(prompt)]
            if not self.accounting.in_flight:
                self._idle.start()
            self._settled.set()
        if settled and self._may_go_on():
            self._top_up()

    def _may_go_on(self) -> bool:
        """Whether groups are to be started while nobody waits for a batch."""
        hopeful = self._broken is None and self._rejected_in_a_row < self.config.rejections_allowed
        return self._streaming and self._tasks is not None and hopeful

    async def _record(self, group: Group) -> None:
        if self._rollout_log is not None:
            await self._rollout_log.settled(group)
        if self._on_group is not None:
            name = f"recording with {function_name(self._on_group)}"
            await call_foreign(RolloutsError, name, self._on_group, group, seconds=_RECORD_SECONDS)

    def _settle(self, group: Group) -> None:
        self.run_metrics.add(group)
        self.accounting.in_flight -= 1
        if group.outcome == "kept":  # stays out of the buffer until its batch: a state saved meanwhile includes it
            self.accounting.ready += 1
            self._ready.append(group)
            self._rejected_in_a_row = 0
            self._failure_causes.clear()
            return
        self.data_buffer.settle(group.prompt)
        self._rejected_in_a_row += 1
        if group.outcome == "dropped":
            self.accounting.dropped += 1
            self._dropped_for_batch += 1
        else:
            self.accounting.failed += 1
            self._failure_causes[group.reason] += 1
            if self.config.handling(cause_of(group.samples)).then == "stop":
                self._broken = self._broken or GenerateFailure(f"group {group.group_index} failed: {group.reason}")

    def _is_scarce(self) -> bool:
        """Whether so many groups were dropped for this batch as were started beyond its size."""
        return self._dropped_for_batch >= self.config.groups_in_work - self.config.batch_size

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken

    def _raise_if_hopeless(self) -> None:
        overdrawn = self.failures.overdrawn()
        if overdrawn is not None:
            raise GenerateFailure(f"{overdrawn}. {len(self._ready)} accepted groups are kept; {self.accounting}")
        if self._rejected_in_a_row < self.config.rejections_allowed:
            return
        count, failed = self._rejected_in_a_row, self._failure_causes.total()
        causes = "; ".join(f"{number} × {cause}" for cause, number in self._failure_causes.most_common(3))
        self._rejected_in_a_row = 0
        self._failure_causes.clear()
        kept = f"{len(self._ready)} accepted groups are kept; {self.accounting}"
        if failed > count - failed:
            raise GenerateFailure(f"{failed} of the last {count} groups failed, none was accepted: {causes}. {kept}")
        name = function_name(self.config.filter_fn)
        raise FilterFailure(
            f"filter {name} accepted none of the last {count} groups ({failed} of them failed before it); "
            f"mean reward {self.run_metrics.mean_reward}. {kept}"
        )


def _group_index(prompt: Prompt) -> int:
    assert prompt.group_index is not None, "the buffer numbers its prompts"
    return prompt.group_index
