"""The advice to a run whose rollouts mostly wait for the slowest of their group."""

from __future__ import annotations

import pytest

from rollouts.training import RolloutConfig
from rollouts.views.terminal.advice import slots_advice
from scripts.benches.slots import Job, stream
from tests.manager_semantics.world import answer_at_once


def config(**options: object) -> RolloutConfig:
    return RolloutConfig(**{"batch_size": 16, "n_samples_per_prompt": 8, "generate_fn": answer_at_once, **options})


def test_the_advice_names_the_share_the_setting_and_its_price() -> None:
    """From the mean of the batches after the first one."""
    batches = [{"slots/busy": 0.9}, {"slots/busy": 0.2}, {"slots/busy": 0.28}]
    assert slots_advice(config(), batches) == (
        "24% of the 192 rollouts that may run do: the others wait for the slowest of their group. in_flight=192 with "
        "over_sampling_factor=3: about 2.4 × faster, groups 2 versions old on average (rollouts plan RUN)"
    )


@pytest.mark.parametrize("busy", [0.5, 0.9])
def test_a_busy_run_gets_no_advice(busy: float) -> None:
    """Nor does a run of single rollouts, or one without the figure."""
    assert slots_advice(config(), [{}, {"slots/busy": busy}, {"slots/busy": busy}]) == ""
    assert slots_advice(config(n_samples_per_prompt=1), [{}, {"slots/busy": 0.1}]) == ""
    assert slots_advice(config(), [{}, {}, {}]) == ""


def test_the_advice_holds_when_it_is_tried() -> None:
    """The predicted gain and age are within 10 % of those of the scheduler on a simulated clock."""
    before = stream(Job(warm_up=6, batches=14))
    after = stream(Job(warm_up=6, batches=14, factor=3, in_flight=192))
    assert before.seconds / after.seconds == pytest.approx(2.43, rel=0.1)
    assert after.age == pytest.approx(2, rel=0.1)
