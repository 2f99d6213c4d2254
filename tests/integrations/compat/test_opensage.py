"""OpenSage's workflow on a toy benchmark: exact tokens, and the sandbox closes however the session ends."""

from __future__ import annotations

import contextlib
import re
import textwrap
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.errors import ConfigError
from rollouts.integrations.compat import opensage
from rollouts.integrations.compat.opensage import AGENTS, BENCHMARKS, BenchmarkInterface
from rollouts.integrations.slime.records import records
from rollouts.testing.server import StubServer

EVENTS: list[str] = []
SAMPLING = {"temperature": 1.0, "max_new_tokens": 256, "skip_special_tokens": False}


class Agent(ToolEnvironment):
    """Adds in the session's sandbox."""

    def __init__(self, sandbox: Any) -> None:
        self.sandbox = sandbox

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two integers."""
        EVENTS.append(f"ran in {self.sandbox}")
        return str(a + b)

    async def close(self) -> None:
        EVENTS.append("agent closed")


class Toy(BenchmarkInterface):
    """Its reward is asynchronous, and its sandbox a plain context manager."""

    @contextlib.contextmanager
    def sandbox(self) -> Iterator[str]:
        EVENTS.append("launched")
        try:
            yield "the box"
        finally:
            EVENTS.append("cleaned up")

    def get_prompt(self, sample: Any) -> Any:
        return f"Find it: {sample.prompt}"

    async def reward_func(self, args: Any, sample: Any) -> float:
        if sample.label == "raise":
            raise RuntimeError("no referee")
        return float(sample.label in sample.response)


class Launched(Toy):
    """Its sandbox is an asynchronous one."""

    def sandbox(self) -> Any:
        @contextlib.asynccontextmanager
        async def launch() -> AsyncIterator[str]:
            EVENTS.append("launched")
            try:
                yield "the box"
            finally:
                await anyio.lowlevel.checkpoint()
                EVENTS.append("cleaned up")

        return launch()


@pytest.fixture(autouse=True)
def _registered() -> None:
    EVENTS.clear()
    AGENTS.register("vul_agent", Agent)
    BENCHMARKS.register("secodeplt", Toy)
    BENCHMARKS.register("launched", Launched)
    BENCHMARKS.register("docker_only", "no_such_package_here:Benchmark")


def args_of(server: StubServer) -> Namespace:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return Namespace(
        hf_checkpoint=str(DEMO_MODEL), sglang_router_ip=host, sglang_router_port=int(port), rollout_batch_size=1
    )


def requested_sample(**fields: Any) -> Any:
    return records().sample(**{"index": 0, "group_index": 0, "prompt": "5 + 3?", "label": "8", **fields})


def guide(asset: Callable[[str], Path]) -> str:
    """The complete workflow of the guide, as the body of a function."""
    text = asset("../source-documents/002_0bb9d4145172ac90.txt").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "# 3." in code]
    code = code.replace("import opensage", "from rollouts.integrations.compat import opensage")
    code = code.replace("# Process result...", "results.append(result)")
    return "async def workflow(args, samples, sampling_params, results):\n" + textwrap.indent(code, "    ")


async def test_the_workflow_of_the_guide_runs(asset: Any, server: StubServer) -> None:
    """Unchanged but for the import: exact tokens, the benchmark's reward, one sandbox for the session."""
    names: dict[str, Any] = {}
    exec(compile(guide(asset), "the guide", "exec"), names)
    results: list[Any] = []
    samples = [requested_sample(index=index) for index in range(2)]
    await names["workflow"](args_of(server), samples, SAMPLING, results)
    assert results == samples
    assert [sample.reward for sample in results] == [1.0, 1.0]
    for sample in results:
        assert sample.status.value == "completed"
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    mine = [request.input_ids for request in server.requests[:3]]
    assert all(samples[0].tokens[: len(ids)] == ids for ids in mine)
    assert EVENTS[0] == "launched"
    assert EVENTS[-1] == "cleaned up"
    assert EVENTS.count("launched") == 1
    assert EVENTS.count("ran in the box") == 4
    assert EVENTS.count("agent closed") == 2


@pytest.mark.parametrize("benchmark", ["secodeplt", "launched"])
async def test_a_session_is_an_asynchronous_block_too(server: StubServer, benchmark: str) -> None:
    """For sandboxes of either kind."""
    async with opensage.create("vul_agent", benchmark).init_session() as session:
        sample = await session.slime_generate(args_of(server), requested_sample(), SAMPLING)
    assert sample.reward == 1.0
    assert (EVENTS[0], EVENTS[-1]) == ("launched", "cleaned up")


@pytest.mark.parametrize("benchmark", ["secodeplt", "launched"])
async def test_a_session_that_is_cancelled_cleans_up(benchmark: str) -> None:
    """In the middle of a generation; the agent first, then the sandbox."""
    async with StubServer(faults=["hang"]) as server:
        with anyio.move_on_after(1) as scope:
            async with opensage.create("vul_agent", benchmark).init_session() as session:
                await session.slime_generate(args_of(server), requested_sample(), SAMPLING)
    assert scope.cancelled_caught
    assert EVENTS == ["launched", "agent closed", "cleaned up"]


async def test_a_failure_is_left_out_of_the_loss_with_its_reason(server: StubServer) -> None:
    """A reward that raises, and a server that refuses; the session stays usable."""
    with opensage.create("vul_agent", "secodeplt").init_session() as session:
        lost = await session.slime_generate(args_of(server), requested_sample(label="raise"), SAMPLING)
        kept = await session.slime_generate(args_of(server), requested_sample(), SAMPLING)
    assert (lost.remove_sample, lost.reward) == (True, 0.0)
    assert "no referee" in lost.metadata["failure"]
    assert (kept.remove_sample, kept.reward) == (False, 1.0)


async def test_an_unavailable_object_is_an_error_with_its_reason() -> None:
    """An agent, a benchmark, a missing package, and a session that is not open."""
    with pytest.raises(ValueError, match=r"agent: got 'unknown'.*vul_agent"):
        opensage.create("unknown", "secodeplt")
    with pytest.raises(ValueError, match="benchmark: got 'nothing'"):
        opensage.create("vul_agent", "nothing")
    with pytest.raises(ConfigError, match=r"unavailable because ModuleNotFoundError.*no_such_package_here"):
        opensage.create("vul_agent", "docker_only")
    assert list(BENCHMARKS.unavailable()) == ["docker_only"]
    with pytest.raises(ConfigError, match="async with"):
        opensage.create("vul_agent", "launched").init_session().__enter__()
    with pytest.raises(ConfigError, match="not open"):
        await opensage.create("vul_agent", "secodeplt").init_session().slime_generate(None, requested_sample(), {})


def test_a_path_names_an_agent_and_a_benchmark_too() -> None:
    """``package.module:attribute``, without a registration."""
    client = opensage.create(f"{__name__}:Agent", f"{__name__}:Toy")
    assert type(client.benchmark).__name__ == "Toy"
