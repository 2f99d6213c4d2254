"""Check whether a template appends to a conversation or rewrites its history.

Invariant: renderings are compared with each other, never with stored ids. A model may spell its reply in any way, and
a call with different white space does not count as rewritten. This module does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.dtypes import Message

__all__ = ["rewriting", "shared"]

_EXCERPT = 30


def rewriting(before: str, after: str, reply: Message, *, kept: str = "", closing: str = "</think>") -> str:
    """Return why ``after`` does not continue ``before`` and the reply; ``""`` if it does.

    Args:
        before: the prompt of the reply, as the template wrote it.
        after: the conversation up to the end of the reply, as the template writes it now.
        reply: the parsed reply; ``after`` must have its reasoning, content and names of calls, in this order.
        kept: the sampled text of the reply without its stop token; if ``after`` continues with it, nothing is lost.
        closing: the mark that ends a thinking block, the only sign of an empty one.
    """
    if not after.startswith(before):
        at = shared(before, after)
        return f"history rewritten: {before[at : at + _EXCERPT]!r} became {after[at : at + _EXCERPT]!r}"
    written = after[len(before) :]
    if kept and written.startswith(kept):
        return ""
    thought = None if reply.reasoning is None else reply.reasoning.strip() or closing
    parts = [("thoughts", thought or ""), ("content", reply.text.strip())]
    parts += [(f"call of {call.name!r}", call.name) for call in reply.tool_calls if call.error is None]
    position = 0
    for what, text in parts:
        found = written.find(text, position)
        if found < 0:
            return f"the template leaves the {what} of the reply out of the history"
        position = found + len(text)
    return ""


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
