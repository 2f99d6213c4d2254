"""Synthetic replies of model families."""

from __future__ import annotations

from typing import Any

from rollouts.dtypes import Message, ToolCall
from rollouts.renderer import speak
from tests.families import FAMILIES, TOOLS


def test_a_blank_header_is_not_searched_in_the_reply(request: Any) -> None:
    """DeepSeek-V3.2 opens a reply after results with two newlines, which the reply may also contain."""
    renderer = FAMILIES["DeepSeek-V3.2"].make(request)
    call = ToolCall("look", {"at": "x"}, id="c00000001")
    history = [Message("user", "Well?"), Message("assistant", tool_calls=(call,))]
    history.append(Message("tool", "seen", tool_call_id=call.id, name=call.name))
    ids = speak(renderer, history, Message("assistant", "One.\n\nTwo."), [Message("user", "More?")], TOOLS)
    assert renderer.decode(ids).endswith("One.\n\nTwo.<｜end▁of▁sentence｜>")
