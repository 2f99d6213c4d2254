"""The self-test: compare bridges with the template's rendering, for one template, tokenizer, stop ids and tools.

Invariant: a step is ``exact`` or ``forks`` only if its bridge, as text and as ids, is the end of the template's own
rendering of the whole conversation. This module only calls the template; it does not know model families.
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
from rollouts.renderer.images import ImageProcessor, example_images
from rollouts.renderer.template import ChatTemplate

__all__ = ["SelfTest", "Step", "Verdict", "run_image_steps", "run_self_test"]

Verdict: TypeAlias = Literal["exact", "forks", "refused"]
"""``exact``: ids appended step by step equal the template's own rendering. ``forks``: the bridge is right, but the
template rewrites earlier text once it is history. ``refused``: the bridge differs from the template's rendering, or
calls would be lost."""

_SEVERITY: tuple[Verdict, ...] = ("exact", "forks", "refused")
_ONE_CALL = "the template has one call a turn: max_parallel_calls is 1, and a reply with more calls ends the episode"


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
    alone: _Turn | None = None
    """The same turn with one call, if this one has several: some templates end such a turn differently."""


def run_self_test(
    template: ChatTemplate,
    strategy: tuple[str, Strategy],
    encode: Callable[[str], TokenColumn],
    stops: Sequence[str],
    tools: Sequence[Tool],
    system: str | None,
) -> SelfTest:
    """Render a synthetic conversation with the template and with bridges, and compare.

    Args:
        template: the chat template.
        strategy: the name and the function of the strategy that builds the dummy.
        encode: converts text to ids.
        stops: the stop tokens, as text.
        tools: the tools; without tools, the steps with tools are skipped.
        system: the system prompt, or ``None`` for a conversation without one.
    """
    opening = (
        [Message("user", "userone")] if system is None else [Message("system", system), Message("user", "userone")]
    )
    reasons = _may_reason(template, opening, tools)
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
        hides_tools = bool(tools) and template.render(opening, tools) == template.render(opening)
    except ConfigError:
        return ()
    return (
        ("the template does not tell the model of its tools; describe them in the system prompt",)
        if hides_tools
        else ()
    )


def _note_of_stops(template: ChatTemplate, strategy: Strategy, stops: Sequence[str]) -> list[str]:
    """Return a note if the template ends a reply with none of the stop tokens: the list may be incomplete."""
    try:
        bridge = bridge_text(template, strategy, (), [Message("user", "usertwo")], (), stops)
    except ConfigError:
        return []
    if bridge.startswith(tuple(stops)):
        return []
    given = ", ".join(stops)
    return [f"the template ends a reply with {bridge[:20]!r}, and the stop tokens are {given}: are these all?"]


def _may_reason(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether the model may reason: not if the prompt ends with a closed thinking block."""
    try:
        text = template.render(opening, tools)
    except ConfigError:
        return True
    return not text.rstrip().endswith("</think>")


def _takes_two_calls(template: ChatTemplate, opening: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether the template writes two calls in one turn; some refuse the second, some leave it out."""
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

    def judge(turn: _Turn) -> tuple[Verdict, str, str | None]:
        replied = [*history, turn.reply]
        try:
            whole = template.render([*replied, *turn.new], tools)
            bridge = bridge_text(template, strategy, replied, turn.new, tools, stops)
        except ConfigError as error:
            return "refused", str(error), None
        verdict, reason = _bridge_verdict(whole, bridge, turn, encode, stops)
        if verdict == "exact" and before is not None:
            own = _up_to_mark(template, replied, tools, turn.marks[-1])
            verdict, reason = _history_verdict([text for text in (before, own, whole) if text is not None])
        return verdict, reason, whole

    for turn in turns:
        verdict, reason, whole = judge(turn)
        if turn.alone is not None:
            alone, why, _ = judge(turn.alone)
            if _SEVERITY.index(alone) > _SEVERITY.index(verdict):
                verdict, reason = alone, f"one call: {why}"
        yield Step(turn.name, verdict, reason)
        before = whole
        history += [turn.reply, *turn.new]


def run_image_steps(
    template: ChatTemplate,
    strategy: Strategy,
    encode: Callable[[str], TokenColumn],
    stops: Sequence[str],
    images: ImageProcessor,
    tools: Sequence[Tool],
) -> Iterator[Step]:
    """Compare openings and bridges with images with what the processor itself gives for the whole text.

    A template that leaves out the images of tool results, or raises on them, is not refused for that: such results are
    refused when they occur.
    """
    first, second, third = example_images()
    opening = [Message("user", ("userone", first, "and", second))]
    history = [*opening, Message("assistant", "finalone")]
    turns = {"image, user": (history, [Message("user", (third, "usertwo", first))])}
    if tools:
        turn = _tool_turn("", tools, 1, 1, reasons=False)
        result = attrs.evolve(turn.new[0], content=("resultone", third))
        turns["image, tool"] = ([*opening, turn.reply], [result])
    yield Step("image, opening", *_image_verdict(template.render(opening, tools), (), encode, images, opening))
    for name, (before, new) in turns.items():
        try:
            text = template.render([*before, *new], tools)
            bridge = bridge_text(template, strategy, before, new, tools, stops)
        except ConfigError as error:
            yield Step(name, "exact", f"images are refused here: {error}")
            continue
        if name == "image, tool" and bridge.count(images.placeholder) != 1:
            yield Step(name, "exact", "images are refused here: the template leaves them out")
            continue
        yield Step(name, *_image_verdict(text, (bridge, new), encode, images, [*before, *new]))


def _image_verdict(
    text: str,
    bridge: tuple[()] | tuple[str, Sequence[Message]],
    encode: Callable[[str], TokenColumn],
    images: ImageProcessor,
    messages: Sequence[Message],
) -> tuple[Verdict, str]:
    """Compare ids and inputs with the processor's own."""
    shown = [image for message in messages for image in message.images]
    try:
        own, inputs = images.own_ids(text, shown)
        ids = encode(images.expanded(text, shown)).tolist()
        joined = images.inputs(shown)
        if bridge:
            tail = encode(images.expanded(bridge[0], [image for message in bridge[1] for image in message.images]))
            ids = ids[: -len(tail)] + tail.tolist()
    except ConfigError as error:
        return "refused", str(error)
    if ids != own:
        at = shared(ids, own)
        return "refused", f"the processor gives the ids …{own[at : at + 5]} where ours are …{ids[at : at + 5]}"
    if inputs.keys() != joined.keys() or not all(np.array_equal(joined[name], inputs[name]) for name in joined):
        return "refused", f"the processor gives other {', '.join(inputs)} for several images than for each alone"
    return "exact", ""


def _opening_verdict(text: str, opening: Sequence[Message]) -> tuple[Verdict, str]:
    missing = [message.role for message in opening if message.text.strip() not in text]
    return ("refused", f"the template leaves out the {missing[0]} message") if missing else ("exact", "")


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
        return "refused", "the bridge has other ids inside the conversation than on its own"
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
