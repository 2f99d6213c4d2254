"""The calls of a reply in a form that can be rendered and stored again.

Invariant: no call that a model writes makes a later rendering fail because of its id, half of a surrogate pair, or a
special token in its error. The sampled ids stay as they are. This module does not know dialects.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import msgspec

from rollouts.dtypes import ToolCall

__all__ = ["usable_call"]


def usable_call(call: ToolCall, *, takes_id: Callable[[str], bool], quotable: Callable[[str], str]) -> ToolCall:
    """The call without an id that the template refuses; malformed if it has half of a surrogate pair.

    A model can write such a half as an escape; no encoding has a form of it. Nor can an encoder follow any depth.

    Args:
        call: a call as the dialect read it.
        takes_id: whether the template renders a call with this id.
        quotable: converts text that quotes the reply to text of a tool.
    """
    try:
        msgspec.json.encode((call.name, call.id, call.arguments, call.error))
    except (UnicodeEncodeError, RecursionError):
        error = "The tool call could not be read: it has half of a surrogate pair, or is nested too deeply."
        name = call.name.encode("utf-8", "replace").decode()
        return ToolCall(name, {}, "", raw=call.raw, error=error, fault="bad_arguments")
    if call.id and not takes_id(call.id):
        call = attrs.evolve(call, id="")
    return call if call.error is None else attrs.evolve(call, error=quotable(call.error))
