"""A pytest plugin that puts this project's dialects in the place of vLLM's tool parsers, while vLLM's own tests run.

Tests that stream, that look at the insides of a parser, or that parse nothing are left out. ``parser_judge.py``
compares and reports. Used by ``test_vllm_parsers.py``.
"""

import types
from typing import ClassVar
from unittest.mock import MagicMock

import parser_judge
import pytest
from parser_judge import Content, Json, Record

STUBBED = ("vllm", "transformers", "openai", "xgrammar", "mistral_common", "partial_json_parser")


class Call(Record):
    """A call; its id is no part of what is compared."""

    def __eq__(self, other):
        return self.function == getattr(other, "function", None)

    __hash__ = None


class Tokenizer:
    """A tokenizer with an empty vocabulary; parsers that read text need no other."""

    def get_vocab(self):
        return {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class FunctionCall(Record):
    """The name and the arguments of a call."""

    def __init__(self, **fields):
        super().__init__(**{**fields, "arguments": Json(fields.get("arguments") or "")})


def parser_for(dialect):
    class Adapter:
        def __init__(self, tokenizer=None, tools=None, **options):
            if dialect is None:
                pytest.skip("no dialect of ours")
            self.tools = tools

        def __getattr__(self, name):
            pytest.skip(f"inside of a parser: {name}")

        def extract_tool_calls(self, model_output, request=None):
            tools = parser_judge.tools_of(self.tools, getattr(request, "tools", None))
            reply, sound = parser_judge.parsed(dialect, model_output, tools)
            calls = [
                Call(
                    id=call.id or f"chatcmpl-tool-{number:020}",
                    type="function",
                    function=FunctionCall(name=call.name, arguments=arguments),
                )
                for number, (call, arguments) in enumerate(sound)
            ]
            content = reply.content if calls else model_output
            return KINDS["ExtractedToolCallInformation"](
                tools_called=bool(calls), tool_calls=calls, content=Content(content) if content else None
            )

    return Adapter


class Manager:
    @staticmethod
    def get_tool_parser(name):
        if name not in parser_judge.NAMES:
            pytest.skip(f"no dialect for {name}")
        return parser_for(parser_judge.NAMES[name])


KINDS = {
    "FunctionCall": FunctionCall,
    "ToolCall": Call,
    "AutoTokenizer": types.SimpleNamespace(from_pretrained=lambda *_, **__: Tokenizer()),
    "get_tokenizer": lambda *_, **__: Tokenizer(),
    "ExtractedToolCallInformation": Record,
}


class Stub(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__.rpartition(".")[2]
        if name == "ToolParserManager":
            return Manager
        if name.endswith("Parser"):
            return parser_for(parser_judge.NAMES.get(module))
        if name in KINDS:
            return KINDS[name]
        return type(name, (Record,), {}) if name[:1].isupper() and self.__name__.startswith(STUBBED) else MagicMock()


parser_judge.stub_packages(STUBBED, Stub)


def pytest_collection_modifyitems(items):
    kept = [
        item
        for item in items
        if not getattr(item, "callspec", None) or item.callspec.params.get("streaming") is not True
    ]
    items[:] = kept
