"""From a command line to a run: the server found or started, the recipe built, the run watched and stopped.

Invariant: what can be known to be wrong is said before the server is started, before the old run is deleted, before
work starts. A run goes on with the servers that it had or with those that it is given, and only if they serve the model
that it began with. The first Ctrl-C stops cleanly and keeps what is finished; the second ends at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import attrs
from rich.console import Console

from rollouts.display import summary, watch
from rollouts.dtypes import Endpoint, without_password
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.inference.base import ServerInfo
from rollouts.inference.pauses import watch_pauses
from rollouts.inference.sglang import shared_policies, shared_policy
from rollouts.observability import LoopLag, numbers_of
from rollouts.observability.prometheus import serving_metrics
from rollouts.observability.tracing import trace_completions, traced
from rollouts.recipe import Recipe, RecipeFunction, build, load_recipe, preflight, read_options
from rollouts.renderer import renderer_for
from rollouts.running import RunResult, Stop, Watch, observe, run
from rollouts.serving import EngineProcess, engine_process
from rollouts.training.config import RolloutConfig
from rollouts.training.journal import Journal
from rollouts.training.ledger import Ledger
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.manager_state import ManagerState
from rollouts.training.recording import RECORDING, check_recordable, recorded
from rollouts.training.resuming import begin, reopen
from rollouts.training.run_folder import read_info
from rollouts.training.sinks import Format, RunWriter, check_free, check_idle
from rollouts.whereabouts import reporting_on_signal

__all__ = ["Aim", "Spread", "Telling", "aimed", "launch", "resumed_aim", "stored_recipe"]

_INTERRUPTED = 130

_LOG = "engine.log"
"""What the embedded engine of a run has to say, in the run's folder."""

_HIDDEN = "//***@"
"""Stands in ``run.json`` where a URL had a user name or a password."""


@attrs.frozen(kw_only=True)
class Aim:
    """What to run, against which server."""

    recipe: Path | None
    """Only a run that is resumed may do without."""
    urls: tuple[str, ...] = ()
    """Servers; without one the embedded engine is started."""
    served: str | None = None
    """The model that the server must name: that of the run that goes on."""
    model: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    batches: int | None = None
    slots: int | None = None


Spread: TypeAlias = Callable[[Aim, Recipe], contextlib.AbstractAsyncContextManager[RolloutConfig]]
"""Has the rollouts of a recipe played elsewhere; gives the config that does so."""


@attrs.frozen
class Telling:
    """What a run tells to others while it runs: nothing by default."""

    metrics_port: int | None = None
    """Where Prometheus finds its numbers."""
    trace: bool = False
    """Spans of OpenTelemetry."""


@contextlib.asynccontextmanager
async def _told(telling: Telling, recipe: Recipe) -> AsyncIterator[tuple[RolloutConfig, Watch | None]]:
    """The config to run, and an observer."""
    if telling.trace:
        recipe = attrs.evolve(recipe, config=traced(recipe.config, recipe.name))
        for policy in shared_policies():  # preflight has asked for the one that the rollouts share
            trace_completions(policy)
    if telling.metrics_port is None:
        yield recipe.config, None
        return
    renderer = await anyio.to_thread.run_sync(recipe.renderer)
    with serving_metrics(telling.metrics_port) as metrics:

        async def observe(manager: AsyncRolloutManager) -> None:
            lag = LoopLag()

            def read() -> dict[str, float]:
                return numbers_of(manager, policies=shared_policies(), renderer=renderer, lag=lag)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lag.run)
                tasks.start_soon(metrics.run, read)

        yield recipe.config, observe


async def _watch_pauses(manager: AsyncRolloutManager) -> None:
    await watch_pauses(shared_policies)


def _both(one: Watch, other: Watch) -> Watch:
    async def watch_both(manager: AsyncRolloutManager) -> None:
        async with anyio.create_task_group() as tasks:
            for single in (one, other):
                tasks.start_soon(observe, single, manager)

    return watch_both


@contextlib.asynccontextmanager
async def aimed(aim: Aim, log: Path | None = None) -> AsyncIterator[tuple[Recipe, EngineProcess | None]]:
    """The recipe, aimed at a server that lives as long as the context.

    Args:
        aim: what the command line said.
        log: where an embedded engine writes what it has to say; by default a temporary file.

    Raises:
        ConfigError: the recipe or its options are wrong, the model folder is not there, the server serves another model
            than the run that goes on has, or a stored URL lacks its password.
        EndpointError: the server does not answer, is no SGLang server, or did not start.
    """
    if aim.recipe is None:
        raise ConfigError.of("RECIPE", None, "a Python file with a function recipe(...)")
    function = load_recipe(aim.recipe)
    read_options(function, aim.options)
    key = os.environ.get("ROLLOUTS_API_KEY")
    if aim.urls:
        if any(_HIDDEN in url for url in aim.urls):
            expected = "the URL with its user name and password, which the run does not keep: give --endpoint again"
            raise ConfigError.of("--endpoint", aim.urls, expected)
        endpoint = Endpoint(model=aim.model or "default", base_url=aim.urls, api_key=key)
        if aim.model is None or aim.served is not None:
            named = (await shared_policy(endpoint).describe()).model
            _check_served(aim, named, f"at {', '.join(map(without_password, aim.urls))}")
            model = aim.model or named
            if model is None:
                raise ConfigError.of("--model", None, "a name or folder: the server does not name its model")
            endpoint = attrs.evolve(endpoint, model=model)
        yield _built(function, endpoint, aim), None
        return
    folder = _model_folder(aim.model)
    _check_served(aim, str(folder), "in the embedded engine")
    with tempfile.TemporaryDirectory() as logs:
        async with engine_process(folder, log or Path(logs) / _LOG, slots=aim.slots) as engine:
            yield _built(function, Endpoint(model=str(folder), base_url=engine.url), aim), engine


def _check_served(aim: Aim, model: str | None, where: str) -> None:
    if aim.served is not None and model != aim.served:
        expected = f"{aim.served!r}: a run goes on with the model that it began with"
        raise ConfigError(f"--resume, server.model: got {model!r} {where}; expected {expected}")


def _model_folder(named: str | None) -> Path:
    """Absolute, so that the tokenizer that the run names is found from anywhere."""
    folder = DEMO_MODEL if named is None else Path(named).resolve()
    if not folder.is_dir():
        raise ConfigError.of("--model", str(folder), "a folder with a model, or --endpoint URL of a server that has it")
    return folder


def _built(function: RecipeFunction, endpoint: Endpoint, aim: Aim) -> Recipe:
    recipe = build(function, endpoint, aim.options)
    return recipe if aim.batches is None else attrs.evolve(recipe, batches=aim.batches)


def resumed_aim(aim: Aim, run: Path) -> Aim:
    """What to do to go on with a run: what the command line says, and where it says nothing, what it said before.

    Raises:
        ConfigError: there is no run, or neither it nor the command line names a recipe.
    """
    info = read_info(run)
    before = info.get("command") or {}
    recipe = aim.recipe or (Path(before["recipe"]) if before.get("recipe") else None)
    if recipe is None:
        raise ConfigError.of("RECIPE", None, f"a recipe file: {run} does not say which it was")
    return attrs.evolve(
        aim,
        recipe=recipe,
        urls=aim.urls or _stored_urls(run, info),
        served=(info.get("server") or {}).get("model"),
        model=aim.model or before.get("model"),
        options={**before.get("options", {}), **aim.options},
        batches=aim.batches or info.get("batches_wanted"),
        slots=aim.slots or before.get("slots"),
    )


def _stored_urls(run: Path, info: Mapping[str, Any]) -> tuple[str, ...]:
    """The servers of a stored run; none where it had the embedded engine."""
    before, told = info.get("command") or {}, info.get("endpoint") or {}
    if "endpoint" in before:
        return tuple(before["endpoint"])
    # Runs of 0.1.0 have the URL of the embedded engine where others have those of their servers. It was one URL of this
    # machine; the engine left its log, and served the folder that the command named.
    urls = tuple(told.get("base_url") or ())
    folder = DEMO_MODEL if before.get("model") is None else Path(before["model"]).resolve()
    local = len(urls) == 1 and urls[0].startswith("http://127.0.0.1:")
    embedded = local and (run / _LOG).exists() and told.get("model") == str(folder)
    return () if embedded else urls


def stored_recipe(aim: Aim, run: Path) -> Recipe:
    """The recipe, aimed at the server that a stored run had; nobody asks whether it is there.

    Raises:
        ConfigError: there is no run, or the recipe or its options are wrong.
    """
    if aim.recipe is None:
        raise ConfigError.of("--recipe", None, "a Python file with a function recipe(...)")
    told = read_info(run).get("endpoint") or {}
    endpoint = Endpoint(model=aim.model or told.get("model") or "default")
    if told.get("base_url"):
        endpoint = attrs.evolve(endpoint, base_url=tuple(told["base_url"]))
    return _built(load_recipe(aim.recipe), endpoint, aim)


async def launch(
    aim: Aim,
    out: Path,
    format: Format,
    overwrite: bool,
    console: Console,
    *,
    resume: bool = False,
    record: bool = False,
    spread: Spread | None = None,
    telling: Telling = Telling(),
) -> RunResult | None:
    """Do a whole ``rollouts run``; ``None`` if it was stopped before it began.

    With ``resume``, go on with the run in ``out``: where ``aim`` says nothing, with what that run stored. With
    ``record``, keep what its rollouts are told, as a resumed run does that was recorded before; with ``spread``, play
    them where it says. ``telling`` is what is told to others meanwhile.

    Raises:
        RolloutsError: something was wrong before the work began.
    """
    if resume:
        check_idle(out, "--resume")
        aim = resumed_aim(aim, out)
    else:
        check_free(out, overwrite=overwrite)
    recording = record or (resume and (out / RECORDING).is_dir())
    if recording and spread is not None:
        raise ConfigError.of("--workers", "with --record", "one of them: what other processes are told is not recorded")
    stop = Stop()
    engine: EngineProcess | None = None
    result: RunResult | None = None
    failure: Exception | None = None
    working = False

    async def signals(starting: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            async for _ in received:
                if stop.asked:  # the second one
                    if engine is not None:
                        engine.kill()
                    os._exit(_INTERRUPTED)
                stop.ask()
                if not working:
                    starting.cancel()

    async with anyio.create_task_group() as tasks:
        starting = anyio.CancelScope()
        tasks.start_soon(signals, starting)
        try:
            with starting:
                async with contextlib.AsyncExitStack() as stack:
                    recipe, engine = await stack.enter_async_context(aimed(aim, out / _LOG))
                    server = await preflight(recipe)
                    if recording:
                        check_recordable(recipe.config.generate_fn)
                    played = recipe
                    if spread is not None:
                        config = await stack.enter_async_context(spread(aim, recipe))
                        played = attrs.evolve(recipe, config=config)
                    config, observe = await stack.enter_async_context(_told(telling, played))
                    played = attrs.evolve(played, config=config)
                    opening = functools.partial(_open, aim, recipe, server, out, format, overwrite, resume)
                    writer, ledger, state = await anyio.to_thread.run_sync(opening)
                    working = True
                    if engine is not None:
                        tasks.start_soon(_stop_when_it_dies, engine, stop)
                    show: Watch = functools.partial(watch, batches=recipe.batches, console=console)
                    if observe is not None:
                        show = _both(show, observe)
                    show = _both(show, _watch_pauses)
                    with contextlib.ExitStack() as files:
                        files.enter_context(ledger.journal)
                        files.enter_context(reporting_on_signal())
                        if recording:
                            played = await _recorded(played, files.enter_context(Journal(out / RECORDING)))
                        result = await run(played, writer, stop=stop, watch=show, ledger=ledger, state=state)
                    console.print(summary(result, writer), soft_wrap=True)
        except Exception as error:  # noqa: BLE001 - raised below, so that the task group does not wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def _open(
    aim: Aim, recipe: Recipe, server: ServerInfo, out: Path, format: Format, overwrite: bool, resume: bool
) -> tuple[RunWriter, Ledger, ManagerState | None]:
    """The files of a new run, or those of the one that goes on."""
    description = {**recipe.describe(), "server": attrs.asdict(server), "options": dict(aim.options)}
    description["command"] = {
        "recipe": str(aim.recipe.resolve()) if aim.recipe is not None else None,
        "endpoint": [_without_secrets(url) for url in aim.urls],
        "model": aim.model,
        "options": dict(aim.options),
        "slots": aim.slots,
    }
    description["vocab_size"] = renderer_for(recipe.tokenizer).vocab_size  # preflight has made it
    if resume:
        stored = read_info(out).get("vocab_size")
        if stored is not None and stored != description["vocab_size"]:
            expected = f"{stored}: a run goes on with the vocabulary that it began with"
            raise ConfigError.of("--resume, vocab_size", description["vocab_size"], expected)
        reopened = reopen(out, description, recipe.data_buffer)
        now = {name: description[name] for name in ("batches_wanted", "server", "endpoint", "command", "vocab_size")}
        reopened.writer.update(**now)
        return reopened.writer, reopened.ledger, reopened.state
    writer = RunWriter(out, description, format=format, overwrite=overwrite)
    return writer, begin(out, description, recipe.data_buffer), None


def _without_secrets(url: str) -> str:
    bare = without_password(url)
    return url if bare == url else bare.replace("//", _HIDDEN, 1)


async def _recorded(recipe: Recipe, journal: Journal) -> Recipe:
    """The recipe with a generate function that writes down what its rollouts are told."""
    config = recipe.config
    bound = config.generate_fn.keywords if isinstance(config.generate_fn, functools.partial) else {}
    policy = bound.get("policy")
    if policy is None:
        renderer = await anyio.to_thread.run_sync(recipe.renderer)
        policy = shared_policy(bound.get("endpoint", recipe.endpoint), renderer.vocab_size)
    environment_cls = bound.get("environment_cls", recipe.environment_cls)
    generate_fn = recorded(config.generate_fn, journal, environment_cls, policy)
    return attrs.evolve(recipe, config=attrs.evolve(config, generate_fn=generate_fn))


async def _stop_when_it_dies(engine: EngineProcess, stop: Stop) -> None:
    stop.ask(await engine.death())
