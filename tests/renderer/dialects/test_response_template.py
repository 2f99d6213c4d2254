"""The dialect of a ``response_template``: read as the publisher declares, and as strictly as every other dialect."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.dtypes import Message, Tool
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.renderer.dialects import parse_stopped
from rollouts.renderer.dialects.response_template import DeclaredDialect
from tests.families import TOOLS, small

JSON: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "content": {"close": "<|end|>"},
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open": "<act>",
            "close": "</act>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}},
        },
    },
}
"""JSON between marks, with other keys than usual."""

QUOTED: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<result|>"],
    "fields": {
        "content": {"close": ["<turn|>"]},
        "tool_calls": {
            "open_pattern": r"<\|call>call:(?P<name>\w+)",
            "close": "<call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""Bare keys and strings between special tokens, as Gemma 4 writes them."""

TAGS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<fn=(?P<name>[^>]+)>",
            "close": "</fn>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p=(?P<key>[^>]+)>(?P<value>.*?)</p>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""Arguments in tags; their types come from the tool's schema."""

TOOL = Tool(
    "weather",
    "",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "to": {}}},
)


@pytest.mark.parametrize(
    ("declared", "text", "content", "thought", "arguments"),
    [
        (
            JSON,
            '<hm>I look.</hm>Wait.<act>{"tool": "weather", "with": {"city": "Ulm"}}</act>',
            "Wait.",
            "I look.",
            {"city": "Ulm"},
        ),
        (
            QUOTED,
            '<|call>call:weather{city:<|"|>a "b", {c:d}<|"|>,days:3}<call|>',
            "",
            None,
            {"city": 'a "b", {c:d}', "days": 3},
        ),
        (TAGS, "Well.<fn=weather><p=city>5</p><p=days>5</p></fn>", "Well.", None, {"city": "5", "days": 5}),
    ],
)
def test_a_reply_is_read_as_the_publisher_declares(
    declared: dict[str, Any], text: str, content: str, thought: str | None, arguments: dict[str, Any]
) -> None:
    """Content, thought and call; the parser of transformers reads the same, where it is installed."""
    reply = DeclaredDialect(declared).parse(text, tools=(TOOL,))
    (call,) = reply.tool_calls
    assert (reply.content, reply.reasoning) == (content, thought)
    assert (call.name, call.arguments, call.error) == ("weather", arguments, None)
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    theirs = chat_parsing.parse_response(text, {"defaults": {}, **declared}, prefix="", tools=[TOOL.to_chat()])
    assert theirs["tool_calls"][0]["function"] == {"name": call.name, "arguments": call.arguments}
    assert (theirs.get("content", ""), theirs.get("thinking")) == (content, thought)


@pytest.mark.parametrize(
    ("declared", "text", "fault"),
    [
        (JSON, '<act>{"tool": "weather", "with": {}}', "unclosed"),
        (JSON, '<act>{"tool": "weather", "with": }</act>', "not_json"),
        (JSON, '<act>{"with": {}}</act>', "no_arguments"),
        (JSON, '<act>{"tool": "", "with": {}}</act>', "no_name"),
        (JSON, '<act>{"tool": "weather", "with": [1]}</act>', "bad_arguments"),
        (JSON, "<act>[]</act>", "no_arguments"),
        (QUOTED, "<|call>call:weather{city:Ulm}<call|>", "not_json"),
        (TAGS, "<fn=weather><p=city>1</p><p=city>2</p></fn>", "bad_arguments"),
    ],
)
def test_a_call_that_cannot_be_read_is_malformed(declared: dict[str, Any], text: str, fault: str) -> None:
    """Nothing is repaired, and the calls after it are read."""
    good = '<act>{"tool": "now", "with": {}}</act>' if declared is JSON and text.endswith("</act>") else ""
    bad, *rest = DeclaredDialect(declared).parse(text + good, tools=(TOOL,)).tool_calls
    assert (bad.error is not None, bad.fault) == (True, fault)
    assert [call.name for call in rest] == (["now"] if good else [])


def test_the_prompt_may_begin_the_reply() -> None:
    """A thought that the prompt opens after the start of the turn; marks of earlier turns do not count."""
    dialect = DeclaredDialect(JSON)
    prefix = "<hm>old</hm><|end|><|start|>assistant\n<hm>"
    reply = parse_stopped(dialect, 'I see.</hm>Yes.<act>{"tool": "now", "with": {}}', "</act>", prefix=prefix)
    assert (reply.reasoning, reply.content) == ("I see.", "Yes.")
    assert [call.error for call in reply.tool_calls] == [None]
    assert dialect.parse("Yes.").content == "Yes."


def test_all_text_is_content() -> None:
    """Text before, between and after calls, also where transformers keeps the last part alone."""
    call = '<act>{"tool": "now", "with": {}}</act>'
    reply = DeclaredDialect(JSON).parse(f"One. {call} Two. {call}\n")
    assert (reply.content, len(reply.tool_calls)) == ("One.\nTwo.", 2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "response_template"),
        ({"fields": {}}, "response_template"),
        ({"fields": {"content": {}, "more": {}}}, "response_template.fields"),
        ({"fields": {"tool_calls": {"open": "<a>", "content": "yaml"}}}, r"fields\['tool_calls'\].content"),
        ({"fields": {"tool_calls": {"open_pattern": "("}}}, r"fields\['tool_calls'\].open_pattern"),
        ({"fields": {"tool_calls": {"open": []}}}, r"fields\['tool_calls'\].open"),
        (
            {"fields": {"tool_calls": {"open": "<a>", "content": "xml-inline", "content_args": {"tag_pattern": "a"}}}},
            "tag_pattern",
        ),
    ],
)
def test_a_declaration_of_another_form_is_refused(change: dict[str, Any], field: str) -> None:
    """The message names the field."""
    with pytest.raises(ConfigError, match=field):
        DeclaredDialect({**JSON, **change})


_TEMPLATE = """
{%- for m in messages %}{{ '<|start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<hm>' + m.reasoning_content + '</hm>' }}{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<act>{"tool": "' + c.function.name + '", "with": ' + c.function.arguments | tojson + '}</act>' }}
{%- endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""


def renderer_with(declared: Any, template: str = _TEMPLATE, **options: Any) -> Renderer:
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer.add_tokens(["<|start|>", "<|end|>", "<act>", "</act>", "<hm>", "</hm>"], special_tokens=True)
    tokenizer.response_template = declared
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    return Renderer(tokenizer, chat_template=template, stop_token_ids=[stop], **options)


def test_a_new_notation_is_read_by_its_declaration() -> None:
    """A template of no known dialect: the self-test judges the declared one, and it reads all calls."""
    renderer = renderer_with(JSON)
    assert renderer.dialect.name == "response_template"
    found = renderer.self_test(TOOLS)
    found.raise_if_refused()
    assert found.calls == "read"
    history = [Message("user", "Well?")]
    ids = renderer.encode('<hm>so</hm>Yes.<act>{"tool": "look", "with": {"at": "x"}}</act><|end|>')
    reply = renderer.parse(ids, tools=TOOLS, prompt=renderer.opening(history, TOOLS))
    assert (reply.content, reply.reasoning, reply.tool_calls[0].arguments) == ("Yes.", "so", {"at": "x"})


def test_a_difference_to_the_declaration_is_said() -> None:
    """Where the template has a known dialect, both read the same replies; the note names the first that differs."""
    template = _TEMPLATE.replace("<act>", "<tool_call>").replace("</act>", "</tool_call>")
    template = template.replace('"tool":', '"name":').replace('"with":', '"arguments":')
    call = {**JSON["fields"]["tool_calls"], "open": "<tool_call>", "close": "</tool_call>"}
    same = {**call, "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}}}
    for fields, said in (
        ({**JSON["fields"], "tool_calls": same}, False),
        ({**JSON["fields"], "tool_calls": call}, True),
    ):
        renderer = renderer_with(
            {**JSON, "fields": fields}, template.replace("<hm>", "<think>").replace("</hm>", "</think>")
        )
        assert renderer.dialect.name == "hermes"
        notes = " ".join(renderer.self_test(TOOLS).notes)
        assert ("response_template reads replies otherwise" in notes) == said or not said


def test_the_dialect_is_asked_for_by_name() -> None:
    """``dialect="response_template"`` needs a declaration that can be read."""
    assert renderer_with(JSON, dialect="response_template").dialect.name == "response_template"
    with pytest.raises(ConfigError, match="declares none"):
        small(_TEMPLATE, ("<|end|>",), ("<|end|>",))(None, dialect="response_template")
    with pytest.raises(ConfigError, match="version 1"):
        renderer_with({"version": 9}, dialect="response_template")
    assert renderer_with({"version": 9}).dialect.name == "plain"
