"""The parts of a bridge: the dummy in the place of the history, and the text after its last turn."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence

import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES, Kept, bridge_text, closes_turns, one_round, short, whole, with_kept
from rollouts.renderer.template import ChatTemplate

SYSTEM, USER, REPLY = Message("system", "s"), Message("user", "u"), Message("assistant", "a")
RESULT = Message("tool", "r", tool_call_id="id1", name="look")
CALL = ToolCall("look", {}, id="id1")
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
    *,
    verbatim: bool = False,
) -> str:
    return bridge_text(template(source), short, history, new, (), stops, verbatim=verbatim)


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
    assert messages[1].tool_calls[0].id == messages[2].tool_call_id != ""


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


def test_new_text_may_contain_the_mark_of_the_dummy() -> None:
    """Then the dummy has a longer one."""
    text = "qz7sentinelqz7 and qz7sentinelqz7z"
    assert bridge([Message("user", text)]) == f"<end><user>{text}<end><assistant>"


def test_the_text_after_a_call_begins_with_the_first_stop_token() -> None:
    """The rest of the call's markup is dropped; without a stop token the turn without calls gives the bridge."""
    history = (USER, Message("assistant", tool_calls=(CALL,)))
    assert bridge([RESULT], history) == "<end><tool>r<end><assistant>"
    assert bridge([RESULT], history, stops=("<assistant>", "<end>")) == "<end><tool>r<end><assistant>"
    assert bridge([RESULT], history, stops=("<nowhere>",)) == "<end><tool>r<end><assistant>"


def test_white_space_before_the_closing_mark_is_dropped() -> None:
    """It was not sampled. Without a closing mark, or with one that the model never samples, nothing is dropped."""
    spaced = TURNS.replace("<end>", " \n<end>")
    assert bridge([USER], source=spaced).startswith("<end><user>")
    assert bridge([USER], source=spaced, stops=("<user>",)).startswith(" \n<end><user>")
    lines = TURNS.replace("<end>", "{{ '\\n' }}")
    assert bridge([USER], source=lines) == "\n<user>u\n<assistant>"


NAMES = TURNS.replace("{{ c.function.arguments.x }}", "")
"""Writes the ids and names of calls, after which it has nothing of the dummy."""


def calls_before(results: Sequence[Message], calls: Sequence[ToolCall]) -> list[str]:
    """The calls of the dummy that results are shown after, as ``id name``."""
    spied: list[str] = []

    class Spy(ChatTemplate):
        def render(self, messages: Sequence[Message], *args: object, **options: object) -> str:
            dummy = [message for message in messages if message.tool_calls]
            spied.extend(f"{call.id} {call.name}" for call in dummy[-1].tool_calls)
            return super().render(messages, *args, **options)  # type: ignore[arg-type]

    spy = Spy(TURNS, name="t", variables={}, moment=datetime.datetime(2031, 2, 3))
    bridge_text(spy, short, [USER, Message("assistant", tool_calls=calls)], results, (), ("<end>",))
    return spied


@pytest.mark.parametrize(
    ("results", "calls", "expected"),
    [
        ([("id1", "look")], [("id1", "look")], ["id1 look"]),
        ([("id2", None), ("id1", None)], [("id1", "look"), ("id2", "jump")], ["id2 jump", "id1 look"]),
        ([("", None), ("", None)], [("id1", "look"), ("id2", "jump")], ["id1 look", "id2 jump"]),
        ([("", None)], [("", "look")], [" look"]),
        ([("id9", None)], [("id1", "look")], ["id9 look"]),
        ([("id9", None), ("id8", None)], [("id1", "look")], ["id9 look", "id8 f"]),
        ([("id9", "other")], [("id1", "look")], ["id9 other"]),
        ([("", None)], [], [" f"]),
    ],
)
def test_the_dummy_has_the_calls_that_the_results_answer(
    results: list[tuple[str, str | None]], calls: list[tuple[str, str]], expected: list[str]
) -> None:
    """Found by id, else by position; what the result itself says goes first."""
    messages = [Message("tool", "r", tool_call_id=call_id, name=name) for call_id, name in results]
    assert calls_before(messages, [ToolCall(name, {}, id=call_id) for call_id, name in calls]) == expected


def test_why_there_is_no_bridge_is_said_for_each_dummy() -> None:
    """That the template leaves the turn out, or a message, or that no stop token follows a call."""
    history = (USER, Message("assistant", tool_calls=(CALL,)))
    without_turns = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    left_out = "a turn with calls: the template leaves the turn out; a turn without calls: the template leaves the turn"
    with pytest.raises(ConfigError, match=rf"no bridge for these messages; {left_out} out"):
        bridge([RESULT], history, source=without_turns)
    silent = TURNS.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    with pytest.raises(ConfigError, match="a turn without calls: the template leaves out tool messages"):
        bridge([RESULT], history, source=silent, verbatim=True)
    assert bridge([RESULT], history, source=silent) == "<end><tool><end><assistant>"
    no_text = (
        "{% for m in messages %}{% for c in m.tool_calls or () %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"a turn with calls: none of the stop tokens \['<end>'\] follows it"):
        bridge([RESULT], history, source=no_text)


def test_a_template_that_refuses_the_turn_with_calls_is_not_asked_for_another() -> None:
    """One without calls would hide that it refuses them; one that refuses the second turn is listed with the first."""
    history = (USER, Message("assistant", tool_calls=(CALL,)))
    strict = "{% for m in messages if m.tool_calls %}{{ raise_exception('no calls') }}{% endfor %}" + TURNS
    with pytest.raises(ConfigError, match="no calls") as caught:
        bridge([RESULT], history, source=strict)
    assert "no bridge for these messages" not in str(caught.value)
    only_calls = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('calls only') }}"
        "{% endif %}{% endfor %}{% for m in messages if not m.tool_calls %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"a turn with calls: .* leaves the turn out; a turn without calls: .*calls only"
    ):
        bridge([RESULT], history, source=only_calls)


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
