"""Strategies of the fuzz tests: inputs from models, users, servers and disks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

__all__ = ["fuzz", "json_texts", "mutated_bytes", "mutated_json", "odd_values", "woven"]


def fuzz(strategy: st.SearchStrategy[Any], examples: int, check: Callable[[Any], None]) -> None:
    """Call ``check`` with at least ``examples`` inputs; a failing input is shrunk and shown."""
    seen = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value: Any) -> None:
        nonlocal seen
        seen += 1
        check(value)

    run()
    assert seen >= examples


_NUMBERS = st.integers() | st.sampled_from([0, -1, 2**31, 2**53 + 1, 2**64, 10**400, 1e308, -0.0, 1e-320])
_TEXTS = st.text(max_size=8) | st.sampled_from(["", "\ud800", "\0", "NaN"])
odd_values = st.recursive(
    st.none()
    | st.booleans()
    | _NUMBERS
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "\ud800", "\0", "NaN"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)
"""Any JSON value, including odd ones; Python's encoder writes NaN and infinities, as many servers do."""


def json_texts(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutated_json(values: list[Any]) -> st.SearchStrategy[Any]:
    """One of ``values``, unchanged or with a few parts replaced, dropped, doubled or added."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> Any:
        value = json.loads(json.dumps(draw(st.sampled_from(values))))
        for _ in range(draw(st.integers(0, 4))):
            value = _mutated(draw, value)
        return value

    return draw_one()


def _mutated(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        match draw(st.integers(0, 5)):
            case 0 if isinstance(value, list):
                return [*value[:key], value[key], *value[key:]]
            case 0:
                return {**value, draw(st.text(max_size=6)): draw(odd_values)}
            case 1 if isinstance(value, list):
                return [*value[:key], *value[key + 1 :]]
            case 1:
                return {name: entry for name, entry in value.items() if name != key}
        value[key] = _mutated(draw, value[key])
        return value
    return draw(odd_values)


def mutated_bytes(whole: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes with a few ranges dropped, doubled, zeroed or replaced; about a fifth are unchanged."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> bytes:
        data = draw(whole)
        for _ in range(draw(st.sampled_from([0, 1, 1, 2, 5]))):
            start = draw(st.integers(0, len(data)))
            stop = min(len(data), start + draw(st.integers(0, 12)))
            middle = draw(st.sampled_from([b"", data[start:stop] * 2, b"\0" * (stop - start)]) | st.binary(max_size=9))
            data = data[:start] + middle + data[stop:]
        return data

    return draw_one()


_MARK = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|```json|\w+|\s+|[^\w\s]")


def woven(texts: list[str]) -> st.SearchStrategy[str]:
    """Texts composed of the marks and words of ``texts``, of parts of them, and of one mark repeated often."""
    marks = sorted(
        {mark for text in texts for mark in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```json|\w+|\s+|[^\w\s]", text)}
    )
    piece = st.sampled_from(marks) | st.text(max_size=6) | odd_values.map(json.dumps)

    @st.composite
    def part(draw: st.DrawFn) -> str:
        text = draw(st.sampled_from(texts))
        start, stop = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        return text[start:stop]

    often = st.builds(lambda mark, times: mark * times, piece, st.sampled_from([2, 30, 2000]))
    whole = st.sampled_from(texts)
    return st.lists(whole | part() | piece | piece | often, max_size=9).map("".join)
