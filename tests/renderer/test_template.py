"""The fast paths of the template sandbox give the same results as the sandbox without them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.renderer.template import ChatTemplate
from rollouts.renderer.template_sandbox import TemplateSandbox, tojson

MESSAGES = [
    {"role": "user", "content": " a{0}b ", "items": "own", "format": "{x}", "none": None},
    {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<&"}}}]},
]
EXPRESSIONS = [
    "m.role", "m['role']", "m.absent", "m.absent is defined", "m.absent.deeper", "m.items", "m.items()",
    "m.get('role')", "m.update({'role': 'x'})", "m.pop('role')", "m.clear", "m.__class__", "m.__class__.__mro__",
    "m['__class__']", "m.format", "m.none is none", "m.content.strip()", "m.content.strip('a ')", "m.content.strip(1)",
    "m.content.absent()", "m.content.format(7)", "m.content['format'](8)", "m.content.format_map({'0': 1})",
    "'{0.__class__}'.format(m)", "m.content.__class__", "'-'.join(m)", "'-'.join(m, 1)", "', '.join(['a', 'b'])",
    "m.content.split('a')[-1].lstrip('{')", "'x'.startswith('x', 0)", "'x'.replace('x', 'y', count=1)",
    "namespace(a=1).a", "namespace({'a': 2}, b=3).b", "namespace(a=1).b", "namespace(1)", "namespace(a=1)._x",
    "namespace(a=1).__init__", "namespace", "m()", "absent()", "range(3)|list", "range(1000000)", "dict(a=1).a",
    "messages.append(m)", "messages[5].role", "messages[0].role", "(messages|length).real", "m.keys()|list",
    "lipsum.__globals__", "self.__init__", "joiner(',')()", "m.content.encode()", "cycler('a').next()",
]  # fmt: skip
STATEMENTS = [
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{{ namespace(a=loop.last).a }}{{ m.content.strip('c') }}{{ loop.revindex }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.previtem.role }}{{ loop.__class__ }}{% endfor %}",
    "{% macro f(x) %}{{ x.strip() }}{{ caller() }}{% endmacro %}{% call f(' a ') %}b{% endcall %}",
    "{% macro f(x) %}[{{ x }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ f(1, 2, a=3) }}",
    "{% set ns = namespace() %}{% set ns.items = 1 %}{{ ns.items }}",
    "{% block b %}{{ 'a'.strip() }}{{ namespace(a=1).a }}{% endblock %}",
]


def outcome(environment: jinja2.Environment, source: str) -> str:
    """The rendered text, or the error."""
    messages = [{**message} for message in MESSAGES]
    try:
        result = environment.from_string(source).render(messages=messages, m=messages[0])
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        result = f"{type(error).__name__}: {error}"
    return re.sub(r"0x[0-9a-f]+", "(an address)", result)


@pytest.mark.parametrize("source", [*(f"{{{{ {expression} }}}}" for expression in EXPRESSIONS), *STATEMENTS])
def test_the_fast_paths_of_the_sandbox_change_nothing(source: str) -> None:
    """Keys, methods, namespaces, missing names, and forbidden ones."""
    assert outcome(TemplateSandbox(), source) == outcome(jinja2.sandbox.ImmutableSandboxedEnvironment(), source)


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, name="t", variables={}, moment=datetime.datetime(2031, 2, 3), **options)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
@settings(deadline=None)  # the first example tries the template in a separate process
def test_json_is_written_as_transformers_writes_it(arguments: dict[str, Any]) -> None:
    """Arguments of a call and the schema of a tool: in order, not escaped, with spaces after separators."""
    message = Message("assistant", tool_calls=(ToolCall("f", arguments),))
    tool = Tool("f", "", {"type": "object", "x": arguments})
    compiled = template("{{ messages[-1].tool_calls[0].function.arguments|tojson }}{{ tools[0]|tojson }}")
    expected = tojson(arguments) + tojson(tool.to_chat())
    for _ in range(2):
        assert compiled.render([message], [tool]) == expected


def test_lists_of_tools_in_turn_are_written_as_their_own() -> None:
    """The forms of the latest tools are kept; the forms of other tools, equal in part, are never written in their
    place."""
    compiled = template("{% for tool in tools or [] %}{{ tool|tojson }}{% endfor %}")
    one, two = Tool("one"), Tool("two")
    for tools in ([one], [two], [one, two], [one], [Tool("one", "other")], []):
        assert compiled.render([Message("user", "U")], tools) == "".join(tojson(tool.to_chat()) for tool in tools)
        assert compiled.key_of(tools) == repr(tuple(tools))


def test_renderings_share_no_variables() -> None:
    """Variables that a template sets at top level do not persist."""
    counting = template("{{ seen }}{% set seen = 'x' %}{{ seen }}{{ messages|length }}")
    assert [counting.render([Message("user", "U")]) for _ in range(2)] == ["x1", "x1"]


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("Qwen-Qwen3-0.6B", {"enable_thinking"}),
        ("GLM-4.6", {"enable_thinking"}),
        ("deepseek-ai-DeepSeek-V3.1", {"bos_token", "enable_thinking", "thinking"}),
        ("openai-gpt-oss-120b", {"builtin_tools", "model_identity", "reasoning_effort"}),
        ("Qwen-Qwen2.5-7B-Instruct", set()),
    ],
)
def test_the_variables_of_a_template_are_found(name: str, reads: set[str], chat_template: Callable[[str], str]) -> None:
    """The variables that a caller can set: without those that the template assigns or each rendering sets."""
    template = ChatTemplate(chat_template(name), name=name, variables={}, moment=datetime.datetime(2026, 1, 1))
    assert template.reads == reads
