"""Other rewards and another filter over a stored run: a new run whose groups are the old ones."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Prompt, StopReason
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError, EndpointAway, EndpointError, Failure, RewardFailure
from rollouts.recipe import Recipe
from rollouts.runs.info import read_info
from rollouts.runs.reader import load_run
from rollouts.runs.rescore import rescore
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.training import DataBuffer, RolloutConfig, Sample
from rollouts.training.metrics import Accounting
from rollouts.training.types import Group, Status
from tests.stored_runs import some_sample, store_run


def never(prompts: Any) -> Any:
    raise AssertionError("nothing is generated")


def a_recipe(**options: Any) -> Recipe:
    sizes = {"batch_size": 2, "n_samples_per_prompt": 4, "max_attempts": 1, **options}
    return Recipe(
        name="again",
        config=RolloutConfig(generate_fn=never, **sizes),
        data_buffer=DataBuffer(["unused"]),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
    )


def by_group(path: Path, outcome: Any = "all") -> dict[int, list[Sample]]:
    run = load_run(path, outcome)
    return {number: run.group(number) for number in run.group_indices}


def last_token(sample: Sample) -> float:
    return float(sample.tokens[-1])


def is_even(samples: list[Sample]) -> bool:
    return samples[0].group_index % 2 == 0  # type: ignore[operator]


async def test_every_group_is_scored_and_filtered_again(tmp_path: Path) -> None:
    """Kept, dropped and unbatched groups; all other fields but the times are unchanged; the laws hold."""
    await store_run(tmp_path / "old", batches=3)
    before = by_group(tmp_path / "old")
    accounting = await rescore(tmp_path / "old", a_recipe(reward_fn=last_token, filter_fn=is_even), tmp_path / "new")
    after = by_group(tmp_path / "new")
    assert after.keys() == before.keys()
    failed = set(by_group(tmp_path / "old", "failed"))
    for number in before.keys() - failed:
        assert [sample.reward for sample in after[number]] == [last_token(sample) for sample in before[number]]
        for old, new in zip(before[number], after[number], strict=True):
            assert {**new.to_dict(), "reward": None, "times": []} == {**old.to_dict(), "reward": None, "times": []}
    assert by_group(tmp_path / "new", "dropped").keys() == {number for number in before if number % 2} - failed
    assert verify_run(tmp_path / "new").violations == []
    assert (accounting.taken, accounting.failed) == (len(before), 1)
    batches = list(by_group(tmp_path / "new", "kept"))
    assert batches == sorted(batches)
    assert len(batches) == accounting.in_batch == 2 * read_info(tmp_path / "new")["batches"]


@pytest.mark.parametrize(("status", "text"), [("stopped", None), ("failed", "the judge is away")])
async def test_one_that_ends_early_says_so(status: str, text: str | None, tmp_path: Path) -> None:
    """By a cancellation or an error: the run is not active, and accounts for the groups that it has."""
    await store_run(tmp_path / "old", batches=3)
    last = max(by_group(tmp_path / "old"))
    with anyio.CancelScope() as scope:

        async def judge(sample: Sample) -> float:
            if sample.group_index != last:
                return last_token(sample)
            if text is not None:
                raise EndpointAway(text)
            scope.cancel()
            await anyio.sleep_forever()
            return 0.0

        options = {"over_sampling_factor": 1.0, "reward_fn": judge, "filter_fn": is_even}
        with contextlib.suppress(EndpointAway):
            await rescore(tmp_path / "old", a_recipe(**options), tmp_path / "new")
    info = read_info(tmp_path / "new")
    assert (info["status"], info["error"]) == (status, text)
    verified = verify_run(tmp_path / "new")
    assert verified.violations == []
    assert by_group(tmp_path / "new")
    assert not any("no end of the run" in note for note in verified.notes)


async def test_without_a_reward_that_of_the_steps_counts(tmp_path: Path) -> None:
    """As when it was generated, whatever the run's reward was."""
    await store_run(tmp_path / "old", reward_fn=last_token, filter_fn=None, fails=lambda prompt: False)
    await rescore(tmp_path / "old", a_recipe(), tmp_path / "new")
    for sample in load_run(tmp_path / "new"):
        assert sample.reward == sum(sample.step_rewards)


@pytest.mark.parametrize("steps", [[], [3.0]], ids=["no steps", "steps"])
async def test_without_any_reward_function_the_rewards_of_the_generate_function_stay(
    tmp_path: Path, steps: list[float]
) -> None:
    """Nothing else could give them again. Of a run with a reward function the steps count; without steps it fails."""
    sample = some_sample(Prompt("play", group_index=0, index=0), 0)
    sample.step_rewards, sample.reward = steps, 7.0
    for name, config in (("own", {}), ("scored", {"reward_fn": "last_token"})):
        sizes = {"batch_size": 1, "n_samples_per_prompt": 1}
        writer = RunWriter(tmp_path / name, {"config": {**sizes, **config}})
        writer.write_batch([sample], {})
        writer.finish("finished", Accounting(taken=1, in_batch=1))
        await rescore(tmp_path / name, a_recipe(**sizes), tmp_path / f"{name} again")
    assert [one.reward for one in load_run(tmp_path / "own again")] == [7.0]
    assert [one.reward for one in load_run(tmp_path / "scored again")] == steps


async def test_a_seat_has_the_step_rewards_of_its_own_conversation(tmp_path: Path) -> None:
    """Not their sum over all agents of the rollout, which is 0 in each game of two."""
    prompt = Prompt("play", group_index=0, index=0)
    samples = [some_sample(prompt, seed) for seed in (0, 1, 2)]
    for sample, seat, number, reward in zip(samples, ["white", "white", "black"], [0, 1, 0], [1, 2, -3], strict=True):
        sample.seat, sample.conversation, sample.step_rewards, sample.reward = seat, number, [reward], reward
    config = {"batch_size": 1, "n_samples_per_prompt": 1}
    writer = RunWriter(tmp_path / "old", {"config": config})
    writer.write_batch(samples, {})
    writer.finish("finished", Accounting(taken=1, in_batch=1))
    await rescore(tmp_path / "old", a_recipe(**config), tmp_path / "new")
    assert [sample.reward for sample in load_run(tmp_path / "new")] == [1, 2, -3]


async def test_groups_that_a_reward_lost_are_scored_again(tmp_path: Path) -> None:
    """Rollouts with a failed reward recover; those with a failed environment stay failed."""

    def broken(samples: list[Sample]) -> list[float]:
        raise OSError("no judge")

    options = {"reward_fn": broken, "group_rm": True, "filter_fn": None, "patience": 3, "batch_size": 1}
    with pytest.raises(Exception, match="no judge"):
        await store_run(tmp_path / "old", **options)
    lost = by_group(tmp_path / "old", "failed")
    assert len(lost) >= 2
    await rescore(tmp_path / "old", a_recipe(reward_fn=last_token, batch_size=1), tmp_path / "new")
    kept = by_group(tmp_path / "new")
    assert {number for number in kept if all(sample.failure is None for sample in kept[number])} == set(lost) - {3}


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
async def test_a_failure_of_scoring_goes_from_a_rollout_without_a_stop_reason(tmp_path: Path, status: Status) -> None:
    """That of a group's reward, whose own errors keep their kind, and that of the reward of a rollout."""
    prompt = Prompt("play", group_index=0, index=0)
    sample, kind = some_sample(prompt, 0), EndpointError if status is Status.COMPLETED else RewardFailure
    sample.stop_reason, sample.status, sample.failure = None, status, Failure.of(kind("no judge"))
    config = {"batch_size": 1, "n_samples_per_prompt": 1}
    writer = RunWriter(tmp_path / "old", {"config": config})
    writer.on_group(Group(prompt, (sample,), "failed", "no judge"))
    writer.finish("finished", Accounting(taken=1, failed=1))
    await rescore(tmp_path / "old", a_recipe(reward_fn=last_token, **config), tmp_path / "new")
    assert [(one.status, one.failure) for one in load_run(tmp_path / "new")] == [(Status.COMPLETED, None)]


async def test_a_rollout_that_forked_is_as_before_its_reward_failed(tmp_path: Path) -> None:
    """Its branches have the status of its end; advantages, which were of the earlier rewards, are gone."""
    prompt = Prompt("play", group_index=0, index=0)
    samples = [some_sample(prompt, seed) for seed in (0, 1, 2)]
    for sample, reason in zip(samples, ["forked", "forked", "task_completed"], strict=True):
        sample.stop_reason, sample.status = StopReason(reason), Status.FAILED
        sample.failure = Failure.of(RewardFailure("no judge"))
        sample.advantages = sample.mask_column.astype(np.float32)
    config = {"batch_size": 1, "n_samples_per_prompt": 1}
    writer = RunWriter(tmp_path / "old", {"config": config})
    writer.on_group(Group(prompt, tuple(samples), "failed", "RewardFailure: no judge"))
    writer.finish("finished", Accounting(taken=1, failed=1))
    await rescore(tmp_path / "old", a_recipe(reward_fn=last_token, **config), tmp_path / "new")
    found = list(load_run(tmp_path / "new"))
    assert [sample.status for sample in found] == [Status.COMPLETED] * 3
    assert [sample.advantage_column for sample in found] == [None] * 3


async def test_another_size_of_group_is_refused(tmp_path: Path) -> None:
    """So is writing over the run itself."""
    await store_run(tmp_path / "old")
    with pytest.raises(ConfigError, match="n_samples_per_prompt: got 8; expected 4, as in the run"):
        await rescore(tmp_path / "old", a_recipe(n_samples_per_prompt=8), tmp_path / "new")
    with pytest.raises(ConfigError, match="another folder than the run's"):
        await rescore(tmp_path / "old", a_recipe(), tmp_path / "old", overwrite=True)
    assert len(load_run(tmp_path / "old")) == 24
