"""The limits of an episode: how many tokens the next reply may have, and which limit ends the episode.

This module does not know the tokens, only their number.
"""

from __future__ import annotations

import math

import attrs

from rollouts.dtypes import Limits, SamplingParams, StopReason
from rollouts.inference.base import CompletionRequest
from rollouts.trajectory import CompletionRecord

__all__ = ["Budget", "ReplyRequest", "room_for_reply"]


@attrs.frozen(eq=False)
class ReplyRequest:
    """One request for a reply, or for the rest of a reply that was cut."""

    completion_request: CompletionRequest
    """Its ``sampling.max_new_tokens`` is what the limits allow this request."""
    limit: StopReason
    """The stop reason of a reply that is cut because a limit of the episode lowered ``max_new_tokens``."""
    began: float


@attrs.define(eq=False)
class Budget:
    """The limits of an episode, and how much of them is used."""

    limits: Limits
    sampling: SamplingParams
    """The parameters of a whole reply."""
    max_context: int | None = None
    """Context length of the model in tokens; ``None``: unlimited."""
    sampled: int = 0
    """Number of sampled tokens, over all branches."""
    cut_tokens: int = 0
    """Number of tokens of a cut reply that the next request continues."""
    spent_tokens: int = 0
    """How many of them count against ``max_new_tokens``: all if an abort cut the reply, none if its length did."""

    def next_reply(self, length: int) -> tuple[int, StopReason]:
        """How many tokens the limits allow the next reply, and the stop reason if that is too few.

        ``length``: number of tokens of the current branch.
        """
        return room_for_reply(self.limits, self._left_for_reply, length, self.sampled, self.max_context)

    def sampling_of(self, budget: int, seed: int | None) -> SamplingParams:
        """The parameters of a request of at most ``budget`` tokens."""
        whole = self.sampling
        if budget == whole.max_new_tokens >= whole.min_new_tokens and seed == whole.seed and not self.cut_tokens:
            return whole
        least = min(max(0, whole.min_new_tokens - self.cut_tokens), budget)
        return attrs.evolve(whole, max_new_tokens=budget, min_new_tokens=least, seed=seed)

    def after_completion(self, completion: CompletionRecord, request: ReplyRequest) -> StopReason | None:
        """Why the completion ends the episode; ``None`` if it does not."""
        whole, asked = self._left_for_reply, request.completion_request.sampling.max_new_tokens
        self.cut_tokens = self.spent_tokens = 0
        if completion.finish_reason == "abort":
            return StopReason.ABORTED
        if completion.finish_reason == "length":
            if asked < whole:
                return request.limit
            if completion.stop - completion.start < asked:  # the server ran out of context or KV cache
                return StopReason.CONTEXT_OVERFLOW
            if self.limits.on_cut == "stop":
                return StopReason.MAX_TOKENS
        return None

    def before_calls(self, turn: int, calls: int, total: int, length: int, *, one_a_turn: bool) -> StopReason | None:
        """Why the episode ends before the calls of a reply run; ``None`` if they run.

        Args:
            turn: number of the reply.
            calls: number of its calls.
            total: number of calls in all replies.
            length: number of tokens of the current branch.
            one_a_turn: whether the chat template has one call a turn.
        """
        limits = self.limits
        if turn == limits.max_turns and limits.last_calls == "skip":
            return StopReason.MAX_TURNS
        parallel = 1 if one_a_turn else limits.max_parallel_calls or math.inf
        if calls > parallel or (limits.max_tool_calls is not None and total > limits.max_tool_calls):
            return StopReason.MAX_TOOL_CALLS
        left, limit = self.next_reply(length)
        return limit if left < 1 else None

    @property
    def _left_for_reply(self) -> int:
        """The most tokens of the rest of the reply, without the limits of the episode."""
        return self.sampling.max_new_tokens - self.spent_tokens


def room_for_reply(
    limits: Limits, max_new_tokens: int, length: int, sampled: int, max_context: int | None
) -> tuple[int, StopReason]:
    """How many tokens the limits allow the next reply, and the stop reason if that is too few.

    Args:
        limits: those of the episode.
        max_new_tokens: most tokens of the reply without the other limits.
        length: number of tokens of the current branch.
        sampled: number of sampled tokens, over all branches.
        max_context: context length of the model in tokens; ``None``: unlimited.
    """
    room, limit = max_new_tokens, StopReason.MAX_TOKENS
    if limits.max_tokens is not None:
        room = min(room, limits.max_tokens - length)
    if limits.max_sampled_tokens is not None:
        room = min(room, limits.max_sampled_tokens - sampled)
    if max_context is not None and max_context - length < room:
        room, limit = max_context - length, StopReason.CONTEXT_OVERFLOW
    return room, limit
