"""The openings of conversations: the ids of the first prompt, rendered once for equal messages and tools.

Invariant: an opening is the template's own rendering, encoded once. Thread-safe. This module does not know bridges.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Sequence

from rollouts.dtypes import Message, TokenColumn, Tool
from rollouts.renderer.dialects import thought_marks
from rollouts.renderer.history_diff import shared
from rollouts.renderer.model_format import ModelFormat
from rollouts.renderer.prefill import continues_turn, open_turn, turn_start

__all__ = ["Openings"]

_OPENINGS_KEPT = 512


class Openings:
    """The latest openings of one renderer."""

    def __init__(self, model: ModelFormat) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[object, concurrent.futures.Future[TokenColumn]] = collections.OrderedDict()

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool], new_turn: bool = False) -> TokenColumn:
        """The ids of :meth:`Renderer.opening <rollouts.renderer.Renderer.opening>`."""
        # Arguments are compared by repr: True == 1 in Python, but a template writes them differently. The repr of an
        # image has its hash, so that the cache does not keep its bytes.
        by_repr = [message for message in messages if message.tool_calls or message.images]
        continues = continues_turn(messages) and not new_turn
        key = (repr(tuple(messages)) if by_repr else tuple(messages), self._model.template.key_of(tools), continues)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
            else:
                future = self._cache[key] = concurrent.futures.Future()
                if len(self._cache) > _OPENINGS_KEPT:
                    self._cache.popitem(last=False)
        if cached is not None:
            return cached.result()
        try:
            text, images = self._text(messages, tools, continues), self._model.images_of(messages)
            future.set_result(opening := self._model.encode(text, images))
        except BaseException as error:  # threads that wait for this opening get the error too
            with self._lock:
                self._cache.pop(key, None)
            future.set_exception(error)
            raise
        return opening

    def reply_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """The number of ids of an opening before the first reply's turn."""
        opening = self.opening(messages, tools)
        if not continues_turn(messages):
            return len(opening)
        text = self._text(messages, tools, True)
        opened, _ = thought_marks(self._model.dialect)
        start = turn_start(self._model.template, self._model.marks.guarded(messages), tools, text, opened)
        before = self._model.encode(text[:start], self._model.images_of(messages), counted=False, partly=True)
        return shared(before.tolist(), opening.tolist())

    def forget(self) -> None:
        """Clear the cache."""
        with self._lock:
            self._cache.clear()

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], continues: bool) -> str:
        messages = self._model.marks.guarded(messages)
        if continues:
            return open_turn(self._model.template, messages, tools)
        return self._model.template.render(messages, tools)
