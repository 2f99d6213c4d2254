"""Recipes: the components of a run, built by one function of a Python file.

Invariant: importing a recipe file has no side effects; every error in the file, its options, environment, template or
server is raised by :func:`preflight` or earlier, before a prompt is taken. This module runs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread
import attrs

from rollouts.concurrency.boundary import boundary, function_name
from rollouts.dtypes import Endpoint, Limits, OnRewrite, SamplingParams, without_password
from rollouts.environments.base import Environment, EnvironmentFactory
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.inference.base import ServerInfo
from rollouts.inference.sglang import shared_policy
from rollouts.renderer import Renderer, renderer_for
from rollouts.training.agent_integration import check_limits, generate_rollout_batch
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.filters import check_reward_nonzero_std
from rollouts.training.types import RewardFn

__all__ = ["Recipe", "agent_recipe", "check_recipe", "preflight"]

_CLOSE_SECONDS = 30.0


def _is_a(kind: type, expected: str) -> Any:
    def validate(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError.of(f"Recipe.{field.name}", value, expected)

    return validate


def _at_least_one(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError.of(f"Recipe.{field.name}", value, "an integer >= 1")


def _factory(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not callable(value):
        raise ConfigError.of(f"Recipe.{field.name}", value, "an environment class, or a functools.partial of one")


@attrs.frozen(kw_only=True)
class Recipe:
    """The components of one run.

    Raises:
        ConfigError: a field has the wrong type; the message names it.
    """

    name: str = attrs.field(validator=_is_a(str, "a string"))
    config: RolloutConfig = attrs.field(validator=_is_a(RolloutConfig, "a RolloutConfig"))
    data_buffer: DataBuffer = attrs.field(validator=_is_a(DataBuffer, "a DataBuffer"))
    endpoint: Endpoint = attrs.field(validator=_is_a(Endpoint, "an Endpoint"))
    tokenizer: Any
    """A transformers tokenizer, or the name or folder to load one from."""
    environment_cls: EnvironmentFactory = attrs.field(validator=_factory, repr=function_name)
    batches: int = attrs.field(default=1, validator=_at_least_one)
    seed: int = attrs.field(default=0, validator=_is_a(int, "an integer"))

    def renderer(self) -> Renderer:
        """The renderer for the tokenizer and the dialect that the generate function is bound to.

        Raises:
            ConfigError: the tokenizer does not load, or there is no such dialect.
        """
        bound = self.bound
        return renderer_for(bound.get("tokenizer", self.tokenizer), dialect=bound.get("dialect"))

    @property
    def bound(self) -> Mapping[str, Any]:
        """The keyword arguments that the generate function is bound to."""
        generate_fn = self.config.generate_fn
        return generate_fn.keywords if isinstance(generate_fn, functools.partial) else {}

    def describe(self) -> dict[str, Any]:
        """The recipe as plain values for ``run.json``, without keys and passwords."""
        endpoint = attrs.asdict(self.endpoint)
        del endpoint["api_key"]
        endpoint["base_url"] = [without_password(url) for url in self.endpoint.base_url]
        bound = self.bound
        return {
            "recipe": self.name,
            "config": self.config.describe(),
            "generate": {name: _describe(value) for name, value in bound.items() if not isinstance(value, Endpoint)},
            "endpoint": endpoint,
            "tokenizer": _describe(self.tokenizer),
            "environment": function_name(self.environment_cls),
            "prompts": len(self.data_buffer),
            "epochs": self.data_buffer.epochs,
            "batches_wanted": self.batches,
            "seed": self.seed,
        }


def agent_recipe(
    name: str,
    endpoint: Endpoint,
    environment_cls: EnvironmentFactory,
    prompts: Iterable[Any],
    *,
    reward_fn: RewardFn | None = None,
    batch_size: int = 32,
    n_samples_per_prompt: int = 8,
    over_sampling_factor: float = 1.5,
    keep: Literal["spread", "all"] = "spread",
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    max_turns: int = 8,
    history: OnRewrite = "append",
    dialect: str | None = None,
    shuffled: bool = True,
    epochs: int | None = None,
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """The usual recipe: agents in one environment class, scored and filtered by group.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint.
        environment_cls: creates an environment for each rollout.
        prompts: the data.
        reward_fn: scores a sample; default: the sum of the step rewards.
        keep: ``"spread"`` drops groups whose rewards are all equal.
        history: as for :func:`~rollouts.training.agent_rollout_to_samples`.
        dialect: likewise.
        shuffled: shuffle the prompts in each epoch.
        batch_size: this and the other arguments are the fields of that name of ``RolloutConfig``, ``SamplingParams``,
            ``DataBuffer`` and ``Recipe``.
    """
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    endpoint = attrs.evolve(endpoint, sampling=sampling)
    return Recipe(
        name=name,
        config=RolloutConfig(
            batch_size=batch_size,
            n_samples_per_prompt=n_samples_per_prompt,
            over_sampling_factor=over_sampling_factor,
            generate_fn=functools.partial(
                generate_rollout_batch,
                environment_cls=environment_cls,
                endpoint=endpoint,
                tokenizer=endpoint.model,
                max_turns=max_turns,
                history=history,
                **({} if dialect is None else {"dialect": dialect}),
            ),
            reward_fn=reward_fn,
            filter_fn=check_reward_nonzero_std if keep == "spread" else None,
        ),
        data_buffer=DataBuffer(prompts, seed=seed if shuffled else None, epochs=epochs),
        endpoint=endpoint,
        tokenizer=endpoint.model,
        environment_cls=environment_cls,
        batches=batches,
        seed=seed,
    )


def _describe(value: Any) -> Any:
    """Describe a value: data as is, a tokenizer by its path, a function by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if attrs.has(type(value)):
        return attrs.asdict(value)
    return getattr(value, "name_or_path", None) or function_name(value)


async def preflight(recipe: Recipe) -> ServerInfo:
    """Check environment, tokenizer and template, then the server; returns the server's description.

    Raises:
        ConfigError: the generate function is bound to ``max_turns`` and to other ``limits``, the environment lacks a
            method, the tokenizer does not load, or its template fails the self-test:
            a bridge is wrong, or tool calls would not be parsed.
        EnvironmentFailure: the environment cannot be created or closed.
        EndpointUnavailable: no server responds at the URL.
        EndpointRefused: the server at the URL is no SGLang server.
    """
    renderer = await check_recipe(recipe)
    return await shared_policy(recipe.endpoint, renderer.vocab_size).describe()


async def check_recipe(recipe: Recipe) -> Renderer:
    """The part of :func:`preflight` that needs no server; returns the recipe's renderer.

    Raises:
        ConfigError, EnvironmentFailure: as :func:`preflight`.
    """
    limits = recipe.bound.get("limits")
    if isinstance(limits, Limits):
        check_limits(limits, recipe.bound.get("max_turns"))
    name = function_name(recipe.environment_cls)
    with boundary(EnvironmentFailure, f"{name}()", seconds=_CLOSE_SECONDS):
        environment: Any = recipe.environment_cls()
        if not isinstance(environment, Environment):
            raise ConfigError.of("Recipe.environment_cls()", environment, "an object with tools, start, step and close")
        tools = tuple(environment.tools)
        await environment.close()
    renderer = await anyio.to_thread.run_sync(recipe.renderer)
    test = await anyio.to_thread.run_sync(renderer.self_test, tools)
    test.raise_if_refused()
    return renderer
