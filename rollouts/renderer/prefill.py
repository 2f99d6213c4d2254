"""The prompt of a conversation that ends in an assistant message: the reply continues that turn.

Invariant: the text is the template's own rendering up to the end of the message, as with ``continue_final_message`` of
transformers. Nothing is written after it: no closing mark, no header. This module does not know token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rollouts.dtypes import Message, Tool
from rollouts.errors import ConfigError
from rollouts.renderer.reply_text import after_prompt
from rollouts.renderer.template import ChatTemplate

__all__ = ["continues_turn", "open_turn", "turn_start"]

_END = "qz7endqz7 "
"""The space shows whether the template trims the message."""


def continues_turn(messages: Sequence[Message]) -> bool:
    """Whether the reply to these messages continues their last turn."""
    return bool(messages) and messages[-1].role == "assistant"


def open_turn(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Return the conversation up to the end of its last message, an assistant message.

    Raises:
        ConfigError: the message has tool calls, or the template raises or does not write its content as it is.
    """
    last = messages[-1]
    if last.tool_calls:
        raise ConfigError.of(
            "messages[-1].tool_calls", last.tool_calls, "none: a turn with calls is complete, and its results follow"
        )
    marked = attrs.evolve(last, content=last.text + _END)
    text = template.render([*messages[:-1], marked], tools, generation_prompt=False)
    at = text.rfind(_END.strip())
    if at < 0 or not text[:at].rstrip().endswith(last.text.strip()):
        expected = f"text that chat template {template.name} writes unchanged at the end of its turn"
        raise ConfigError.of("messages[-1].content (an assistant message to continue)", last.text, expected)
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def turn_start(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool], text: str, opened: str
) -> int:
    """Return the position in the text of :func:`open_turn` at which a sampled reply would begin.

    ``opened`` is the mark at the start of a thought.
    """
    prompt = template.render(messages[:-1], tools)
    header = prompt[len(template.render(messages[:-1], tools, generation_prompt=False)) :]
    return len(text) - len(after_prompt(prompt, header, text, opened))
