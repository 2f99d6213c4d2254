"""A batch waits for the rollout that ends last: the activity named is what it did since the others had ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio

from rollouts.concurrency.times import Timeline
from rollouts.dtypes import Endpoint, Message, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.environments import StepResult, ToolEnvironment, tool
from rollouts.renderer import renderer_for
from rollouts.runs.writer import RunWriter
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.views.page import open_source
from rollouts.views.page.held_up import Batches, HeldUp


def sample(*spans: tuple[str, str, float, float]) -> Sample:
    return Sample(times=Timeline(spans))


def test_the_last_rollout_and_its_longest_span_since_the_others() -> None:
    """An earlier and longer span of the same rollout is not a cause; a tool goes before the step around it."""
    batches = Batches()
    batches.add(0, 4, [sample(("generating", "s", 0.0, 5.0))])
    slow = [("generating", "s", 0.0, 4.9), ("tool", "search", 5.0, 3.0), ("environment", "World.step", 5.0, 3.0)]
    batches.add(0, 7, [sample(("generating", "s", 0.0, 1.0)), sample(*slow)])
    batches.add(None, 9, [sample(("generating", "s", 0.0, 100.0))])
    batches.add(1, 8, [sample(("reward", "judge", 3.0, 1.0))])
    assert batches.held_up() == [HeldUp(0, 7, 1, "tool", "search", 3.0)]


def test_the_branches_of_a_rollout_do_not_wait_for_each_other() -> None:
    """The other rollout of the batch ended before; the earlier branch of the last rollout is not another rollout."""
    branches = [sample(("generating", "s", 0.0, 6.0)), sample(("generating", "s", 6.0, 0.5), ("tool", "add", 6.5, 1.0))]
    for branch in branches:
        branch.rollout_id = 8
    batches = Batches()
    batches.add(0, 4, [sample(("generating", "s", 0.0, 2.0)), *branches])
    assert batches.held_up() == [HeldUp(0, 4, 2, "generating", "s", 5.5)]


LONG = 0.4
"""Seconds; the others take a few milliseconds."""


class Slow(ToolEnvironment):
    """A tool that takes long for one of the prompts."""

    async def start(self, prompt: Prompt) -> list[Message]:
        self.number = prompt.index
        return [Message("user", f"go {prompt.index}")]

    @tool
    async def look(self) -> str:
        """Look."""
        await anyio.sleep(LONG if self.number == 3 else 0)
        return "seen"

    async def answer(self, reply: Message) -> StepResult:
        return StepResult(done=True, reward=1.0)


async def judge(judged: Sample) -> float:
    await anyio.sleep(LONG if judged.index == 5 else 0)
    return float(judged.index or 0)


async def test_a_slow_server_a_slow_tool_and_a_slow_reward_are_found(tmp_path: Path) -> None:
    """Three batches of a stored run, each held up by another cause, which the record names with its seconds."""
    renderer = renderer_for(str(DEMO_MODEL))
    call = renderer.encode('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    end = renderer.stop_token_ids[0]

    def reply(ids: list[int], _: object) -> list[int]:
        return [end] if "seen" in renderer.decode(ids) else [*map(int, call), end]

    async def latency(request: Request) -> None:
        text = renderer.decode(request.input_ids)
        await anyio.sleep(LONG if "go 1" in text and "seen" not in text else 0)

    async with StubServer(reply, latency=latency) as server:
        generate = partial(
            generate_rollout_batch,
            environment_cls=Slow,
            endpoint=Endpoint(base_url=server.url),
            tokenizer=renderer,
        )
        sizes = {"batch_size": 2, "n_samples_per_prompt": 1, "over_sampling_factor": 1.0}
        config = RolloutConfig(generate_fn=generate, reward_fn=judge, **sizes)
        writer = RunWriter(tmp_path / "run")
        async with AsyncRolloutManager(config, DataBuffer([str(number) for number in range(8)])) as manager:
            for _ in range(3):
                writer.write_batch(await manager.generate_batch(), manager.metrics, manager.accounting)
    batches = Batches()
    for entry in open_source(tmp_path / "run", verify=False).groups():
        batches.add(entry.batch, entry.number, entry.samples)
    found = [(entry.batch, entry.group, entry.activity, entry.name) for entry in batches.held_up()]
    assert found == [
        (0, 1, "generating", server.url),
        (1, 3, "tool", "look"),
        (2, 5, "reward", "judge"),
    ]
    assert all(LONG / 2 < entry.seconds < 10 for entry in batches.held_up())
