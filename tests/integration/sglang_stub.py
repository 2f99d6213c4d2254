"""A pytest plugin that puts this project's dialects in the place of SGLang's detectors, while SGLang's own tests run.

A test is left out from the point where it streams or looks at the insides of a detector. Structural tags, which
constrain decoding, parse nothing. ``parser_judge.py`` compares and reports. Used by ``test_sglang_parsers.py``.
"""

import types
import unittest
from typing import ClassVar
from unittest.mock import MagicMock

import parser_judge
import pytest
from parser_judge import Content, Json, Record

STUBBED = ("sglang", "transformers", "xgrammar")


class Function(Record):
    def __init__(self, **fields):
        super().__init__(**{"name": None, "parameters": None, "description": None, "strict": False, **fields})


class Tool(Record):
    def __init__(self, **fields):
        super().__init__(**{"type": "function", **fields})


class Number(int):
    """The number of a call, which detectors count in two ways; it is not compared."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return isinstance(other, int)


class Item(Record):
    """A call in the answer of a detector."""

    def __init__(self, **fields):
        super().__init__(**{**fields, "parameters": Json(fields.get("parameters") or "")})


class Result(Record):
    """The answer of a detector."""


def answer(dialect, text, tools):
    reply, sound = parser_judge.parsed(dialect, text, parser_judge.tools_of(tools))
    calls = [
        Item(tool_index=Number(number), name=call.name, parameters=arguments)
        for number, (call, arguments) in enumerate(sound)
    ]
    return Content(text if reply.tool_calls and not calls else reply.content), calls


def detector_for(dialect):
    class Detector:
        def __init__(self, *arguments, **options):
            if dialect is None:
                pytest.skip("no dialect of ours")

        def __getattr__(self, name):
            pytest.skip(f"inside of a detector: {name}")

        def detect_and_parse(self, text, tools):
            content, calls = answer(dialect, text, tools)
            return Result(normal_text=content, calls=calls)

        def has_tool_call(self, text):
            pytest.skip("a mark alone is not parsed")

    return Detector


class FunctionCallParser:
    def __init__(self, tools=None, tool_call_parser=None, **options):
        self.tools, self.dialect = tools, parser_judge.NAMES.get(tool_call_parser)

    def __getattr__(self, name):
        pytest.skip(f"inside of a parser: {name}")

    def parse_non_stream(self, text):
        if self.dialect is None:
            pytest.skip("no dialect of ours")
        return answer(self.dialect, text, self.tools)


KINDS = {
    "Function": Function,
    "Tool": Tool,
    "ToolCallItem": Item,
    "StreamingParseResult": Result,
    "FunctionCallParser": FunctionCallParser,
    "CustomTestCase": unittest.TestCase,
    # Marks in the texts of the tests.
    "MINIMAX_NS_TOKEN": "]<]minimax[>[",
    "TOOLS_OPEN": "<|open|>tools<|sep|>",
    "TOOLS_CLOSE": "<|close|>tools<|sep|>",
    "RESPONSE_OPEN": "<|open|>response<|sep|>",
    "RESPONSE_CLOSE": "<|close|>response<|sep|>",
    "MESSAGE_CLOSE": "<|close|>message<|sep|>",
}


class Stub(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__.rpartition(".")[2]
        if name in KINDS:
            return KINDS[name]
        if name.endswith(("Detector", "Parser")):
            known = ".function_call." in self.__name__
            return detector_for(parser_judge.NAMES.get(module) if known else None)
        return type(name, (Record,), {}) if name[:1].isupper() and not name.isupper() else MagicMock()


parser_judge.stub_packages(STUBBED, Stub)
