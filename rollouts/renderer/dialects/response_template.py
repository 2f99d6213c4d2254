"""The dialect that a model's publisher declares: ``response_template`` in tokenizer_config.json.

The declaration names regions of a reply by their marks, and how the text of each is read: text, JSON, tags or lines
(transformers 5.23.0, utils/chat_parsing). This module reads it without transformers, whose older versions do not know
it, and as strictly as every dialect. Three things differ from transformers' parser: a call that cannot be read is
malformed and does not end the parse, JSON keeps its types, and no text between regions is dropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from rollouts.dtypes import Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.dialects.base import Reply
from rollouts.renderer.dialects.json import (
    MalformedCallError,
    argument_schema,
    checked_arguments,
    json_value,
    name_in,
    schema_types,
    unclosed,
    unreadable,
)

__all__ = ["DeclaredDialect"]

_CALLS, _CONTENT, _THOUGHTS = "tool_calls", "content", ("thinking", "reasoning_content", "reasoning")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = re.compile(r"(?<=[{,])\s*(\w+)\s*:")
_UNTYPED = ("xml-inline", "kv-lines")
"""Readers whose values are text, and get their types from the tool's schema."""


@attrs.frozen
class _Region:
    name: str
    opening: re.Pattern[str] | None
    closing: re.Pattern[str] | None
    closing_mark: str
    reader: str
    options: Mapping[str, Any]
    join: str
    transform: Any
    each: bool


class DeclaredDialect:
    """A parser built from a ``response_template``.

    Args:
        declared: the declaration.

    Raises:
        ConfigError: it has a form that is not known; the message names the field.
    """

    name: ClassVar[str] = "response_template"
    reads_prefix: ClassVar[bool] = True
    """Whether :meth:`parse` takes the end of the prompt: a template may write the start of a region there."""

    def __init__(self, declared: Any) -> None:
        fields = declared.get("fields") if isinstance(declared, Mapping) else None
        if not isinstance(fields, Mapping) or not fields or declared.get("version", 1) != 1:
            raise ConfigError.of("response_template", declared, 'a mapping of version 1 with "fields"')
        self._anchor, _ = _pattern("response_template", declared, "start_anchor")
        self._regions = [_region(name, field) for name, field in fields.items()]
        implicit = [region for region in self._regions if region.opening is None]
        if len(implicit) > 1:
            names = [region.name for region in implicit]
            raise ConfigError.of("response_template.fields", names, "at most one field without a mark that opens it")
        self._implicit = implicit[0] if implicit else None
        self.reasoning = _thought_marks(fields)

    def parse(
        self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None, prefix: str = ""
    ) -> Reply:
        start = self._start(prefix)
        if not start and reasoning_open:
            start = self.reasoning[0]
        whole = start + text
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        join = "\n"
        for region, opened, body, raw, closed in self._parts(whole):
            if region is not None and region.name == _CALLS:
                calls += _calls(region, opened, body, raw, closed, tools)
            elif region is not None and region.name in _THOUGHTS:
                thoughts.append(body.strip())
            elif region is None or region.name == _CONTENT:
                content.append(body)
                join = join if region is None else region.join
        if not thoughts and not calls:
            return Reply("".join(content).strip() if start or len(content) != 1 else content[0])
        parts = [part.strip() for part in content if part.strip()]
        return Reply(join.join(parts), "\n".join(thoughts) if thoughts else None, tuple(calls))

    def _start(self, prefix: str) -> str:
        """The text of the turn that the prompt already has."""
        anchors = list(self._anchor.finditer(prefix)) if self._anchor is not None else []
        return prefix[anchors[-1].end() :] if anchors else ""

    def _parts(self, text: str) -> Iterator[tuple[_Region | None, Mapping[str, str], str, str, bool]]:
        """The regions from left to right: region, groups of its opening, body, whole text, whether it is closed."""
        at = 0
        opening = {region.name: _search(region.opening, text, 0) for region in self._regions if region.opening}
        while at < len(text):
            found: tuple[_Region, re.Match[str]] | None = None
            for region in self._regions:
                match = opening.get(region.name)
                if match is not None and match.start() < at:
                    match = opening[region.name] = _search(region.opening, text, at)
                if match is not None and (found is None or _key(match) < _key(found[1])):
                    found = region, match
            limit = found[1].start() if found else len(text)
            if at < limit:
                closing = self._implicit.closing if self._implicit else None
                end = closing.search(text, at, limit) if closing else None
                if end is not None and end.end() > at:
                    yield self._implicit, {}, text[at : end.start()], text[at : end.end()], True
                    at = end.end()
                    continue
                yield self._implicit, {}, text[at:limit], text[at:limit], True
            if found is None:
                return
            region, match = found
            end = _search(region.closing, text, match.end())
            stop, after = (end.start(), end.end()) if end else (len(text), len(text))
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            yield region, groups, text[match.end() : stop], text[match.start() : after], end is not None
            at = max(after, match.end(), at + 1)


def _search(pattern: re.Pattern[str] | None, text: str, at: int) -> re.Match[str] | None:
    return None if pattern is None else pattern.search(text, at)


def _key(match: re.Match[str]) -> tuple[int, int]:
    """The earliest mark first, of two at one place the longer."""
    return match.start(), match.start() - match.end()


# -- calls ------------------------------------------------------------------------------------------------------------


def _calls(
    region: _Region, groups: Mapping[str, str], body: str, raw: str, closed: bool, tools: Sequence[Tool]
) -> list[ToolCall]:
    if not closed and region.closing is not None:
        return [unclosed(raw, region.closing_mark, groups.get("name", "") or name_in(body))]
    try:
        value = _read(region.reader, region.options, body)
        values = [value]
        if region.each:
            if not isinstance(value, list):
                raise MalformedCallError("the calls must be in an array")
            values = [_transformed(region.transform, {**groups, **_object(entry)}) for entry in value]
        elif region.transform is not None:
            values = [_transformed(region.transform, {**groups, "content": value})]
        elif isinstance(value, list):
            values = value
        untyped = region.reader in _UNTYPED and "value_parser" not in region.options
        return [_call(entry, raw, tools if untyped else ()) for entry in values] or [
            unreadable(raw, MalformedCallError("there is no call in it"))
        ]
    except MalformedCallError as error:
        return [unreadable(raw, error, groups.get("name", "") or name_in(body))]


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MalformedCallError("a call must be a JSON object")
    return value


def _call(value: Any, raw: str, tools: Sequence[Tool]) -> ToolCall:
    """The call in a value of the chat format, with or without ``function`` around its name and arguments."""
    entry = _object(value)
    function = _object(entry.get("function", entry))
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError('"name" is missing or is not the name of a tool', "no_name")
    if arguments is None:
        raise MalformedCallError("the arguments are missing", "no_arguments")
    if isinstance(arguments, str):  # declared as text
        arguments = json_value(arguments) if arguments.strip() else {}
    fields = {key: _typed(tools, name.strip(), key, value) for key, value in checked_arguments(arguments).items()}
    id = entry.get("id")
    return ToolCall(name.strip(), fields, id=id if isinstance(id, str) else "", raw=raw)


def _typed(tools: Sequence[Tool], name: str, argument: str, value: Any) -> Any:
    """The value in the first type of the schema that it has; text if it has none."""
    schema = argument_schema(tools, name, argument) if isinstance(value, str) else None
    if schema is None or "string" in (kinds := schema_types(schema)) or not kinds:
        return value
    if value.strip() in ("true", "false", "null") or kinds & {"integer", "number", "object", "array"}:
        try:
            return json_value(value)
        except MalformedCallError:
            return value
    return value


# -- readers of a region's text ---------------------------------------------------------------------------------------


def _read(reader: str, options: Mapping[str, Any], text: str) -> Any:
    return _READERS[reader](text, options)


def _plain(text: str, options: Mapping[str, Any]) -> str:
    return text.strip() if options.get("strip", True) else text


def _json(text: str, options: Mapping[str, Any]) -> Any:
    """JSON with other quotation marks or bare keys, where these are declared."""
    strings: list[str] = []

    def keep(match: re.Match[str]) -> str:
        strings.append(match[1])
        return f"\x01{len(strings) - 1}\x02"

    working = text
    for opening, closing in options.get("string_delims", ()):
        if "\x01" in text or "\x02" in text:
            raise MalformedCallError("it has control characters", "not_json")
        working = re.sub(re.escape(opening) + r"(.*?)" + re.escape(closing), keep, working, flags=re.DOTALL)
    if options.get("unquoted_keys"):
        working = _BARE_KEY.sub(r'"\1":', working)
    for number, string in enumerate(strings):
        working = working.replace(f"\x01{number}\x02", json.dumps(string))
    try:
        return json_value(working)
    except MalformedCallError:
        if options.get("allow_non_json"):
            return _plain(text, options)
        raise


def _nested(text: str, options: Mapping[str, Any]) -> Any:
    parser = options.get("value_parser")
    return text if parser is None else _read(parser.get("name", "text"), parser.get("args", {}), text)


def _tags(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for match in re.finditer(options["tag_pattern"], text, re.DOTALL):
        key, value = match["key"], _nested(match.groupdict().get("value") or "", options)
        if key not in found:
            found[key] = value
        elif options.get("merge_duplicates"):
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        else:
            raise MalformedCallError(f'the argument "{key}" is given more than once', "bad_arguments")
    return found


def _lines(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    pairs = (line.partition(options.get("kv_sep", ":")) for line in text.split(options.get("line_sep", "\n")))
    return {_plain(key, options): _nested(_plain(value, options), options) for key, mark, value in pairs if mark}


def _number(convert: Callable[[str], Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    def read(text: str, options: Mapping[str, Any]) -> Any:
        try:
            number = convert(text.strip())
        except ValueError:
            number = math.nan
        if not -math.inf < number < math.inf:
            raise MalformedCallError(f"{text.strip()[:80]!r} is not a number", "bad_arguments")
        return number

    return read


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _plain,
    "int": _number(int),
    "float": _number(float),
    "bool": lambda text, _: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
}


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """The declared form, with each ``{placeholder}`` replaced by a value."""
    if isinstance(transform, Mapping):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise MalformedCallError(f'"{key}" is missing', "no_name" if key == "name" else "no_arguments")
        value = value[key]
    return value


# -- the declaration --------------------------------------------------------------------------------------------------


def _region(name: str, field: Any) -> _Region:
    scope = f"response_template.fields[{name!r}]"
    if not isinstance(field, Mapping):
        raise ConfigError.of(scope, field, "a mapping")
    reader, options = field.get("content", "text"), field.get("content_args", {})
    readers = [(reader, options)]
    if isinstance(options, Mapping) and isinstance(options.get("value_parser"), Mapping):
        readers.append((options["value_parser"].get("name", "text"), options["value_parser"].get("args", {})))
    for each, arguments in readers:
        if each not in _READERS or not isinstance(arguments, Mapping):
            raise ConfigError.of(f"{scope}.content", each, f"one of {', '.join(_READERS)}, with a mapping as arguments")
        if each == "xml-inline":
            groups = _compiled(scope, arguments.get("tag_pattern")).groupindex
            if "key" not in groups:
                raise ConfigError.of(f"{scope}.tag_pattern", arguments.get("tag_pattern"), "a group named key")
    opening, _ = _pattern(scope, field, "open")
    closing, mark = _pattern(scope, field, "close")
    join, each = field.get("join"), bool(field.get("transform_each"))
    return _Region(
        name,
        opening,
        closing,
        mark,
        reader,
        options,
        join if isinstance(join, str) else "\n",
        field.get("transform"),
        each,
    )


def _pattern(scope: str, field: Mapping[str, Any], key: str) -> tuple[re.Pattern[str] | None, str]:
    """The compiled mark of a key: one text, a list of texts, or under ``key_pattern`` a regular expression."""
    if f"{key}_pattern" in field:
        return _compiled(f"{scope}.{key}_pattern", field[f"{key}_pattern"]), str(field[f"{key}_pattern"])
    if key not in field:
        return None, ""
    texts = [field[key]] if isinstance(field[key], str) else field[key]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError.of(f"{scope}.{key}", field[key], "a mark, or a list of marks")
    pattern = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    return re.compile(pattern, re.DOTALL), texts[0]


def _compiled(scope: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError.of(scope, pattern, f"a regular expression ({error})") from error


def _thought_marks(fields: Mapping[str, Any]) -> tuple[str, str]:
    """The marks around a thought; empty if they are not plain texts."""
    field: Mapping[str, Any] = next((fields[name] for name in _THOUGHTS if name in fields), {})
    marks = [field.get(key) for key in ("open", "close")]
    first, last = (mark[0] if isinstance(mark, list) and mark else mark for mark in marks)
    return (first, last) if isinstance(first, str) and isinstance(last, str) else ("", "")
