"""Rewards and filters that a launch names, as ours; and ours, as slime's.

Invariant: a function of slime's sees slime's samples and a function of ours sees ours, whichever side calls it. What it
writes on slime's sample stays: it is the object that leaves. A reward of several parts keeps them all; the part that
``--reward-key`` names is the number that is trained on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rollouts.errors import ConfigError, RewardFailure, shortened
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.returned_samples import Kept
from rollouts.integrations.slime.settings import Settings, load_function
from rollouts.training.types import Sample, Status

__all__ = ["SlimeFilter", "SlimeReward", "as_slime_filter", "plain_reward", "refuse_groups_of_one"]

Dress = Callable[[Sample], Any]
"""slime's sample of ours, for a function of slime's to look at: the same object each time."""


@attrs.frozen
class SlimeReward:
    """A reward as the launch names it, ``--custom-rm-path`` or ``--rm-type``, as our ``reward_fn``.

    As in slime, a sample that a generate function scored is not scored again, and the samples of a rollout that fans
    out are scored by one call with the list of them; with ``--group-rm`` the group is scored by one call.
    """

    args: Any
    path: str | None
    key: str | None
    dress: Dress

    async def __call__(self, sample: Sample | list[Sample]) -> Any:
        """Score a sample, or a group where ``--group-rm`` is set."""
        if isinstance(sample, list):
            group = [self.dress(entry) for entry in sample]
            await self._score_all(group)
            return [self._number(entry.reward) for entry in group]
        dressed = self.dress(sample)
        if dressed.reward is None:
            record = sample.trainer_record
            if isinstance(record, Kept) and record.rollout is not None:
                await self._score_all([entry for entry in record.rollout if entry.reward is None])
            else:
                dressed.reward = await self._ask(dressed)
        return self._number(dressed.reward)

    async def _score_all(self, samples: list[Any]) -> None:
        values = await self._ask(samples)
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != len(samples):
            raise RewardFailure(f"{self.path}: got {shortened(values)}; expected a list of {len(samples)} rewards")
        for sample, value in zip(samples, values, strict=True):
            sample.reward = value

    async def _ask(self, given: Any) -> Any:
        path = self.path if isinstance(given, list) else (given.custom_rm_path or self.path)
        if path is not None:
            value = load_function(path)(self.args, given)
            return await value if inspect.isawaitable(value) else value
        hub = importlib.import_module("slime.rollout.rm_hub")
        if isinstance(given, list):
            return await hub.batched_async_rm(self.args, given)
        return await hub.async_rm(self.args, given)

    def _number(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if self.key is None or self.key not in value:
            raise RewardFailure(
                f"reward: got {shortened(value)}; expected the key that --reward-key names ({self.key})"
            )
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
