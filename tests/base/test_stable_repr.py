"""The ``repr`` of labels: equal in every process, and that of Python where Python's is."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest

from rollouts.base.stable_repr import stable_repr

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Graded:
    value: Any
    weight: int = dataclasses.field(default=0, repr=False)


@attrs.define
class Answer:
    value: Any
    unit: str = "m"


class Pair(NamedTuple):
    first: Any
    second: Any


class Shown:
    """Its ``repr`` is its own, and shows no set."""

    def __init__(self) -> None:
        self.cache = {"a", "b"}

    def __repr__(self) -> str:
        return "Shown(3)"


class Opaque:
    """Its ``repr`` has its address."""


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def inside_itself() -> list[Any]:
    value: list[Any] = [1]
    value.append({"a": (value,)})
    return value


@pytest.mark.parametrize(
    "value",
    [
        *("4", "it's <x at 0x7f12>", b"<x at 0x7f12>", 4, 2**70, 0.5, float("nan"), None, True, [], (), {}),
        *(set(), frozenset(), {3}, frozenset({"a"})),
        [1, ("a",), ("a", 2), {"b": [None], 3: {}}],
        nested(600),
        inside_itself(),
        *(Graded([1, "<x at 0x7f12>"]), Answer({"a": 1}), Pair(1, ["b"]), Shown()),
        *(fractions.Fraction(1, 3), np.arange(3), Path("a"), collections.OrderedDict(a=1), int, Graded),
    ],
    ids=repr,
)
def test_ordinary_values_are_written_as_python_does(value: Any) -> None:
    """The fingerprints of stored runs stay valid."""
    assert stable_repr(value) == repr(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a", "c"}, "{'a', 'b', 'c'}"),
        ([frozenset({("y",), ("x",)})], "[frozenset({('x',), ('y',)})]"),
        ({"a": {frozenset({"q", "p"}), "o"}}, "{'a': {'o', frozenset({'p', 'q'})}}"),
        (Graded({"b", "a"}), "Graded(value={'a', 'b'})"),
        (Answer({"b", "a"}), "Answer(value={'a', 'b'}, unit='m')"),
        (Pair({"b", "a"}, 1), "Pair(first={'a', 'b'}, second=1)"),
        (Opaque(), f"<{__name__}.Opaque object>"),
        ([Answer(Opaque())], f"[Answer(value=<{__name__}.Opaque object>, unit='m')]"),
        (functools.partial(inside_itself), "functools.partial(<function inside_itself>)"),
    ],
)
def test_sets_and_addresses_are_written_alike(value: Any, text: str) -> None:
    """Also in the containers and classes around them; an object with an address is its type."""
    assert stable_repr(value) == text


def test_each_process_writes_the_same() -> None:
    """With other hashes of strings and other addresses."""
    code = "from rollouts.base.stable_repr import stable_repr as r; print(r([{*'abcdefgh'}, object(), r]))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    assert set(texts) == {"[{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}, <object object>, <function stable_repr>]\n"}
