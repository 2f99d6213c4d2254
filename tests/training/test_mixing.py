"""Prompts of several environments in proportion, each with its own reward, and metrics by environment."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, RewardFailure
from rollouts.training import Sample
from rollouts.training.mixing import MixedReward, mixed_prompts
from rollouts.training.scoring import score
from tests.batches import batch_metrics

PARTS: dict[str, tuple[float, list[Prompt]]] = {
    "a": (3, [Prompt(f"a{number}", metadata={"level": 1}) for number in range(4)]),
    "b": (1.5, [Prompt(f"b{number}") for number in range(50)]),
    "c": (0.5, [Prompt("c")]),
}


def test_each_has_its_share_at_every_moment() -> None:
    """To within one prompt, however many are taken."""
    mixed = mixed_prompts(PARTS, 200)
    for count in range(1, 201):
        taken = Counter(prompt.metadata["environment"] for prompt in mixed[:count])
        for name, share in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
            assert abs(taken[name] - share * count) < 1


def test_the_order_follows_from_the_seed() -> None:
    """Every prompt of a part comes before one of it comes again; metadata are kept."""
    assert mixed_prompts(PARTS, 60, seed=1) == mixed_prompts(PARTS, 60, seed=1) != mixed_prompts(PARTS, 60, seed=2)
    own = [prompt for prompt in mixed_prompts(PARTS, 60) if prompt.metadata["environment"] == "a"]
    assert {str(prompt.prompt) for prompt in own[:4]} == {"a0", "a1", "a2", "a3"}
    assert own[0].metadata == {"level": 1, "environment": "a"}


@pytest.mark.parametrize("part", [(0, ["x"]), (-1, ["x"]), (True, ["x"]), ("1", ["x"]), (float("inf"), ["x"]), (1, [])])
def test_parts_that_cannot_be_are_refused(part: Any) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=r"mixed_prompts\(parts\)\['x'\]"):
        mixed_prompts({**PARTS, "x": part}, 10)
    with pytest.raises(ConfigError, match="count"):
        mixed_prompts(PARTS, 0)
    with pytest.raises(ConfigError, match="at least one"):
        mixed_prompts({}, 1)


async def test_each_environment_has_its_own_reward() -> None:
    """A function, or the step rewards; an environment without an entry is a failure."""
    reward = MixedReward({"a": lambda sample: len(sample.response), "steps": None})
    samples = [Sample(response="abc", reward=0.25, metadata={"environment": name}) for name in ("a", "steps", "b")]
    await score(samples[0], reward, seconds=20)
    await score(samples[1], reward, seconds=20)
    assert [sample.reward for sample in samples] == [3.0, 0.25, 0.25]
    with pytest.raises(RewardFailure, match=r"got 'b'; expected one of \['a', 'steps'\]"):
        await score(samples[2], reward, seconds=20)
    with pytest.raises(ConfigError, match=r"MixedReward\['a'\]"):
        MixedReward({"a": 1.0})  # type: ignore[dict-item]


def test_metrics_by_environment() -> None:
    """Share, reward and lengths of each; a batch of one kind without a name has none."""
    samples = [Sample(reward=float(number), metadata={"environment": "ab"[number % 2]}) for number in range(3)]
    metrics = batch_metrics(samples)
    assert metrics["environment/a/share"] == pytest.approx(2 / 3)
    assert metrics["environment/a/reward/mean"] == 1.0
    assert metrics["environment/b/reward/mean"] == 1.0
    assert metrics["environment/b/reward/std"] == 0.0
    assert not any(key.startswith("environment/") for key in batch_metrics([Sample(reward=1.0)]))


def test_the_last_branch_names_the_environment_of_a_rollout() -> None:
    """A name that only an earlier branch has, as a custom function may return it, counts for nothing."""
    names = [{"environment": "a"}, {}, {"environment": "b"}]
    branches = [Sample(rollout_id=0, metadata=metadata) for metadata in names]
    assert not any(name.startswith("environment/a/") for name in batch_metrics(branches[:2]))
    assert batch_metrics(branches)["environment/b/share"] == 1.0
