"""One session: its calls, retries, siblings, limits and end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from rollouts.dtypes import Completion, Message, SamplingParams, StopReason, Tool, ToolCall
from rollouts.errors import ConfigError, ContextOverflow, EndpointAway, EndpointUnavailable, TokenMismatchError
from rollouts.inference.base import CompletionRequest
from rollouts.programs.gateway.normal import message_rules
from rollouts.programs.gateway.session import ProgramSession, SessionLimits
from rollouts.programs.gateway.tree import Training
from rollouts.programs.gateway.types import ApiError, CallReply
from rollouts.renderer import Renderer, speak
from rollouts.testing.policy import Reply, ScriptedPolicy
from tests.families import FAMILIES, TOOLS
from tests.programs.gateway.programs import (
    LOOK,
    SAMPLING,
    ask,
    asks,
    calling,
    check_laws,
    demo_renderer,
    demo_tokenizer,
    replies,
    result,
    session_of,
    spoken,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class GatedPolicy(ScriptedPolicy):
    """A scripted policy that answers when its gate is open; ``begun`` counts its calls, ``cancelled`` the aborted."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.gate = anyio.Event()
        self.begun = 0
        self.cancelled = 0
        self.in_flight = 0
        self.most_in_flight = 0

    async def complete(self, request: CompletionRequest) -> Completion:
        self.begun += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.gate.wait()
            return await super().complete(request)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1


async def begun(policy: GatedPolicy, calls: int) -> None:
    with anyio.fail_after(5):
        while policy.begun < calls:
            await anyio.lowlevel.checkpoint()


async def test_the_next_request_goes_on_from_the_kept_ids() -> None:
    """The second request is the first one, its sampled ids and a bridge; one branch trains both replies."""
    policy = ScriptedPolicy(replies(calling("sun", reasoning="Where?"), "It is hot."))
    async with session_of(policy) as session:
        first = await ask(session, "Look!")
        echo = attrs.evolve(first.message, reasoning=None)
        await ask(session, "Look!", echo, result(first, "hot"))
    (branch,) = session.branches()
    check_laws(session, [branch], policy)
    sent = spoken(calling("sun", reasoning="Where?"))
    assert policy.requests[1][len(policy.requests[0]) :][: len(sent)].tolist() == sent
    assert (len(branch.completions), session.counts["echo/reasoning_dropped"]) == (2, 1)
    assert [call.id for call in first.message.tool_calls] == ["c00000000"]
    assert branch.stop_reason is StopReason.TASK_COMPLETED
    assert branch.metrics["calls"] == 2


async def test_sequences_of_a_session_have_one_route() -> None:
    """Each sequence has a separate name, and all have the route of the session; neither is its key."""
    policy = ScriptedPolicy(replies(calling("sun")))
    async with session_of(policy) as session:
        first = await ask(session, "Look!")
        await ask(session, "Look!", first.message, result(first, "hot"))
        await ask(session, "Something else")
    names, routes = zip(*policy.sessions, strict=True)
    assert names[0] == names[1] != names[2]
    assert len(set(routes)) == 1
    assert session.key not in "".join((*names, *routes))


async def test_a_completion_has_the_temperature_of_the_run() -> None:
    """Trainers that divide logits by it, and the check of logprobs, read it from the record."""
    policy = ScriptedPolicy(replies("It is hot."))
    async with session_of(policy, sampling=SamplingParams(max_new_tokens=64, temperature=0.7)) as session:
        await ask(session, "Look!")
    (branch,) = session.branches()
    assert [one.temperature for one in branch.completions] == [0.7]


async def test_results_in_another_order_are_put_in_the_order_of_the_calls() -> None:
    """Parallel results that come in the order of their completion are bridged in the order of the calls."""
    requests = []
    for order in ((0, 1), (1, 0)):
        policy = ScriptedPolicy(replies(calling("sun", "moon")))
        async with session_of(policy) as session:
            first = await ask(session, "Look!")
            results = [result(first, "hot", 0), result(first, "cold", 1)]
            await ask(session, "Look!", first.message, *(results[place] for place in order))
        check_laws(session, session.branches(), policy)
        requests.append(policy.requests[1].tolist())
    assert requests[0] == requests[1]


async def test_a_reply_goes_on_in_a_prefill() -> None:
    """A request that ends in an assistant message is an opening up to its text, and only what follows is trained."""
    policy = ScriptedPolicy(replies(" and hot."))
    asked = (Message("user", "Look!"), Message("assistant", "It is bright"))
    async with session_of(policy) as session:
        reply = await ask(session, *asked)
    (branch,) = session.branches()
    check_laws(session, [branch], policy)
    assert policy.requests[0].tolist() == demo_renderer().opening(list(asked), (LOOK,)).tolist()
    assert (int(branch.mask.sum()), reply.message.content.strip()) == (len(spoken(" and hot.")), "and hot.")


async def test_a_request_that_the_template_refuses_is_invalid() -> None:
    """The program gets the reason of the template, and the session continues."""
    call = Message("assistant", "", [ToolCall("look", id="x")])
    async with session_of(ScriptedPolicy(replies())) as session:
        with pytest.raises(ApiError, match="cannot render these messages") as caught:
            await ask(session, "Look!", call)
        await ask(session, "Look!")
    assert caught.value.error_kind == "invalid_request"


async def test_equal_requests_at_the_same_time_are_sampled_each() -> None:
    """Votes and best-of-n: as long as its client is there, a reply belongs to one call."""
    policy = GatedPolicy(replies(*"abcd"))
    answers: list[CallReply] = []

    async def call() -> None:
        answers.extend(await session.call(asks("Look!"), lineage={}))

    async with session_of(policy) as session, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(call)
        await begun(policy, 4)
        policy.gate.set()
    assert sorted(answer.message.text for answer in answers) == [*"abcd"]
    session.delivered(answers)
    check_laws(session, session.branches(), policy)
    assert {count: amount for count, amount in session.counts.items() if count.startswith("retries")} == {}


async def test_an_equal_request_does_not_get_a_reply_that_another_client_is_being_sent() -> None:
    """A reply that was sampled and is not delivered yet is not lost."""
    policy = ScriptedPolicy(replies("one", "two"))
    async with session_of(policy) as session:
        (first,) = await session.call(asks("Look!"), lineage={})
        (second,) = await session.call(asks("Look!"), lineage={})
        session.delivered([first, second])
    assert [first.message.text, second.message.text] == ["one", "two"]
    check_laws(session, session.branches(), policy)


async def left(session: ProgramSession, policy: GatedPolicy, **fields: Any) -> None:
    """A call whose client goes away while it is sampled."""
    leaves, number = anyio.CancelScope(), policy.begun + 1

    async def call() -> None:
        with leaves:
            await session.call(asks("Look!", **fields), lineage={})

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await begun(policy, number)
        leaves.cancel()


async def test_a_retry_after_its_client_has_gone_gets_the_generation() -> None:
    """A client that times out while its reply is sampled, and asks again: one generation, trained once."""
    policy = GatedPolicy(replies("once"))
    async with session_of(policy) as session:
        await left(session, policy)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, session, "Look!")
            await anyio.wait_all_tasks_blocked()
            policy.gate.set()
    (branch,) = session.branches()
    check_laws(session, [branch], policy)
    assert (policy.begun, policy.cancelled, session.counts["retries_joined"]) == (1, 0, 1)
    assert branch.mask.sum() == len(spoken("once"))


async def test_of_two_retries_one_gets_the_generation_that_was_left() -> None:
    """The second is a call with another reply."""
    policy = GatedPolicy(replies("left", "new"))
    async with session_of(policy) as session:
        await left(session, policy)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, session, "Look!")
            tasks.start_soon(ask, session, "Look!")
            await begun(policy, 2)
            policy.gate.set()
    check_laws(session, session.branches(), policy)
    assert (policy.begun, session.counts["retries_joined"], session.tree.untrained.total()) == (2, 1, 0)


async def test_a_generation_ends_after_its_client_has_gone_and_a_retry_is_served() -> None:
    """The reply waits for the retry, and another request does not get it."""
    policy = GatedPolicy(replies("left", "new"))
    async with session_of(policy) as session:
        await left(session, policy)
        policy.gate.set()
        await anyio.wait_all_tasks_blocked()
        texts = [(await ask(session, "Look!")).message.text for _ in range(2)]
    check_laws(session, session.branches(), policy)
    assert (texts, session.counts["retries_served"]) == (["left", "new"], 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling": {"seed": 2}},
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"logit_bias": {"7": 1}}},
        {"call_prefix": "toolu_"},  # another API
    ],
)
async def test_a_request_with_another_sampling_is_no_retry(changed: dict[str, Any]) -> None:
    """The parameters of the run are used for both, but they are different requests: neither gets the other's reply."""
    policy = GatedPolicy(replies("left", "new"))
    async with session_of(policy) as session:
        await left(session, policy, sampling={"seed": 1})
        policy.gate.set()
        await ask(session, "Look!", **{"sampling": {"seed": 1}, **changed})
    check_laws(session, session.branches(), policy)
    assert (policy.begun, session.counts["retries_joined"], session.counts["retries_served"]) == (2, 0, 0)


async def attempts(session: ProgramSession, policy: GatedPolicy, *numbers: int) -> list[str]:
    """The replies to equal requests at the same time, whose headers have these numbers."""
    texts: list[str] = []

    async def call(number: int) -> None:
        (reply,) = await session.call(asks("Look!"), lineage={}, attempt=number)
        session.delivered([reply])
        texts.append(reply.message.text)

    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(call, number)
            await anyio.wait_all_tasks_blocked()
        policy.gate.set()
    return texts


async def test_a_request_that_says_that_it_is_a_retry_joins_the_first() -> None:
    """A proxy may keep the connection of a client that has gone."""
    policy = GatedPolicy(replies("once"))
    async with session_of(policy) as session:
        assert await attempts(session, policy, 0, 1) == ["once", "once"]
    check_laws(session, session.branches(), policy)
    assert (policy.begun, session.counts["retries_joined"]) == (1, 1)


@pytest.mark.parametrize("numbers", [(1, 1), (0, 0, 1), (0, 1, 1)])
async def test_retries_of_several_equal_requests_are_sampled_each(numbers: tuple[int, ...]) -> None:
    """Which of several requests a retry repeats is not known, and two first retries repeat different ones."""
    policy = GatedPolicy(replies(*"abc"))
    async with session_of(policy) as session:
        texts = await attempts(session, policy, *numbers)
    check_laws(session, session.branches(), policy)
    assert len(set(texts)) == policy.begun >= 2


async def test_a_second_call_keeps_the_generation_that_the_first_leaves() -> None:
    """A call that goes away does not abort the generation that its retry waits for."""
    policy = GatedPolicy(replies("once"))
    answers: list[CallReply] = []

    async def call(scope: anyio.CancelScope, attempt: int) -> None:
        with scope:
            answers.extend(await session.call(asks("Look!"), lineage={}, attempt=attempt))

    leaves = anyio.CancelScope()
    async with session_of(policy, retry_seconds=0) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(call, leaves, 0)
        await begun(policy, 1)
        tasks.start_soon(call, anyio.CancelScope(), 1)
        await anyio.wait_all_tasks_blocked()
        leaves.cancel()
        await anyio.wait_all_tasks_blocked()
        policy.gate.set()
    assert (len(answers), policy.begun, policy.cancelled) == (1, 1, 0)


async def test_a_call_that_goes_away_aborts_its_generation() -> None:
    """If no retry comes, the generation is cancelled and counted, and the same request is sampled again."""
    policy = GatedPolicy(replies("once"))
    async with session_of(policy, retry_seconds=0) as session:
        await left(session, policy)
        policy.gate.set()
        await ask(session, "Look!")
    assert (policy.begun, policy.cancelled, session.counts["undelivered"]) == (2, 1, 1)
    check_laws(session, session.branches(), policy)


async def test_an_answer_that_was_not_delivered_is_served_again() -> None:
    """A cut stream: the same request gets the kept reply, also without stream; after delivery, another one."""
    policy = ScriptedPolicy(replies("one", "two"))
    async with session_of(policy) as session:
        lost = await session.call(asks("Look!", stream=True), lineage={})
        session.undelivered(lost)
        again = await session.call(asks("Look!"), lineage={})
        session.delivered(again)
        (other,) = await session.call(asks("Look!"), lineage={})
        session.delivered([other])
    assert (lost == again, other.message.content) == (True, "two")
    assert (len(policy.requests), session.counts["retries_served"]) == (2, 1)
    check_laws(session, session.branches(), policy)


async def test_an_answer_that_was_never_delivered_is_not_trained() -> None:
    """A leaf that no program got is counted as undelivered."""
    policy = ScriptedPolicy(replies("one", "two"))
    async with session_of(policy) as session:
        await ask(session, "Look!")
        await session.call(asks("Look again!"), lineage={})
    (branch,) = session.branches()
    check_laws(session, [branch], policy)
    assert session.tree.untrained == {"undelivered": len(spoken("two"))}


async def test_an_echo_shows_that_a_reply_was_delivered() -> None:
    """A reply that a later request continues was delivered, whatever the server has noted."""
    policy = ScriptedPolicy(replies("one", "two"))
    async with session_of(policy) as session:
        (first,) = await session.call(asks("Look!"), lineage={})
        await ask(session, "Look!", first.message, "And?")
    check_laws(session, session.branches(), policy)
    assert session.tree.untrained.total() == 0


async def test_of_several_replies_those_that_were_continued_are_trained() -> None:
    """Siblings that the program does not continue are dropped, or kept where the policy says so."""
    for training, trained in ((Training(), 2), (Training(siblings="keep"), 4)):
        policy = ScriptedPolicy(replies(calling("sun"), calling("moon"), calling("sea"), "done"))
        async with session_of(policy, training=training) as session:
            several = await session.call(asks("Look!", n=3), lineage={})
            session.delivered(several)
            chosen = several[1]
            await ask(session, "Look!", chosen.message, result(chosen, "cold"))
        branches = session.branches()
        check_laws(session, branches, policy)
        assert sum(len(branch.completions) for branch in branches) == trained
        assert len({call.id for reply in several for call in reply.message.tool_calls}) == 3
        assert branches[-1].stop_reason is StopReason.TASK_COMPLETED


async def test_two_identical_agents_are_two_roots() -> None:
    """Agents with the very same prompt are sampled apart by their names, and each continues its own calls."""
    policy = ScriptedPolicy(replies(calling("sun"), calling("sun"), "a", "b"))
    async with session_of(policy) as session:
        agents = [{"x-claude-code-agent-id": name} for name in "ab"]
        firsts = [await ask(session, "Run sub0", lineage=agent) for agent in agents]
        for first, agent in reversed(list(zip(firsts, agents, strict=True))):
            await ask(session, "Run sub0", first.message, result(first, "same"), lineage=agent)
    branches = session.branches()
    check_laws(session, branches, policy)
    assert (len(session.tree.roots), len(branches)) == (2, 2)
    assert [len(root.children) for root in session.tree.roots] == [1, 1]


async def test_a_discarded_reply_is_trained_or_dropped() -> None:
    """A reply that the program leaves out of its next request is a leaf; the request continues the call before."""
    for training, trained in ((Training(), 3), (Training(discarded="drop"), 2)):
        policy = ScriptedPolicy(replies(calling("sun"), "no call", "done"))
        async with session_of(policy, training=training) as session:
            first = await ask(session, "Look!")
            opening = ("Look!", first.message, result(first, "hot"))
            await ask(session, *opening)
            await ask(session, *opening, "You have to call a tool.")
        branches = session.branches()
        check_laws(session, branches, policy)
        assert (len(session.tree.roots), len(session.tree.calls[0].children)) == (1, 2)
        assert sum(len(branch.completions) for branch in branches) == trained


async def test_a_side_call_is_not_trained_and_a_summary_is() -> None:
    """A root without tools and child is dropped, unless a later root quotes its reply, or all roots are such."""
    title, summary = "A title of this task", "The summary: the sun is hot."
    policy = ScriptedPolicy(replies(title, calling("sun"), summary, "done"))
    async with session_of(policy) as session:
        await ask(session, "Write a title", tools=())
        await ask(session, "Look!")
        await ask(session, "Summarise: Look! I look.", tools=())
        await ask(session, f"Go on. So far: {summary}")
    branches = session.branches()
    check_laws(session, branches, policy)
    assert session.tree.untrained == {"side_call": len(spoken(title))}
    async with session_of(ScriptedPolicy(replies())) as session:
        for number in range(3):
            await ask(session, f"Question {number}", tools=())
    assert (len(session.branches()), session.tree.untrained.total()) == (3, 0)


@pytest.mark.parametrize("form", ["Claude Code", "Codex", "opencode"])
async def test_a_summary_is_trained_or_dropped(form: str) -> None:
    """A compaction: a later root of the same agent quotes the reply, and has the request for it no more."""
    summary = "The sun was looked at, and it is hot."
    reply = f"<analysis>\nHm.\n</analysis>\n\n<summary>\n{summary}\n</summary>" if form == "Claude Code" else summary
    for compaction, trained in (("train", 5), ("drop", 4)):
        policy = ScriptedPolicy(replies(calling("sun"), calling("moon"), reply, calling("sea"), "done"))
        training = Training(compaction=compaction)  # type: ignore[arg-type]
        async with session_of(policy, training=training) as session:
            first = await ask(session, "Look!")
            history = ("Look!", first.message, result(first, "hot"))
            second = await ask(session, *history)
            last = (second.message, result(second, "cold"))
            if form == "Claude Code":
                await ask(session, *history, "Summarise.")
                begin: tuple[Any, ...] = (f"The summary of what was before: {summary}", *last)
            elif form == "Codex":
                await ask(session, *history, *last, "Summarise.", tools=())
                begin = ("Look!", f"Another model wrote: {summary}")
            else:
                await ask(session, "The conversation: Look! I look.", tools=())
                begin = ("What was before?", Message("assistant", summary), "Go on.")
            third = await ask(session, *begin)
            await ask(session, *begin, third.message, result(third, "wet"))
        branches = session.branches()
        check_laws(session, branches, policy)
        assert sum(len(branch.completions) for branch in branches) == trained
        assert session.tree.untrained == ({} if compaction == "train" else {"compaction": len(spoken(reply))})


@pytest.mark.parametrize("agent", [False, True])
async def test_what_only_looks_like_a_summary_is_trained(agent: bool) -> None:
    """A history that is sent as text also has the request; another agent's prompt may quote a report."""
    report = "The sun was looked at, and it is hot."
    policy = ScriptedPolicy(replies(report, "done"))
    lineage = {"x-claude-code-agent-id": "a"} if agent else {}
    async with session_of(policy, training=Training(compaction="drop")) as session:
        await ask(session, "Look!", lineage=lineage)
        before = [] if agent else ["Look!"]
        await ask(session, *before, f"You said: {report}", lineage=dict.fromkeys(lineage, "b"))
    check_laws(session, session.branches(), policy)
    assert (len(session.tree.roots), session.tree.untrained) == (2, {})


async def test_calls_by_hand_are_counted_and_not_trained() -> None:
    """Where the program names its agents, a call without a name is of the model's own code."""
    policy = ScriptedPolicy(replies())
    async with session_of(policy) as session:
        await ask(session, "Look!", lineage={"session-id": "1"})
        await ask(session, "What is the answer?")
    check_laws(session, session.branches(), policy)
    assert session.tree.untrained == {"by_hand": len(spoken("reply number 2"))}
    assert session.counts["calls_by_hand"] == 1


async def test_an_edited_history_is_a_root_with_its_place() -> None:
    """A root that shares a beginning with an earlier conversation is counted with the message that differs."""
    policy = ScriptedPolicy(replies(calling("sun"), "hot", "cold"))
    async with session_of(policy) as session:
        first = await ask(session, Message("system", "S"), "Look!")
        opening = (Message("system", "S"), Message("user", "Look!"), first.message)
        second = await ask(session, *opening, result(first, "hot"))
        await ask(session, *opening, result(first, "[cleared]"), second.message, "And now?")
    branches = session.branches()
    check_laws(session, branches, policy)
    assert len(session.tree.roots) == 2
    assert (session.counts["rewritten_at/3"], session.rewrites) == (1, [(3, "[cleared]")])


async def test_other_tools_are_a_root() -> None:
    """A conversation that continues with other tools is a root, as its tools are other tokens."""
    policy = ScriptedPolicy(replies(calling("sun"), "summary"))
    async with session_of(policy) as session:
        first = await ask(session, "Look!")
        await ask(session, "Look!", first.message, result(first, "hot"), "Summarise.", tools=())
    branches = session.branches()
    check_laws(session, branches, policy)
    assert (len(session.tree.roots), session.counts["tools_changed"], session.tree.untrained.total()) == (2, 1, 0)


@pytest.mark.parametrize("history", ["append", "fork", "error"])
async def test_a_changed_echo_follows_the_history_option(history: Any) -> None:
    """A rewritten call continues the kept ids, opens a root, or fails the session."""
    policy = ScriptedPolicy(replies(calling("sun"), "done"))
    async with session_of(policy, history=history) as session:
        first = await ask(session, "Look!")
        call = attrs.evolve(first.message.tool_calls[0], name="invalid", arguments={"tool": "look"})
        changed = attrs.evolve(first.message, tool_calls=[call])
        again = asks("Look!", changed, result(first, "no"))
        if history == "error":
            with pytest.raises(ApiError, match=r"messages\[1\]: got rewritten"):
                await session.call(again, lineage={})
        else:
            session.delivered(await session.call(again, lineage={}))
    branches = session.branches()
    check_laws(session, branches, policy)
    if history == "error":
        assert session.stop_reason is StopReason.FAILED
        assert branches[-1].failure is not None
    else:
        assert len(session.tree.roots) == (1 if history == "append" else 2)
        assert session.counts["echo/rewritten"] == 1


async def test_a_malformed_call_is_kept_as_sampled() -> None:
    """The program gets the text of the call with an id, and its answer continues the sampled ids."""
    bad = Message("assistant", "I look.", [ToolCall("look", raw='{"name": "look", "arguments": {bad')])
    policy = ScriptedPolicy(replies(bad, "done"))
    async with session_of(policy) as session:
        first = await ask(session, "Look!")
        (call,) = first.message.tool_calls
        echo = attrs.evolve(first.message, tool_calls=[ToolCall("look", {"bad": None}, id=call.id)])
        await ask(session, "Look!", echo, result(first, "That is no JSON."))
    check_laws(session, session.branches(), policy)
    assert (call.id, call.error is not None, first.finish_reason) == ("c00000000", True, "tool_calls")
    assert "{bad" in call.raw
    assert (session.counts["malformed_tool_calls"], session.counts["echo/rewritten"]) == (1, 1)
    assert len(session.tree.roots) == 1


async def test_a_stop_string_ends_the_text_and_stays_in_the_ids() -> None:
    """The program gets the text before the stop string, and the kept ids contain it."""
    sampled = [*demo_tokenizer().encode("Thought: go\nObservation: no", add_special_tokens=False)]
    policy = ScriptedPolicy([sampled, spoken("done")])
    async with session_of(policy) as session:
        first = await ask(session, "Look!", stop=("Observation:",))
        await ask(session, "Look!", first.message, "Go on.", stop=("Observation:",))
    check_laws(session, session.branches(), policy)
    assert (first.message.content.strip(), first.stop_text) == ("Thought: go", "Observation:")
    assert len(session.tree.roots) == 1


async def test_the_least_of_the_limits_is_the_budget() -> None:
    """The budget is the least of the request's, the run's, and the room in the context."""
    renderer = demo_renderer()
    prompt = len(renderer.opening([Message("user", "Look!")], (LOOK,)))
    long = [5] * 400
    for wanted, most, context, expected in ((7, 50, 1000, 7), (70, 50, 1000, 50), (None, 50, prompt + 9, 9)):
        policy = ScriptedPolicy([long])
        options = {"sampling": SamplingParams(max_new_tokens=most), "max_context": context}
        async with session_of(policy, **options) as session:
            reply = await ask(session, "Look!", max_tokens=wanted)
        assert (reply.usage.completion_tokens, reply.finish_reason) == (expected, "length")
        assert reply.usage.prompt_tokens == prompt
        (branch,) = session.branches()
        assert branch.stop_reason is StopReason.MAX_TOKENS


async def test_a_cut_reply_is_closed_by_the_bridge() -> None:
    """After a reply without a stop token the bridge begins with it, and both replies are trained."""
    policy = ScriptedPolicy([spoken("one two three")[:-1], spoken("done")])
    async with session_of(policy, sampling=SamplingParams(max_new_tokens=3)) as session:
        first = await ask(session, "Look!")
        await ask(session, "Look!", first.message, "Go on.")
    (branch,) = session.branches()
    check_laws(session, [branch], policy)
    stop = demo_renderer().stop_token_ids[0]
    assert policy.requests[1][len(policy.requests[0]) + 3] == stop


async def test_a_prompt_that_does_not_fit_is_an_overflow() -> None:
    """The error has the length of the prompt and the context; the conversation can continue the call before."""
    policy = ScriptedPolicy(replies(calling("sun")))
    async with session_of(policy, max_context=600) as session:
        first = await ask(session, "Look!")
        with pytest.raises(ApiError, match="do not fit the context") as caught:
            await ask(session, "Look!", first.message, result(first, "hot " * 900))
        assert (caught.value.error_kind, caught.value.max_context) == ("overflow", 600)
        assert caught.value.tokens > 600
        await ask(session, "Look!", first.message, result(first, "hot"))
    check_laws(session, session.branches(), policy)
    assert (len(session.tree.roots), session.counts["overflow"]) == (1, 1)


class FailingPolicy(ScriptedPolicy):
    """Raises its errors first."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(replies("done"))
        self.errors = list(errors)

    async def complete(self, request: CompletionRequest) -> Completion:
        if self.errors:
            raise self.errors.pop(0)
        return await super().complete(request)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(EndpointUnavailable("gone"), "server"), (ContextOverflow("too long"), "overflow")],
)
async def test_an_error_of_the_endpoint_is_an_error_of_the_call(error: Exception, kind: str) -> None:
    """The program can repeat the request after it, and the retry is sampled."""
    policy = FailingPolicy(error)
    async with session_of(policy) as session:
        with pytest.raises(ApiError) as caught:
            await ask(session, "Look!")
        assert caught.value.error_kind == kind
        assert (kind == "overflow") == (caught.value.tokens > caught.value.max_context > 0)
        await ask(session, "Look!")
    check_laws(session, session.branches(), policy)


async def test_a_server_that_is_away_ends_the_run() -> None:
    """The session ends, and its branches raise the error, as it fails no rollout."""
    async with session_of(FailingPolicy(EndpointAway("away"))) as session:
        with pytest.raises(ApiError) as caught:
            await ask(session, "Look!")
    assert caught.value.error_kind == "conflict"
    with pytest.raises(EndpointAway):
        session.branches()


async def test_an_aborted_reply_is_kept_and_not_trained() -> None:
    """A reply that the server aborted is an error for the program, and its tokens are counted as cut off."""
    policy = ScriptedPolicy([Reply([5, 6, 7], "abort"), spoken("done")])
    async with session_of(policy) as session:
        with pytest.raises(ApiError, match="aborted"):
            await ask(session, "Look!")
        await ask(session, "Look!")
    check_laws(session, session.branches(), policy)
    assert session.tree.untrained == {"cut_off": 3}


class WrongPolicy(ScriptedPolicy):
    """Samples from other ids than it was sent."""

    async def complete(self, request: CompletionRequest) -> Completion:
        return await super().complete(
            attrs.evolve(request, tokens=np.concatenate([request.tokens[:-1], request.tokens[:1]]))
        )


async def test_a_reply_to_other_ids_is_a_broken_law() -> None:
    """A completion that was sampled from other ids is never served and never trained."""
    async with session_of(WrongPolicy(replies())) as session:
        with pytest.raises(TokenMismatchError):
            await ask(session, "Look!")
    with pytest.raises(TokenMismatchError):
        session.branches()


@pytest.mark.parametrize(
    ("limits", "reason", "calls"),
    [
        (SessionLimits(max_calls=2), StopReason.MAX_TURNS, 2),
        (SessionLimits(max_sampled_tokens=len(spoken("reply number 1")) + 1), StopReason.MAX_TOKENS, 2),
        (SessionLimits(max_roots=2), StopReason.FAILED, 2),
    ],
)
async def test_a_limit_ends_the_session(limits: SessionLimits, reason: StopReason, calls: int) -> None:
    """The call that exceeds a limit is a conflict, and the branches have the reason."""
    policy = ScriptedPolicy(replies())
    async with session_of(policy, limits=limits) as session:
        await ask(session, "Question 0")
        await ask(session, "Question 1")
        with pytest.raises(ApiError) as caught:
            await ask(session, "Question 2")
        assert session.over.is_set()
    branches = session.branches()
    check_laws(session, branches, policy)
    assert (caught.value.error_kind, len(policy.requests)) == ("conflict", calls)
    assert (branches[-1].stop_reason, session.stop_reason) == (reason, reason)
    assert (branches[-1].failure is not None) == (reason is StopReason.FAILED)


async def test_several_replies_of_one_request_count_as_so_many_calls() -> None:
    """A program chooses ``n``: with it, it gets no more calls and no more tokens than without."""
    policy, size = ScriptedPolicy(replies()), len(spoken("reply number 1"))
    async with session_of(policy, limits=SessionLimits(max_sampled_tokens=2 * size)) as session:
        await session.call(asks("Question", n=4), lineage={})
        assert session.tree.sampled <= 2 * size
    async with session_of(policy, limits=SessionLimits(max_calls=3)) as session:
        await ask(session, "Question 0")
        with pytest.raises(ApiError, match="the session has ended: max_turns"):
            await session.call(asks("Question 1", n=3), lineage={})
        assert (len(session.tree.calls), session.stop_reason) == (1, StopReason.MAX_TURNS)


async def test_more_replies_than_the_session_has_calls_are_refused() -> None:
    """No smaller number of calls would do: the request is wrong, and the session continues."""
    policy = ScriptedPolicy(replies())
    async with session_of(policy, limits=SessionLimits(max_calls=3)) as session:
        with pytest.raises(ApiError, match="n: got 4; expected at most 3") as refused:
            await session.call(asks("Question", n=4), lineage={})
        assert (refused.value.error_kind, session.ended) == ("invalid_request", False)
        await ask(session, "Question")


async def test_calls_that_begin_together_stay_within_the_limit() -> None:
    """Calls under way count before they are numbered; the retry of an answered call does not count."""
    policy = ScriptedPolicy(replies())
    async with session_of(policy, limits=SessionLimits(max_calls=2)) as session:
        await ask(session, "Question 0")
        refused: list[ApiError] = []

        async def call(number: int) -> None:
            try:
                await ask(session, f"Question {number}")
            except ApiError as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            for number in (1, 2, 3):
                tasks.start_soon(call, number)
        assert len(policy.requests) <= 2
        assert {error.error_kind for error in refused} == {"conflict"}
        assert session.stop_reason is StopReason.MAX_TURNS
    policy = ScriptedPolicy(replies())
    async with session_of(policy, limits=SessionLimits(max_calls=1)) as session:
        request = asks("Question 0")
        first = await session.call(request, lineage={})
        session.undelivered(first)
        assert await session.call(request, lineage={}) == first
        assert (session.counts["retries_served"], session.ended) == (1, False)


async def test_names_of_counts_are_bounded() -> None:
    """A program that sends new types of tools in every request fills one count."""
    policy = ScriptedPolicy(replies())
    async with session_of(policy) as session:
        request = attrs.evolve(asks("Question"), counts=Counter({f"server_tool/{n}": 1 for n in range(5000)}))
        await session.call(request, lineage={})
        assert len(session.counts) < 300
        assert session.counts["other_counts"] > 4000


async def test_the_deadline_aborts_a_generation() -> None:
    """At the deadline of the session its generations are aborted, and it has ended."""
    policy = GatedPolicy(replies())
    async with session_of(policy, limits=SessionLimits(max_seconds=0.05)) as session:
        with pytest.raises(ApiError, match="ended"):
            await ask(session, "Look!")
    assert (session.stop_reason, policy.cancelled) == (StopReason.DEADLINE, 1)
    assert session.branches() == []


async def test_the_end_of_a_session_aborts_and_refuses() -> None:
    """Generations under way are aborted and counted as cut off; later calls are conflicts."""
    policy = GatedPolicy(replies())
    async with session_of(policy) as session, anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(ApiError, match="ended"):
                await ask(session, "Look!")

        tasks.start_soon(call)
        await begun(policy, 1)
        session.end()
        with pytest.raises(ApiError) as caught:
            await ask(session, "Look!")
    assert (caught.value.error_kind, policy.cancelled, session.counts["cut_off"]) == ("conflict", 1, 1)


async def test_a_failure_around_the_session_answers_its_calls() -> None:
    """If the code around the session fails, calls from outside of it get a conflict, never no reply."""
    policy = GatedPolicy(replies())
    errors: list[ApiError] = []

    async def call(session: ProgramSession) -> None:
        with pytest.raises(ApiError) as caught:
            await ask(session, "Look!")
        errors.append(caught.value)

    async def fail() -> None:
        async with session_of(policy) as session:
            tasks.start_soon(call, session)
            await begun(policy, 1)
            raise KeyError("the code around")

    async with anyio.create_task_group() as tasks:
        with pytest.raises(KeyError):
            await fail()
    assert [error.error_kind for error in errors] == ["conflict"]


async def test_tokens_in_flight_are_limited() -> None:
    """Calls that would exceed the limit wait for others; a call that exceeds it by itself is sent alone."""
    policy = GatedPolicy(replies())
    limits = SessionLimits(max_tokens_in_flight=10)
    async with session_of(policy, limits=limits) as session, anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(ask, session, f"Question {number}")
        await begun(policy, 1)
        await anyio.wait_all_tasks_blocked()
        policy.gate.set()
    assert (policy.begun, policy.most_in_flight) == (3, 1)


async def test_counting_tokens_is_no_call() -> None:
    """The number is the length of the opening, and the tree does not change."""
    async with session_of(ScriptedPolicy(replies())) as session:
        counted = await session.count_tokens(asks("Look!"))
        reply = await ask(session, "Look!")
    assert (counted, len(session.tree.calls)) == (reply.usage.prompt_tokens, 1)


async def test_what_is_not_honoured_is_counted() -> None:
    """The counts of a request are in the metrics of the last branch."""
    async with session_of(ScriptedPolicy(replies())) as session:
        await ask(session, "Look!", counts={"file": 2, "not_enforced/tool_choice": 1})
    metrics = session.branches()[-1].metrics
    assert (metrics["file"], metrics["not_enforced/tool_choice"]) == (2, 1)


async def test_a_sampling_parameter_is_counted_where_it_is_not_that_of_the_run() -> None:
    """An equal value is honoured; a seed never is, because each call of the run has a separate seed."""
    run = SamplingParams(max_new_tokens=4096, temperature=0.5, top_k=20, seed=3)
    equal = {"temperature": 0.5, "top_p": 1, "top_k": 20, "min_p": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    other = {"temperature": 1, "top_p": "x", "repetition_penalty": 1.1, "presence_penalty": 0.2, "seed": 3}
    async with session_of(ScriptedPolicy(replies()), sampling=run) as session:
        await ask(session, "Look!", sampling=equal)
        assert session.counts == {}
        await ask(session, "Look!", sampling=other)
    assert session.counts == {f"sampling_overridden/{name}": 1 for name in other}


async def test_a_request_may_name_the_reply_that_it_follows() -> None:
    """With the id of a reply the messages are what is new, and its instructions replace the earlier ones."""
    policy = ScriptedPolicy(replies(calling("sun")))
    system = Message("system", "S")
    async with session_of(policy) as session:
        first = await ask(session, system, "Look!", instructions="S")
        follows: dict[str, Any] = {"previous_response_id": first.id, "instructions": "S"}
        await ask(session, system, result(first, "hot"), **follows)
        await ask(session, Message("system", "T"), result(first, "hot"), **{**follows, "instructions": "T"})
        with pytest.raises(ApiError, match="previous_response_id: got 'r9'"):
            await ask(session, "And?", previous_response_id="r9")
    check_laws(session, session.branches(), policy)
    assert [len(root.children) for root in session.tree.roots] == [1, 0]
    assert session.reply(first.id) is first


async def test_tools_that_the_dialect_cannot_read_fail_the_session() -> None:
    """Calls that would be lost are refused with the first request, and the branches raise the reason."""
    renderer = Renderer(demo_tokenizer(), dialect="mistral")
    async with ProgramSession(ScriptedPolicy(replies()), renderer, SAMPLING) as session:
        with pytest.raises(ApiError, match="does not read the tool calls"):
            await ask(session, "Look!")
    with pytest.raises(ConfigError):
        session.branches()


async def test_later_tools_that_the_dialect_cannot_read_are_an_error_of_their_request() -> None:
    """The model's own code can send any: it ends neither the session nor the run."""
    async with session_of(ScriptedPolicy(replies())) as session:
        await ask(session, "Look!")
        with pytest.raises(ApiError, match=r"tools: .* does not read the tool calls") as refused:
            await ask(session, "Leap!", tools=[Tool('a "leap"')])
        await ask(session, "Look again!")
    assert (refused.value.error_kind, session.counts["refused/tools"]) == ("invalid_request", 1)
    check_laws(session, session.branches())


ODD_NAMES = ['say"hello"', "a\nb", '{"name": "x"}', "a\\u0022", "</tool_call>", "\0"]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_tools_that_no_dialect_reads_are_an_error_of_their_request_also_the_first(name: str) -> None:
    """Names of tools are from files and servers that a model may write: they end no run."""
    renderer = Renderer(demo_tokenizer())
    async with ProgramSession(ScriptedPolicy(replies()), renderer, SAMPLING) as session:
        with pytest.raises(ApiError, match="tools: ") as refused:
            await ask(session, "Leap!", tools=[LOOK, Tool(name)])
        await ask(session, "Look!")
    assert (refused.value.error_kind, session.counts["refused/tools"]) == ("invalid_request", 1)
    check_laws(session, session.branches())


class LaterRefusing(Renderer):
    """A renderer whose test refuses all tools but the first."""

    tested = 0

    def self_test(self, *args: Any, **options: Any) -> Any:
        found = super().self_test(*args, **options)
        self.tested += 1
        return found if self.tested == 1 else attrs.evolve(found, unread="not read")


async def test_tools_that_a_session_of_the_run_was_served_keep_the_run() -> None:
    """Whatever the test says later, in another session: it costs the request."""
    renderer = LaterRefusing(demo_tokenizer())
    async with ProgramSession(ScriptedPolicy(replies()), renderer, SAMPLING) as first:
        await ask(first, "Look!")
    async with ProgramSession(ScriptedPolicy(replies()), renderer, SAMPLING) as second:
        with pytest.raises(ApiError, match=r"tools: .*not read"):
            await ask(second, "Leap!", tools=[Tool("leap")])
    assert second.branches() == []


FAMILIES_WITH_TOOLS = [
    name for name, family in FAMILIES.items() if family.calls and "refused" not in family.verdicts and family.system
]


@pytest.mark.parametrize("name", FAMILIES_WITH_TOOLS)
async def test_a_conversation_with_system_messages_is_one_root(name: str, request: Any) -> None:
    """With any chat template a program may send system messages anywhere, and results in any order.

    The results have the ids that the model wrote, and the program gets ids of the session.
    """
    family = FAMILIES[name]
    renderer = family.make(request)
    places = range(min(family.parallel, 2))
    written = [family.ids.format(place, name="look") for place in places]
    calls = [ToolCall("look", {"at": "sun"}, id=call_id) for call_id in written]
    model = [Message("assistant", "", calls), Message("assistant", "Both.")]
    rules = message_rules(renderer.render)
    asked = rules.applied([Message("system", "S"), Message("user", "Look!"), Message("system", "V")])
    sampled: list[Any] = []

    def answer(tokens: Any) -> Any:
        return sampled.pop(0)

    policy = ScriptedPolicy(answer)
    async with ProgramSession(policy, renderer, SAMPLING) as session:
        results = [Message("tool", "hot", tool_call_id=call_id) for call_id in written]
        sampled.append(speak(renderer, asked, model[0], results, TOOLS))
        opening = (Message("system", "S"), "Look!", Message("system", "V"))
        first = await ask(session, *opening, tools=TOOLS)
        theirs = [result(first, "hot", place) for place in reversed(places)]
        sampled.append(speak(renderer, [*asked, model[0], *results], model[1], [Message("user", "U")], TOOLS))
        second = await ask(session, *opening, first.message, *theirs, tools=TOOLS)
        sampled.append([*renderer.encode("ok").tolist(), renderer.stop_token_ids[0]])
        await ask(session, *opening, first.message, *theirs, second.message, Message("system", "W"), tools=TOOLS)
    assert [len(one.message.tool_calls) for one in (first, second)] == [len(places), 0]
    assert [call.id for call in first.message.tool_calls] == [f"c0000000{place}" for place in places]
    assert [message.tool_call_id for message in session.tree.calls[1].new] == written
    assert (len(session.tree.roots), session.counts["bridge_refused"]) == (1, 0)
    (branch,) = session.branches()
    assert len(branch.completions) == 3


class WithoutBridges(Renderer):
    """A renderer whose template refuses every bridge."""

    def bridge(self, *args: Any, **options: Any) -> Any:
        raise ConfigError("no bridge for these messages")


async def test_a_refused_bridge_is_a_root() -> None:
    """A conversation that the template cannot continue is encoded as a whole, and each reply is trained once."""
    policy = ScriptedPolicy(replies(calling("sun"), "done"))
    renderer = WithoutBridges(demo_tokenizer())
    async with ProgramSession(policy, renderer, SAMPLING) as session:
        first = await ask(session, "Look!")
        await ask(session, "Look!", first.message, result(first, "hot"))
    branches = session.branches()
    check_laws(session, branches, policy)
    assert [len(branch.completions) for branch in branches] == [1, 1]
    assert (len(session.tree.roots), session.counts["bridge_refused"]) == (2, 1)
    whole = list(session.tree.calls[1].new)
    assert policy.requests[1].tolist() == renderer.opening(whole, (LOOK,)).tolist()
