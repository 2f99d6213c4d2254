"""Strict parsers for the contents of a call: JSON, and values without quotes. Nothing is repaired."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.dtypes import Fault, Tool, ToolCall

__all__ = [
    "MalformedCallError",
    "argument_schema",
    "call_in_json",
    "checked_arguments",
    "either_call",
    "json_call",
    "json_calls",
    "json_prefix",
    "json_value",
    "name_in",
    "schema_types",
    "typed_value",
    "unclosed",
    "unreadable",
]

_NAME = re.compile(r'"(?:tool_)?name"\s*:\s*"([^"\\]*)"')


class MalformedCallError(ValueError):
    """A malformed call: the message is shown to the model, the fault is counted."""

    def __init__(self, message: str, fault: Fault = "bad_form") -> None:
        super().__init__(message)
        self.fault: Fault = fault


def unreadable(raw: str, error: MalformedCallError, name: str = "") -> ToolCall:
    """A malformed call, with an error message for the model."""
    return ToolCall(name, raw=raw, error=f"The tool call could not be read: {error}.", fault=error.fault)


def unclosed(raw: str, mark: str, name: str = "") -> ToolCall:
    """A call whose closing mark is missing."""
    return unreadable(raw, MalformedCallError(f"{mark} is missing", "unclosed"), name)


def name_in(text: str) -> str:
    """The name in the JSON of a malformed call, or ``""``."""
    match = _NAME.search(text)
    return match.group(1) if match else ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedCallError(f'the key "{twice}" is given more than once', "bad_arguments")
    return fields


def _no_constant(text: str) -> Any:
    raise MalformedCallError(f"{text} is not a JSON value", "not_json")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise MalformedCallError(f"{text} is too large for a number", "not_json")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def json_prefix(text: str, at: int = 0) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``at``; return it with its end position.

    Strict: no duplicate keys, no NaN or Infinity, also none that is written as 1e999.

    Raises:
        MalformedCallError: there is no valid value.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except MalformedCallError:
        raise
    except json.JSONDecodeError as error:
        reason = f"it is not valid JSON: {error.msg} at character {error.pos + 1 - at}"
        raise MalformedCallError(reason, "not_json") from error
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"it is not valid JSON: {error}", "not_json") from error


def json_value(text: str) -> Any:
    """Parse one JSON value with white space around it.

    Raises:
        MalformedCallError: the text is not one JSON value.
    """
    text = text.strip()
    value, end = json_prefix(text)
    if end != len(text):
        raise MalformedCallError(f"it is not valid JSON: Extra data at character {end + 1}", "not_json")
    return value


def json_call(text: str, raw: str, *, arguments: str = "arguments", id_key: str | None = None) -> ToolCall:
    """Parse ``{"name": ..., "arguments": {...}}``; any other text is a malformed call.

    Args:
        text: the JSON.
        raw: the whole block, stored in the call.
        arguments: the key of the arguments.
        id_key: the key of the call's id, in dialects that have one.
    """
    try:
        return call_in_json(json_value(text), raw, arguments=arguments, id_key=id_key)
    except MalformedCallError as error:
        return unreadable(raw, error, name_in(text))


def call_in_json(
    value: Any, raw: str, *, name: str = "name", arguments: str = "arguments", id_key: str | None = None
) -> ToolCall:
    """Convert a JSON value to a call.

    Args:
        value: the JSON value.
        raw: the text of the call, stored in it.
        name: the key of the tool's name.
        arguments: the key of the arguments.
        id_key: the key of the call's id, in dialects that have one.

    Raises:
        MalformedCallError: the value is not a call.
    """
    key = arguments
    if not isinstance(value, dict):
        raise MalformedCallError(f'it must be one JSON object with "{name}" and "{key}", not {_kind(value)}')
    tool = value.get(name)
    if not isinstance(tool, str) or not tool:
        raise MalformedCallError(f'"{name}" is missing or is not the name of a tool', "no_name")
    if key not in value:
        raise MalformedCallError(f'"{key}" is missing; write {{}} when the tool takes none', "no_arguments")
    call_id = value.get(id_key) if id_key else None
    return ToolCall(tool, checked_arguments(value[key], key), id=call_id if isinstance(call_id, str) else "", raw=raw)


def either_call(value: Any, raw: str) -> ToolCall:
    """Convert a JSON value with ``parameters`` or, without them, ``arguments`` to a call.

    Raises:
        MalformedCallError: the value is not a call.
    """
    other = isinstance(value, dict) and "arguments" in value and "parameters" not in value
    return call_in_json(value, raw, arguments="arguments" if other else "parameters")


def json_calls(value: Any, raw: str, convert: Callable[[Any, str], ToolCall] = call_in_json) -> list[ToolCall]:
    """Convert a JSON array of calls, or a single call; at least one call, malformed if there is no valid one.

    Args:
        value: the JSON value.
        raw: the text, stored in each call.
        convert: converts one call; raises :class:`MalformedCallError`.
    """
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        try:
            calls.append(convert(entry, raw))
        except MalformedCallError as error:
            names = [entry.get(key) for key in ("name", "tool_name")] if isinstance(entry, dict) else []
            calls.append(unreadable(raw, error, next((name for name in names if isinstance(name, str)), "")))
    return calls or [unreadable(raw, MalformedCallError("there is no call in it"))]


def checked_arguments(value: Any, key: str = "arguments") -> Mapping[str, Any]:
    """The arguments of a call, checked to be a JSON object.

    Raises:
        MalformedCallError: they are anything else.
    """
    if isinstance(value, str):
        reason = f'"{key}" is a string; write the JSON object itself, without quotes around it'
        raise MalformedCallError(reason, "string_arguments")
    if not isinstance(value, dict):
        raise MalformedCallError(f'"{key}" must be a JSON object, not {_kind(value)}', "bad_arguments")
    return value


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "a number")


def argument_schema(tools: Sequence[Tool], name: str, argument: str) -> Mapping[str, Any] | None:
    """The schema of an argument; ``None`` if the tool or the argument is unknown."""
    tool = next((tool for tool in tools if tool.name == name), None)
    schema = tool.parameters.get("properties", {}).get(argument) if tool is not None else None
    return schema if isinstance(schema, Mapping) else None


def typed_value(
    tools: Sequence[Tool], name: str, argument: str, text: str, parse: Callable[[str], Any] = json_value
) -> Any:
    """Parse an argument that is written without quotes, by the type in the tool's schema.

    The text is the value if the schema allows a string, or if the tool or the argument is unknown. Otherwise it must be
    a value in the dialect's notation; if the schema names no type, a string or a number is one only as JSON, since
    ``'a' 'b'`` and ``0012`` are texts as well.

    Args:
        tools: the tools in the prompt.
        name: the name of the tool.
        argument: the name of the argument.
        text: the written value.
        parse: the parser of values that are not strings; raises :class:`MalformedCallError`.

    Raises:
        MalformedCallError: the schema allows no string, and the text cannot be parsed.
    """
    schema = argument_schema(tools, name, argument)
    if schema is None:
        return text
    kinds = schema_types(schema)
    if "null" in kinds and text.strip() == "null":
        return None
    if "string" in kinds:
        return text
    try:
        value = parse(text.strip())
        if not kinds and isinstance(value, str | int | float) and not isinstance(value, bool):
            return json_value(text)
        return value
    except MalformedCallError as error:
        if not kinds:
            return text
        reason = f'the value of "{argument}" must be of type {" or ".join(sorted(kinds))}, and {error}'
        raise MalformedCallError(reason, "bad_arguments") from error


def schema_types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it names none."""
    kinds = {kind for kind in [schema.get("type"), *_list(schema, "type")] if isinstance(kind, str)}
    for part in (*_list(schema, "anyOf"), *_list(schema, "oneOf")):
        kinds |= schema_types(part) if isinstance(part, Mapping) else set()  # True is a schema, too
    if not kinds and any(isinstance(value, str) for value in _list(schema, "enum")):
        kinds.add("string")
    return kinds


def _list(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The list in a schema, which may be another's, and invalid; empty if there is none."""
    value = schema.get(name)
    return value if isinstance(value, list | tuple) else ()
