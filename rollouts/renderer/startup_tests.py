"""The tests that a renderer runs at the start: which dummy its bridges use, and the self-test for each set of tools.

Invariant: a result is computed once and is about the renderer's own template, tokenizer, stop tokens and dialect.
This module does not know how a single self-test compares (:mod:`rollouts.renderer.selftest`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, get_args

import attrs

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES
from rollouts.renderer.call_check import CallCheck, Calls, Reader, dialect_reads, difference_of
from rollouts.renderer.dialects import DIALECTS, Dialect
from rollouts.renderer.model_format import ModelFormat
from rollouts.renderer.selftest import ONE_CALL, SelfTest, run_self_test
from rollouts.renderer.switches import PROBE

__all__ = ["SYSTEM", "StartupTests"]

_RESULTS_KEPT = 1024
"""Results of self-tests: an environment may have other tools for each prompt."""
_USUAL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""An id that every template takes that takes calls."""
SYSTEM = "You are a careful assistant."


class StartupTests:
    """The tests of one renderer, and their latest results.

    Args:
        model: the renderer's format.
        strategy: the name of the dummy for bridges; by default the first that passes the self-test.
        named: whether the user named the dialect; ``plain`` then means that calls stay text, and is not refused.
        calls: whether unread calls are refused.

    Raises:
        ConfigError: the strategy is unknown, or calls are unchecked and no dialect is named.
    """

    def __init__(self, model: ModelFormat, strategy: str | None, *, named: bool, calls: CallCheck) -> None:
        if calls not in get_args(CallCheck):
            raise ConfigError.of("calls", calls, f"one of {', '.join(get_args(CallCheck))}")
        if calls == "unchecked" and not named:
            raise ConfigError.of("calls", calls, 'a dialect named with it, such as dialect="hermes"')
        if strategy is not None and strategy not in STRATEGIES:
            raise ConfigError.of("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
        self._model = model
        self._chosen_strategy = strategy
        self._calls_are_text = named and model.dialect.name == "plain"
        self._calls = calls
        self._results: dict[object, SelfTest] = {}
        self._read_calls: dict[str, tuple[Calls, str]] = {}
        self._taken_ids: dict[str, bool] = {}

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
                result = self._with_declared(result, tools[0].name)
            self._results[key] = result
            _drop_oldest(self._results)
        return result

    def takes_id(self, id: str) -> bool:
        """Whether the template takes a call with this id, of calls that it takes at all."""
        if _USUAL_ID.fullmatch(id):
            return True
        if id not in self._taken_ids:
            self._taken_ids[id] = self._renders(id) or not self._renders("call00000")
            _drop_oldest(self._taken_ids)
        return self._taken_ids[id]

    def _renders(self, id: str) -> bool:
        call = ToolCall(PROBE.name, {"x": "1"}, id=id)
        result = Message("tool", "1", tool_call_id=id, name=call.name)
        try:
            self._model.template.render(
                [Message("user", "U"), Message("assistant", tool_calls=(call,)), result], (PROBE,)
            )
        except ConfigError:
            return False
        return True

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
        why = f"dialect {dialect.name!r} does not read the tool calls of the environment: {verdicts[unread][1]}"
        if self._calls == "unchecked":
            note = f'calls="unchecked": dialect {dialect.name!r} reads the replies, whatever the history has; {why}'
            checked: Calls = "one a turn" if ONE_CALL in result.notes else "unchecked"
            return attrs.evolve(result, calls=checked, notes=(*result.notes, note))
        others = [each for each in DIALECTS.values() if self._reads(each, names[unread])[0] != "not read"]
        options = " or ".join(f'dialect="{each.name}"' for each in others)
        remedies = [f"{options} reads them"] if options else ["give a chat_template whose calls a dialect reads"]
        remedies.append('a dialect named together with calls="unchecked" reads the replies all the same')
        remedies.append('dialect="plain" starts without reading calls')
        return attrs.evolve(result, calls="not read", unread="; ".join([why, *remedies]))

    def _with_declared(self, result: SelfTest, name: str) -> SelfTest:
        """Add a note if the publisher's own dialect reads replies otherwise."""
        declared, dialect = self._model.declared, self._model.dialect
        if declared is None or declared is dialect or self._calls_are_text:
            return result
        difference = difference_of(self.reader(dialect), declared, name)
        if not difference:
            return result
        note = f"the model's response_template reads replies otherwise than dialect {dialect.name!r}: {difference}"
        return attrs.evolve(result, notes=(*result.notes, f'{note}; dialect="{declared.name}" uses it'))

    def _reads(self, dialect: Dialect, name: str) -> tuple[Calls, str]:
        return dialect_reads(self.reader(dialect), name)

    def reader(self, dialect: Dialect) -> Reader:
        """The functions that write the template's calls, and parse them with a dialect."""
        codec = self._model.codec
        return Reader(
            self._model.template.render,
            self._model.stops,
            lambda text: codec.decode(codec.encode_uncounted(text)),
            dialect,
        )


def _drop_oldest(results: dict[Any, Any]) -> None:
    while len(results) > _RESULTS_KEPT:
        results.pop(next(iter(results)), None)
