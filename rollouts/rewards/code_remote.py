"""The tests of a program and the program, each in a separate sandboxed process: the source that both processes run.

Invariant: nothing of the program runs in the process of its tests. The result of a call is plain data of built-in types
there, so that it compares as Python compares it, or a :class:`Remote`, which equals no data. The program sees the
arguments of its calls, and neither the tests nor what they expect.

The processes exchange lines of JSON. The module imports the standard library only and is read as text.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import functools
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Remote", "run_program", "run_tests", "text_of"]


def text_of(call: str) -> str:
    """The text of this module, followed by a call of one of its functions."""
    return f"{_source()}\n{call}\n"


@functools.cache
def _source() -> str:
    with open(__file__, encoding="utf-8") as file:
        return file.read()


_PLAIN: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
_WRITTEN: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    "bytearray": (bytearray, lambda value: value.decode("latin-1"), lambda text: bytearray(text, "latin-1")),
    "complex": (complex, repr, complex),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}
_SHARED = frozenset(
    {"bisect", "builtins", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"}
    | {"math", "operator", "random", "re", "statistics", "string", "typing"}
)
"""Modules whose functions and classes travel as a name. None has an object that equals everything."""
_MUTABLE = (list, dict, set, bytearray)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class Peer:
    """One end of the connection.

    Args:
        is_tested: this is the program's end, whose objects the tests may use freely; the program may only call what
            the tests gave it, and read public attributes of objects whose class the tests define.
    """

    def __init__(self, reader: int, writer: int, *, is_tested: bool) -> None:
        self._reader = os.fdopen(reader, "r", encoding="ascii")
        self._writer = os.fdopen(writer, "w", encoding="ascii")
        self._is_tested = is_tested
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self.names: dict[str, Any] = {}

    # -- values --

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Remote):
            return ["yours", value._number]
        if kind.__name__ in _PLAIN and kind is _PLAIN[kind.__name__]:
            return [kind.__name__, [self.pack(item) for item in value]]
        if kind is dict or (isinstance(value, dict) and kind.__module__ == "collections"):
            return ["dict", [[self.pack(key), self.pack(item)] for key, item in value.items()]]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["tuple", [self.pack(item) for item in value]]
        if kind in _VIEWS:
            return ["list", [self.pack(item) for item in value]]
        if kind is range:
            return ["range", [value.start, value.stop, value.step]]
        if kind.__name__ in _WRITTEN and kind is _WRITTEN[kind.__name__][0]:
            return [kind.__name__, _WRITTEN[kind.__name__][1](value)]
        if kind is types.ModuleType and value.__name__.partition(".")[0] in sys.stdlib_module_names:
            return ["module", value.__name__]
        if _shared(getattr(value, "__module__", None), getattr(value, "__qualname__", None)) is value:
            return ["shared", value.__module__, value.__qualname__]
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(one for one in value.__mro__ if one.__module__ == "builtins")
            return ["raised", number, value.__name__, base.__name__]
        return ["mine", number]

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            return packed
        kind, *rest = packed
        if kind in _PLAIN:
            return _PLAIN[kind](self.unpack(item) for item in rest[0])
        if kind == "dict":
            return {self.unpack(key): self.unpack(value) for key, value in rest[0]}
        if kind == "range":
            return range(*rest[0])
        if kind in _WRITTEN:
            return _WRITTEN[kind][2](rest[0])
        if kind == "module" and rest[0].partition(".")[0] in sys.stdlib_module_names:
            return importlib.import_module(rest[0])
        if kind == "shared":
            return _shared(*rest)
        if kind == "yours":
            return self._objects[rest[0]]
        number = int(rest[0])
        if number not in self._remotes:
            base = getattr(builtins, rest[2], Exception) if kind == "raised" else None
            is_error = isinstance(base, type) and issubclass(base, BaseException)
            self._remotes[number] = _error_class(self, number, rest[1], base) if is_error else Remote(self, number)
        return self._remotes[number]

    # -- requests --

    def ask(
        self, what: str, target: Any, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """Have the other end do something; return its result or raise its error."""
        self._send(
            {
                "ask": what,
                "target": self.pack(target),
                "arguments": [self.pack(argument) for argument in arguments],
                "options": {name: self.pack(value) for name, value in (options or {}).items()},
            }
        )
        answer = self.serve()
        if "error" in answer:
            name, words, number = answer["error"]
            error = self._remotes.get(number) or getattr(builtins, name, None)
            if not (isinstance(error, type) and issubclass(error, Exception)):
                error = RuntimeError
            raise error(*map(self.unpack, words))
        for place, packed in answer.get("changed", {}).items():
            _replace(arguments[int(place)], self.unpack(packed))
        return self.unpack(answer["result"])

    def serve(self) -> dict[str, Any]:
        """Answer requests until an answer comes; exit when the other end has gone."""
        while True:
            line = self._reader.readline()
            if not line:
                os._exit(1)
            message: dict[str, Any] = json.loads(line)
            if "ask" not in message:
                return message
            try:
                answer = self._answer(message)
            except BaseException as error:  # noqa: BLE001 - the program may raise anything
                kind = type(error)
                number = self._numbers.get(id(kind), -1)
                base = next(one for one in kind.__mro__ if one.__module__ == "builtins")
                answer = {"error": [base.__name__, [_word(word) for word in error.args], number]}
            self._send(answer)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        what, target = message["ask"], self.unpack(message["target"])
        arguments = [self.unpack(packed) for packed in message["arguments"]]
        options = {name: self.unpack(packed) for name, packed in message["options"].items()}
        if what == "names" and self._is_tested:
            return {
                "result": ["dict", [[name, self.pack(self.names[name])] for name in arguments if name in self.names]]
            }
        self._check(what, target, arguments)
        result = _DOES[what](target, *arguments, **options)
        changed = {}
        for place, (argument, before) in enumerate(zip(arguments, message["arguments"], strict=True)):
            if self._is_tested and isinstance(argument, _MUTABLE) and (after := self.pack(argument)) != before:
                changed[str(place)] = after
        return {"result": self.pack(result), "changed": changed}

    def _check(self, what: str, target: Any, arguments: Sequence[Any]) -> None:
        if self._is_tested or what in ("call", "iter", "next"):
            return
        public = what in ("getattr", "setattr") and not str(arguments[0]).startswith("_")
        if not (public and type(target).__module__ == "test"):
            raise TypeError(f"the program may not use {what} on this object of the tests")


def _word(word: Any) -> Any:
    return word if word is None or type(word) in (bool, int, float, str) else str(type(word))


def _shared(module: Any, name: Any) -> Any:
    """A public function or class of a shared module, by its name."""
    if module not in _SHARED or not isinstance(name, str) or name.startswith("_") or not name.isidentifier():
        return None
    return getattr(importlib.import_module(module), name, None)


def _replace(mutable: Any, now: Any) -> None:
    """Give a list, dict, set or bytearray of the tests the content that the program's copy has after the call."""
    if isinstance(mutable, list | bytearray):
        mutable[:] = now
    elif isinstance(mutable, dict | set):
        mutable.clear()
        mutable.update(now)


_BUILT_IN = ("int", "float", "str", "repr", "bool", "len", "hash", "iter", "next", "reversed")
_SIGNS = ("neg", "pos", "abs", "invert", "index")
_ATTRIBUTES = ("getattr", "setattr", "delattr")
_ITEMS = ("getitem", "setitem", "delitem")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_BINARY = (*_ARITHMETIC, "lt", "le", "gt", "ge")
_DOES: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **options: target(*arguments, **options),
    **{name: getattr(operator, f"__{name}__") for name in _SIGNS},
    **{name: getattr(builtins, name) for name in _BUILT_IN},
    **{name: getattr(operator, f"__{name}__") for name in (*_BINARY, "eq", *_ITEMS)},
    **{name: getattr(builtins, name) for name in _ATTRIBUTES},
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target, *_: type(target).__exit__(target, None, None, None),
    "instance": lambda target, value: isinstance(value, target),
}


class Remote:
    """An object of the other process. It equals no data, and operators take no data: both would trust its methods."""

    __slots__ = ("_number", "_peer")
    _number: int
    _peer: Peer

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._peer.ask("call", self, arguments, options)

    def __contains__(self, value: Any) -> bool:
        return any(item == value for item in self)

    def __iter__(self) -> Any:
        return self._peer.ask("iter", self)

    def __enter__(self) -> Any:
        return self._peer.ask("enter", self)

    def __exit__(self, *_: Any) -> None:
        self._peer.ask("exit", self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._peer.ask("instance", self, (value,)))

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, Remote):
            return NotImplemented
        return other is self or bool(self._peer.ask("eq", self, (other,)))

    def __hash__(self) -> int:
        return int(self._peer.ask("hash", self))


def _asked(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._peer.ask(name, self, arguments)


def _binary(name: str) -> Callable[[Remote, Any], Any]:
    return lambda self, other: self._peer.ask(name, self, (other,)) if isinstance(other, Remote) else NotImplemented


for _name in (*_BUILT_IN, *_SIGNS, *_ATTRIBUTES, *_ITEMS):
    if f"__{_name}__" not in vars(Remote):
        setattr(Remote, f"__{_name}__", _asked(_name))
for _name in _BINARY:
    setattr(Remote, f"__{_name}__", _binary(_name))


def _error_class(peer: Peer, number: int, name: str, base: Any) -> Any:
    """A class for an exception class of the program, which ``except`` of the tests can name."""
    made = type(name, (base,), {})
    peer._numbers[id(made)] = len(peer._objects)
    peer._objects.append(made)
    return made


# -- the two programs -------------------------------------------------------------------------------------------------


def run_program(code: str, imports: str) -> None:
    """Run the program, then serve its tests. Its own errors are reported to them."""
    sys.set_int_max_str_digits(0)
    peer = Peer(int(sys.argv[1]), int(sys.argv[2]), is_tested=True)
    names: dict[str, Any] = {"__name__": "program"}
    for text, place in ((code, "program"), (imports, "test")):
        exec(compile(text, place, "exec"), names)
    peer.names = names
    peer.serve()


def run_tests(test: str, imports: str, word: str) -> None:
    """Run a test with the names of the program that it uses; print the word if it passes.

    If a module that the tests import does not exist, print the word and the error: no program could pass.
    """
    sys.set_int_max_str_digits(0)
    try:
        exec(compile(imports, "test", "exec"), {"__name__": "test"})
    except ModuleNotFoundError as error:
        print(f"\n{word} {error}", flush=True)
        return
    except Exception:  # noqa: BLE001 - it may need a name of the program, and runs again with them
        pass
    peer = Peer(int(sys.argv[1]), int(sys.argv[2]), is_tested=False)
    compiled = compile(test, "test", "exec")
    names: dict[str, Any] = {"__name__": "test"}
    used = sorted(_names_of(compiled))
    names |= _own(peer.ask("names", None, used))
    exec(compile(imports, "test", "exec"), names)
    exec(compiled, names)
    print(f"\n{word}", flush=True)


def _names_of(code: types.CodeType) -> set[str]:
    inner = (_names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _own(found: dict[str, Any]) -> dict[str, Any]:
    """Names that the tests take from the program.

    A program that defines ``set`` or ``math`` as well as what is tested would replace what its tests compare with.
    Such a name is taken only if it is the standard module, or if the test uses no other name of the program.
    """
    trusted = {name for name in found if name in sys.stdlib_module_names or hasattr(builtins, name)}
    kept = {
        name: value
        for name, value in found.items()
        if name not in trusted or (isinstance(value, types.ModuleType) and value.__name__ == name)
    }
    own = [name for name, value in kept.items() if not isinstance(value, types.ModuleType)]
    return kept if own else found
