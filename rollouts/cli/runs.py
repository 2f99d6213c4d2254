"""The verbs about runs: make one, look at it, prove it, hand it on, play or score it again, plan the next."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console

from rollouts.cli.words import (
    BROKEN,
    INTERRUPTED,
    add_aim,
    add_verb,
    aim_of,
    in_loop,
    numbers,
    options_of,
    positive,
    tell,
)
from rollouts.distributed import RecipeConfig, in_processes
from rollouts.errors import ConfigError, ReplayDiverged
from rollouts.inspection import play_one, show_run
from rollouts.integrations.slime.debug_data import export_run
from rollouts.launching import Aim, Spread, Telling, launch, resumed_aim, stored_recipe
from rollouts.planning import FACTORS, SERVERS, Given, measured, plan, shape, show_plan
from rollouts.recipe import Recipe
from rollouts.replaying import replay
from rollouts.rescoring import rescore
from rollouts.simulation import Speed
from rollouts.training.config import RolloutConfig
from rollouts.training.exports import export_rows
from rollouts.training.sinks import check_free
from rollouts.training.verify import verify_run
from rollouts.transcript import visible

__all__ = ["add_runs"]

_VIOLATIONS_SHOWN = 20


def add_runs(verbs: Any) -> None:
    """Add them to the command line."""
    run = add_verb(
        verbs, "run", _run, "fill batches and write them to a folder", "run configs/calculator.py --out runs/a"
    )
    add_aim(run, optional=True)
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="the run's folder, new or without a run")
    where.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the run in this folder: recipe, options, servers and model as they were",
    )
    run.add_argument("--batches", type=positive, metavar="N", help="how many; the recipe's number by default")
    run.add_argument("--workers", type=positive, metavar="N", help="play rollouts in N processes of this machine")
    run.add_argument("--metrics-port", type=int, metavar="P", help="tell Prometheus the run's numbers at this port")
    run.add_argument("--trace", action="store_true", help="spans of OpenTelemetry for rollouts and completions")
    run.add_argument("--overwrite", action="store_true", help="replace the run that --out holds")
    run.add_argument(
        "--record", action="store_true", help="keep what rollouts are told, so that the run can be replayed"
    )
    run.add_argument("--format", default="auto", choices=("jsonl", "parquet", "auto"), help="of batches (auto)")

    show = add_verb(verbs, "show", _show, "look at a stored run", "show runs/a --group 3 --sample 0")
    show.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    show.add_argument("--group", type=int, metavar="N", help="the samples of this group")
    show.add_argument(
        "--sample", type=int, metavar="N", help="one transcript: the sample's number in --group, or in the run"
    )
    show.add_argument(
        "--outcome", default="all", choices=("kept", "dropped", "failed", "unbatched", "all"), help="which groups (all)"
    )
    show.add_argument("--limit", type=positive, default=60, metavar="N", help="groups in the table (60)")
    show.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="instead of the run's own")

    play = add_verb(verbs, "play", _play, "play one prompt and watch it", "play configs/calculator.py")
    add_aim(play)
    play.add_argument("--text", metavar="PROMPT", help="this prompt instead of the recipe's first")

    verify = add_verb(verbs, "verify", _verify, "check laws 1 to 5 on a stored run", "verify runs/a")
    verify.add_argument("run", type=Path, metavar="RUN", help="the run's folder")

    export = add_verb(verbs, "export", _export, "write a stored run as other files", "export runs/a --to hf data/a")
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

    again = add_verb(
        verbs, "replay", _replay, "play a recorded run again, without a server, and compare", "replay runs/a"
    )
    again.add_argument("run", type=Path, metavar="RUN", help="the folder of a run that was made with --record")
    again.add_argument("--recipe", type=Path, metavar="FILE", help="instead of the run's own")
    again.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option, instead of the run's"
    )
    again.add_argument("--out", type=Path, metavar="FILE", help="write the samples that were played, one a line")

    anew = add_verb(
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

    planned = add_verb(
        verbs, "plan", _plan, "which over-sampling factor and concurrency fill a batch soonest", "plan runs/a"
    )
    planned.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="the run to plan for; more for other loads")
    planned.add_argument(
        "--latency", metavar="SHAPE", help="instead: constant:S, lognormal:MEDIAN,SIGMA or bimodal:SHORT,LONG,SHARE"
    )
    planned.add_argument("--pass-rate", type=_share, default=1.0, metavar="P", help="of the filter, with --latency (1)")
    planned.add_argument("--batch-size", type=positive, metavar="N", help="groups; the run's, or 32")
    planned.add_argument("--n", type=positive, metavar="N", help="rollouts in a group; the run's, or 8")
    planned.add_argument("--batches", type=positive, default=4, metavar="N", help="played for each option (4)")
    planned.add_argument("--factors", type=_factors, default=FACTORS, metavar="F,F", help="to try (1,1.25,1.5,2,3)")
    planned.add_argument(
        "--concurrency", type=numbers, default=(), metavar="N,N", help="limits of requests to try, beside none"
    )
    planned.add_argument(
        "--speed",
        type=_speed,
        default=(),
        metavar="K:S,K:S",
        help="speed of each of K rollouts in a server, e.g. 1:1,64:0.8,256:0.3; that of the runs by default",
    )
    planned.add_argument("--servers", type=numbers, default=SERVERS, metavar="N,N", help="to scale the best to")


def _run(args: argparse.Namespace) -> int:
    resume = args.resume is not None
    out = args.resume if resume else args.out
    spread = None if args.workers is None else _in_workers(args.workers)
    telling = Telling(args.metrics_port, args.trace)
    options: dict[str, Any] = {"resume": resume, "record": args.record, "spread": spread, "telling": telling}
    result = in_loop(functools.partial(launch, aim_of(args), out, args.format, args.overwrite, Console(), **options))
    if result is None:
        return INTERRUPTED
    if result.error is not None:
        tell(result.error, debug=args.debug)
        return BROKEN
    return 0 if result.status == "finished" else INTERRUPTED


def _in_workers(count: int) -> Spread:
    @contextlib.asynccontextmanager
    async def spread(aim: Aim, recipe: Recipe) -> AsyncIterator[RolloutConfig]:
        assert aim.recipe is not None, "it was built from a file"
        async with in_processes(RecipeConfig(aim.recipe.resolve(), recipe.endpoint, aim.options), count) as workers:
            yield workers.config(recipe.config)

    return spread


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


def _play(args: argparse.Namespace) -> int:
    in_loop(play_one, aim_of(args), args.text, Console())
    return 0


def _verify(args: argparse.Namespace) -> int:
    report = verify_run(args.run)
    print(visible(str(report)))
    for violation in report.violations[:_VIOLATIONS_SHOWN]:
        print(visible(str(violation)), file=sys.stderr)
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
    recipe = stored_recipe(resumed_aim(Aim(recipe=args.recipe, options=options_of(args)), args.run), args.run)
    try:
        print(in_loop(replay, args.run, recipe, args.out))
    except ReplayDiverged as error:
        tell(error, debug=args.debug)
        return BROKEN
    return 0


def _rescore(args: argparse.Namespace) -> int:
    check_free(args.out, overwrite=args.overwrite)
    recipe = stored_recipe(Aim(recipe=args.recipe, options=options_of(args)), args.run)
    print(in_loop(functools.partial(rescore, format=args.format, overwrite=args.overwrite), args.run, recipe, args.out))
    print(f"files: {args.out}")
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
