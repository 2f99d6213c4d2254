"""Search for the over-sampling factor and concurrency that fill a batch fastest: ``rollouts plan``.

Invariant: a measured workload contains measurements only: whole groups of the run are drawn again, with each rollout's
seconds in the engine and in its environment, and with the filter's result. The engine's speed at other loads is
measured in further runs or specified. A load that no run had gets the two limits between which the engine's speed must
lie (:class:`MeasuredSpeed`), and is never called the fastest.

This module starts no rollout; :mod:`rollouts.planning.simulation` simulates them.
"""

from __future__ import annotations

import functools
import itertools
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
from rollouts.planning.simulation import SimulationResult, Speed, Workload, fill
from rollouts.runs.folder import read_rows
from rollouts.runs.info import read_info

__all__ = [
    "FACTORS",
    "SLOT_FACTORS",
    "Given",
    "Measured",
    "MeasuredSpeed",
    "Option",
    "Plan",
    "measured",
    "plan",
    "shape",
    "show_plan",
    "spread",
]

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
SLOT_FACTORS = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
"""With ``in_flight``, which bounds the rollouts whatever the factor."""
SERVERS = (1, 2, 4, 16, 64, 256, 1024, 4096)
_REPLAYED = 160
"""Kept groups to simulate for estimating a run's load, in at least four batches."""
_WORTH_A_RUN = 0.95
"""An unmeasured option is worth a run if it may take less than this share of the fastest measured one's time."""


@attrs.frozen
class Given:
    """A synthetic workload (protocol :class:`~rollouts.planning.simulation.Workload`)."""

    draw: Callable[[random.Random], float]
    """Draws the seconds of one rollout; see :func:`shape`."""
    pass_rate: float = 1.0
    seed: int = 0

    def seconds(self, group: int, member: int) -> float:
        return self.draw(random.Random(f"{self.seed}/{group}/{member}"))

    def outside(self, group: int, member: int) -> float:
        return 0.0

    def passes(self, group: int) -> bool:
        return random.Random(f"{self.seed}/{group}/passes").random() < self.pass_rate


def shape(text: str) -> Callable[[random.Random], float]:
    """Parse a distribution of seconds: ``constant:S``, ``lognormal:MEDIAN,SIGMA`` or ``bimodal:SHORT,LONG,SHARE``.

    Raises:
        ConfigError: the text has none of these forms.
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
class _GroupTimes:
    """One group of a run; one entry a rollout."""

    seconds: tuple[float, ...]
    """In the engine."""
    outside: tuple[float, ...]
    """In the environment."""
    kept: bool


@attrs.frozen
class MeasuredSpeed:
    """Speed by the number of rollouts in the engine, as far as runs have measured it; 1 at the load of the first run.

    With fewer or more rollouts in flight than any run had, only limits are known: a rollout is not slower at a lower
    load and not faster at a higher one, and the throughput of a server does not fall as its load rises.
    """

    expected: Speed
    """Between ``min_in_flight`` and ``max_in_flight``."""
    slow: Speed
    """Elsewhere, at least this speed: the throughput is constant above the highest load, the speed below the lowest."""
    fast: Speed
    """Elsewhere, at most this speed: the opposite."""
    min_in_flight: float
    """Rollouts in flight in the run that had the fewest."""
    max_in_flight: float
    """Rollouts in flight in the run that had the most."""

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], min_in_flight: float, max_in_flight: float) -> MeasuredSpeed:
        """The speed by ``(mean load, speed)`` of each measured load."""
        (load, speed), (_, last) = min(points), max(points)
        fast = [(min(1.0, load), speed * max(load, 1.0)), *points, (_NO_LOAD_IS_HIGHER, last)]
        return cls(Speed(_with_ends(points, max_in_flight)), Speed(points), Speed(fast), min_in_flight, max_in_flight)

    def covers(self, in_flight: float) -> bool:
        """Whether runs with fewer and with more rollouts in flight on a server, or with as many, were measured."""
        return self.min_in_flight <= in_flight <= self.max_in_flight


_NO_LOAD_IS_HIGHER = 1e9


@attrs.frozen
class Measured:
    """The workload of one or several runs (protocol :class:`~rollouts.planning.simulation.Workload`)."""

    groups: tuple[_GroupTimes, ...]
    speed: MeasuredSpeed
    batch_size: int
    n: int
    in_flight: int | None = None
    """Of the first run."""
    seed: int = 0

    def seconds(self, group: int, member: int) -> float:
        return self._drawn(group).seconds[member % len(self._drawn(group).seconds)]

    def outside(self, group: int, member: int) -> float:
        return self._drawn(group).outside[member % len(self._drawn(group).outside)]

    def passes(self, group: int) -> bool:
        return self._drawn(group).kept

    @property
    def pass_rate(self) -> float:
        """The share of kept groups."""
        return statistics.fmean(group.kept for group in self.groups)

    def _drawn(self, group: int) -> _GroupTimes:
        """Draw every group once per epoch, each epoch in another order."""
        epoch, position = divmod(group, len(self.groups))
        return self.groups[_order(self.seed, epoch, len(self.groups))[position]]


@functools.lru_cache(maxsize=64)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


@attrs.frozen
class _StoredRun:
    """The measurements of a stored run."""

    groups: tuple[_GroupTimes, ...]
    tokens: int
    """Sampled tokens."""
    seconds: float
    """Generation seconds, summed over all rollouts."""
    config: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """Mean tokens a second of a rollout."""
        return self.tokens / self.seconds

    @property
    def max_in_flight(self) -> float:
        """Maximum number of rollouts in flight."""
        return min(_groups_in_flight(self.config) * int(self.config["n_samples_per_prompt"]), _slots(self.config))


def measured(runs: Sequence[Path]) -> Measured:
    """Read the workload of stored runs of one recipe; the plan is for the first run's sizes.

    Runs with other numbers of rollouts in flight measure the engine's speed at those loads; runs with the same number
    are one measurement. The runs must have no concurrency limit at the endpoint: seconds in its queue would count as
    the engine's. Like :func:`plan`, it starts an event loop.

    Raises:
        ConfigError: ``path`` is not a run, or the run has no batch or no times.
    """
    stored = [_read(run) for run in runs]
    by_load: dict[float, list[_StoredRun]] = {}
    for run in stored:
        by_load.setdefault(run.max_in_flight, []).append(run)
    rates = {load: sum(run.tokens for run in same) / sum(run.seconds for run in same) for load, same in by_load.items()}
    first = rates[stored[0].max_in_flight]
    points = [(_load(same), rates[load] / first) for load, same in by_load.items()]
    return Measured(
        tuple(_scaled(group, run.rate / first) for run in stored for group in run.groups),
        MeasuredSpeed.of(points, min(by_load), max(by_load)),
        stored[0].config["batch_size"],
        stored[0].config["n_samples_per_prompt"],
        stored[0].config.get("in_flight"),
    )


def _scaled(group: _GroupTimes, by: float) -> _GroupTimes:
    """Scale the engine seconds to the speed of the first run's load."""
    return attrs.evolve(group, seconds=tuple(one * by for one in group.seconds))


def _load(same: Sequence[_StoredRun]) -> float:
    """Mean number of rollouts in the engine as seen by one rollout of these runs, itself included.

    Computed by simulation: rows have no start times, and the seconds of a run's batches include its start, when the
    engine was idle.
    """
    config = same[0].config
    batch_size, n = config["batch_size"], config["n_samples_per_prompt"]
    groups = tuple(group for run in same for group in run.groups)
    batches = max(4, math.ceil(_REPLAYED / batch_size))
    workload = Measured(groups, MeasuredSpeed.of([(1.0, 1.0)], 1, 1), batch_size, n)
    factor, in_flight = config["over_sampling_factor"], config.get("in_flight")
    return fill(workload, batch_size=batch_size, n=n, factor=factor, batches=batches, in_flight=in_flight).mean_load


def _with_ends(points: Sequence[tuple[float, float]], max_in_flight: float) -> list[tuple[float, float]]:
    """Extend the points to 1 and to ``max_in_flight`` rollouts: the runs had all loads between."""
    up = sorted(points)
    return [_at_end(1.0, up[:2]), *up, _at_end(max_in_flight, up[:-3:-1])]


def _at_end(end: float, nearest: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Extrapolate the line through the nearest two points to ``end``; one point alone is extended at equal speed.

    The result is limited: at a higher load a rollout is not faster, and the server's throughput does not fall.
    """
    (count, speed), (further, other) = nearest[0], nearest[-1]
    slope = (1 / other - 1 / speed) / (further - count) if further != count else 0.0
    few, many = sorted((1 / speed, end / count / speed))
    return end, 1 / min(max(1 / speed + slope * (end - count), few), many)


def _groups_in_flight(config: Mapping[str, Any]) -> int:
    groups: int = math.ceil(config["batch_size"] * config["over_sampling_factor"])
    return int(min(groups, _slots(config)))


def _slots(config: Mapping[str, Any]) -> float:
    """Rollouts that may run at once; a run of an earlier version has no such limit."""
    in_flight = config.get("in_flight")
    return math.inf if in_flight is None else in_flight


def _read(run: Path) -> _StoredRun:
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
        of_group = rollouts.setdefault(row.data["group_index"], {})
        earlier = of_group.get(row.data["index"], (0.0, 0.0))  # of its other branches and seats
        of_group[row.data["index"]] = (earlier[0] + seconds, earlier[1] + outside)
        if row.outcome in ("kept", "unbatched"):
            kept.add(row.data["group_index"])
        batched = batched or row.outcome == "kept"
    if not total or not batched:
        raise ConfigError.of("run", str(run), "a run with a batch, whose rollouts took time")
    config = read_info(run)["config"]
    groups = (
        _GroupTimes(
            tuple(seconds for seconds, _ in rollouts[number].values()),
            tuple(outside for _, outside in rollouts[number].values()),
            number in kept,
        )
        for number in _not_too_late(sorted(rollouts), _groups_in_flight(config))
    )
    return _StoredRun(tuple(groups), tokens, total, config)


def _not_too_late(numbers: list[int], in_flight: int) -> list[int]:
    """Drop the last groups in flight, of which only the fast ones ended: they would bias the times."""
    early = [number for number in numbers if number <= numbers[-1] - in_flight]
    return early if len(early) >= in_flight else numbers


@attrs.frozen
class Option:
    """One combination of settings, and its simulated cost."""

    factor: float
    concurrency: int | None
    servers: int
    filled: SimulationResult
    """With the expected speed; if the option is not measured, with the lowest possible speed."""
    batch_size: int
    in_flight: float
    """Most rollouts in flight on one server."""
    slots: int | None = None
    """The config's ``in_flight``."""
    soonest: SimulationResult | None = None
    """With the highest possible speed; ``None`` if the option is measured."""

    @property
    def measured(self) -> bool:
        """Whether its number of rollouts in flight is within that of the runs, or the speed was specified."""
        return self.soonest is None

    @property
    def seconds(self) -> float:
        """Mean seconds of a batch, without the first (which starts with nothing in flight) if there are several."""
        return _mean_seconds(self.filled)

    @property
    def fewest_seconds(self) -> float:
        """As :attr:`seconds`, with the highest possible speed."""
        return self.seconds if self.soonest is None else min(self.seconds, _mean_seconds(self.soonest))

    @property
    def started_per_kept(self) -> float:
        return self.filled.started / self.filled.kept


def _mean_seconds(filled: SimulationResult) -> float:
    return statistics.fmean(filled.seconds[1:] or filled.seconds)


@attrs.frozen
class Plan:
    """The simulated options."""

    options: tuple[Option, ...]
    """Every factor and concurrency, on one server."""
    scaled: tuple[Option, ...]
    """The best option on more servers, for the same batch."""

    @property
    def best(self) -> Option:
        """The option that starts the fewest prompts, of the measured ones within 2 % of the fastest.

        Where none is measured, the longest time that an option can take counts.
        """
        options = [option for option in self.options if option.measured] or self.options
        soonest = min(option.seconds for option in options)
        near = [option for option in options if option.seconds <= 1.02 * soonest]
        return min(near, key=lambda option: (option.started_per_kept, option.factor))

    @property
    def worth_a_run(self) -> Option | None:
        """The unmeasured option that may be the fastest, if one may be faster than :attr:`best`."""
        unmeasured = (option for option in self.options if not option.measured)
        option = min(unmeasured, key=lambda option: option.fewest_seconds, default=None)
        faster = option is not None and option.fewest_seconds < _WORTH_A_RUN * self.best.seconds
        return option if faster else None


def plan(
    workload: Measured | Given,
    *,
    batch_size: int,
    n: int,
    speed: Speed | MeasuredSpeed,
    batches: int = 4,
    factors: Iterable[float] = FACTORS,
    concurrencies: Iterable[int | None] = (None,),
    servers: Iterable[int] = SERVERS,
    in_flight: int | None = None,
) -> Plan:
    """Simulate every factor at every concurrency, and the best option on more servers, with ``in_flight`` slots.

    Raises:
        ConfigError: as :class:`RolloutConfig` for a size or a factor.
    """

    def simulate(factor: float, concurrency: int | None, count: int) -> Option:
        at_once = math.ceil(batch_size * factor) * n
        load = min(at_once, in_flight or at_once) / count
        load = load if concurrency is None else min(load, concurrency)
        speeds: list[Speed]
        if isinstance(speed, Speed):
            speeds = [speed]
        else:
            speeds = [speed.expected] if speed.covers(load) else [speed.slow, speed.fast]
        filled = [
            fill(
                workload,
                batch_size=batch_size,
                n=n,
                factor=factor,
                batches=batches,
                concurrency=None if concurrency is None else concurrency * count,
                speed=one,
                servers=count,
                in_flight=in_flight,
                warm_up=0 if in_flight is None else math.ceil(2 * factor),  # until the ages are those of a long run
            )
            for one in speeds
        ]
        return Option(factor, concurrency, count, filled[0], batch_size, load, in_flight, *filled[1:])

    options = tuple(simulate(factor, concurrency, 1) for factor in factors for concurrency in concurrencies)
    best = Plan(options, ()).best
    return Plan(options, tuple(simulate(best.factor, best.concurrency, count) for count in servers))


def spread(workload: Workload, n: int, groups: int = 400) -> float:
    """The mean time of a group's slowest rollout, over that of a rollout."""
    times = [[workload.seconds(g, m) + workload.outside(g, m) for m in range(n)] for g in range(groups)]
    return statistics.fmean(map(max, times)) / statistics.fmean(itertools.chain(*times))


def show_plan(result: Plan, console: Console, speed: Speed | MeasuredSpeed | None = None) -> None:
    """Print a plan; ``speed`` is the speed that it was made with."""
    table = _table("seconds to fill a batch, by over_sampling_factor", "factor", "in the engine")
    for option in result.options:
        style = "bold green" if option is result.best else ""
        table.add_row(f"{option.factor:g}", *_describe(option), style=style)
    console.print(table)
    best = result.best
    which = "fastest" if best.measured else "fastest in the worst case, but not measured"
    console.print(f"{which}: {_setting(best)}: {_seconds(best)} s a batch", soft_wrap=True)
    if isinstance(speed, MeasuredSpeed) and not all(option.measured for option in (*result.options, *result.scaled)):
        low, high = speed.min_in_flight, speed.max_in_flight
        had = f"{low} to {high}" if low < high else f"{high}"
        text = f"The runs had {had} rollouts in flight. An option with fewer or more on a server is not measured. Its "
        text += "seconds have two limits: each rollout keeps its speed, or all of them share the same throughput."
        console.print(text, soft_wrap=True)
    if (other := result.worth_a_run) is not None:
        text = f"{_setting(other)} may be faster, {_seconds(other)} s. To measure it, run the recipe with it and add "
        console.print(text + "that run: rollouts plan RUN OTHER_RUN", soft_wrap=True)
    if result.scaled:
        table = _table("the same batch on more servers", "servers", "in the engines")
        for option in result.scaled:
            table.add_row(str(option.servers), *_describe(option))
        console.print(table)


def _table(title: str, first: str, busy: str) -> Table:
    table = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for name in (first, "concurrency", "seconds", "started per kept", busy, "age", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _setting(option: Option) -> str:
    limit = "no limit" if option.concurrency is None else f"Endpoint(concurrency={option.concurrency})"
    slots = "" if option.slots is None else f"in_flight={option.slots}, "
    return f"{slots}over_sampling_factor={option.factor:g}, {limit}"


def _seconds(option: Option) -> str:
    longest = f"{option.seconds:.3g}"
    return longest if option.measured else f"{option.fewest_seconds:.3g} to {longest}"


def _describe(option: Option) -> tuple[str, ...]:
    limit = "no limit" if option.concurrency is None else str(option.concurrency)
    busy, measured = f"{option.filled.busy:.0f}", "yes" if option.measured else "no"
    return limit, _seconds(option), f"{option.started_per_kept:.2f}", busy, f"{option.filled.age:.1f}", measured
