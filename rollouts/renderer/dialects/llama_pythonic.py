"""The dialects with calls in Python syntax: a list (LFM2, and Llama 3.2 and 4 with a suitable prompt), lines (OLMo 3).

Only literals are parsed, and nothing is evaluated. Python's parser is not used: it warns about text that models
write, and its versions accept different literals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import (
    MalformedCallError,
    either_call,
    json_calls,
    json_prefix,
    json_value,
    name_in,
    unreadable,
)

__all__ = ["LlamaPythonic", "Olmo3", "json_or_literal"]

_NAME = re.compile(r"\s*([A-Za-z_]\w*(?:[.-]\w+)*)\s*")
_MARK = re.compile(r"\s*([\[\](){},:=])\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_STRING = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')""", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|([0-7]{1,3})|(.))"
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_END = re.compile(r"\s*(?:<\|python_end\|>|<\|tool_call_end\|>)")
_QUOTE = re.compile(r"\s*(['\"])")
_LAST_QUOTE = {
    quote: re.compile(rf"{quote}(?=\s*(?:,\s*[A-Za-z_]\w*\s*=|\)\s*(?:\]|,\s*[A-Za-z_][\w.-]*\s*\()))")
    for quote in "'\""
}
_SPACE = re.compile(r"\s+")
_LFM2, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON = re.compile(r"\s*\[?\s*\{")
_CLOSING = "</function_calls>"
_MAX_DEPTH = 50


class LlamaPythonic(BlockDialect):
    """``[get_weather(city="Paris"), now()]``, at the start of the reply or after ``<|python_start|>``.

    Arguments are named literals; ``true``, ``false`` and ``null`` are literals too. A string may contain
    newlines, which LFM2's template writes as they are. A set is read as an array. After LFM2's mark, calls may also be
    a JSON array, which LFM2 writes if its system prompt asks for it; SGLang reads both (0.5.23,
    function_call/lfm2_detector.py).
    """

    name = "llama_pythonic"
    block = re.compile(
        r"<\|python_start\|>|<\|tool_call_start\|>|(?:\A|(?<=</think>))\s*(?=\[\s*[A-Za-z_][\w.-]*\s*\()"
    )

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        return self.take(block, tools)[0]

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, start = block.string, block.end()
        if block[0] == _LFM2 and _JSON.match(text, start):
            return _json_calls(text, start)
        calls: list[ToolCall] = []
        try:
            at = start = _expected(text, start, "[")
            while (mark := _MARK.match(text, at)) is None or mark[1] != "]":
                start = at
                call, at = _call(text, at)
                at = _comma(text, at, "]")
                calls.append(call)
        except MalformedCallError as error:
            name = _NAME.match(text, start)
            return [*calls, unreadable(text[start:], error, name[1] if name else "")], len(text)
        calls, at = _to_end(text, mark.end(1), calls)
        return calls or [unreadable(text[block.start() : at], MalformedCallError("there is no call in it"))], at


def _json_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    try:
        value, at = json_prefix(text, start + len(text[start:]) - len(text[start:].lstrip()))
    except MalformedCallError as error:
        return [unreadable(text[start:], error, name_in(text[start:]))], len(text)
    return _to_end(text, at, json_calls(value, text[start:at], either_call))


def _to_end(text: str, at: int, calls: list[ToolCall]) -> tuple[list[ToolCall], int]:
    """The calls, and the position after their closing mark; text before LFM2's mark is malformed, and no content."""
    if end := _END.match(text, at):
        return calls, end.end()
    begin = text.find(_LFM2, at)
    stop = text.find(_LFM2_END, at, begin if begin >= 0 else len(text))
    if stop < 0:
        return calls, at
    error, stray = MalformedCallError("there is text behind the calls that belongs to none"), text[at:stop]
    return [*calls, unreadable(stray.strip(), error, name_in(stray))], stop + len(_LFM2_END)


class Olmo3(BlockDialect):
    """``<function_calls>``, one call in Python syntax a line, ``</function_calls>``."""

    name = "olmo3"
    marks = ("<function_calls>",)
    block = re.compile(r"<function_calls>\s*")

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        text, at, end = block.string, block.end(), 0
        calls: list[ToolCall] = []
        while not text.startswith(_CLOSING, at):
            try:
                if calls and "\n" not in text[end:at]:
                    raise MalformedCallError("each call must be on a separate line")
                call, end = _call(text, at)
            except MalformedCallError as error:
                close = text.find(_CLOSING, at)
                stop = close + len(_CLOSING) if close >= 0 else len(text)
                name = _NAME.match(text, at)
                cut = MalformedCallError(f"{_CLOSING} is missing", "unclosed") if close < 0 else error
                return [*calls, unreadable(text[at:stop] or block[0], cut, name[1] if name else "")], stop
            calls.append(call)
            space = _SPACE.match(text, end)
            at = space.end() if space else end
        at += len(_CLOSING)
        return calls or [unreadable(text[block.start() : at], MalformedCallError("there is no call in it"))], at


def json_or_literal(text: str) -> Any:
    """Parse one JSON value or one Python literal with white space around it.

    Raises:
        MalformedCallError: the text is neither of them.
    """
    try:
        return json_value(text)
    except MalformedCallError as error:
        try:
            value, end = _value(text, 0, 0)
        except MalformedCallError:
            raise error from None
        if text[end:].strip():
            raise error from None
        return value


def _error(text: str, at: int, expected: str) -> MalformedCallError:
    if not text[at:].strip():
        return MalformedCallError(f"it ends where {expected} is missing", "unclosed")
    return MalformedCallError(f"it has {text[at : at + 20]!r} where {expected} should be")


def _expected(text: str, at: int, mark: str) -> int:
    match = _MARK.match(text, at)
    if match is None or match[1] != mark:
        raise _error(text, at, mark)
    return match.end()


def _call(text: str, at: int) -> tuple[ToolCall, int]:
    """One call, and its end position."""
    name = _NAME.match(text, at)
    if name is None:
        raise MalformedCallError(f"it has {text[at : at + 20]!r} where the name of a tool should be", "no_name")
    start, at = name.start(1), _expected(text, name.end(), "(")
    arguments: dict[str, Any] = {}
    while True:
        mark = _MARK.match(text, at)
        if mark is not None and mark[1] == ")":
            return ToolCall(name[1], arguments, raw=text[start : mark.end(1)]), mark.end(1)
        key = _NAME.match(text, at)
        equals = _MARK.match(text, key.end()) if key else None
        if key is None or equals is None or equals[1] != "=":
            if not text[key.end() if key else at :].strip():
                raise _error(text, len(text), ")")
            raise MalformedCallError(f"{text[at : at + 20]!r} is not an argument with its name", "bad_arguments")
        if key[1] in arguments:
            raise MalformedCallError(f'the argument "{key[1]}" is given more than once', "bad_arguments")
        arguments[key[1]], at = _argument(text, equals.end())


def _argument(text: str, at: int) -> tuple[Any, int]:
    """The value of an argument, and the position after its comma or at the end of the arguments.

    LFM2 writes shell commands in quotes with the same quotes inside. Where that is not a literal, a string ends at the
    first quote after which the next argument begins, or the call and then the list end or continue.
    """
    try:
        value, end = _value(text, at, 0)
        return value, _comma(text, end, ")")
    except MalformedCallError:
        quote = _QUOTE.match(text, at)
        last = _LAST_QUOTE[quote[1]].search(text, quote.end()) if quote else None
        if quote is None or last is None:
            raise
        return _characters(text[quote.end() : last.start()]), _comma(text, last.end(), ")")


def _comma(text: str, at: int, closing: str) -> int:
    """The position after a comma, or at the closing mark of the list."""
    mark = _MARK.match(text, at)
    if mark is None or mark[1] not in ("," + closing):
        raise _error(text, at, f"{closing} or ,")
    return mark.end() if mark[1] == "," else at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """One literal, and its end position."""
    if depth > _MAX_DEPTH:
        raise MalformedCallError(f"its values are nested more than {_MAX_DEPTH} deep", "bad_arguments")
    if string := _STRING.match(text, at):
        whole, end = _unescaped(string), string.end()
        while more := _STRING.match(text, end):  # as in Python, adjacent strings are one
            whole, end = whole + _unescaped(more), more.end()
        return whole, end
    if number := _NUMBER.match(text, at):
        return _number(number[0]), number.end()
    word = _NAME.match(text, at)
    if word is not None and word[1] in _CONSTANTS:
        return _CONSTANTS[word[1]], word.end(1)
    mark = _MARK.match(text, at)
    if mark is not None and mark[1] in "[(":
        return _items(text, mark.end(), "]" if mark[1] == "[" else ")", depth)
    if mark is not None and mark[1] == "{":
        return _entries(text, mark.end(), depth)
    if not text[at:].strip() or text[at : at + 1] in ("'", '"'):
        raise _error(text, len(text), "a value")
    raise MalformedCallError(f"{text[at : at + 20]!r} is not a literal value", "bad_arguments")


def _items(text: str, at: int, closing: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while (mark := _MARK.match(text, at)) is None or mark[1] != closing:
        item, at = _value(text, at, depth + 1)
        items.append(item)
        at = _comma(text, at, closing)
    return items, mark.end(1)


def _entries(text: str, at: int, depth: int) -> tuple[dict[str, Any] | list[Any], int]:
    """A dict; or a set, which is a list in JSON."""
    entries: dict[str, Any] = {}
    start = at
    while (mark := _MARK.match(text, at)) is None or mark[1] != "}":
        key, at = _value(text, at, depth + 1)
        if not entries and (after := _MARK.match(text, at)) is not None and after[1] in ",}":
            return _items(text, start, "}", depth)
        if not isinstance(key, str) or key in entries:
            raise MalformedCallError(f"the key {key!r} is not a string, or occurs more than once", "bad_arguments")
        entries[key], at = _value(text, _expected(text, at, ":"), depth + 1)
        at = _comma(text, at, "}")
    return entries, mark.end(1)


def _number(text: str) -> int | float:
    try:
        number = int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
    except ValueError as error:  # more digits than Python converts
        raise MalformedCallError(f"this is not a number: {error}", "bad_arguments") from error
    if isinstance(number, float) and math.isinf(number):
        raise MalformedCallError(f"{text} is too large for a number", "bad_arguments")
    return number


def _unescaped(string: re.Match[str]) -> str:
    return _characters(string[1] if string[1] is not None else string[2])


def _characters(text: str) -> str:
    """The characters of the text of a string, with its escapes."""

    def character(escape: re.Match[str]) -> str:
        hexadecimal = escape[1] or escape[2] or escape[3]
        if hexadecimal or escape[4]:
            return chr(int(hexadecimal, 16) if hexadecimal else int(escape[4], 8))
        if escape[5] in "xuUN":
            raise MalformedCallError(f"{escape[0]!r} in a string is not a character", "bad_arguments")
        return _ESCAPES.get(escape[5], escape[0])

    return _ESCAPE.sub(character, text)
