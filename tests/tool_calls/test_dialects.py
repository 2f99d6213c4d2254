"""Every dialect: the same calls written its way, and what is done with broken ones."""

import time

import pytest

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.renderer import Renderer
from rollouts.tool_calls import DIALECTS, get_dialect

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "free": {},
    },
}
TOOLS = [Tool("weather", "Tells the weather.", SCHEMA), Tool("now", "Tells the time.")]

# dialect: two calls, weather(city="Köln", days=2) and now()
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
    "llama_json": '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Köln", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Köln", "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}',
}
CLOSED = sorted(set(WRITTEN) - {"llama_json", "mistral", "harmony"})
"""Dialects whose calls have a closing mark."""


def brief(calls):
    return [(call.name, dict(call.arguments), call.error) for call in calls]


BOTH = [("weather", {"city": "Köln", "days": 2}, None), ("now", {}, None)]


def test_every_dialect_with_calls_is_in_the_table() -> None:
    """A new dialect is tested, or this fails."""
    assert set(WRITTEN) == set(DIALECTS) - {"plain"}


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls_in_order(name: str) -> None:
    """Names, typed arguments, no error, nothing left as content."""
    reply = get_dialect(name).parse(WRITTEN[name], tools=TOOLS)
    assert brief(reply.tool_calls) == BOTH
    assert reply.content == ""


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"harmony", "llama_json"}))
def test_text_around_the_calls_is_content(name: str) -> None:
    """Before and after them."""
    reply = get_dialect(name).parse(f"Let me look.\n\n{WRITTEN[name]}\nWait.", tools=TOOLS)
    assert (brief(reply.tool_calls), reply.content) == (BOTH, "Let me look.\nWait.")


def test_text_after_a_llama_call_is_content() -> None:
    """A Llama call stands at the start, or after its tag."""
    parse = get_dialect("llama_json").parse
    reply = parse(f"Sure. <|python_tag|>{WRITTEN['llama_json']} There.", tools=TOOLS)
    assert (brief(reply.tool_calls), reply.content) == (BOTH, "Sure.\nThere.")


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"harmony"}))
@pytest.mark.parametrize("opened", [None, True])
def test_calls_drafted_in_a_thought_are_no_calls(name: str, opened: bool | None) -> None:
    """Whatever the dialect's marks."""
    opening, closing = getattr(DIALECTS[name], "reasoning")  # noqa: B009 - no part of the protocol
    for start in ("", opening):
        reply = get_dialect(name).parse(f"{start}{WRITTEN[name]}{closing}\n\nNo.", tools=TOOLS, reasoning_open=opened)
        assert (reply.tool_calls, reply.content, reply.reasoning) == ((), "No.", WRITTEN[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_anywhere_is_never_a_sound_one(name: str) -> None:
    """Whatever is cut off the last call: it is malformed or not begun, and the first one stays."""
    whole = WRITTEN[name]
    for end in range(whole.index("now") + 3, len(whole)):
        found = get_dialect(name).parse(whole[:end], tools=TOOLS).tool_calls
        assert [call.name for call in found if call.error is None] in (["weather"], ["weather", "now"])
        assert all(call.error is None or call.raw for call in found)


@pytest.mark.parametrize("name", CLOSED)
def test_a_call_without_its_closing_mark_is_malformed(name: str) -> None:
    """Cut inside the first call: one malformed call that says what is missing, no silence."""
    cut = WRITTEN[name][: WRITTEN[name].index("2") + 1]
    (call,) = get_dialect(name).parse(cut, tools=TOOLS).tool_calls
    assert "is missing" in (call.error or "")
    assert (call.name, dict(call.arguments)) == ("weather", {})


MALFORMED = {
    "qwen3_coder": [
        ("<tool_call>\n<function=weather>\n<parameter=days>\ntwo\n</parameter>\n</function>\n</tool_call>", "integer"),
        ("<tool_call>{}</tool_call>", "<function=name>"),
        ("<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>", "<tool_call> before"),
        ("<tool_call><function=weather>Köln</function></tool_call>", "no argument with its tags"),
        (
            "<tool_call><function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function></tool_call>",
            "more than once",
        ),
    ],
    "glm": [
        ("<tool_call><arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>", "name of a tool"),
        ("<tool_call>weather\n<arg_key>days</arg_key><arg_value>two</arg_value></tool_call>", "integer"),
        ("<tool_call>weather\n<arg_key>city</arg_key></tool_call>", "no argument with its tags"),
    ],
    "llama_json": [
        ('{"name": "weather", "parameters": "{}"}', "is a string"),
        ('{"name": "weather"}', '"parameters" is missing'),
        ("<|python_tag|>weather.call(city=1)", "not valid JSON"),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "weather", "arguments": "{}"}]', "is a string"),
        ('[TOOL_CALLS]weather[ARGS]{"city": ', "not valid JSON"),
        ("[TOOL_CALLS][]", "no call"),
        ("[TOOL_CALLS]weather", "not valid JSON"),
        ("[TOOL_CALLS]", "not valid JSON"),
    ],
    "deepseek_v3": [
        ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "no call in it"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{}<｜tool▁call▁end｜>", "```json"),
    ],
    "deepseek_v3_1": [
        ("<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ("<｜tool▁call▁begin｜>weather<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "not an array"),
        ('<｜tool▁call▁begin｜>weather<｜tool▁sep｜>"{}"<｜tool▁call▁end｜>', "is a string"),
        ("<｜tool▁calls▁begin｜>Köln<｜tool▁calls▁end｜>", "between the calls"),
    ],
    "deepseek_v3_2": [
        (
            '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="days" string="false">two</｜DSML｜parameter>'
            "</｜DSML｜invoke>",
            "not valid JSON",
        ),
        ('<｜DSML｜invoke name=""></｜DSML｜invoke>', "name of a tool"),
    ],
    "kimi_k2": [
        ("<|tool_call_begin|>weather<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.name:index"),
        ("<|tool_call_begin|>functions.weather:0<|tool_call_end|>", "arguments are missing"),
    ],
    "minimax": [
        ('<invoke name="weather"><parameter name="days">two</parameter></invoke>', "integer"),
        ('<invoke name=""></invoke>', "name of a tool"),
    ],
    "harmony": [("<|channel|>commentary to=functions.weather<|message|>{", "not valid JSON")],
}


@pytest.mark.parametrize(
    ("name", "text", "words"), [(name, *case) for name, cases in MALFORMED.items() for case in cases]
)
def test_broken_calls_are_malformed_with_a_reason(name: str, text: str, words: str) -> None:
    """One call with an error that names the fault; no arguments are made up."""
    (call,) = get_dialect(name).parse(text, tools=TOOLS).tool_calls
    assert words in (call.error or "")
    assert dict(call.arguments) == {}


def test_ids_are_kept_where_the_dialect_has_them() -> None:
    """Kimi's and Mistral's; the others leave the id to the agent loop."""
    ids = {name: [call.id for call in DIALECTS[name].parse(text).tool_calls] for name, text in WRITTEN.items()}
    assert ids.pop("kimi_k2") == ["functions.weather:0", "functions.now:1"]
    assert all(found == ["", ""] for found in ids.values())
    nemo = '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]'
    assert [call.id for call in DIALECTS["mistral"].parse(nemo).tool_calls] == ["abcdefghi"]
    small = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"
    assert [call.id for call in DIALECTS["mistral"].parse(small).tool_calls] == ["abcdefghi"]


@pytest.mark.parametrize(
    ("argument", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "a\nb", "a\nb"),
        ("city", "x</parameter>y", "x</parameter>y"),
        ("tags", '["a"]', ["a"]),
        ("unit", "null", None),
        ("unit", "5", "5"),
        ("free", "5", 5),
        ("free", "five", "five"),
        ("unknown", "5", "5"),
    ],
)
def test_values_without_quotes_take_their_type_from_the_schema(argument: str, text: str, value: object) -> None:
    """Text where the schema allows a string or says nothing of the argument, JSON elsewhere."""
    written = f"<tool_call><function=weather><parameter={argument}>\n{text}\n</parameter></function></tool_call>"
    (call,) = get_dialect("qwen3_coder").parse(written, tools=TOOLS).tool_calls
    assert (call.error, call.arguments[argument] if not call.error else None) == (None, value)


def test_an_answer_in_json_is_no_llama_call() -> None:
    """Only an object that begins with a name is one."""
    reply = get_dialect("llama_json").parse('{"answer": 5}')
    assert (reply.content, reply.tool_calls) == ('{"answer": 5}', ())


def test_harmony_channels() -> None:
    """Analysis is reasoning, final is content, and a call written in the analysis is none."""
    text = '<|channel|>analysis<|message|>I call {"a"}<|end|><|start|>assistant<|channel|>final<|message|>Three.'
    reply = get_dialect("harmony").parse(text)
    assert (reply.reasoning, reply.content, reply.tool_calls) == ('I call {"a"}', "Three.", ())


FAMILIES = {
    "Qwen-Qwen3-0.6B": "qwen3",
    "Qwen3-Coder": "qwen3",
    "Qwen3.5-4B": "qwen3",
    "GLM-4.6": "qwen3",
    "ibm-granite-granite-4.0": "qwen3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v3",
    "openai-gpt-oss-120b": "gptoss",
}


@pytest.mark.parametrize("template", FAMILIES)
def test_what_the_template_writes_is_read_back(template: str, tokenizer, chat_template) -> None:
    """The real template renders a call in its history; its dialect reads the same name and arguments."""
    renderer = Renderer(tokenizer(FAMILIES[template]), chat_template=chat_template(template))
    arguments = {"city": 'Köln "x"', "days": 2, "tags": ["a", "b"]}
    chat = [Message("user", "QUESTION"), Message("assistant", tool_calls=(ToolCall("weather", arguments, id="c"),))]
    text = renderer.decode(renderer.opening([*chat, Message("tool", "R", tool_call_id="c", name="weather")], TOOLS))
    marker = "<|start|>assistant" if "gpt-oss" in template else "QUESTION"
    reply = renderer.dialect.parse(text[text.index(marker) + len(marker) :], tools=TOOLS)
    assert ("weather", arguments, None) in brief(reply.tool_calls)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_reply_that_repeats_one_mark_is_read_in_linear_time(name: str) -> None:
    """Models fall into loops: 100,000 characters of one mark are read at once, not in seconds."""
    marks = ["<think>", "<think></think>", "<tool_call>", "<parameter=a>", "<arg_key>", "[TOOL_CALLS]", "<|channel|>"]
    marks += ["<｜tool▁call▁begin｜>", "<|tool_call_begin|>", '<invoke name="a">', "<|message|>", "{", "[", " ", "<"]
    begun = time.process_time()
    for mark in marks:
        for start in ("", "<tool_call><function=a>", "<|python_tag|>", "[TOOL_CALLS]"):
            get_dialect(name).parse(start + mark * (100_000 // len(mark)))
    assert time.process_time() - begun < 10.0
