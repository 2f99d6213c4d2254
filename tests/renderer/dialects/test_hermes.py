"""Hermes calls, and the parts shared by every dialect: reasoning, malformed calls, content."""

import pytest

from rollouts.renderer.dialects import get_dialect

PARSE = get_dialect("hermes").parse


def call(name: str = "add", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_valid_call_keeps_its_text_and_the_text_before_it() -> None:
    """Name, arguments and the exact text of the call; the text around it is content."""
    reply = PARSE("I add.\n" + call())
    assert reply.content == "I add."
    assert reply.reasoning is None
    (parsed,) = reply.tool_calls
    assert (parsed.name, dict(parsed.arguments), parsed.id, parsed.error) == ("add", {"a": 1}, "", None)
    assert parsed.raw == call()


def test_parallel_calls_come_in_order() -> None:
    """Three calls, three ToolCalls, in the order of the text."""
    reply = PARSE("\n".join(call(name) for name in ("c", "a", "b")))
    assert [parsed.name for parsed in reply.tool_calls] == ["c", "a", "b"]
    assert reply.content == ""


def test_text_after_a_call_stays_in_the_content() -> None:
    """No text of the reply is lost."""
    assert PARSE(f"one\n{call()}\ntwo\n{call()} three").content == "one\ntwo\nthree"


def test_text_without_marks_is_returned_as_it_is() -> None:
    """White space included."""
    assert PARSE("  hello \n").content == "  hello \n"


@pytest.mark.parametrize("opened", [None, True])
def test_a_call_drafted_in_reasoning_that_the_prompt_opened_is_no_call(opened: bool | None) -> None:
    """Only ``</think>`` was sampled: the text before it is reasoning."""
    reply = PARSE(f"maybe {call('draft')} or not\n</think>\n\n{call('real')}", reasoning_open=opened)
    assert [parsed.name for parsed in reply.tool_calls] == ["real"]
    assert reply.reasoning == f"maybe {call('draft')} or not"
    assert reply.content == ""


def test_a_call_drafted_in_reasoning_that_the_reply_opened_is_no_call() -> None:
    """``<think>`` and ``</think>`` were sampled."""
    reply = PARSE(f"<think>\n{call('draft')}\n</think>\n\nDone.")
    assert (reply.tool_calls, reply.content) == ((), "Done.")


@pytest.mark.parametrize(("text", "opened"), [(f"<think>\n{call()}", None), (call(), True)])
def test_reasoning_that_never_ends_holds_no_call(text: str, opened: bool | None) -> None:
    """A reply that is cut inside its reasoning has no content and no calls."""
    reply = PARSE(text, reasoning_open=opened)
    assert (reply.content, reply.tool_calls, reply.reasoning) == ("", (), call())


def test_reasoning_between_calls_is_taken_out() -> None:
    """A second thought after the first call."""
    reply = PARSE(f"{call('a')}<think>{call('draft')}</think>{call('b')}")
    assert [parsed.name for parsed in reply.tool_calls] == ["a", "b"]


def test_think_tags_inside_an_argument_are_text() -> None:
    """An argument may quote a thought if the prompt opened none."""
    reply = PARSE(call(arguments='{"a": "<think>x</think>"}'), reasoning_open=False)
    assert dict(reply.tool_calls[0].arguments) == {"a": "<think>x</think>"}
    assert reply.reasoning is None


def test_an_empty_thought_is_an_empty_string() -> None:
    """There was a thinking block without text."""
    assert PARSE("<think>\n\n</think>\n\nHi").reasoning == ""


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "add", "not valid JSON"),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "add", "is a string"),
        ('{"name": "add", "arguments": [1]}', "add", "must be a JSON object, not an array"),
        ('{"name": "add", "arguments": null}', "add", "not null"),
        ('{"name": "add"}', "add", '"arguments" is missing'),
        ('{"arguments": {}}', "", '"name" is missing'),
        ('{"name": "", "arguments": {}}', "", '"name" is missing'),
        ('{"name": 3, "arguments": {}}', "", '"name" is missing'),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "add", 'the key "a" is given more than once'),
        ('{"name": "add", "arguments": {"a": NaN}}', "add", "NaN is not a JSON value"),
        ('{"name": "add", "arguments": {"a": -1e999}}', "add", "-1e999 is too large for a number"),
        ('{"name": "add", "arguments": {}} {}', "add", "Extra data"),
        ('[{"name": "add", "arguments": {}}]', "add", "not an array"),
        ("add(1)", "", "not valid JSON"),
        ("", "", "not valid JSON"),
        ("[" * 100_000, "", "not valid JSON"),
    ],
)
def test_an_invalid_call_is_malformed_and_never_repaired(body: str, name: str, words: str) -> None:
    """One ToolCall with an error, the name if it is recognisable, and no arguments."""
    text = f"<tool_call>{body}</tool_call>"
    (parsed,) = PARSE(text).tool_calls
    assert parsed.error is not None
    assert words in parsed.error
    assert (parsed.name, dict(parsed.arguments), parsed.raw) == (name, {}, text)


def test_an_unclosed_call_is_malformed_and_not_silence() -> None:
    """A call that is cut in the middle has an error that names the missing mark."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'
    (parsed,) = PARSE(text).tool_calls
    assert (parsed.name, parsed.raw) == ("add", text)
    assert "</tool_call> is missing" in (parsed.error or "")


def test_an_unclosed_call_does_not_swallow_the_next() -> None:
    """The second opening tag ends the first call."""
    first, second = PARSE('<tool_call>{"name": "a"\n' + call("b")).tool_calls
    assert (first.name, first.error is None, second.name, second.error) == ("a", False, "b", None)
