"""Every dialect: the same calls in its notation, and malformed calls."""

import ast
import json
import re
import time

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.renderer import Renderer
from rollouts.renderer.dialects import DIALECTS, get_dialect
from rollouts.renderer.dialects.registry import dialect_of_template
from tests.dialects import MALFORMED, OF_MESSAGES, TOOLS, WRITTEN
from tests.documented_calls import DOCUMENTED

LISTS = {"granite", "hunyuan", "apriel", "apertus", "nemotron_v2", "phi4_mini", "command_r", "command_r7b", "xlam"}
"""Dialects whose parallel calls are one JSON value, and ``minimax_m1``, whose block ends after all of them."""
LISTS |= {"minimax_m1", "granite_3_2"}
CLOSED = sorted(
    set(WRITTEN)
    - {"llama_json", "llama_pythonic", "mistral", "granite", "harmony", "phi4_mini", "gigachat", "xlam", "granite_20b"}
    - {"functionary_v3_2", "granite_3_2", "muse"}
)
"""Dialects whose calls have a closing mark."""


def brief(calls):
    return [(call.name, dict(call.arguments), call.error) for call in calls]


BOTH = [("weather", {"city": "Köln", "days": 2}, None), ("now", {}, None)]


def test_every_dialect_with_calls_is_in_the_table() -> None:
    """This test fails if a new dialect is not tested."""
    assert set(WRITTEN) == set(DIALECTS) - {"plain"}


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls_in_order(name: str) -> None:
    """Names, typed arguments, no error, nothing left as content."""
    reply = get_dialect(name).parse(WRITTEN[name], tools=TOOLS)
    assert brief(reply.tool_calls) == BOTH
    assert reply.content == ""


@pytest.mark.parametrize(("name", "text", "properties", "call"), DOCUMENTED, ids=[row[0] for row in DOCUMENTED])
def test_a_documented_call_is_read(name, text, properties, call) -> None:
    """With its name and typed arguments, without a fault, and nothing of it is content."""
    tools = [Tool(call[0], "Does it.", {"type": "object", "properties": properties})]
    reply = get_dialect(name).parse(text, tools=tools, reasoning_open=False)
    assert brief(reply.tool_calls) == [(*call, None)]
    assert reply.content == ""


@pytest.mark.parametrize(("name", "other"), [("longcat", "longcat_2"), ("longcat_2", "longcat")])
def test_longcat_and_longcat_2_do_not_read_each_other(name: str, other: str) -> None:
    """They share their opening mark; the call of the other one is malformed."""
    text = next(text for dialect, text, _, _ in DOCUMENTED if dialect == name)
    assert dialect_of_template(text) == name
    assert [call.error is None for call in get_dialect(other).parse(text).tool_calls] == [False]


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"llama_pythonic", "functionary_v3_2", "solar"} - OF_MESSAGES))
def test_text_around_the_calls_is_content(name: str) -> None:
    """Before and after them."""
    reply = get_dialect(name).parse(f"Let me look.\n\n{WRITTEN[name]}\nWait.", tools=TOOLS)
    assert (brief(reply.tool_calls), reply.content) == (BOTH, "Let me look.\nWait.")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("llama_json", "Sure. <|python_tag|>", " There."),
        ("solar", "<|content|>Sure.<|end|><|begin|>assistant", "<|calls|> There."),
        ("functionary_v3_2", "all\nSure.>>>", ">>>all\nThere."),
        ("llama_pythonic", "Sure. <|python_start|>", "<|python_end|> There."),
        ("harmony", "<|channel|>final<|message|>Sure.<|end|><|start|>assistant", "<|call|> There."),
        ("inkling", "<|content_text|>Sure.<|end_message|><|message_model|>", "<|message_model|><|content_text|>There."),
        (
            "muse",
            " to=user<|message|>Sure.<|eom|><|start|>assistant",
            "<|eom|><|start|>assistant to=user<|message|>There.",
        ),
    ],
)
def test_text_around_calls_that_need_a_place_is_content(name: str, before: str, after: str) -> None:
    """A list in Python syntax is at the start of the reply or after its tag; other lists are separate messages."""
    reply = get_dialect(name).parse(f"{before}{WRITTEN[name]}{after}", tools=TOOLS, reasoning_open=False)
    assert (brief(reply.tool_calls), reply.content) == (BOTH, "Sure.\nThere.")


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - OF_MESSAGES))
@pytest.mark.parametrize("opened", [None, True])
def test_calls_drafted_in_a_thought_are_no_calls(name: str, opened: bool | None) -> None:
    """With the marks of every dialect."""
    opening, closing = getattr(DIALECTS[name], "reasoning")  # noqa: B009 - no part of the protocol
    for start in ("", opening):
        reply = get_dialect(name).parse(f"{start}{WRITTEN[name]}{closing}\n\nNo.", tools=TOOLS, reasoning_open=opened)
        assert (reply.tool_calls, reply.content, reply.reasoning) == ((), "No.", WRITTEN[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_anywhere_is_never_valid(name: str) -> None:
    """The cut last call is malformed or absent, and the first call stays valid; but none of a cut list is valid."""
    whole = WRITTEN[name]
    left = [] if name in LISTS else ["weather"]
    for end in range(whole.index("now") + 3, len(whole)):
        calls = get_dialect(name).parse(whole[:end], tools=TOOLS).tool_calls
        assert [call.name for call in calls if call.error is None] in (left, ["weather", "now"])
        assert all(call.error is None or call.raw for call in calls)


@pytest.mark.parametrize("name", CLOSED)
def test_a_call_without_its_closing_mark_is_malformed(name: str) -> None:
    """Cut inside the first call: one malformed call whose error names the missing mark."""
    cut = WRITTEN[name][: WRITTEN[name].index("2") + 1]
    (call,) = get_dialect(name).parse(cut, tools=TOOLS).tool_calls
    assert "is missing" in (call.error or "")
    assert (call.name, dict(call.arguments)) == ("weather", {})


@pytest.mark.parametrize(
    ("name", "text", "fault", "words"), [(name, *case) for name, cases in MALFORMED.items() for case in cases]
)
def test_broken_calls_are_malformed_with_a_reason(name: str, text: str, fault: str, words: str) -> None:
    """One call with an error message, the kind of fault, and no arguments."""
    (call,) = get_dialect(name).parse(text, tools=TOOLS).tool_calls
    assert words in (call.error or "")
    assert call.fault == fault
    assert dict(call.arguments) == {}


def test_ids_are_kept_where_the_dialect_has_them() -> None:
    """Kimi's, Solar's and Mistral's; the others leave the id to the agent loop."""
    ids = {name: [call.id for call in DIALECTS[name].parse(text).tool_calls] for name, text in WRITTEN.items()}
    assert ids.pop("kimi_k2") == ["functions.weather:0", "functions.now:1"]
    assert ids.pop("solar") == ["a1", "a2"]
    assert all(call_ids == ["", ""] for call_ids in ids.values())
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
        ("free", "'a' 'b'", "'a' 'b'"),
        ("free", "0012", "0012"),
        ("free", "['a']", ["a"]),
        ("free", "True", True),
        ("unknown", "5", "5"),
        ("open", "True", True),
        ("tags", "['a', 'b']", ["a", "b"]),
        ("any", "5", 5),
        ("odd", "five", "five"),
        ("none", "5", 5),
    ],
)
def test_values_without_quotes_take_their_type_from_the_schema(argument: str, text: str, value: object) -> None:
    """Text if the schema allows a string or does not list the argument, otherwise JSON or a Python literal."""
    written = f"<tool_call><function=weather><parameter={argument}>\n{text}\n</parameter></function></tool_call>"
    schemas = {
        "any": {"anyOf": [True, {"type": "integer"}]},
        "odd": {"type": [["a"], "string"]},
        "none": {"anyOf": None},
    }
    weather, *others = TOOLS
    properties = {**weather.parameters["properties"], **schemas}
    tools = [attrs.evolve(weather, parameters={"type": "object", "properties": properties}), *others]
    (call,) = get_dialect("qwen3_coder").parse(written, tools=tools).tool_calls
    assert (call.error, call.arguments[argument] if not call.error else None) == (None, value)


SERVED = [
    ("llama_json", '{"name": "weather", "arguments": {"days": 2}}', "weather", {"days": 2}),
    ("llama_json", 'Sure. {"name": "weather", "arguments": {"days": 2}}', "weather", {"days": 2}),
    ("deepseek_v3_2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜function_calls>', "now", {}),
    ("deepseek_v3_2", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now" />\n</｜DSML｜tool_calls>', "now", {}),
    ("llama_pythonic", '<|tool_call_start|>[{"name": "weather", "arguments": {"days": 2}}]<|tool_call_end|>', "weather",
     {"days": 2}),
    ("muse", WRITTEN["muse"].partition("</atem:invoke>")[0].replace("weather", "weather.weather")
     + "</atem:invoke></atem:function_calls>", "weather", {"city": "Köln", "days": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "tool", "arguments"), SERVED)
def test_calls_that_servers_run_are_read(name: str, text: str, tool: str, arguments: dict[str, object]) -> None:
    """Other spellings of models that deployed servers accept: a run trains what a server would run."""
    (call,) = get_dialect(name).parse(text, tools=TOOLS).tool_calls
    assert (call.name, dict(call.arguments), call.error) == (tool, arguments, None)


@pytest.mark.parametrize("form", ['{"name": "%s", "arguments": {}}', "[%s()]"])
def test_no_call_behind_the_first_list_of_lfm2_is_lost(form: str) -> None:
    """The model reads that the second is none; it is neither dropped nor shown as text."""
    written = f"<|tool_call_start|>{form % 'now'}\n{form % 'weather'}<|tool_call_end|>Done."
    reply = get_dialect("llama_pythonic").parse(written, tools=TOOLS)
    assert [(call.raw.count("now"), call.fault) for call in reply.tool_calls] == [(1, None), (0, "bad_form")]
    assert reply.content == "Done."


def test_a_doubled_name_of_a_tool_stays() -> None:
    """Where the environment has a tool of that name."""
    written = WRITTEN["muse"].replace("weather", "weather.weather")
    tools = [*TOOLS, attrs.evolve(TOOLS[0], name="weather.weather")]
    assert [call.name for call in get_dialect("muse").parse(written, tools=tools).tool_calls] == [
        "weather.weather",
        "now",
    ]


def test_an_answer_in_json_is_no_llama_call() -> None:
    """Only an object that begins with a name is a call."""
    reply = get_dialect("llama_json").parse('{"answer": 5}')
    assert (reply.content, reply.tool_calls) == ('{"answer": 5}', ())


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@hypothesis.given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), LITERALS, max_size=4))
def test_literals_are_read_as_python_reads_them(arguments: dict[str, object]) -> None:
    """The ``repr`` of any plain value parses as with ``ast.literal_eval``."""
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    reply = get_dialect("llama_pythonic").parse(f"[f({written}), g()]", reasoning_open=False)  # a value may close it
    expected = {name: ast.literal_eval(repr(value)) for name, value in arguments.items()}
    assert brief(reply.tool_calls) == [("f", expected, None), ("g", {}, None)]


def gemma_text(value: object) -> str:
    """A value in Gemma's notation."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f'<|"|>{key}<|"|>:{gemma_text(inner)}' for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return json.dumps(value)


@hypothesis.given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), LITERALS, max_size=4))
def test_what_is_written_in_gemmas_notation_is_read_back(arguments: dict[str, object]) -> None:
    """Any plain values, nested in any way, with any text but the marks in the strings."""
    hypothesis.assume("<|" not in repr(arguments))
    written = ",".join(f"{name}:{gemma_text(value)}" for name, value in arguments.items())
    reply = get_dialect("gemma").parse(f"<|tool_call>call:f{{{written}}}<tool_call|>")
    assert brief(reply.tool_calls) == [("f", arguments, None)]


def test_harmony_channels() -> None:
    """Analysis is reasoning, final is content, and a call in the analysis does not count."""
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
def test_what_the_template_writes_is_read_back(template: str, small_tokenizer, chat_template) -> None:
    """The real template renders a call in the history; its dialect parses the same name and arguments."""
    renderer = Renderer(small_tokenizer(FAMILIES[template]), chat_template=chat_template(template))
    arguments = {"city": 'Köln "x"', "days": 2, "tags": ["a", "b"]}
    chat = [Message("user", "QUESTION"), Message("assistant", tool_calls=(ToolCall("weather", arguments, id="c"),))]
    text = renderer.decode(renderer.opening([*chat, Message("tool", "R", tool_call_id="c", name="weather")], TOOLS))
    marker = "<|start|>assistant" if "gpt-oss" in template else "QUESTION"
    reply = renderer.dialect.parse(text[text.index(marker) + len(marker) :], tools=TOOLS)
    assert ("weather", arguments, None) in brief(reply.tool_calls)


MARKED = sorted(name for name, dialect in DIALECTS.items() if getattr(dialect, "marks", ()))
PIECES = sorted({piece for name in MARKED for piece in re.findall(r"[<\[{][^<>\]]*[>\]]?|\w+", WRITTEN[name])})


@pytest.mark.parametrize("name", MARKED)
def test_looking_for_the_marks_first_changes_nothing(name: str) -> None:
    """For any text, the result equals the result of the same dialect without ``marks``."""
    dialect = DIALECTS[name]
    kind = type(dialect)
    whole = type("Whole", (kind,), {"block": kind.block})()
    assert (whole.marks, bool(dialect.marks)) == ((), True)
    own = [piece for piece in PIECES if piece in WRITTEN[name]]

    @hypothesis.settings(max_examples=40)  # of each of 42 notations
    @hypothesis.example([dialect.marks[0], getattr(dialect, "closing", "")])  # a call without a name
    @hypothesis.given(st.lists(st.sampled_from([*dialect.marks, *own, *PIECES, "<think>", "</think>", "\n"])))
    def play(pieces: list[str]) -> None:
        text = "".join(pieces)
        for opened in (None, True, False):
            replies = [parser.parse(text, tools=TOOLS, reasoning_open=opened) for parser in (dialect, whole)]
            assert replies[0] == replies[1]

    play()


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_reply_that_repeats_one_mark_is_read_in_linear_time(name: str) -> None:
    """Models fall into loops: 100,000 characters of one mark are parsed quickly."""
    marks = ["<think>", "<think></think>", "<tool_call>", "<parameter=a>", "<arg_key>", "[TOOL_CALLS]", "<|channel|>"]
    marks += [
        "<|tool_call>",
        "<|tool_call>call:f{",
        '<|"|>',
        "<｜tool▁call▁begin｜>",
        "<|tool_call_begin|>",
        '<invoke name="a">',
        "<|message|>",
        "{",
        "[",
        " ",
        "<",
    ]
    starts = ("", "<tool_call><function=a>", "<|python_tag|>", "[TOOL_CALLS]")
    pairs = [(start, mark) for mark in marks for start in starts]
    pairs += [("", "<|open|>call "), ("", "<function="), (starts[1], "<function="), ("<function ", "<![CDATA[")]
    begun = time.process_time()
    for start, mark in pairs:
        get_dialect(name).parse(start + mark * (100_000 // len(mark)))
    assert time.process_time() - begun < 10.0


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[label(tags={'urgent', 'bug'})]", {"tags": ["urgent", "bug"]}),
        ("[label(tags={'a'}, by={'x': {1, 2}})]", {"tags": ["a"], "by": {"x": [1, 2]}}),
        ("[label(tags={})]", {"tags": {}}),
        ("[label(run='sed -n '1,5p' a.py', n=2)]", {"run": "sed -n '1,5p' a.py", "n": 2}),
        ("[label(run='python3 -c \"print(f(x='a'))\"')]", {"run": "python3 -c \"print(f(x='a'))\""}),
        ("[label(run='a', note='b')]", {"run": "a", "note": "b"}),
    ],
)
def test_sets_and_nested_quotes_of_lists_in_python_syntax(text: str, arguments: dict[str, object]) -> None:
    """LFM2 writes them; what is a literal in Python is read as that literal."""
    (call,) = get_dialect("llama_pythonic").parse(text).tool_calls
    assert (call.arguments, call.error) == (arguments, None)


@pytest.mark.parametrize(
    "text", ["[label(tags={'a', 'b': 1})]", "[label(run='sed 'a' b', 2)]", "[label(run='it's'", "[label(n=1e999)]"]
)
def test_other_quotes_and_braces_are_malformed(text: str) -> None:
    """A set that becomes a dict, a string without an end, a number that no float has."""
    (call,) = get_dialect("llama_pythonic").parse(text).tool_calls
    assert call.error is not None


@pytest.mark.parametrize(
    ("name", "text", "thought", "content"),
    [
        ("granite_3_2", "Here is my thought process: I add.\nHere is my response: 4", "I add.", "4"),
        ("kimi_vl", "◁think▷I add.◁/think▷4", "I add.", "4"),
        ("hunyuan", "<think>\nI add.\n</think>\n<answer>\n4\n</answer>", "I add.", "4"),
        ("hunyuan", "<answer>\n4\n</answer>", None, "4"),
        ("hunyuan_v4", "<think:abc>I add.</think:abc>4", "I add.", "4"),
        ("k2_horizon", "<ifm|think>I add.</ifm|think>4", "I add.", "4"),
        ("longcat", "<longcat_think>I add.</longcat_think>4", "I add.", "4"),
        (
            "kimi_k3",
            "<|open|>think<|sep|>I add.<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
            "I add.",
            "4",
        ),
        ("muse", " to=self<|message|>I add.<|eom|><|start|>assistant to=user<|message|>4", "I add.", "4"),
        (
            "inkling",
            "<|content_thinking|>I add.<|end_message|><|message_model|><|content_text|>4<|end_message|>",
            "I add.",
            "4",
        ),
    ],
)
def test_the_marks_of_thoughts_and_answers_are_not_content(
    name: str, text: str, thought: str | None, content: str
) -> None:
    """A reward function sees the answer alone."""
    reply = get_dialect(name).parse(text)
    assert (reply.reasoning, reply.content, reply.tool_calls) == (thought, content, ())
