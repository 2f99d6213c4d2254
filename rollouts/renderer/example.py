"""Synthetic replies, as a model of the template's family would sample them, for display and tests.

Invariant: the text is the template's own rendering. A model's decisions (the stop token, the end of a thinking block
that the prompt opened) are as the template expects them before its next turn. Rollouts never use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rollouts.dtypes import Message, TokenColumn, Tool, ToolCall, packed_tokens
from rollouts.errors import ConfigError
from rollouts.renderer.dialects import thought_marks
from rollouts.renderer.renderer import Renderer
from rollouts.renderer.reply_text import reply_text

__all__ = ["ExamplePart", "conversation", "speak"]


@attrs.frozen
class ExamplePart:
    """Consecutive tokens of one role in a conversation."""

    role: str
    tokens: TokenColumn
    sampled: bool


def speak(
    renderer: Renderer, history: Sequence[Message], reply: Message, new: Sequence[Message], tools: Sequence[Tool] = ()
) -> TokenColumn:
    """Return the ids of a reply, with its stop token if the family has one; int32.

    Args:
        renderer: the renderer of the family.
        history: the messages before the reply.
        reply: the assistant message.
        new: the messages after the reply.
        tools: the tools.

    Raises:
        ConfigError: the template cannot render this conversation.
    """
    text = reply_text(renderer.render, renderer.stop_texts, history, reply, tools, thought_marks(renderer.dialect))
    if text is None:
        raise ConfigError.of(
            "reply", reply, f"a reply that the chat template of {renderer.name!r} writes behind its prompt"
        )
    ids = renderer.encode(text)
    if len(ids) and int(ids[-1]) in renderer.stop_token_ids:
        return ids
    following = renderer.bridge([*history, reply], new, tools=tools, tail=[])
    stops = [int(following[0])] if int(following[0]) in renderer.stop_token_ids else []
    return packed_tokens([*ids.tolist(), *stops])


def conversation(renderer: Renderer, tools: Sequence[Tool] = ()) -> list[ExamplePart]:
    """Return a short example conversation: a round of tools (if there are tools), a reply, and a second question.

    Raises:
        ConfigError: the template cannot render it.
    """
    history = [Message("system", "You are a careful assistant."), Message("user", "What is the weather in Rome?")]
    try:
        renderer.opening(history, tools)
    except ConfigError:  # a template without system prompts
        del history[0]
    turns: list[tuple[Message, Message]] = []
    if tools:
        tool = tools[0]
        names = list(tool.parameters.get("properties", {})) or ["x"]
        call = ToolCall(tool.name, {names[0]: "Rome"}, id="call00000")
        calling = Message("assistant", tool_calls=(call,), reasoning="I have to look.")
        turns.append((calling, Message("tool", "sunny", tool_call_id=call.id, name=call.name)))
    turns.append((Message("assistant", "It is sunny.", reasoning="I know it."), Message("user", "And in Oslo?")))
    pieces = [ExamplePart("opening", renderer.opening(history, tools), False)]
    for reply, new in turns:
        try:
            ids = speak(renderer, history, reply, [new], tools)
        except ConfigError:
            if not reply.tool_calls:
                raise
            continue  # the template leaves calls out
        history.append(reply)
        bridge = renderer.bridge(history, [new], tools=tools, tail=ids)
        history.append(new)
        pieces += [ExamplePart("assistant", ids, True), ExamplePart(new.role, bridge, False)]
    return pieces
