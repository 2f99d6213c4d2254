"""Conversion of trajectories to samples: nothing is added or lost."""

from __future__ import annotations

import pytest

from rollouts.dtypes import (
    Completion,
    Message,
    Prompt,
    StopReason,
    TokenColumn,
    VersionSpan,
    packed_logprobs,
    packed_tokens,
)
from rollouts.errors import Failure
from rollouts.training import Status, trajectory_to_sample, trajectory_to_samples
from rollouts.trajectory import Trajectory, digest

PROMPT = Prompt("hi", label="8", metadata={"k": [1]}, group_index=2, index=17)


def decode(tokens: TokenColumn) -> str:
    return "".join(chr(token) for token in tokens)


def played(stop: StopReason = StopReason.TASK_COMPLETED, failure: Failure | None = None, **more: bool) -> Trajectory:
    """Prompt "ab", reply "cd", tool "e", reply "f"."""
    trajectory = Trajectory()
    trajectory.add_context(packed_tokens([*b"ab"]), [Message("user", "ab")])
    for context, reply, version in ((b"", b"cd", "v1"), (b"e", b"f", "v2")):
        trajectory.add_context(packed_tokens([*context]))
        completion = Completion(
            tokens=packed_tokens([*reply]),
            logprobs=packed_logprobs([-0.5] * len(reply)),
            finish_reason="stop",
            versions=(VersionSpan(version, 0, len(reply)),),
            prompt_tokens=len(trajectory),
            prompt_digest=digest(trajectory.tokens),
            request_id=version,
        )
        trajectory.add_reply(completion, Message("assistant", reply.decode()))
    if more.get("rewarded", True):
        trajectory.step_rewards.extend([0.5, 0.25])
    trajectory.count("turns", 2)
    return trajectory.seal(stop, failure)


def test_a_sample_is_its_trajectory() -> None:
    """Columns, text, versions, numbers; the prompt's place and label."""
    trajectory = played()
    sample = trajectory_to_sample(trajectory, PROMPT, decode)
    assert sample.tokens == list(b"abcdef")
    assert sample.loss_mask == [0, 0, 1, 1, 0, 1]
    assert sample.rollout_log_probs == [0, 0, -0.5, -0.5, 0, -0.5]
    assert sample.response == "cdef"
    assert sample.response_length == 4
    assert sample.versions == [VersionSpan("v1", 2, 4), VersionSpan("v2", 5, 6)]
    assert (sample.prompt, sample.label, sample.group_index, sample.index, sample.rollout_id) == ("hi", "8", 2, 17, 17)
    assert [message["content"] for message in sample.messages] == ["ab", "cd", "f"]
    assert (sample.reward, sample.metrics, len(sample.completions)) == (0.75, {"turns": 2}, 2)


@pytest.mark.parametrize("stop", StopReason)
def test_the_status_says_how_it_ended(stop: StopReason) -> None:
    """Completed, aborted and failed are themselves; a reply that ends the episode completes it; a limit truncates."""
    same = {"task_completed": "completed", "malformed_reply": "completed", "aborted": "aborted", "failed": "failed"}
    expected = same.get(stop.value, "truncated")
    sample = trajectory_to_sample(played(stop), PROMPT, decode)
    assert sample.status is Status(expected)
    assert sample.stop_reason is stop


def test_without_step_rewards_there_is_no_reward() -> None:
    """None, not zero: a reward function must set it."""
    assert trajectory_to_sample(played(rewarded=False), PROMPT, decode).reward is None


def test_samples_share_nothing_with_the_prompt_or_each_other() -> None:
    """Editing one sample's metadata or mask leaves trajectory, prompt and siblings alone."""
    trajectory = played()
    one, two = trajectory_to_samples([trajectory, trajectory], PROMPT, decode)
    one.metadata["new"] = 1
    one.metrics["turns"] = 9
    one.loss_mask = [1, *one.loss_mask[1:]]
    one.messages = []
    assert "new" not in PROMPT.metadata
    assert "new" not in two.metadata
    assert two.metrics == trajectory.metrics == {"turns": 2}
    assert trajectory.mask.tolist()[0] is False
    assert two.loss_mask[0] == 0
    assert len(two.messages) == 3
    assert one.rollout_id == two.rollout_id == 17


def test_a_growing_trajectory_is_no_sample() -> None:
    """It could still change."""
    with pytest.raises(AssertionError, match="only a sealed trajectory"):
        trajectory_to_sample(Trajectory(), PROMPT, decode)


def test_a_failure_before_the_first_reply_is_a_sample_too() -> None:
    """Nothing trained, nothing answered, and why."""
    trajectory = Trajectory()
    trajectory.add_context(packed_tokens([*b"ab"]))
    failure = Failure("EnvironmentFailure", "no world", "here", "")
    sample = trajectory_to_sample(trajectory.seal(StopReason.FAILED, failure), PROMPT, decode)
    assert (sample.response, sample.response_length, sum(sample.loss_mask)) == ("", 0, 0)
    assert sample.failure is failure
