"""Helpers for tests of sessions: a small model with scripted replies, and a check of the laws of a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from rollouts.dtypes import Completion, Message, Prompt, SamplingParams, Tool, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.inference.base import CompletionRequest, Policy, ServerInfo
from rollouts.inference.wire_errors import error_of
from rollouts.programs.gateway.session import ProgramSession
from rollouts.programs.gateway.types import CallReply, CallRequest
from rollouts.renderer import Renderer, load_tokenizer, renderer_for
from rollouts.runs.verify import check_sample
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import trajectory_to_samples
from rollouts.trajectory import Trajectory

LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
SAMPLING = SamplingParams(max_new_tokens=4096)


@functools.cache
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL)


def demo_renderer() -> Renderer:
    return renderer_for(demo_tokenizer())


def spoken(message: Message | str) -> list[int]:
    """The ids of a reply in the notation of the demo model, its stop id included."""
    message = Message("assistant", message) if isinstance(message, str) else message
    parts = [f"<think>\n{message.reasoning}\n</think>\n\n"] if message.reasoning else []
    parts += [message.content] if message.content else []
    for call in message.tool_calls:
        text = call.raw or msgspec.json.encode({"name": call.name, "arguments": dict(call.arguments)}).decode()
        parts.append(f"\n<tool_call>\n{text}\n</tool_call>")
    text = "".join(parts)
    return [*demo_tokenizer().encode(text, add_special_tokens=False), demo_renderer().stop_token_ids[0]]


def calling(*places: str, text: str = "I look.", reasoning: str | None = None) -> Message:
    """A reply that calls the tool once for each place."""
    return Message("assistant", text, [ToolCall("look", {"at": place}) for place in places], reasoning=reasoning)


def replies(*messages: Message | str) -> Callable[[Any], list[int]]:
    """A script of these replies, then of numbered ones."""
    script = list(messages)
    count = 0

    def answer(tokens: Any) -> list[int]:
        nonlocal count
        count += 1
        return spoken(script.pop(0) if script else f"reply number {count}")

    return answer


class GrammarPolicy(ScriptedPolicy):
    """A policy of a server that says whether it has grammars; it records the sampling of each request."""

    def __init__(self, *, grammars: bool | None = True, refuses: bool = False, status: int = 400) -> None:
        super().__init__(replies('{"a": 1}'), max_context=4096)
        self.samplings: list[SamplingParams] = []
        self._grammars, self._refuses, self._status = grammars, refuses, status

    async def complete(self, request: CompletionRequest) -> Completion:
        self.samplings.append(request.sampling)
        if self._refuses:
            raise error_of(self._status, "the grammar cannot be compiled")
        completion = await super().complete(request)
        return attrs.evolve(completion, logprobs_of="constrained" if request.sampling.constrained else "tempered")

    async def describe(self) -> ServerInfo:
        return attrs.evolve(await super().describe(), has_grammars=self._grammars, has_structural_tags=self._grammars)


def session_of(policy: Policy, **options: Any) -> ProgramSession:
    return ProgramSession(policy, demo_renderer(), options.pop("sampling", SAMPLING), **options)


def asks(*messages: Message | str, tools: Sequence[Tool] = (LOOK,), **fields: Any) -> CallRequest:
    """A request; a string is a user message."""
    given = tuple(Message("user", one) if isinstance(one, str) else one for one in messages)
    return CallRequest(messages=given, tools=tuple(tools), **fields)


async def ask(
    session: ProgramSession, *messages: Message | str, lineage: dict[str, str] | None = None, **fields: Any
) -> CallReply:
    """One call whose answer is delivered."""
    (reply,) = await session.call(asks(*messages, **fields), lineage=lineage or {})
    session.delivered([reply])
    return reply


def result(reply: CallReply, text: str, number: int = 0) -> Message:
    """The result of one call of a reply."""
    return Message("tool", text, tool_call_id=reply.message.tool_calls[number].id)


def check_laws(session: ProgramSession, branches: Sequence[Trajectory], policy: ScriptedPolicy | None = None) -> None:
    """Check the laws of a session on its branches.

    Tokens: each request is a kept path and encoded new text. Mask: as in any trajectory. Once and Whole: every reply is
    trained in exactly one branch, or counted.
    """
    tree = session.tree
    trained: dict[str, int] = {}
    for branch in branches:
        for record in branch.completions:
            trained[record.request_id] = trained.get(record.request_id, 0) + 1
    assert set(trained.values()) <= {1}
    sampled = sum(len(call.completion.tokens) for call in tree.calls)
    assert sampled == tree.sampled
    assert sampled == sum(int(branch.mask.sum()) for branch in branches) + tree.untrained.total()
    for call in tree.calls:
        ids = call.line.sequence.tokens
        if call.parent is not None:
            before = call.parent.line.sequence.tokens[: call.parent.stop]
            assert np.array_equal(ids[: call.start], before)
        assert np.array_equal(ids[call.reply_start : call.stop], call.completion.tokens)
    if policy is not None:
        sent = {tuple(request.tolist()) for request in policy.requests}
        for call in tree.calls:
            assert tuple(call.line.sequence.tokens[: call.reply_start].tolist()) in sent
    samples = trajectory_to_samples(branches, Prompt("p", index=0), demo_renderer().decode) if branches else []
    assert [violation for sample in samples for violation in check_sample(sample)] == []
