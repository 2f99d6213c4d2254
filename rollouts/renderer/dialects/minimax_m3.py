"""The dialect of MiniMax M3: arguments as nested tags, each after a mark of the namespace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.json import MalformedCallError, json_value, schema_types
from rollouts.renderer.dialects.sections import SectionDialect, section

__all__ = ["MiniMaxM3"]

_NS = "]<]minimax[>["
_TAG = re.compile(re.escape(_NS) + r"<(?P<slash>/?)(?P<name>[^<>\s]+)>")
_MAX_DEPTH = 50
_Node: TypeAlias = str | list[tuple[str, "_Node"]]
"""The text of a tag, or the tags in it."""


class MiniMaxM3(SectionDialect):
    """``<tool_call><invoke name="f"><key>text</key><tags><item>a</item></tags></invoke></tool_call>``, marked tags.

    Types come from the tool's schema. A value without a schema is JSON, or text if it is not JSON; tags with the name
    ``item`` are an array.
    """

    name = "minimax_m3"
    marks = (f"{_NS}<tool_call>", f'{_NS}<invoke name="')
    block = section(f"{_NS}<tool_call>", f"{_NS}</tool_call>", f'{_NS}<invoke name="')
    call = re.compile(
        rf'{re.escape(_NS)}<invoke name="(?P<name>[^"\n]*)">(?P<body>.*?)'
        rf"(?:(?P<close>{re.escape(_NS)}</invoke>)|(?={re.escape(_NS)}<invoke )|\Z)",
        re.DOTALL,
    )
    closing = f"{_NS}</invoke>"
    reasoning = ("<mm:think>", "</mm:think>")

    def name_of(self, call: re.Match[str]) -> str:
        return call["name"]

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        name = call["name"]
        if not name:
            raise MalformedCallError("the name of a tool is missing", "no_name")
        node = _node(call["body"])
        if isinstance(node, str):
            if node.strip():
                raise MalformedCallError("there is text that belongs to no argument", "bad_arguments")
            return ToolCall(name, raw=call[0])
        tool = next((tool for tool in tools if tool.name == name), None)
        return ToolCall(name, _fields(node, tool.parameters if tool else {}), raw=call[0])


def _node(body: str) -> _Node:
    """The tags in a value, from left to right, without recursion: a model may repeat one tag 10,000 times."""
    stack: list[tuple[str, list[tuple[str, _Node]], list[str]]] = [("", [], [])]
    at = 0
    for tag in _TAG.finditer(body):
        stack[-1][2].append(body[at : tag.start()])
        at = tag.end()
        if not tag["slash"]:
            if len(stack) > _MAX_DEPTH:
                raise MalformedCallError(f"the arguments are nested deeper than {_MAX_DEPTH}", "bad_arguments")
            stack.append((tag["name"], [], []))
            continue
        name, nodes, texts = stack.pop()
        if not stack or name != tag["name"]:
            raise MalformedCallError(f"{tag[0]} closes no open tag", "bad_arguments")
        stack[-1][1].append((name, _closed(nodes, texts)))
    if len(stack) > 1:
        raise MalformedCallError(f"{_NS}</{stack[-1][0]}> is missing", "bad_arguments")
    _, nodes, texts = stack[0]
    return _closed(nodes, [*texts, body[at:]])


def _closed(nodes: list[tuple[str, _Node]], texts: list[str]) -> _Node:
    text = "".join(texts)
    if _NS in text:
        raise MalformedCallError(f"{_NS} is followed by no tag", "bad_arguments")
    if nodes and text.strip():
        raise MalformedCallError(f"there is text between tags: {text.strip()[:80]!r}", "bad_arguments")
    return nodes or text


def _fields(nodes: list[tuple[str, _Node]], schema: Mapping[str, Any]) -> dict[str, Any]:
    properties, further = _properties(schema), schema.get("additionalProperties")
    fields: dict[str, Any] = {}
    for name, node in nodes:
        if name in fields:
            raise MalformedCallError(f'the key "{name}" is given more than once', "bad_arguments")
        schema = properties.get(name, further)
        fields[name] = _value(name, node, schema if isinstance(schema, Mapping) else {})
    return fields


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _value(name: str, node: _Node, schema: Mapping[str, Any]) -> Any:
    kinds = schema_types(schema)
    if isinstance(node, str):
        return _leaf(name, node, kinds)
    if all(child == "item" for child, _ in node) and "object" not in kinds and "item" not in _properties(schema):
        items = schema.get("items", {})
        return [_value(name, item, items if isinstance(items, Mapping) else {}) for _, item in node]
    if kinds and "object" not in kinds:
        raise MalformedCallError(f'the value of "{name}" must be of type {" or ".join(sorted(kinds))}', "bad_arguments")
    return _fields(node, schema)


def _leaf(name: str, text: str, kinds: set[str]) -> Any:
    if "null" in kinds and text.strip() in ("null", ""):
        return None
    if "string" in kinds:
        return text
    if not text.strip() and kinds & {"array", "object"}:
        return [] if "array" in kinds else {}
    try:
        return json_value(text)
    except MalformedCallError as error:
        if not kinds:
            return text
        reason = f'the value of "{name}" must be of type {" or ".join(sorted(kinds))}, and {error}'
        raise MalformedCallError(reason, "bad_arguments") from error
