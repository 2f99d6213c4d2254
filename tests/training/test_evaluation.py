"""Scores by task: unbiased estimates and valid confidence intervals."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

from rollouts.base.storable import to_json, to_msgpack
from rollouts.errors import ConfigError, GenerateFailure
from rollouts.training import Prompt, RolloutConfig, Sample
from rollouts.training.evaluation import (
    TaskScore,
    compare,
    estimate_mean,
    estimate_pass_at_k,
    pass_at_k,
    run_evaluation,
    task_key,
    task_scores,
)


def score(key: str, passed: int, rollouts: int = 4, mean: float | None = None) -> TaskScore:
    return TaskScore(key, key, rollouts, passed, 0, passed / rollouts if mean is None else mean)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("passed", [0, 1, 3, 5])
def test_pass_at_k_is_the_share_of_all_choices(passed: int, k: int) -> None:
    """The share of the ways to take k of n rollouts that contain a passing rollout, counted one by one."""
    outcomes = [True] * passed + [False] * (5 - passed)
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at_k(5, passed, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_pass_at_k_has_no_bias() -> None:
    """Its mean over many draws is the true value; that of the naive formula is not."""
    rng = random.Random(0)
    truth = 1 - (1 - 0.3) ** 4
    counts = [sum(rng.random() < 0.3 for _ in range(6)) for _ in range(20_000)]
    assert sum(pass_at_k(6, count, 4) for count in counts) / len(counts) == pytest.approx(truth, abs=0.01)
    assert sum(1 - (1 - count / 6) ** 4 for count in counts) / len(counts) < truth - 0.03


@pytest.mark.parametrize("k", [0, 6])
def test_k_beyond_the_rollouts_is_refused(k: int) -> None:
    """It cannot be estimated."""
    with pytest.raises(ConfigError, match="1 to 5"):
        pass_at_k(5, 2, k)


@pytest.mark.parametrize(("tasks", "share"), [(12, 0.5), (50, 0.9), (80, 0.3)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(tasks: int, share: float) -> None:
    """Over 600 evaluations of tasks of different hardness, 95 % intervals hold the mean 91 to 99 times of 100."""
    rng = random.Random(tasks)
    covered = 0
    for _ in range(600):
        scores = []
        for task in range(tasks):
            chance = rng.betavariate(2 * share, 2 * (1 - share))
            scores.append(score(str(task), sum(rng.random() < chance for _ in range(4))))
        result = estimate_pass_at_k(scores, 1)
        covered += result.low <= share <= result.high
    assert 0.91 <= covered / 600 <= 0.99


def test_tasks_that_all_agree_leave_doubt() -> None:
    """Ten of ten is not certainty: the interval reaches down to that of ten trials."""
    result = estimate_pass_at_k([score(str(task), 4) for task in range(10)], 1)
    assert (result.value, result.high) == (1.0, pytest.approx(1.0))
    assert result.low == pytest.approx(0.722, abs=1e-3)


@pytest.mark.parametrize("passed", [0, 4])
def test_the_interval_of_equal_scores_contains_the_value(passed: int) -> None:
    """All tasks pass, or none: low <= value <= high for every number of tasks, so that error bars have a length."""
    for tasks in range(1, 257):
        result = estimate_pass_at_k([score(str(task), passed) for task in range(tasks)], 1)
        assert 0 <= result.low <= result.value <= result.high <= 1, tasks


def test_a_task_key_identifies_prompt_and_label() -> None:
    """The same messages and label are the same task in every run; another label is another."""
    assert task_key("What?", 1) == task_key([{"role": "user", "content": "What?"}], 1)
    assert task_key("What?", 1) != task_key("What?", 2)


@pytest.mark.parametrize(
    "label",
    [
        np.int64(8),
        np.float32(0.1),
        np.array([1, 2]),
        {1: "a", "b": 2},
        {(1, 2): 3},
        Decimal("1.5"),
        date(2026, 1, 2),
        math.nan,
        b"x",
        2**70,
        "\ud800",
    ],
    ids=repr,
)
def test_a_task_has_one_key_live_and_stored(label: Any) -> None:
    """Whatever a label is: an evaluation finds its rollouts again in its file, and a sampler those of earlier runs."""
    live = task_key("\ud800", label)
    assert live == task_key(*json.loads(to_json(["\ud800", label])))
    assert live == task_key(*msgspec.msgpack.decode(to_msgpack(["\ud800", label])))


def test_scores_are_counted_by_rollout_of_a_task() -> None:
    """Branches of one rollout are one, with their mean reward; the threshold is reached by equality."""
    samples = [
        Sample(prompt="a", reward=1.0, rollout_id=0),
        Sample(prompt="a", reward=0.0, rollout_id=1),
        Sample(prompt="a", reward=0.5, rollout_id=1),
        Sample(prompt="b", reward=0.5, rollout_id=2),
    ]
    first, second = task_scores(samples, threshold=0.5)
    assert (first.text, first.rollouts, first.passed, first.mean_reward) == ("a", 2, 1, pytest.approx(0.625))
    assert (second.text, second.rollouts, second.passed) == ("b", 1, 1)


def test_a_comparison_is_paired() -> None:
    """Tasks that are hard for both runs do not widen the interval of the difference."""
    before = [score(str(task), task % 4) for task in range(40)]
    after = [score(str(task), task % 4 + 1) for task in range(40)]
    result = compare(before, after)
    assert (result.tasks, result.better, result.worse) == (40, 40, 0)
    assert result.difference == pytest.approx(0.25)
    assert result.high - result.low < 1e-9
    with pytest.raises(ConfigError, match="tasks in common"):
        compare(before, [score("other", 1)])


# -- playing -----------------------------------------------------------------------------------------------------------


def config(generate_fn: Any) -> RolloutConfig:
    return RolloutConfig(
        batch_size=3, n_samples_per_prompt=8, generate_fn=generate_fn, max_attempts=1,
        reward_fn=lambda sample: float(sample.label == sample.response), filter_fn=lambda samples: False,
    )  # fmt: skip


PROMPTS = [Prompt(text, label=text) for text in "abcde"]


async def echo(prompts: Sequence[Prompt]) -> list[Sample]:
    return [Sample(prompt=p.prompt, response=str(p.prompt), label=p.label, tokens=[1], loss_mask=[0]) for p in prompts]


async def test_every_task_has_the_requested_number_of_rollouts() -> None:
    """Whatever the config's sizes and filter: an evaluation chooses nothing. Rollouts come in order of the tasks."""
    samples = await run_evaluation(config(echo), PROMPTS, 3, concurrency=4)
    assert [sample.prompt for sample in samples] == [text for text in "abcde" for _ in range(3)]
    assert estimate_mean(task_scores(samples)).value == 1.0


async def test_prompts_of_an_evaluation_say_so() -> None:
    """Their requests wait behind those of training."""
    found: set[int] = set()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        found.update(prompt.urgency() for prompt in prompts)
        return await echo(prompts)

    await run_evaluation(config(generate), PROMPTS, 3, concurrency=4)
    assert found == {-1}


async def test_existing_rollouts_are_not_repeated() -> None:
    """By task; a task with enough rollouts is left alone, also where it has more than enough."""
    done = {task_key("a", "a"): 2, task_key("b", "b"): 5}
    samples = await run_evaluation(config(echo), PROMPTS[:3], 2, done=done)
    assert [sample.prompt for sample in samples] == ["c", "c"]
    assert await run_evaluation(config(echo), PROMPTS[:2], 2, done=done) == []


async def test_tasks_that_only_their_metadata_tells_apart_are_refused() -> None:
    """They would be counted as one task with many rollouts; with different labels they are different tasks."""
    rows = [Prompt("", metadata={"task": number}) for number in (1, 1, 2)]
    with pytest.raises(ConfigError, match=r"prompts\[2\]\.label: got None; expected another label for each task"):
        await run_evaluation(config(echo), rows, 2)
    labelled = [attrs.evolve(prompt, label=prompt.metadata["task"]) for prompt in rows]
    assert len(task_scores(await run_evaluation(config(echo), labelled, 2))) == 2


async def test_a_rollout_that_failed_counts_and_costs_no_sibling() -> None:
    """It did not pass; the others of its task are there."""
    calls = itertools.count()

    async def one_fails(prompts: Sequence[Prompt]) -> list[Sample]:
        if next(calls) == 4:
            raise ValueError("broken")
        return await echo(prompts)

    scores = task_scores(await run_evaluation(config(one_fails), PROMPTS, 2))
    assert sorted(result.passed for result in scores) == [1, 2, 2, 2, 2]
    assert [result.rollouts for result in scores] == [2] * 5
    assert sum(result.failed for result in scores) == 1


async def test_an_evaluation_where_everything_fails_says_so() -> None:
    """It raises instead of returning scores."""

    async def fails(prompts: Sequence[Prompt]) -> list[Sample]:
        raise ValueError("no server")

    with pytest.raises(GenerateFailure, match="no server"):
        await run_evaluation(config(fails), PROMPTS, 100)


async def test_added_rollouts_have_indices_of_their_own() -> None:
    """A seed is mixed with the index: with the same indices, rollouts added later would be copies of the first ones."""
    played: list[int | None] = []

    async def noted(prompts: Sequence[Prompt]) -> list[Sample]:
        played.extend(prompt.index for prompt in prompts)
        return await echo(prompts)

    samples = await run_evaluation(config(noted), PROMPTS, 2)
    done = {result.key: result.rollouts for result in task_scores(samples)}
    first_index = 1 + max(sample.index for sample in samples if sample.index is not None)
    await run_evaluation(config(noted), PROMPTS, 4, done=done, first_index=first_index)
    assert sorted(index for index in played if index is not None) == list(range(20))
