"""A pytest plugin that puts this project's dialects in the place of vLLM's tool parsers, while vLLM's own tests run.

``vllm``, ``transformers`` and ``openai`` are stubs: no part of them is installed. Names and arguments are compared as
values (vLLM compares JSON as text); content without its white space. Tests that stream, that look at the insides of a
parser, or that parse nothing are left out. The outcomes go to the file in ``JUDGE_REPORT``. Used by
``test_vllm_parsers.py`` in a process of its own.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import ClassVar
from unittest.mock import MagicMock

import pytest

from rollouts.dtypes import Tool
from rollouts.renderer.dialects import get_dialect, parse_stopped

NAMES = json.loads(os.environ.get("JUDGE_DIALECTS", "{}"))
"""Module or name of a vLLM parser: the name of our dialect."""
STUBBED = ("vllm", "transformers", "openai", "xgrammar", "mistral_common", "partial_json_parser")
PARSED: list[str] = []


class Json(str):
    """A JSON text that equals any JSON text of the same value."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        try:
            return json.loads(self) == json.loads(other)
        except (TypeError, ValueError):
            return str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other


class Content(str):
    """A text that equals any text that differs only in white space."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return isinstance(other, str) and "".join(self.split()) == "".join(other.split())

    def __ne__(self, other):
        return not self == other


class Record:
    """Any of vLLM's data classes."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

    def __eq__(self, other):
        return isinstance(other, Record) and self.__dict__ == other.__dict__

    __hash__ = None


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


def field(value, name):
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def tools_of(*sources):
    tools = []
    for tool in next((source for source in sources if isinstance(source, list) and source), []):
        function = field(tool, "function") or tool
        schema = field(function, "parameters")
        tools.append(Tool(field(function, "name"), "", {"type": "object", **(schema or {})}))
    return tools


def parser_for(dialect):
    class Adapter:
        def __init__(self, tokenizer=None, tools=None, **options):
            if dialect is None:
                pytest.skip("no dialect of ours")
            self.tools = tools

        def __getattr__(self, name):
            pytest.skip(f"inside of a parser: {name}")

        def extract_tool_calls(self, model_output, request=None):
            PARSED.append(model_output)
            tools = tools_of(self.tools, getattr(request, "tools", None))
            # A server's text ends at a stop token, which it removes.
            reply = parse_stopped(get_dialect(dialect), model_output, "<|stop|>", tools=tools, reasoning_open=False)
            sound = [call for call in reply.tool_calls if call.error is None]
            calls = [
                Call(
                    id=call.id or f"chatcmpl-tool-{number:020}",
                    type="function",
                    function=FunctionCall(
                        name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False)
                    ),
                )
                for number, call in enumerate(sound)
            ]
            content = reply.content if calls else model_output
            return KINDS["ExtractedToolCallInformation"](
                tools_called=bool(calls), tool_calls=calls, content=Content(content) if content else None
            )

    return Adapter


class Manager:
    @staticmethod
    def get_tool_parser(name):
        if name not in NAMES:
            pytest.skip(f"no dialect for {name}")
        return parser_for(NAMES[name])


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
            return parser_for(NAMES.get(module))
        if name in KINDS:
            return KINDS[name]
        return type(name, (Record,), {}) if name[:1].isupper() and self.__name__.startswith(STUBBED) else MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if call.when == "setup":
        PARSED.clear()
        OUTCOMES[item.nodeid] = {"outcome": report.outcome, "why": str(report.longrepr)[-600:]}
    elif call.when == "call":
        why = str(report.longrepr)[-1500:] if report.failed else ""
        kind = "passed" if "[XPASS(strict)]" in why else report.outcome  # vLLM's own parser fails this test
        OUTCOMES[item.nodeid] = {"outcome": kind if PARSED else "skipped", "why": why, "texts": list(PARSED)}


OUTCOMES: dict[str, dict[str, object]] = {}


def pytest_collection_modifyitems(items):
    kept = [
        item
        for item in items
        if not getattr(item, "callspec", None) or item.callspec.params.get("streaming") is not True
    ]
    items[:] = kept


def pytest_sessionfinish(session):
    Path(os.environ["JUDGE_REPORT"]).write_text(json.dumps(OUTCOMES))
