"""The text between a reply and the next one: what the template writes after an assistant turn that we did not render.

Invariant: the sampled reply is never rendered. A short dummy conversation stands in for the history, its last turn ends
in a sentinel, and what the template writes behind the sentinel is the bridge, so its cost does not grow with the
history. The dummy has what templates look back at: the real system prompt and tools, and calls with the ids and names
of the results.

This module knows no token id; the seam between sampled ids and bridge ids is the renderer's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.template import ChatTemplate

__all__ = ["STRATEGIES", "Strategy", "bridge_text", "closes_turns"]

_SENTINEL = "qz7sentinelqz7"
_ASKED = Message("user", "U")

Strategy = Callable[[Sequence[Message]], list[Message]]
"""What the dummy has between the system prompt and its last turn, given the real history."""


def short(history: Sequence[Message]) -> list[Message]:
    """One user turn."""
    return [_ASKED]


def one_round(history: Sequence[Message]) -> list[Message]:
    """One user turn, and one round of tools when the history has any.

    For templates with a switch that the first tool result flips for the rest of the conversation.
    """
    opening = short(history)
    if any(message.role == "tool" for message in history):
        call = ToolCall("f", {"x": "1"}, id="call00000")
        opening.append(Message("assistant", tool_calls=(call,)))
        opening.append(Message("tool", "1", tool_call_id=call.id, name=call.name))
    return opening


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"short": short, "one_round": one_round})
"""Ways to build the dummy, by name; the first that passes the self-test is used."""


def bridge_text(
    template: ChatTemplate,
    strategy: Strategy,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    stops: Sequence[str],
    *,
    whole: bool = False,
) -> str:
    """What the template writes after the last assistant turn: its closing mark if it has one, ``new``, the next header.

    Args:
        template: the chat template.
        strategy: how the dummy begins.
        history: the conversation so far; it ends in the assistant turn that ``new`` answers.
        new: everything that comes before the next assistant turn.
        tools: the real tools.
        stops: the stop tokens, as text.
        whole: whether the content of each new message must be in it word for word, as it is for plain words.

    Raises:
        ConfigError: no dummy gives a bridge; with the reason for each.
    """
    system = itertools.takewhile(lambda message: message.role == "system", history)
    opening = [*system, *strategy(history)]
    sentinel = _SENTINEL
    while any(sentinel in message.content for message in new):
        sentinel += "z"
    reasons: list[str] = []
    for kind, dummy in _dummies(history[-1] if history else None, new, sentinel):
        try:
            text = template.render([*opening, dummy, *new], tools)
        except ConfigError as error:
            reasons.append(f"{kind}: {error}")
            continue
        _, found, rest = text.rpartition(sentinel)
        if not found:
            reasons.append(f"{kind}: the template leaves the turn out")
            continue
        cut = _from_stop(rest, stops, anywhere=bool(dummy.tool_calls))
        lost = [message.role for message in new if whole and message.content not in rest]
        if cut is None:
            reasons.append(f"{kind}: none of the stop tokens {list(stops)} follows it; are stop_token_ids complete?")
        elif lost:
            reasons.append(f"{kind}: the template leaves out {lost[0]} messages")
        else:
            return cut
    raise ConfigError(f"chat template {template.name}: no bridge for these messages; " + "; ".join(reasons))


def _dummies(reply: Message | None, new: Sequence[Message], sentinel: str) -> Iterator[tuple[str, Message]]:
    results = [message for message in new if message.role == "tool"]
    if results and new[0].role == "tool":
        yield "a turn with calls", Message("assistant", tool_calls=_calls(reply, results, sentinel))
    yield "a turn without calls", Message("assistant", sentinel)


def _calls(reply: Message | None, results: Sequence[Message], sentinel: str) -> list[ToolCall]:
    """Calls that these results answer: found by id, else by place."""
    asked = reply.tool_calls if reply is not None else ()
    calls = []
    for place, result in enumerate(results):
        by_id = next((call for call in asked if call.id and call.id == result.tool_call_id), None)
        call = by_id or (asked[place] if place < len(asked) else None)
        name = result.name or (call.name if call is not None else "") or "f"
        calls.append(ToolCall(name, {"x": sentinel}, id=result.tool_call_id or (call.id if call is not None else "")))
    return calls


def _from_stop(rest: str, stops: Sequence[str], *, anywhere: bool) -> str | None:
    """Cut the end of the dummy's turn off, so that the text begins with what closes it.

    Behind a call stands the rest of its markup; behind content, at most white space. A turn that closes with something
    that the model never samples, or with nothing, begins right there.
    """
    places = [place for place in (rest.find(stop) for stop in stops) if place >= 0]
    if anywhere:
        return rest[min(places) :] if places else None
    blank = len(rest) - len(rest.lstrip())
    return rest[blank:] if blank in places else rest


def closes_turns(template: ChatTemplate) -> bool:
    """Whether the template writes something after an assistant turn by itself.

    Where it does not, the first mark of a bridge is the header of the next message and must never be left out.
    """
    dummy = [*short(()), Message("assistant", _SENTINEL)]
    try:
        _, found, rest = template.render(dummy, generation_prompt=False).rpartition(_SENTINEL)
    except ConfigError:
        return True
    return not found or bool(rest.strip())
