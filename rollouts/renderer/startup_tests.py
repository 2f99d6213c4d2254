"""The tests that a renderer runs at the start: which dummy its bridges use, and the self-test for each set of tools.

Invariant: a result is computed once and is about the renderer's own template, tokenizer, stop tokens and dialect.
This module does not know how a single self-test compares (:mod:`rollouts.renderer.selftest`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs

from rollouts.dtypes import Tool
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES
from rollouts.renderer.call_check import Calls, Reader, dialect_reads
from rollouts.renderer.dialects import DIALECTS, Dialect
from rollouts.renderer.model_format import ModelFormat
from rollouts.renderer.selftest import SelfTest, run_self_test
from rollouts.renderer.switches import PROBE

__all__ = ["SYSTEM", "StartupTests"]

_RESULTS_KEPT = 1024
"""Results of self-tests: an environment may have other tools for each prompt."""
SYSTEM = "You are a careful assistant."


class StartupTests:
    """The tests of one renderer, and their latest results.

    Args:
        model: the renderer's format.
        strategy: the name of the dummy for bridges; by default the first that passes the self-test.
        calls_are_text: whether calls are not parsed by the user's choice, so that unread calls are not refused.
    """

    def __init__(self, model: ModelFormat, strategy: str | None, *, calls_are_text: bool) -> None:
        if strategy is not None and strategy not in STRATEGIES:
            raise ConfigError.of("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
        self._model = model
        self._chosen_strategy = strategy
        self._calls_are_text = calls_are_text
        self._results: dict[object, SelfTest] = {}
        self._read_calls: dict[str, tuple[Calls, str]] = {}

    @functools.cached_property
    def strategy(self) -> str:
        """The name of the dummy for bridges."""
        if self._chosen_strategy is not None:
            return self._chosen_strategy
        verdicts = {name: run_self_test(self._model, name, (PROBE,), None).verdict for name in STRATEGIES}
        return next((name for name, verdict in verdicts.items() if verdict != "refused"), next(iter(STRATEGIES)))

    def self_test(self, tools: Sequence[Tool], system: str | None) -> SelfTest:
        """The result of :meth:`Renderer.self_test <rollouts.renderer.Renderer.self_test>`."""
        key = (self._model.template.key_of(tools), system)
        result = self._results.get(key)
        if result is None:
            _ = self._model.switches.texts  # found here, not while the first bridge is awaited
            result = run_self_test(self._model, self.strategy, tools, system)
            if result.steps[0].verdict == "refused" and system is SYSTEM:
                without = run_self_test(self._model, self.strategy, tools, None)
                if without.steps[0].verdict != "refused":
                    note = f"the template takes no system prompt: {result.steps[0].reason}"
                    result = attrs.evolve(without, notes=(note, *without.notes))
            if self._model.images is not None:
                from rollouts.renderer.selftest_images import run_image_steps  # here: few runs have images

                image_steps = run_image_steps(self._model, self._model.images, self.strategy, tools)
                result = attrs.evolve(result, steps=(*result.steps, *image_steps))
            if tools:
                result = self._with_calls(result, [tool.name for tool in tools])
            self._results[key] = result
            _drop_oldest(self._results)
        return result

    def _with_calls(self, result: SelfTest, names: Sequence[str]) -> SelfTest:
        """Add the verdict on the calls of these tools; if they are not read, also the remedies."""
        if self._calls_are_text:
            return attrs.evolve(result, calls="not read", notes=(*result.notes, 'tool calls are text: dialect="plain"'))
        dialect = self._model.dialect
        for name in names:
            if name not in self._read_calls:
                self._read_calls[name] = self._reads(dialect, name)
        verdicts = [self._read_calls[name] for name in names]
        _drop_oldest(self._read_calls)
        unread = next((number for number, (calls, _) in enumerate(verdicts) if calls == "not read"), None)
        if unread is None:
            return attrs.evolve(result, calls="one a turn" if ("one a turn", "") in verdicts else "read")
        others = [each for each in DIALECTS.values() if self._reads(each, names[unread])[0] != "not read"]
        options = " or ".join(f'dialect="{each.name}"' for each in others)
        remedies = [f"{options} reads them"] if options else ["give a chat_template whose calls a dialect reads"]
        remedies.append('dialect="plain" starts without reading calls')
        why = f"dialect {dialect.name!r} does not read the tool calls of the environment: {verdicts[unread][1]}"
        return attrs.evolve(result, calls="not read", unread="; ".join([why, *remedies]))

    def _reads(self, dialect: Dialect, name: str) -> tuple[Calls, str]:
        codec = self._model.codec
        reader = Reader(
            self._model.template.render,
            self._model.stops,
            lambda text: codec.decode(codec.encode_uncounted(text)),
            dialect,
        )
        return dialect_reads(reader, name)


def _drop_oldest(results: dict[Any, Any]) -> None:
    while len(results) > _RESULTS_KEPT:
        results.pop(next(iter(results)), None)
