"""The ``repr`` and the key of labels: equal in every process, and that of Python where Python's is."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest

from rollouts.base.stable_repr import in_order, stable_key, stable_repr

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


@pytest.mark.parametrize(
    "value",
    ["4", 4, 0.5, None, True, [], {}, [1, ("a", 2), {"b": [None], "a": {1: 1, 9: 2}}], "\u00e9"],
    ids=ascii,
)
def test_the_key_of_a_plain_value_is_its_json(value: Any) -> None:
    """The keys of tasks in stored runs stay valid."""
    assert stable_key(value) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a"}, '["a", "b"]'),
        ([np.int64(3), np.arange(2)], "[3, [0, 1]]"),
        (Graded({"b", "a"}), '{"value": ["a", "b"], "weight": 0}'),
        (Opaque(), f'"<{__name__}.Opaque object>"'),
        ({1: "a", "b": {"c"}}, '{"1": "a", "b": ["c"]}'),
        ({(1, 2): 3}, '{"(1, 2)": 3}'),
        (inside_itself(), '[1, {"a": ["<list>"]}]'),
    ],
)
def test_the_key_of_another_value(value: Any, text: str) -> None:
    """A value that is stored as a plain one has the key of the plain one; keys of several types raise nothing."""
    assert stable_key(value) == text


def test_each_process_writes_the_same_keys() -> None:
    """Of tasks, and of duplicates in the data, with sets and with objects in the label."""
    code = (
        "from rollouts.training.data_buffer import DataBuffer\n"
        "from rollouts.training.evaluation import task_key\n"
        "labels = [{*'abcdefgh'}, [frozenset('xyz')], object()]\n"
        "print([task_key('a', label) for label in labels])\n"
        "print([len(DataBuffer([{'prompt': 'a', 'label': label}] * 3 + ['b']).hold_out(1)) for label in labels])\n"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(set(texts)) == 1


class Unordered:
    def __lt__(self, other: object) -> bool:
        raise RuntimeError("no order")


def test_sets_are_stored_in_order() -> None:
    """Also inside of other values, and of several types; their key is that of what is stored."""
    label = {"a": {10, 9, 1}, "b": [frozenset("zyx"), ({3, 2},)]}
    stored = in_order(label)
    assert stored == {"a": [1, 9, 10], "b": [["x", "y", "z"], [[2, 3]]]}
    assert stable_key(stored) == stable_key(label)
    assert in_order({"a", 1, None}) == ["a", 1, None]
    assert len(in_order({Unordered(), Unordered()})) == 2
    endless: list[Any] = []
    endless.append(endless)
    assert in_order(endless) is endless


def test_each_process_stores_the_same_label() -> None:
    """A group that a kill interrupted has samples of two processes, and one label."""
    code = (
        "from rollouts.training import Sample\n"
        "print([Sample(label=label).to_dict()['label'] for label in ({*'abcdefgh'}, {'x': [{*'ijklmn'}]})])\n"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(set(texts)) == 1
