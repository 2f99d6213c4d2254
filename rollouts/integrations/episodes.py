"""One scored rollout inside a trainer that schedules rollouts itself, as its configuration names it.

Invariant: :meth:`Episodes.play` returns rows that a trainer can take: each has a sampled token and ends in one, and all
have the reward of the rollout. A rollout that failed all attempts raises an error, which names its cause.

This module knows no trainer.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Endpoint, Limits, OnRewrite, Prompt, SamplingParams, as_messages
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError, GenerateFailure, RewardFailure
from rollouts.inference.base import Policy
from rollouts.recipe import Recipe
from rollouts.recipe.files import build, load_recipe
from rollouts.training.agent_integration import agent_rollout_to_samples, check_limits
from rollouts.training.rows import trimmed
from rollouts.training.scoring import score
from rollouts.training.types import Sample, Status

__all__ = ["Episodes", "load_function", "option_texts", "prompt_of", "recipe_of"]

_REWARD_SECONDS = 300.0


@attrs.frozen(kw_only=True)
class Episodes:
    """The parts of a rollout: environment, limits, reward, and the options of the renderer."""

    environment_cls: EnvironmentFactory
    limits: Limits = attrs.field(factory=Limits)
    reward_fn: Callable[..., Any] | None = None
    """Scores a sample; without it the reward is the sum of the step rewards, ``None`` if there are none."""
    reward_seconds: float = _REWARD_SECONDS
    max_new_tokens: int = 1024
    history: OnRewrite = "append"
    attempts: int = 2
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """``template_kwargs``, ``chat_template``, ``dialect``, ``calls`` and ``stop_token_ids`` of the renderer."""

    @classmethod
    def of(
        cls,
        *,
        recipe: str | None = None,
        recipe_options: Mapping[str, Any] | None = None,
        environment: str | None = None,
        reward: str | None = None,
        limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Episodes:
        """Build it from plain values, as a trainer's configuration has them.

        Args:
            recipe: the name of a built-in recipe, or the path of a file with one. Its data are not read.
            recipe_options: options of the recipe.
            environment: instead of a recipe, an environment class as ``module:name``.
            reward: a reward function as ``module:name``, instead of that of the recipe.
            limits: fields of :class:`Limits`, instead of those of the recipe.
            **options: the other fields of this class, and options of the renderer.

        Raises:
            ConfigError: neither or both of ``recipe`` and ``environment``, a name that cannot be imported, an unknown
                option, or a recipe whose reward function takes whole groups.
        """
        if (recipe is None) == (environment is None):
            expected = "one of recipe and environment"
            raise ConfigError.of("recipe, environment", (recipe, environment), expected)
        plain = {field.name for field in attrs.fields(cls)} - {"environment_cls", "options", "reward_fn", "limits"}
        values = {name: options.pop(name) for name in plain & options.keys()}
        bound: dict[str, Any] = {}
        if recipe is not None:
            built = recipe_of(recipe, recipe_options)
            built.refuse_sampler("the trainer")
            bound = _of_recipe(built, scored=reward is None)
        else:
            bound["environment_cls"] = load_function(str(environment), "environment")
        if reward is not None:
            bound["reward_fn"] = load_function(reward, "reward")
        if limits is not None:
            bound["limits"] = Limits(**limits)
        renderer = {**bound.pop("options", {}), **options}
        for name in renderer.keys() - _RENDERER:
            raise ConfigError.of(name, renderer[name], f"one of {sorted({*plain, *_RENDERER})}")
        return cls(**{**bound, **values, "options": renderer})

    async def play(
        self,
        prompt: Prompt,
        new_policy: Callable[[], Policy],
        tokenizer: Any,
        sampling: SamplingParams,
        *,
        scored: bool = True,
    ) -> list[Sample]:
        """Play one rollout; returns its rows, in order, several where it forks.

        Args:
            prompt: messages, label and metadata.
            new_policy: creates the policy of an attempt.
            tokenizer: as for :func:`agent_rollout_to_samples`.
            sampling: its ``max_new_tokens`` is at most that of this object.
            scored: whether a reward is required.

        Raises:
            GenerateFailure: the rollout or its reward failed in all attempts, or its prompt leaves no token to sample.
            EndpointAway: no server answers.
        """
        budget = min(self.max_new_tokens, sampling.max_new_tokens)
        why = ""
        for _ in range(self.attempts):
            samples = await agent_rollout_to_samples(
                prompt,
                environment_cls=self.environment_cls,
                endpoint=Endpoint(model="trained"),
                tokenizer=tokenizer,
                policy=new_policy(),
                limits=self.limits,
                sampling=attrs.evolve(sampling, max_new_tokens=budget),
                history=self.history,
                **self.options,
            )
            last = samples[-1]
            if last.status in (Status.FAILED, Status.ABORTED):
                why = str(last.failure.message if last.failure else last.stop_reason)
                continue
            try:
                if scored or self.reward_fn is not None:
                    await score(last, self.reward_fn, seconds=self.reward_seconds)
            except RewardFailure as error:
                why = str(error)
                continue
            rows = [trimmed(sample) for sample in samples if sample.sampled_tokens]
            if not rows:
                raise GenerateFailure(f"the rollout has no sampled token: it ended with {last.stop_reason}")
            for row in rows:
                row.reward = last.reward
            return rows
        raise GenerateFailure(f"the rollout failed in {self.attempts} attempts: {why}")


_RENDERER = {"template_kwargs", "chat_template", "dialect", "calls", "stop_token_ids", "special_text", "images"}


def prompt_of(messages: Any, *, label: Any = None, metadata: Mapping[str, Any] | None = None) -> Prompt:
    """A prompt of a trainer's row: chat messages, or one text."""
    content = messages if isinstance(messages, str) else as_messages([dict(message) for message in messages])
    return Prompt(content, label=label, metadata=dict(metadata or {}))


def recipe_of(recipe: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by its name or path, with options as a configuration has them; its endpoint answers nowhere.

    Raises:
        ConfigError: no such recipe, or an unknown option.
    """
    return build(load_recipe(recipe), Endpoint(model="trained"), option_texts(options or {}))


def _of_recipe(recipe: Recipe, *, scored: bool) -> dict[str, Any]:
    if scored and recipe.config.group_rm:
        expected = "False: a trainer that schedules rollouts itself scores one at a time"
        raise ConfigError.of(f"recipe {recipe.name}: group_rm", True, expected)
    bound = recipe.bound
    return {
        "environment_cls": recipe.environment_cls,
        "limits": check_limits(bound.get("limits"), bound.get("max_turns")),
        "reward_fn": recipe.config.reward_fn,
        "reward_seconds": recipe.config.reward_seconds,
        "max_new_tokens": recipe.endpoint.sampling.max_new_tokens,
        "history": bound.get("history", "append"),
        "attempts": recipe.config.max_attempts,
        "options": {name: bound[name] for name in _RENDERER if bound.get(name) is not None},
    }


def option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options of a recipe as :func:`rollouts.recipe.files.build` takes them: text, or the JSON of another value."""
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in options.items()
    }


def load_function(path: str, what: str = "path of a function") -> Any:
    """Import the object that a configuration names as ``package.module.function`` or ``module:name``.

    Raises:
        ConfigError: it cannot be imported; the message begins with ``what``.
    """
    module, _, name = path.rpartition(".")
    try:
        return pkgutil.resolve_name(path) if ":" in path else getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of(what, path, f"package.module.function or module:name ({error})") from error
