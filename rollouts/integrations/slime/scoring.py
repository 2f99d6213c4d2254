"""Rewards and filters that a launch names, as ours; and ours, as slime's.

Invariant: a function of slime's sees slime's samples and a function of ours sees ours, whichever side calls it. A
reward of several parts keeps them all; the part that ``--reward-key`` names is the number that is trained on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.integrations.slime.convert import REWARDS, leaves
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.settings import Settings, load_function
from rollouts.training.types import Sample, Status

__all__ = ["SlimeFilter", "SlimeReward", "as_slime_filter", "plain_reward", "refuse_groups_of_one"]

Dress = Callable[[Sample], Any]
"""Makes slime's sample of ours, for a function of slime's to look at."""


@attrs.frozen
class SlimeReward:
    """A reward as the launch names it, ``--custom-rm-path`` or ``--rm-type``, as our ``reward_fn``."""

    args: Any
    path: str | None
    key: str | None
    dress: Dress

    async def __call__(self, sample: Sample | list[Sample]) -> Any:
        """Score a sample, or a group where ``--group-rm`` is set."""
        whole_group = isinstance(sample, list)
        group: list[Sample] = sample if isinstance(sample, list) else [sample]
        dressed = [self.dress(entry) for entry in group]
        given = dressed if whole_group else dressed[0]
        values = await self._ask(given)
        listed = list(values) if whole_group else [values]
        if len(listed) != len(group):
            raise RewardFailure(f"{self.path}: got {len(listed)} rewards; expected {len(group)}")
        numbers = [self._number(entry, value) for entry, value in zip(group, listed, strict=True)]
        return numbers if whole_group else numbers[0]

    async def _ask(self, given: Any) -> Any:
        path = self.path if isinstance(given, list) else (given.custom_rm_path or self.path)
        if path is not None:
            value = load_function(path)(self.args, given)
            return await value if inspect.isawaitable(value) else value
        hub = importlib.import_module("slime.rollout.rm_hub")
        if isinstance(given, list):
            return await hub.batched_async_rm(self.args, given)
        return await hub.async_rm(self.args, given)

    def _number(self, sample: Sample, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if self.key is None or self.key not in value:
            raise RewardFailure(
                f"reward: got {shortened(value)}; expected the key that --reward-key names ({self.key})"
            )
        sample.metadata[REWARDS] = value
        return value[self.key]


@attrs.frozen
class SlimeFilter:
    """A dynamic sampling filter as the launch names it, as our ``filter_fn``.

    It sees the samples of a group in one flat list, also where rollouts fork.
    """

    args: Any
    path: str
    dress: Dress

    @classmethod
    def of(cls, settings: Settings, args: Any, dress: Dress) -> SlimeFilter:
        """Load the filter.

        Raises:
            ConfigError: there is none, or it asks for a spread of rewards in groups of one.
        """
        assert settings.filter_path is not None
        name = getattr(load_function(settings.filter_path), "__name__", settings.filter_path)
        if settings.n_samples_per_prompt == 1:
            refuse_groups_of_one(name)
        return cls(args, settings.filter_path, dress)

    @property
    def __name__(self) -> str:
        return self.path.rpartition(".")[2]

    def __call__(self, samples: Sequence[Sample]) -> Any:
        return load_function(self.path)(self.args, [self.dress(sample) for sample in samples])


def as_slime_filter(check: Callable[[list[Sample]], bool]) -> Callable[..., Any]:
    """A ``check_*`` function of ours as slime's ``--dynamic-sampling-filter-path``.

    It reads ``reward``, ``response``, ``response_length`` and ``status`` of slime's samples; groups that fan out are
    taken flat.
    """
    name = getattr(check, "__name__", type(check).__name__)

    def dynamic_filter(args: Any, samples: Any, **_: Any) -> Any:
        if getattr(args, "n_samples_per_prompt", None) == 1:
            refuse_groups_of_one(name)
        flat = [_View(sample, args) for sample in leaves(list(samples))]
        keep = bool(check(flat))  # type: ignore[arg-type]  # a view has what filters read
        return records().filter_output(keep=keep, reason=None if keep else name)

    dynamic_filter.__name__ = name
    dynamic_filter.__doc__ = f"``{name}`` as slime's dynamic sampling filter."
    return dynamic_filter


def refuse_groups_of_one(name: str) -> None:
    """Say that a filter which asks for a spread of rewards would drop every group of one.

    Raises:
        ConfigError: the filter is such a one.
    """
    if "nonzero_std" in name or name == "check_quality_and_diversity":
        raise ConfigError.of(
            "args.n_samples_per_prompt", 1, f"at least 2 with the filter {name}: one reward has no spread"
        )


def plain_reward(sample: Any, args: Any) -> Any:
    """The number of slime's sample, whether its reward is a number or has parts."""
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
