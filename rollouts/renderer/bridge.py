"""The text that the chat template writes between a reply and the next one.

Invariant: the sampled reply is never rendered. A short dummy conversation replaces the history. Its last turn ends with
a sentinel, and the bridge is the text after the sentinel, so its cost does not grow with the history. The dummy has
what templates look back at: the real system prompt and tools, calls with the ids and names of the results, and the
earlier messages that contain a switch of the template. No new message is cut: a second rendering, with a word in the
place of each, shows where the first of them begins, and the stop token that ends the turn is looked for before it.
The forms of earlier bridges (:mod:`rollouts.renderer.bridge_forms`) save the second rendering.

This module does not know token ids; the renderer joins sampled ids and bridge ids.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge_forms import BridgeForms, shape_of
from rollouts.renderer.template import ChatTemplate

__all__ = ["STRATEGIES", "Kept", "Strategy", "bridge_text", "closes_turns", "is_system", "whole", "with_kept"]

_SENTINEL = "qz7"
_USER_TURN = Message("user", "U")
_POSITION = operator.itemgetter(0)

Strategy = Callable[[Sequence[Message]], list[Message]]
"""Build the dummy's messages between the system prompt and its last turn, from the real history."""


def short(history: Sequence[Message]) -> list[Message]:
    """One user turn."""
    return [_USER_TURN]


def one_round(history: Sequence[Message]) -> list[Message]:
    """One user turn, and one round of tools if the history has one.

    For templates that write the first tool result differently from the later ones.
    """
    opening = short(history)
    if any(message.role == "tool" for message in history):
        call = ToolCall("f", {"x": "1"}, id="call00000")
        opening.append(Message("assistant", tool_calls=(call,)))
        opening.append(Message("tool", "1", tool_call_id=call.id, name=call.name))
    return opening


def whole(history: Sequence[Message]) -> list[Message]:
    """The real history without its last turn."""
    return list(itertools.dropwhile(is_system, history[:-1]))


@attrs.frozen
class Kept:
    """The messages of a history that a dummy depends on."""

    messages: tuple[tuple[int, Message], ...]
    """Messages to add to the dummy, with their positions in the history."""
    last_user: int | None
    """The position of the last user message before the reply."""
    results: tuple[Message, ...]
    """The first tool message, if there is one."""


def with_kept(strategy: Strategy, kept: Kept) -> Strategy:
    """Add messages of the history to a strategy, in their order, with the turns that templates expect around them."""

    def build(history: Sequence[Message]) -> list[Message]:
        short_history = strategy(kept.results)  # all of the history that a strategy looks at: is there a tool message?
        if not kept.messages:
            return short_history
        by_position: dict[int, Message | None] = {} if kept.last_user is None else {kept.last_user: None}
        by_position.update(kept.messages)
        built: list[Message] = []
        for _, message in sorted(by_position.items(), key=_POSITION):
            message = message or _USER_TURN
            built += _before(message, built)
            built.append(message)
        if built[-1].role in ("assistant", "system"):
            built.append(_USER_TURN)
        return [*built, *short_history[1:]]  # no second user turn: built ends in a user or tool message

    return build


def _before(message: Message, built: Sequence[Message]) -> list[Message]:
    """The turns that templates expect between the last message and this one."""
    last = built[-1].role if built else "assistant"
    if message.role == "user":
        return [] if last in ("assistant", "system") else [Message("assistant", "A")]
    if message.role == "assistant":
        return [] if last in ("user", "tool") else [_USER_TURN]
    if message.role == "tool":
        call = ToolCall(message.name or "f", {"x": "1"}, id=message.tool_call_id or "")
        calling = Message("assistant", tool_calls=(call,))
        return [calling] if last in ("user", "tool") else [_USER_TURN, calling]
    return []


def is_system(message: Message) -> bool:
    """Whether a message is a system message."""
    return message.role == "system"


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"short": short, "one_round": one_round})
"""Strategies by name; by default, the renderer uses the first that passes the self-test."""


def bridge_text(
    template: ChatTemplate,
    strategy: Strategy,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    stops: Sequence[str],
    forms: BridgeForms | None = None,
) -> str:
    """Return the text after the last assistant turn: its closing mark if it has one, ``new``, the next header.

    Args:
        template: the chat template.
        strategy: builds the start of the dummy.
        history: the conversation so far; it ends in the assistant turn that ``new`` answers.
        new: all messages before the next assistant turn.
        tools: the real tools.
        stops: the stop tokens, as text.
        forms: the forms of earlier bridges of the same template and stop tokens.

    Raises:
        ConfigError: the template raises on these messages or leaves one out, or no dummy produces a bridge.
    """
    opening = [*itertools.takewhile(is_system, history), *strategy(history)]
    sentinel, *words = _unused_words([*opening, *new], 1 + len(new))
    forms = BridgeForms() if forms is None else forms
    reasons: dict[str, str] = {}
    writes_calls = False
    for kind, dummy in _dummies(history[-1] if history else None, new, sentinel):
        if writes_calls and not dummy.tool_calls:  # it stands only for turns with calls that the template leaves out
            break
        shape = shape_of(opening, dummy, new, template.key_of(tools))
        try:
            rest = _after(sentinel, template.render([*opening, dummy, *new], tools))
            end = None if rest is None else forms.end(shape, rest, new, stops)
            with_words: str | None = ""  # not needed where a form is known
            if end is None:
                marked = [attrs.evolve(message, content=word) for message, word in zip(new, words, strict=True)]
                with_words = _after(sentinel, template.render([*opening, dummy, *marked], tools))
        except ConfigError as error:
            if not reasons:  # the template refuses the matched turn; one without calls would hide that
                raise
            reasons.setdefault(kind, str(error))
            continue
        if rest is None or with_words is None:
            reasons.setdefault(kind, "the template leaves the turn out")
            continue
        writes_calls = True
        try:
            if end is None:
                end = _up_to_first(with_words, words, new)
                forms.keep(shape, with_words, words)
            return _from_stop(rest, end, stops, anywhere=bool(dummy.tool_calls))
        except ConfigError as error:
            reasons.setdefault(kind, str(error))
    described = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    raise ConfigError(f"chat template {template.name}: no bridge for these messages; {described}")


def _unused_words(messages: Sequence[Message], count: int) -> list[str]:
    """Words that are in none of the messages, and not in each other."""
    texts, start = "\n".join([message.text for message in messages]), _SENTINEL
    while start in texts:
        start += "z"
    return [f"{start}w{number}e" for number in range(count)]


def _after(sentinel: str, text: str) -> str | None:
    """The text after the last sentinel; ``None`` if there is none."""
    _, separator, rest = text.rpartition(sentinel)
    return rest if separator else None


def _dummies(reply: Message | None, new: Sequence[Message], sentinel: str) -> Iterator[tuple[str, Message]]:
    """Yield the turns that end in a sentinel, the most similar one first.

    The second has each call twice: some templates end a turn of two calls with a stop token, and a turn with one call
    without.
    """
    results = [message for message in new if message.role == "tool"]
    if results and new[0].role == "tool":
        calls = _calls(reply, results, sentinel)
        yield "a turn with calls", Message("assistant", tool_calls=calls)
        yield "a turn with calls", Message("assistant", tool_calls=[*calls, *calls])
    yield "a turn without calls", Message("assistant", sentinel)


def _calls(reply: Message | None, results: Sequence[Message], sentinel: str) -> list[ToolCall]:
    """Return the calls that these results answer, matched by id, else by position; in the order of the reply."""
    replied = reply.tool_calls if reply is not None else ()
    calls: list[tuple[int, ToolCall]] = []
    for position, result in enumerate(results):
        by_id = (at for at, call in enumerate(replied) if call.id and call.id == result.tool_call_id)
        at = next(by_id, position)
        call = replied[at] if at < len(replied) else None
        name = result.name or (call.name if call is not None else "") or "f"
        id = result.tool_call_id or (call.id if call is not None else "")
        calls.append((at, ToolCall(name, {"x": sentinel}, id=id)))
    return [call for _, call in sorted(calls, key=_POSITION)]


def _up_to_first(rest: str, words: Sequence[str], new: Sequence[Message]) -> str:
    """Return the text before the first new message; ``rest`` has a word in the place of each.

    Raises:
        ConfigError: the template leaves out one of the messages, or moves it to the front.
    """
    for word, message in zip(words, new, strict=True):
        if word not in rest:
            raise ConfigError(f"the template leaves out {message.role} messages after it")
    return rest[: min(map(rest.index, words))]


def _from_stop(rest: str, end: str, stops: Sequence[str], *, anywhere: bool) -> str:
    """Drop the end of the dummy's turn, so that the text begins with the turn's closing mark.

    After a call comes the rest of its markup; after content, at most white space. If a turn without calls has no
    closing mark, or a mark that the model never samples, nothing is dropped.

    Args:
        rest: the text after the sentinel.
        end: the part of it before the first new message.
        stops: the stop tokens, as text.
        anywhere: whether the rest of a call's markup may come before the stop token.

    Raises:
        ConfigError: no stop token ends a turn of calls, or how the turn ends depends on the new messages.
    """
    found = [(position, stop) for stop in stops if (position := end.find(stop)) >= 0]
    if anywhere and not found:
        raise ConfigError(
            f"none of the stop tokens {list(stops)} follows it before the new messages; are stop_token_ids complete: "
            "which stop ends a turn of calls?"
        )
    blank = len(end) - len(end.lstrip())
    position, stop = min(found) if anywhere else next((each for each in found if each[0] == blank), (0, ""))
    if not rest.startswith(end[: position + len(stop)]):
        raise ConfigError("how it ends depends on the text of the new messages")
    return rest[position:]


def closes_turns(template: ChatTemplate) -> bool:
    """Whether the template writes a closing mark after an assistant turn.

    If it does not, a bridge begins with the header of the next message, which must never be dropped.
    """
    dummy = [*short(()), Message("assistant", _SENTINEL)]
    try:
        _, separator, rest = template.render(dummy, generation_prompt=False).rpartition(_SENTINEL)
    except ConfigError:
        return True
    return not separator or bool(rest.strip())
