"""Conversion of trajectories to samples.

Invariant: pure; a sample has the columns of its trajectory unchanged, so laws 1 to 3 hold for it as for the trajectory.
This module does not score, and knows of the tokenizer only the function that decodes ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollouts.dtypes import Prompt, StopReason, TokenColumn
from rollouts.dtypes.lazy_numpy import np
from rollouts.training.types import ImageInputs, Sample, Status
from rollouts.trajectory import Trajectory

__all__ = ["status_of", "trajectory_to_sample", "trajectory_to_samples"]

_STATUS = {
    StopReason.TASK_COMPLETED: Status.COMPLETED,
    StopReason.MALFORMED_REPLY: Status.COMPLETED,
    StopReason.ABORTED: Status.ABORTED,
    StopReason.FAILED: Status.FAILED,
}
"""Any other stop reason means that a limit ended the episode: TRUNCATED."""


def status_of(stop_reason: StopReason | None) -> Status:
    """Status of a rollout with this stop reason."""
    return Status.FAILED if stop_reason is None else _STATUS.get(stop_reason, Status.TRUNCATED)


def trajectory_to_sample(
    trajectory: Trajectory,
    prompt: Prompt,
    decode: Callable[[TokenColumn], str],
    image_inputs: ImageInputs | None = None,
) -> Sample:
    """Convert one sealed trajectory to a sample.

    The reward is the sum of the environment's step rewards, ``None`` if there are none. The sample keeps a reference to
    ``decode``, which must be deterministic, and decodes its response at each read; and to ``image_inputs``, which makes
    the tensors of its images.
    """
    assert trajectory.stop_reason is not None, "only a sealed trajectory becomes a sample"
    first = trajectory.completions[0].start if trajectory.completions else len(trajectory)
    in_parts = [message for message in trajectory.messages if type(message.content) is not str]  # these have images
    sample = Sample(
        prompt=prompt.prompt,
        response=decode(trajectory.tokens[first:]),
        tokens=trajectory.tokens,
        loss_mask=trajectory.mask,
        rollout_log_probs=trajectory.logprobs,
        versions=list(trajectory.versions),
        reward=sum(trajectory.step_rewards) if trajectory.step_rewards else None,
        metadata=dict(prompt.metadata),
        label=prompt.label,
        group_index=prompt.group_index,
        index=prompt.index,
        rollout_id=prompt.index,
        status=status_of(trajectory.stop_reason),
        stop_reason=trajectory.stop_reason,
        failure=trajectory.failure,
        messages=[message.to_record() for message in trajectory.messages],
        tools=trajectory.tools,
        images=trajectory.images,
        named_images={image.sha256: image for message in in_parts for image in message.images},
        completions=list(trajectory.completions),
        metrics=dict(trajectory.metrics),
        history=trajectory.history,
        step_rewards=list(trajectory.step_rewards),
        step_completions=np.array(trajectory.step_completions, np.int32) if trajectory.step_completions else None,
        times=trajectory.times,
    )
    sample.image_inputs = image_inputs
    return sample.compact_records(first, decode)


def trajectory_to_samples(
    trajectories: Sequence[Trajectory],
    prompt: Prompt,
    decode: Callable[[TokenColumn], str],
    image_inputs: ImageInputs | None = None,
) -> list[Sample]:
    """Convert all branches of one rollout to samples with its ``rollout_id``.

    Each sample has the sum of the step rewards of all branches, and the status of the last branch.
    """
    samples = [trajectory_to_sample(trajectory, prompt, decode, image_inputs) for trajectory in trajectories]
    rewards = [reward for trajectory in trajectories for reward in trajectory.step_rewards]
    for sample in samples:
        sample.reward = sum(rewards) if rewards else None
        sample.status, sample.failure = samples[-1].status, samples[-1].failure
    return samples
