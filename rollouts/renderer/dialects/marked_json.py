"""The dialects whose calls are JSON between two marks. They differ only in the marks and the keys.

Invariant: the JSON value ends a block, not the closing mark, so that a string may contain any mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import (
    MalformedCallError,
    call_in_json,
    checked_arguments,
    json_calls,
    json_prefix,
    name_in,
    unclosed,
    unreadable,
)

__all__ = [
    "Apertus",
    "Apriel",
    "CommandR",
    "CommandR7B",
    "GigaChat",
    "Granite",
    "Granite20B",
    "Granite32",
    "Hunyuan",
    "InternLM",
    "MarkedJson",
    "MiniMaxM1",
    "NemotronV2",
    "Phi4Mini",
    "XLam",
]

_SPACE = re.compile(r"\s+")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"\s*:')
_NEXT_OBJECT = re.compile(r"\s*(?=\{)")


class MarkedJson(BlockDialect):
    """An opening mark, JSON, a closing mark. The JSON is one call, or an array of calls.

    A subclass defines ``name`` and ``marks``, or ``block``: a pattern for the opening mark and the white space after
    it, by default for any of ``marks``.
    """

    closing: ClassVar[str] = ""
    """The mark after the JSON; empty if the JSON alone ends the block."""
    closing_is_optional: ClassVar[bool] = False
    only_arrays: ClassVar[bool] = False
    """Whether one call, too, must be in an array."""
    several: ClassVar[bool] = False
    """Whether further JSON values may follow in the same block."""
    name_key: ClassVar[str] = "name"
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)
    """The key of the arguments. If there are several, each call has one of them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "marks" in vars(cls) and "block" not in vars(cls):
            cls.block = re.compile(rf"(?:{'|'.join(map(re.escape, cls.marks))})\s*")

    def convert(self, value: Any, raw: str) -> ToolCall:
        """The call in a JSON value.

        Raises:
            MalformedCallError: the value is not a call.
        """
        fields = value if isinstance(value, dict) else {}
        keys = [key for key in self.argument_keys if key in fields] or self.argument_keys[:1]
        if len(keys) > 1:
            raise MalformedCallError(f"it must have only one of {' and '.join(keys)}", "bad_arguments")
        return call_in_json(value, raw, name=self.name_key, arguments=keys[0])

    def name_of(self, raw: str) -> str:
        """The name in a block that may be malformed, or ``""``."""
        return name_in(raw)

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, start, at = block.string, block.start(), block.end()
        try:
            value, at = json_prefix(text, at)
            if self.only_arrays and not isinstance(value, list):
                raise MalformedCallError("calls must be in one JSON array")
            values = value if isinstance(value, list) else [value]
            while self.several and (more := _NEXT_OBJECT.match(text, at)):
                value, at = json_prefix(text, more.end())
                values = [*values, value]
        except MalformedCallError as error:
            end, closed = self._end(text, block)
            raw = text[start:end]
            if self.closing and not self.closing_is_optional and not closed:
                return [unclosed(raw, self.closing, self.name_of(raw))], end
            return [unreadable(raw, error, self.name_of(raw))], end
        space = _SPACE.match(text, at)
        after = space.end() if space else at
        if self.closing and text.startswith(self.closing, after):
            at = after + len(self.closing)
        elif self.closing and not self.closing_is_optional:
            end, closed = self._end(text, block)
            raw = text[start:end]
            if not closed:
                return [unclosed(raw, self.closing, self.name_of(raw))], end
            reason = f"there is text between the JSON and {self.closing}"
            return [unreadable(raw, MalformedCallError(reason), self.name_of(raw))], end
        return json_calls(values, text[start:at], self.convert), at

    def _end(self, text: str, block: re.Match[str]) -> tuple[int, bool]:
        """The end of a malformed block (its closing mark, the next block or the end of the text), and whether that mark
        is there.
        """
        following = self.block.search(text, block.end())
        if following and following.end() == block.end():  # an opening mark without characters
            following = self.block.search(text, block.end() + 1)
        limit = following.start() if following else len(text)
        end = text.find(self.closing, block.end(), limit) if self.closing else -1
        return (end + len(self.closing), True) if end >= 0 else (limit, False)


class Hunyuan(MarkedJson):
    """Hunyuan A13B: ``<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>``; text in ``<answer>``."""

    name = "hunyuan"
    wrapping: ClassVar[tuple[str, ...]] = ("<answer>", "</answer>")
    marks = ("<tool_calls>",)
    closing = "</tool_calls>"


class Apriel(Hunyuan):
    """Apriel: as Hunyuan; reasoning ends at ``[BEGIN FINAL RESPONSE]``."""

    name = "apriel"
    reasoning = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
    wrapping = ("[END FINAL RESPONSE]",)


class MiniMaxM1(Hunyuan):
    """MiniMax M1: ``<tool_calls>`` with one JSON object a line."""

    name = "minimax_m1"
    several = True
    wrapping = ()


class NemotronV2(MarkedJson):
    """Nemotron Nano v2: ``<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>``."""

    name = "nemotron_v2"
    marks = ("<TOOLCALL>",)
    closing = "</TOOLCALL>"


class Phi4Mini(MarkedJson):
    """Phi-4-mini: ``functools[{"name": ..., "arguments": {...}}]``, or the array after ``<|tool_call|>``."""

    name = "phi4_mini"
    marks = ("functools[", "<|tool_call|>")
    block = re.compile(r"(?:functools(?=\[)|<\|tool_call\|>)\s*")
    closing = "<|/tool_call|>"
    closing_is_optional = True


class CommandR7B(MarkedJson):
    """Command R7B and Command A: ``<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>``.

    ``tool_call_id`` is not stored: it counts calls in one reply, and the ids of a rollout must differ.
    """

    name = "command_r7b"
    marks = ("<|START_ACTION|>",)
    closing = "<|END_ACTION|>"
    name_key = "tool_name"
    argument_keys = ("parameters",)
    reasoning = ("<|START_THINKING|>", "<|END_THINKING|>")
    wrapping = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class CommandR(MarkedJson):
    r"""Command R and R+: ``Action:`` and an array of ``{"tool_name": ..., "parameters": {...}}`` in a JSON fence.

    ``directly-answer`` is a tool in this notation: without such a tool in the environment, it is an unknown tool.
    """

    name = "command_r"
    marks = ("Action:",)
    block = re.compile(r"Action:\s*```json\s*")
    closing = "```"
    name_key = "tool_name"
    argument_keys = ("parameters",)


class GigaChat(MarkedJson):
    """GigaChat 3: one object after ``<|function_call|>`` or after a header of the role ``function call``."""

    name = "gigachat"
    marks = ("<|function_call|>", "function call<|role_sep|>", "<|message_sep|>")
    block = re.compile(r"(?:<\|function_call\|>|(?:<\|message_sep\|>\s*)?function call<\|role_sep\|>)\s*")
    closing = "<|message_sep|>"
    closing_is_optional = True


class InternLM(MarkedJson):
    """InternLM 2 and 3: ``<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>``."""

    name = "internlm"
    marks = ("<|action_start|>",)
    block = re.compile(r"<\|action_start\|>\s*<\|plugin\|>\s*")
    closing = "<|action_end|>"
    argument_keys = ("parameters", "arguments")


class Apertus(MarkedJson):
    """Apertus: ``<|tools_prefix|>[{"name of the tool": {...}}]<|tools_suffix|>``."""

    name = "apertus"
    marks = ("<|tools_prefix|>",)
    closing = stop_replaces = "<|tools_suffix|>"
    reasoning = ("<|inner_prefix|>", "<|inner_suffix|>")

    def name_of(self, raw: str) -> str:
        name = _FIRST_KEY.search(raw)
        return name[1] if name else ""

    def convert(self, value: Any, raw: str) -> ToolCall:
        if not isinstance(value, dict) or len(value) != 1 or "" in value:
            raise MalformedCallError("a call must be one JSON object with the name of a tool as its only key")
        ((name, arguments),) = value.items()
        return ToolCall(name, checked_arguments(arguments, name), raw=raw)


class Granite(MarkedJson):
    """Granite 3: an array of calls after ``<|tool_call|>``, or after ``<tool_call>`` as ordinary text."""

    name = "granite"
    marks = ("<|tool_call|>", "<tool_call>")
    block = re.compile(r"<(\|?)tool_call\1>\s*")
    only_arrays = True


class Granite32(Granite):
    """Granite 3.2: the same, with two sentences around a thought."""

    name = "granite_3_2"
    reasoning = ("Here is my thought process:", "Here is my response:")


class Granite20B(MarkedJson):
    """Granite 20B function calling: ``<function_call> {"name": ..., "arguments": {...}}``, several in a row."""

    name = "granite_20b"
    marks = ("<function_call>",)


class XLam(MarkedJson):
    """xLAM: a bare array of calls, also in a JSON fence, after ``[TOOL_CALLS]`` or in ``<tool_call>``.

    At the start of the answer, every array whose first object begins with a name is read as calls; after text, only
    one whose first object has a name, then arguments. Any other array is an answer in JSON.
    """

    name = "xlam"
    block = re.compile(
        r'(?:\A|(?<=</think>))\s*(?:```(?:json)?\s*|\[TOOL_CALLS\]\s*|<tool_call>\s*)?(?=\[\s*\{\s*"name"\s*:)'
        r'|(?:```(?:json)?\s*|\[TOOL_CALLS\]\s*|<tool_call>\s*)?(?=\[\s*\{\s*"name"\s*:\s*"[^"\\]*"\s*,\s*"arguments"\s*:)'
    )
    closing = "```"
    closing_is_optional = True
    wrapping = ("</tool_call>",)
