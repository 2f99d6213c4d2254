"""Replies that come back: with other ids of calls, changed long after, or as the last message."""

from __future__ import annotations

import attrs
import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.errors import HistoryRewritten
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest
from rollouts.programs.gateway.wire import Wire
from rollouts.testing.policy import ScriptedPolicy
from tests.programs.gateway.programs import ask, asks, calling, check_laws, demo_renderer, replies, result, session_of


def renamed(reply: CallReply, *ids: str) -> Message:
    """The reply with other ids of its calls."""
    calls = [attrs.evolve(call, id=new) for call, new in zip(reply.message.tool_calls, ids, strict=True)]
    return attrs.evolve(reply.message, tool_calls=calls)


@pytest.mark.parametrize(("wire", "prefix"), [(chat, "call_"), (responses, "call_"), (messages, "toolu_")])
async def test_ids_of_calls_begin_as_in_their_api(wire: Wire, prefix: str) -> None:
    """The program gets an id with the prefix of its API; the model's template gets one of nine characters."""
    request = wire.read({wire.HISTORY: [{"role": "user", "content": "Hi"}], "max_tokens": 9})
    async with session_of(ScriptedPolicy(replies(calling("sun")))) as session:
        (reply,) = await session.call(attrs.evolve(request, tools=asks().tools, max_tokens=None), lineage={})
        assert [call.id for call in reply.message.tool_calls] == [f"{prefix}c00000000"]
        assert [call.id for call in session.tree.calls[0].message.tool_calls] == ["c00000000"]


async def test_a_program_with_ids_of_its_own_is_one_branch() -> None:
    """A reply with other ids is found by its place, names and arguments, and its results too; each echo is counted."""
    policy = ScriptedPolicy(replies(calling("sun", "moon"), calling("sun"), "Done."))
    async with session_of(policy) as session:
        first = await ask(session, "Hi")
        history = ["Hi", renamed(first, "x1", "x2"), Message("tool", "M", tool_call_id="x2")]
        history += [Message("tool", "S", tool_call_id="x1")]
        second = await ask(session, *history)
        history += [renamed(second, "x3"), Message("tool", "S", tool_call_id="x3")]
        await ask(session, *history)
        session.end()
        assert len(session.tree.roots) == 1
        assert session.counts["echo/other_ids"] == 1 + 2
        branches = session.branches()
        check_laws(session, branches, policy)
    texts = demo_renderer().decode(policy.requests[1])
    assert texts.index("S") < texts.rindex("M"), "results are in the order of the calls"
    assert sum(int(branch.mask.sum()) for branch in branches) == session.tree.sampled


async def test_equal_ids_of_two_calls_name_them_by_place() -> None:
    """Some programs name a call by its tool: the results then stand in the order of the calls."""
    policy = ScriptedPolicy(replies(calling("sun", "moon")))
    async with session_of(policy) as session:
        first = await ask(session, "Hi")
        results = [Message("tool", text, tool_call_id="look") for text in ("of sun", "of moon")]
        await ask(session, "Hi", renamed(first, "look", "look"), *results)
        assert len(session.tree.roots) == 1
    assert "of sun" in demo_renderer().decode(policy.requests[1]).split("of moon")[0]


async def test_two_equal_replies_are_not_taken_for_one() -> None:
    """Two agents with one prompt get equal calls: other ids name each of them once."""
    policy = ScriptedPolicy(replies(calling("sun"), calling("sun")))
    async with session_of(policy) as session:
        for _ in range(2):
            last = await ask(session, "Hi")
        for name in ("a", "b", "a"):
            await ask(session, "Hi", renamed(last, name), Message("tool", f"S{name}", tool_call_id=name))
        children = [len(root.children) for root in session.tree.roots]
    assert sorted(children) == [1, 2]


async def test_of_replies_with_equal_calls_the_one_with_this_text_is_meant() -> None:
    """Also where other ids have named it: the text is the model's, the id is the program's."""
    script = replies(calling("sun", text="Left."), calling("sun", text="Right."))
    async with session_of(ScriptedPolicy(script)) as session:
        left = await ask(session, "Hi")
        await ask(session, "Hi")
        for name in ("a", "b"):
            await ask(session, "Hi", renamed(left, name), Message("tool", f"S{name}", tool_call_id=name))
        children = [len(root.children) for root in session.tree.roots]
    assert children == [2, 0]


@pytest.mark.parametrize("change", ["name", "arguments", "place"])
async def test_another_call_with_an_unknown_id_is_a_root(change: str) -> None:
    """Calls that the model did not write there are the program's."""
    async with session_of(ScriptedPolicy(replies(calling("sun")))) as session:
        await ask(session, "Hi")
        call = ToolCall("look" if change != "name" else "see", {"at": "moon" if change == "arguments" else "sun"}, "x")
        begin = "Hello" if change == "place" else "Hi"
        await ask(session, begin, Message("assistant", "I look.", [call]), Message("tool", "S", tool_call_id="x"))
        assert len(session.tree.roots) == 2
        assert session.counts["echo/other_ids"] == 0


# -- changes of earlier replies ----------------------------------------------------------------------------------------


async def test_each_echo_that_differs_is_counted() -> None:
    """Also of a reply that was sent back unchanged before."""
    async with session_of(ScriptedPolicy(replies(calling("sun"), calling("moon"), "Done."))) as session:
        first = await ask(session, "Hi")
        history = ["Hi", first.message, result(first, "S")]
        second = await ask(session, *history)
        history[1] = attrs.evolve(first.message, content="Other text.")
        history += [second.message, result(second, "M")]
        await ask(session, *history)
        await ask(session, *history, "And?")
        assert session.counts["echo/rewritten"] == 2
        assert len(session.tree.roots) == 1


async def test_error_finds_a_late_change() -> None:
    """With ``history="error"``, a reply that is changed two turns later fails the session."""
    async with session_of(ScriptedPolicy(replies(calling("sun"), calling("moon"))), history="error") as session:
        first = await ask(session, "Hi")
        second = await ask(session, "Hi", first.message, result(first, "S"))
        changed = attrs.evolve(first.message, content="Other text.")
        with pytest.raises(ApiError, match=r"messages\[1\]: got rewritten"):
            await ask(session, "Hi", changed, result(first, "S"), second.message, result(second, "M"))
        assert session.failure is not None
        assert HistoryRewritten.__name__ in repr(session.failure)


# -- an assistant message at the end -----------------------------------------------------------------------------------

GROUP = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am Ann."}]


async def _prompt(request: CallRequest) -> tuple[str, dict[str, int]]:
    policy = ScriptedPolicy(replies("Yes."))
    async with session_of(policy) as session:
        await session.call(request, lineage={})
        return demo_renderer().decode(policy.requests[0]), dict(session.counts)


async def test_a_reply_opens_a_new_turn_behind_an_assistant_message() -> None:
    """In the chat API, as in vLLM and SGLang; the Responses API has no prefill either."""
    for request in (chat.read({"messages": GROUP}), responses.read({"input": GROUP})):
        text, counts = await _prompt(request)
        assert text == demo_renderer().render(request.messages)
        assert counts == {"assistant_last/new_turn": 1}


async def test_a_reply_continues_the_message_where_that_is_asked() -> None:
    """With ``continue_final_message``, and in the Messages API, whose last assistant message is a prefill."""
    asked = {"messages": GROUP, "continue_final_message": True, "add_generation_prompt": False}
    for request in (chat.read(asked), messages.read({"messages": GROUP, "max_tokens": 9})):
        text, counts = await _prompt(request)
        assert text.endswith("I am Ann.")
        assert counts == {"assistant_last/continued": 1}


@pytest.mark.parametrize(
    "fields", [{"add_generation_prompt": True}, {"messages": GROUP[:1]}, {"continue_final_message": "yes"}]
)
def test_a_message_that_cannot_be_continued_is_refused(fields: dict[str, object]) -> None:
    """Both wishes at once, no assistant message at the end, or a wrong type."""
    with pytest.raises(ApiError, match="continue_final_message"):
        chat.read({"messages": GROUP, "continue_final_message": True, **fields})
