"""slime's rewards, filters and teachers as ours, and our filters as slime's.

Invariant: a function of slime gets slime's samples and a function of ours gets ours, whichever side calls it. Its
changes to slime's sample persist: the batch contains the same object. A dict reward keeps all its entries; the entry of
``--reward-key`` is the number that is trained on.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from rollouts.concurrency.gathered import gather
from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime.convert import Reading, add_teacher, leaves
from rollouts.integrations.slime.given_samples import has_images
from rollouts.integrations.slime.records import family, records
from rollouts.rewards.teachers import Teacher
from rollouts.training.types import Sample, Status

__all__ = ["SlimeFilter", "SlimeReward", "as_slime_filter", "plain_reward", "refuse_groups_of_one", "score_by"]

RecordOf = Callable[[Sample], Any]
"""Returns slime's sample of ours: the same object each time."""


@attrs.frozen
class SlimeReward:
    """The launch's reward, ``--custom-rm-path`` or ``--rm-type``, as our ``reward_fn``.

    A sample that a generate function scored is not scored again, one call scores the list of samples of a forked
    rollout, and with ``--group-rm`` one call scores the group (slime 0.3.1, rollout/sglang_rollout.py:
    generate_and_rm, generate_and_rm_group). A sample may name its own reward, as a field or as ``rm_type`` of its
    metadata.
    """

    args: Any
    path: str | None
    reading: Reading
    record_of: RecordOf

    async def __call__(self, sample: Sample | list[Sample]) -> Any:
        """Score a sample, or a group where ``--group-rm`` is set."""
        if isinstance(sample, list):
            group = [self.record_of(entry) for entry in sample]
            await self._score_all(group, "group_reward_model")
            return [self._number(entry.reward) for entry in group]
        record = self.record_of(sample)
        if record.reward is None and sample.trainer_record.rollout is not None:
            await self._score_all([entry for entry in sample.trainer_record.rollout if entry.reward is None])
        elif record.reward is None:
            with _traced(record, "reward_model"):
                record.reward = await self._call(record)
        return self._number(record.reward)

    async def _score_all(self, samples: list[Any], span: str = "reward_model") -> None:
        with _traced(samples, span):
            values = await self._call(samples)
        try:  # a list, a generator, an array or a tensor, but nothing without an order
            rewards = [] if isinstance(values, str | bytes | Mapping | Set) else list(values)
        except TypeError:
            rewards = []
        if len(rewards) != len(samples):
            raise RewardFailure(f"{self.path}: got {shortened(values)}; expected a list of {len(samples)} rewards")
        for sample, value in zip(samples, rewards, strict=True):
            sample.reward = value

    async def _call(self, samples: Any) -> Any:
        path, spec = getattr(self.args, "custom_rm_path", None), getattr(samples, "reward_spec", None)  # miles' field
        if isinstance(samples, list) and path is None:
            return await gather(*map(self._call, samples))  # no function of the launch takes a list
        if not isinstance(samples, list):
            path = getattr(samples, "custom_rm_path", None) or getattr(spec, "custom_rm_path", None) or self.path
        if path is not None:
            value = load_function(path)(self.args, samples)
            return await value if inspect.isawaitable(value) else value
        metadata = samples.metadata if isinstance(samples.metadata, dict) else {}
        if not (metadata.get("rm_type") or getattr(spec, "rm_type", None) or getattr(self.args, "rm_type", None)):
            expected = "a reward of the generate function, --custom-rm-path, --rm-type, or rm_type in the metadata"
            raise RewardFailure(f"reward of slime sample {samples.index}: got None; expected {expected}")
        return await importlib.import_module(f"{family().package}.rollout.rm_hub").async_rm(self.args, samples)

    def _number(self, value: Any) -> Any:
        key = self.reading.reward_key
        if self.reading.any_reward and value is not None:
            return self.reading.number(value)  # slime's sample keeps the reward itself
        if not isinstance(value, dict):
            return value
        if key is None or key not in value:
            raise RewardFailure(f"reward: got {shortened(value)}; expected the key that --reward-key names ({key})")
        return value[key]


@attrs.frozen
class SlimeFilter:
    """The launch's dynamic sampling filter as our ``filter_fn``.

    It gets the samples of a group, as in slime: where a custom generate function returned a list for a rollout, that
    list. The forks of a recipe's rollout are in the one flat list. Rewards that it changes are trained as it left them.
    """

    args: Any
    path: str
    record_of: RecordOf
    read_reward: Callable[[Sample], None]
    """Reads our reward from slime's sample."""

    @property
    def __name__(self) -> str:
        return self.path.rpartition(".")[2]

    def __call__(self, samples: Sequence[Sample]) -> Any:
        group: list[Any] = []
        for sample in samples:
            record = self.record_of(sample)
            rollout = sample.trainer_record.rollout
            if rollout is None:
                group.append(record)
            elif not any(entry is rollout for entry in group):
                group.append(rollout)
        answer = load_function(self.path)(self.args, group)
        for sample in samples:
            self.read_reward(sample)
        return answer


async def score_by(teacher: Teacher, sample: Sample, record: Any) -> None:
    """Set ``teacher_log_probs`` of slime's sample, float32, as long as its response; its reward stays unchanged.

    slime's functions for distillation work without a teacher here, and replace the rewards
    (slime 0.3.1, rollout/on_policy_distillation.py: reward_func, post_process_rewards).

    Raises:
        ConfigError: the sample has images.
        RewardFailure: no answer, or not a logprob for each token.
    """
    import torch

    if has_images(record):
        expected = "none for samples with images: its requests have token ids only"
        raise ConfigError.of("args.rollouts_teacher_url", repr(teacher), expected)
    await teacher.score(sample)
    add_teacher(record, sample)
    if sample.teacher_column is None:  # it trains no token; slime's batch has a column of every sample, or of none
        record.teacher_log_probs = torch.zeros(record.response_length, dtype=torch.float32)


def _traced(samples: Any, name: str) -> AbstractContextManager[Any]:
    """A span in the trace of slime's samples."""
    if not (records().is_slime and family().traces):
        return nullcontext()
    module = importlib.import_module("slime.observability.trace_utils")
    span: AbstractContextManager[Any] = module.trace_span(samples, name)
    return span


def as_slime_filter(check: Callable[[list[Sample]], bool]) -> Callable[..., Any]:
    """Wrap a ``check_*`` function of ours for slime's ``--dynamic-sampling-filter-path``.

    It reads ``reward``, ``response``, ``response_length`` and ``status`` of slime's samples; groups with forked
    rollouts are flattened.
    """
    name = getattr(check, "__name__", type(check).__name__)

    def dynamic_filter(args: Any, samples: Any, **_: Any) -> Any:
        refuse_groups_of_one(name, getattr(args, "n_samples_per_prompt", None))
        keep = bool(check([_view(sample, args) for sample in leaves(list(samples))]))
        return records().filter_output(keep=keep, reason=None if keep else name)

    dynamic_filter.__name__ = name
    dynamic_filter.__doc__ = f"``{name}`` as slime's dynamic sampling filter."
    return dynamic_filter


def refuse_groups_of_one(name: str, size: int | None) -> None:
    """Raise if groups have one rollout and a filter needs a spread of rewards: it would drop every group.

    Raises:
        ConfigError: the filter needs a spread.
    """
    if size == 1 and ("nonzero_std" in name or name == "check_quality_and_diversity"):
        expected = f"at least 2 with the filter {name}: one reward has no spread"
        raise ConfigError.of("args.n_samples_per_prompt", 1, expected)


def plain_reward(sample: Any, args: Any) -> Any:
    """The trained number of slime's sample: its reward, or the entry of ``args.reward_key``."""
    key = getattr(args, "reward_key", None)
    return sample.reward[key] if key and isinstance(sample.reward, dict) else sample.reward


def _view(sample: Any, args: Any) -> Any:
    """A copy of slime's sample with the reward and the status that our filters read."""
    copied = copy.copy(sample)
    copied.reward, copied.status = plain_reward(sample, args), Status(getattr(sample.status, "value", sample.status))
    return copied
