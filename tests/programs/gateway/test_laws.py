"""The laws of a session under 1,000 random conversations with random edits.

Agents take turns. In each turn an agent does as programs do: continue, send a reply back with changes, send results in
another order, retry, ask for several replies, edit the history, leave a reply out, put assistant text in, lose an
answer.

1. Tokens: the ids of each request are a kept path and the encoded new text.
2. Match: the call that a request continues is the call that a comparison of whole histories finds.
3. Once and Whole: every sampled id is trained exactly once, or counted.

It takes about 15 seconds of CPU; fewer conversations leave combinations of edits out. The same laws hold where the
agents of a session ask at the same time, repeat requests that are in flight, and go away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import attrs
import numpy as np
import pytest

from rollouts.dtypes import Completion, Message, Tool, ToolCall
from rollouts.errors import EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.programs.gateway.normal import ordered_results
from rollouts.programs.gateway.session import ProgramSession
from rollouts.programs.gateway.tree import Call, Training
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest
from rollouts.testing.policy import Reply, ScriptedPolicy
from tests.programs.gateway.programs import asks, check_laws, demo_renderer, demo_tokenizer, session_of
from tests.worlds import TOOL, Speller, some_text

CONVERSATIONS = 1000
OTHER = Tool("leap", "Leaps.")


@attrs.define
class Agent:
    """One conversation of a program."""

    lineage: dict[str, str]
    tools: tuple[Tool, ...]
    messages: list[Message]
    """Up to the last reply or, before the first reply, up to the question."""
    reply: CallReply | None = None


class RandomPolicy(ScriptedPolicy):
    """Replies from a pool, some cut, some failing, some aborted."""

    def __init__(self, pool: Sequence[Sequence[int]], rng: random.Random) -> None:
        super().__init__(self._answer)
        self.pool, self.rng = pool, rng

    def _answer(self, tokens: Any) -> Reply:
        reply = self.rng.choice(self.pool)
        chance = self.rng.random()
        if chance < 0.04:
            return Reply(reply[: len(reply) // 2], "abort")
        return Reply(reply[:-1], "length") if chance < 0.1 else Reply(reply)

    async def complete(self, request: CompletionRequest) -> Completion:
        if self.rng.random() < 0.04:
            raise EndpointUnavailable("no answer")
        return await super().complete(request)


def identity(message: Message, ours: set[str]) -> tuple[Any, ...]:
    """The compared part of a message."""
    ids = [call.id for call in message.tool_calls]
    if ids and ours.issuperset(ids):
        return "reply", ids
    calls = [(call.id, call.name, dict(call.arguments), call.raw) for call in message.tool_calls]
    return message.role, message.content.strip(), message.tool_call_id, calls


def expected_parent(calls: Sequence[Call], messages: Sequence[Message], tools: Any, ours: set[str]) -> Call | None:
    """The call that a request continues, found by a comparison of whole histories."""
    replies = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not replies or replies[-1] == len(messages) - 1:
        return None
    wanted = [identity(message, ours) for message in messages[: replies[-1] + 1]]
    for call in reversed(calls):
        path = [message for one in call.path() for message in (*one.new, one.reply.message)]
        if call.tools == tools and [identity(message, ours) for message in path] == wanted:
            return call
    return None


def changed(echo: Message, rng: random.Random) -> Message:
    """A reply as some programs send it back."""
    kind = rng.choice(["same", "same", "no_reasoning", "spaces", "respelled", "rewritten"])
    if kind == "no_reasoning":
        return attrs.evolve(echo, reasoning=None)
    if kind == "spaces":
        return attrs.evolve(echo, content=f" {echo.content}\n")
    if kind == "respelled":
        calls = [attrs.evolve(call, arguments=dict(reversed(call.arguments.items()))) for call in echo.tool_calls]
        return attrs.evolve(echo, tool_calls=calls)
    if kind == "rewritten":
        return attrs.evolve(echo, tool_calls=[ToolCall("invalid", {"bad": None}, call.id) for call in echo.tool_calls])
    return echo


def next_messages(agent: Agent, rng: random.Random) -> list[Message]:
    """The messages of the agent's next request."""
    if agent.reply is None:
        return agent.messages
    reply = agent.reply.message
    added = [Message("tool", some_text(rng, 3), tool_call_id=call.id) for call in reply.tool_calls]
    rng.shuffle(added)
    if not added or rng.random() < 0.2:
        added.append(Message(rng.choice(["user", "system"]), some_text(rng, 3)))
    return [*agent.messages, changed(reply, rng), *added]


def edited(messages: list[Message], rng: random.Random) -> list[Message]:
    """The messages with one of the edits that programs make."""
    kind = rng.choice(["edit", "truncate", "insert", "leave_out"])
    at = rng.randrange(len(messages))
    if kind == "edit":
        return [*messages[:at], attrs.evolve(messages[at], content=some_text(rng, 3)), *messages[at + 1 :]]
    if kind == "insert":
        return [*messages, Message("assistant", some_text(rng, 2)), Message("user", some_text(rng, 2))]
    kept = messages[: at + 1] if kind == "truncate" else [*messages[:at], *messages[at + 1 :]]
    return [*kept, Message("user", some_text(rng, 2))]


async def play(seed: int, pool: Sequence[Sequence[int]]) -> None:
    rng = random.Random(seed)
    policy = RandomPolicy(pool, rng)
    training = Training(siblings=rng.choice(["drop", "keep"]), discarded=rng.choice(["train", "drop"]))
    async with session_of(policy, training=training) as session:
        agents = []
        for number in range(rng.randint(1, 4)):
            question = [Message("user", rng.choice(["Run sub0", some_text(rng, 3)]))]
            system = [Message("system", "Be brief.")] if rng.random() < 0.7 else []
            named = {"x-session-id": str(number)} if rng.random() < 0.8 else {}
            agents.append(Agent(named, rng.choice([(TOOL,), (TOOL, OTHER), ()]), [*system, *question]))
        for _ in range(rng.randint(2, 9)):
            await take_turn(session, rng.choice(agents), rng)
    branches = session.branches()
    check_laws(session, branches, policy)
    check_contexts(session)


async def take_turn(session: ProgramSession, agent: Agent, rng: random.Random) -> None:
    messages = next_messages(agent, rng)
    if rng.random() < 0.2:
        messages = edited(messages, rng)
    n = 2 if rng.random() < 0.1 else 1
    tree = session.tree
    before, ours = list(tree.calls), set(tree.ours)
    expected = expected_parent(before, ordered_results(messages), agent.tools, ours)
    request = asks(*messages, tools=agent.tools, n=n)
    try:
        replies = await session.call(request, lineage=agent.lineage)
        if rng.random() < 0.1:  # the answer is lost: the retry gets the same
            session.undelivered(replies)
            assert await session.call(request, lineage=agent.lineage) == replies
    except ApiError as error:
        assert error.error_kind in ("server", "invalid_request")  # noqa: PT017 - most turns have no error
        return
    for call in tree.calls[len(before) :]:
        assert call.parent is expected or session.counts["bridge_refused"]
    if rng.random() < 0.9:
        session.delivered(replies)
        agent.messages, agent.reply = messages, rng.choice(list(replies))


def check_contexts(session: ProgramSession) -> None:
    """The context of each call is an opening of its messages, or a bridge behind the parent's reply."""
    renderer = demo_renderer()
    for call in session.tree.calls:
        ids = call.line.sequence.tokens[call.start : call.reply_start]
        if call.parent is None:
            expected = renderer.opening(list(call.new), call.tools)
        else:
            history = [message for one in call.parent.path() for message in (*one.new, one.message)]
            expected = renderer.bridge(history, list(call.new), tools=call.tools, tail=call.parent.tail)
        assert np.array_equal(ids, expected)


@pytest.fixture(scope="module")
def pool() -> list[list[int]]:
    """Replies in tokens that no tokenizer would choose, so that a reply that is encoded again is found."""
    speller = Speller(demo_tokenizer(), demo_renderer().stop_token_ids[0], seed=0)
    return [speller.reply() for _ in range(100)]


@pytest.mark.parametrize("part", range(4))
def test_the_laws_hold_in_random_conversations(part: int, pool: list[list[int]]) -> None:
    """Tokens, Match, Once and Whole hold, whatever the program does to its history."""

    async def run() -> None:
        for seed in range(part, CONVERSATIONS, 4):
            await play(seed, pool)

    anyio.run(run)


Answered: TypeAlias = tuple[list[Message], list[CallReply]]
"""The messages of a request, and its replies."""


class WaitingPolicy(RandomPolicy):
    """A random policy whose replies overtake each other."""

    async def complete(self, request: CompletionRequest) -> Completion:
        for _ in range(self.rng.randrange(6)):
            await anyio.lowlevel.checkpoint()
        return await super().complete(request)


async def ask_until(
    session: ProgramSession, agent: Agent, request: CallRequest, steps: int | None, got: list[Answered]
) -> None:
    """One client; after this number of steps of the event loop it goes away."""
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            try:
                got.append((list(request.messages), await session.call(request, lineage=agent.lineage)))
            except ApiError as error:
                assert error.error_kind in ("server", "invalid_request")  # noqa: PT017 - most calls have no error
            tasks.cancel_scope.cancel()

        tasks.start_soon(ask)
        if steps is not None:
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()


async def take_turns(session: ProgramSession, agent: Agent, rng: random.Random) -> None:
    """Some turns, each asked by one client or by several that overlap, with the same request or another one."""
    for _ in range(rng.randint(1, 5)):
        messages = next_messages(agent, rng)
        if rng.random() < 0.2:
            messages = edited(messages, rng)
        got: list[Answered] = []
        async with anyio.create_task_group() as clients:
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                if rng.random() < 0.3:  # another question behind the same reply; a long one is rendered in a thread
                    question = Message("user", some_text(rng, 3) * rng.choice([1, 3000]))
                    messages = [*messages[:-1], question]
                request = asks(*messages, tools=agent.tools, n=2 if rng.random() < 0.15 else 1)
                steps = rng.choice([None, None, rng.randrange(12)])
                clients.start_soon(ask_until, session, agent, request, steps, got)
                for _ in range(rng.randrange(3)):
                    await anyio.lowlevel.checkpoint()
        if got and rng.random() < 0.9:
            agent.messages, replies = got[-1]
            session.delivered(replies)
            agent.reply = rng.choice(replies)


async def play_side_by_side(seed: int, pool: Sequence[Sequence[int]]) -> None:
    rng = random.Random(seed)
    async with session_of(WaitingPolicy(pool, rng)) as session, anyio.create_task_group() as tasks:
        question = [Message("user", "Run sub0")]  # of all agents
        for number in range(rng.randint(2, 4)):
            named = {"x-session-id": str(number)} if rng.random() < 0.8 else {}
            agent = Agent(named, rng.choice([(TOOL,), (TOOL, OTHER)]), question)
            tasks.start_soon(take_turns, session, agent, rng)
    check_laws(session, session.branches())
    check_contexts(session)


def test_the_laws_hold_for_agents_side_by_side(pool: list[list[int]]) -> None:
    """Agents ask at the same time, repeat requests that are in flight, and go away at any moment."""

    async def run() -> None:
        for seed in range(40):
            await play_side_by_side(seed, pool)

    anyio.run(run)
