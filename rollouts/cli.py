"""The command ``rollouts``: runs and what they left, evaluations, environments, and servers.

Invariant: whatever goes wrong on purpose is one clear line on standard error and an exit code: 2 for bad input, 1 for a
broken law or a run that failed, 130 for Ctrl-C. No child process outlives the command. The verbs only join rooms; what
they do is done below.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
from rich.console import Console

from rollouts import __version__
from rollouts.checking import Subject, check
from rollouts.distributed import RecipeConfig, in_processes
from rollouts.dtypes import Endpoint
from rollouts.environment_check import Candidate, check_environment
from rollouts.errors import ConfigError, ReplayDiverged, RolloutsError
from rollouts.evaluating import Exam, compare_evaluations, evaluate
from rollouts.inspection import play_one, show_run
from rollouts.integrations.slime.debug_data import export_run
from rollouts.launching import Aim, Spread, Telling, launch, resumed_aim, stored_recipe
from rollouts.planning import FACTORS, SERVERS, Given, measured, plan, shape, show_plan
from rollouts.recipe import Recipe, build, load_recipe
from rollouts.replaying import replay
from rollouts.rescoring import rescore
from rollouts.scaffolding import new_environment
from rollouts.serving import READY
from rollouts.serving_environments import environment_server
from rollouts.simulation import Speed
from rollouts.training.config import RolloutConfig
from rollouts.training.exports import export_rows
from rollouts.training.sinks import check_free
from rollouts.training.verify import verify_run

__all__ = ["main"]

BAD_INPUT, BROKEN, INTERRUPTED = 2, 1, 130

_VIOLATIONS_SHOWN = 20

Result = TypeVar("Result")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        code: int = args.verb(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; nothing more to say
        return 0
    except RolloutsError as error:
        _tell(error, debug=args.debug)
        return BAD_INPUT
    return code


def _tell(error: RolloutsError, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    print(f"rollouts: error: {error}", file=sys.stderr)


def _loop(function: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(function, *arguments, backend_options={"use_uvloop": uvloop})


# -- verbs ------------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    aim, out = _aim(args), args.out
    if args.resume is not None:
        aim, out = resumed_aim(aim, args.resume), args.resume
    else:
        check_free(out, overwrite=args.overwrite)
    resume = args.resume is not None
    spread = None if args.workers is None else _in_workers(args.workers)
    telling = Telling(args.metrics_port, args.trace)
    options: dict[str, Any] = {"resume": resume, "record": args.record, "spread": spread, "telling": telling}
    result = _loop(functools.partial(launch, aim, out, args.format, args.overwrite, Console(), **options))
    if result is None:
        return INTERRUPTED
    if result.error is not None:
        _tell(result.error, debug=args.debug)
        return BROKEN
    return 0 if result.status == "finished" else INTERRUPTED


def _in_workers(count: int) -> Spread:
    @contextlib.asynccontextmanager
    async def spread(aim: Aim, recipe: Recipe) -> AsyncIterator[RolloutConfig]:
        assert aim.recipe is not None, "it was built from a file"
        async with in_processes(RecipeConfig(aim.recipe.resolve(), recipe.endpoint, aim.options), count) as workers:
            yield workers.config(recipe.config)

    return spread


def _play(args: argparse.Namespace) -> int:
    _loop(play_one, _aim(args), args.text, Console())
    return 0


def _show(args: argparse.Namespace) -> int:
    show_run(
        args.run,
        Console(),
        group=args.group,
        number=args.sample,
        outcome=args.outcome,
        limit=args.limit,
        tokenizer=args.tokenizer,
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    report = verify_run(args.run)
    print(report)
    for violation in report.violations[:_VIOLATIONS_SHOWN]:
        print(violation, file=sys.stderr)
    left = len(report.violations) - _VIOLATIONS_SHOWN
    if left > 0:
        print(f"... and {left} more", file=sys.stderr)
    return 0 if report.ok else BROKEN


def _export(args: argparse.Namespace) -> int:
    if args.to == "slime":
        if args.outcome != "kept":
            raise ConfigError.of("--outcome", args.outcome, '"kept" with --to slime: a trainer takes whole batches')
        paths = export_run(args.run, args.out)
    else:
        paths = export_rows(args.run, args.out, args.to, args.outcome)
    for path in paths:
        print(path)
    return 0


def _replay(args: argparse.Namespace) -> int:
    recipe = stored_recipe(resumed_aim(Aim(recipe=args.recipe, options=_options(args)), args.run), args.run)
    try:
        print(_loop(replay, args.run, recipe, args.out))
    except ReplayDiverged as error:
        _tell(error, debug=args.debug)
        return BROKEN
    return 0


def _rescore(args: argparse.Namespace) -> int:
    check_free(args.out, overwrite=args.overwrite)
    recipe = stored_recipe(Aim(recipe=args.recipe, options=_options(args)), args.run)
    print(_loop(functools.partial(rescore, format=args.format, overwrite=args.overwrite), args.run, recipe, args.out))
    print(f"files: {args.out}")
    return 0


def _eval(args: argparse.Namespace) -> int:
    exam = Exam(
        out=args.out,
        ks=args.k,
        rollouts=max(args.k) if args.rollouts is None else args.rollouts,
        tasks=args.tasks,
        threshold=args.threshold,
        shown=args.limit,
    )
    _loop(evaluate, _aim(args), exam, Console())
    if args.against is not None:
        compare_evaluations(args.against, args.out, args.k, Console())
    return 0


def _compare(args: argparse.Namespace) -> int:
    compare_evaluations(args.before, args.after, args.k, Console())
    return 0


def _plan(args: argparse.Namespace) -> int:
    if bool(args.runs) == (args.latency is not None):
        raise ConfigError.of("RUN", list(map(str, args.runs)), "stored runs, or --latency instead")
    told = measured(args.runs) if args.runs else None
    batch_size, n = (32, 8) if told is None else (told.batch_size, told.n)
    found = plan(
        told or Given(shape(args.latency), args.pass_rate),
        batch_size=args.batch_size or batch_size,
        n=args.n or n,
        speed=told.speed if told is not None and not args.speed else Speed(args.speed),
        batches=args.batches,
        factors=args.factors,
        concurrencies=[None, *args.concurrency],
        servers=args.servers,
    )
    show_plan(found, Console())
    return 0


def _check(args: argparse.Namespace) -> int:
    subject = Subject(
        model=args.model,
        template=args.template,
        endpoint=args.endpoint,
        recipe=args.recipe,
        options=_options(args),
        dialect=args.dialect,
        stops=tuple(args.stop),
    )
    return 0 if _loop(check, subject, Console()) else BROKEN


def _check_env(args: argparse.Namespace) -> int:
    options = _options(args)
    if args.data is not None:
        options["data"] = str(args.data)
    candidate = Candidate(path=args.path, options=options, text=args.text, prompts=args.prompts, seed=args.seed)
    return 0 if _loop(check_environment, candidate, Console()) else BROKEN


def _new_env(args: argparse.Namespace) -> int:
    for path in new_environment(args.name, args.into):
        print(path)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from rollouts.engine import DEMO_MODEL, serve  # here: its extra may be missing, and then only this verb is

    async def engine(on_ready: Callable[[str], None]) -> None:
        model = DEMO_MODEL if args.model is None else args.model
        options = {} if args.slots is None else {"slots": args.slots}
        await serve(
            model, args.host, args.port, max_context=args.max_context, dtype=args.dtype, on_ready=on_ready, **options
        )

    return _loop(_until_told, engine, args.stop_with_stdin)


def _serve_env(args: argparse.Namespace) -> int:
    recipe = build(load_recipe(args.recipe), Endpoint(), _all_options(args))

    async def environment(on_ready: Callable[[str], None]) -> None:
        async with environment_server(recipe, host=args.host, port=args.port, split=args.split) as url:
            on_ready(url)
            await anyio.sleep_forever()

    return _loop(_until_told, environment, args.stop_with_stdin)


async def _until_told(serve: Callable[[Callable[[str], None]], Awaitable[None]], stop_with_stdin: bool) -> int:
    """Serve until a signal, or the end of standard input."""
    code = 0

    async def signals(scope: anyio.CancelScope) -> None:
        nonlocal code
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            async for number in received:
                code = INTERRUPTED if number == signal.SIGINT else 0
                scope.cancel()

    async def standard_input(scope: anyio.CancelScope) -> None:
        descriptor = sys.stdin.fileno()  # waited for, not read in a thread: a blocked thread would outlive the server
        with contextlib.suppress(PermissionError):  # a file or /dev/null cannot be waited for: it is at its end
            while True:
                await anyio.wait_readable(descriptor)
                if not os.read(descriptor, 4096):
                    break
        scope.cancel()

    def ready(url: str) -> None:
        print(f"{READY}{url}", flush=True)

    failure: RolloutsError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(signals, tasks.cancel_scope)
        if stop_with_stdin:
            tasks.start_soon(standard_input, tasks.cancel_scope)
        try:
            await serve(ready)
        except RolloutsError as error:  # not through the task group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return code


def _options(args: argparse.Namespace) -> dict[str, str]:
    options = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError.of("--set", text, "key=value")
        options[name] = value
    return options


def _all_options(args: argparse.Namespace) -> dict[str, str]:
    options = _options(args)
    for name in ("data", "seed"):
        if getattr(args, name) is not None:
            options[name] = str(getattr(args, name))
    return options


def _aim(args: argparse.Namespace) -> Aim:
    return Aim(
        recipe=args.recipe,
        urls=tuple(args.endpoint),
        model=args.model,
        options=_all_options(args),
        batches=getattr(args, "batches", None),
        slots=args.slots,
    )


# -- the command line -------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollouts",
        description="Turn an inference endpoint and an environment into training data: exact tokens, whole groups.",
        epilog="Exit codes: 0 done, 1 a law is broken or the run failed, 2 bad input, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"rollouts {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    run = _verb(verbs, "run", _run, "fill batches and write them to a folder", "run configs/calculator.py --out runs/a")
    _add_aim(run, optional=True)
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="the run's folder, new or without a run")
    where.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this folder; RECIPE and options as they were"
    )
    run.add_argument("--batches", type=_positive, metavar="N", help="how many; the recipe's number by default")
    run.add_argument("--workers", type=_positive, metavar="N", help="play rollouts in N processes of this machine")
    run.add_argument("--metrics-port", type=int, metavar="P", help="tell Prometheus the run's numbers at this port")
    run.add_argument("--trace", action="store_true", help="spans of OpenTelemetry for rollouts and completions")
    run.add_argument("--overwrite", action="store_true", help="replace the run that --out holds")
    run.add_argument(
        "--record", action="store_true", help="keep what rollouts are told, so that the run can be replayed"
    )
    run.add_argument("--format", default="auto", choices=("jsonl", "parquet", "auto"), help="of batches (auto)")

    show = _verb(verbs, "show", _show, "look at a stored run", "show runs/a --group 3 --sample 0")
    show.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    show.add_argument("--group", type=int, metavar="N", help="the samples of this group")
    show.add_argument(
        "--sample", type=int, metavar="N", help="one transcript: the sample's number in --group, or in the run"
    )
    show.add_argument(
        "--outcome", default="all", choices=("kept", "dropped", "failed", "unbatched", "all"), help="which groups (all)"
    )
    show.add_argument("--limit", type=_positive, default=60, metavar="N", help="groups in the table (60)")
    show.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="instead of the run's own")

    play = _verb(verbs, "play", _play, "play one prompt and watch it", "play configs/calculator.py")
    _add_aim(play)
    play.add_argument("--text", metavar="PROMPT", help="this prompt instead of the recipe's first")

    verify = _verb(verbs, "verify", _verify, "check laws 1 to 5 on a stored run", "verify runs/a")
    verify.add_argument("run", type=Path, metavar="RUN", help="the run's folder")

    export = _verb(verbs, "export", _export, "write a stored run as other files", "export runs/a --to hf data/a")
    export.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    export.add_argument(
        "--to",
        required=True,
        choices=("jsonl", "parquet", "hf", "slime"),
        help="one file of lines; one Parquet file; a folder that datasets.load_dataset reads; what slime's "
        "--load-debug-rollout-data reads",
    )
    export.add_argument("out", metavar="OUT", help="file or folder; for slime with {rollout_id}, a file for each batch")
    export.add_argument(
        "--outcome", default="kept", choices=("kept", "dropped", "failed", "unbatched", "all"), help="which (kept)"
    )

    again = _verb(verbs, "replay", _replay, "play a recorded run again, without a server, and compare", "replay runs/a")
    again.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that was made with --record")
    again.add_argument("--recipe", type=Path, metavar="FILE", help="instead of the run's own")
    again.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option, instead of the run's"
    )
    again.add_argument("--out", type=Path, metavar="FILE", help="write the samples that were played, one a line")

    anew = _verb(
        verbs,
        "rescore",
        _rescore,
        "apply other rewards and another filter to a stored run",
        "rescore runs/a --recipe configs/calculator.py --out runs/b",
    )
    anew.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    anew.add_argument("--recipe", type=Path, required=True, metavar="FILE", help="has the rewards, filter, batch size")
    anew.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new run's folder")
    anew.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the recipe")
    anew.add_argument("--overwrite", action="store_true", help="replace the run that --out holds")
    anew.add_argument("--format", default="auto", choices=("jsonl", "parquet", "auto"), help="of batches (auto)")

    exam = _verb(verbs, "eval", _eval, "score a recipe's tasks", "eval configs/calculator.py --k 1,8 --out runs/exam")
    _add_aim(exam)
    exam.add_argument("--out", type=Path, required=True, metavar="DIR", help="its folder; goes on with what is there")
    exam.add_argument("--k", type=_numbers, default=(1,), metavar="K,K", help="pass@k for these k (1)")
    exam.add_argument("--rollouts", type=_positive, metavar="N", help="of each task; the largest k by default")
    exam.add_argument("--tasks", type=_positive, metavar="N", help="the first N prompts of the recipe; all by default")
    exam.add_argument("--threshold", type=float, default=1.0, help="a rollout passes if its reward reaches it (1)")
    exam.add_argument("--limit", type=_positive, default=40, metavar="N", help="tasks in the table (40)")
    exam.add_argument("--against", type=Path, metavar="DIR", help="an earlier evaluation to compare with")

    versus = _verb(verbs, "compare", _compare, "compare two evaluations", "compare runs/before runs/after --k 1,8")
    versus.add_argument("before", type=Path, metavar="BEFORE", help="the folder of an evaluation")
    versus.add_argument("after", type=Path, metavar="AFTER", help="another, of the same tasks")
    versus.add_argument("--k", type=_numbers, default=(1,), metavar="K,K", help="pass@k for these k (1)")

    planned = _verb(
        verbs, "plan", _plan, "which over-sampling factor and concurrency fill a batch soonest", "plan runs/a"
    )
    planned.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="the run to plan for; more for other loads")
    planned.add_argument(
        "--latency", metavar="SHAPE", help="instead: constant:S, lognormal:MEDIAN,SIGMA or bimodal:SHORT,LONG,SHARE"
    )
    planned.add_argument("--pass-rate", type=_share, default=1.0, metavar="P", help="of the filter, with --latency (1)")
    planned.add_argument("--batch-size", type=_positive, metavar="N", help="groups; the run's, or 32")
    planned.add_argument("--n", type=_positive, metavar="N", help="rollouts in a group; the run's, or 8")
    planned.add_argument("--batches", type=_positive, default=4, metavar="N", help="played for each option (4)")
    planned.add_argument("--factors", type=_factors, default=FACTORS, metavar="F,F", help="to try (1,1.25,1.5,2,3)")
    planned.add_argument(
        "--concurrency", type=_numbers, default=(), metavar="N,N", help="limits of requests to try, beside none"
    )
    planned.add_argument(
        "--speed",
        type=_speed,
        default=(),
        metavar="K:S,K:S",
        help="speed of each of K rollouts in a server, e.g. 1:1,64:0.8,256:0.3; that of the runs by default",
    )
    planned.add_argument("--servers", type=_numbers, default=SERVERS, metavar="N,N", help="to scale the best to")

    check = _verb(
        verbs, "check", _check, "say whether every token of this model's chat template is exact", "check --model DIR"
    )
    check.add_argument("--model", metavar="NAME_OR_DIR", help="the tokenizer; by default what the endpoint names")
    check.add_argument("--template", type=Path, metavar="FILE", help="this chat template instead of the model's own")
    check.add_argument("--endpoint", metavar="URL", help="send ids to this server, and compare what it says it got")
    check.add_argument("--recipe", type=Path, metavar="FILE", help="take the tools from this recipe's environment")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the recipe")
    check.add_argument("--dialect", metavar="NAME", help="how tool calls are written; by default what is taught")
    check.add_argument("--stop", type=int, action="append", default=[], metavar="ID", help="ids that end a turn")

    novel = _verb(verbs, "new-env", _new_env, "begin an environment of your own, with its tests", "new-env wordle")
    novel.add_argument("name", metavar="NAME", help="of its folder: a Python name in lower case")
    novel.add_argument("--into", type=Path, default=Path(), metavar="DIR", help="where its folder is made (here)")

    paces = _verb(
        verbs, "check-env", _check_env, "play an environment with random replies", "check-env configs/guess.py"
    )
    paces.add_argument("path", type=Path, metavar="PATH", help="a recipe, or a file with one environment class")
    paces.add_argument("--data", type=Path, metavar="PATH", help="the recipe's option data")
    paces.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the recipe")
    paces.add_argument("--text", default="Begin.", metavar="PROMPT", help="the prompt for a file without a recipe")
    paces.add_argument("--prompts", type=_positive, default=4, metavar="N", help="how many are played (4)")
    paces.add_argument("--seed", type=int, default=0, metavar="N", help="of the replies (0)")

    serve = _verb(verbs, "serve", _serve, "run the embedded engine alone", "serve --port 30000")
    serve.add_argument("--model", type=Path, metavar="DIR", help="a folder with a causal LM (the demo model)")
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=30000, help="0 takes a free one (30000)")
    serve.add_argument("--slots", type=_positive, metavar="N", help="requests that run at once")
    serve.add_argument("--max-context", type=_positive, metavar="N", help="tokens of prompt and reply together")
    serve.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights (float32)")
    serve.add_argument("--stop-with-stdin", action="store_true", help="end when standard input does; for a parent")

    host = _verb(
        verbs, "serve-env", _serve_env, "a recipe's environment as an ORS server", "serve-env configs/calculator.py"
    )
    host.add_argument("recipe", type=Path, metavar="RECIPE", help="a Python file with a function recipe(...)")
    host.add_argument("--data", type=Path, metavar="PATH", help="the recipe's option data")
    host.add_argument("--seed", type=int, metavar="N", help="the recipe's option seed")
    host.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the recipe")
    host.add_argument("--split", default="train", metavar="NAME", help="what its prompts are called (train)")
    host.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    host.add_argument("--port", type=int, default=8080, help="0 takes a free one (8080)")
    host.add_argument("--stop-with-stdin", action="store_true", help="end when standard input does; for a parent")
    return parser


def _verb(verbs: Any, name: str, function: Callable[..., int], does: str, example: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}.", epilog=f"Example: rollouts {example}"
    )
    # Without a default, or it would undo a --debug before the verb.
    verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
    verb.set_defaults(verb=function)
    return verb


def _add_aim(verb: argparse.ArgumentParser, *, optional: bool = False) -> None:
    nargs = "?" if optional else None
    verb.add_argument(
        "recipe", type=Path, metavar="RECIPE", nargs=nargs, help="a Python file with a function recipe(...)"
    )
    verb.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="URL",
        help="an SGLang server; may be given again for more workers. Without one the embedded engine is started. "
        "A key for it is taken from ROLLOUTS_API_KEY",
    )
    verb.add_argument(
        "--model", metavar="NAME_OR_DIR", help="the model and its tokenizer; by default what the server names"
    )
    verb.add_argument("--data", type=Path, metavar="PATH", help="the recipe's option data")
    verb.add_argument("--seed", type=int, metavar="N", help="the recipe's option seed")
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the recipe")
    verb.add_argument("--slots", type=_positive, metavar="N", help="requests at once in the embedded engine")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _factors(text: str) -> tuple[float, ...]:
    factors = tuple(float(part) for part in text.split(","))
    if min(factors) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected numbers >= 1")
    return factors


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected a number above 0, at most 1")
    return share


def _speed(text: str) -> tuple[tuple[float, float], ...]:
    pairs = [part.partition(":") for part in text.split(",")]
    return tuple((float(count), float(speed)) for count, _, speed in pairs)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected an integer >= 1")
    return number
