"""What a dialect is: one way in which models write tool calls, read strictly and for meaning only.

Invariant: every block that looks like a call becomes a ToolCall, sound or with ``error`` set; nothing is repaired,
nothing is dropped, and what stands inside reasoning is never a call. No token id is ever made from what is read here.
This module knows no tokenizer and no template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from rollouts.dtypes import Tool, ToolCall

__all__ = [
    "BlockDialect",
    "Dialect",
    "MalformedCallError",
    "Reply",
    "json_call",
    "json_value",
    "malformed",
    "typed_value",
]


@attrs.frozen
class Reply:
    """The text of one assistant turn, taken apart."""

    content: str
    """What is neither reasoning nor a call; text after the last call included."""
    reasoning: str | None = None
    """What stood in the thinking block; ``None`` when there was no such block."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls in the order in which they were written, malformed ones among them."""


class Dialect(Protocol):
    """Text of an assistant turn to its meaning."""

    name: ClassVar[str]

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        """Read one turn, without its stop token.

        Args:
            text: the decoded reply, special tokens written out.
            tools: what the model was told of; dialects that write values untyped take the types from here.
            reasoning_open: whether the prompt ended inside a thinking block. ``None``: not known, and then a
                ``</think>`` that nothing opened ends one.
        """
        ...


class MalformedCallError(ValueError):
    """A call that cannot be read; the message is meant for the model."""


class BlockDialect:
    """A dialect whose calls stand in blocks of text with an opening mark.

    A subclass gives ``block``, a pattern that runs from the opening mark to the closing one or, where that is missing,
    to the end of the text, and :meth:`read`.
    """

    name: ClassVar[str]
    block: ClassVar[re.Pattern[str]]
    reasoning: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        """The calls of one block; at least one, malformed when nothing can be made of it."""
        raise NotImplementedError

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        opening, closing = self.reasoning
        thoughts: list[str] = []
        said: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if reasoning_open is None:
            end = text.find(closing)
            reasoning_open = end >= 0 and opening not in text[:end]
        if reasoning_open and not text.lstrip().startswith(opening):
            thought, _, _ = text.partition(closing)
            thoughts.append(thought)
            at = min(len(text), len(thought) + len(closing))
        # From left to right: a call quoted in a thought is no call, a thought quoted in an argument no thought.
        while at < len(text):
            block = self.block.search(text, at)
            think = text.find(opening, at)
            if think >= 0 and (block is None or think < block.start()):
                said.append(text[at:think])
                thought, _, _ = text[think + len(opening) :].partition(closing)
                thoughts.append(thought)
                at = min(len(text), think + len(opening) + len(thought) + len(closing))
            elif block is not None:
                said.append(text[at : block.start()])
                calls.extend(self.read(block, tools))
                at = max(block.end(), at + 1)
            else:
                said.append(text[at:])
                break
        if not thoughts and not calls:
            return Reply(text)
        return Reply(
            content="\n".join(part.strip() for part in said if part.strip()),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def malformed(raw: str, reason: str, name: str = "") -> ToolCall:
    """A call that could not be read, with the reason in words for the model."""
    return ToolCall(name=name, raw=raw, error=reason)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedCallError(f'the key "{twice}" is given more than once')
    return fields


def _no_constant(text: str) -> Any:
    raise MalformedCallError(f"{text} is not a JSON value")


def json_value(text: str) -> Any:
    """Read JSON strictly: no duplicate keys, no NaN or Infinity, nothing after the value.

    Raises:
        MalformedCallError: it is not such JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except MalformedCallError:
        raise
    except json.JSONDecodeError as error:
        raise MalformedCallError(f"it is not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"it is not valid JSON: {error}") from error


_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


def json_call(text: str, raw: str, *, arguments: str = "arguments", id_key: str | None = None) -> ToolCall:
    """Read ``{"name": ..., "arguments": {...}}``; what is not that comes back malformed.

    Args:
        text: the JSON.
        raw: the whole block, to be kept.
        arguments: the key of the arguments.
        id_key: the key of the call's id, in dialects that have one.
    """
    try:
        return _call_of(json_value(text), raw, arguments, id_key)
    except MalformedCallError as error:
        found = _NAME.search(text)
        return malformed(raw, f"The tool call could not be read: {error}.", found.group(1) if found else "")


def _call_of(value: Any, raw: str, key: str, id_key: str | None) -> ToolCall:
    if not isinstance(value, dict):
        raise MalformedCallError(f'it must be one JSON object with "name" and "{key}", not {_kind(value)}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCallError('"name" is missing or is not the name of a tool')
    if key not in value:
        raise MalformedCallError(f'"{key}" is missing; write {{}} when the tool takes none')
    number = value.get(id_key) if id_key else None
    return ToolCall(name, checked_arguments(value[key], key), id=number if isinstance(number, str) else "", raw=raw)


def checked_arguments(value: Any, key: str = "arguments") -> Mapping[str, Any]:
    """The arguments of a call, which are a JSON object and nothing else.

    Raises:
        MalformedCallError: they are something else.
    """
    if isinstance(value, str):
        raise MalformedCallError(f'"{key}" is a string; write the JSON object itself, without quotes around it')
    if not isinstance(value, dict):
        raise MalformedCallError(f'"{key}" must be a JSON object, not {_kind(value)}')
    return value


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "a number")


def typed_value(tools: Sequence[Tool], name: str, argument: str, text: str) -> Any:
    """Read an argument that is written without quotes, as the tool's schema has it.

    Text stays text where the schema allows a string, and where tool or argument are unknown. All else must be JSON.

    Raises:
        MalformedCallError: the schema wants no string and the text is no JSON.
    """
    tool = next((tool for tool in tools if tool.name == name), None)
    schema = tool.parameters.get("properties", {}).get(argument) if tool is not None else None
    if not isinstance(schema, Mapping):
        return text
    kinds = _schema_types(schema)
    if "null" in kinds and text.strip() == "null":
        return None
    if "string" in kinds:
        return text
    try:
        return json_value(text.strip())
    except MalformedCallError as error:
        if not kinds:
            return text
        raise MalformedCallError(
            f'the value of "{argument}" must be of type {" or ".join(sorted(kinds))}, and {error}'
        ) from error


def _schema_types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds |= _schema_types(part)
    if not kinds and any(isinstance(value, str) for value in schema.get("enum", ())):
        kinds.add("string")
    return kinds
