"""From a command line to a run: the server found or started, the recipe built, the run watched and stopped.

Invariant: what can be known to be wrong is said before the server is started, before the old run is deleted, before
work starts. The first Ctrl-C stops cleanly and keeps what is finished; the second ends at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import anyio
import attrs
from rich.console import Console

from rollouts.display import summary, watch
from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.inference.sglang import shared_policy
from rollouts.recipe import Recipe, RecipeFunction, build, load_recipe, preflight, read_options
from rollouts.running import RunResult, Stop, run
from rollouts.serving import EngineProcess, engine_process
from rollouts.training.sinks import Format, RunWriter

__all__ = ["Aim", "aimed", "launch"]

_INTERRUPTED = 130


@attrs.frozen(kw_only=True)
class Aim:
    """What to run, against which server."""

    recipe: Path
    urls: tuple[str, ...] = ()
    """Servers; without one the embedded engine is started."""
    model: str | None = None
    options: Mapping[str, str] = attrs.field(factory=dict)
    batches: int | None = None
    slots: int | None = None


@contextlib.asynccontextmanager
async def aimed(aim: Aim, log: Path | None = None) -> AsyncIterator[tuple[Recipe, EngineProcess | None]]:
    """The recipe, aimed at a server that lives as long as the context.

    Args:
        aim: what the command line said.
        log: where an embedded engine writes what it has to say; by default a temporary file.

    Raises:
        ConfigError: the recipe or its options are wrong, or the model folder is not there.
        EndpointError: the server does not answer, is no SGLang server, or did not start.
    """
    function = load_recipe(aim.recipe)
    read_options(function, aim.options)
    key = os.environ.get("ROLLOUTS_API_KEY")
    if aim.urls:
        endpoint = Endpoint(model=aim.model or "default", base_url=aim.urls, api_key=key)
        if aim.model is None:
            named = (await shared_policy(endpoint).describe()).model
            if named is None:
                raise ConfigError.of("--model", None, "a name or folder: the server does not name its model")
            endpoint = attrs.evolve(endpoint, model=named)
        yield _built(function, endpoint, aim), None
        return
    model = _model_folder(aim.model)
    with tempfile.TemporaryDirectory() as folder:
        async with engine_process(model, log or Path(folder) / "engine.log", slots=aim.slots) as engine:
            yield _built(function, Endpoint(model=str(model), base_url=engine.url), aim), engine


def _model_folder(named: str | None) -> Path:
    """Absolute, so that the tokenizer that the run names is found from anywhere."""
    folder = DEMO_MODEL if named is None else Path(named).resolve()
    if not folder.is_dir():
        raise ConfigError.of("--model", str(folder), "a folder with a model, or --endpoint URL of a server that has it")
    return folder


def _built(function: RecipeFunction, endpoint: Endpoint, aim: Aim) -> Recipe:
    recipe = build(function, endpoint, aim.options)
    return recipe if aim.batches is None else attrs.evolve(recipe, batches=aim.batches)


async def launch(aim: Aim, out: Path, format: Format, overwrite: bool, console: Console) -> RunResult | None:
    """Do a whole ``rollouts run``; ``None`` if it was stopped before it began.

    Raises:
        RolloutsError: something was wrong before the work began.
    """
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
                async with aimed(aim, out / "engine.log") as (recipe, engine):
                    server = await preflight(recipe)
                    description = {**recipe.describe(), "server": attrs.asdict(server), "options": dict(aim.options)}
                    writer = RunWriter(out, description, format=format, overwrite=overwrite)
                    working = True
                    if engine is not None:
                        tasks.start_soon(_stop_when_it_dies, engine, stop)
                    show = functools.partial(watch, batches=recipe.batches, console=console)
                    result = await run(recipe, writer, stop=stop, watch=show)
                    console.print(summary(result, writer), soft_wrap=True)
        except Exception as error:  # noqa: BLE001 - raised below, so that the task group does not wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


async def _stop_when_it_dies(engine: EngineProcess, stop: Stop) -> None:
    stop.ask(await engine.death())
