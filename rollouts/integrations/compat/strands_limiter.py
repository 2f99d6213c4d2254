"""strands-sglang's limits of a Strands agent's loop, under the names of all its versions.

Invariant: a limit ends the loop at the reply that reaches it, before its tools run, whose results the model would never
read. The stored tokens equal those of strands-sglang.
"""

from __future__ import annotations

from typing import Any

import attrs
from strands.hooks import BeforeToolCallEvent, HookProvider, HookRegistry, MessageAddedEvent

__all__ = [
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "ToolIterationLimiter",
    "ToolLimiter",
]


class LoopLimitReachedError(Exception):
    """A limit of the loop was reached."""


class MaxToolIterationsReachedError(LoopLimitReachedError):
    """The limit of replies with tool calls was reached."""


class MaxToolCallsReachedError(LoopLimitReachedError):
    """The limit of tool calls was reached."""


class MaxMessagesReachedError(LoopLimitReachedError):
    """The limit of messages was reached."""


@attrs.define(eq=False, slots=False)
class LoopLimiter(HookProvider):  # type: ignore[misc]  # typed by Strands where it is installed
    """A hook that counts messages and tool calls, and ends the loop at a limit."""

    max_tool_iters: int | None = None
    """Replies with tool calls; the last one stays in the conversation, and its calls do not run."""
    max_tool_calls: int | None = None
    """Tool calls, including those of the last reply."""
    max_parallel_tool_calls: int | None = None
    """Calls of one reply; further calls return an error."""
    max_messages: int | None = None
    """Messages of the conversation, checked when a user message arrives."""

    def __attrs_post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counters."""
        self.message_count = self.tool_iter_count = self.tool_call_count = self.cancelled_tool_call_count = 0
        self._parallel = 0

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        registry.add_callback(MessageAddedEvent, self._on_message)
        registry.add_callback(BeforeToolCallEvent, self._on_call)

    def _on_message(self, event: MessageAddedEvent) -> None:
        self.message_count += 1
        if event.message["role"] == "user":
            _stop(MaxMessagesReachedError, "messages", self.message_count, self.max_messages)
            return
        calls = sum("toolUse" in block for block in event.message["content"])
        if calls:
            self._parallel = 0
            self.tool_iter_count += 1
            self.tool_call_count += calls
            _stop(MaxToolIterationsReachedError, "replies with calls", self.tool_iter_count, self.max_tool_iters)
            _stop(MaxToolCallsReachedError, "calls", self.tool_call_count, self.max_tool_calls)

    def _on_call(self, event: BeforeToolCallEvent) -> None:
        self._parallel += 1
        limit = self.max_parallel_tool_calls
        if limit is not None and self._parallel > limit:
            event.cancel_tool = f"Error: at most {limit} calls in one reply; this one did not run"
            self.cancelled_tool_call_count += 1


def _stop(error: type[LoopLimitReachedError], what: str, count: int, limit: int | None) -> None:
    if limit is not None and count >= limit:
        raise error(f"{count} {what}; the limit is {limit}")


ToolLimiter = LoopLimiter


class ToolIterationLimiter(LoopLimiter):
    """The limiter of the first API version: it limits only replies with tool calls."""

    def __init__(self, max_iterations: int | None = None) -> None:
        super().__init__(max_tool_iters=max_iterations)

    @property
    def max_iterations(self) -> int | None:
        return self.max_tool_iters

    @property
    def iteration_count(self) -> int:
        return self.tool_iter_count
