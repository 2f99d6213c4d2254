"""GLM-4's chat template in Python, and its dialect."""

from __future__ import annotations

import pytest

from rollouts.dtypes import ChatDict, Tool
from rollouts.renderer.dialects import get_dialect
from rollouts.renderer.glm_4 import render

DIALECT = get_dialect("rollouts.renderer.glm_4:Glm4")
WEATHER = Tool("get_weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = 'get_weather\n{"city": "北京"}'


def asked(arguments: ChatDict, *, content: str = "", count: int = 1) -> ChatDict:
    calls = [{"type": "function", "id": "c", "function": {"name": "get_weather", "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls * count}


def test_a_conversation_is_written_as_the_publisher_does() -> None:
    """The tools come first; a call is the name in the line of its turn, and the JSON below; a result an observation."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        asked({"city": "北京"}, content="I look."),
        {"role": "tool", "content": "no", "tool_call_id": "c"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Sure?"},
    ]
    text = "".join(render(messages, [WEATHER.to_chat()], True))
    head, tools, rest = text.partition("# 可用工具")
    assert head.startswith("[gMASK]<sop><|system|>\n你是")
    assert (tools + rest).startswith('# 可用工具\n\n## get_weather\n\n{\n    "name": "get_weather",\n')
    assert rest.partition("}\n在调用")[2] == (
        "上述函数时，请使用 Json 格式表示调用的参数。<|system|>\nBe brief.<|user|>\nRain?<|assistant|>\nI look."
        f"<|assistant|>{CALL}<|observation|>\nno<|assistant|>\nNo.<|user|>\nSure?<|assistant|>"
    )
    without = "".join(render(messages, [WEATHER.to_chat()], introduction=""))
    assert without.startswith("[gMASK]<sop><|system|>\n# 可用工具\n\n## get_weather")
    assert without.endswith("Sure?")
    with pytest.raises(ValueError, match="one call a turn"):
        render([asked({}, count=2)])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("get_weather", {"city": "北京"})]),
        (f"\nI look.\n<|assistant|>{CALL}", "I look.", [("get_weather", {"city": "北京"})]),
        (f"now\n{{}}<|assistant|>{CALL}\n", "", [("now", {}), ("get_weather", {"city": "北京"})]),
        ('now\n{"x": "<|assistant|>look\\n{}"}', "", [("now", {"x": "<|assistant|>look\n{}"})]),
        ("\nIt does not rain.\n{}", "It does not rain.\n{}", []),
        (f"\n{CALL}", CALL, []),
        ("Sure\nit does not.", "Sure\nit does not.", []),
        ("", "", []),
    ],
)
def test_the_first_line_of_a_turn_names_the_tool(text: str, content: str, calls: list[tuple[str, ChatDict]]) -> None:
    """Without a name there, or without an object below it, a turn is text."""
    reply = DIALECT.parse(text, tools=[WEATHER])
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls
    assert all(call.error is None for call in reply.tool_calls)
    assert reply.content == content


def test_a_call_that_is_cut_anywhere_is_never_valid() -> None:
    """Nor is one with text after its arguments, or whose arguments are not strict JSON."""
    cut = [CALL[:end] for end in range(len(CALL))]
    for text in [*cut, f"{CALL} now", "now\n{'x': 1}", 'now\n{"x": 1, "x": 2}', "now\n{}{}"]:
        calls = DIALECT.parse(text).tool_calls
        assert all(call.error is not None and call.raw and call.name in text for call in calls)
        assert len(calls) == ("{" in text)
