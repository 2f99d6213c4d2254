"""The dialect of Solar Open: calls with an id, a name and JSON arguments, each after a mark."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollouts.dtypes import Tool
from rollouts.renderer.dialects.base import Reply
from rollouts.renderer.dialects.sections import NumberedCalls, section

__all__ = ["Solar"]

_BEGIN, _END = "<|tool_call:begin|>", "<|tool_call:end|>"
_WRAPPING = ("<|begin|>assistant", "<|content|>", "<|end|>")


class Solar(NumberedCalls):
    """``<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{...}<|tool_call:end|>``.

    A thought is a separate message, from ``<|think|>`` to ``<|end|>``.
    """

    name = "solar"
    marks = ("<|tool_calls|>", _BEGIN)
    block = section("<|tool_calls|>", "<|calls|>", _BEGIN)
    call = re.compile(
        r"<\|tool_call:begin\|>(?P<id>.*?)(?:<\|tool_call:name\|>(?P<name>.*?))?"
        r"(?:<\|tool_call:args\|>(?P<arguments>.*?))?(?:(?P<close><\|tool_call:end\|>)|(?=<\|tool_call:begin\|>)|\Z)",
        re.DOTALL,
    )
    closing = _END
    about_name = "<|tool_call:name|> and the name of a tool are missing"
    arguments_mark = "<|tool_call:args|>"
    reasoning = ("<|think|>", "<|end|>")

    def name_of(self, call: re.Match[str]) -> str:
        return (call["name"] or "").strip()

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        reply = super().parse(text, tools=tools, reasoning_open=reasoning_open)
        content = reply.content
        for mark in _WRAPPING:
            content = content.replace(mark, "")
        return reply if content == reply.content else Reply(content.strip(), reply.reasoning, reply.tool_calls)
