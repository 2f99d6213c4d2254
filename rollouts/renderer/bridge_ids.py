"""The ids between a reply and the next one.

Invariant: no sampled id is rendered or encoded again. A bridge is the text of :mod:`rollouts.renderer.bridge`, encoded
once; of its ids only the first may be dropped, in favour of the stop token that the model sampled.

There are two cases:

1. A history of at most six messages is rendered whole, with long texts shortened.
2. In place of a longer one, a short dummy is rendered. Some of these bridges are compared with the first case.

This module does not know trajectories.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from rollouts.dtypes import Message, TokenColumn, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES, bridge_text, closes_turns, whole, with_kept
from rollouts.renderer.bridge_forms import BridgeForms
from rollouts.renderer.history_diff import rewriting, shared
from rollouts.renderer.memory import BridgeMemory
from rollouts.renderer.model_format import ModelFormat
from rollouts.renderer.special_text import GUARD
from rollouts.renderer.startup_tests import StartupTests

__all__ = ["Bridges"]

_CHECKED_TEXT = 1000
"""Characters at each end of a long text that are rendered for a bridge."""
_SHORT = 2 * _CHECKED_TEXT
_SHORT_HISTORY = 6
"""Messages of a history that is rendered whole for a bridge: a dummy has hardly fewer."""


class Bridges:
    """The bridges of one renderer, with the dummy that its start-up tests chose."""

    def __init__(self, model: ModelFormat, tests: StartupTests) -> None:
        self._model = model
        self._tests = tests
        self._forms = BridgeForms()

    def bridge(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        tail: Sequence[int] | TokenColumn,
        memory: BridgeMemory | None,
    ) -> TokenColumn:
        """The ids of :meth:`Renderer.bridge <rollouts.renderer.Renderer.bridge>`."""
        model = self._model
        if not new:
            raise ConfigError.of("bridge.new", (), "at least one message; without one there is nothing to reply to")
        new = model.marks.guarded(new)
        images = model.images_of(new)
        if model.images is not None:
            model.images.check_sampled(tail)
        if len(history) <= _SHORT_HISTORY:
            text = self._whole_text(history, new, tools)
        else:
            memory = memory or BridgeMemory()
            text = self._dummy_text(history, new, tools, memory)
            if memory.compares(history[-1], new, model.switches) or images:
                self._check(text, history, new, tools)
        ids = model.encode(text, images)
        stop = int(tail[-1]) if len(tail) else None
        if stop not in model.stop_ids or not len(ids):
            return ids
        first = int(ids[0])  # where the template closes no turn, that of the next header, which stays
        replaces = first == stop or (self._closes_turns and first in model.special_ids)
        return ids[1:] if replaces else ids

    def refuses_reply(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """The answer of :meth:`Renderer.refuses_reply <rollouts.renderer.Renderer.refuses_reply>`."""
        name, calls = tools[0].name if tools else "f", history[-1].tool_calls
        plain = [ToolCall(name, id=f"call{number:05d}") for number, _ in enumerate(calls)]
        plain_ids: dict[str | None, str] = {call.id: other.id for call, other in zip(calls, plain, strict=True)}
        results = [
            attrs.evolve(message, tool_call_id=plain_ids[message.tool_call_id], name=name)
            if message.tool_call_id in plain_ids
            else message
            for message in new
        ]
        plain_reply = Message("assistant", "" if plain else "A", plain)
        return not self._renders(history, new, tools) and self._renders([*history[:-1], plain_reply], results, tools)

    def _renders(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether the template writes these messages after the last turn."""
        try:
            self._whole_text(history, self._model.marks.guarded(new), tools)
            self._model.template.render([*history, *new], tools)
        except ConfigError:
            return False
        return True

    def rewriting(
        self,
        before: str,
        after: str,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        sampled: Sequence[int] | TokenColumn,
    ) -> tuple[str, int]:
        """The result of :meth:`Renderer.rewriting <rollouts.renderer.Renderer.rewriting>`."""
        model = self._model
        new = model.marks.guarded(new)
        text = self._dummy_text(history, new, tools, BridgeMemory())
        count = len(model.encode(text, model.images_of(new), counted=False))
        text = text.replace(GUARD, "")
        if not after.endswith(text):
            end = shared(after[::-1], text[::-1])
            return f"history rewritten: {text[: -end or None][-30:]!r} became {after[: -end or None][-30:]!r}", count
        stopped = len(sampled) > 0 and int(sampled[-1]) in model.stop_ids
        kept = model.codec.decode(sampled[:-1] if stopped else sampled)
        closing = getattr(model.dialect, "reasoning", ("", ""))[1]
        return rewriting(before, after.removesuffix(text), history[-1], kept=kept, closing=closing), count

    def _dummy_text(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], memory: BridgeMemory
    ) -> str:
        """The bridge behind a dummy."""
        model = self._model
        strategy = with_kept(STRATEGIES[self._tests.strategy], memory.read(history, model.switches, model.marks))
        return bridge_text(model.template, strategy, history, new, tools, model.stops, self._forms)

    def _whole_text(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The bridge in the rendering of the whole conversation, in which long texts without a switch are shortened.

        Raises:
            ConfigError: the template raises.
        """
        model = self._model
        short = model.marks.guarded(
            [message if len(message.text) <= _SHORT else self._shortened(message) for message in history]
        )
        reply = history[-1] if history else None
        if reply is not None and reply.role == "assistant" and not reply.text.strip() and not reply.tool_calls:
            model.template.render([*short, *new], tools)  # some templates refuse an empty turn
        return bridge_text(model.template, whole, short, new, tools, model.stops, self._forms)

    def _check(self, text: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Compare a bridge with the bridge of the whole conversation.

        Raises:
            ConfigError: they differ in more than the mark that ends the reply, or the template raises.
        """
        written = self._whole_text(history, new, tools)
        if written == text or any(stop + written == text or stop + text == written for stop in self._model.stops):
            return
        at = max(shared(written, text) - 20, 0)
        raise ConfigError(
            f"chat template {self._model.template.name}: after this conversation it writes "
            f"{written[at : at + 40]!r} where the bridge has {text[at : at + 40]!r}; "
            'history="fork" renders the whole conversation for each reply'
        )

    def _shortened(self, message: Message) -> Message:
        """A long message without the middle of a long text, unless it contains a switch."""
        if self._model.switches.found(message):
            return message
        return message.with_texts(_shortened_text)

    @functools.cached_property
    def _closes_turns(self) -> bool:
        return closes_turns(self._model.template)


def _shortened_text(text: str) -> str:
    return text if len(text) <= _SHORT else text[:_CHECKED_TEXT] + text[-_CHECKED_TEXT:]
