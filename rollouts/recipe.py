"""Recipes: what a run is made of, in one function of a Python file.

Invariant: importing a recipe file does nothing; everything wrong with it, its options, its environment, its template or
its server is said by :func:`preflight` or earlier, before a prompt is taken. This module runs nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_type_hints

import anyio.to_thread
import attrs
import msgspec

from rollouts.dtypes import Endpoint, History, SamplingParams, without_password
from rollouts.environments.base import Environment, EnvironmentFactory
from rollouts.errors import ConfigError, EnvironmentFailure, RolloutsError, boundary, function_name
from rollouts.inference.base import ServerInfo
from rollouts.inference.sglang import shared_policy
from rollouts.renderer import Renderer, renderer_for
from rollouts.training.agent_integration import generate_rollout_batch
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.filters import check_reward_nonzero_std
from rollouts.training.types import RewardFn

__all__ = [
    "Recipe",
    "RecipeFunction",
    "agent_recipe",
    "build",
    "import_file",
    "load_recipe",
    "preflight",
    "read_options",
]

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
    """Everything that one run needs.

    Raises:
        ConfigError: a field of the wrong type; the message names it.
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
        """The renderer of its rollouts: of the tokenizer and the dialect that the generate function is bound to.

        Raises:
            ConfigError: the tokenizer does not load, or there is no such dialect.
        """
        bound = self._bound
        return renderer_for(bound.get("tokenizer", self.tokenizer), dialect=bound.get("dialect"))

    @property
    def _bound(self) -> Mapping[str, Any]:
        generate_fn = self.config.generate_fn
        return generate_fn.keywords if isinstance(generate_fn, functools.partial) else {}

    def describe(self) -> dict[str, Any]:
        """The recipe as plain values for ``run.json``; no key and no password is among them."""
        endpoint = attrs.asdict(self.endpoint)
        del endpoint["api_key"]
        endpoint["base_url"] = [without_password(url) for url in self.endpoint.base_url]
        bound = self._bound
        return {
            "recipe": self.name,
            "config": self.config.describe(),
            "generate": {name: _told(value) for name, value in bound.items() if not isinstance(value, Endpoint)},
            "endpoint": endpoint,
            "tokenizer": _told(self.tokenizer),
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
    history: History = "append",
    dialect: str | None = None,
    shuffled: bool = True,
    epochs: int | None = None,
    batches: int = 1,
    seed: int = 0,
) -> Recipe:
    """The usual recipe: agents in one kind of environment, scored and filtered group by group.

    Args:
        name: of the recipe.
        endpoint: where the model answers.
        environment_cls: makes an environment for each rollout.
        prompts: the data.
        reward_fn: scores a sample; without one the rewards of the steps are summed.
        keep: ``"spread"`` drops groups whose rewards do not differ.
        history: as for :func:`~rollouts.training.agent_rollout_to_samples`.
        dialect: likewise.
        shuffled: each epoch in an order of its own.
        batch_size: and the others are the fields of ``RolloutConfig``, ``SamplingParams``, ``DataBuffer`` and
            ``Recipe`` of that name.
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


def _told(value: Any) -> Any:
    """A value in words: data as data, a tokenizer by where it came from, a function by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if attrs.has(type(value)):
        return attrs.asdict(value)
    return getattr(value, "name_or_path", None) or function_name(value)


# -- from a file to a recipe ------------------------------------------------------------------------------------------

RecipeFunction: TypeAlias = Callable[..., Recipe]
"""``recipe(endpoint, *, ...options) -> Recipe``."""


def load_recipe(path: str | Path) -> RecipeFunction:
    """Import a recipe file and return its function.

    Raises:
        ConfigError: no such file, it cannot be imported, or it has no function ``recipe``.
    """
    function = getattr(import_file(path), "recipe", None)
    if not callable(function):
        raise ConfigError.of(f"{path}: recipe", function, "a function recipe(endpoint, *, ...) that returns a Recipe")
    result: RecipeFunction = function
    return result


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file as ``load_recipe`` does.

    The folder of the file and the one above it can be imported from, so that a recipe finds its guests.

    Raises:
        ConfigError: no such file, or it cannot be imported.
    """
    path = Path(path).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError.of("recipe", str(path), "a Python file with a function recipe(endpoint, *, ...)")
    for folder in (path.parent, path.parent.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    name = f"rollouts_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"{place}: importing the recipe raised {type(error).__name__}: {error}") from error
    return module


def read_options(function: RecipeFunction, options: Mapping[str, str]) -> dict[str, Any]:
    """Turn texts into the values that the function's annotations ask for.

    Raises:
        ConfigError: an unknown option (the known ones are listed), one that is missing, or a text that does not fit.
    """
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"recipe: an annotation cannot be read ({error}); expected types by their names") from error
    known = ", ".join(f"{name} ({_type_name(hints.get(name, str))})" for name in parameters) or "none"
    for name in options:
        if name not in parameters:
            raise ConfigError.of("option", name, f"one that the recipe has: {known}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            kind = _type_name(hints.get(name, str))
            raise ConfigError.of(f"option {name}", None, f"{kind}: the recipe needs it, --set {name}=...")
    return {name: _converted(name, text, hints.get(name, str)) for name, text in options.items()}


def build(function: RecipeFunction, endpoint: Endpoint, options: Mapping[str, str]) -> Recipe:
    """Call a recipe function with options given as text.

    Raises:
        ConfigError: as :func:`read_options`; what the function raised; or it returned something else than a recipe.
    """
    values = read_options(function, options)
    try:
        made: Any = function(endpoint, **values)
    except RolloutsError:
        raise
    except Exception as error:
        raise ConfigError(f"recipe {function_name(function)} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Recipe):
        raise ConfigError.of("what the recipe returned", made, "a Recipe")
    return made


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _converted(name: str, text: str, kind: Any) -> Any:
    if kind is Any:
        return text
    try:
        return msgspec.convert(text, kind, strict=False, dec_hook=_decoded)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        first = error
    try:  # lists, objects and the like are given as JSON
        return msgspec.json.decode(text, type=kind, strict=False, dec_hook=_decoded)
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        raise ConfigError.of(f"option {name}", text, f"{_type_name(kind)} ({first})") from None


def _decoded(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise TypeError(f"a {_type_name(kind)} cannot be written as text")


# -- before the work --------------------------------------------------------------------------------------------------


async def preflight(recipe: Recipe) -> ServerInfo:
    """See that the run can start: environment, tokenizer and template, server; in this order, the cheap ones first.

    Raises:
        ConfigError: the environment is none, the tokenizer does not load, or its template fails the self-test:
            a bridge is wrong, or tool calls would not be read.
        EnvironmentFailure: the environment cannot be made.
        EndpointUnavailable: nobody answers at the URL.
        EndpointRefused: who answers there is no SGLang server.
    """
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
    return await shared_policy(recipe.endpoint, renderer.vocab_size).describe()
