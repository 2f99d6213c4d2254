"""Requests of real programs, replayed: matching, retries, forks, agents, compaction.

The reply to each request is the reply that the program sent back later, so that its next request continues it or does
not, as with the real program. The ids of calls are replaced by the ids that the session issues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import pytest

from rollouts.dtypes import Completion, Message, SamplingParams, ToolCall
from rollouts.errors import ContextOverflow, EndpointUnavailable
from rollouts.inference.base import CompletionRequest
from rollouts.programs.gateway.server import LINEAGE, WIRES
from rollouts.programs.gateway.session import ProgramSession
from rollouts.programs.gateway.tree import Training
from rollouts.programs.gateway.types import ApiError, CallRequest
from rollouts.testing.policy import ScriptedPolicy
from tests.programs.gateway.programs import check_laws, demo_renderer, spoken

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@attrs.frozen
class Seen:
    """The expected outcome of one recording."""

    calls: int
    """Sampled replies."""
    roots: int = 1
    forks: int = 0
    """Calls with more than one child."""
    untrained: Mapping[str, int] = attrs.field(factory=dict)
    """Replies that are not trained, by reason."""
    counts: Mapping[str, int] = attrs.field(factory=dict)
    faults: Mapping[int, str] = attrs.field(factory=dict)
    """The fate of a request: ``fail``, ``cut``, ``overflow``, or ``gone`` (the client left)."""
    replies: Mapping[int, Any] = attrs.field(factory=dict)
    """Replies that the program did not send back as they were: ``malformed`` calls, a ``reasoning`` that was dropped,
    ``calls`` that became text, or its text."""


SUMMARY = "All done. The file out.txt says hello."
LINEAR = Seen(3)
"""A program that only continues."""
TITLED = {"side_call": 1}
FAILED_ONCE = Seen(3, faults={0: "fail"})
CUT_ONCE = Seen(3, faults={0: "cut"}, counts={"retries_served": 1})
SERVED = {"retries_served": 1}
MALFORMED = {"malformed_tool_calls": 1, "echo/rewritten": 2}  # of one reply, in two requests

RECORDINGS = {
    "anth_sdk": Seen(2),
    "bw1": LINEAR,
    "claude1": Seen(4, roots=2, untrained=TITLED),
    "claude_429": FAILED_ONCE,
    "claude_agent": Seen(15, roots=12),
    "claude_badjson": Seen(3, counts=MALFORMED, replies={0: "malformed"}),
    "claude_bare": LINEAR,
    "claude_compact": Seen(5),
    "claude_compact2": Seen(5),
    "claude_compact3": Seen(5),
    "claude_compact4": Seen(7, roots=2, forks=1, counts={"rewritten_at/1": 1}),
    "claude_cut": CUT_ONCE,
    "claude_fail500": FAILED_ONCE,
    "claude_ierr": FAILED_ONCE,
    "claude_lean": LINEAR,
    "claude_overflow": Seen(3, forks=1, counts={"overflow": 1}, faults={2: "overflow"}),
    "claude_ping": LINEAR,
    "claude_quiet": LINEAR,
    "claude_reason": Seen(2),
    "claude_slow": Seen(2, counts={"undelivered": 1}, faults={2: "gone"}),
    "codex1": LINEAR,
    "codex_badjson": Seen(3, counts={"malformed_tool_calls": 1}, replies={0: "malformed"}),
    "codex_compact": Seen(8, roots=3, counts={"tools_changed": 1}, replies={2: SUMMARY}),
    "codex_cut": CUT_ONCE,
    "codex_fail500": FAILED_ONCE,
    "codex_ierr": FAILED_ONCE,
    "codex_overflow": Seen(2, counts={"overflow": 1}, faults={2: "overflow"}),
    "codex_ping": LINEAR,
    "codex_quiet": LINEAR,
    "codex_reason": Seen(2),
    "codex_slow": Seen(2, counts={"undelivered": 1}, faults={2: "gone"}),
    "lg_chat": Seen(2, counts={"echo/reasoning_dropped": 1}, replies={0: "reasoning"}),
    "lg_resp": Seen(2),
    "lg_stream": LINEAR,
    "mini1": Seen(2),
    "netns1": LINEAR,
    "oa_chat": Seen(2, counts={"echo/reasoning_dropped": 1}, replies={0: "reasoning"}),
    "oa_resp": Seen(2),
    "oa_stream": LINEAR,
    "oc1": Seen(4, roots=2, untrained=TITLED),
    "oc_agent": Seen(7, roots=3, untrained=TITLED),
    "oc_badjson": Seen(4, roots=2, untrained=TITLED, counts=MALFORMED, replies={1: "malformed"}),
    "oc_compact": Seen(8, roots=4, untrained=TITLED, replies={2: SUMMARY}),
    "oc_cut": Seen(4, roots=2, untrained=TITLED, counts=SERVED, faults={0: "cut"}),
    "oc_fail500": Seen(4, roots=2, untrained=TITLED, faults={0: "fail"}),
    "oc_ierr": Seen(3, faults={0: "fail"}),  # it did not ask for the title again
    "oc_overflow": Seen(
        2, roots=2, untrained=TITLED, counts={"overflow": 2}, faults={2: "overflow", 3: "overflow"}
    ),  # the request for a summary did not fit either
    "oc_overflow2": Seen(
        8, roots=4, untrained=TITLED, counts={"overflow": 1}, faults={3: "overflow"}, replies={4: SUMMARY}
    ),
    "oc_ping": Seen(4, roots=2, untrained=TITLED),
    "oc_reason": Seen(3, roots=2, untrained=TITLED),
    "oc_title": LINEAR,
    "pai_anth": Seen(2),
    "pai_chat": Seen(2),
    "pai_out": Seen(1, counts={"not_enforced/tool_choice": 1}),
    "pai_resp": Seen(2),
    "qwen2": LINEAR,
    "qwen_agent": Seen(6, roots=2),
    "qwen_badjson": Seen(  # it asked again with a greater max_tokens, and continued the second reply
        4,
        roots=2,
        untrained={"dropped": 1},
        counts={"malformed_tool_calls": 2, "echo/rewritten": 2},
        replies={0: "malformed", 1: "malformed"},
    ),
    "qwen_compact": Seen(6, roots=2),  # it did not use the summary
    "qwen_cut": Seen(1, untrained={"undelivered": 1}, faults={0: "cut"}),
    "qwen_fail500": FAILED_ONCE,
    "qwen_ierr": Seen(0, roots=0, faults={0: "fail"}),
    "qwen_overflow": Seen(2, counts={"overflow": 2}, faults={2: "overflow", 3: "overflow"}),
    "qwen_overflow2": Seen(3, roots=2, counts={"overflow": 1, "rewritten_at/0": 1}, faults={2: "overflow"}),
    "qwen_ping": LINEAR,
    "qwen_quiet": LINEAR,
    "qwen_reason": Seen(2),
    "smol_code": Seen(
        2, roots=2, counts={"rewritten_at/2": 1}, replies={0: "Thought: go\n<code>\nx = 1 + 1\nprint(x)\n"}
    ),
    "smol_tool": Seen(  # the last request is for a final answer: it has another system prompt and no tools
        21,
        roots=21,
        counts={f"rewritten_at/{2 * turn}": 1 for turn in range(1, 20)} | {"not_enforced/tool_choice": 20},
        replies=dict.fromkeys(range(20), "calls"),
    ),
}


class FaultyPolicy(ScriptedPolicy):
    """Answers with the next reply, or has the next fault."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: spoken(self.reply))
        self.reply = Message("assistant")
        self.fault = ""

    async def complete(self, request: CompletionRequest) -> Completion:
        if self.fault == "fail":
            raise EndpointUnavailable("the server failed")
        if self.fault == "overflow":
            raise ContextOverflow("the prompt is too long")
        if self.fault == "gone":
            await anyio.sleep_forever()
        return await super().complete(request)


@attrs.frozen
class Recorded:
    """One request of a recording."""

    request: CallRequest
    lineage: Mapping[str, str]
    counts_tokens: bool


def read(path: Path) -> list[Recorded]:
    records = []
    for record in msgspec.json.decode(path.read_bytes()):
        if "method" not in record:
            continue  # a note
        route = record["path"].removesuffix("/count_tokens")
        headers = {name.lower(): value for name, value in record["headers"].items()}
        lineage = {name: headers[name] for name in LINEAGE if name in headers}
        request = WIRES[route].read(record["body"])
        records.append(Recorded(request, lineage, route != record["path"]))
    return records


def echo_of(records: Sequence[Recorded], number: int) -> Message | None:
    """The reply to a request as the program sent it back: the message behind its messages in a later request."""
    asked, lineage = records[number].request.messages, records[number].lineage
    for later in records[number + 1 :]:
        messages = later.request.messages
        same = later.lineage == lineage or "x-codex-window-id" in lineage
        if same and len(messages) > len(asked) and messages[: len(asked)] == asked:
            return messages[len(asked)] if messages[len(asked)].role == "assistant" else None
    return None


def reply_to(records: Sequence[Recorded], number: int, given: Any) -> Message:
    """The reply that the model samples."""
    echo = echo_of(records, number)
    if given == "calls":
        return Message("assistant", "I look.", [ToolCall("bash", {"command": str(number)})])
    if isinstance(given, str) and given not in ("malformed", "reasoning"):
        return Message("assistant", given)
    if echo is None:
        return Message("assistant", f"The last reply of this conversation, request {number}.")
    if given == "malformed":
        tools = records[number].request.tools
        bad = f'{{"name": "{tools[0].name}", "arguments": {{bad'
        return attrs.evolve(echo, tool_calls=[ToolCall(tools[0].name, raw=bad) for _ in echo.tool_calls])
    return attrs.evolve(echo, reasoning="I think about it.") if given == "reasoning" else echo


def renamed(messages: Sequence[Message], ids: Mapping[str, str]) -> tuple[Message, ...]:
    """The messages with the ids that the session gave."""
    return tuple(
        attrs.evolve(
            message,
            tool_call_id=ids.get(message.tool_call_id or "", message.tool_call_id),
            tool_calls=[attrs.evolve(call, id=ids.get(call.id, call.id)) for call in message.tool_calls],
        )
        for message in messages
    )


async def replayed(
    records: Sequence[Recorded], seen: Seen, policy: FaultyPolicy, training: Training | None = None
) -> ProgramSession:
    """Replay a recording."""
    ids: dict[str, str] = {}
    sampling = SamplingParams(max_new_tokens=4096)
    async with ProgramSession(policy, demo_renderer(), sampling, training=training) as session:
        for number, record in enumerate(records):
            request = attrs.evolve(record.request, messages=renamed(record.request.messages, ids))
            policy.fault = seen.faults.get(number, "")
            policy.reply = reply_to(records, number, seen.replies.get(number))
            if record.counts_tokens:
                assert await session.count_tokens(request) > 0
                continue
            try:
                with anyio.move_on_after(0.01 if policy.fault == "gone" else 60) as scope:
                    (reply,) = await session.call(request, lineage=record.lineage)
            except ApiError:
                if policy.fault in ("fail", "overflow"):
                    continue
                raise
            if scope.cancelled_caught:
                continue
            echo = echo_of(records, number)
            if echo is not None:
                theirs = [call.id for call in echo.tool_calls]
                ids.update(zip(theirs, [call.id for call in reply.message.tool_calls], strict=False))
            (session.undelivered if policy.fault == "cut" else session.delivered)([reply])
    return session


@pytest.mark.parametrize("name", RECORDINGS)
async def test_a_recording_becomes_its_tree(name: str, asset: Callable[[str], Path]) -> None:
    """Roots, forks, replies and counts are as with the program, and every sampled token is trained or counted."""
    seen = RECORDINGS[name]
    policy = FaultyPolicy()
    session = await replayed(read(asset(f"../recordings/{name}.json")), seen, policy)
    branches = session.branches()
    check_laws(session, branches, policy)
    tree = session.tree
    trained = {record.request_id for branch in branches for record in branch.completions}
    lost = [call for call in tree.calls if call.completion.request_id not in trained]
    assert (len(tree.calls), len(tree.roots)) == (seen.calls, seen.roots)
    assert sum(len(call.children) > 1 for call in tree.calls) == seen.forks
    assert len(lost) == sum(seen.untrained.values())
    assert tree.untrained.keys() == seen.untrained.keys()
    kinds = (
        "rewritten",
        "echo/",
        "retries",
        "overflow",
        "tools_changed",
        "undelivered",
        "malformed_tool_calls",
        "not_enforced/tool_choice",
    )
    counts = {count: amount for count, amount in session.counts.items() if count.startswith(kinds)}
    counts = Counter(
        {count: amount for count, amount in counts.items() if not count.startswith("malformed_tool_calls/")}
    )
    assert counts == Counter(seen.counts)
    assert session.counts["bridge_refused"] == 0


@pytest.mark.parametrize("name", ["codex_compact", "oc_compact", "oc_overflow2"])
async def test_the_summary_of_a_recorded_compaction_can_be_dropped(name: str, asset: Callable[[str], Path]) -> None:
    """Its one reply is counted, and nothing else is lost."""
    policy, seen = FaultyPolicy(), RECORDINGS[name]
    training = Training(compaction="drop")
    session = await replayed(read(asset(f"../recordings/{name}.json")), seen, policy, training)
    check_laws(session, session.branches(), policy)
    assert session.tree.untrained.pop("compaction") == len(spoken(SUMMARY))
    assert session.tree.untrained.keys() == seen.untrained.keys()


def test_every_recording_is_in_the_table(asset: Callable[[str], Path]) -> None:
    """No recording is left out."""
    folder = asset("../recordings")
    assert sorted(path.stem for path in folder.glob("*.json")) == sorted(RECORDINGS)


async def test_results_of_agents_are_rendered_in_the_order_of_the_calls(asset: Callable[[str], Path]) -> None:
    """Agents whose results come in the order of completion have them in the prompt in the order of their calls."""
    records = read(asset("../recordings/claude_agent.json"))
    policy = FaultyPolicy()
    session = await replayed(records, RECORDINGS["claude_agent"], policy)
    turned = [call for call in session.tree.calls if call.parent is not None]
    for call in turned:
        assert call.parent is not None
        given = [one.id for one in call.parent.message.tool_calls]
        assert [message.tool_call_id for message in call.new if message.role == "tool"] == given
    assert len(turned) == 3
