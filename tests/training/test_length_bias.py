"""The bias of dropping groups for their age: its figures, and the warning."""

from __future__ import annotations

import logging
import random

import anyio
import pytest

from rollouts.dtypes import VersionSpan
from rollouts.planning.simulation import VirtualLoop
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample
from rollouts.training.staleness import StalenessPolicy
from tests.manager_semantics.world import questions, sample_for


def metrics_of(policy: StalenessPolicy, max_staleness: int | None) -> dict[str, float]:
    """The metrics after 30 batches of rollouts whose time is their length, with slots for all."""

    async def generate(prompts: list[Prompt]) -> list[Sample]:
        version = str(manager.staleness.current)
        length = round(20 * random.Random(f"{prompts[0].index}").lognormvariate(0, 1)) + 1
        await anyio.sleep(length)
        return [sample_for(prompts[0], length=length, reward=1.0, versions=[VersionSpan(version, 1, length + 1)])]

    config = RolloutConfig(
        batch_size=4,
        n_samples_per_prompt=4,
        over_sampling_factor=6,
        in_flight=40,
        generate_fn=generate,
        patience=10_000,
    )
    manager = AsyncRolloutManager(config, DataBuffer(questions(100)))

    async def run() -> None:
        async with manager:
            manager.announce_version("1")
            stream = manager.stream(max_staleness=max_staleness, policy=policy)
            for number in range(30):
                await anext(stream)
                manager.announce_version(str(number + 2))
            await stream.aclose()

    anyio.run(run, backend_options={"loop_factory": VirtualLoop})
    return manager.metrics


def test_dropping_old_groups_prefers_short_rollouts_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The metrics have the share of dropped groups and the length in batches over that of all; the log warns once."""
    with caplog.at_level(logging.WARNING, "rollouts.training.length_bias"):
        metrics = metrics_of("drop", 2)
    assert 0.2 < metrics["staleness/dropped"] < 0.8
    assert metrics["staleness/length"] < 0.95
    (record,) = caplog.records
    assert "Choose over_sampling_factor <= (max_staleness + 1) / 2" in record.getMessage()


@pytest.mark.parametrize(("policy", "bound"), [("pace", 2), ("drop", None), ("drop", 1000)])
def test_other_bounds_have_no_such_bias(
    policy: StalenessPolicy, bound: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is dropped for its age, and nothing is said."""
    with caplog.at_level(logging.WARNING, "rollouts.training.length_bias"):
        metrics = metrics_of(policy, bound)
    assert metrics.get("staleness/dropped", 0) == 0
    assert metrics.get("staleness/length", 1) == 1
    assert not caplog.records
