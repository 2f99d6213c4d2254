"""Whether a template writes a conversation on, or writes what is already in it anew.

Invariant: what is compared is the template with itself, never with the ids that are kept: a model may spell its reply
in any way, and a call that is written with other spaces is no rewriting. This module knows no token.
"""

from __future__ import annotations

from rollouts.dtypes import Message

__all__ = ["rewriting", "shared"]

_SHOWN = 30


def rewriting(before: str, after: str, reply: Message) -> str:
    """Why ``after`` does not go on where ``before`` and the reply ended; ``""`` where it does.

    Args:
        before: the conversation up to where the reply began, as the template wrote it then.
        after: the conversation up to where the next reply begins, as it writes it now.
        reply: what came between; its thoughts, its content and the names of its calls must be there.
    """
    if not after.startswith(before):
        at = shared(before, after)
        return f"history rewritten: {before[at : at + _SHOWN]!r} became {after[at : at + _SHOWN]!r}"
    written = after[len(before) :]
    parts = {"thoughts": reply.reasoning or "", "content": reply.content}
    for what, text in parts.items():
        if text.strip() not in written:
            return f"the template leaves the {what} of the reply out of the history"
    for call in reply.tool_calls:
        if call.error is None and call.name not in written:
            return f"the template leaves the call of {call.name!r} out of the history"
    return ""


def shared(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
