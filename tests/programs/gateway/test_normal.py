"""Keys of equal messages, and the messages that a chat template gets."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Message, Tool, ToolCall
from rollouts.errors import ConfigError
from rollouts.programs.gateway.normal import (
    Conversations,
    MessageRules,
    echo_changes,
    message_rules,
    ordered_results,
    path_keys,
    served_forms,
    tools_key,
    with_tool_names,
)
from tests.families import REAL

CALL = ToolCall("look", {"at": "sun", "n": 1}, id="c00000000")
REPLY = Message("assistant", "I look.", [CALL], reasoning="Where?")


def key(*messages: Message) -> int:
    return path_keys(messages, {"c00000000"})[-1]


@pytest.mark.parametrize(
    "other",
    [
        attrs.evolve(REPLY, reasoning=None),
        attrs.evolve(REPLY, content=" I look.\n"),
        attrs.evolve(REPLY, content="", tool_calls=[attrs.evolve(CALL, name="invalid", arguments={"tool": "look"})]),
        attrs.evolve(REPLY, tool_calls=[attrs.evolve(CALL, arguments={"n": 1, "at": "sun"})]),
        attrs.evolve(REPLY, tool_calls=[attrs.evolve(CALL, arguments={}, raw="{bad", error="no JSON")]),
    ],
)
def test_a_reply_with_its_call_ids_is_the_same_message(other: Message) -> None:
    """Reasoning, text and spelling of a call do not change the key of a reply whose ids are ours."""
    assert key(REPLY) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Message("user", "a"), Message("user", "b")),
        (Message("user", "a"), Message("system", "a")),
        (Message("user", "a"), Message("assistant", "a")),
        (Message("tool", "a", tool_call_id="c1"), Message("tool", "a", tool_call_id="c2")),
        (Message("assistant", "a"), Message("assistant", "b")),
        (REPLY, attrs.evolve(REPLY, tool_calls=[CALL, CALL])),
        (REPLY, attrs.evolve(REPLY, tool_calls=[])),
        (
            Message("assistant", "a", [ToolCall("look", {"at": 1}, id="theirs")]),
            Message("assistant", "a", [ToolCall("look", {"at": True}, id="theirs")]),
        ),
    ],
)
def test_other_content_is_another_message(one: Message, other: Message) -> None:
    """Role, text, the id of a result, and the calls of a reply that is not ours are parts of a key."""
    assert key(one) != key(other)


def test_a_key_is_of_the_whole_path() -> None:
    """The key of a conversation depends on the messages before, and can be continued from a kept key."""
    first, second = Message("user", "a"), Message("user", "b")
    assert key(first, second) != key(second)
    assert path_keys([first, second], set()) == [key(first), *path_keys([second], set(), key(first))]
    assert key(Message("user", " a\n")) == key(first)


def test_tools_are_compared_as_a_template_writes_them() -> None:
    """The order of tools and of the keys of a schema counts, as a template writes them in that order."""
    one, two = Tool("look", "Looks."), Tool("leap")
    assert tools_key([one, two]) == tools_key([Tool("look", "Looks."), Tool("leap")])
    assert len({tools_key(tools) for tools in ([], [one], [one, two], [two, one], [Tool("look", "Sees.")])}) == 5


@pytest.mark.parametrize(
    ("echo", "changes"),
    [
        (REPLY, []),
        (attrs.evolve(REPLY, reasoning=None), ["reasoning_dropped"]),
        (attrs.evolve(REPLY, tool_calls=[attrs.evolve(CALL, arguments={"n": 1, "at": "sun"})]), ["respelled"]),
        (attrs.evolve(REPLY, tool_calls=[attrs.evolve(CALL, arguments={"bad": None})]), ["rewritten"]),
        (attrs.evolve(REPLY, content="I peek.", reasoning=None), ["reasoning_dropped", "rewritten"]),
    ],
)
def test_changes_of_an_echo_have_names(echo: Message, changes: list[str]) -> None:
    """Each kind of change of a reply that a program sends back is named."""
    assert echo_changes(REPLY, echo) == changes


def test_a_malformed_call_may_come_back_as_text() -> None:
    """A reply with a malformed call has further forms, with the text of that call in the content."""
    bad = ToolCall("look", id="c00000001", raw="{bad", error="no JSON")
    reply = attrs.evolve(REPLY, tool_calls=[CALL, bad])
    _, lines, joined = served_forms(reply)
    assert served_forms(REPLY) == [REPLY]
    assert (lines.content, joined.content) == ("I look.\n{bad", "I look.{bad")
    assert [call.id for call in lines.tool_calls] == ["c00000000"]


def test_results_are_put_in_the_order_of_their_calls() -> None:
    """The results behind a reply follow the order of its calls; a result of no call stays behind them."""
    reply = Message("assistant", "", [attrs.evolve(CALL, id=name) for name in ("a", "b", "c")])
    results = [Message("tool", name, tool_call_id=name) for name in ("x", "c", "a", "b")]
    last = Message("user", "go on")
    assert [m.content for m in ordered_results([reply, *results, last])] == ["", "a", "b", "c", "x", "go on"]
    assert [m.content for m in ordered_results([last, reply, *results])] == ["go on", "", "a", "b", "c", "x"]
    between = Message("system", "note")
    assert [m.content for m in ordered_results([reply, between, *results])] == ["", "note", "a", "b", "c", "x"]


def test_a_result_has_the_name_of_its_tool() -> None:
    """That of the call next before it; a name that was sent stays, and an unknown call has none."""
    first, second = (Message("assistant", "", [ToolCall(name, id="a"), ToolCall("see", id="b")]) for name in "xy")
    results = [Message("tool", "", tool_call_id=name) for name in ("a", "b", "c")]
    assert [m.name for m in with_tool_names([first, *results])] == [None, "x", "see", None]
    assert [m.name for m in with_tool_names(results, [first, second])] == ["y", "see", None]
    assert with_tool_names([second, results[0]], [first])[1].name == "y"
    assert with_tool_names([attrs.evolve(results[0], name="own")], [first])[0].name == "own"


CONVERSATION = [
    Message("system", "S"),
    Message("system", "T"),
    Message("user", "U"),
    Message("system", "V"),
    REPLY,
    Message("tool", "R", tool_call_id=CALL.id),
    Message("system", "W"),
]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (MessageRules(), CONVERSATION),
        (
            MessageRules("first"),
            [
                Message("system", "S\n\nT"),
                Message("user", "U"),
                Message("user", "<system-reminder>\nV\n</system-reminder>"),
                *CONVERSATION[4:6],
                Message("user", "<system-reminder>\nW\n</system-reminder>"),
            ],
        ),
        (
            MessageRules("first", neighbours=False),
            [
                Message("system", "S\n\nT"),
                Message("user", "U\n<system-reminder>\nV\n</system-reminder>"),
                *CONVERSATION[4:6],
                Message("user", "<system-reminder>\nW\n</system-reminder>"),
            ],
        ),
        (
            MessageRules("never", neighbours=False),
            [
                Message(
                    "user",
                    "<system-reminder>\nS\n</system-reminder>\n<system-reminder>\nT\n</system-reminder>\nU\n"
                    "<system-reminder>\nV\n</system-reminder>",
                ),
                *CONVERSATION[4:6],
                Message("user", "<system-reminder>\nW\n</system-reminder>"),
            ],
        ),
    ],
)
def test_system_messages_are_folded_where_the_template_refuses_them(
    rules: MessageRules, expected: list[Message]
) -> None:
    """A system message that the template refuses in its place becomes a user message in tags."""
    assert rules.applied(CONVERSATION) == expected


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("Qwen3", MessageRules()),
        ("Qwen3.5", MessageRules("first")),
        ("DeepSeek-V3.1", MessageRules("first")),
    ],
)
def test_the_rules_of_real_templates_are_found(family: str, rules: MessageRules, request: Any) -> None:
    """The probe finds templates that refuse a system message in the middle, and templates that move it to the front."""
    renderer = REAL[family].make(request)
    assert message_rules(renderer.render) == rules
    renderer.opening(rules.applied(CONVERSATION[:4]))


def test_a_template_without_system_messages_and_neighbours() -> None:
    """A template that takes only alternating users and assistants has both restrictions."""

    def render(messages: Any) -> str:
        roles = [message.role for message in messages]
        if roles != [("user", "assistant")[place % 2] for place in range(len(roles))]:
            raise ConfigError("roles must alternate")
        return " ".join(message.content for message in messages)

    assert message_rules(render) == MessageRules("never", neighbours=False)


@pytest.mark.parametrize("system", ["anywhere", "first", "never"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_a_conversation_is_what_it_is_without_those_before_it(system: Any, neighbours: bool) -> None:
    """Order, folding, keys and places of replies do not depend on what was kept, however requests change."""
    rng, rules, ours = random.Random(0), MessageRules(system, neighbours), {f"c{number}" for number in range(50)}
    kept, given = Conversations(rules, most=3), (Message("system", "S"), Message("user", "U"))
    known = 0

    def some(role: Any) -> list[Message]:
        if role != "tool":
            return [Message(role, str(rng.random()))]
        ids = [f"c{rng.randrange(100)}" for _ in range(3)]
        results = [Message("tool", str(rng.random()), tool_call_id=one) for one in rng.sample(ids, 3)]
        return [Message("assistant", "", [ToolCall("f", {"x": rng.random()}, one) for one in ids]), *results]

    for _ in range(400):
        at, kind = rng.randrange(len(given)), rng.random()
        role = rng.choice(["user", "system", "assistant", "tool"])
        if kind < 0.7:
            given = (*given, *some(role))
        elif kind < 0.8:
            given = (*given[:at], *some(role), *given[at + 1 :])
        else:
            given = given[: at + 1]
        conversation, alone = kept.of(given, ours), Conversations(rules).of(given, ours)
        assert (conversation.messages, conversation.keys) == (alone.messages, alone.keys)
        assert (conversation.replies, conversation.whole) == (alone.replies, given)
        assert conversation.new == given[conversation.known :]
        known += conversation.known
        kept.keep(conversation)
    assert known > 200


def test_agents_that_take_turns_are_kept_apart() -> None:
    """A request continues the conversation of its agent; the conversation left for the longest time is dropped."""
    kept, reply = Conversations(MessageRules(), most=2), Message("assistant", "A")
    agents = [(Message("user", name), reply, Message("user", "more")) for name in ("one", "two", "three")]
    for whole in agents[:2]:
        assert kept.of(whole, set()).known == 0
        kept.keep(kept.of(whole, set()))
    for whole in agents[:2]:
        longer = kept.of((*whole, reply, whole[2]), set())
        assert longer.known == 1
        kept.keep(longer)
    kept.keep(kept.of(agents[2], set()))
    assert [kept.of(whole, set()).known for whole in agents] == [0, 1, 1]
