"""Continuation of a stored rollout: more turns after its tokens.

Invariant: the first request of the continued rollout begins with exactly the stored ids (law 1): each reply passes the
same check as when it was sampled. Sampled tokens are never rendered or encoded again.

This module does not know where samples are stored, nor groups and rewards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rollouts.agent.prior_turns import PriorTurns
from rollouts.agent.turn_log import add_replies
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import ChatDict, Message, Prompt, as_messages, with_images
from rollouts.dtypes.lazy_numpy import np
from rollouts.environments.base import EnvironmentFactory
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.training.agent_integration import agent_rollout_to_samples
from rollouts.training.sample_laws import check_sample
from rollouts.training.types import Sample
from rollouts.trajectory import CompletionRecord, Trajectory

__all__ = ["SCORED_BY", "continue_rollout", "prior_turns_of", "prompt_of"]

SCORED_BY = "scored_by"
"""Metadata key: the teacher that scored the tokens, and its most probable ids if they were asked for."""


async def continue_rollout(
    sample: Sample,
    messages: str | Sequence[Message | ChatDict] | None = None,
    *,
    environment_cls: EnvironmentFactory = SingleTurnEnvironment,
    train_past: bool = True,
    **options: Any,
) -> list[Sample]:
    """Continue a finished or partial rollout, in this or in another process.

    Args:
        sample: the last branch of its rollout, from memory or from :meth:`Sample.from_dict`.
        messages: they follow the last reply: a user's text, messages, or tool results. Without messages, a reply that
            was cut or aborted is continued where it ends, the environment answers a complete one, and a request
            without a reply is sent again.
        environment_cls: answers the replies that follow; by default the first of them ends the episode. A simulated
            user is ``partial(SimulatedUser, function)``. Its ``start`` receives the conversation so far, and its tools
            must be those of the original rollout.
        train_past: True keeps past replies trained, so the new sample replaces ``sample``. False makes them context,
            for a ``sample`` that was already trained on (law 3).
        **options: as for :func:`agent_rollout_to_samples`.

    Returns:
        The samples of the continued rollout, as :func:`agent_rollout_to_samples`.

    Raises:
        ConfigError: the sample has no tokens or messages, or breaks a law; or there are ``messages`` although the last
            request has no reply yet.
    """
    prior = prior_turns_of(sample, as_messages(messages) if messages else (), train_past=train_past)
    prompt = prompt_of(sample)
    if sample.history is not None:
        options = {"history": sample.history, **options}
    return await agent_rollout_to_samples(prompt, environment_cls=environment_cls, prior=prior, **options)


def prompt_of(sample: Sample) -> Prompt:
    """The prompt of a stored sample, without what its metadata has of these tokens alone: a teacher's scores."""
    return Prompt(
        sample.prompt,
        label=sample.label,
        metadata={name: value for name, value in sample.metadata.items() if name != SCORED_BY},
        group_index=sample.group_index,
        index=sample.index,
    )


def prior_turns_of(sample: Sample, new: Sequence[Message] = (), *, train_past: bool = True) -> PriorTurns:
    """Convert a stored sample to the turns that an episode continues.

    Raises:
        ConfigError: as :func:`continue_rollout`.
    """
    messages = list(as_messages(with_images(sample.messages, sample.named_images.__getitem__)))
    if not len(sample) or not messages:
        raise ConfigError.of("sample", sample, "a sample with tokens and messages")
    unanswered = len(sample) - (sample.completions[-1].stop if sample.completions else 0)
    if unanswered and new:
        got = f"{unanswered} tokens after the last reply, and {len(new)} new messages"
        raise ConfigError.of("sample", got, "no messages: the last request has no reply yet")
    while not unanswered and messages[-1].role != "assistant":
        messages.pop()  # the environment's final messages were never shown to the model
    violations = check_sample(sample)
    if violations:
        raise ConfigError(f"sample: a law does not hold, so it cannot be continued: {violations[0]}")
    trajectory = Trajectory()
    if train_past:
        known = sample.logprob_column  # check_sample requires it where there are replies
        logprobs = np.zeros(len(sample), np.float32) if known is None else known
        add_replies(trajectory, sample.completions, sample.token_column, logprobs, sample.versions)
        trajectory.metrics |= sample.metrics
        trajectory.step_rewards += sample.step_rewards
        trajectory.step_completions += [*(sample.step_completions or ())] or [-1] * len(sample.step_rewards)
        trajectory.times = Timeline(sample.times)
    else:
        trajectory.add_context(sample.token_column)
    trajectory.messages = messages
    trajectory.images += sample.images
    if unanswered and not (sample.completions and messages[-1].role == "assistant"):
        return PriorTurns(trajectory, len(sample), state="asked")
    turn_start, part_start = _starts(sample.completions)
    if unanswered:  # text of the environment: the last turn continues
        return PriorTurns(trajectory, turn_start, state="asked", part_start=len(sample))
    finish = sample.completions[-1].finish_reason
    state: Any = "replied" if finish == "stop" else "cut"
    aborted = finish == "abort"
    return PriorTurns(trajectory, turn_start, tuple(new), state=state, part_start=part_start, aborted=aborted)


def _starts(records: Sequence[CompletionRecord]) -> tuple[int, int | None]:
    """Offset of the last turn, and the offset after the environment's last text in it, ``None`` without such text.

    A reply that was continued consists of several adjacent completions.
    """
    start, part = records[-1].start, None
    for record, before in itertools.pairwise(reversed(records)):
        if record.continues:
            part = record.start if part is None else part
        elif before.stop != record.start:
            break
        start = before.start
    return start, part
