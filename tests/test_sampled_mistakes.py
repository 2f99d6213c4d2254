"""The law of sampled mistakes: no reply, however odd, fails its rollout.

A call id of a wrong form, an odd name, an empty reply and a cut call are mistakes of the policy. They end in an error
message to the model or in a stop reason, so that they are scored, and never in ``StopReason.FAILED``, which removes the
rollout from its group. Each mistake is played on each chat template of the tests, in short and in long conversations.
``--long`` takes the whole vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest

from rollouts.agent import run_branches
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams, StopReason, Tool, ToolCall
from rollouts.environments.base import StepResult
from rollouts.renderer import Renderer, speak
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.trajectory import Trajectory
from tests.families import TOOLS
from tests.test_families import FAMILIES, PLAYED_WITHOUT_TOOLS

QUESTION = Message("user", "Well?")
CALL = ToolCall("look", {"at": "xyz"}, id="c00000001")
IDS = ("call_1", "x", "functions.look", "0123456789abcdef", "é-1", "<|im_end|>", "[ARGS]")
NAMES = ("nothing", "a b", "", "'", "é", "look.leap", "x" * 200, "<|im_end|>", "\\ud800", "</s>", "{{ x }}", "]")
LONG = 9
"""Number of earlier messages of a long conversation: bridges of those are built with a dummy."""


class Room:
    """An environment that answers each call, or any other reply with a question, for four steps."""

    def __init__(self, tools: Sequence[Tool], opening: Sequence[Message]) -> None:
        self.tools, self.opening, self.left = tools, opening, 3

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return self.opening

    async def step(self, reply: Message) -> StepResult:
        self.left -= 1
        if self.left < 0:
            return StepResult(done=True)
        results = [Message("tool", "seen", tool_call_id=call.id, name=call.name) for call in reply.tool_calls]
        return StepResult(results or [QUESTION])

    async def close(self) -> None:
        return None


def play(
    renderer: Renderer, tools: Sequence[Tool], opening: Sequence[Message], reply: Reply, good: list[int], history: Any
) -> Trajectory:
    policy = ScriptedPolicy([reply, *[Reply(good)] * 4])
    limits = Limits(max_turns=4, on_cut="continue")

    async def run() -> list[Trajectory]:
        return await run_branches(
            Prompt("unused"),
            lambda: Room(tools, opening),
            policy,
            renderer,
            sampling=SamplingParams(max_new_tokens=len(reply.tokens) or 1),
            limits=limits,
            history=history,
        )

    return anyio.run(run)[-1]


def mistakes(renderer: Renderer, tools: Sequence[Tool], opening: Sequence[Message]) -> Iterator[tuple[str, Reply]]:
    """The mistakes of a family: its own spelling of a call, with another id or name, or with an end missing."""
    stop = renderer.stop_token_ids[0]
    yield "only a stop token", Reply([stop])
    yield "only white space", Reply([*renderer.encode(" \n").tolist(), stop])
    yield "only a thought", Reply([*renderer.encode("<think>\nhm\n</think>\n\n").tolist(), stop])
    yield "an open thought", Reply([*renderer.encode("<think>\nhm").tolist(), stop])
    answer = speak(renderer, opening, Message("assistant", "Yes, it is."), [QUESTION], tools).tolist()
    yield "a cut answer", Reply(answer[:1], "length")
    if not tools:
        return
    result = Message("tool", "seen", tool_call_id=CALL.id, name=CALL.name)
    ids = speak(renderer, opening, Message("assistant", tool_calls=(CALL,)), [result], tools).tolist()
    end = ids.pop()
    text = renderer.decode(ids)
    for odd in IDS if CALL.id in text else ():
        yield f"the id {odd!r}", Reply([*renderer.encode(text.replace(CALL.id, odd)).tolist(), end])
    for odd in NAMES:
        yield f"the name {odd!r}", Reply([*renderer.encode(text.replace(CALL.name, odd)).tolist(), end])
    for kept in range(1, len(ids), max(1, len(ids) // 6)):
        yield f"{kept} tokens of a call", Reply(ids[:kept], "length")
        yield f"{kept} tokens of a call, and a stop", Reply([*ids[:kept], end])


def opening_of(*, long: bool) -> list[Message]:
    turns = [QUESTION]
    while long and len(turns) < LONG:
        turns += [Message("assistant", f"Yes, {len(turns)}."), QUESTION]
    return turns


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mistake_of_the_policy_never_fails_the_rollout(name: str, request: pytest.FixtureRequest) -> None:
    """The stop reason says what happened, and there is no failure: in short and long conversations, in forks, and
    where special tokens in the text of tools are refused.
    """
    family = FAMILIES[name]
    tools = () if name in PLAYED_WITHOUT_TOOLS else TOOLS
    failed: dict[str, str] = {}
    for special_text, history, long in (
        ("as_ids", "fork", False),
        ("error", "append", False),
        ("as_ids", "append", True),
    ):
        renderer = family.make(request, special_text=special_text)
        opening = opening_of(long=long)
        good = speak(renderer, opening, Message("assistant", "No."), [QUESTION], tools).tolist()
        for what, reply in mistakes(renderer, tools, opening):
            last = play(renderer, tools, opening, reply, good, history)
            if last.failure is not None or last.stop_reason is StopReason.FAILED:
                where = f"{what}, {special_text}, {history}, {'long' if long else 'short'}"
                failed[where] = last.failure.message if last.failure else "without a failure"
    assert failed == {}, list(failed.items())[:3]
