"""The parts of a bridge: the dummy in the place of the history, and the text after its last turn."""

from __future__ import annotations

import datetime
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import (
    STRATEGIES,
    Kept,
    bridge_text,
    closes_turns,
    one_round,
    short,
    whole,
    with_kept,
)
from rollouts.renderer.bridge_forms import BridgeForms
from rollouts.renderer.template import ChatTemplate

SYSTEM, USER, REPLY = Message("system", "s"), Message("user", "u"), Message("assistant", "a")
RESULT = Message("tool", "r", tool_call_id="id1", name="look")
CALLED = (USER, Message("assistant", tool_calls=[ToolCall("look", {}, id="id1")]))
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, name="t", variables={}, moment=datetime.datetime(2031, 2, 3))


def bridge(
    new: Sequence[Message],
    history: Sequence[Message] = (SYSTEM, USER, REPLY),
    source: str = TURNS,
    stops: Sequence[str] = ("<end>",),
) -> str:
    return bridge_text(template(source), short, history, new, (), stops)


def roles(messages: Sequence[Message]) -> str:
    """The first letters of the roles; an assistant turn with calls is a ``C``."""
    return "".join("C" if message.tool_calls else message.role[0] for message in messages)


# -- the dummy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "last_user", "built"),
    [
        ([], None, "u"),
        ([], 3, "u"),
        ([(1, USER)], 1, "u"),
        ([(1, USER)], 5, "uau"),
        ([(1, USER), (5, USER)], 5, "uau"),
        ([(1, USER), (2, REPLY), (3, USER)], 3, "uau"),
        ([(4, REPLY)], 1, "uau"),
        ([(4, REPLY), (6, REPLY)], 1, "uauau"),
        ([(4, REPLY)], None, "uau"),
        ([(4, RESULT)], 1, "uCt"),
        ([(4, RESULT)], None, "uCt"),
        ([(2, REPLY), (4, RESULT)], 1, "uauCt"),
        ([(4, RESULT), (6, REPLY)], 1, "uCtau"),
        ([(4, RESULT), (6, RESULT)], 1, "uCtCt"),
        ([(2, RESULT), (4, USER)], 4, "uCtau"),
        ([(2, SYSTEM)], None, "su"),
        ([(2, SYSTEM), (4, USER)], 4, "su"),
        ([(2, SYSTEM), (4, RESULT)], None, "suCt"),
        ([(5, USER), (1, REPLY)], 5, "uau"),
    ],
)
def test_kept_messages_stand_among_the_turns_that_templates_expect(
    kept: list[tuple[int, Message]], last_user: int | None, built: str
) -> None:
    """In their order; users and assistants alternate, a result follows a call, and the last turn can be answered."""
    strategy = with_kept(short, Kept(tuple(kept), last_user, ()))
    messages = strategy([])
    assert roles(messages) == built
    assert [m for m in messages if m in (SYSTEM, REPLY, RESULT)] == [
        m for _, m in sorted(kept, key=lambda k: k[0]) if m != USER
    ]


def test_the_turn_before_a_kept_result_has_its_call() -> None:
    """With the result's id and name, or a name that stands for one."""
    strategy = with_kept(short, Kept(((4, RESULT), (5, Message("tool", "x"))), 1, ()))
    _, first, _, second, _ = strategy([])
    assert [(call.id, call.name) for call in (*first.tool_calls, *second.tool_calls)] == [("id1", "look"), ("", "f")]


def test_a_strategy_gets_the_first_result_and_continues_the_kept_messages() -> None:
    """Only its first user turn is replaced by them."""
    assert roles(with_kept(one_round, Kept((), None, (RESULT,)))([])) == "uCt"
    assert roles(with_kept(one_round, Kept((), None, ()))([RESULT])) == "u"
    messages = with_kept(one_round, Kept(((4, USER),), 4, (RESULT,)))([])
    assert roles(messages) == "uCt"
    assert messages[0] == USER
    assert messages[1].tool_calls[0].id == messages[2].tool_call_id


def test_the_id_of_the_call_of_the_opening_has_nine_characters() -> None:
    """Some templates refuse an id of another length."""
    assert len(one_round([RESULT])[1].tool_calls[0].id) == 9


def test_strategies_are_tried_in_this_order_and_named_so() -> None:
    """A renderer takes one by its name."""
    assert list(STRATEGIES.items()) == [("short", short), ("one_round", one_round)]


def test_the_whole_history_has_no_system_message_and_no_last_turn() -> None:
    """Both are added by the bridge."""
    assert whole([SYSTEM, USER, REPLY, SYSTEM, USER, REPLY]) == [USER, REPLY, SYSTEM, USER]


# -- the text ---------------------------------------------------------------------------------------------------------


def test_a_bridge_is_the_closing_mark_the_new_messages_and_the_next_header() -> None:
    """Nothing of the history, whose system prompt and tools the template sees."""
    assert bridge([USER]) == "<end><user>u<end><assistant>"
    seen = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
    assert bridge([USER], source=seen) == "<end><user>u<end><assistant>"
    with pytest.raises(ConfigError, match="no system"):
        bridge([USER], (USER, REPLY), source=seen)


@pytest.mark.parametrize("text", ["qz7w0e", "qz7zw0e and qz7w0e and qz7zzw1e"])
def test_new_text_may_contain_the_words_of_the_dummy(text: str) -> None:
    """Then the dummy has longer ones."""
    assert bridge([Message("user", text)]) == f"<end><user>{text}<end><assistant>"
    assert bridge([Message("tool", text)], CALLED) == f"<end><tool>{text}<end><assistant>"


@pytest.mark.parametrize("text", ["qz7w0e", "qz7w1e"])
def test_an_earlier_message_with_a_word_of_the_dummy_does_not_stand_for_what_is_left_out(text: str) -> None:
    """Neither for the dummy's turn nor for a new message."""
    left_out = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="a turn without calls: the template leaves the turn out"):
        bridge([USER], (Message("system", text), USER, REPLY), source=left_out)
    system_at_the_end = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<end>{% endfor %}" + left_out
    with pytest.raises(ConfigError, match="a turn without calls: the template leaves out user messages after it"):
        bridge([USER], (Message("system", text), USER, REPLY), source=system_at_the_end)


@pytest.mark.parametrize(
    ("stops", "written"),
    [
        (("<end>",), "<end><tool>r<end><assistant>"),
        (("<tool>", "<end>"), "<end><tool>r<end><assistant>"),
        (("<tool>", "<nowhere>"), "<tool>r<end><assistant>"),
    ],
)
def test_the_text_after_a_call_begins_with_the_first_stop_token(stops: Sequence[str], written: str) -> None:
    """The rest of the call's markup, if any, is dropped. The header of the next message may be a stop token."""
    assert bridge([RESULT], CALLED, stops=stops) == written
    assert bridge([RESULT], CALLED, source=TURNS.replace("]", ""), stops=stops) == written


def test_of_several_calls_only_the_text_after_the_last_one_is_written() -> None:
    """Also where a stop token ends each of them."""
    closing_each = TURNS.replace("]", "]<end>")
    assert bridge([RESULT, RESULT], CALLED, source=closing_each) == "<end><end><tool>r<end><tool>r<end><assistant>"


def test_white_space_before_the_closing_mark_is_dropped() -> None:
    """It was not sampled. Without a closing mark, or with one that the model never samples, nothing is dropped."""
    spaced = TURNS.replace("<end>", " \n<end>")
    assert bridge([USER], source=spaced).startswith("<end><user>")
    assert bridge([USER], source=spaced, stops=("<user>",)).startswith(" \n<end><user>")
    lines = TURNS.replace("<end>", "{{ '\\n' }}")
    assert bridge([USER], source=lines) == "\n<user>u\n<assistant>"


OPEN_CALLS = TURNS.replace("<end>", "{{ '<end>' if not m.tool_calls }}")
"""Ends a turn of calls without a stop token."""


def test_a_stop_token_in_a_new_message_does_not_end_the_turn() -> None:
    """Nor does the one that ends a new message: no new message is cut."""
    result, user = Message("tool", "l<end>r"), Message("user", "<end>r")
    assert bridge([result], CALLED) == "<end><tool>l<end>r<end><assistant>"
    bare = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert bridge([user], source=bare) == " <end>r "
    with pytest.raises(ConfigError, match=r"none of the stop tokens \['<end>'\] follows it before the new messages"):
        bridge([result], CALLED, source=OPEN_CALLS)


@pytest.mark.parametrize("order", ["messages", "messages[:-2] + [messages[-1], messages[-2]]"])
def test_the_stop_token_is_looked_for_before_the_message_that_the_template_writes_first(order: str) -> None:
    """In whichever order it writes the new messages."""
    with pytest.raises(ConfigError, match="none of the stop tokens"):
        bridge([RESULT, USER], CALLED, source=OPEN_CALLS.replace("in messages", f"in {order}"))


def test_a_turn_whose_end_depends_on_the_new_messages_is_refused() -> None:
    """Its stop token could be part of one."""
    peeking = TURNS.replace("<end>", "{{ ' ' * (loop.nextitem.content | length) if m.role == 'assistant' }}<end>")
    with pytest.raises(ConfigError, match="a turn with calls: how it ends depends on the text of the new messages"):
        bridge([RESULT], CALLED, source=peeking)
    with pytest.raises(ConfigError, match="a turn without calls: how it ends depends on the text of the new messages"):
        bridge([USER], source=peeking)
    without_stop = OPEN_CALLS.replace("if not m.tool_calls", "if not m.tool_calls or messages[-1].content != 'r'")
    with pytest.raises(ConfigError, match="a turn with calls: how it ends depends on the text of the new messages"):
        bridge([RESULT], CALLED, source=without_stop)


@pytest.mark.parametrize(
    ("results", "calls", "expected"),
    [
        ([("id1", "look")], [("id1", "look")], ["id1 look"]),
        ([("id2", None), ("id1", None)], [("id1", "look"), ("id2", "jump")], ["id1 look", "id2 jump"]),
        ([("id3", None), ("id1", None)], [("id1", "a"), ("id2", "b"), ("id3", "c")], ["id1 a", "id3 c"]),
        ([("", None), ("", None)], [("id1", "look"), ("id2", "jump")], ["id1 look", "id2 jump"]),
        ([("", None), ("", None)], [("", "look"), ("", "jump")], [" look", " jump"]),
        ([("id9", None)], [("id1", "look")], ["id9 look"]),
        ([("id9", None), ("id8", None)], [("id1", "look")], ["id9 look", "id8 f"]),
        ([("id9", "other")], [("id1", "look")], ["id9 other"]),
        ([("", None)], [], [" f"]),
    ],
)
def test_the_dummy_has_the_calls_that_the_results_answer(
    results: list[tuple[str, str | None]], calls: list[tuple[str, str]], expected: list[str]
) -> None:
    """Found by id, else by position, in the order of the reply; the id and name of the result itself go first."""
    looking_back = TURNS + (
        "{% for c in (messages | selectattr('tool_calls') | list | last).tool_calls %}"
        "{{ c.id }} {{ c.function.name }};{% endfor %}"
    )
    new = [Message("tool", "r", tool_call_id=call_id, name=name) for call_id, name in results]
    history = [USER, Message("assistant", tool_calls=[ToolCall(name, {}, id=call_id) for call_id, name in calls])]
    written = bridge(new, history, source=looking_back)
    assert written == "<end>" + len(new) * "<tool>r<end>" + "<assistant>" + "".join(f"{call};" for call in expected)


def test_without_a_reply_the_calls_are_those_of_the_results() -> None:
    """The history may be empty."""
    assert bridge([RESULT], ()) == "<end><tool>r<end><assistant>"


def test_new_messages_that_begin_with_another_message_follow_a_turn_without_calls() -> None:
    """Only a result that comes first answers the reply."""
    assert bridge([USER, RESULT], source=OPEN_CALLS) == "<end><user>u<end><tool>r<end><assistant>"


def test_a_turn_of_one_call_without_a_stop_token_is_rendered_with_each_call_twice() -> None:
    """Some templates close only a turn of several calls."""
    several = TURNS.replace("<end>", "{{ '<end>' if m.tool_calls | length != 1 }}")
    assert bridge([RESULT], CALLED, source=several) == "<end><tool>r<end><assistant>"


ONE_CALL = "{{ raise_exception('two') if (messages[1].tool_calls or []) | length > 1 }}"
"""Refuses a turn of two calls."""


@pytest.mark.parametrize("condition", ["== 'r'", "!= 'r'", "!= 'never'"])
def test_a_turn_without_calls_replaces_a_turn_that_the_template_leaves_out(condition: str) -> None:
    """Whether it leaves the turn out for these messages, for others, or for all."""
    leaving_out = TURNS.replace(
        "in messages", f"in messages if not (m.tool_calls and messages[-1].content {condition})"
    )
    assert bridge([RESULT], CALLED, source=leaving_out) == "<end><tool>r<end><assistant>"
    assert bridge([RESULT], CALLED, source=ONE_CALL + leaving_out) == "<end><tool>r<end><assistant>"


def test_a_turn_without_calls_does_not_replace_a_turn_that_the_template_writes() -> None:
    """Only the first reason is said, also if the template refuses two calls."""
    for source in (
        OPEN_CALLS,
        ONE_CALL + OPEN_CALLS,
    ):
        with pytest.raises(ConfigError, match="for these messages; a turn with calls: none of the stop") as caught:
            bridge([RESULT], CALLED, source=source)
        assert "without calls" not in str(caught.value)
        assert "two" not in str(caught.value)
        assert str(caught.value).count("a turn with calls") == 1


HIDING = TURNS.replace("in messages", "in messages if m.name != 'hidden'")


@pytest.mark.parametrize(("count", "hidden"), [(1, 0), (2, 0), (2, 1), (11, 0)])
def test_a_template_that_leaves_out_a_new_message_is_refused(count: int, hidden: int) -> None:
    """Whichever it is, among however many."""
    new = [Message("tool", "r", name="hidden" if number == hidden else None) for number in range(count)]
    with pytest.raises(ConfigError, match="a turn with calls: the template leaves out tool messages after it"):
        bridge(new, CALLED, source=HIDING)


def test_a_refusal_names_the_role_of_the_message_that_is_left_out() -> None:
    """Also where the template writes it before the reply."""
    with pytest.raises(ConfigError, match="a turn with calls: the template leaves out user messages after it"):
        bridge([RESULT, Message("user", "u", name="hidden")], CALLED, source=HIDING)
    to_the_front = TURNS.replace("in messages", "in messages | sort(attribute='role', reverse=true)")
    with pytest.raises(ConfigError, match="a turn without calls: the template leaves out user messages after it"):
        bridge([USER], source=to_the_front)


def test_why_there_is_no_bridge_is_said_for_each_dummy() -> None:
    """With the template's name."""
    without_turns = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    left_out = "a turn with calls: the template leaves the turn out; a turn without calls: the template leaves the turn"
    with pytest.raises(ConfigError, match=rf"chat template t .*: no bridge for these messages; {left_out} out$"):
        bridge([RESULT], CALLED, source=without_turns)


def test_a_template_that_refuses_the_turn_with_calls_is_not_asked_for_another() -> None:
    """One without calls would hide that it refuses them; one that refuses the second turn is listed with the first."""
    strict = "{% for m in messages if m.tool_calls %}{{ raise_exception('no calls') }}{% endfor %}" + TURNS
    with pytest.raises(ConfigError, match="no calls") as caught:
        bridge([RESULT], CALLED, source=strict)
    assert "no bridge for these messages" not in str(caught.value)
    only_calls = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('calls only') }}"
        "{% endif %}{% endfor %}{% for m in messages if not m.tool_calls %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"a turn with calls: .* leaves the turn out; a turn without calls: .*calls only"
    ):
        bridge([RESULT], CALLED, source=only_calls)


@pytest.mark.parametrize(
    ("source", "closes"),
    [
        (TURNS, True),
        (TURNS.replace("<end>", "\n"), False),
        (TURNS.replace("<end>", ""), False),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", True),
        ("{{ raise_exception('never') }}", True),
    ],
)
def test_a_template_closes_its_turns_or_does_not(source: str, closes: bool) -> None:
    """White space closes none; a template that cannot be asked counts as one that does."""
    assert closes_turns(template(source)) == closes


# -- known forms ------------------------------------------------------------------------------------------------------


class Counting(ChatTemplate):
    """Counts its renderings."""

    renderings = 0

    def render(self, *arguments: Any, **options: Any) -> str:
        self.renderings += 1
        return super().render(*arguments, **options)


def result(text: str, name: str = "look") -> Message:
    return Message("tool", text, tool_call_id="id1", name=name)


def test_a_bridge_of_a_known_shape_is_rendered_once() -> None:
    """Whatever its texts; if one contains a stop token, and in another shape, it is rendered twice."""
    counting = Counting(TURNS, name="t", variables={}, moment=datetime.datetime(2031, 2, 3))
    forms = BridgeForms()

    def renderings(*new: Message) -> int:
        before = counting.renderings
        text = bridge_text(counting, short, CALLED, new, (), ["<end>"], forms)
        assert text == "<end>" + "".join(f"<{m.role}>{m.text}<end>" for m in new) + "<assistant>"
        return counting.renderings - before

    counts = [renderings(result(text)) for text in ("r", "s", " s\n", "<end>", "l<end>r", "", " ", "t")]
    assert counts == [2, 1, 1, 2, 2, 1, 1, 1]
    assert [renderings(result("r"), USER), renderings(result("r", "jump")), renderings(result("r"), USER)] == [2, 2, 1]


SOURCES = (
    TURNS,
    OPEN_CALLS,
    TURNS.replace("]", ""),
    TURNS.replace("{{ m.content }}", "{{ m.content | trim }}"),
    TURNS.replace("{{ m.content }}", "{{ m.content | tojson }}"),
    TURNS.replace("<end>", "{{ ' ' * (loop.nextitem.content | length) if m.role == 'assistant' }}<end>"),
    TURNS.replace("<end>", "{{ '<end>' if not m.tool_calls or messages[-1].content != 'r' }}"),
    TURNS.replace("<end>", "{{ '<end>' if not m.tool_calls or messages[0].content != 'r' }}"),
    TURNS.replace("<end>", "{{ '<end>' if m.tool_calls | length != 1 or messages[0].content != 'r' }}"),
    TURNS.replace("in messages", "in messages if m.content != 'r'"),
    TURNS.replace("in messages", "in messages if not m.tool_calls or messages[-1].content != 'r'"),
    TURNS.replace("in messages", "in messages[:-2] + [messages[-1], messages[-2]]"),
    TURNS.replace("in messages", "in (messages if messages[0].content != 'r' else messages[:-1])"),
    TURNS.replace("in messages", "in messages | sort(attribute='role', reverse=true)"),
)
"""Templates that write turns in one way, or in ways that depend on texts of the conversation."""


@pytest.mark.parametrize("source", SOURCES)
def test_known_forms_change_no_bridge(source: str) -> None:
    """Bridges of random conversations are the same, or refused with the same words, whatever bridges came before."""
    rng = random.Random(source)
    texts = ["r", "s", "<end>", "r<end>", "", " ", "]", "<end><tool>r", "<tool>", "]<end>", "\n"]
    forms: dict[tuple[str, ...], BridgeForms] = {
        ("<end>",): BridgeForms(),
        ("<end>", "<tool>"): BridgeForms(),
        ("<no>",): BridgeForms(),
    }
    for _ in range(400):
        called = Message("assistant", tool_calls=[ToolCall("look", {}, id="id1")])
        history = [Message("user", rng.choice(texts)), rng.choice([called, REPLY])]
        new = [
            rng.choice([result, functools.partial(Message, "user")])(rng.choice(texts))
            for _ in range(rng.randint(1, 3))
        ]
        for stops, known in forms.items():
            written = [_written(source, history, new, stops, each) for each in (BridgeForms(), known)]
            assert written[0] == written[1], (history, new, stops)


def _written(
    source: str, history: Sequence[Message], new: Sequence[Message], stops: Sequence[str], forms: BridgeForms
) -> str:
    try:
        return bridge_text(template(source), whole, history, new, (), stops, forms)
    except ConfigError as error:
        return str(error)
