"""slime's rewards and filters as ours, and our filters as slime's.

Invariant: a function of slime gets slime's samples and a function of ours gets ours, whichever side calls it. Its
changes to slime's sample persist: the batch contains the same object. A dict reward keeps all its entries; the entry of
``--reward-key`` is the number that is trained on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from rollouts.concurrency.task_groups import first_error
from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.integrations.slime.convert import leaves, reward_number
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.returned_samples import SlimeRecord
from rollouts.integrations.slime.settings import Settings, load_function
from rollouts.training.types import Sample, Status

__all__ = ["SlimeFilter", "SlimeReward", "as_slime_filter", "plain_reward", "refuse_groups_of_one"]

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
    key: str | None
    record_of: RecordOf
    any_reward: bool = attrs.field(default=False, kw_only=True)
    """Whether a reward may be anything, because a function of the launch makes it a number later."""

    async def __call__(self, sample: Sample | list[Sample]) -> Any:
        """Score a sample, or a group where ``--group-rm`` is set."""
        if isinstance(sample, list):
            group = [self.record_of(entry) for entry in sample]
            await self._score_all(group, "group_reward_model")
            return [self._number(entry.reward) for entry in group]
        record = self.record_of(sample)
        if record.reward is None:
            link = sample.trainer_record
            if isinstance(link, SlimeRecord) and link.rollout is not None:
                await self._score_all([entry for entry in link.rollout if entry.reward is None])
            else:
                with _traced(record, "reward_model"):
                    record.reward = await self._call(record)
        return self._number(record.reward)

    async def _score_all(self, samples: list[Any], span: str = "reward_model") -> None:
        with _traced(samples, span):
            values = await self._call(samples)
        rewards = _listed(values)
        if rewards is None or len(rewards) != len(samples):
            raise RewardFailure(f"{self.path}: got {shortened(values)}; expected a list of {len(samples)} rewards")
        for sample, value in zip(samples, rewards, strict=True):
            sample.reward = value

    async def _call(self, samples: Any) -> Any:
        of_list = getattr(self.args, "custom_rm_path", None)
        if isinstance(samples, list) and of_list is None:
            return await self._each(samples)
        path = of_list if isinstance(samples, list) else _reward_path(samples) or self.path
        if path is not None:
            value = load_function(path)(self.args, samples)
            return await value if inspect.isawaitable(value) else value
        if not (_reward_type(samples) or getattr(self.args, "rm_type", None)):
            expected = "a reward of the generate function, --custom-rm-path, --rm-type, or rm_type in the metadata"
            raise RewardFailure(f"reward of slime sample {samples.index}: got None; expected {expected}")
        return await importlib.import_module(family().rewards).async_rm(self.args, samples)

    async def _each(self, samples: list[Any]) -> list[Any]:
        """Score each sample alone: no function of the launch takes a list."""
        values: list[Any] = [None] * len(samples)

        async def score(number: int) -> None:
            values[number] = await self._call(samples[number])

        async with first_error() as calls:
            for number in range(len(samples)):
                calls.start_soon(score, number)
        return values

    def _number(self, value: Any) -> Any:
        if self.any_reward and value is not None:
            return reward_number(value, self.key, any_reward=True)  # slime's sample keeps the reward itself
        if not isinstance(value, dict):
            return value
        if self.key is None or self.key not in value:
            raise RewardFailure(
                f"reward: got {shortened(value)}; expected the key that --reward-key names ({self.key})"
            )
        return value[self.key]


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

    @classmethod
    def of(
        cls, settings: Settings, args: Any, record_of: RecordOf, read_reward: Callable[[Sample], None]
    ) -> SlimeFilter:
        """Load the filter.

        Raises:
            ConfigError: it cannot be loaded, or it needs a spread of rewards and groups have one rollout.
        """
        assert settings.filter_path is not None
        name = getattr(load_function(settings.filter_path), "__name__", settings.filter_path)
        if settings.n_samples_per_prompt == 1:
            refuse_groups_of_one(name)
        return cls(args, settings.filter_path, record_of, read_reward)

    @property
    def __name__(self) -> str:
        return self.path.rpartition(".")[2]

    def __call__(self, samples: Sequence[Sample]) -> Any:
        group: list[Any] = []
        for sample in samples:
            record = self.record_of(sample)
            link = sample.trainer_record
            rollout = link.rollout if isinstance(link, SlimeRecord) else None
            if rollout is None:
                group.append(record)
            elif not any(entry is rollout for entry in group):
                group.append(rollout)
        answer = load_function(self.path)(self.args, group)
        for sample in samples:
            self.read_reward(sample)
        return answer


def _traced(samples: Any, name: str) -> AbstractContextManager[Any]:
    """A span in the trace of slime's samples."""
    if not (records().is_slime and family().traces):
        return nullcontext()
    module = importlib.import_module("slime.observability.trace_utils")
    span: AbstractContextManager[Any] = module.trace_span(samples, name)
    return span


def _listed(values: Any) -> list[Any] | None:
    """The rewards of a list, a generator, a NumPy array or a tensor; ``None`` for anything without an order."""
    if isinstance(values, str | bytes | Mapping | Set):
        return None
    try:
        return list(values)
    except TypeError:
        return None


def _reward_path(sample: Any) -> Any:
    """The reward function that a sample names itself: slime's field, or that of miles' ``reward_spec``."""
    spec = getattr(sample, "reward_spec", None)
    return getattr(sample, "custom_rm_path", None) or getattr(spec, "custom_rm_path", None)


def _reward_type(sample: Any) -> Any:
    """The reward by name that a sample asks for itself: in its metadata, or in miles' ``reward_spec``."""
    spec = getattr(sample, "reward_spec", None)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return metadata.get("rm_type") or getattr(spec, "rm_type", None)


def as_slime_filter(check: Callable[[list[Sample]], bool]) -> Callable[..., Any]:
    """Wrap a ``check_*`` function of ours for slime's ``--dynamic-sampling-filter-path``.

    It reads ``reward``, ``response``, ``response_length`` and ``status`` of slime's samples; groups with forked
    rollouts are flattened.
    """
    name = getattr(check, "__name__", type(check).__name__)

    def dynamic_filter(args: Any, samples: Any, **_: Any) -> Any:
        if getattr(args, "n_samples_per_prompt", None) == 1:
            refuse_groups_of_one(name)
        flat = [_View(sample, args) for sample in leaves(list(samples))]
        keep = bool(check(flat))  # type: ignore[arg-type]  # a view has the attributes that filters read
        return records().filter_output(keep=keep, reason=None if keep else name)

    dynamic_filter.__name__ = name
    dynamic_filter.__doc__ = f"``{name}`` as slime's dynamic sampling filter."
    return dynamic_filter


def refuse_groups_of_one(name: str) -> None:
    """Raise if a filter needs a spread of rewards: it would drop every group of one rollout.

    Raises:
        ConfigError: the filter needs a spread.
    """
    if "nonzero_std" in name or name == "check_quality_and_diversity":
        raise ConfigError.of(
            "args.n_samples_per_prompt", 1, f"at least 2 with the filter {name}: one reward has no spread"
        )


def plain_reward(sample: Any, args: Any) -> Any:
    """The trained number of slime's sample: its reward, or the entry of ``args.reward_key``."""
    key = getattr(args, "reward_key", None)
    return sample.reward[key] if key and isinstance(sample.reward, dict) else sample.reward


class _View:
    """slime's sample with the attributes that our filters read."""

    def __init__(self, sample: Any, args: Any) -> None:
        self._sample = sample
        self.reward = plain_reward(sample, args)
        self.status = Status(getattr(sample.status, "value", sample.status))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sample, name)
