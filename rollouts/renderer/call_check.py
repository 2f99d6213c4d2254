"""Whether a dialect reads the tool calls that a chat template writes.

Invariant: calls count as read only if each form that the template writes (one call, two in parallel, nested arguments,
a call after text) parses without an error, with the same name and arguments. If the template writes no call, calls
count as not read. This module does not know model families.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.dialects import Dialect, Reply, parse_stopped, thought_marks
from rollouts.renderer.reply_text import Render, opens_thought, reply_text

__all__ = ["CallCheck", "Calls", "Reader", "dialect_reads", "difference_of"]

CallCheck: TypeAlias = Literal["checked", "unchecked"]
"""Whether a run is refused if the dialect does not read the calls that the template writes."""

Calls: TypeAlias = Literal["read", "one a turn", "not read", "unchecked"]
"""``read``: the dialect reads all calls that the template writes. ``one a turn``: the same, and the template writes at
most one call a turn. ``not read``: a call of the model could be parsed as text, or as malformed. ``unchecked``: the
same, and the user accepts it (:data:`CallCheck`)."""

_HISTORY = (Message("user", "userone"),)
_SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "object", "description": "Where.", "additionalProperties": True},
        "x": {"type": "string", "description": "Any."},
    },
}
_ONE = {"x": "argumentone"}
_FORMS: tuple[tuple[str, str, tuple[Mapping[str, Any], ...]], ...] = (
    ("one call", "", (_ONE,)),
    ("two calls in parallel", "", (_ONE, {"x": "argumenttwo"})),
    ("a call with nested arguments", "", ({"place": {"name": "Ulm", "at": [48, 23]}, **_ONE},)),
    ("a call after text", "textone", (_ONE,)),
)
_IDS = ("call{:05d}", "functions.{name}:{}")
"""Formats of ids: nine characters (some templates require that), and ids from which a dialect reads the name."""
_EXCERPT = 200
_PREFIX = 100
"""Characters at the end of a prompt that show how it begins the reply."""


@attrs.frozen
class Reader:
    """The functions that write and parse the calls of one template."""

    render: Render
    stops: Sequence[str]
    respell: Callable[[str], str]
    """Encode and decode text."""
    dialect: Dialect


def dialect_reads(reader: Reader, name: str) -> tuple[Calls, str]:
    """Return the verdict on calls of a tool of this name; if they are not read, also the text and what was parsed."""
    first = _with_ids(reader, name, _IDS[0])
    others = (_with_ids(reader, name, ids) for ids in _IDS[1:])
    return first if first[0] != "not read" else next((result for result in others if result[0] != "not read"), first)


def _with_ids(reader: Reader, name: str, ids: str) -> tuple[Calls, str]:
    tools = (Tool(name, "Probes.", _SCHEMA),)
    parallel = False
    for form, content, arguments in _FORMS:
        calls = _calls_of(name, arguments, ids)
        reply = Message("assistant", content, calls)
        try:
            text = reply_text(reader.render, reader.stops, _HISTORY, reply, tools, thought_marks(reader.dialect))
            why = "it leaves the call out of the turn"
        except ConfigError as error:
            text, why = None, str(error)
        if text is None and form == "one call":
            return "not read", f"the template writes no call that could be compared ({why})"
        if text is None or (content and _in_two_turns(text, reader.stops)):  # a form that the template does not have
            continue
        read = _read(reader, text, tools)
        if [(call.name, call.arguments, call.error) for call in read] != [(c.name, c.arguments, None) for c in calls]:
            return "not read", f"{form} to {name!r} is written {_short(text)} and read as {_describe(read)}"
        parallel = parallel or len(calls) > 1
    return ("read" if parallel else "one a turn"), ""


def _calls_of(name: str, arguments: Sequence[Mapping[str, Any]], ids: str = _IDS[0]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, values, id=ids.format(n, name=name)) for n, values in enumerate(arguments))


def _in_two_turns(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text.rstrip().removesuffix(stop) for stop in stops)


def _read(reader: Reader, text: str, tools: Sequence[Tool]) -> Sequence[ToolCall]:
    text = reader.respell(text)
    stop = next((stop for stop in reader.stops if text.endswith(stop)), "")
    return _parsed(reader, reader.dialect, text.removesuffix(stop), stop, tools).tool_calls


def _parsed(reader: Reader, dialect: Dialect, text: str, stop: str, tools: Sequence[Tool]) -> Reply:
    prompt = reader.render(_HISTORY, tools)
    opened = opens_thought(prompt, thought_marks(dialect)[0])
    return parse_stopped(dialect, text, stop, tools=tools, reasoning_open=opened, prefix=prompt[-_PREFIX:])


def difference_of(reader: Reader, declared: Dialect, name: str) -> str:
    """How the publisher's own dialect reads a reply otherwise than the dialect; ``""`` if all forms are read alike."""
    tools = (Tool(name, "Probes.", _SCHEMA),)
    replies = [(form, Message("assistant", content, _calls_of(name, values))) for form, content, values in _FORMS]
    replies += [
        ("an answer", Message("assistant", "answerone")),
        ("a thought", Message("assistant", "answerone", reasoning="thoughtone")),
    ]
    for form, reply in replies:
        try:
            text = reply_text(reader.render, reader.stops, _HISTORY, reply, tools, thought_marks(reader.dialect))
        except ConfigError:
            continue
        if text is None or (reply.content and reply.tool_calls and _in_two_turns(text, reader.stops)):
            continue
        text = reader.respell(text)
        stop = next((stop for stop in reader.stops if text.endswith(stop)), "")
        ours, theirs = (
            _parsed(reader, dialect, text.removesuffix(stop), stop, tools) for dialect in (reader.dialect, declared)
        )
        if _compared(ours) != _compared(theirs):
            return f"{form} is written {_short(text)}; read as {_compared(ours)} and as {_compared(theirs)}"
    return ""


def _compared(reply: Reply) -> str:
    return (
        f"content {reply.content.strip()!r}, thought {(reply.reasoning or '').strip()!r}, {_describe(reply.tool_calls)}"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…")


def _describe(calls: Sequence[ToolCall]) -> str:
    if not calls:
        return "no call"
    return " and ".join(
        f"a malformed call ({' '.join(call.error.split())})"
        if call.error is not None
        else f"{call.name!r} with {_short(json.dumps(dict(call.arguments), ensure_ascii=False, default=str))}"
        for call in calls
    )
