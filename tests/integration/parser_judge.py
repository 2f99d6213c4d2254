"""The judge that vLLM's and SGLang's own tests of tool parsers have in common, as a pytest plugin.

Modules of the judged packages are stubs: no part of them is installed. Names and arguments are compared as values (the
tests compare JSON as text); content without its white space. The outcomes go to the file in ``JUDGE_REPORT``; a test in
which no text was parsed has none. Used by ``vllm_stub.py`` and ``sglang_stub.py`` in separate processes.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

import pytest

from rollouts.dtypes import Tool
from rollouts.renderer.dialects import get_dialect, parse_stopped

NAMES = json.loads(os.environ.get("JUDGE_DIALECTS", "{}"))
"""Module or name of a parser: the name of our dialect."""
PARSED: list[str] = []
OUTCOMES: dict[str, dict[str, object]] = {}


class Json(str):
    """JSON that equals any JSON of the same value."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        try:
            return json.loads(self) == json.loads(other)
        except (TypeError, ValueError):
            return str.__eq__(self, other)

    def __ne__(self, other):
        return not self == other


class Content(str):
    """Text that equals any other that differs only in white space."""

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


def field(value, name):
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def tools_of(*sources):
    tools = []
    for tool in next((source for source in sources if isinstance(source, list) and source), []):
        function = field(tool, "function") or tool
        schema = field(function, "parameters")
        tools.append(Tool(field(function, "name"), "", {"type": "object", **(schema or {})}))
    return tools


def parsed(dialect, text, tools):
    """The reply in a text, and its sound calls as names and JSON of the arguments."""
    PARSED.append(text)
    # A server's text ends at a stop token, which it removes.
    reply = parse_stopped(get_dialect(dialect), text, "<|stop|>", tools=tools, reasoning_open=False)
    sound = [call for call in reply.tool_calls if call.error is None]
    return reply, [(call, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in sound]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``stub(name)`` for each module of the packages ``stubbed``."""

    def __init__(self, stubbed, stub):
        self.stubbed, self.stub = stubbed, stub

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.stubbed:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return self.stub(spec.name)

    def exec_module(self, module):
        pass


def stub_packages(stubbed, stub):
    """Put stubs in the place of packages, also of installed ones."""
    sys.meta_path.insert(0, Finder(stubbed, stub))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if call.when == "setup":
        PARSED.clear()
        OUTCOMES[item.nodeid] = {"outcome": report.outcome, "why": str(report.longrepr)[-600:]}
    elif call.when == "call":
        why = str(report.longrepr)[-1500:] if report.failed else ""
        kind = "passed" if "[XPASS(strict)]" in why else report.outcome  # the package's own parser fails this test
        OUTCOMES[item.nodeid] = {"outcome": kind if PARSED else "skipped", "why": why, "texts": list(PARSED)}


def pytest_sessionfinish(session):
    Path(os.environ["JUDGE_REPORT"]).write_text(json.dumps(OUTCOMES))
