"""The start-up test: does the bridge write what the template writes, on this template, tokenizer, stop ids and tools?

Invariant: a step is ``exact`` or ``forks`` only if its bridge, as text and as ids, is the end of the template's own
rendering of the whole conversation. This module knows the template from outside only: no family is named here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np

from rollouts.dtypes import Message, TokenColumn, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import Strategy, bridge_text
from rollouts.renderer.call_check import Calls
from rollouts.renderer.history_diff import shared
from rollouts.renderer.template import ChatTemplate

__all__ = ["SelfTest", "Step", "Verdict", "run_self_test"]

Verdict: TypeAlias = Literal["exact", "forks", "refused"]
"""``exact``: ids appended step by step are the template's own rendering. ``forks``: the bridge is right, and the
template writes what came before it differently once it is history. ``refused``: the bridge is not what it writes, or
calls would be lost."""

_SEVERITY: tuple[Verdict, ...] = ("exact", "forks", "refused")
_ONE_CALL = "the template has one call a turn; Limits(max_parallel_calls=1) ends replies with more"


@attrs.frozen
class Step:
    """The verdict on one step of the synthetic conversation."""

    name: str
    verdict: Verdict
    reason: str = ""


@attrs.frozen
class SelfTest:
    """The verdicts on all steps."""

    template: str
    strategy: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """What is worth knowing and no matter of tokens."""
    calls: Calls | None = None
    """Whether the dialect reads the calls that the template writes; ``None`` without tools."""
    unread: str = ""
    """Why calls are not read and what can be done; ``""`` where they are, or where the user asked for plain text."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the steps; ``refused`` where calls would be lost."""
        if self.unread:
            return "refused"
        return max((step.verdict for step in self.steps), key=_SEVERITY.index)

    def raise_if_refused(self) -> None:
        """Stop here if a bridge is not what the template writes, or if calls would be lost.

        Raises:
            ConfigError: names the template, the first such step, and why; or the dialect, what the template wrote and
                what was read.
        """
        for step in self.steps:
            if step.verdict == "refused":
                raise ConfigError(
                    f"chat template {self.template}: the self-test refuses its step {step.name!r}: {step.reason}"
                )
        if self.unread:
            raise ConfigError(f"chat template {self.template}: {self.unread}")

    def __str__(self) -> str:
        width = max(len(step.name) for step in self.steps)
        lines = [f"self-test of chat template {self.template}, dummy {self.strategy!r}: {self.verdict}"]
        lines += [f"  {step.name:<{width}}  {step.verdict:<7}  {step.reason}".rstrip() for step in self.steps]
        lines += [] if self.calls is None else [f"  calls: {self.calls}"]
        lines += [f"  {self.unread}"] if self.unread else []
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@attrs.frozen
class _Turn:
    """A reply, and what comes between it and the next one."""

    name: str
    reply: Message
    new: tuple[Message, ...]
    marks: tuple[str, ...] = ()
    """What a faithful template writes of the reply: its content, or the arguments of its calls."""
    alone: _Turn | None = None
    """The same with one call, where it has several: some templates end such a turn otherwise."""


def run_self_test(
    template: ChatTemplate,
    strategy: tuple[str, Strategy],
    encode: Callable[[str], TokenColumn],
    stops: Sequence[str],
    tools: Sequence[Tool],
    system: str | None,
) -> SelfTest:
    """Put a synthetic conversation through the template and through the bridge, and compare.

    Args:
        template: the chat template.
        strategy: how the bridge builds its dummy, with its name.
        encode: text to ids.
        stops: the stop tokens, as text.
        tools: the tools; without any, the steps with tools are left out.
        system: the system prompt, or ``None`` for a conversation without one.
    """
    opening = (
        [Message("user", "userone")] if system is None else [Message("system", system), Message("user", "userone")]
    )
    reasons = _opens_freely(template, opening, tools)
    parallel = 2 if not tools or _takes_two_calls(template, opening, tools) else 1
    steps = list(_judge(template, strategy[1], encode, stops, tools, opening, _turns(tools, parallel, reasons)))
    notes = [*_notes(template, opening, tools)]
    notes += [_ONE_CALL] if parallel == 1 and steps[1:] and steps[1].verdict != "refused" else []
    notes += _note_of_stops(template, strategy[1], stops)
    return SelfTest(template.name, strategy[0], tuple(steps), tuple(notes))


def _turns(tools: Sequence[Tool], parallel: int, reasons: bool) -> list[_Turn]:
    turns = []
    if tools:
        first = _tool_turn("tools, first round", tools, 1, 1, reasons)
        if parallel == 2:
            first = attrs.evolve(_tool_turn(f"{first.name} (2 calls)", tools, 1, 2, reasons), alone=first)
        turns.append(first)
        turns.append(_tool_turn("tools, next round", tools, 3, 1, reasons))
    user = "user, after tools" if tools else "user"
    turns.append(_Turn(user, _reply("finalone", reasons), (Message("user", "usertwo"),), ("finalone",)))
    turns.append(_Turn("user, again", _reply("finaltwo", reasons), (Message("user", "userthree"),), ("finaltwo",)))
    return turns


def _reply(content: str, reasons: bool) -> Message:
    return Message("assistant", content, reasoning=f"thought{content}" if reasons else None)


def _tool_turn(name: str, tools: Sequence[Tool], first: int, count: int, reasons: bool) -> _Turn:
    numbers = range(first, first + count)
    calls = [ToolCall(tools[n % len(tools)].name, {"x": f"argument{n}"}, id=f"call{n:05d}") for n in numbers]
    results = [
        Message("tool", f"result{n}", tool_call_id=call.id, name=call.name)
        for n, call in zip(numbers, calls, strict=True)
    ]
    reply = Message("assistant", tool_calls=tuple(calls), reasoning=f"thought{first}" if reasons else None)
    return _Turn(name, reply, tuple(results), tuple(f"argument{n}" for n in numbers))


def _notes(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, ...]:
    try:
        untold = bool(tools) and template.render(opening, tools) == template.render(opening)
    except ConfigError:
        return ()
    return ("the template does not tell the model of its tools; say so in the system prompt",) if untold else ()


def _note_of_stops(template: ChatTemplate, strategy: Strategy, stops: Sequence[str]) -> list[str]:
    """A stop token that the template does not write after a reply is either unknown to it, or not all are known."""
    try:
        bridge = bridge_text(template, strategy, (), [Message("user", "usertwo")], (), stops)
    except ConfigError:
        return []
    if bridge.startswith(tuple(stops)):
        return []
    known = ", ".join(stops)
    return [f"the template ends a reply with {bridge[:20]!r}, and the stop tokens are {known}: are these all?"]


def _opens_freely(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether the model may think: not where the prompt ends in a thinking block that is closed already."""
    try:
        text = template.render(opening, tools)
    except ConfigError:
        return True
    return not text.rstrip().endswith("</think>")


def _takes_two_calls(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Some templates refuse a second call in one turn, some leave it out."""
    turn = _tool_turn("", tools, 1, 2, reasons=False)
    try:
        text = template.render([*opening, turn.reply, *turn.new], tools)
    except ConfigError:
        return False
    first, second = turn.marks
    return second in text or first not in text


def _judge(
    template: ChatTemplate,
    strategy: Strategy,
    encode: Callable[[str], TokenColumn],
    stops: Sequence[str],
    tools: Sequence[Tool],
    opening: Sequence[Message],
    turns: Sequence[_Turn],
) -> Iterator[Step]:
    history = list(opening)
    name = "opening" if opening[0].role == "system" else "opening, no system prompt"
    try:
        before: str | None = template.render(history, tools)
    except ConfigError as error:
        yield Step(name, "refused", str(error))
        return
    yield Step(name, *_opening_verdict(before or "", opening))

    def judged(turn: _Turn) -> tuple[Verdict, str, str | None]:
        spoken = [*history, turn.reply]
        try:
            whole = template.render([*spoken, *turn.new], tools)
            bridge = bridge_text(template, strategy, spoken, turn.new, tools, stops, whole=True)
        except ConfigError as error:
            return "refused", str(error), None
        verdict, reason = _bridge_verdict(whole, bridge, turn, encode, stops)
        if verdict == "exact" and before is not None:
            own = _own_turn(template, spoken, tools, turn.marks[-1])
            verdict, reason = _history_verdict([text for text in (before, own, whole) if text is not None])
        return verdict, reason, whole

    for turn in turns:
        verdict, reason, whole = judged(turn)
        if turn.alone is not None:
            alone, why, _ = judged(turn.alone)
            if _SEVERITY.index(alone) > _SEVERITY.index(verdict):
                verdict, reason = alone, f"one call: {why}"
        yield Step(turn.name, verdict, reason)
        before = whole
        history += [turn.reply, *turn.new]


def _opening_verdict(text: str, opening: Sequence[Message]) -> tuple[Verdict, str]:
    lost = [message.role for message in opening if message.content.strip() not in text]
    return ("refused", f"the template leaves out the {lost[0]} message") if lost else ("exact", "")


def _bridge_verdict(
    whole: str, bridge: str, turn: _Turn, encode: Callable[[str], TokenColumn], stops: Sequence[str]
) -> tuple[Verdict, str]:
    if not whole.endswith(bridge):
        stop = next((stop for stop in stops if bridge.startswith(stop) and whole.endswith(bridge[len(stop) :])), None)
        if stop is not None:
            return "forks", f"history rewritten: no {stop!r} ends the reply"
        written, end = whole[-len(bridge) :], shared(whole[::-1], bridge[::-1])
        at = len(bridge) - end
        return "refused", f"the template writes …{written[:at][-40:]!r} where the bridge has …{bridge[:at][-40:]!r}"
    ids = encode(bridge)
    if not np.array_equal(encode(whole)[-len(ids) :], ids):
        return "refused", "the bridge's text has other ids in its place than alone"
    if any(mark not in whole for mark in turn.marks):
        return "forks", "the template leaves calls out of the history"
    return "exact", ""


def _own_turn(template: ChatTemplate, history: Sequence[Message], tools: Sequence[Tool], mark: str) -> str | None:
    """The conversation up to the last mark of the last reply, as the template writes it while nothing follows."""
    try:
        text = template.render(history, tools, generation_prompt=False)
    except ConfigError:
        return None
    head, found, _ = text.rpartition(mark)
    return head + found if found else None


def _history_verdict(texts: Sequence[str]) -> tuple[Verdict, str]:
    """Each text must begin with the one before it: the prompt, the prompt with the reply, the next prompt."""
    for before, after in itertools.pairwise(texts):
        if not after.startswith(before):
            at = shared(before, after)
            return "forks", f"history rewritten: {before[at : at + 30]!r} became {after[at : at + 30]!r}"
    return "exact", ""
