"""Cost of a rollout in counts that are equal on every machine: tokens, bytes, tasks, connections, syncs, objects."""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import anyio
import attrs
import pytest

import rollouts
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment, ToolEnvironment, tool
from rollouts.environments.base import StepResult
from rollouts.inference.sglang import SGLangPolicy
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.types import CallReply
from rollouts.programs.gateway.wire import Entries, Wire, decoded_body
from rollouts.renderer import Renderer, load_tokenizer
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.run_journal import RunJournal
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    RolloutConfig,
    Sample,
    agent_rollout_to_samples,
    generate_rollout_batch,
)
from tests.batches import batch_metrics
from tests.programs.gateway.programs import session_of, spoken

TURNS, GROUPS, N = 3, 2, 4
DEEPEST = 8
"""Levels of the values of a sample, at most."""
CALLS = {"episode": 1726, "turn": 553, "sample": 1025, "metrics": 17}
"""The most function calls of an episode of three turns, of one turn more, of a sample of one turn from the prompt to
the batch, manager and reward included, and of the metrics of a sample: calls of functions of the package, and the calls
of functions written in C that it makes. The numbers only go down."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """A separate renderer, since its counters are read."""
    return Renderer(load_tokenizer(DEMO_MODEL))


class Asking(ToolEnvironment):
    """Answers tool calls, and ends after some turns."""

    turn, turns = 0, TURNS

    @tool
    def ask(self, what: str) -> str:
        """Asks."""
        return f"Nothing is known about {what}."

    async def step(self, reply: Message) -> StepResult:
        self.turn += 1
        return StepResult(done=True, reward=1.0) if self.turn == self.turns else await super().step(reply)


@attrs.frozen
class Played:
    """A batch generated through a server, and the counts of its generation."""

    samples: list[Sample]
    policy: SGLangPolicy
    server: StubServer
    tasks: list[str]
    """Names of the package's tasks that ran during requests."""
    journal: Journal
    encoded: int
    """Tokens that the tokenizer returned."""


async def play(renderer: Renderer, path: Path, *, segment_bytes: int = 1 << 20) -> Played:
    """Generate a batch of groups concurrently, with a journal."""
    call = '<tool_call>\n{"name": "ask", "arguments": {"what": "it"}}\n</tool_call>'
    reply = [*renderer.encode(call).tolist(), renderer.stop_token_ids[0]]
    encoded = renderer.encoded_tokens
    tasks: dict[int, str] = {}

    async def latency(request: Any) -> None:
        tasks.update({task.id: task.name or "" for task in anyio.get_running_tasks()})

    async with StubServer(lambda ids, params: reply, latency=latency) as server:
        endpoint = Endpoint(base_url=server.url)
        async with SGLangPolicy(endpoint) as policy:
            generate = functools.partial(
                generate_rollout_batch,
                environment_cls=Asking,
                endpoint=endpoint,
                tokenizer=renderer,
                policy=policy,
                limits=Limits(max_turns=TURNS + 1),
                sampling=SamplingParams(max_new_tokens=64),
            )
            config = RolloutConfig(
                batch_size=GROUPS, n_samples_per_prompt=N, over_sampling_factor=1, generate_fn=generate
            )
            buffer = DataBuffer([f"question {number}" for number in range(GROUPS)])
            with Journal(path / "journal", segment_bytes=segment_bytes) as journal:
                async with AsyncRolloutManager(config, buffer, rollout_log=RunJournal(journal)) as manager:
                    samples = await manager.generate_batch()
                    await journal.sync()
    ours = [name for name in tasks.values() if name.startswith("rollouts.")]
    return Played(samples, policy, server, ours, journal, renderer.encoded_tokens - encoded)


async def test_each_text_is_tokenised_once(renderer: Renderer, tmp_path: Path) -> None:
    """Only new text is tokenised: an opening for each group, a bridge for each turn."""
    played = await play(renderer, tmp_path)
    openings = sum(played.samples[N * group].completions[0].start for group in range(GROUPS))
    # The model's own stop token stands for the first one of each bridge.
    bridges = sum(
        later.start - earlier.stop + 1
        for sample in played.samples
        for earlier, later in zip(sample.completions, sample.completions[1:], strict=False)
    )
    assert played.encoded == openings + bridges


async def test_each_id_is_written_as_json_once(renderer: Renderer, tmp_path: Path) -> None:
    """A request serialises only the ids that are new since the previous turn."""
    played = await play(renderer, tmp_path)
    last = sum(sample.completions[-1].start for sample in played.samples)
    assert played.policy.totals.encoded_tokens == last


async def test_a_rollout_is_one_task(renderer: Renderer, tmp_path: Path) -> None:
    """In addition to the tasks of the groups; none for a turn, a request or a step."""
    played = await play(renderer, tmp_path)
    rollouts = [name for name in played.tasks if not name.endswith("._run_group")]
    assert len(rollouts) <= GROUPS * N
    assert len(played.tasks) - len(rollouts) <= GROUPS


async def test_a_request_passes_three_calls_of_the_agent(renderer: Renderer) -> None:
    """The rollout, its end and the episode stand between the caller of a generate function and the policy."""
    calls: list[str] = []

    def reply(tokens: Any) -> list[int]:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_globals["__name__"].startswith(("rollouts.agent", "rollouts.training")):
                calls.append(frame.f_code.co_name)
            frame = frame.f_back
        return [*renderer.encode("Yes.").tolist(), renderer.stop_token_ids[0]]

    options: dict[str, Any] = {"endpoint": Endpoint(), "tokenizer": renderer, "policy": ScriptedPolicy(reply)}
    await generate_rollout_batch(["One?"], environment_cls=SingleTurnEnvironment, **options)
    assert calls == ["play", "play_to_end", "agent_rollout_to_samples"]


async def test_there_are_no_more_connections_than_rollouts(renderer: Renderer, tmp_path: Path) -> None:
    """The next request reuses a free connection."""
    played = await play(renderer, tmp_path)
    assert len(played.server.requests) == GROUPS * N * TURNS
    assert played.server.connections <= GROUPS * N


async def test_the_disk_is_waited_for_once_a_batch(renderer: Renderer, tmp_path: Path) -> None:
    """And once more for each segment that became full."""
    played = await play(renderer, tmp_path / "whole")
    assert played.journal.syncs <= 1 + 1, "one for the batch, one at the close"
    cut = await play(renderer, tmp_path / "cut", segment_bytes=1000)
    segments = len(list((tmp_path / "cut" / "journal").glob("segment-*")))
    assert segments > 2
    assert cut.journal.syncs <= 1 + segments
    assert sum(entry.kind == "sample" for entry in read_journal(tmp_path / "cut" / "journal")) == GROUPS * N


class Counted:
    """Counts calls of the package's functions while inside."""

    calls = 0

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(_PACKAGE):
            self.calls += 1

    def __enter__(self) -> Counted:
        gc.disable()  # its callbacks and finalizers are calls, too
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


_PACKAGE = str(Path(rollouts.__file__).parent)


async def scored(sample: Sample) -> float:
    """A reward that calls nothing of the package."""
    return 1.0


def answering(renderer: Renderer, text: str) -> dict[str, Any]:
    """Options of agents whose model always replies with this text."""
    assert renderer.encoder  # waits for the fast encoder, which loads in a thread
    reply = [*renderer.encode(text).tolist(), renderer.stop_token_ids[0]]
    return {"endpoint": Endpoint(), "tokenizer": renderer, "policy": ScriptedPolicy(lambda tokens: reply)}


async def test_the_calls_of_an_episode_and_of_a_turn(renderer: Renderer) -> None:
    """Conversations of a known shape make at most as many function calls as before."""
    options = answering(renderer, '<tool_call>\n{"name": "ask", "arguments": {"what": "it"}}\n</tool_call>')

    async def calls(number: int, turns: int) -> int:
        environment_cls = type("Asking", (Asking,), {"turns": turns})
        with Counted() as counted:
            await agent_rollout_to_samples(f"A new question, {number}?", environment_cls=environment_cls, **options)
        return counted.calls

    await calls(0, 4)  # renders what later conversations of this shape share
    episode, longer = await calls(1, 3), await calls(2, 4)
    assert episode <= CALLS["episode"]
    assert longer - episode <= CALLS["turn"]


async def test_the_calls_of_a_sample(renderer: Renderer) -> None:
    """From the prompt to the batch, at most as many function calls as before."""
    options = answering(renderer, "Yes.")
    generate = functools.partial(generate_rollout_batch, environment_cls=SingleTurnEnvironment, **options)
    config = RolloutConfig(
        batch_size=8, n_samples_per_prompt=1, over_sampling_factor=1, generate_fn=generate, reward_fn=scored
    )
    async with AsyncRolloutManager(config, DataBuffer(map(str, range(16)))) as manager:
        await manager.generate_batch()
        with Counted() as counted:
            await manager.generate_batch()
    assert counted.calls <= 8 * CALLS["sample"]


async def test_the_calls_of_the_metrics_of_a_sample(renderer: Renderer) -> None:
    """A batch is counted in one turn of the event loop, so each sample makes few function calls."""
    options = answering(renderer, "Yes.")
    prompts = [Prompt(f"{number}?", index=number) for number in range(24)]
    samples = await generate_rollout_batch(prompts, environment_cls=SingleTurnEnvironment, **options)
    calls = []
    for count in (8, 24):
        with Counted() as counted:
            batch_metrics(samples[:count])
        calls.append(counted.calls)
    assert calls[1] - calls[0] <= 16 * CALLS["metrics"]


async def test_a_finished_sample_is_few_objects(renderer: Renderer, tmp_path: Path) -> None:
    """At most seven objects tracked by the garbage collector, with messages, completions and versions."""
    played = await play(renderer, tmp_path)
    for _ in range(DEEPEST):  # each stops tracking one more level of nested tuples and dicts of plain values
        gc.collect()
    one, other = (next(s for s in played.samples if s.group_index == group) for group in (0, 1))
    assert len(one.read_record("messages")) == len(other.read_record("messages")) == 2 * TURNS
    own = reached(one).keys() - reached(other).keys()
    tracked = [
        type(objects).__name__ for number, objects in reached(one).items() if number in own and gc.is_tracked(objects)
    ]
    assert 0 < len(tracked) <= 7, tracked


def reached(start: object) -> dict[int, object]:
    """Objects that are reachable from ``start``, by ``id``; types, functions and modules excluded."""
    objects: dict[int, object] = {}
    left = [start]
    while left:
        next_one = left.pop()
        if id(next_one) not in objects and not isinstance(next_one, type | FunctionType | ModuleType):
            objects[id(next_one)] = next_one
            left += gc.get_referents(next_one)
    return objects


def test_the_page_has_every_benchmark() -> None:
    """``docs/performance.md`` has a line for each name of ``scripts/bench``."""
    from scripts.benches.suite import BENCHES

    text = (Path(__file__).parents[1] / "docs" / "performance.md").read_text()
    rows: Sequence[str] = [line for line in text.splitlines() if line.startswith("| ")]
    documented = {row.split("|")[1].strip().partition(" ")[0] for row in rows}
    wanted = {"sealed" if name == "memory" else name for name in BENCHES}
    assert wanted <= documented


class Talks:
    """A user who asks again until the fifth reply."""

    tools = ()
    asked = 1

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        self.asked += 1
        return StepResult(done=True) if self.asked > 5 else StepResult(messages=[Message("user", f"And {self.asked}?")])

    async def close(self) -> None:
        return None


THOUGHTLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that leaves all thoughts out of the history."""


@pytest.mark.parametrize(("history", "sequences"), [("append", 1), ("fork", 5), ("error", 1)])
async def test_what_a_history_policy_trains(history: Any, sequences: int) -> None:
    """``append`` is one long sequence, ``fork`` a short one for each turn; both train each token; ``error`` stops."""
    renderer = Renderer(load_tokenizer(DEMO_MODEL), chat_template=THOUGHTLESS)
    reply = renderer.encode("<think>\n" + "one " * 20 + "\n</think>\n\nYes.<|im_end|>").tolist()
    samples = await agent_rollout_to_samples(
        "One?",
        environment_cls=Talks,
        endpoint=Endpoint(),
        tokenizer=renderer,
        policy=ScriptedPolicy(lambda tokens: reply),
        history=history,
    )
    assert len(samples) == sequences
    trained = sum(int(sample.mask_column.sum()) for sample in samples)
    longest = max(len(sample.token_column) for sample in samples)
    if history == "error":
        assert samples[0].failure is not None
        assert trained == len(reply)
    else:
        assert trained == 5 * len(reply)
        assert (longest < 3 * len(reply)) == (history == "fork")


HISTORIES: dict[str, tuple[Wire, Any]] = {
    "chat": (chat, lambda answer: [answer["choices"][0]["message"]]),
    "responses": (responses, lambda answer: answer["output"]),
    "messages": (messages, lambda answer: [{"role": "assistant", "content": answer["content"]}]),
}
"""Each wire format, and what a program adds to its history of an answer."""
TOOLS = {
    "chat": {"type": "function", "function": {"name": "look", "description": "Looks."}},
    "responses": {"type": "function", "name": "look", "description": "Looks."},
    "messages": {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("name", HISTORIES)
async def test_a_late_call_of_a_program_does_what_an_early_one_does(name: str) -> None:
    """The number of function calls does not grow with the history: no entry is read, keyed or copied again."""
    wire, added = HISTORIES[name]
    reply, entries = spoken(Message("assistant", "I look.", reasoning="Hm.")), Entries()
    history: list[Any] = []
    calls: list[int] = []

    def count(frame: object, event: str, argument: object) -> None:
        calls[-1] += event in ("call", "c_call")

    async with session_of(ScriptedPolicy(lambda tokens: reply)) as session:

        async def turn(body: bytes) -> Sequence[CallReply]:
            request = wire.read(decoded_body(body, wire.HISTORY, wire.FIELDS), session.reply, entries)
            replies = await session.call(request, lineage={})
            session.delivered(replies)
            history.extend(added(wire.answer(request, replies)))
            return replies

        for number in range(44):
            history.append({"role": "user", "content": f"Look {number}!"})
            body = json.dumps({"model": "any", "tools": [TOOLS[name]], wire.HISTORY: history}).encode()
            calls.append(0)
            sys.setprofile(count)
            try:
                await turn(body)
            finally:
                sys.setprofile(None)
    assert len(session.tree.roots) == 1
    early, late = calls[11], calls[43]  # neither is a turn whose bridge is compared with the whole rendering
    assert late < 1.02 * early, calls
