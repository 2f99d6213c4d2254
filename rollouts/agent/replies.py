"""The replies of an episode: where the last one begins in its branch, and its message.

Invariant: a reply is parsed from its sampled ids, each time that it is needed: the ids are the record, the message is a
view of them. Each tool call has an id, unique in its reply; a call that cannot run has an error.

This module samples nothing and runs no tool.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import attrs

from rollouts.agent.prior_turns import PriorTurns
from rollouts.dtypes import Completion, Message, Prompt, Tool, ToolCall, as_messages
from rollouts.renderer import Renderer
from rollouts.trajectory import Trajectory

__all__ = ["Replies"]

_UNPARSED = Message("assistant")


@attrs.define(eq=False)
class Replies:
    """The number of replies, and the position of the last one."""

    renderer: Renderer
    count: int = 0
    """Number of replies, including those before the episode."""
    call_count: int = 0
    """Number of tool calls in all replies, including calls that did not run."""
    start: int = 0
    """Position of the first token of the last assistant turn in its branch."""
    part_start: int = 0
    """Position of the first token that the environment has not received: ``start``, unless the environment continued
    the turn."""
    continues: bool = False
    """Whether the next completion continues the last reply."""

    def begin(self, length: int, seed: int | None, prompt: Prompt) -> int | None:
        """Begin or continue a reply after ``length`` tokens; return the seed of its request."""
        if not self.continues:
            self.count += 1
            self.start = self.part_start = length
        position = f"{self.count}+{length}" if self.continues else str(self.count)  # each part has another seed
        self.continues = False
        if seed is None:
            return None
        replacement = f"/{prompt.replacement}" if prompt.replacement else ""
        return zlib.crc32(f"{seed}/{prompt.index}/{position}{replacement}".encode()) & 0x7FFFFFFF

    def continue_after(self, start: int, part_start: int) -> None:
        """Let the next completion continue the turn that begins at ``start``."""
        self.start, self.part_start, self.continues = start, part_start, True

    def add(
        self, trajectory: Trajectory, completion: Completion, tools: Sequence[Tool], temperature: float | None
    ) -> Message:
        """Append the sampled tokens, and parse the reply that they complete."""
        continues = self.start < self.part_start == len(trajectory)
        if continues:
            trajectory.messages.pop()  # the turn so far; if the prompt begins it, it has no message yet
        trajectory.add_reply(completion, _UNPARSED, continues=continues, temperature=temperature)
        reply, counters = self._parse(trajectory, tools)
        trajectory.messages[-1] = self._whole_turn(trajectory, reply, tools)
        for name in counters:
            trajectory.count(name)
        trajectory.count("tool_calls", len(reply.tool_calls))
        return reply

    def adopt(self, prior: PriorTurns, prompt: Prompt) -> list[Message]:
        """Take over the replies of prior turns; return the messages before the reply that the episode begins with."""
        messages = list(prior.trajectory.messages)
        self.count = sum(message.role == "assistant" for message in messages)
        self.call_count = sum(len(message.tool_calls) for message in messages)
        asked = prior.state == "asked" and prior.part_start is None
        before = messages if asked else messages[:-1]
        self.start = prior.reply_start - (0 if asked else self._begun_by_prompt(prompt, before))
        self.part_start = self.start if prior.part_start is None else prior.part_start
        return before

    def drop_last(self, trajectory: Trajectory) -> None:
        """Remove the message of the last reply, which is parsed again from its ids."""
        self.call_count -= len(trajectory.messages.pop().tool_calls)

    def parse_again(self, trajectory: Trajectory, tools: Sequence[Tool]) -> Message:
        """Parse the last reply again, in place of its message."""
        self.drop_last(trajectory)
        reply, _ = self._parse(trajectory, tools)
        trajectory.messages.append(self._whole_turn(trajectory, reply, tools))
        return reply

    def turn_until(self, trajectory: Trajectory, stop: int | None, tools: Sequence[Tool]) -> Message:
        """The text of the last assistant turn as a message without calls."""
        return attrs.evolve(self._parsed(trajectory, self.start, stop, tools), tool_calls=())

    def _parse(self, trajectory: Trajectory, tools: Sequence[Tool]) -> tuple[Message, list[str]]:
        """The part of the last reply that the environment has not received, and the counters to increase."""
        reply = self._parsed(trajectory, self.part_start, None, tools)
        counters: list[str] = []
        if not reply.tool_calls:
            return reply, counters
        known = [tool.name for tool in tools]
        calls: list[ToolCall] = []
        used_ids: set[str] = set()
        for call in reply.tool_calls:
            call_id, number = call.id, self.call_count
            if call_id in used_ids:
                counters.append("duplicate_call_ids")
            while not call_id or call_id in used_ids:  # the model may have copied an id of this form
                call_id, number = f"call{number:05d}", number + 1
            used_ids.add(call_id)
            self.call_count += 1
            error, counted = fault_of(call, known)
            counters += counted
            if error is not None and call.error is None:  # it quotes a name, which may have marks of the template
                error = self.renderer.quotable(error)
            calls.append(ToolCall(call.name, call.arguments, call_id, call.raw, error, call.fault))
        return Message(reply.role, reply.content, calls, reasoning=reply.reasoning), counters

    def _parsed(self, trajectory: Trajectory, start: int, stop: int | None, tools: Sequence[Tool]) -> Message:
        tokens = trajectory.tokens
        return self.renderer.parse(tokens[start:stop], tools=tools, prompt=tokens[:start])

    def _whole_turn(self, trajectory: Trajectory, reply: Message, tools: Sequence[Tool]) -> Message:
        """The whole assistant turn that ends with ``reply``: its earlier parts have no calls."""
        if self.part_start == self.start:
            return reply
        return attrs.evolve(self.turn_until(trajectory, None, tools), tool_calls=reply.tool_calls)

    def _begun_by_prompt(self, prompt: Prompt, before: Sequence[Message]) -> int:
        """The number of tokens of the last turn that are in the prompt, which may end in an assistant message."""
        given = as_messages(prompt.prompt)
        first = given and given[-1].role == "assistant" and self.count == sum(m.role == "assistant" for m in given)
        if not first:
            return 0
        opening = [*before, given[-1]]
        return len(self.renderer.opening(opening)) - self.renderer.reply_start(opening)


def fault_of(call: ToolCall, known: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Why a call cannot run, ``None`` if it can, and the counters of that; ``known``: the names of the tools."""
    if call.error is not None:
        return call.error, ("malformed_tool_calls", f"malformed_tool_calls/{call.fault or 'bad_form'}")
    if call.name in known:
        return None, ()
    listed = f"the tools are: {', '.join(known)}" if known else "there are no tools here"
    return f"there is no tool {call.name!r}; {listed}", ("unknown_tool_calls",)
