"""A reply as a model of the template's family would sample it, and a whole conversation of such: to show and to test.

Invariant: the words are the template's own; what only a model decides (which stop token, where a thought ends that the
prompt has opened) is chosen as the template's next turn expects it. Never used on a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rollouts.dtypes import Message, TokenColumn, Tool, ToolCall, packed_tokens
from rollouts.errors import ConfigError
from rollouts.renderer.renderer import Renderer
from rollouts.renderer.reply_text import reply_text

__all__ = ["ExamplePart", "conversation", "speak"]


@attrs.frozen
class ExamplePart:
    """One run of tokens of a conversation."""

    role: str
    tokens: TokenColumn
    sampled: bool


def speak(
    renderer: Renderer, history: Sequence[Message], reply: Message, new: Sequence[Message], tools: Sequence[Tool] = ()
) -> TokenColumn:
    """Ids of a reply, its stop token included where the family has one.

    Args:
        renderer: the family.
        history: what came before; up to where the reply begins.
        reply: what is said.
        new: what will come after it.
        tools: the tools.

    Raises:
        ConfigError: the template cannot render this conversation.
    """
    text = reply_text(renderer.render, renderer.stop_texts, history, reply, tools)
    if text is None:
        raise ConfigError.of(
            "reply", reply, f"one that the chat template of {renderer.name!r} writes behind its prompt"
        )
    ids = renderer.encode(text)
    if len(ids) and int(ids[-1]) in renderer.stop_token_ids:
        return ids
    following = renderer.bridge([*history, reply], new, tools=tools, tail=[])
    stops = [int(following[0])] if int(following[0]) in renderer.stop_token_ids else []
    return packed_tokens([*ids.tolist(), *stops])


def conversation(renderer: Renderer, tools: Sequence[Tool] = ()) -> list[ExamplePart]:
    """A short conversation with a tool round and a second question, as it would be stored: context and replies.

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
        asking = Message("assistant", tool_calls=(call,), reasoning="I have to look.")
        turns.append((asking, Message("tool", "sunny", tool_call_id=call.id, name=call.name)))
    turns.append((Message("assistant", "It is sunny.", reasoning="I know it."), Message("user", "And in Oslo?")))
    pieces = [ExamplePart("opening", renderer.opening(history, tools), False)]
    for reply, new in turns:
        try:
            ids = speak(renderer, history, reply, [new], tools)
        except ConfigError:
            if not reply.tool_calls:
                raise
            continue  # a template that leaves calls out
        history.append(reply)
        bridge = renderer.bridge(history, [new], tools=tools, tail=ids)
        history.append(new)
        pieces += [ExamplePart("assistant", ids, True), ExamplePart(new.role, bridge, False)]
    return pieces
