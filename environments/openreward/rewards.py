"""The reward of a rollout from the rewards of its calls, as in the kit.

Invariant: it depends on the step rewards, on whether the environment finished the episode, and on the settings of that
environment; a failed rollout is not scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.environments.ors import GroupScore
from rollouts.recipes.environments.openreward.config import KitSettings
from rollouts.training import Sample
from rollouts.training.step_rewards import reduced

__all__ = ["group_reward", "own_reward", "reward"]


def reward(sample: Sample, *, settings: KitSettings) -> float:
    """Reduce the step rewards (and the non-terminal reward of an unfinished episode), then apply the bounds."""
    entry = settings.of(sample.metadata.get("env_name"))
    return reduced(
        sample.step_rewards,
        reduction=entry.reward_reduction,
        further=None if sample.metadata.get("stop_reason") == "reached_terminal_state" else entry.nonterminal_reward,
        lowest=entry.min_reward,
        highest=entry.max_reward,
    )


async def own_reward(sample: Sample, *, settings: KitSettings) -> float:
    """:func:`reward` on the event loop, since it takes microseconds and a worker thread a hundred of them."""
    return reward(sample, settings=settings)


async def group_reward(samples: Sequence[Sample], *, settings: KitSettings) -> list[float]:
    """The rewards of a group: each rollout's own, plus the environment's comparison with ``group_score``.

    The metadata has both parts, as ``own_reward`` and ``group_score``.
    """
    own = [reward(sample, settings=settings) for sample in samples]
    name = samples[0].metadata["env_name"]
    if not settings.of(name).group_score:
        return own
    scores = await GroupScore(settings.server(name, samples[0].metadata.get("environment_name")))(samples)
    for sample, number, score in zip(samples, own, scores, strict=True):
        sample.metadata["own_reward"], sample.metadata["group_score"] = number, score
    return [number + score for number, score in zip(own, scores, strict=True)]
