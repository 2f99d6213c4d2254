"""``rollouts run``: find or start the server, build the recipe, run it, and stop it on a signal.

Invariant: every error that can be detected early is raised before the server starts and before an old run is deleted.
A run resumes with its stored servers or with those of the command line, and only if they serve the model it began with.
The first Ctrl-C stops cleanly and keeps finished groups; the second exits at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import attrs
from rich.console import Console

from rollouts.commands.arguments import BROKEN, INTERRUPTED, add_target, add_verb, in_loop, positive, target_of, tell
from rollouts.commands.target import (
    ENGINE_LOG,
    RunTarget,
    open_target,
    resumed_target,
    weights_checksum,
    without_secrets,
)
from rollouts.concurrency.wait_report import reporting_on_signal
from rollouts.display.progress import summary, watch
from rollouts.distributed import RecipeConfig, in_processes
from rollouts.engine.process import EngineProcess
from rollouts.errors import ConfigError
from rollouts.inference.base import ServerInfo
from rollouts.inference.pauses import watch_pauses
from rollouts.inference.sglang import shared_policies, shared_policy
from rollouts.observability import LoopLag, numbers_of
from rollouts.observability.prometheus import serving_metrics
from rollouts.observability.tracing import trace_completions, traced
from rollouts.recipe import Recipe, preflight
from rollouts.runs.folder import read_info
from rollouts.runs.journal import Journal
from rollouts.runs.recording import RECORDING, check_recordable, recorded
from rollouts.runs.resume import begin, reopen
from rollouts.runs.run import RunResult, Stop, Watch, observe, run
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.writer import Format, RunWriter, check_free, check_idle
from rollouts.training.config import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.manager_state import ManagerState

__all__ = ["Distribute", "Telemetry", "add", "launch"]

_INTERRUPTED = 130


Distribute: TypeAlias = Callable[[RunTarget, Recipe], contextlib.AbstractAsyncContextManager[RolloutConfig]]
"""Starts workers for a recipe's rollouts; the context value is the config that sends rollouts to them."""


@attrs.frozen
class Telemetry:
    """Telemetry exported while a run is active; off by default."""

    metrics_port: int | None = None
    """Port of the Prometheus endpoint."""
    trace: bool = False
    """Whether to record OpenTelemetry spans."""


@contextlib.asynccontextmanager
async def _with_telemetry(telemetry: Telemetry, recipe: Recipe) -> AsyncIterator[tuple[RolloutConfig, Watch | None]]:
    """The config with tracing, and an observer that exports metrics."""
    if telemetry.trace:
        recipe = attrs.evolve(recipe, config=traced(recipe.config, recipe.name))
        for policy in shared_policies():  # preflight has created the one that the rollouts share
            trace_completions(policy)
    if telemetry.metrics_port is None:
        yield recipe.config, None
        return
    renderer = await anyio.to_thread.run_sync(recipe.renderer)
    with serving_metrics(telemetry.metrics_port) as metrics:

        async def export_metrics(manager: AsyncRolloutManager) -> None:
            lag = LoopLag()

            def read() -> dict[str, float]:
                return numbers_of(manager, policies=shared_policies(), renderer=renderer, lag=lag)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lag.run)
                tasks.start_soon(metrics.run, read)

        yield recipe.config, export_metrics


async def _watch_pauses(manager: AsyncRolloutManager) -> None:
    await watch_pauses(shared_policies)


def _both(one: Watch, other: Watch) -> Watch:
    async def watch_both(manager: AsyncRolloutManager) -> None:
        async with anyio.create_task_group() as tasks:
            for single in (one, other):
                tasks.start_soon(observe, single, manager)

    return watch_both


async def launch(
    target: RunTarget,
    out: Path,
    format: Format,
    overwrite: bool,
    console: Console,
    *,
    resume: bool = False,
    record: bool = False,
    distribute: Distribute | None = None,
    telemetry: Telemetry = Telemetry(),
) -> RunResult | None:
    """Do a whole ``rollouts run``; return ``None`` if it was stopped before it began.

    Args:
        resume: resume the run in ``out``; its stored values fill the fields that ``target`` leaves empty.
        record: record everything that rollouts receive from outside; a resumed recorded run always does.
        distribute: starts the workers that play the rollouts; by default this process plays them.

    Raises:
        RolloutsError: an error before the work began.
    """
    if resume:
        check_idle(out, "--resume")
        target = resumed_target(target, out)
    else:
        check_free(out, overwrite=overwrite)
    recording = record or (resume and (out / RECORDING).is_dir())
    if recording and distribute is not None:
        raise ConfigError.of("--workers", "with --record", "one of them: rollouts of other processes are not recorded")
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
                    recipe, engine = await stack.enter_async_context(open_target(target, out / ENGINE_LOG))
                    server = await preflight(recipe)
                    if recording:
                        check_recordable(recipe.config.generate_fn)
                    played = recipe
                    if distribute is not None:
                        config = await stack.enter_async_context(distribute(target, recipe))
                        played = attrs.evolve(recipe, config=config)
                    config, export_metrics = await stack.enter_async_context(_with_telemetry(telemetry, played))
                    played = attrs.evolve(played, config=config)
                    opening = functools.partial(_open, target, recipe, server, out, format, overwrite, resume)
                    writer, run_journal, state = await anyio.to_thread.run_sync(opening)
                    working = True
                    if engine is not None:
                        tasks.start_soon(_stop_when_it_dies, engine, stop)
                    show: Watch = functools.partial(watch, batches=recipe.batches, console=console)
                    if export_metrics is not None:
                        show = _both(show, export_metrics)
                    show = _both(show, _watch_pauses)
                    with contextlib.ExitStack() as files:
                        files.enter_context(run_journal.journal)
                        files.enter_context(reporting_on_signal())
                        if recording:
                            played = await _recorded(played, files.enter_context(Journal(out / RECORDING)))
                        result = await run(played, writer, stop=stop, watch=show, run_journal=run_journal, state=state)
                    console.print(summary(result, writer), soft_wrap=True)
        except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def _open(
    target: RunTarget, recipe: Recipe, server: ServerInfo, out: Path, format: Format, overwrite: bool, resume: bool
) -> tuple[RunWriter, RunJournal, ManagerState | None]:
    """Create the files of a new run, or open those of a resumed one."""
    description = {**recipe.describe(), "server": attrs.asdict(server), "options": dict(target.options)}
    description["command"] = {
        "recipe": str(target.recipe.resolve()) if target.recipe is not None else None,
        "endpoint": [without_secrets(url) for url in target.urls],
        "model": target.model,
        "options": dict(target.options),
        "slots": target.slots,
    }
    if not target.urls:
        description["command"]["weights"] = weights_checksum(Path(recipe.endpoint.model))
    description["vocab_size"] = recipe.renderer().vocab_size  # preflight has built it
    if resume:
        stored = read_info(out).get("vocab_size")
        if stored is not None and stored != description["vocab_size"]:
            expected = f"{stored}: a resumed run needs the vocabulary that it began with"
            raise ConfigError.of("--resume, vocab_size", description["vocab_size"], expected)
        reopened = reopen(out, description, recipe.data_buffer)
        now = {name: description[name] for name in ("batches_wanted", "server", "endpoint", "command", "vocab_size")}
        reopened.writer.update(**now)
        return reopened.writer, reopened.run_journal, reopened.state
    writer = RunWriter(out, description, format=format, overwrite=overwrite)
    return writer, begin(out, description, recipe.data_buffer), None


async def _recorded(recipe: Recipe, journal: Journal) -> Recipe:
    """The recipe with a generate function that records everything its rollouts receive from outside."""
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


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "run", _run, "generate batches and write them to a folder", "run configs/calculator.py --out runs/a"
    )
    add_target(parser, optional=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder for a new run")
    where.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="folder of a run to resume; recipe, options, servers and model are those of the run by default",
    )
    parser.add_argument("--batches", type=positive, metavar="N", help="number of batches (default: the recipe's)")
    parser.add_argument("--workers", type=positive, metavar="N", help="play rollouts in N processes on this machine")
    parser.add_argument("--metrics-port", type=int, metavar="P", help="port on which Prometheus can scrape metrics")
    parser.add_argument("--trace", action="store_true", help="OpenTelemetry spans for rollouts and completions")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is in --out")
    parser.add_argument(
        "--record", action="store_true", help="record all that rollouts receive, so that replay needs no server"
    )
    parser.add_argument(
        "--format", default="auto", choices=("jsonl", "parquet", "auto"), help="format of batches (default: auto)"
    )


def _run(args: argparse.Namespace) -> int:
    resume = args.resume is not None
    out = args.resume if resume else args.out
    distribute = None if args.workers is None else _in_workers(args.workers)
    telemetry = Telemetry(args.metrics_port, args.trace)
    options: dict[str, Any] = {
        "resume": resume,
        "record": args.record,
        "distribute": distribute,
        "telemetry": telemetry,
    }
    result = in_loop(functools.partial(launch, target_of(args), out, args.format, args.overwrite, Console(), **options))
    if result is None:
        return INTERRUPTED
    if result.error is not None:
        tell(result.error, debug=args.debug)
        return BROKEN
    return 0 if result.status == "finished" else INTERRUPTED


def _in_workers(count: int) -> Distribute:
    @contextlib.asynccontextmanager
    async def distribute(target: RunTarget, recipe: Recipe) -> AsyncIterator[RolloutConfig]:
        assert target.recipe is not None, "the recipe was built from a file"
        async with in_processes(
            RecipeConfig(target.recipe.resolve(), recipe.endpoint, target.options), count
        ) as workers:
            yield workers.config(recipe.config)

    return distribute
