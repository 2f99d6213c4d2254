"""Whether a dialect reads the tool calls that a chat template writes.

Invariant: calls count as read only if each form that the template writes (one call, two in parallel, nested arguments,
a call behind text) comes back sound, with its name and its arguments. A template that writes no call proves nothing:
not read. No family is named here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.reply_text import Render, opens_thought, reply_text
from rollouts.tool_calls import Dialect

__all__ = ["Calls", "Reader", "dialect_reads"]

Calls: TypeAlias = Literal["read", "one a turn", "not read"]
"""``read``: all calls that the template writes. ``one a turn``: likewise, and it writes no second call in a turn.
``not read``: a call of the model could be taken for text, or for a malformed one."""

_ASKED = (Message("user", "userone"),)
_SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "object", "description": "Where."},
        "x": {"type": "string", "description": "Any."},
    },
}
_ONE = {"x": "argumentone"}
_FORMS: tuple[tuple[str, str, tuple[Mapping[str, Any], ...]], ...] = (
    ("one call", "", (_ONE,)),
    ("two calls in parallel", "", (_ONE, {"x": "argumenttwo"})),
    ("a call with nested arguments", "", ({"place": {"name": "Ulm", "at": [48, 23]}, **_ONE},)),
    ("a call behind text", "textone", (_ONE,)),
)
_IDS = ("call{:05d}", "functions.{name}:{}")
"""Ids that templates take: nine letters, and those that a dialect finds the name in."""
_SHOWN = 200


@attrs.frozen
class Reader:
    """What reads the calls of one template."""

    render: Render
    stops: Sequence[str]
    respell: Callable[[str], str]
    """A text as it is after it was encoded and decoded."""
    dialect: Dialect


def dialect_reads(reader: Reader, name: str) -> tuple[Calls, str]:
    """Whether the calls of a tool of this name are read, and for those that are not, what was written and read."""
    first = _with_ids(reader, name, _IDS[0])
    others = (_with_ids(reader, name, ids) for ids in _IDS[1:])
    return first if first[0] != "not read" else next((found for found in others if found[0] != "not read"), first)


def _with_ids(reader: Reader, name: str, ids: str) -> tuple[Calls, str]:
    tools = (Tool(name, "Probes.", _SCHEMA),)
    parallel = False
    for form, content, given in _FORMS:
        calls = tuple(ToolCall(name, values, id=ids.format(n, name=name)) for n, values in enumerate(given))
        reply = Message("assistant", content, calls)
        try:
            text = reply_text(reader.render, reader.stops, _ASKED, reply, tools)
            why = "it leaves the call out of the turn"
        except ConfigError as error:
            text, why = None, str(error)
        if text is None and form == "one call":
            return "not read", f"the template writes no call that could be compared ({why})"
        if text is None:  # a form that the template does not have
            continue
        read = _read(reader, text, tools)
        if [(call.name, call.arguments, call.error) for call in read] != [(c.name, c.arguments, None) for c in calls]:
            return "not read", f"{form} to {name!r} is written {_short(text)} and read as {_told(read)}"
        parallel = parallel or len(calls) > 1
    return ("read" if parallel else "one a turn"), ""


def _read(reader: Reader, text: str, tools: Sequence[Tool]) -> Sequence[ToolCall]:
    text = reader.respell(text)
    stop = next((stop for stop in reader.stops if text.endswith(stop)), "")
    opened = opens_thought(reader.render(_ASKED, tools))
    return reader.dialect.parse(text.removesuffix(stop), tools=tools, reasoning_open=opened).tool_calls


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _told(calls: Sequence[ToolCall]) -> str:
    if not calls:
        return "no call"
    return " and ".join(
        f"a malformed call ({' '.join(call.error.split())})"
        if call.error is not None
        else f"{call.name!r} with {_short(json.dumps(dict(call.arguments), ensure_ascii=False, default=str))}"
        for call in calls
    )
