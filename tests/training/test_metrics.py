"""Metrics of a run: the accounting, and means over batches."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError, TokenMismatchError
from rollouts.training import Accounting, Group, Prompt, Sample
from rollouts.training.branches import by_rollout
from rollouts.training.metrics import RunMetrics
from rollouts.trajectory import CompletionRecord
from tests.batches import batch_metrics

PARTS = [field.name for field in attrs.fields(Accounting) if field.name != "taken"]


@given(parts=st.lists(st.integers(0, 9), min_size=len(PARTS), max_size=len(PARTS)), wrong=st.integers(-3, 3))
def test_the_sum_is_checked(parts: list[int], wrong: int) -> None:
    """Any difference is a broken law, and the message prints the numbers."""
    accounting = Accounting(taken=sum(parts) + wrong, **dict(zip(PARTS, parts, strict=True)))
    if wrong:
        with pytest.raises(TokenMismatchError, match=f"does not add up: {accounting.taken} prompts taken"):
            accounting.check()
    else:
        accounting.check()
        numbers = [int(word) for word in str(accounting).split() if word.isdigit()]
        assert numbers[0] == sum(numbers[1:])


def sample(length: int, **fields: Any) -> Sample:
    return Sample(tokens=[0] * (1 + length), loss_mask=[0] + [1] * length, **{"status": "completed", **fields})


def test_a_batch_in_numbers() -> None:
    """Means over samples; a sample without a count counts as zero."""
    call = CompletionRecord("r", start=10, stop=12, finish_reason="stop", prompt_digest=0, cached_tokens=5, seconds=0.1)
    numbers = batch_metrics(
        [
            sample(2, reward=1.0, versions=[VersionSpan("v1", 1, 3)], completions=[call], metrics={"tool_calls": 2}),
            sample(4, reward=0.0, versions=[VersionSpan("v2", 1, 5)], status="truncated"),
        ]
    )
    assert numbers["reward/mean"] == numbers["reward/std"] == 0.5
    assert (numbers["response_length/mean"], numbers["response_length/max"]) == (3, 4)
    assert numbers["policy_versions"] == 2
    assert numbers["prefix_cache_hit_rate"] == 0.5
    assert (numbers["status/completed"], numbers["status/truncated"]) == (0.5, 0.5)
    assert numbers["episode/tool_calls"] == 1


@given(
    shapes=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0, 1]), max_size=5), st.integers(0, 3), st.booleans(), st.sampled_from([0, 1, 8])
        ),
        min_size=1,
        max_size=8,
    )
)
def test_the_numbers_of_a_batch_are_those_of_its_samples(shapes: list[tuple[list[int], int, bool, int]]) -> None:
    """Also of samples without tokens, with no sampled token, with columns that are lists, and of forked rollouts."""
    samples = []
    for mask, rollout, packs, forks in shapes:
        metrics = {"forks": forks, "duplicated_tokens": 2 * forks} if forks else {"restarted_at_resume": 1}
        one = Sample(tokens=[7] * len(mask), loss_mask=mask, rollout_id=rollout, reward=0.1 * forks, metrics=metrics)
        samples.append(one.pack() if packs else one)
    rollouts = by_rollout(samples)
    numbers = batch_metrics(samples)
    assert {*map(type, numbers.values())} <= {int, float}, "no NumPy scalars, which JSON has not"
    assert numbers["tokens/mean"] == fmean(map(len, samples))
    assert numbers["response_length/mean"] == fmean(one.response_length for one in samples)
    assert numbers["response_length/max"] == max(one.response_length for one in samples)
    assert numbers["sampled_tokens/mean"] == sum(one.sampled_tokens for one in samples) / len(rollouts)
    assert numbers["forks"] == sum(one.metrics.get("forks", 0) for one in samples)
    assert numbers["duplicated_tokens"] == 2 * numbers["forks"]
    assert numbers.get("episode/forks", 0) == numbers["forks"] / len(rollouts)
    assert numbers["resumed/restarted"] == sum(
        any("restarted_at_resume" in one.metrics for one in branches) for branches in rollouts
    )


def test_the_turns_of_a_text_are_its_replies() -> None:
    """A sample without token ids has no completions; its metrics have the count of its replies."""
    texts = [Sample(status="completed", reward=1.0, metrics={"replies": replies}) for replies in (1, 4)]
    assert batch_metrics(texts)["turns/mean"] == 2.5


def test_lengths_by_outcome_are_taken_once() -> None:
    """Mean lengths of kept, dropped and all rollouts, which show a bias."""
    metrics = RunMetrics()
    metrics.add(Group(Prompt("a", group_index=0), (sample(2, reward=1.0), sample(4, reward=0.0)), "kept"))
    metrics.add(Group(Prompt("b", group_index=1), (sample(9, reward=1.0),), "dropped", "check_x"))
    assert metrics.take_lengths() == {
        "sampled_tokens/kept": 3,
        "sampled_tokens/dropped": 9,
        "sampled_tokens/all": 5,
    }
    assert metrics.take_lengths() == {}
    assert (metrics.rollouts, metrics.sampled_tokens, metrics.mean_reward) == (3, 15, pytest.approx(2 / 3))
    assert metrics.reasons == {"check_x": 1}


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "great", [1.0]])
def test_a_failed_group_does_not_spoil_the_mean(reward: Any) -> None:
    """Whatever stands where its reward should be."""
    metrics = RunMetrics()
    metrics.add(Group(Prompt("a", group_index=0), (sample(1, reward=reward),), "failed", "RewardFailure: x"))
    assert metrics.mean_reward is None
    metrics.add(Group(Prompt("b", group_index=1), (sample(1, reward=0.5),), "kept"))
    assert metrics.mean_reward == 0.5


def test_reasons_that_all_differ_take_no_room() -> None:
    """The frequent ones keep their count, and the total is that of all."""
    metrics = RunMetrics()
    for number in range(2000):
        metrics.count("failed", f"got {number}", [1], [None])
        metrics.count("dropped", "no spread", [1], [0.0])
    assert len(metrics.reasons) <= 200
    assert metrics.reasons["no spread"] == 2000
    assert metrics.reasons.total() == 4000


def test_resumed_rollouts_are_counted_as_continued_or_restarted() -> None:
    """Rollouts continued from their last turn, and rollouts restarted."""
    samples = [
        sample(1, metrics={"turns_before_resume": 2}),
        sample(1, metrics={"restarted_at_resume": 1}),
        sample(1, metrics={"restarted_at_resume": 3}),
        sample(1),
    ]
    numbers = batch_metrics(samples)
    assert (numbers["resumed/continued"], numbers["resumed/restarted"]) == (1, 2)


def test_prompts_that_repeat_within_a_batch_are_counted() -> None:
    """Each group whose prompt and label an earlier group has; groups that differ give no metric.

    Without text, the metadata is the prompt; a sample without both tells nothing.
    """
    prompts = ["a", "b", "a", "a"]
    batch = [sample(1, prompt=prompt, label=1, group_index=group) for group, prompt in enumerate(prompts) for _ in "xy"]
    assert batch_metrics(batch)["repeated_prompts"] == 2
    assert "repeated_prompts" not in batch_metrics(batch[:4])
    assert "repeated_prompts" not in batch_metrics(
        [sample(1, prompt="a", label=label, group_index=label) for label in (1, 2)]
    )
    tasks = [sample(1, prompt="", metadata={"task": task}, group_index=group) for group, task in enumerate([1, 2, 2])]
    assert batch_metrics(tasks)["repeated_prompts"] == 1
    assert "repeated_prompts" not in batch_metrics([sample(1, prompt="", group_index=group) for group in (0, 1)])


def test_the_speed_of_a_resumed_run_is_of_this_process() -> None:
    """Tokens of an earlier process count for the run, not for the tokens per second of this one."""
    before = RunMetrics()
    before.count("kept", "", [1_000_000], [1.0])
    metrics = RunMetrics()
    metrics.load(before.to_dict())
    assert (metrics.sampled_tokens, metrics.sampled_here, metrics.tokens_per_second) == (1_000_000, 0, 0.0)
    metrics.count("kept", "", [70], [1.0])
    assert metrics.sampled_here == 70


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_has_no_mean(reward: float) -> None:
    """It would stand in the metrics of a batch as a number that JSON does not have."""
    with pytest.raises(ConfigError, match=r"Sample\.reward"):
        batch_metrics([sample(1, reward=1.0), sample(1, reward=reward)])
