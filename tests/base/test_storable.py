"""Any value of user code as JSON and MessagePack: no object of a user costs a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest

from rollouts.base.storable import check_readable, to_json, to_msgpack
from rollouts.errors import ConfigError

Node = attrs.make_class("Node", {"text": attrs.field(), "parent": attrs.field(default=None)}, eq=False)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Untouchable:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        return "untouchable"


class Panic(BaseException):
    """As those of Rust libraries and of pytest: no ``Exception``."""


class Panicking:
    """Its code raises an error of this type."""

    def __init__(self, error: type[BaseException] = Panic) -> None:
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self.error

    def __repr__(self) -> str:
        raise self.error


class Endless:
    """As a mock, whose methods return mocks."""

    def tolist(self) -> Endless:
        return Endless()

    def __repr__(self) -> str:
        return "endless"


class Tree(dict[str, Any]):
    """A dict of its own class that contains itself."""

    def __init__(self) -> None:
        super().__init__(me=self)


class Text(str):
    __slots__ = ()


def family() -> Any:
    """A tree whose nodes know their parents: a cycle."""
    root = Node("root")
    root.parent = Node("leaf", root)
    return root


ENCODERS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "json": (to_json, msgspec.json.decode),
    "msgpack": (to_msgpack, msgspec.msgpack.decode),
}


@pytest.mark.parametrize("form", ENCODERS)
@pytest.mark.parametrize(
    "value",
    [Unprintable(), Untouchable(), Endless(), family(), Tree(), {Unprintable(): 1}, Panicking(), {Panicking(): 1}],
    ids=["unprintable", "untouchable", "endless", "parents", "in itself", "key", "panicking", "panicking key"],
)
def test_any_object_is_encoded(form: str, value: Any) -> None:
    """Its neighbours are stored unchanged."""
    encode, decode = ENCODERS[form]
    read = decode(encode({"a": 1, "object": value, "list": [value, "b"]}))
    assert read["a"] == 1
    assert read["list"][1] == "b"


@pytest.mark.parametrize("form", ENCODERS)
@pytest.mark.parametrize(
    "keys", [[None, 1, True, 1.5, b"x", (1, 2), frozenset({1})], [(1, (2, "\ud800"))], [Text("a")]]
)
def test_any_key_is_read_again(form: str, keys: list[Any]) -> None:
    """A journal with a key that no decoder reads could not be opened again."""
    encode, decode = ENCODERS[form]
    assert len(decode(encode({"in": dict.fromkeys(keys, 1)}))["in"]) == len(set(keys))


@pytest.mark.parametrize("form", ENCODERS)
def test_a_text_of_another_class_is_a_text(form: str) -> None:
    """Not its repr."""
    encode, decode = ENCODERS[form]
    assert decode(encode({"text": Text("a")})) == {"text": "a"}


@pytest.mark.parametrize("form", ENCODERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_ends_a_run_is_not_of_a_value(form: str, error: type[BaseException]) -> None:
    """Ctrl-C, an exit and a cancellation reach the caller."""
    with pytest.raises(error):
        ENCODERS[form][0]({"v": Panicking(error)})


def inside_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [inside_itself(), nested(200), {"key": {Node("text"): 1}}], ids=["cycle", "deep", "key"]
)
def test_a_value_that_cannot_be_read_again_is_refused(value: Any) -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match=r"^Sample\.metadata"):
        check_readable("Sample.metadata", value)


@pytest.mark.parametrize(
    "value", [nested(50), {1: 2.0, None: "x", 2.5: [()]}, object()], ids=["deep", "keys", "object"]
)
def test_a_value_that_can_be_read_again_passes(value: Any) -> None:
    """An object is written as its repr."""
    check_readable("Sample.metadata", value)
