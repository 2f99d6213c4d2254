"""rLLM 0.3: samples as episodes, which its trainer turns into groups for verl or tinker.

    out: to_episodes(samples)
    in:  nothing: rLLM plays programs that call a gateway of its own

Invariant: a step for each completion, whose prompt ids are exactly the ids of its request; rLLM merges steps that
extend each other. rLLM is imported when the function runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.errors import ConfigError
from rollouts.training.rows import by_rollout, check_fields, int_version, reward_of, split
from rollouts.training.types import Sample

__all__ = ["to_episodes"]


def to_episodes(samples: Sequence[Sample], *, version: int | None = None) -> list[Any]:
    """Convert rollouts to ``Episode``, in order: one trajectory each, with the steps of all its branches.

    rLLM groups them by the id, ``GROUP:NUMBER``.

    Args:
        samples: scored samples.
        version: the version of all rollouts, where the samples' are no numbers.

    Raises:
        ConfigError: a sample is failed, unscored, without logprobs or group, or has a field that rLLM has no place for;
            or versions are no numbers.
    """
    from rllm.types import Episode, Trajectory

    episodes: list[Any] = []
    for branches in by_rollout(samples):
        last = branches[-1]
        if last.group_index is None:
            raise ConfigError.of(f"{last!r}.group_index", None, "the number of its group")
        steps = [step for branch in branches for step in _steps(branch, version)]
        steps[-1].done, steps[-1].reward = True, reward_of(last)
        trajectory = Trajectory(name="rollouts", task=last.prompt, steps=steps, reward=reward_of(last))
        episodes.append(Episode(id=f"{last.group_index}:{len(episodes)}", task=last.prompt, trajectories=[trajectory]))
    return episodes


def _steps(sample: Sample, version: int | None) -> list[Any]:
    from rllm.types import Step

    check_fields(sample, "rLLM", "loss_multiplier", "advantages", "teacher_log_probs", "images")
    split(sample)
    tokens, logprobs = sample.token_column.tolist(), sample.logprob_column
    assert logprobs is not None  # split has checked it
    number = int_version(sample, version)
    return [
        Step(
            prompt_ids=tokens[: one.start],
            response_ids=tokens[one.start : one.stop],
            logprobs=logprobs[one.start : one.stop].tolist(),
            weight_version=number,
        )
        for one in sample.completions
    ]
