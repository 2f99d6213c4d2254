"""The dialect of FunctionGemma: ``key:value`` pairs, with ``<escape>`` as quotation mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollouts.dtypes import Tool
from rollouts.renderer.dialects.gemma import Gemma
from rollouts.renderer.dialects.json import typed_value
from rollouts.renderer.dialects.llama_pythonic import json_or_literal

__all__ = ["FunctionGemma"]


class FunctionGemma(Gemma):
    """``<start_function_call>call:name{key:<escape>text<escape>,count:3}<end_function_call>``.

    Some templates quote every value: a quoted value takes its type from the tool's schema, and is JSON or a Python
    literal if that allows no string.
    """

    name = "functiongemma"
    marks = ("<start_function_call>",)
    block = re.compile(
        r"<start_function_call>(?P<body>.*?)(?:(?P<close><end_function_call>)|(?=<start_function_call>)|\Z)", re.DOTALL
    )
    reasoning = ("<think>", "</think>")
    head = re.compile(r"\s*call:(?P<name>[^\s{}<]+)(?P<arguments>\{)")
    form = "call:name{...}"
    closing = "<end_function_call>"
    quote = "<escape>"

    def typed(self, arguments: dict[str, Any], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
        return {
            key: typed_value(tools, name, key, value, json_or_literal) if isinstance(value, str) else value
            for key, value in arguments.items()
        }
