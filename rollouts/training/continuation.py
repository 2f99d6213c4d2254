"""Going on with a stored rollout: more turns behind the ids that it has.

Invariant: the first request of the continued turn begins with the stored ids, all of them and no others (law 1): each
reply is put back through the same check as when it was sampled. Nothing that was sampled is rendered or encoded again.

This module knows nothing of where a sample was kept, nor of groups and rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from rollouts.agent.episode import Past
from rollouts.dtypes import ChatDict, Completion, Message, Prompt, VersionSpan, as_messages
from rollouts.environments.base import EnvironmentFactory
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.training.agent_integration import agent_rollout_to_samples
from rollouts.training.sample_laws import check_sample
from rollouts.training.types import Sample
from rollouts.trajectory import CompletionRecord, Trajectory

__all__ = ["continue_rollout", "past_of"]


async def continue_rollout(
    sample: Sample,
    messages: str | Sequence[Message | ChatDict] | None = None,
    *,
    environment_cls: EnvironmentFactory = SingleTurnEnvironment,
    train_past: bool = True,
    **options: Any,
) -> list[Sample]:
    """Go on with a finished or partial rollout, in this or in another process.

    Args:
        sample: what there is: the last branch of its rollout, as it came or from :meth:`Sample.from_dict`.
        messages: what comes after the last reply: a user's text, messages, results of its tool calls. Without any, a
            reply that was cut or aborted goes on where it ends, and a whole one is answered by the environment; where
            the model had been asked and had not answered, it is asked again.
        environment_cls: answers the replies that follow; by default the first of them ends the episode. A simulated
            user is ``partial(SimulatedUser, function)``. Its ``start`` is given the conversation so far, and its tools
            must be those that the rollout was played with.
        train_past: replies of the past stay trained, and the sample that comes back replaces the one given. False: the
            one given was trained already, so its replies are context now (law 3).
        **options: as for :func:`agent_rollout_to_samples`.

    Returns:
        The samples of the continued rollout, as :func:`agent_rollout_to_samples`.

    Raises:
        ConfigError: there is nothing to go on from, the sample breaks a law, or there are messages where the model has
            been asked already.
    """
    past = past_of(sample, as_messages(messages) if messages else (), train_past=train_past)
    prompt = Prompt(
        sample.prompt if isinstance(sample.prompt, str) else as_messages(sample.prompt),
        label=sample.label,
        metadata=sample.metadata,
        group_index=sample.group_index,
        index=sample.index,
    )
    if sample.history is not None:
        options = {"history": sample.history, **options}
    return await agent_rollout_to_samples(prompt, environment_cls=environment_cls, past=past, **options)


def past_of(sample: Sample, new: Sequence[Message] = (), *, train_past: bool = True) -> Past:
    """A stored sample as a conversation to go on with.

    Raises:
        ConfigError: as :func:`continue_rollout`.
    """
    messages = list(as_messages(sample.messages))
    if not len(sample) or not messages:
        raise ConfigError.of("sample", sample, "one with tokens and messages to go on from")
    asked = len(sample) - (sample.completions[-1].stop if sample.completions else 0)
    if asked and new:
        got = f"{asked} tokens after the last reply, and {len(new)} new messages"
        raise ConfigError.of("sample", got, "no messages: the model has been asked already, and is to speak")
    while not asked and messages[-1].role != "assistant":
        messages.pop()  # what the environment said at its end was never shown
    broken = check_sample(sample)
    if broken:
        raise ConfigError(f"sample: a law does not hold, so it cannot be gone on with: {broken[0]}")
    trajectory = Trajectory()
    if train_past:
        position = 0
        for call in sample.completions:
            trajectory.add_context(sample.token_column[position : call.start])
            trajectory.add_reply(_completion(sample, call), Message("assistant"))
            position = call.stop
        trajectory.add_context(sample.token_column[position:])
        trajectory.metrics |= sample.metrics
        trajectory.step_rewards += sample.step_rewards
    else:
        trajectory.add_context(sample.token_column)
    trajectory.messages = messages
    if asked:
        return Past(trajectory, len(sample), state="asked")
    cut = sample.completions[-1].finish_reason != "stop"
    return Past(trajectory, _reply_start(sample.completions), tuple(new), state="cut" if cut else "replied")


def _completion(sample: Sample, call: CompletionRecord) -> Completion:
    """The completion that a call was."""
    logprobs = sample.logprob_column
    assert logprobs is not None, "check_sample wants logprobs where the mask is 1"
    spans = [
        VersionSpan(span.version, max(span.start, call.start) - call.start, min(span.stop, call.stop) - call.start)
        for span in sample.versions
        if span.start < call.stop and span.stop > call.start
    ]
    return Completion(
        tokens=sample.token_column[call.start : call.stop],
        logprobs=logprobs[call.start : call.stop],
        versions=spans,
        prompt_tokens=call.start,
        **{name: value for name, value in attrs.asdict(call).items() if name not in ("start", "stop")},
    )


def _reply_start(calls: Sequence[CompletionRecord]) -> int:
    """Where the last reply begins: one that was gone on with is several calls without anything between them."""
    start = calls[-1].start
    for call in reversed(calls[:-1]):
        if call.stop != start:
            break
        start = call.start
    return start
