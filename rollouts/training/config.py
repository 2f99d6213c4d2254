"""Configuration of rollout generation: sizes, the user's functions, deadlines and failure policies.

Invariant: a config is valid once constructed. A wrong value raises :class:`ConfigError` with the field, the value and
what was expected.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from rollouts.base.validators import integer, number
from rollouts.concurrency.boundary import function_name
from rollouts.errors import ConfigError
from rollouts.training.failures import FailurePolicy, check_policies
from rollouts.training.types import FilterFn, GenerateFn, GroupRewardFn, RewardFn

__all__ = ["NEED_SPREAD", "RolloutConfig"]

NEED_SPREAD = ("check_reward_nonzero_std", "check_quality_and_diversity")
"""Names of the filters in ``filters.py`` that keep no group of one sample."""


def _function(*, optional: bool = False) -> Any:
    def validate(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        name = f"RolloutConfig.{field.name}"
        if not callable(value):
            raise ConfigError.of(name, value, "a function" + (" or None" if optional else ""))
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):  # a function written in C
            return
        try:
            signature.bind(None)
        except TypeError:
            got = f"{name}: got {function_name(value)}{signature}"
            raise ConfigError(f"{got}; expected a function that is called with one argument") from None

    return validate


def _named(function: Any) -> str:
    """Name of a function, without bound arguments: they may be secret."""
    return "None" if function is None else function_name(function)


_MOST_GROUPS = 1_000_000
"""Groups in flight: the buffer is asked for all of them before the first ends."""


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """How batches of groups are generated. Sizes count prompts (groups), as in slime."""

    batch_size: int = attrs.field(validator=integer(1))
    """Groups in a batch."""
    generate_fn: GenerateFn = attrs.field(validator=_function(), repr=_named)
    """Generates rollouts; called once for each rollout, with a list of one :class:`Prompt`."""
    n_samples_per_prompt: int = attrs.field(default=8, validator=integer(1))
    """Rollouts of each prompt: the size of a group."""
    over_sampling_factor: float = attrs.field(default=1.5, validator=number(least=1))
    """Groups in flight or ready while a batch fills, as a multiple of ``batch_size``."""
    in_flight: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Maximum number of rollouts that run at once. The slot of a finished rollout goes to the oldest open group, and a
    group starts when a slot is free. ``None``: all rollouts of the groups in flight."""
    reward_fn: RewardFn | GroupRewardFn | None = attrs.field(
        default=None, validator=_function(optional=True), repr=_named
    )
    """Scores each sample; without it, the sum of the step rewards counts."""
    group_rm: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Call ``reward_fn`` once with the whole group instead of once for each sample."""
    filter_fn: FilterFn | None = attrs.field(default=None, validator=_function(optional=True), repr=_named)
    """Decides which groups to keep; runs after the rewards are set."""
    max_attempts: int = attrs.field(default=2, validator=integer(1))
    """Maximum attempts at a rollout, each with a fresh environment, before it counts as failed."""
    on_failure: Literal["drop_group", "stop"] = "drop_group"
    """When a rollout failed for good: record its group as failed and continue, or stop the run."""
    failures: Mapping[str, FailurePolicy] = attrs.field(factory=dict)
    """Failure policies by cause (``rollouts.errors.CAUSES``); other causes use ``max_attempts`` and ``on_failure``."""
    failure_budget: float | None = attrs.field(default=None, validator=number(least=0, optional=True))
    """Share of the last ``failure_window`` attempts that may be lost before the run stops, e.g. 0.5."""
    failure_window: int = attrs.field(default=100, validator=integer(1))
    patience: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Consecutive groups that may be dropped or failed before the run stops; default 8 batches, at least 64. A run
    whose first groups all fail for one reason stops before that."""
    rollout_seconds: float = attrs.field(default=3600.0, validator=number(above=0))
    """Deadline of one call of ``generate_fn``."""
    group_seconds: float | None = attrs.field(default=None, validator=number(above=0, optional=True))
    """Deadline of the rollouts of one group, including retries and rewards; after it the group counts as failed."""
    batch_seconds: float | None = attrs.field(default=None, validator=number(above=0, optional=True))
    """Deadline of one batch; after it ``generate_batch`` raises, and accepted groups remain for the next call."""
    reward_seconds: float = attrs.field(default=300.0, validator=number(above=0))
    """Deadline of one call of ``reward_fn``; a late reward is a failure, never a zero."""
    filter_seconds: float = attrs.field(default=60.0, validator=number(above=0))

    def __attrs_post_init__(self) -> None:
        if self.on_failure not in ("drop_group", "stop"):
            raise ConfigError.of("RolloutConfig.on_failure", self.on_failure, '"drop_group" or "stop"')
        check_policies(self.failures)
        for cause, policy in self.failures.items():
            if policy.min_sound > self.n_samples_per_prompt:
                expected = f"at most n_samples_per_prompt={self.n_samples_per_prompt}"
                raise ConfigError.of(f"RolloutConfig.failures[{cause!r}].min_sound", policy.min_sound, expected)
        if (groups := self.batch_size * self.over_sampling_factor) > _MOST_GROUPS:
            name = "RolloutConfig: batch_size * over_sampling_factor"
            raise ConfigError.of(name, groups, f"at most {_MOST_GROUPS} groups in flight")
        name = function_name(self.filter_fn)  # a partial has the name of its function
        if self.n_samples_per_prompt == 1 and name in NEED_SPREAD:
            least = f'at least 2 with filter_fn={name}: one reward has no spread; or keep="all", which drops no group'
            raise ConfigError.of("RolloutConfig.n_samples_per_prompt", 1, least)
        if self.group_rm and self.reward_fn is None:
            raise ConfigError.of("RolloutConfig.reward_fn", None, "a function of the group, since group_rm is set")

    def policy_for(self, cause: str) -> FailurePolicy:
        """Return the failure policy of a cause, with defaults filled in."""
        policy = self.failures.get(cause, FailurePolicy())
        attempts = self.max_attempts if policy.attempts is None else policy.attempts
        return attrs.evolve(policy, attempts=attempts, then=policy.then or self.on_failure)

    @property
    def max_inflight_groups(self) -> int:
        """Groups in flight or ready while a batch fills."""
        groups = round(self.batch_size * self.over_sampling_factor, 6)  # 10 * 1.1 is 11, not 11.000000000000002
        return math.ceil(groups)

    @property
    def max_inflight_rollouts(self) -> int:
        """Rollouts that may run at once."""
        rollouts = self.max_inflight_groups * self.n_samples_per_prompt
        return rollouts if self.in_flight is None else min(self.in_flight, rollouts)

    @property
    def spare_groups(self) -> int:
        """Groups that are generated at once beyond those of a batch."""
        return math.ceil(self.max_inflight_rollouts / self.n_samples_per_prompt) - self.batch_size

    @property
    def rejections_allowed(self) -> int:
        """``patience``, or its default."""
        return self.patience if self.patience is not None else max(64, 8 * self.batch_size)

    def describe(self) -> dict[str, Any]:
        """Return the config as plain values, functions by name."""

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {cause: attrs.asdict(policy) for cause, policy in value.items()}
            return function_name(value) if isinstance(value, Callable) else value  # type: ignore[arg-type]

        return {field.name: plain(getattr(self, field.name)) for field in attrs.fields(type(self))}
