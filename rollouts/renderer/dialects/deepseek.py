"""The dialects of DeepSeek: with a JSON fence (V3, R1), without one (V3.1), and with tags (V3.2, V4, V4.1).

GigaChat 3.5 writes the tags under another prefix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import (
    MalformedCallError,
    argument_schema,
    checked_arguments,
    json_value,
    schema_types,
)
from rollouts.renderer.dialects.sections import SectionDialect, section, tagged_arguments

__all__ = ["DeepSeekV3", "DeepSeekV31", "DeepSeekV32", "DeepSeekV41", "GigaChat35"]

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31(SectionDialect):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``."""

    name = "deepseek_v3_1"
    marks = (_BEGIN, _CALL)
    block = section(_BEGIN, _END, _CALL)
    call = re.compile(
        f"{_CALL}(?P<head>.*?)(?:<｜tool▁sep｜>(?P<rest>.*?))?(?:(?P<close>{_CALL_END})|(?={_CALL})|\\Z)", re.DOTALL
    )
    closing = _CALL_END

    def name_of(self, call: re.Match[str]) -> str:
        return str(call["head"]).strip() if call["rest"] is not None else ""

    def arguments_of(self, call: re.Match[str]) -> str:
        """The JSON text of the arguments."""
        return str(call["rest"])

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        if call["rest"] is None or not self.name_of(call):
            reason = "the name of a tool and <｜tool▁sep｜> must come before the arguments"
            raise MalformedCallError(reason, "no_name")
        arguments = checked_arguments(json_value(self.arguments_of(call)))
        return ToolCall(self.name_of(call), arguments, raw=call[0])


class DeepSeekV3(DeepSeekV31):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, then the arguments in a ```` ```json ```` fence."""

    name = "deepseek_v3"

    def name_of(self, call: re.Match[str]) -> str:
        return str(call["rest"]).partition("\n")[0].strip() if call["rest"] is not None else ""

    def arguments_of(self, call: re.Match[str]) -> str:
        fenced = call["rest"].partition("\n")[2].strip()
        if not (fenced.startswith("```json") and fenced.endswith("```") and len(fenced) >= 10):
            raise MalformedCallError("the arguments must stand between ```json and ```, after the name and a newline")
        return str(fenced[len("```json") : -len("```")])


_VALUE = r'name="(?P<key>[^"\n]*)" string="(?P<string>true|false)">(?P<value>.*?)'


class DeepSeekV32(SectionDialect):
    """``<｜DSML｜invoke name="...">`` with parameters marked as string or JSON.

    A value that is marked as JSON is text if the schema allows only strings, or if it is not JSON and the schema allows
    a string. A call without arguments may be the tag ``<｜DSML｜invoke name="..."/>``. Other families write the same
    under another ``prefix`` of their tags.
    """

    name = "deepseek_v3_2"
    prefix: ClassVar[str] = "｜DSML｜"
    sections: ClassVar[tuple[str, ...]] = ("function_calls", "tool_calls")
    """The tags around a section of calls."""
    parameter: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        if "block" not in cls.__dict__:
            cls._compile()
        super().__init_subclass__()

    @classmethod
    def _compile(cls) -> None:
        invoke, closing = f"{cls.prefix}invoke ", f"</{cls.prefix}invoke>"
        tags = "|".join(map(re.escape, cls.sections))
        cls.closing = closing
        cls.marks = (*(f"<{cls.prefix}{tag}>" for tag in cls.sections), f"<{invoke}")
        cls.block = re.compile(
            rf"(?:<{cls.prefix}(?:{tags})>|(?=<{invoke}))(?P<body>.*?)(?:</{cls.prefix}(?:{tags})>|\Z)", re.DOTALL
        )
        cls.call = re.compile(
            rf'<{invoke}name="(?P<name>[^"\n]*)"(?:>(?P<body>.*?))?'
            rf"(?:(?P<close>(?(body){closing}|\s*/>))|(?=<{invoke})|\Z)",
            re.DOTALL,
        )
        cls.parameter = re.compile(
            rf"<{cls.prefix}parameter {_VALUE}</{cls.prefix}parameter>(?=\s*(?:<{cls.prefix}parameter |\Z))", re.DOTALL
        )

    def name_of(self, call: re.Match[str]) -> str:
        return call["name"]

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        if not call["name"]:
            raise MalformedCallError("the name of a tool is missing", "no_name")
        arguments = {
            argument["key"]: argument["value"]
            if argument["string"] == "true"
            else _json_or_string(tools, call["name"], argument["key"], argument["value"])
            for argument in tagged_arguments(self.parameter, call["body"] or "")
        }
        return ToolCall(call["name"], arguments, raw=call[0])


DeepSeekV32._compile()


class DeepSeekV41(DeepSeekV32):
    """DeepSeek V4.1: the same with a space before each name of a tag, as in ``<｜DSML｜ invoke name="...">``."""

    name = "deepseek_v4_1"
    prefix = "｜DSML｜ "
    sections = ("calls",)


class GigaChat35(DeepSeekV32):
    """GigaChat 3.5: the same under ``<｜GCML｜tool_calls>``."""

    name = "gigachat3_5"
    prefix = "｜GCML｜"
    sections = ("tool_calls",)


def _json_or_string(tools: Sequence[Tool], name: str, argument: str, text: str) -> Any:
    kinds = schema_types(argument_schema(tools, name, argument) or {})
    try:
        value = json_value(text)
    except MalformedCallError:
        if "string" in kinds:
            return text
        raise
    return text if kinds == {"string"} and not isinstance(value, str) else value
