"""The rollouts of one launch: its pipeline, and one manager that persists between calls.

Invariant: without carry-over, a batch contains only tokens of the weights of its call: rollouts left over when a batch
is full are cancelled, and their prompts come out first in the next call. With carry-over, groups in flight or ready
when a call returns serve the next one, and no finished rollout is discarded. Unless rollouts are fully asynchronous,
our policy samples nothing between two calls: replies pause between two tokens and resume from their own ids. An error
ends its call; the next call works.

This module reaches slime's data source and samples through its sibling modules; it knows neither Ray nor slime's
engines.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

import anyio
import attrs

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.errors import ConfigError, EndpointError, at
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.shared import policy_of
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime.buffer import Taken, TrainerBuffer
from rollouts.integrations.slime.convert import check_training_batch, leaves, set_advantages
from rollouts.integrations.slime.custom_calls import CustomCalls
from rollouts.integrations.slime.evaluation import evaluate
from rollouts.integrations.slime.event_loop import event_loop
from rollouts.integrations.slime.extras import add_spans
from rollouts.integrations.slime.given_samples import is_begun
from rollouts.integrations.slime.pipeline import Pipeline, policy_of_launch
from rollouts.integrations.slime.records import DynamicFilterOutput, family, records
from rollouts.integrations.slime.returned_samples import slime_sample_of, versions_of, view
from rollouts.integrations.slime.settings import ADVANTAGES, Settings, VocabSizeOf
from rollouts.training.comparisons import by_key
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.rows import check_fields
from rollouts.training.staleness import Staleness
from rollouts.training.types import Group, Sample

__all__ = ["TrainerRollouts"]

_LOG = logging.getLogger(__name__)
_STALE = "stale"


class _Ages:
    """How many policy versions old the tokens of a launch are; filters ask from threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._lock = settings, threading.Lock()
        self._staleness = Staleness(max_staleness=settings.max_staleness)
        """Of every policy version seen so far."""

    def observe(self, versions: Iterable[str], *, earlier: bool = False) -> int:
        """Take note of versions; return the age of the oldest."""
        versions = list(versions)
        with self._lock:
            self._staleness.observe(versions, earlier=earlier)
            return self._staleness.age_of(versions)

    def is_stale(self, samples: Iterable[Sample]) -> bool:
        """Whether the oldest token that would be trained is more than ``max_staleness`` versions old."""
        masked = self._settings.mask_earlier_versions
        used = [name for sample in samples for name in versions_of(sample, mask_earlier_versions=masked)]
        return self._staleness.too_old(self.observe(used))

    def filtered(self, further: Any, samples: list[Sample]) -> Any:
        """A filter that drops stale groups, and applies another filter to the rest."""
        if self.is_stale(samples):
            return DynamicFilterOutput(False, _STALE)
        return True if further is None else further(samples)

    def masks(self, sample: Sample, record: Any) -> bool:
        """Whether a batch trains only its call's weights, and others sampled the last token: the mask has the others.

        Engines that never pause have several versions in a call.
        """
        settings = self._settings
        if not (settings.mask_earlier_versions and settings.carry_over) or settings.fully_async:
            return False
        last = [span.version for span in sample.versions[-1:]]
        return self.observe(last or map(str, record.weight_versions[-1:])) > 0


class TrainerRollouts:
    """Serves the calls of one trainer; call every public method from the trainer's thread.

    ``kept`` are groups that the data source did not take back from an earlier launch.
    """

    def __init__(self, args: Any, settings: Settings, data_source: Any, kept: Sequence[list[Any]] = ()) -> None:
        self.args = args
        self.settings = settings
        self.data_source = data_source
        self.buffer = TrainerBuffer(data_source, settings.n_samples_per_prompt, settings.wave, kept)
        self.buffer.on_new = self._add_finished
        self._ages = _Ages(settings)
        self._settled: list[Group] = []
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._portal = event_loop()
        try:
            self.policy, self.pipeline, self.manager = self._portal.call(self._build)
            self._stack.callback(self._portal.call, self._stop)
            if settings.carry_over:  # else each batch cancels its leftovers
                self._stack.enter_context(self._portal.wrap_async_context_manager(self.manager))
            self._stack.enter_context(calm_collector())  # a collector pause delays every rollout
        except BaseException:
            self._stack.close()
            raise

    def __repr__(self) -> str:
        return f"<TrainerRollouts {self.manager!r} · {self.policy!r}>"

    async def _build(self) -> tuple[ResumablePolicy, Pipeline, AsyncRolloutManager]:
        settings = self.settings
        client = policy_of(settings.endpoint, VocabSizeOf(settings.endpoint.model))
        self._stack.callback(self._portal.call, client.aclose)
        policy = policy_of_launch(settings, client)
        self._calls = CustomCalls(client.abort_all)
        pipeline = Pipeline(self.args, settings, policy, self._calls, self.buffer.taken.__getitem__)
        await pipeline.check()
        config = pipeline.training()
        if settings.carry_over and settings.max_staleness is not None:
            config = attrs.evolve(config, filter_fn=functools.partial(self._ages.filtered, config.filter_fn))
        return policy, pipeline, AsyncRolloutManager(config, self.buffer, on_group=self._on_group)

    # -- calls --

    def train(self, rollout_id: int) -> Any:
        """Fill one training batch; return ``RolloutFnTrainOutput``."""
        if hasattr(self.data_source, "in_progress"):
            self.data_source.in_progress = self._in_progress
        return self._call(self._train, rollout_id)

    def evaluate(self, rollout_id: int) -> Any:
        """Play every data set of the evaluation; return ``RolloutFnEvalOutput``."""
        return self._call(self._evaluate, rollout_id)

    def _call(self, function: Callable[[int], Any], rollout_id: int) -> Any:
        future = self._portal.start_task_soon(function, rollout_id, name=f"rollout {rollout_id}")
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> list[list[Any]]:
        """Cancel rollouts in flight; return every group to the data source with its finished rollouts.

        Returns:
            The groups that the source does not take back, e.g. because it is read-only.
        """
        self._stack.pop_all().close()
        groups = []
        for ready in self.manager.ready_groups:
            taken = self.buffer.taken.pop(ready.group_index)
            groups.append(self._group_records(taken, _by_number(ready.samples, len(taken.group))))
        for returned, taken in self.buffer.drain():
            finished = {} if returned is None else self.manager.finished_rollouts(returned)
            groups.append(self._group_records(taken, finished))
        try:
            if groups:
                self.data_source.add_samples(groups)
        except Exception as error:  # noqa: BLE001 - foreign code
            name = type(self.data_source).__name__
            _LOG.info("%s takes no groups back (%r): %d are the first of the next call", name, error, len(groups))
            return groups
        return []

    # -- in the loop --

    async def _train(self, rollout_id: int) -> Any:
        self.pipeline.rollout_id = self.buffer.rollout_id = rollout_id
        resumed = self.policy.resumed
        problems: dict[str, float] = {}
        try:
            with at(f"rollout {rollout_id}"):
                await self._record_version()
                stale = self.manager.withdraw(lambda group: self._ages.is_stale(group.samples))
                for group in stale:
                    self.buffer.play_again(group.group_index, stale=True)
                await self._filter_waiting()
                self.policy.resume()
                samples = await self.manager.generate_batch()
        finally:
            if not self.settings.carry_over:
                problems["rollouts/groups_begun_again"] = self._discard_leftovers()
            if not self.settings.fully_async and not await self._stop():
                problems["rollouts/pause_failed"] = 1
        with self._lock:
            settled, self._settled = self._settled, []
        groups = self._assemble(samples)
        if self.settings.sample_filter is not None:
            load_function(self.settings.sample_filter)(self.args, groups)
        if self.settings.all_samples_process is not None:
            process = load_function(self.settings.all_samples_process)
            found, fans_out = self.buffer.taken, isinstance(groups[0][0], list)
            dropped = [each for each in settled if each.outcome == "dropped" and each.group_index in found]
            more = [self._played(found[each.group_index], each.samples, fans_out=fans_out) for each in dropped]
            every = sorted([*groups, *more], key=lambda group: next(leaves(group)).index)
            process(self.args, every, self.data_source.get_samples)
        self._release(settled)
        metrics = {**self._metrics(settled, len(stale)), "rollouts/resumed": self.policy.resumed - resumed, **problems}
        return records().train_output(samples=groups, metrics=metrics)

    async def _evaluate(self, rollout_id: int) -> Any:
        try:
            data, metrics = await evaluate(self.settings, self.pipeline, rollout_id)
        except BaseException:
            if not self.settings.fully_async:  # else training rollouts run on the same servers
                await self._stop()
            raise
        return records().eval_output(data=data, metrics=metrics)

    async def _stop(self) -> bool:
        """Stop everything that samples; whether nothing is sampled any more."""
        with anyio.CancelScope(shield=True):
            try:
                await self.policy.pause()
                await self._calls.stop(lets_return=self.settings.partial_rollout)
            except EndpointError:
                return False
        return True

    def _discard_leftovers(self) -> int:
        """Discard the leftovers of a batch, since the next one has other weights; their prompts come out first."""
        surplus = self.manager.withdraw(lambda group: True)
        for group in surplus:
            self.buffer.play_again(group.group_index)
        for index in self.buffer.waiting:
            self.manager.add_finished_rollouts(index, {})
        return len(surplus) + len(self.buffer.waiting)

    # -- groups that wait between two calls --

    async def _filter_waiting(self) -> None:
        """Let slime's buffer filter choose which groups of earlier calls continue, before anything is sampled.

        There are four cases: a chosen, unchanged group continues where it stopped; a changed group begins with the
        samples that the filter left; a group that is still in the buffer waits for the next call; any other group is
        never played.
        """
        if self.settings.buffer_filter is None or not self.settings.carry_over:
            return
        settled = {group.group_index for group in self._settled if group.outcome != "kept"}
        waiting = {index: self._waiting_group(index) for index in sorted(self.buffer.taken.keys() - settled)}
        before = {index: list(map(_state, group)) for index, group in waiting.items()}
        buffer = [*waiting.values(), *self.buffer.held]
        if not buffer:
            return
        choose, count = load_function(self.settings.buffer_filter), self.manager.config.max_inflight_groups
        chosen = {id(group): group for group in choose(self.args, None, buffer, count)}
        in_place = {
            index for index, group in waiting.items() if id(group) in chosen and _is_unchanged(group, before[index])
        }
        continued = {id(waiting[index]) for index in in_place}
        self.buffer.chosen += [group for key, group in chosen.items() if key not in continued]
        self.buffer.held = buffer
        await self._take_out(waiting.keys() - in_place, waiting)

    def _waiting_group(self, index: int) -> list[Any]:
        """A waiting group as slime's samples; an unfinished rollout is aborted, without the tokens so far."""
        taken = self.buffer.taken[index]
        group = self._in_progress(taken.group)
        for number, sample in enumerate(group):
            if getattr(sample.status, "value", "") in ("pending", "aborted"):
                group[number] = copy.copy(sample)
                group[number].metadata = dict(sample.metadata or {})
                group[number].status = records().sample.Status.ABORTED
                _set_start(group[number], taken.begun)
        return group

    async def _take_out(self, indices: Set[int], waiting: Mapping[int, list[Any]]) -> None:
        """Take groups out of the rollouts; a group that the buffer does not list any more is lost."""
        await self.manager.put_back(indices)
        self.manager.withdraw(lambda group: group.group_index in indices)
        wanted = {id(group) for group in (*self.buffer.chosen, *self.buffer.held)}
        for index in indices:
            group = self.buffer.taken[index].group
            self.buffer.withdraw(index)
            self.manager.add_finished_rollouts(index, {})
            if id(waiting[index]) not in wanted and hasattr(self.data_source, "done"):
                self.data_source.done([group])

    # -- groups --

    def _assemble(self, samples: list[Sample]) -> list[Any]:
        """The batch in slime's shape: groups of samples, or groups of rollouts of samples if any rollout forks."""
        size = self.settings.n_samples_per_prompt
        by_group = by_key([sample.group_index for sample in samples], samples)
        lists = [sample for sample in samples if getattr(sample.trainer_record, "rollout", None) is not None]
        fans_out = len(samples) != len(by_group) * size or bool(lists)
        groups = [self._played(self.buffer.pop(index), by_group[index], fans_out=fans_out) for index in by_group]
        for sample in samples:  # a filter may set them after the record was made
            if self.settings.custom_advantage == ADVANTAGES:
                set_advantages(slime_sample_of(sample), sample)
            else:
                check_fields(sample, "slime", "advantages")
        if any(sample.rollout_log_probs is None for sample in leaves(groups)):
            for sample in leaves(groups):  # the trainer takes those of all samples, or computes its own
                sample.rollout_log_probs = None
        check_training_batch(groups, (self.settings.batch_size, size), self.pipeline.reading, self.settings.replay)
        return groups

    def _played(self, taken: Taken, samples: Sequence[Sample], *, fans_out: bool) -> list[Any]:
        """The samples of a group in slime's shape, with a list for each rollout if any fans out."""
        rollouts = _by_number(samples, len(taken.group))
        played = [[self._record_of(sample, taken) for sample in rollouts[number]] for number in sorted(rollouts)]
        if family().traces:
            add_spans(played, [taken.started.get(number) for number in sorted(rollouts)])
        fans_out = fans_out or any(len(rollout) > 1 for rollout in played)
        return played if fans_out else [rollout[0] for rollout in played]

    def _record_of(self, sample: Sample, taken: Taken) -> Any:
        """slime's sample of ours; it names its start if that was an earlier call.

        (slime 0.3.1, rollout/sglang_rollout.py: abort)
        """
        record = self.pipeline.finished(sample, taken)
        if taken.begun < self.pipeline.rollout_id:
            _set_start(record, taken.begun)
        if self._ages.masks(sample, record):
            record.loss_mask = [0] * record.response_length
        return record

    def _group_records(self, taken: Taken, finished: dict[int, list[Sample]]) -> list[Any]:
        """A group to return to the source: finished rollouts, and slime's original samples for the others."""
        group = list(taken.group)
        for number, samples in finished.items():
            # A fork does not fit the buffer (slime 0.3.1, rollout/data_source.py: RolloutDataSourceWithBuffer).
            if len(samples) == 1 and samples[0].reward is not None:
                group[number] = self.pipeline.returned(samples[0], taken)
                _set_start(group[number], taken.begun)
        return group

    def _add_finished(self, index: int, group: list[Any]) -> None:
        """Add the rollouts of a new group that are already finished, e.g. from a checkpoint."""
        finished: dict[int, list[Sample]] = {}
        for number, record in enumerate(group):
            if is_begun(record):
                self._ages.observe(map(str, record.weight_versions), earlier=True)
            if record.reward is None or getattr(record.status, "value", "") not in ("completed", "truncated"):
                continue
            try:
                sample = view(record, None, self.pipeline.reading)
            except ConfigError:
                continue  # not trainable: it is played again
            self._ages.observe(versions_of(sample, mask_earlier_versions=False), earlier=True)
            sample.group_index = index
            sample.index = sample.rollout_id = index * self.settings.n_samples_per_prompt + number
            finished[number] = [sample]
        if finished:
            self.manager.add_finished_rollouts(index, finished)

    def _in_progress(self, group: list[Any]) -> list[Any]:
        """A group in flight for the checkpoint: with its finished rollouts."""
        ready = {each.group_index: each for each in self.manager.ready_groups}
        for waiting in (*self.buffer.chosen, *self.buffer.held):
            if waiting[0].group_index is not None and waiting[0].group_index == group[0].group_index:
                return waiting
        for index, taken in list(self.buffer.taken.items()):
            if taken.group[0] is group[0]:
                finished = self.manager.finished_rollouts(index)
                if index in ready:
                    finished = _by_number(ready[index].samples, len(group))
                return self._group_records(taken, finished)
        return group

    # -- staleness --

    async def _record_version(self) -> None:
        """Request the engines' weight version; if they report none, the versions of sampled tokens count."""
        try:
            version = (await self.policy.describe()).weight_version
        except EndpointError:
            return
        if version is not None:
            self._ages.observe([version])

    # -- settled groups --

    def _on_group(self, group: Group) -> None:
        with self._lock:
            self._settled.append(group)
            outcomes = Counter(each.outcome for each in self._settled)
        name, count, size = f"rollout {self.pipeline.rollout_id}", outcomes["kept"], self.settings.batch_size
        if outcomes.total() == 1:
            text = "%s: first sample: %r, label: %.100s, reward: %s"
            first = group.samples[0]
            _LOG.info(text, name, f"{first.prompt}{first.response}", first.label, first.reward)
        if group.outcome == "kept" and 4 * count // size > 4 * (count - 1) // size:
            lost = outcomes["dropped"], outcomes["failed"]
            _LOG.info("%s: %d of %d groups accepted, %d dropped, %d failed", name, count, size, *lost)

    def _release(self, settled: list[Group]) -> None:
        """Remove settled groups that are in no batch; stale ones are played again."""
        for group in settled:
            if group.outcome == "kept" or group.group_index not in self.buffer.taken:
                continue  # in a batch, or taken out by a buffer filter
            if group.reason == _STALE:
                self.buffer.play_again(group.group_index, stale=True)
            else:
                self.buffer.pop(group.group_index)

    def _metrics(self, settled: list[Group], stale: int) -> dict[str, float]:
        """The metrics of this call; slime names ``rollout/dynamic_filter/drop_...``.

        (slime 0.3.1, rollout/filter_hub/base_types.py: MetricGatherer)
        """
        drops = Counter(group.reason for group in settled if group.outcome == "dropped")
        drops[_STALE] += stale
        failures = Counter(group.reason.partition(":")[0] for group in settled if group.outcome == "failed")
        return {
            **{f"rollout/dynamic_filter/drop_{reason}": count for reason, count in sorted(drops.items()) if count},
            **{f"rollouts/failed_groups/{kind}": count for kind, count in sorted(failures.items())},
            **{f"rollouts/{name}": value for name, value in self.manager.metrics.items()},
            **({"rollouts/stale_prompts_given_up": self.buffer.given_up} if self.buffer.given_up else {}),
            "rollouts/groups_carried": len(self.manager.ready_groups) + self.manager.accounting.in_flight,
        }


def _set_start(record: Any, begun: int) -> None:
    """Set ``start_rollout_id`` of slime's sample, unless it is set."""
    if record.metadata is None:
        record.metadata = {}
    record.metadata.setdefault("start_rollout_id", begun)


def _state(sample: Any) -> dict[str, Any]:
    """The attributes of slime's sample, with copies of its lists and dicts."""
    return {name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in vars(sample).items()}


def _is_unchanged(group: list[Any], before: list[dict[str, Any]]) -> bool:
    """Whether samples have the attributes of an earlier :func:`_state`."""
    try:
        return list(map(_state, group)) == before
    except (ValueError, RuntimeError):  # another array or tensor in the place of one
        return False


def _by_number(samples: Any, size: int) -> dict[int, list[Sample]]:
    """The samples of a group, by the position of their rollout in the group."""
    return by_key([sample.index % size for sample in samples], samples)
