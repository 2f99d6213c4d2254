"""A model with random replies: tool calls with arguments that fit their schemas, numbers, words.

Invariant: equal seeds and equal tools yield equal replies. It reads schemas only, no descriptions of tools.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollouts.dtypes import Message, Tool, ToolCall

__all__ = ["RandomModel", "example", "schema_problems"]

_WORDS = ("a", "yes", "Paris", "naïve café", "1 + 2", "print(1)", "x" * 60, "日本", "")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_DEPTH = 6


class RandomModel:
    """Random replies without a model.

    Args:
        seed: seed of the replies.
        calls: probability of a tool call if there are tools, from 0 to 1.
    """

    def __init__(self, seed: int, *, calls: float = 0.9) -> None:
        self._rng = random.Random(seed)
        self._calls = calls

    def reply(self, tools: Sequence[Tool]) -> Message:
        """The next reply."""
        rng = self._rng
        if not tools or rng.random() >= self._calls:
            return Message("assistant", rng.choice([str(rng.randint(-3, 120)), rng.choice(_WORDS) or "ok"]))
        tool_calls = []
        for number in range(rng.choice((1, 1, 1, 2))):
            chosen = rng.choice(tools)
            tool_calls.append(ToolCall(chosen.name, example(chosen.parameters, rng), id=f"call_{number:05d}"))
        return Message("assistant", "", tool_calls)


def example(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """A random value that fits the types, choices and bounds of a JSON schema; any value if it has none."""
    return _value(schema, schema, rng, 0)


def _value(schema: Any, root: Mapping[str, Any], rng: random.Random, depth: int) -> Any:
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    for choices in ("anyOf", "oneOf", "allOf"):
        if schema.get(choices):
            return _value(rng.choice(list(schema[choices])), root, rng, depth + 1)
    kind = schema.get("type")
    kind = rng.choice(list(kind)) if isinstance(kind, list) and kind else kind
    if kind == "object" or (kind is None and "properties" in schema):
        wanted = set(schema.get("required") or ())
        entries = (schema.get("properties") or {}).items()
        chosen = [(name, inner) for name, inner in entries if name in wanted or rng.random() < 0.5]
        return {name: _value(inner, root, rng, depth + 1) for name, inner in chosen}
    if kind == "array":
        count = rng.randint(schema.get("minItems", 0), schema.get("maxItems", schema.get("minItems", 0) + 3))
        return [_value(schema.get("items", {}), root, rng, depth + 1) for _ in range(count)]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -10) + ("exclusiveMinimum" in schema))
        high = schema.get("maximum", max(100, low))
        return rng.randint(int(low), int(high)) if kind == "integer" else round(rng.uniform(low, high), 2)
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else rng.choice(_WORDS)


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Resolve a ``$ref``; ``None`` if its target is missing."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        found: Any = root
        for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return None


def schema_problems(tool: Tool) -> list[str]:
    """Describe the errors and omissions in a tool's schema, one text each."""
    problems = [] if tool.description.strip() else ["no description"]
    return problems + list(_problems(tool.parameters, tool.parameters, "parameters", 0))


def _problems(schema: Any, root: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
    if isinstance(schema, Mapping) and "$ref" in schema:
        if _resolved(schema, root) is None:
            yield f"{path}: $ref {schema['$ref']!r} points to nothing"
        return
    if not isinstance(schema, Mapping):
        yield f"{path}: a schema is an object, this is {type(schema).__name__}"
        return
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for kind in kinds:
        if kind not in _TYPES:
            yield f"{path}: type {kind!r} is none of JSON Schema"
    if not kinds and not any(key in schema for key in ("enum", "const", "anyOf", "oneOf", "allOf", "properties")):
        yield f"{path}: no type"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield f"{path}.properties: an object is expected"
        return
    for name in schema.get("required") or ():
        if name not in properties:
            yield f"{path}: {name!r} is required and not among the properties"
    if depth < _DEPTH:
        for name, inner in properties.items():
            yield from _problems(inner, root, f"{path}.{name}", depth + 1)
        if "items" in schema:
            yield from _problems(schema["items"], root, f"{path}[]", depth + 1)
