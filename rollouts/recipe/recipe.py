"""Recipes: the components of a run, built by one function of a Python file.

Invariant: importing a recipe file has no side effects; every error in the file, its options, environment, template or
server is raised by :func:`preflight` or earlier, before a prompt is taken. This module runs nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast

import anyio.to_thread
import attrs

from rollouts.base.validators import check, integer, is_int
from rollouts.concurrency.boundary import boundary, function_name
from rollouts.dtypes import Endpoint, Limits, OnRewrite, SamplingParams, Tool
from rollouts.environments.base import Environment, EnvironmentFactory, sound_tools
from rollouts.errors import ConfigError, EnvironmentFailure, without_password
from rollouts.inference.base import ServerInfo, check_takes_images
from rollouts.inference.server_flags import check_flags
from rollouts.inference.shared import shared_policy
from rollouts.renderer import Renderer, RendererOptions, renderer_for, with_prompt_options
from rollouts.renderer.options import TEMPLATE_KWARGS
from rollouts.training.agent_integration import check_limits, generate_rollout_batch
from rollouts.training.config import NEED_SPREAD, RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.failures import FailurePolicy
from rollouts.training.filters import check_reward_nonzero_std
from rollouts.training.types import FilterFn, GroupRewardFn, RewardFn

if TYPE_CHECKING:
    from rollouts.training.samplers.base import Sampler

__all__ = [
    "OPTION_DEFAULTS",
    "AllOptions",
    "Recipe",
    "RecipeOptions",
    "agent_recipe",
    "assembled_recipe",
    "check_environment",
    "check_recipe",
    "named_options",
    "preflight",
    "recipe_defaults",
]

_ENVIRONMENT_SECONDS = 30.0


_check_factory = check("an environment class, or a functools.partial of one", callable, optional=True)


def _name_of(function: Any) -> str:
    return "None" if function is None else function_name(function)


@attrs.frozen(kw_only=True)
class Recipe:
    """The components of one run.

    Raises:
        ConfigError: a field has the wrong type; the message names it.
    """

    name: str = attrs.field(validator=check("a string", lambda v: isinstance(v, str)))
    config: RolloutConfig = attrs.field(validator=check("a RolloutConfig", lambda v: isinstance(v, RolloutConfig)))
    data_buffer: DataBuffer = attrs.field(validator=check("a DataBuffer", lambda v: isinstance(v, DataBuffer)))
    endpoint: Endpoint = attrs.field(validator=check("an Endpoint", lambda v: isinstance(v, Endpoint)))
    tokenizer: Any
    """A transformers tokenizer, the name or folder to load one from, or a :class:`~rollouts.renderer.Renderer`.
    ``None`` where an API renders the conversations."""
    environment_cls: EnvironmentFactory | None = attrs.field(default=None, validator=_check_factory, repr=_name_of)
    """``None`` if the agents are programs or functions."""
    batches: int = attrs.field(default=1, validator=integer(1))
    lifetime: AbstractAsyncContextManager[Any] | None = attrs.field(default=None, repr=False)
    """Entered while the rollouts of a run are played, e.g. of sandboxes that are opened ahead."""
    seed: int = attrs.field(default=0, validator=check("an integer", is_int))

    def renderer(self, metadata: Mapping[str, Any] = MappingProxyType({})) -> Renderer:
        """The renderer for the tokenizer and the options that the generate function is bound to.

        Args:
            metadata: that of a prompt, whose ``template_kwargs`` override those of the run.

        Raises:
            ConfigError: the tokenizer does not load, or an option is wrong.
        """
        bound = self.bound
        given = {name: bound[name] for name in RendererOptions.__annotations__ if name in bound}
        options = with_prompt_options(cast(RendererOptions, given), metadata)
        return renderer_for(bound.get("tokenizer", self.tokenizer), **options)

    def with_options(self, **options: Any) -> Recipe:
        """The recipe with arguments bound to its generate function, e.g. ``history`` or ``template_kwargs``.

        Raises:
            ConfigError: the generate function is not a ``functools.partial``, or does not take such an argument.
        """
        generate_fn = self.config.generate_fn
        takes = inspect.signature(generate_fn).parameters.values() if isinstance(generate_fn, functools.partial) else ()
        names = {parameter.name for parameter in takes if parameter.kind is parameter.KEYWORD_ONLY}
        for name, value in options.items():
            if name not in names and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
                function = function_name(generate_fn)
                raise ConfigError.of(name, value, f"no value: generate_fn {function} of the recipe does not take it")
        bound = functools.partial(generate_fn, **options) if options else generate_fn
        return attrs.evolve(self, config=attrs.evolve(self.config, generate_fn=bound))

    def with_sampling(self, **changes: Any) -> Recipe:
        """The recipe with other sampling parameters, e.g. ``temperature=0.0`` for greedy replies.

        Raises:
            ConfigError: the generate function is not bound to an endpoint, or a parameter is wrong.
        """
        bound = {name: value for name, value in self.bound.items() if isinstance(value, Endpoint)}
        if not bound:
            function = function_name(self.config.generate_fn)
            raise ConfigError.of("generate_fn", function, "a functools.partial that is bound to an Endpoint")

        def changed(endpoint: Endpoint) -> Endpoint:
            return attrs.evolve(endpoint, sampling=attrs.evolve(endpoint.sampling, **changes))

        generate_fn = functools.partial(
            self.config.generate_fn, **{name: changed(value) for name, value in bound.items()}
        )
        config = attrs.evolve(self.config, generate_fn=generate_fn)
        return attrs.evolve(self, config=config, endpoint=changed(self.endpoint))

    def environment_for(self, what: str) -> EnvironmentFactory:
        """The factory of the environments, which ``what`` needs.

        Raises:
            ConfigError: the recipe has no environments.
        """
        if self.environment_cls is None:
            raise ConfigError(f"{what}: recipe {self.name} has no environment; its agents are programs or functions")
        return self.environment_cls

    def refuse_sampler(self, chooser: str) -> None:
        """Check that the recipe has no sampler, where ``chooser`` chooses the prompts.

        Raises:
            ConfigError: it has one.
        """
        sampler = self.data_buffer.sampler
        if sampler is not None:
            raise ConfigError.of("sampler", type(sampler).__name__, f'"uniform": {chooser} chooses the prompts')

    @property
    def bound(self) -> Mapping[str, Any]:
        """The keyword arguments that the generate function is bound to."""
        generate_fn = self.config.generate_fn
        return generate_fn.keywords if isinstance(generate_fn, functools.partial) else {}

    def check_spread(self) -> None:
        """Check that the replies to a prompt may differ, if the filter drops groups of equal rewards.

        Raises:
            ConfigError: the endpoint samples greedily, so that such a filter accepts no group.
        """
        name, sampling = function_name(self.config.filter_fn), self.endpoint.sampling
        if name not in NEED_SPREAD or (sampling.temperature > 0 and sampling.top_k != 1):
            return
        field, least = ("top_k", "not 1") if sampling.temperature > 0 else ("temperature", "a number > 0")
        expected = (
            f'{least} with filter_fn={name}: equal replies have equal rewards; or keep="all", which drops no group'
        )
        raise ConfigError.of(f"SamplingParams.{field}", getattr(sampling, field), expected)

    def describe(self) -> dict[str, Any]:
        """The recipe as plain values for ``run.json``, without keys and passwords."""
        endpoint = attrs.asdict(self.endpoint)
        del endpoint["api_key"], endpoint["admin_key"]
        endpoint["base_url"] = [without_password(url) for url in self.endpoint.base_url]
        bound = self.bound
        return {
            "recipe": self.name,
            "config": self.config.describe(),
            "generate": {name: _describe(value) for name, value in bound.items() if not isinstance(value, Endpoint)},
            "endpoint": endpoint,
            "tokenizer": _describe(self.tokenizer),
            "environment": None if self.environment_cls is None else function_name(self.environment_cls),
            "prompts": len(self.data_buffer),
            "epochs": self.data_buffer.epochs,
            "sampler": self.data_buffer.ask_sampler("describe"),
            "batches_wanted": self.batches,
            "seed": self.seed,
        }


class RecipeOptions(TypedDict, total=False):
    """Options of every recipe, for the ``**options`` of a recipe function: ``rollouts run`` lists them."""

    batch_size: int
    n_samples_per_prompt: int
    over_sampling_factor: float
    in_flight: int | None
    keep: Literal["spread", "all"]
    """``"spread"`` drops groups whose rewards are all equal, ``"all"`` keeps them."""
    sampler: Literal["uniform", "pass_rate", "pools", "levels"]
    """How prompts are chosen: see :mod:`rollouts.training.samplers`."""
    sampler_runs: tuple[Path, ...]
    """Stored runs and evaluations with which ``sampler="pass_rate"`` begins."""
    temperature: float | None
    """``None``: that of the endpoint; so for ``max_new_tokens``."""
    max_new_tokens: int | None
    history: OnRewrite
    """As for :func:`~rollouts.training.agent_rollout_to_samples`."""
    epochs: int | None
    batches: int
    lora: str | None
    """The family of LoRA adapters that sample the replies, see :class:`Endpoint`; ``None``: as the endpoint says."""


OPTION_DEFAULTS: RecipeOptions = {
    "batch_size": 32,
    "n_samples_per_prompt": 8,
    "over_sampling_factor": 1.5,
    "in_flight": None,
    "keep": "spread",
    "sampler": "uniform",
    "sampler_runs": (),
    "temperature": None,
    "max_new_tokens": None,
    "history": "append",
    "epochs": None,
    "batches": 1,
    "lora": None,
}


class AllOptions(RecipeOptions, RendererOptions, total=False):
    """Every option of :func:`agent_recipe`: :class:`RecipeOptions`, the options of the renderer, and the other fields
    of ``RolloutConfig``, ``SamplingParams``, ``DataBuffer`` and ``Recipe``."""

    reward_fn: RewardFn | GroupRewardFn | None
    """Scores a sample, or with ``group_rm=True`` a group; default: the sum of the step rewards."""
    group_rm: bool
    filter_fn: FilterFn | None
    """Decides which groups to keep, instead of ``keep``."""
    prompt_sampler: Sampler | None
    """Chooses the prompts, instead of ``sampler``."""
    max_attempts: int
    on_failure: Literal["drop_group", "stop"]
    failures: Mapping[str, FailurePolicy]
    failure_budget: float | None
    failure_window: int
    patience: int | None
    rollout_seconds: float
    group_seconds: float | None
    batch_seconds: float | None
    reward_seconds: float
    filter_seconds: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Iterable[str]
    min_new_tokens: int
    repetition_penalty: float
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None
    seed: int | None
    """Of the shuffle and of the replies. Default: 0, and for the replies the endpoint's where it has one."""
    shuffled: bool
    """Shuffle the prompts in each epoch; the default."""
    tokenizer: Any
    """A tokenizer, the name or folder of one, or a :class:`Renderer`; default: that of ``endpoint.model``."""


_Function = TypeVar("_Function", bound=Callable[..., Recipe])


def recipe_defaults(**defaults: Unpack[RecipeOptions]) -> Callable[[_Function], _Function]:
    """Give a recipe function its defaults of some :class:`RecipeOptions`."""

    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def recipe(endpoint: Endpoint, **options: Any) -> Recipe:
            return function(endpoint, **{**defaults, **options})

        recipe.option_defaults = defaults  # type: ignore[attr-defined]
        return cast(_Function, recipe)

    return decorated


def agent_recipe(
    name: str,
    endpoint: Endpoint,
    environment_cls: EnvironmentFactory,
    prompts: Iterable[Any],
    *,
    max_turns: int | None = None,
    limits: Limits | None = None,
    **options: Unpack[AllOptions],
) -> Recipe:
    """The usual recipe: agents in one environment class, scored and filtered by group.

    Args:
        name: name of the recipe.
        endpoint: the model's endpoint. Its ``sampling`` is kept, except for the parameters that are named here.
        environment_cls: creates an environment for each rollout.
        prompts: the data.
        max_turns: short for ``limits=Limits(max_turns=…)``; 8 by default.
        limits: when an episode ends.
        **options: see :class:`AllOptions`.

    Raises:
        ConfigError: an argument is unknown or wrong; the message names it.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError.of("limits", limits, "Limits(...)")
    if limits is None:
        max_turns = 8 if max_turns is None else max_turns
    bound = named_options(max_turns=max_turns, limits=limits)
    generate_fn = functools.partial(generate_rollout_batch, environment_cls=environment_cls, **bound)
    return assembled_recipe(agent_recipe, name, endpoint, generate_fn, prompts, options, environment_cls)


def assembled_recipe(
    function: Callable[..., Recipe],
    name: str,
    endpoint: Endpoint,
    generate_fn: functools.partial[Any],
    prompts: Iterable[Any],
    options: Mapping[str, Any],
    environment_cls: EnvironmentFactory | None = None,
) -> Recipe:
    """The recipe of a generate function.

    Args:
        function: the user called it; messages name it.
        options: see :class:`AllOptions`.
    """
    of_config, of_sampling, of_renderer = _options_by_owner(function, options)
    keep, filter_fn = options.get("keep"), options.get("filter_fn")
    if keep not in (None, "spread", "all"):
        raise ConfigError.of("keep", keep, '"spread" or "all"')
    if keep is not None and filter_fn is not None:
        raise ConfigError.of("keep", keep, "none with filter_fn: each of them decides which groups to keep")
    shuffled = options.get("shuffled", True)
    if not isinstance(shuffled, bool):
        raise ConfigError.of("shuffled", shuffled, "True or False")
    endpoint = _with_sampling(endpoint, **named_options(**of_sampling))
    values: dict[str, Any] = {**OPTION_DEFAULTS, **options}
    endpoint = attrs.evolve(endpoint, **named_options(lora=values["lora"]))
    seed, tokenizer = values.get("seed") or 0, values.get("tokenizer")
    tokenizer = endpoint.model if tokenizer is None else tokenizer
    bound = {"endpoint": endpoint, "tokenizer": tokenizer, "history": values["history"], **of_renderer}
    return Recipe(
        name=name,
        config=RolloutConfig(
            generate_fn=functools.partial(generate_fn, **bound),
            filter_fn=filter_fn or (None if keep == "all" else check_reward_nonzero_std),
            **of_config,
        ),
        data_buffer=DataBuffer(
            prompts,
            seed=seed if shuffled else None,
            epochs=values["epochs"],
            sampler=_sampler_of(values, options),
        ),
        endpoint=endpoint,
        tokenizer=tokenizer,
        environment_cls=environment_cls,
        batches=values["batches"],
        seed=seed,
    )


def _sampler_of(values: Mapping[str, Any], named: Mapping[str, Any]) -> Sampler | None:
    """The sampler that the options name.

    Args:
        values: all options.
        named: those without the defaults.

    Raises:
        ConfigError: an option is wrong, or contradicts another one.
    """
    name, runs, sampler = values["sampler"], values["sampler_runs"], values.get("prompt_sampler")
    if sampler is not None and named.get("sampler") is not None:
        raise ConfigError.of("sampler", name, "none with prompt_sampler: each of them chooses the prompts")
    if runs and (sampler is not None or name != "pass_rate"):
        raise ConfigError.of("sampler_runs", runs, 'none without sampler="pass_rate", which begins with them')
    if sampler is not None or name == "uniform":
        return cast("Sampler | None", sampler)
    from rollouts.training import samplers  # few runs use them

    match name:
        case "pass_rate":
            return samplers.PassRateSampler.from_runs(runs, n=values["n_samples_per_prompt"])
        case "pools":
            return samplers.PoolSampler()
        case "levels":
            return samplers.LevelSampler()
    raise ConfigError.of("sampler", name, '"uniform", "pass_rate", "pools" or "levels"')


def named_options(**options: Any) -> dict[str, Any]:
    """The options that are not ``None``; the function that takes them has the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _with_sampling(endpoint: Endpoint, **named: Any) -> Endpoint:
    """The endpoint with the named sampling parameters, its other parameters, and a seed."""
    if not isinstance(endpoint, Endpoint):
        raise ConfigError.of("endpoint", endpoint, "an Endpoint")
    seed = 0 if endpoint.sampling.seed is None else endpoint.sampling.seed
    return attrs.evolve(endpoint, sampling=attrs.evolve(endpoint.sampling, **{"seed": seed, **named}))


_OF_CONFIG = [field.name for field in attrs.fields(RolloutConfig) if field.name not in ("generate_fn", "filter_fn")]
_OF_SAMPLING = [field.name for field in attrs.fields(SamplingParams)]


def _options_by_owner(function: Callable[..., Recipe], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Check the names of the options; return those of ``RolloutConfig``, ``SamplingParams`` and ``Renderer``.

    Raises:
        ConfigError: an option is unknown; the message lists the known ones.
    """
    for name, value in options.items():
        if name not in AllOptions.__annotations__:
            own = [
                each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
            ]
            from rollouts.base.nearest import did_you_mean  # here: only an error needs it

            known = [*own, *AllOptions.__annotations__]
            expected = f"an option{did_you_mean(name, known)}: {', '.join(known)}"
            raise ConfigError.of(f"{function.__name__}({name})", value, expected)
    values: dict[str, Any] = {**OPTION_DEFAULTS, **options}
    kinds = (_OF_CONFIG, _OF_SAMPLING, RendererOptions.__annotations__)
    return [{name: values[name] for name in names if name in values} for names in kinds]


def _describe(value: Any) -> Any:
    """Describe a value: data as is, a tokenizer by its path, a function by its name; not what its ``repr`` hides."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _describe(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(inner) for inner in value]
    if isinstance(value, Renderer):
        return value.name
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:
        return _describe(wrapped)
    if attrs.has(type(value)):
        fields = [(field, getattr(value, field.name)) for field in attrs.fields(type(value)) if field.repr is not False]
        return {field.name: field.repr(v) if callable(field.repr) else _describe(v) for field, v in fields}
    return getattr(value, "name_or_path", None) or function_name(value)


def _tested_renderer(recipe: Recipe, tools: tuple[Tool, ...]) -> Renderer:
    """The renderer of the run; it is tested, and so is each variant that prompts ask for."""
    renderer = recipe.renderer()
    renderer.self_test(tools).raise_if_refused()
    if renderer.images is not None:
        renderer.images.check_repeats()
    for prompt in recipe.data_buffer.prompts:
        if not isinstance(prompt.prompt, str):
            renderer.check_images(prompt.prompt)
    variants = {
        repr(own): own for prompt in recipe.data_buffer.prompts if (own := prompt.metadata.get(TEMPLATE_KWARGS))
    }
    for own in variants.values():
        recipe.renderer({TEMPLATE_KWARGS: own}).self_test(tools).raise_if_refused()
    return renderer


async def preflight(recipe: Recipe) -> ServerInfo:
    """Check environment, tokenizer and template, then the server; returns the server's description.

    A generate function with a function ``preflight`` checks its recipe itself.

    Raises:
        ConfigError: the generate function is bound to ``max_turns`` and to other ``limits``, the environment lacks a
            method, the tokenizer does not load, or its template fails the self-test: a bridge is wrong, or tool calls
            would not be parsed; also with the ``template_kwargs`` of a prompt. Or a prompt has an image, and the model
            reads text only; or the requests to the server, or its ids, cannot have images. Or the server would report
            logprobs of another distribution for the endpoint's sampling parameters.
        EnvironmentFailure: the environment cannot be created or closed.
        EndpointUnavailable: no server responds at the URL.
        EndpointRefused: the server at the URL does not have the protocol of the endpoint.
    """
    if (own := _of_generate_fn(recipe, "preflight")) is not None:
        return cast(ServerInfo, await own(recipe))
    renderer = await check_recipe(recipe)
    policy = shared_policy(recipe.endpoint, renderer.vocab_size)
    if renderer.images is not None:
        check_takes_images(policy)
    server = await policy.describe()
    await policy.check_sampling(recipe.endpoint.sampling)
    if recipe.endpoint.priority:
        await policy.priority_order()
    if recipe.endpoint.provider == "sglang":
        check_flags(server, recipe.endpoint.sampling)
    return server


async def check_recipe(recipe: Recipe) -> Renderer:
    """The part of :func:`preflight` that needs no server; returns the recipe's renderer.

    Raises:
        ConfigError, EnvironmentFailure: as :func:`preflight`.
    """
    limits = recipe.bound.get("limits")
    if isinstance(limits, Limits):
        check_limits(limits, recipe.bound.get("max_turns"))
    tools: tuple[Tool, ...] = ()
    if recipe.environment_cls is not None:
        tools = await check_environment(recipe)
    elif (check_bound := _of_generate_fn(recipe, "check")) is not None:  # a session tests the tools of its program
        await check_bound(recipe.bound, recipe.data_buffer.prompts)
    return await anyio.to_thread.run_sync(_tested_renderer, recipe, tools)


async def check_environment(recipe: Recipe) -> tuple[Tool, ...]:
    """Create and close an environment of the recipe, which must have one; returns its tools.

    Raises:
        ConfigError: it lacks a method.
        EnvironmentFailure: it cannot be created or closed.
    """
    factory = recipe.environment_for("preflight")
    name = function_name(factory)
    with boundary(EnvironmentFailure, f"{name}()", seconds=_ENVIRONMENT_SECONDS, before_work=True):
        environment: Any = factory()
        if inspect.isclass(environment) or not isinstance(environment, Environment):
            expected = "an object with tools, start, step and close"
            raise ConfigError.of("Recipe.environment_cls()", environment, expected)
        try:
            return sound_tools(environment.tools, f"{name}.tools")
        finally:
            if inspect.isawaitable(closing := environment.close()):
                await closing


def _of_generate_fn(recipe: Recipe, name: str) -> Callable[..., Awaitable[Any]] | None:
    """A function of the generate function: ``preflight``, or ``check`` of the arguments that it is bound to."""
    generate_fn: Any = recipe.config.generate_fn
    function = generate_fn.func if isinstance(generate_fn, functools.partial) else generate_fn
    found = getattr(function, name, None)
    return found if callable(found) else None
