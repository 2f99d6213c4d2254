"""``rollouts run``: find or start the server, build the recipe, run it, and stop it on a signal.

Invariant: every error that can be detected early is raised before a prompt is taken and before an old run is deleted.
A run resumes with its stored servers or with those of the command line, and only if they serve the model it began with.
The first Ctrl-C stops cleanly and keeps finished groups; the second exits at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import attrs
from rich.console import Console

from rollouts import __version__
from rollouts.base.terminal import say
from rollouts.commands.arguments import (
    BROKEN,
    INTERRUPTED,
    add_output,
    add_repeatable,
    add_target,
    add_verb,
    check_run,
    in_loop,
    port,
    positive,
    stop_signals,
    target_of,
    tell,
    worker_range,
)
from rollouts.commands.chat_options import CHAT_PROVIDER
from rollouts.commands.target import (
    ENGINE_LOG,
    RunTarget,
    open_target,
    weights_checksum,
    without_secrets,
)
from rollouts.concurrency.interrupts import handling_interrupts
from rollouts.concurrency.stalls import StallWatch
from rollouts.concurrency.task_groups import first_error
from rollouts.engine.process import EngineProcess
from rollouts.errors import ConfigError, RolloutsError, without_password
from rollouts.inference.base import ServerInfo
from rollouts.inference.pauses import watch_pauses
from rollouts.inference.shared import shared_policies
from rollouts.recipe import Recipe, preflight
from rollouts.recipe.files import absolute, file_of
from rollouts.runs.info import read_info
from rollouts.runs.journal import Journal
from rollouts.runs.layout import RECORDING
from rollouts.runs.run import RunResult, Stop, Watch, abandon, observe, run
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.settings import settings_of
from rollouts.runs.start import begin
from rollouts.runs.writer import Format, RunWriter, check_free, check_idle, versions
from rollouts.training.config import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.progress import Progress, summary

if TYPE_CHECKING:
    from rollouts.distributed.dispatch import Dispatcher, Workers
    from rollouts.observability.run_logger import RunLogger
    from rollouts.training.manager_state import ManagerState

__all__ = ["Distribute", "Telemetry", "add", "description_of", "in_workers", "launch", "recorded_server"]

_BLOCKED_SECONDS = 0.25
"""How long a callback may block the event loop before it is named."""

Distribute: TypeAlias = Callable[[RunTarget, Recipe], contextlib.AbstractAsyncContextManager[RolloutConfig]]
"""Starts workers for a recipe's rollouts; the context value is the config that sends rollouts to them."""
Telemetry: TypeAlias = Callable[[Recipe], contextlib.AbstractAsyncContextManager[tuple[RolloutConfig, Watch | None]]]
"""Exports telemetry while a run is active; the context value is the config that it observes, and what observes it."""


async def _watch_pauses(manager: AsyncRolloutManager) -> None:
    await watch_pauses(shared_policies)


def _together(watches: Sequence[Watch]) -> Watch:
    async def watch_together(manager: AsyncRolloutManager) -> None:
        async with first_error() as tasks:
            for watch in watches:
                tasks.start_soon(observe, watch, manager)

    return watch_together


async def launch(
    target: RunTarget,
    out: Path,
    format: Format,
    overwrite: bool,
    console: Console,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    record: bool = False,
    distribute: Distribute | None = None,
    telemetry: Telemetry | None = None,
    rehearsal: bool = True,
    quiet: bool = False,
    loggers: Sequence[RunLogger] = (),
) -> RunResult | None:
    """Do a whole ``rollouts run``; return ``None`` if it was stopped before it began.

    Args:
        resume: resume the run in ``out``; its stored values fill the fields that ``target`` leaves empty.
        allow_changes: resume with other settings than those of the run, and record them.
        record: record everything that rollouts receive from outside; a resumed recorded run always does.
        distribute: starts the workers that play the rollouts; by default this process plays them.
        rehearsal: play an episode with random replies first, so that an error of the recipe costs no prompt; a
            resumed run has none.
        quiet: print nothing but errors and warnings.
        loggers: receive the metrics of each batch.

    Raises:
        RolloutsError: an error before the work began.
    """
    if resume:
        check_idle(out, "--resume")
        from rollouts.commands.stored_target import checked_target  # here: most runs are new

        target = checked_target(target, out, allow_changes=allow_changes)
    else:
        check_free(out, overwrite=overwrite)
    recording = record or (resume and (out / RECORDING).is_dir())
    if target.provider == CHAT_PROVIDER:
        from rollouts.commands.chat_target import url_of  # here: few runs are on a chat API

        if recording or distribute is not None:
            got = "--record" if recording else "--workers"
            raise ConfigError.of("--provider openai", got, "a run in this process that is not recorded")
        target = attrs.evolve(target, urls=(url_of(target.chat, target.urls),))
    if recording and distribute is not None:
        raise ConfigError.of("--workers", "with --record", "one of them: rollouts of other processes are not recorded")
    progress = Progress(console, quiet=quiet)
    stop = Stop()
    engine: EngineProcess | None = None
    result: RunResult | None = None
    working = False

    async def signals(starting: anyio.CancelScope) -> None:
        def stop_cleanly() -> None:
            stop.ask()
            if not working:  # no work would be lost
                starting.cancel()

        def exit_at_once() -> None:
            if engine is not None:
                engine.kill()

        stop_soon = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop_cleanly)
        with handling_interrupts(stop_soon, exit_at_once, stop_signals()):
            await anyio.sleep_forever()

    async with first_error() as tasks:
        starting = anyio.CancelScope()
        tasks.start_soon(signals, starting)
        with starting:
            async with contextlib.AsyncExitStack() as stack:
                opened = open_target(target, out / ENGINE_LOG, progress.say)
                recipe, engine = await stack.enter_async_context(opened)
                recipe.check_spread()
                if recording:
                    from rollouts.commands.recorded import check_recordable, recorded  # here: few runs are recorded

                    check_recordable(recipe)
                progress.say("preflight: environment, chat template and server")
                server = await preflight(recipe)
                progress.say(_server_line(target, server))
                await stack.enter_async_context(StallWatch(_BLOCKED_SECONDS, progress.blocked))
                if rehearsal and not resume and target.provider != CHAT_PROVIDER:
                    from rollouts.commands.rehearsal import rehearse  # here: a resumed run has none

                    progress.say("rehearsal: an episode with random replies, its reward and the filter")
                    for doubt in await rehearse(recipe):
                        progress.say(doubt, "yellow")
                played = recipe
                if distribute is not None:
                    config = await stack.enter_async_context(distribute(target, recipe))
                    played = attrs.evolve(recipe, config=config, lifetime=None)  # its rollouts are not here
                watches: list[Watch] = [functools.partial(progress.watch, batches=recipe.batches), _watch_pauses]
                if telemetry is not None:
                    config, export_metrics = await stack.enter_async_context(telemetry(played))
                    played = attrs.evolve(played, config=config)
                    watches += [export_metrics] if export_metrics is not None else []
                description = await anyio.to_thread.run_sync(description_of, target, recipe, server)
                if resume:
                    open_files = functools.partial(_resumed, recipe, out, description, allow_changes, progress)
                else:
                    open_files = functools.partial(_begun, recipe, out, description, format, overwrite)
                writer, run_journal, state = await anyio.to_thread.run_sync(open_files)
                working = True
                stack.enter_context(_abandoning(recipe, writer, state))
                if engine is not None:
                    tasks.start_soon(_stop_when_it_dies, engine, stop)
                progress.say(_plan_line(recipe, writer))
                show = _together(watches)
                with contextlib.ExitStack() as files:
                    files.enter_context(run_journal.journal)
                    if recording:
                        recording_journal = files.enter_context(Journal(out / RECORDING, batches=0))
                        if recording_journal.torn is not None:
                            progress.say(f"cut from the end of the recording: {recording_journal.torn}", "yellow")
                        played = await recorded(played, recording_journal)
                    callbacks: dict[str, Any] = {"watch": show, "on_batch": progress.batch, "loggers": loggers}
                    result = await run(played, writer, stop=stop, run_journal=run_journal, state=state, **callbacks)
        tasks.cancel_scope.cancel()
    if result is not None:
        progress.say(summary(result, writer))
        if target.provider == CHAT_PROVIDER:
            from rollouts.commands.chat_target import cost_of

            progress.say(cost_of(recipe))
    return result


def _server_line(target: RunTarget, server: ServerInfo) -> str:
    """The server that answered, in words."""
    if target.provider == CHAT_PROVIDER:
        return f"chat API: {', '.join(map(without_password, target.urls))}, model {server.model}; no token ids"
    kind = "vLLM" if target.provider == "vllm" else "SGLang"
    version = f"{kind} {server.version or 'of unknown version'}" if target.urls else "embedded engine"
    context = "" if server.max_context is None else f", at most {server.max_context} tokens a sequence"
    seeds = ", seeds ignored (--enable-deterministic-inference)" if server.honours_seeds is False else ""
    return f"server: {version}, model {Path(server.model or 'unknown').name}{context}{seeds}"


def _plan_line(recipe: Recipe, writer: RunWriter) -> str:
    """The size of the run, and its folder."""
    size, n = recipe.config.batch_size, recipe.config.n_samples_per_prompt
    first, last = writer.batches, recipe.batches - 1
    batches = "no batch" if first > last else f"batch {first}" if first == last else f"batches {first} to {last}"
    return f"run: {recipe.name}, {batches} of {size} groups of {n} rollouts, in {writer.path}"


@contextlib.contextmanager
def _abandoning(recipe: Recipe, writer: RunWriter, state: ManagerState | None) -> Iterator[None]:
    """Write the end of a run that fails between its first file and its first rollout."""
    try:
        yield
    except BaseException as error:
        if not writer.finished:
            abandon(recipe, writer, None if state is None else state.accounting, error)
        raise


def recorded_server(target: RunTarget, server: ServerInfo) -> dict[str, Any]:
    """The server as ``run.json`` records it; the embedded engine reports the version whose protocol it has."""
    spoken = (server.version or "").partition(" ")[0]
    version = server.version if target.urls else f"embedded {__version__} (protocol of SGLang {spoken})"
    return attrs.asdict(attrs.evolve(server, version=version))


def description_of(target: RunTarget, recipe: Recipe, server: ServerInfo) -> dict[str, Any]:
    """The fields of ``run.json`` that are known before the run begins; the recipe has passed its preflight."""
    description = {**recipe.describe(), "server": recorded_server(target, server), "options": dict(target.options)}
    description["command"] = {
        "recipe": str(absolute(target.recipe)) if target.recipe is not None else None,
        "endpoint": [without_secrets(url) for url in target.urls],
        "model": target.model,
        "options": dict(target.options),
        "slots": target.slots,
    }
    model = {"name": server.model} if target.urls else {"weights": weights_checksum(Path(recipe.endpoint.model))}
    description["command"] |= {} if target.urls else model
    if target.provider == CHAT_PROVIDER:
        from rollouts.commands.chat_target import stored_chat

        description["command"]["chat"] = stored_chat(target.chat)
    description["vocab_size"] = None if recipe.tokenizer is None else recipe.renderer().vocab_size
    description["versions"] = versions()
    file = None if target.recipe is None else file_of(target.recipe)
    description["settings"] = settings_of(recipe, file, target.options, model, description["versions"])
    return description


def _begun(
    recipe: Recipe, out: Path, description: Mapping[str, Any], format: Format, overwrite: bool
) -> tuple[RunWriter, RunJournal, ManagerState | None]:
    """Create the files of a new run."""
    writer = RunWriter(out, description, format=format, overwrite=overwrite)
    try:
        return writer, begin(out, description, recipe.data_buffer), None
    except RolloutsError as error:
        abandon(recipe, writer, None, error)
        raise


def _resumed(
    recipe: Recipe, out: Path, description: Mapping[str, Any], allow_changes: bool, progress: Progress
) -> tuple[RunWriter, RunJournal, ManagerState | None]:
    """Open the files of a resumed run; print the restored groups and the changes of settings."""
    from rollouts.runs.resume import reopen  # here: most runs are new

    stored = read_info(out).get("vocab_size")
    if stored is not None and stored != description["vocab_size"]:
        expected = f"{stored}: a resumed run needs the vocabulary that it began with"
        raise ConfigError.of("--resume, vocab_size", description["vocab_size"], expected)
    reopened = reopen(out, description, recipe.data_buffer, allow_changes=allow_changes)
    reopened.writer.update(**description)
    lines: dict[str, Sequence[Any]] = {
        "cut from the end of the journal": () if reopened.torn is None else (reopened.torn,),
        "restored from the journal": reopened.restored,
        "changed since the run began": reopened.changed,
        "not stored with the run, not compared": reopened.unrecorded,
    }
    for what, found in lines.items():
        if found:
            progress.say(f"{what}: {', '.join(map(str, found))}", "yellow")
    return reopened.writer, reopened.run_journal, reopened.state


async def _stop_when_it_dies(engine: EngineProcess, stop: Stop) -> None:
    stop.ask(await engine.death())


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "run", _run, "generate batches and write them to a folder", "run calculator --out runs/a")
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
    parser.add_argument(
        "--workers",
        type=worker_range,
        metavar="N",
        help="play rollouts in N processes on this machine; MIN:MAX begins with MIN",
    )
    parser.add_argument("--metrics-port", type=port, metavar="P", help="port on which Prometheus can scrape metrics")
    does = "log each batch to wandb, tensorboard, trackio or mlflow; WHERE is the project, experiment or folder"
    add_repeatable(parser, "--log", "NAME[:WHERE]", does)
    parser.add_argument("--trace", action="store_true", help="OpenTelemetry spans for rollouts and completions")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is in --out")
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="with --resume: accept another recipe, reward, sampling, model or package version, and record it",
    )
    parser.add_argument("--no-rehearsal", action="store_true", help="do not try reward, filter and tools first")
    parser.add_argument(
        "--record", action="store_true", help="record all that rollouts receive, so that replay needs no server"
    )
    parser.add_argument(
        "--format",
        default="auto",
        choices=("jsonl", "parquet", "auto"),
        help="format of batches (default: auto, Parquet if pyarrow is installed)",
    )
    parser.add_argument(
        "--text",
        action="store_true",
        dest="as_text",
        help="with --provider openai: store rollouts as text, which rollouts curate --tokenizer encodes for a student",
    )
    add_output(parser)


def _run(args: argparse.Namespace) -> int:
    resume = args.resume is not None
    if args.allow_changes and not resume:
        raise ConfigError.of("--allow-changes", True, "--resume RUN with it")
    out = args.resume if resume else args.out
    if resume:
        check_run(out, "--resume")
    if args.provider == CHAT_PROVIDER and not args.as_text and not resume:
        from rollouts.training.rows import NO_IDS

        text = "rollouts eval works; rollouts run --text stores its replies as text for SFT data"
        raise ConfigError(f"--provider openai: {NO_IDS}. {text}")
    if args.as_text and args.provider != CHAT_PROVIDER and not resume:
        raise ConfigError.of("--text", True, "--provider openai with it; other servers have token ids")
    options: dict[str, Any] = {
        "resume": resume,
        "allow_changes": args.allow_changes,
        "record": args.record,
        "distribute": None if args.workers is None else functools.partial(_in_workers_alone, args.workers),
        "telemetry": _telemetry(args.metrics_port, args.trace),
        "rehearsal": not args.no_rehearsal,
        "quiet": args.quiet,
        "loggers": _loggers(args.log),
    }
    console = SafeConsole(stderr=args.json)
    result = in_loop(functools.partial(launch, target_of(args), out, args.format, args.overwrite, console, **options))
    if result is None:
        return INTERRUPTED
    if args.json:
        say(json.dumps(_as_data(result, out)))
    if result.error is not None:
        tell(result.error, debug=args.debug)
        return BROKEN
    return 0 if result.status == "finished" else INTERRUPTED


def _telemetry(metrics_port: int | None, trace: bool) -> Telemetry | None:
    """The telemetry of the command line; its packages are imported only if it is on."""
    if metrics_port is None and not trace:
        return None
    from rollouts.commands.telemetry import checked_telemetry

    return checked_telemetry(metrics_port, trace)


def _loggers(texts: Sequence[str]) -> list[RunLogger]:
    """The loggers of the command line; the services are imported only if there is one."""
    if not texts:
        return []
    from rollouts.observability.loggers import logger_of

    return [logger_of(text) for text in texts]


def _as_data(result: RunResult, out: Path) -> dict[str, Any]:
    """The result of a run as plain values, for ``--json``."""
    return {
        "status": result.status,
        "error": None if result.error is None else str(result.error),
        "path": str(out),
        "seconds": result.seconds,
        "batches": result.batches,
        "accounting": attrs.asdict(result.accounting),
        "rollouts": result.run_metrics.rollouts,
        "sampled_tokens": result.run_metrics.sampled_tokens,
        "mean_reward": result.run_metrics.mean_reward,
        "batch_metrics": [dict(batch) for batch in result.batch_metrics],
    }


@contextlib.asynccontextmanager
async def _in_workers_alone(count: Workers, target: RunTarget, recipe: Recipe) -> AsyncIterator[RolloutConfig]:
    async with in_workers(count, target, recipe) as (config, _):
        yield config


@contextlib.asynccontextmanager
async def in_workers(
    count: Workers, target: RunTarget, recipe: Recipe
) -> AsyncIterator[tuple[RolloutConfig, Dispatcher]]:
    """Start processes of this machine that play a recipe; yields the config that sends rollouts to them."""
    from rollouts.distributed import RecipeConfig, in_processes  # here: most runs have one process

    assert target.recipe is not None, "the recipe was built from a file"
    factory = RecipeConfig(absolute(target.recipe), recipe.endpoint, target.options)
    async with in_processes(factory, count) as workers:
        yield workers.config(recipe.config), workers
