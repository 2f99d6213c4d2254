"""The form of a reply whose tools are strict: text is free, and a call names an offered tool and fits its schema.

Invariant: the form of a call is the template's own writing of it. It is used only where each call stands between
separate marks, has its arguments as JSON, and is read by the dialect, so that parallel calls stay possible. This module
does not know servers: both take the tag that it writes (SGLang 0.5.23, constrained/utils.py; vLLM 0.32.0,
v1/structured_output/backend_xgrammar.py).
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Collection, Sequence

import attrs

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer
from rollouts.renderer.dialects import parse_stopped, thought_marks
from rollouts.renderer.reply_text import reply_text

__all__ = ["strict_tag"]

_HISTORY = (Message("user", "userone"),)
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "description": "Any."}}}
_ARGUMENTS = re.compile(r'\{\s*"x"\s*:\s*"argument(?:one|two)"\s*\}')
_ANY = {"type": "object"}
"""The schema of arguments of a tool that is not strict."""


@attrs.frozen
class _CallForm:
    """The text around the JSON arguments of a call."""

    begin: str
    end: str
    mark: str
    """The beginning of ``begin`` at which a server starts to constrain a reply."""


def strict_tag(renderer: Renderer, tools: Sequence[Tool], strict: Collection[str]) -> str | None:
    """The structural tag, as JSON, that holds the calls of strict tools to their schemas.

    Tools that are not strict are in it with any object as arguments, since a server allows no other call. ``None`` if
    the template or the dialect has no form of calls that a tag can express.
    """
    forms = [_call_form(renderer, tool.name) for tool in tools]
    found = [form for form in forms if form is not None]
    if not found or len(found) < len(tools):
        return None
    structures = [
        {"begin": form.begin, "schema": dict(tool.parameters) if tool.name in strict else _ANY, "end": form.end}
        for tool, form in zip(tools, found, strict=True)
    ]
    triggers = list(dict.fromkeys(form.mark for form in found))
    return json.dumps({"type": "structural_tag", "structures": structures, "triggers": triggers}, ensure_ascii=False)


_FORMS: weakref.WeakKeyDictionary[Renderer, dict[str, _CallForm | None]] = weakref.WeakKeyDictionary()
_FORMS_KEPT = 1024
"""For each renderer: an environment may have other tools for each prompt."""


def _call_form(renderer: Renderer, name: str) -> _CallForm | None:
    known = _FORMS.setdefault(renderer, {})
    if name not in known:
        if len(known) >= _FORMS_KEPT:
            known.clear()
        known[name] = _found_form(renderer, name)
    return known[name]


def _found_form(renderer: Renderer, name: str) -> _CallForm | None:
    one = _written(renderer, name, ("argumentone",))
    two = _written(renderer, name, ("argumentone", "argumenttwo"))
    if one is None:
        return None
    found = list(_ARGUMENTS.finditer(one))
    marks = [mark for mark in getattr(renderer.dialect, "marks", ()) if mark in one]
    if len(found) != 1 or not marks:
        return None
    start = min(one.index(mark) for mark in marks)
    mark = max((mark for mark in marks if one.startswith(mark, start)), key=len)
    form = _CallForm(one[start : found[0].start()], one[found[0].end() :].rstrip("\n"), mark)
    if mark in one[start + len(mark) :] or not form.end or not _reads(renderer, name, form):
        return None
    # Of parallel calls, each must have the same text around its arguments.
    around = [f"{form.begin}{match[0]}{form.end}" for match in _ARGUMENTS.finditer(two or "")]
    return form if two is None or (len(around) == 2 and all(text in two for text in around)) else None


def _written(renderer: Renderer, name: str, values: Sequence[str]) -> str | None:
    """The reply with one call for each value, as the template writes it, without its stop token."""
    reader = renderer.reader
    calls = tuple(ToolCall(name, {"x": value}, id=f"call{number:05d}") for number, value in enumerate(values))
    reply = Message("assistant", "", calls)
    tools = (Tool(name, "Probes.", _SCHEMA),)
    try:
        text = reply_text(reader.render, reader.stops, _HISTORY, reply, tools, thought_marks(reader.dialect))
    except ConfigError:
        return None
    stop = next((stop for stop in reader.stops if text is not None and text.endswith(stop)), "")
    return None if text is None else text.removesuffix(stop)


def _reads(renderer: Renderer, name: str, form: _CallForm) -> bool:
    text = f'{form.begin}{{"x": "argumentone"}}{form.end}'
    tools = (Tool(name, "Probes.", _SCHEMA),)
    calls = parse_stopped(renderer.dialect, text, "", tools=tools, reasoning_open=False).tool_calls
    return [(call.name, call.arguments, call.error) for call in calls] == [(name, {"x": "argumentone"}, None)]
