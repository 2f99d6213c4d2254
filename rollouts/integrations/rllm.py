"""rLLM 0.3: samples as episodes, which its trainer turns into groups for verl or tinker.

    out: to_episodes(samples)
    in:  nothing: rLLM plays programs that call its own gateway

Invariant: a step for each completion, whose prompt ids are exactly the ids of its request; what the mask leaves out is
never a response. rLLM is imported when the function runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.errors import ConfigError
from rollouts.integrations.steps import trained_replies
from rollouts.training.comparisons import by_conversation, comparison_name
from rollouts.training.rows import (
    by_rollout,
    check_temperature,
    int_version,
    reward_of_branches,
    row_columns,
)
from rollouts.training.types import Sample

__all__ = ["to_episodes"]


def to_episodes(
    samples: Sequence[Sample], *, version: int | None = None, temperature: float | None = None
) -> list[Any]:
    """Convert rollouts to ``Episode``, in order: a trajectory for each conversation, with the steps of its branches.

    rLLM groups trajectories by the id, ``GROUP:NUMBER``, and by their name: that of their comparison without the group,
    mostly the seat
    (rLLM 0.3, trainer/algorithms/transform.py: transform_episodes_to_trajectory_groups).

    Args:
        samples: scored samples.
        version: the version of all rollouts, if the versions of the samples are not numbers.
        temperature: that of the trainer's configuration; samples of another temperature are refused.

    Raises:
        ConfigError: a sample is failed, unscored, without logprobs or group, sampled at another temperature, or has a
            field that rLLM has no place for; branches of a rollout have unlike rewards; or a version is not a number.
    """
    rollouts = by_rollout(samples)
    for branches in by_conversation(samples):
        reward_of_branches(branches)
    for sample in samples:
        check_temperature(sample, "rLLM", temperature)
    from rllm.types import Episode, Trajectory

    episodes: list[Any] = []
    for rollout in rollouts:
        last = rollout[-1]
        if last.group_index is None:
            raise ConfigError.of(f"{last!r}.group_index", None, "the number of its group")
        trajectories = []
        for branches in by_conversation(rollout):
            steps = [step for branch in branches for step in _steps(branch, version)]
            reward = reward_of_branches(branches)
            steps[-1].done, steps[-1].reward = True, reward
            name = comparison_name(branches[0]).partition("/")[2] or "rollouts"
            trajectories.append(Trajectory(name=name, task=last.prompt, steps=steps, reward=reward))
        episodes.append(Episode(id=f"{last.group_index}:{len(episodes)}", task=last.prompt, trajectories=trajectories))
    return episodes


def _steps(sample: Sample, version: int | None) -> list[Any]:
    from rllm.types import Step

    row = row_columns(sample, "rLLM", "loss_multiplier", "advantages", "teacher_log_probs", "images")
    tokens = row.tokens.tolist()
    number = int_version(sample, version)
    return [
        Step(
            prompt_ids=tokens[:start],
            response_ids=tokens[start:stop],
            logprobs=row.logprobs[start:stop].tolist(),
            weight_version=number,
        )
        for start, stop, _ in trained_replies(sample)
    ]
