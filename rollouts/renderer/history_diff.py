"""Whether a template writes a conversation on, or writes what is already in it anew.

Invariant: what is compared is the template with itself, never with the ids that are kept: a model may spell its reply
in any way, and a call that is written with other spaces is no rewriting. This module knows no token.
"""

from __future__ import annotations

from rollouts.dtypes import Message

__all__ = ["rewriting", "shared"]

_SHOWN = 30


def rewriting(before: str, after: str, reply: Message, *, kept: str = "", closing: str = "</think>") -> str:
    """Why ``after`` does not go on where ``before`` and the reply ended; ``""`` where it does.

    Args:
        before: the conversation up to where the reply began, as the template wrote it then.
        after: the conversation up to the reply's end, as it writes it now.
        reply: what came between; its thoughts, its content and the names of its calls must be there, in this order.
        kept: the reply as it was sampled, without its stop token: where the template writes just that, nothing is lost.
        closing: what ends a thought; an empty thought shows by nothing else.
    """
    if not after.startswith(before):
        at = shared(before, after)
        return f"history rewritten: {before[at : at + _SHOWN]!r} became {after[at : at + _SHOWN]!r}"
    written = after[len(before) :]
    if kept and written.startswith(kept):
        return ""
    thought = None if reply.reasoning is None else reply.reasoning.strip() or closing
    parts = [("thoughts", thought or ""), ("content", reply.content.strip())]
    parts += [(f"call of {call.name!r}", call.name) for call in reply.tool_calls if call.error is None]
    position = 0
    for what, text in parts:
        found = written.find(text, position)
        if found < 0:
            return f"the template leaves the {what} of the reply out of the history"
        position = found + len(text)
    return ""


def shared(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
