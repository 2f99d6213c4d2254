"""The dialects with a tag for each parameter and values without quotes: Qwen3-Coder, Qwen3.5 and later, Nemotron 3 and
Step 3.5; Seed-OSS with another outer tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import MalformedCallError, typed_value, unreadable
from rollouts.renderer.dialects.llama_pythonic import json_or_literal
from rollouts.renderer.dialects.sections import tagged_arguments

__all__ = ["Qwen3Coder", "SeedOss"]

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]{1,200})>(?P<body>.*)</function>\s*\Z", re.DOTALL)
_NAME = re.compile(r"<function=([^>\n]{1,200})>")
# A closing tag counts only before another parameter or the end, so that a value may contain one.
_PARAMETER = re.compile(
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


def _block(tag: str) -> re.Pattern[str]:
    # The model sometimes omits the outer tag: that is a malformed call, not text.
    return re.compile(
        rf"<{tag}>(?P<body>.*?)(?:(?P<close></{tag}>)|(?=<{tag}>)|\Z)"
        rf"|<function=[^>\n]{{1,200}}>.*?(?:</function>\s*(?:</{tag}>)?|\Z)",
        re.DOTALL,
    )


class Qwen3Coder(BlockDialect):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    The first and the last newline of a value belong to the tags. Types come from the tool's schema. Values are JSON or
    Python literals: models of the family write ``True``, and servers read it (vLLM 0.33.0 and SGLang 0.5.23).
    """

    name = "qwen3_coder"
    tag: ClassVar[str] = "tool_call"
    marks = ("<tool_call>", "<function=")
    block = _block("tool_call")

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        match = _NAME.search(block[0])
        name = match.group(1).strip() if match else ""
        try:
            return [ToolCall(name, self._arguments(block, name, tools), raw=block[0])]
        except MalformedCallError as error:
            return [unreadable(block[0], error, name)]

    def _arguments(self, block: re.Match[str], name: str, tools: Sequence[Tool]) -> dict[str, object]:
        if block["body"] is None:
            raise MalformedCallError(f"<{self.tag}> before <function=...> is missing")
        if block["close"] is None:
            raise MalformedCallError(f"</{self.tag}> is missing", "unclosed")
        function = _FUNCTION.match(block["body"])
        if function is None:
            raise MalformedCallError("it must be one <function=name> with its </function> between the tags")
        pairs = list(tagged_arguments(_PARAMETER, function["body"]))
        for pair in pairs:
            if pair["value"].count("<parameter=") > pair["value"].count("</parameter>"):
                raise MalformedCallError(f'</parameter> is missing after the value of "{pair["key"]}"', "bad_arguments")
        return {p["key"]: typed_value(tools, name, p["key"], p["value"], json_or_literal) for p in pairs}


class SeedOss(Qwen3Coder):
    """The same in ``<seed:tool_call>``."""

    name = "seed_oss"
    tag = "seed:tool_call"
    marks = ("<seed:tool_call>", "<function=")
    block = _block("seed:tool_call")
    reasoning = ("<seed:think>", "</seed:think>")
