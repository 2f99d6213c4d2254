"""The group scheduler: keeps groups in work, and hands out whole batches.

Laws kept here:

4. Accounting: every prompt taken from the buffer ends in exactly one place: in a batch, dropped by the filter,
   recorded as failed, or back in the buffer. Nothing is thrown away for being long: groups in flight when a batch is
   full stay in flight for the next one; when the manager closes they go back, and their finished rollouts are kept.
5. Groups: a batch holds whole groups of exactly ``n_samples_per_prompt`` rollouts of one prompt, ordered by
   ``group_index``; a group index is never used for two prompts.
6. A bad rollout is data: what a user's function raises is attributed, counted, retried, and recorded with its group. A
   broken law stops the run.

This module knows no model, no network and no agent: it is handed a ``generate_fn``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import attrs
from anyio.abc import TaskGroup

from rollouts.dtypes import Prompt
from rollouts.errors import (
    ConfigError,
    DataExhausted,
    Failure,
    FilterFailure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
    TokenMismatchError,
    at,
    boundary,
    call_foreign,
    function_name,
    shortened,
    waits,
)
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.metrics import Accounting, RunMetrics, batch_metrics
from rollouts.training.rewards import score, score_group
from rollouts.training.types import FilterFn, Group, Outcome, Sample, Status

__all__ = ["AsyncRolloutManager"]

OnGroup = Callable[[Group], None]

_RECORD_SECONDS = 60.0
"""Deadline of recording one settled group; it is shielded, so that what is recorded and what is counted agree."""


class AsyncRolloutManager:
    """Fills batches from a buffer of prompts.

    Use it as an async context manager, and rollouts in flight live on between batches::

        async with AsyncRolloutManager(config, data_buffer) as manager:
            samples = await manager.generate_batch()

    Without the context each :meth:`generate_batch` ends what is in flight, hands its prompts back to the buffer (they
    come out first the next time) and keeps the rollouts of theirs that are finished. A group is handed back once: the
    next call waits for it, so that long rollouts are not left out for being long.

    Args:
        config: what to do; may also be given second.
        data_buffer: where prompts come from.
        on_group: called in a worker thread with every settled group, kept, dropped or failed, e.g. to write it to disk.

    Attributes:
        accounting: where every prompt went; adds up at every moment.
        run_metrics: totals over the settled groups.
        metrics: the numbers of the last batch.
    """

    def __init__(
        self,
        config: RolloutConfig | DataBuffer,
        data_buffer: DataBuffer | RolloutConfig,
        *,
        on_group: OnGroup | None = None,
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
        self.metrics: dict[str, float] = {}
        self.batches = 0
        self._on_group = on_group
        self._ready: list[Group] = []
        self._finished_rollouts: dict[int, dict[int, list[Sample]]] = {}  # of groups that were handed back
        self._again: set[int] = set()
        self._rejected_in_a_row = 0
        self._failure_causes: Counter[str] = Counter()
        self._broken: BaseException | None = None
        self._settled = anyio.Event()
        self._tasks: TaskGroup | None = None

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
        self.run_metrics.reasons["stale"] += len(stale)
        return stale

    def finished_rollouts(self, group_index: int) -> dict[int, list[Sample]]:
        """The finished rollouts of a group that went back to the buffer, by their number in the group."""
        return dict(self._finished_rollouts.get(group_index, {}))

    def adopt(self, group_index: int, rollouts: Mapping[int, list[Sample]]) -> None:
        """Give rollouts that were finished elsewhere; the group goes on with those that are missing."""
        self._finished_rollouts[group_index] = dict(rollouts)

    def waiting_for(self, count: int = 1) -> list[str]:
        """What is waited for longest at this moment: who, what, since when."""
        return [str(wait) for wait in waits()[:count]]

    async def generate_batch(self) -> list[Sample]:
        """Generate until ``batch_size`` groups are accepted.

        Returns:
            ``batch_size * n_samples_per_prompt`` samples (more where rollouts fork), by group index, then index.

        Raises:
            DataExhausted: the buffer ran dry first; finished groups stay in :attr:`ready_groups`.
            FilterFailure: the filter rejected ``patience`` groups in a row.
            GenerateFailure: that many in a row were lost, mostly to failures; or ``on_failure="stop"``.
        """
        began = time.monotonic()
        if self._tasks is not None:
            await self._gather_groups()
        else:
            async with self:
                await self._gather_groups(finish_again=True)
        # Nothing is awaited from here on: a batch that is counted is a batch that is handed out.
        return self._seal_batch(time.monotonic() - began)

    async def _gather_groups(self, *, finish_again: bool = False) -> None:
        """Wait until enough groups for a batch are ready; also for those that were handed back before, if asked."""
        while len(self._ready) < self.config.batch_size or (finish_again and self._again):
            self._raise_if_broken()
            self._raise_if_hopeless()
            self._top_up()
            if not self.accounting.in_flight:
                raise DataExhausted(
                    f"{len(self._ready)} of {self.config.batch_size} groups are accepted and no prompt is left: "
                    f"{self.data_buffer!r}; {self.accounting}"
                )
            await self._settled.wait()
        self._raise_if_broken()

    def _seal_batch(self, seconds: float) -> list[Sample]:
        groups = self.ready_groups[: self.config.batch_size]
        samples = [sample.pack() for group in groups for sample in group.samples]
        numbers = batch_metrics(samples)
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
            **{f"prompts/{name}": count for name, count in attrs.asdict(self.accounting).items()},
        }
        self.batches += 1
        return samples

    # -- keeping groups in work --

    def _top_up(self) -> None:
        if self._tasks is None:
            raise RuntimeError("the manager was closed while this batch was being filled")
        wanted = self.config.groups_in_work - len(self._ready) - self.accounting.in_flight
        for _ in range(wanted):
            try:
                (prompt,) = self.data_buffer.get_prompts(1)
            except DataExhausted:
                return
            self.accounting.taken += 1
            self.accounting.in_flight += 1
            if _group_index(prompt) in self._finished_rollouts:
                self._again.add(_group_index(prompt))
            self._tasks.start_soon(self._run_group, prompt)

    async def _run_group(self, prompt: Prompt) -> None:
        """Play one group to its end, and account for it whatever happens."""
        finished = self._finished_rollouts.pop(_group_index(prompt), {})
        settled = False
        try:
            with at(f"group {prompt.group_index}"):
                group = await self._play(prompt, finished)
                with anyio.CancelScope(shield=True):
                    await self._record(group)
                    self._settle(group)
                    settled = True
        except Exception as error:  # noqa: BLE001 - a broken law: generate_batch raises it, not the task group
            self._broken = self._broken or error
        finally:
            self._again.discard(_group_index(prompt))
            if not settled:
                self._finished_rollouts[_group_index(prompt)] = finished
                self.data_buffer.put_back([prompt])
                self.accounting.in_flight -= 1
                self.accounting.returned += 1
            self._settled.set()
            self._settled = anyio.Event()

    async def _record(self, group: Group) -> None:
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
        else:
            self.accounting.failed += 1
            self._failure_causes[group.reason] += 1
            if self.config.on_failure == "stop":
                self._broken = self._broken or GenerateFailure(f"group {group.group_index} failed: {group.reason}")

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken

    def _raise_if_hopeless(self) -> None:
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

    # -- one group --

    async def _play(self, prompt: Prompt, finished: dict[int, list[Sample]]) -> Group:
        """Generate, score and filter one group; ``finished`` holds rollouts by number and is filled."""
        lost: dict[int, list[Sample]] = {}
        broken: list[Exception] = []
        async with anyio.create_task_group() as rollouts:

            async def run(number: int) -> None:
                try:
                    samples, sound = await self._run_rollout(prompt, number)
                except Exception as error:  # noqa: BLE001 - a broken law, raised below without an exception group
                    broken.append(error)
                else:
                    (finished if sound else lost)[number] = samples
                if broken or lost:
                    rollouts.cancel_scope.cancel()  # the group is lost: its siblings need not go on

            for number in range(self.config.n_samples_per_prompt):
                if number not in finished:
                    rollouts.start_soon(run, number)
        if broken:
            raise broken[0]
        if not lost and len(finished) != self.config.n_samples_per_prompt:
            raise TokenMismatchError(f"group {prompt.group_index} ended with rollouts {sorted(finished)} only")
        every = finished | lost
        samples = tuple(sample for number in sorted(every) for sample in every[number])
        if lost:
            reason = next(sample.failure for sample in next(iter(lost.values())) if sample.failure)
            return Group(prompt, samples, "failed", f"{reason.kind}: {reason.message}")
        return await self._judge(prompt, samples)

    async def _judge(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Group:
        """Score the group where it is scored whole, and ask the filter."""
        config = self.config
        outcome: Outcome = "kept"
        reason = ""
        try:
            if config.group_rm and config.reward_fn is not None:
                await score_group(samples, config.reward_fn, seconds=config.reward_seconds)
            if config.filter_fn is not None:
                kept, why = await self._ask_filter(config.filter_fn, samples)
                if not kept:
                    outcome, reason = "dropped", why
            _pack(samples, GenerateFailure, "after reward and filter")
        except (TokenMismatchError, ConfigError):
            raise
        except RolloutsError as error:
            failure = Failure.of(error)
            for sample in _salvaged(samples):
                sample.failure = failure
            outcome, reason = "failed", f"{failure.kind}: {failure.message}"
        return Group(prompt, samples, outcome, reason)

    async def _ask_filter(self, filter_fn: FilterFn, samples: Sequence[Sample]) -> tuple[bool, str]:
        """The filter's answer, and why it dropped the group: its own reason where it gives one, else its name.

        A bool, or an object with ``keep`` and perhaps ``reason`` and ``keep_when_insufficient``, which keeps a group
        that a batch could not be filled without.
        """
        name = f"filter {function_name(filter_fn)}"
        seconds = self.config.filter_seconds
        answer: Any = await call_foreign(FilterFailure, name, filter_fn, list(samples), seconds=seconds)
        with boundary(FilterFailure, name):
            keep: Any = getattr(answer, "keep", answer)
            keep = keep.item() if hasattr(keep, "item") else keep  # a NumPy or torch scalar
            reason = str(getattr(answer, "reason", None) or function_name(filter_fn))
            if keep is False and getattr(answer, "keep_when_insufficient", False):
                keep = len(self._ready) + self.accounting.in_flight <= self.config.batch_size
        if not isinstance(keep, bool):
            raise FilterFailure(f"{name}: got {shortened(answer)}; expected True or False")
        return keep, reason

    # -- one rollout --

    async def _run_rollout(self, prompt: Prompt, number: int) -> tuple[list[Sample], bool]:
        """One member of a group, with its attempts: its samples, and whether they are sound."""
        index = _group_index(prompt) * self.config.n_samples_per_prompt + number
        request = attrs.evolve(prompt, index=index)
        with at(f"group {prompt.group_index} · sample {number}"):
            for attempt in range(1, self.config.max_attempts + 1):
                samples = await self._attempt(request)
                sound = not _is_lost(samples)
                for sample in samples:
                    sample.metrics["attempts"] = attempt
                if sound:
                    break
        return samples, sound

    async def _attempt(self, request: Prompt) -> list[Sample]:
        """Generate and score once; a failure is a sample with status FAILED that says why."""
        samples: list[Sample] = []
        try:
            samples = await self._generate(request)
            if not self.config.group_rm and not _is_lost(samples):
                for sample in samples:
                    await score(sample, self.config.reward_fn, seconds=self.config.reward_seconds)
                _pack(samples, RewardFailure, f"after reward {function_name(self.config.reward_fn)}")
        except (TokenMismatchError, ConfigError):
            raise
        except RolloutsError as error:
            failure = Failure.of(error)
            samples = _salvaged(samples) or [_placed(Sample(prompt=request.prompt, label=request.label), request)]
            for sample in samples:
                sample.status, sample.failure = Status.FAILED, failure
        for sample in samples:
            if sample.status in _LOST and not isinstance(sample.failure, Failure):
                sample.failure = Failure.of(GenerateFailure(f"the rollout ended {sample.status.value}"))
        return samples

    async def _generate(self, request: Prompt) -> list[Sample]:
        """Call the generate function for one rollout, and check what it gave."""
        name = f"generate_fn {function_name(self.config.generate_fn)}"
        with boundary(GenerateFailure, name, seconds=self.config.rollout_seconds):
            samples: Any = await self.config.generate_fn([request])
        if not isinstance(samples, Sequence) or not samples or not all(isinstance(s, Sample) for s in samples):
            raise GenerateFailure(
                f"{name}: got {shortened(samples)}; expected a list of one Sample (more where it forks)"
            )
        if len({id(sample) for sample in samples}) < len(samples):
            raise GenerateFailure(f"{name}: got {shortened(samples)}; expected a new Sample for each branch")
        for sample in samples:
            if sample.index not in (None, request.index):
                raise GenerateFailure(f"{name}: got {sample!r}; expected a new Sample for rollout {request.index}")
            _placed(sample, request)
        _pack(samples, GenerateFailure, name)
        return list(samples)


_LOST = (Status.FAILED, Status.ABORTED)
"""A rollout that ended so is tried again; for good, it costs its group."""


def _is_lost(samples: Sequence[Sample]) -> bool:
    return any(sample.status in _LOST for sample in samples)


def _placed(sample: Sample, request: Prompt) -> Sample:
    sample.group_index, sample.index, sample.rollout_id = request.group_index, request.index, request.index
    return sample


def _pack(samples: Sequence[Sample], failure: type[RolloutsError], source: str) -> None:
    """Check samples that foreign code had in hand, and hold them packed; what does not pack is its failure."""
    for sample in samples:
        try:
            sample.pack()
        except ConfigError as error:
            raise failure(f"{source}: {error}") from error


def _salvaged(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of something that failed, for the record: columns that do not pack are emptied."""
    for sample in samples:
        try:
            sample.pack()
        except ConfigError:
            sample.tokens, sample.loss_mask, sample.rollout_log_probs = [], [], None
            sample.versions, sample.calls, sample.metrics = [], [], {}
    return list(samples)


def _group_index(prompt: Prompt) -> int:
    assert prompt.group_index is not None, "the buffer numbers its prompts"
    return prompt.group_index
