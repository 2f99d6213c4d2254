"""Which over-sampling factor and concurrency fill a batch soonest: ``rollouts plan``.

Invariant: nothing is assumed of a run that was not measured in it: its groups are drawn again whole, with the seconds
that each of their rollouts was in the engine and in its environment, and with what the filter said of them. What was
not measured (other loads of the engine than the run's) is taken from further runs, or given; else see
:class:`~rollouts.planning.simulation.Speed`.

This module starts no rollout; :mod:`rollouts.planning.simulation` plays them.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from rollouts.errors import ConfigError
from rollouts.planning.simulation import SimulationResult, Speed, fill
from rollouts.runs.folder import read_info, read_rows

__all__ = ["Given", "Measured", "Option", "Plan", "measured", "plan", "shape", "show_plan"]

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
SERVERS = (1, 2, 4, 16, 64, 256, 1024, 4096)
_REPLAYED = 160
"""Groups to keep until the load of a run is known, in no fewer than four batches."""


@attrs.frozen
class Given:
    """A workload by its parameters (protocol :class:`~rollouts.planning.simulation.Workload`)."""

    draw: Callable[[random.Random], float]
    """Seconds of one rollout; see :func:`shape`."""
    pass_rate: float = 1.0
    seed: int = 0

    def seconds(self, group: int, member: int) -> float:
        return self.draw(random.Random(f"{self.seed}/{group}/{member}"))

    def outside(self, group: int, member: int) -> float:
        return 0.0

    def passes(self, group: int) -> bool:
        return random.Random(f"{self.seed}/{group}/passes").random() < self.pass_rate


def shape(text: str) -> Callable[[random.Random], float]:
    """Read a distribution of seconds: ``constant:S``, ``lognormal:MEDIAN,SIGMA`` or ``bimodal:SHORT,LONG,SHARE``.

    Raises:
        ConfigError: it is none of them.
    """
    name, _, rest = text.partition(":")
    try:
        numbers = [float(number) for number in rest.split(",")]
        match name, numbers:
            case "constant", [seconds] if seconds > 0:
                return functools.partial(_constant, seconds)
            case "lognormal", [median, sigma] if median > 0 and sigma >= 0:
                return functools.partial(_lognormal, median, sigma)
            case "bimodal", [short, long, share] if short > 0 and long > 0 and 0 <= share <= 1:
                return functools.partial(_bimodal, short, long, share)
    except ValueError:
        pass
    raise ConfigError.of("latency", text, "constant:S, lognormal:MEDIAN,SIGMA or bimodal:SHORT,LONG,SHARE_OF_LONG")


def _constant(seconds: float, rng: random.Random) -> float:
    return seconds


def _lognormal(median: float, sigma: float, rng: random.Random) -> float:
    return median * rng.lognormvariate(0.0, sigma)


def _bimodal(short: float, long: float, share: float, rng: random.Random) -> float:
    return long if rng.random() < share else short


@attrs.frozen
class _Played:
    """One group of a run."""

    seconds: tuple[float, ...]
    outside: tuple[float, ...]
    kept: bool


@attrs.frozen
class Measured:
    """The workload of one or several runs (protocol :class:`~rollouts.planning.simulation.Workload`)."""

    groups: tuple[_Played, ...]
    speed: Speed
    """By how many rollouts were in the engine, relative to the first run and those like it."""
    batch_size: int
    n: int
    seed: int = 0

    def seconds(self, group: int, member: int) -> float:
        return self._drawn(group).seconds[member % len(self._drawn(group).seconds)]

    def outside(self, group: int, member: int) -> float:
        return self._drawn(group).outside[member % len(self._drawn(group).outside)]

    def passes(self, group: int) -> bool:
        return self._drawn(group).kept

    @property
    def pass_rate(self) -> float:
        """The share of the groups that was kept."""
        return statistics.fmean(group.kept for group in self.groups)

    def _drawn(self, group: int) -> _Played:
        """Every group once before any is drawn again, in another order each time."""
        turn, at = divmod(group, len(self.groups))
        return self.groups[_order(self.seed, turn, len(self.groups))[at]]


@functools.lru_cache(maxsize=64)
def _order(seed: int, turn: int, count: int) -> list[int]:
    return random.Random(f"{seed}/{turn}").sample(range(count), count)


@attrs.frozen
class _Told:
    """What a stored run tells."""

    groups: tuple[_Played, ...]
    tokens: int
    """That were sampled."""
    seconds: float
    """That they were generated in, of all rollouts together."""
    config: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """Tokens a second of each rollout."""
        return self.tokens / self.seconds

    @property
    def most(self) -> int:
        """Rollouts in flight at once."""
        return _groups_in_flight(self.config) * int(self.config["n_samples_per_prompt"])


def measured(runs: Sequence[Path]) -> Measured:
    """Read the workload of stored runs of one recipe, the first of which is planned for.

    Runs with other numbers of rollouts in flight say how fast the engine is then; those with the same number are one
    measurement. They are to be measured without a limit of requests at the endpoint: seconds in line for it would count
    as the engine's. As :func:`plan` it plays in an event loop of its own.

    Raises:
        ConfigError: no run, or one without a batch or without times.
    """
    told = [_read(run) for run in runs]
    alike: dict[int, list[_Told]] = {}
    for run in told:
        alike.setdefault(run.most, []).append(run)
    rates = {most: sum(run.tokens for run in same) / sum(run.seconds for run in same) for most, same in alike.items()}
    first = rates[told[0].most]
    points = [(_load(same), rates[most] / first) for most, same in alike.items()]
    return Measured(
        tuple(_scaled(group, run.rate / first) for run in told for group in run.groups),
        Speed(_with_ends(points, max(alike))),
        told[0].config["batch_size"],
        told[0].config["n_samples_per_prompt"],
    )


def _scaled(group: _Played, by: float) -> _Played:
    """With seconds in the engine as they would have been in the first run and those like it."""
    return attrs.evolve(group, seconds=tuple(one * by for one in group.seconds))


def _load(same: Sequence[_Told]) -> float:
    """How many rollouts one of these runs had in its engine with it, itself included, in the mean.

    By playing them again: rows do not say when a rollout began, and the seconds of a run's batches have its start in
    them, when the engine had nothing to do.
    """
    config = same[0].config
    batch_size, n = config["batch_size"], config["n_samples_per_prompt"]
    groups = tuple(group for run in same for group in run.groups)
    batches = max(4, math.ceil(_REPLAYED / batch_size))
    workload = Measured(groups, Speed(), batch_size, n)
    factor = config["over_sampling_factor"]
    return fill(workload, batch_size=batch_size, n=n, factor=factor, batches=batches).mean_load


def _with_ends(points: Sequence[tuple[float, float]], most: float) -> list[tuple[float, float]]:
    """Points from one rollout to the most that were in flight: the runs went through all of those loads."""
    up = sorted(points)
    return [_at_end(1.0, up[:2]), *up, _at_end(most, up[:-3:-1])]


def _at_end(end: float, nearest: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Where the line through the nearest two points goes on to.

    With more beside it no rollout is faster, nor does it lose more than the server's throughput shared by more. One
    point alone tells no line: its run was as fast at that end.
    """
    (count, speed), (further, other) = nearest[0], nearest[-1]
    slope = (1 / other - 1 / speed) / (further - count) if further != count else 0.0
    few, many = sorted((1 / speed, end / count / speed))
    return end, 1 / min(max(1 / speed + slope * (end - count), few), many)


def _groups_in_flight(config: Mapping[str, Any]) -> int:
    groups: int = math.ceil(config["batch_size"] * config["over_sampling_factor"])
    return groups


def _read(run: Path) -> _Told:
    rollouts: dict[int, dict[int, tuple[float, float]]] = {}
    kept: set[int] = set()
    tokens, total, batched = 0, 0.0, False
    for row in read_rows(run, "all"):
        numbers = row.data["metrics"]
        seconds = float(numbers.get("generation_seconds", 0.0))
        outside = float(numbers.get("environment_seconds", 0.0))
        tokens += sum(call["stop"] - call["start"] for call in row.data["completions"])
        total += seconds
        if row.outcome == "failed":
            continue
        rollouts.setdefault(row.data["group_index"], {})[row.data["index"]] = (seconds, outside)
        if row.outcome in ("kept", "unbatched"):
            kept.add(row.data["group_index"])
        batched = batched or row.outcome == "kept"
    if not total or not batched:
        raise ConfigError.of("run", str(run), "a run with a batch, whose rollouts took time")
    config = read_info(run)["config"]
    groups = (
        _Played(
            tuple(seconds for seconds, _ in rollouts[number].values()),
            tuple(outside for _, outside in rollouts[number].values()),
            number in kept,
        )
        for number in _not_too_late(sorted(rollouts), _groups_in_flight(config))
    )
    return _Told(tuple(groups), tokens, total, config)


def _not_too_late(numbers: list[int], in_flight: int) -> list[int]:
    """Of groups that ended those that say how long groups take: of the last to begin, only the quick ones ended."""
    early = [number for number in numbers if number <= numbers[-1] - in_flight]
    return early if len(early) >= in_flight else numbers


@attrs.frozen
class Option:
    """One way to run, and what it would cost."""

    factor: float
    concurrency: int | None
    servers: int
    filled: SimulationResult
    batch_size: int

    @property
    def seconds(self) -> float:
        """Of a batch, in the mean; without the first, which begins with nothing in flight, where there are more."""
        return statistics.fmean(self.filled.seconds[1:] or self.filled.seconds)

    @property
    def started_per_kept(self) -> float:
        return self.filled.started / self.filled.kept


@attrs.frozen
class Plan:
    """What was tried."""

    options: tuple[Option, ...]
    """By factor and concurrency, at one server."""
    scaled: tuple[Option, ...]
    """The best of them on more servers, for the same batch."""

    @property
    def best(self) -> Option:
        """The soonest; of those within 2 % of it, the one that starts the fewest prompts."""
        soonest = min(option.seconds for option in self.options)
        near = [option for option in self.options if option.seconds <= 1.02 * soonest]
        return min(near, key=lambda option: (option.started_per_kept, option.factor))


def plan(
    workload: Measured | Given,
    *,
    batch_size: int,
    n: int,
    speed: Speed,
    batches: int = 4,
    factors: Iterable[float] = FACTORS,
    concurrencies: Iterable[int | None] = (None,),
    servers: Iterable[int] = SERVERS,
) -> Plan:
    """Try every factor at every concurrency, and the best of them on more servers."""

    def tried(factor: float, concurrency: int | None, count: int) -> Option:
        filled = fill(
            workload,
            batch_size=batch_size,
            n=n,
            factor=factor,
            batches=batches,
            concurrency=None if concurrency is None else concurrency * count,
            speed=speed,
            servers=count,
        )
        return Option(factor, concurrency, count, filled, batch_size)

    options = tuple(tried(factor, concurrency, 1) for factor in factors for concurrency in concurrencies)
    best = Plan(options, ()).best
    return Plan(options, tuple(tried(best.factor, best.concurrency, count) for count in servers))


def show_plan(found: Plan, console: Console) -> None:
    """Print a plan."""
    table = Table(title="seconds to fill a batch, on one server", box=None, header_style="bold", pad_edge=False)
    for name in ("over_sampling_factor", "concurrency", "seconds", "prompts started per kept", "in the engine"):
        table.add_column(name, justify="right")
    for option in found.options:
        style = "bold green" if option is found.best else ""
        table.add_row(f"{option.factor:g}", *_describe(option), style=style)
    console.print(table)
    best = found.best
    limit = "no limit" if best.concurrency is None else f"Endpoint(concurrency={best.concurrency})"
    console.print(f"soonest: over_sampling_factor={best.factor:g}, {limit}: {best.seconds:.3g} s a batch")
    if found.scaled:
        table = Table(title="the same batch on more servers", box=None, header_style="bold", pad_edge=False)
        for name in ("servers", "concurrency of each", "seconds", "prompts started per kept", "in the engines"):
            table.add_column(name, justify="right")
        for option in found.scaled:
            table.add_row(str(option.servers), *_describe(option))
        console.print(table)


def _describe(option: Option) -> tuple[str, ...]:
    limit = "no limit" if option.concurrency is None else str(option.concurrency)
    return limit, f"{option.seconds:.3g}", f"{option.started_per_kept:.2f}", f"{option.filled.busy:.0f}"
