"""Simulated batches: results equal those computed by hand."""

from __future__ import annotations

import attrs
import pytest

from rollouts.errors import ConfigError
from rollouts.planning.simulation import SimulationResult, Speed, fill


@attrs.frozen
class Even:
    """Every rollout takes the same time; of ten groups a fixed number pass."""

    each: float = 10.0
    environment: float = 0.0
    passing: int = 10

    def seconds(self, group: int, member: int) -> float:
        return self.each

    def outside(self, group: int, member: int) -> float:
        return self.environment

    def passes(self, group: int) -> bool:
        return group % 10 < self.passing


def filled(workload: Even, **options: object) -> SimulationResult:
    sizes: dict[str, object] = {"batch_size": 4, "n": 2, "factor": 1.0, "batches": 2, **options}
    return fill(workload, **sizes)  # type: ignore[arg-type]


def test_without_limits_a_batch_takes_one_rollout() -> None:
    """All are at work at once; the environment's time is added."""
    assert filled(Even()).seconds == pytest.approx((10, 10))
    assert filled(Even(environment=5)).seconds == pytest.approx((15, 15))
    assert filled(Even()).busy == pytest.approx(8)


def test_rollouts_are_mostly_there_when_most_are() -> None:
    """One of two groups takes three times as long: eight at once for a third of the time, then four."""

    class Uneven(Even):
        def seconds(self, group: int, member: int) -> float:
            return self.each * (1 + 2 * (group % 2))

    result = filled(Uneven(), factor=1.0, batches=1, batch_size=2, n=4)
    assert result.busy == pytest.approx((8 + 4 + 4) / 3)
    assert result.mean_load == pytest.approx((8 * 8 + 4 * 4 + 4 * 4) / (8 + 4 + 4))


def test_with_fewer_places_they_take_turns() -> None:
    """Eight rollouts in two places take four times as long."""
    assert filled(Even(), concurrency=2, batches=1).seconds == pytest.approx((40,))


def test_a_full_server_shares_its_throughput() -> None:
    """Twice the rollouts run at half the speed; two servers halve the load."""
    speed = Speed([(4, 1.0)])
    assert filled(Even(), speed=speed, batches=1).seconds == pytest.approx((20,))
    assert filled(Even(), speed=speed, batches=1, servers=2).seconds == pytest.approx((10,))


def test_dropped_groups_cost_prompts() -> None:
    """Half of them pass, so twice as many are started, at least."""
    result = filled(Even(passing=5), batches=5, factor=2.0)
    assert result.kept == 20
    assert result.started >= 35


def test_a_speed_is_interpolated_between_its_points() -> None:
    """Seconds are interpolated; speed is constant below the first point, throughput above the last."""
    speed = Speed([(100, 0.5), (10, 1.0)])
    assert [speed.at(count) for count in (1, 10, 55, 100, 200)] == pytest.approx([1, 1, 1 / 1.5, 0.5, 0.25])
    assert Speed().at(1000) == 1
    with pytest.raises(ConfigError, match=r"Speed.points"):
        Speed([(0, 1.0)])
