"""The dialect of Kimi K3: messages, calls and arguments in tags of special tokens, with typed values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import MalformedCallError, checked_arguments, json_value
from rollouts.renderer.dialects.sections import SectionDialect, tagged_arguments

__all__ = ["KimiK3"]

_OPEN, _CLOSE, _SEP = (re.escape(mark) for mark in ("<|open|>", "<|close|>", "<|sep|>"))
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
_ATTRIBUTES = rf"(?P<attributes>(?:(?!{_SEP}|{_OPEN}).)*)"
_ARGUMENT = re.compile(
    rf'{_OPEN}argument key="(?P<key>[^"]*)" type="(?P<type>[a-z]+)"{_SEP}(?P<value>.*?){_CLOSE}argument{_SEP}'
    rf"(?=\s*(?:{_OPEN}argument |\Z))",
    re.DOTALL,
)
_JSON = re.compile(rf'\s*{_OPEN}json type="object"{_SEP}(?P<json>.*){_CLOSE}json{_SEP}\s*', re.DOTALL)
_NAME = re.compile(r'\btool="(?P<name>[^"]*)"')
_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "number": (int, float),
    "null": type(None),
    "object": dict,
    "array": list,
}


def _tag(mark: str, name: str) -> str:
    return f"<|{mark}|>{name}<|sep|>"


class KimiK3(SectionDialect):
    """``<|open|>call tool="f" index="1"<|sep|>``, and arguments as ``<|open|>argument key="k" type="string"<|sep|>``.

    A value of type ``string`` is text, any other is JSON of its type. Answers stand in ``response``.
    """

    name = "kimi_k3"
    marks = (_tag("open", "tools"), "<|open|>call ")
    block = re.compile(rf"(?:{_TOOLS}|(?={_OPEN}call ))(?P<body>.*?)(?:{_TOOLS_END}|\Z)", re.DOTALL)
    call = re.compile(
        rf"{_OPEN}call {_ATTRIBUTES}{_SEP}(?P<body>.*?)(?:(?P<close>{_CLOSE}call{_SEP})|(?={_OPEN}call )|\Z)", re.DOTALL
    )
    closing = _tag("close", "call")
    reasoning = (_tag("open", "think"), _tag("close", "think"))
    wrapping = (_tag("open", "response"), _tag("close", "response"), _tag("close", "message"))

    def name_of(self, call: re.Match[str]) -> str:
        name = _NAME.search(call["attributes"])
        return _unescaped(name["name"]) if name else ""

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        name = self.name_of(call)
        if not name:
            raise MalformedCallError('tool="..." is missing in the tag of the call', "no_name")
        whole = _JSON.fullmatch(call["body"])
        if whole is not None:
            return ToolCall(name, checked_arguments(json_value(whole["json"])), raw=call[0])
        pairs = tagged_arguments(_ARGUMENT, call["body"])
        return ToolCall(
            name, {_unescaped(p["key"]): _value(p["key"], p["type"], p["value"]) for p in pairs}, raw=call[0]
        )


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _value(key: str, kind: str, text: str) -> Any:
    if kind == "string":
        return text
    value = json_value(text)
    expected = _TYPES.get(kind)
    if expected is None or not isinstance(value, expected) or (kind == "number" and isinstance(value, bool)):
        raise MalformedCallError(f'the value of "{key}" is not of type {kind}', "bad_arguments")
    return value
