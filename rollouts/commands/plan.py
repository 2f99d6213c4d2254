"""``rollouts plan``: predict which over-sampling factor and concurrency fill a batch soonest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollouts.commands.arguments import add_verb, check_run, numbers, positive
from rollouts.errors import ConfigError
from rollouts.planning.plan import (
    FACTORS,
    SERVERS,
    SLOT_FACTORS,
    Given,
    measured,
    plan,
    shape,
    show_plan,
    spread,
)
from rollouts.planning.simulation import Speed
from rollouts.views.terminal.console import SafeConsole

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "plan", _plan, "predict the best over-sampling factor and concurrency", "plan runs/a")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="stored run to measure; more for other loads")
    parser.add_argument(
        "--latency",
        metavar="SHAPE",
        help="seconds of a rollout, instead of RUN: constant:S, lognormal:MEDIAN,SIGMA or bimodal:SHORT,LONG,SHARE",
    )
    parser.add_argument("--pass-rate", type=_share, default=1.0, metavar="P", help="share of kept groups (default: 1)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="groups per batch (default: the run's or 32)")
    parser.add_argument(
        "--rollouts", type=positive, metavar="N", help="rollouts of each prompt (default: the run's or 8)"
    )
    parser.add_argument("--batches", type=positive, default=4, metavar="N", help="batches to simulate (default: 4)")
    parser.add_argument(
        "--factors",
        type=_factors,
        metavar="F,F",
        help="factors to try (default: 1,1.25,1.5,2,3; with --in-flight 1.5,2,3,4,5,6,8)",
    )
    parser.add_argument(
        "--in-flight", type=positive, metavar="N", help="rollouts that run at once (default: the run's, or no limit)"
    )
    parser.add_argument(
        "--concurrency", type=numbers, default=(), metavar="N,N", help="request limits to try, in addition to no limit"
    )
    parser.add_argument(
        "--speed",
        type=_speed,
        default=(),
        metavar="K:S,K:S",
        help="relative speed S of a rollout where K share a server, e.g. 1:1,64:0.8,256:0.3 (default: as measured)",
    )
    parser.add_argument(
        "--servers", type=numbers, default=SERVERS, metavar="N,N", help="server counts to scale to (default: 1 to 4096)"
    )


def _plan(args: argparse.Namespace) -> int:
    if bool(args.runs) == (args.latency is not None):
        both = f"RUN {args.runs[0]} and --latency {args.latency}" if args.runs else None
        raise ConfigError.of("RUN or --latency", both, "one of them: stored runs, or a shape of the latency")
    for run in args.runs:
        check_run(run)
    measurements = measured(args.runs) if args.runs else None
    batch_size, n = (32, 8) if measurements is None else (measurements.batch_size, measurements.n)
    speed = measurements.speed if measurements is not None and not args.speed else Speed(args.speed)
    in_flight = args.in_flight or (None if measurements is None else measurements.in_flight)
    workload = measurements or Given(shape(args.latency), args.pass_rate)
    batch_size, n = args.batch_size or batch_size, args.rollouts or n
    result = plan(
        workload,
        batch_size=batch_size,
        n=n,
        speed=speed,
        in_flight=in_flight,
        batches=args.batches,
        factors=args.factors or (FACTORS if in_flight is None else SLOT_FACTORS),
        concurrencies=[None, *args.concurrency],
        servers=args.servers,
    )
    console = SafeConsole()
    show_plan(result, console, speed)
    slots, ratio = in_flight or max(option.in_flight for option in result.options), spread(workload, n)
    console.print(
        f"The slowest rollout of a group takes {ratio:.1f} × the time of a mean one: {slots:g} slots are all busy from "
        f"about in_flight={slots:g} with over_sampling_factor={slots / (n * batch_size) * ratio + 1:.1f}. Groups are "
        "then that factor less one versions old on average (age).",
        soft_wrap=True,
    )
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
