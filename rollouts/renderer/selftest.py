"""The self-test: compare bridges with the template's rendering, for one template, tokenizer, stop ids and tools.

Invariant: a step is ``exact`` or ``forks`` only if its bridge, as text and as ids, is the end of the template's own
rendering of the whole conversation. This module only calls the template; it does not know model families.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import attrs

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES, bridge_text
from rollouts.renderer.call_check import Calls
from rollouts.renderer.history_diff import shared
from rollouts.renderer.model_format import ModelFormat
from rollouts.renderer.template import ChatTemplate

__all__ = ["ONE_CALL", "SelfTest", "Step", "Verdict", "run_self_test", "tool_turn"]

Verdict: TypeAlias = Literal["exact", "forks", "refused"]
"""``exact``: ids appended step by step equal the template's own rendering. ``forks``: the bridge is right, but the
template rewrites earlier text once it is history. ``refused``: the bridge differs from the template's rendering, or
calls would be lost."""

_SEVERITY: tuple[Verdict, ...] = ("exact", "forks", "refused")
ONE_CALL = "the template has one call a turn: max_parallel_calls is 1, and a reply with more calls ends the episode"


@attrs.frozen
class Step:
    """The verdict on one step of the synthetic conversation."""

    name: str
    verdict: Verdict
    reason: str = ""


@attrs.frozen
class SelfTest:
    """The result of the self-test: the verdicts on all steps."""

    template: str
    strategy: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """Remarks that do not affect the verdict."""
    calls: Calls | None = None
    """Whether the dialect reads the calls that the template writes; ``None`` without tools."""
    unread: str = ""
    """Why calls are not read, and the remedies; ``""`` if they are read, or for ``dialect="plain"``."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the steps; ``refused`` if calls would be lost."""
        if self.unread:
            return "refused"
        return max((step.verdict for step in self.steps), key=_SEVERITY.index)

    def raise_if_refused(self) -> None:
        """Raise if a bridge differs from the template's rendering, or if calls would be lost.

        Raises:
            ConfigError: with the template, the first refused step, and why; or with the dialect, the text that the
                template wrote and the calls that were parsed.
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
    """A reply, and the messages between it and the next one."""

    name: str
    reply: Message
    new: tuple[Message, ...]
    marks: tuple[str, ...] = ()
    """Texts of the reply that the rendering must contain: its content, or the arguments of its calls."""
    with_one_call: _Turn | None = None
    """The same turn with one call, if this one has several: some templates end such a turn differently."""


def run_self_test(model: ModelFormat, strategy: str, tools: Sequence[Tool], system: str | None) -> SelfTest:
    """Render a synthetic conversation with the template and with bridges, and compare.

    Args:
        model: the template, the tokenizer and the stop tokens.
        strategy: the name of the strategy that builds the dummy.
        tools: the tools; without tools, the steps with tools are skipped.
        system: the system prompt, or ``None`` for a conversation without one.
    """
    user = Message("user", "userone")
    opening = [user] if system is None else [Message("system", system), user]
    parallel = 2 if not tools or _takes_two_calls(model.template, opening, tools) else 1
    turns = _turns(tools, parallel, _may_reason(model.template, opening, tools))
    steps = list(_judge(model, strategy, tools, opening, turns))
    notes = _notes(model.template, opening, tools)
    notes += [ONE_CALL] if parallel == 1 and steps[1:] and steps[1].verdict != "refused" else []
    notes += _note_of_stops(model, strategy)
    return SelfTest(model.template.name, strategy, tuple(steps), tuple(notes))


def _turns(tools: Sequence[Tool], parallel: int, reasons: bool) -> list[_Turn]:
    turns = []
    if tools:
        first = tool_turn("tools, first round", tools, 1, 1, reasons)
        if parallel == 2:
            first = attrs.evolve(tool_turn(f"{first.name} (2 calls)", tools, 1, 2, reasons), with_one_call=first)
        turns.append(first)
        turns.append(tool_turn("tools, next round", tools, 3, 1, reasons))
    user = "user, after tools" if tools else "user"
    turns.append(_Turn(user, _reply("finalone", reasons), (Message("user", "usertwo"),), ("finalone",)))
    turns.append(_Turn("user, again", _reply("finaltwo", reasons), (Message("user", "userthree"),), ("finaltwo",)))
    return turns


def _reply(content: str, reasons: bool) -> Message:
    return Message("assistant", content, reasoning=f"thought{content}" if reasons else None)


def tool_turn(name: str, tools: Sequence[Tool], first: int, count: int, reasons: bool) -> _Turn:
    """A reply with this number of calls, and their results; ``first`` is the number of the first call."""
    numbers = range(first, first + count)
    calls = [ToolCall(tools[n % len(tools)].name, {"x": f"argument{n}"}, id=f"call{n:05d}") for n in numbers]
    results = [
        Message("tool", f"result{n}", tool_call_id=call.id, name=call.name)
        for n, call in zip(numbers, calls, strict=True)
    ]
    reply = Message("assistant", tool_calls=tuple(calls), reasoning=f"thought{first}" if reasons else None)
    return _Turn(name, reply, tuple(results), tuple(f"argument{n}" for n in numbers))


def _notes(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
    try:
        hides_tools = bool(tools) and template.render(opening, tools) == template.render(opening)
    except ConfigError:
        return []
    note = "the template does not tell the model of its tools; describe them in the system prompt"
    return [note] if hides_tools else []


def _note_of_stops(model: ModelFormat, strategy: str) -> list[str]:
    """Return a note if the template ends a reply with none of the stop tokens: the list may be incomplete."""
    try:
        bridge = _bridge(model, strategy, (), [Message("user", "usertwo")], ())
    except ConfigError:
        return []
    if bridge.startswith(model.stops):
        return []
    stops = ", ".join(model.stops)
    return [f"the template ends a reply with {bridge[:20]!r}, and the stop tokens are {stops}: are these all?"]


def _bridge(
    model: ModelFormat, strategy: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
) -> str:
    return bridge_text(model.template, STRATEGIES[strategy], history, new, tools, model.stops)


def _may_reason(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether the model may reason: not if the prompt ends with a closed thinking block."""
    try:
        text = template.render(opening, tools)
    except ConfigError:
        return True
    return not text.rstrip().endswith("</think>")


def _takes_two_calls(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether the template writes two calls in one turn; some refuse the second, some leave it out."""
    turn = tool_turn("", tools, 1, 2, reasons=False)
    try:
        text = template.render([*opening, turn.reply, *turn.new], tools)
    except ConfigError:
        return False
    first, second = turn.marks
    return second in text or first not in text


def _judge(
    model: ModelFormat, strategy: str, tools: Sequence[Tool], opening: Sequence[Message], turns: Sequence[_Turn]
) -> Iterator[Step]:
    template, history = model.template, list(opening)
    name = "opening" if opening[0].role == "system" else "opening, no system prompt"
    try:
        before: str | None = template.render(history, tools)
    except ConfigError as error:
        yield Step(name, "refused", str(error))
        return
    yield Step(name, *_opening_verdict(before or "", opening))

    def judge(turn: _Turn) -> tuple[Verdict, str, str | None]:
        replied = [*history, turn.reply]
        try:
            whole = template.render([*replied, *turn.new], tools)
            bridge = _bridge(model, strategy, replied, turn.new, tools)
        except ConfigError as error:
            return "refused", str(error), None
        verdict, reason = _bridge_verdict(model, whole, bridge, turn)
        if verdict == "exact" and before is not None:
            with_reply = _up_to_mark(template, replied, tools, turn.marks[-1])
            verdict, reason = _history_verdict([text for text in (before, with_reply, whole) if text is not None])
        return verdict, reason, whole

    for turn in turns:
        verdict, reason, whole = judge(turn)
        if turn.with_one_call is not None:
            other, why, _ = judge(turn.with_one_call)
            if _SEVERITY.index(other) > _SEVERITY.index(verdict):
                verdict, reason = other, f"one call: {why}"
        yield Step(turn.name, verdict, reason)
        before = whole
        history += [turn.reply, *turn.new]


def _opening_verdict(text: str, opening: Sequence[Message]) -> tuple[Verdict, str]:
    missing = [message.role for message in opening if message.text.strip() not in text]
    return ("refused", f"the template leaves out the {missing[0]} message") if missing else ("exact", "")


def _bridge_verdict(model: ModelFormat, whole: str, bridge: str, turn: _Turn) -> tuple[Verdict, str]:
    if not whole.endswith(bridge):
        found = (stop for stop in model.stops if bridge.startswith(stop) and whole.endswith(bridge[len(stop) :]))
        stop = next(found, None)
        if stop is not None:
            return "forks", f"history rewritten: no {stop!r} ends the reply"
        written, end = whole[-len(bridge) :], shared(whole[::-1], bridge[::-1])
        at = len(bridge) - end
        return "refused", f"the template writes …{written[:at][-40:]!r} where the bridge has …{bridge[:at][-40:]!r}"
    encode = model.codec.encode_uncounted
    ids = encode(bridge)
    if not np.array_equal(encode(whole)[-len(ids) :], ids):
        return "refused", "the bridge has other ids inside the conversation than alone"
    if any(mark not in whole for mark in turn.marks):
        return "forks", "the template leaves calls out of the history"
    return "exact", ""


def _up_to_mark(template: ChatTemplate, history: Sequence[Message], tools: Sequence[Tool], mark: str) -> str | None:
    """Render a conversation that ends with a reply, up to the last mark of that reply; ``None`` if refused."""
    try:
        text = template.render(history, tools, generation_prompt=False)
    except ConfigError:
        return None
    head, separator, _ = text.rpartition(mark)
    return head + separator if separator else None


def _history_verdict(texts: Sequence[str]) -> tuple[Verdict, str]:
    """Compare the prompt, the prompt with the reply, and the next prompt: each must begin with the one before it."""
    for before, after in itertools.pairwise(texts):
        if not after.startswith(before):
            at = shared(before, after)
            return "forks", f"history rewritten: {before[at : at + 30]!r} became {after[at : at + 30]!r}"
    return "exact", ""
