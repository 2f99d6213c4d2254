"""Failing environments and judges in a run with sound prompts: the failures and the accounting of the run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from rollouts.dtypes import Endpoint, Prompt
from rollouts.dtypes.messages import ENVIRONMENT
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.environments.mcp import McpEnvironment, McpServer
from rollouts.environments.mixed import MixedEnvironment
from rollouts.environments.ors import ORSEnvironment, ORSServer
from rollouts.errors import Failure
from rollouts.integrations.ors_server.app import environment_server
from rollouts.renderer import load_tokenizer
from rollouts.rewards import Judge, LLMJudge
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.metrics import Accounting
from tests import ors_recipe

__all__ = ["BAD", "Bad", "Played", "play_with_sound_prompts"]

TOOLS = Path(__file__).parent / "environments" / "mcp" / "mcp_tools.py"
CLOSED_PORT = "http://127.0.0.1:9"


@attrs.frozen
class Bad:
    """One fault of an environment or a judge."""

    what: str
    kind: str
    """The failure's class."""
    cause: str
    message: str
    """The start of the message; ``…`` matches anything."""
    world: Callable[[Path], contextlib.AbstractAsyncContextManager[dict[str, Any]]]
    """Yields fields of the bad prompt: ``environment_cls``, ``metadata``, the model's ``call``, ``reward``."""
    needs: str = ""
    """The package that it needs, or ``""``."""


@attrs.frozen
class Played:
    """The result of a run."""

    failures: list[Failure]
    kept: list[Sample]
    accounting: Accounting


async def play_with_sound_prompts(bad: Bad, folder: Path) -> Played:
    """Run one bad prompt and two sound ones; a batch has two groups of one rollout."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    failures: list[Failure] = []
    async with bad.world(folder) as world:
        call, reward_fn = world.get("call"), world.get("reward")

        def reply(ids: list[int], sampling: dict[str, Any]) -> list[int]:
            text = f'<tool_call>\n{{"name": "{call}", "arguments": {{}}}}\n</tool_call>'
            has_tool = f"{call}()" in tokenizer.decode(ids)  # the form of a tool in the demo model's template
            answer = text if has_tool else "The answer is 3."
            return list(tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False))

        async def scored(sample: Sample) -> float:
            if reward_fn is not None and sample.metadata[ENVIRONMENT] == "bad":
                return float(await reward_fn(sample))
            return 1.0

        kinds = {"good": CalculatorEnvironment, "bad": world.get("environment_cls", CalculatorEnvironment)}
        names = ("bad", "good", "good")
        prompts = [
            Prompt(f"What is 1 + 2? ({n})", metadata={ENVIRONMENT: name, **world.get("metadata", {})})
            for n, name in enumerate(names)
        ]
        async with StubServer(reply=reply) as server:
            config = RolloutConfig(
                batch_size=2,
                n_samples_per_prompt=1,  # a second rollout would find the server dead already
                over_sampling_factor=1.0,  # so that the third prompt begins after the bad one failed
                max_attempts=1,
                generate_fn=partial(
                    generate_rollout_batch,
                    environment_cls=partial(MixedEnvironment, kinds),
                    endpoint=Endpoint(base_url=server.url),
                    tokenizer=tokenizer,
                    max_turns=3,
                ),
                reward_fn=scored,
            )

            def seen(group: Any) -> None:
                failures.extend(sample.failure for sample in group.samples if sample.failure is not None)

            async with AsyncRolloutManager(config, DataBuffer(prompts, epochs=1), on_group=seen) as manager:
                kept = await manager.generate_batch()
                return Played(failures, kept, manager.accounting)


# -- worlds -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(metadata: dict[str, Any], call: str = "explode", **options: Any) -> AsyncIterator[dict[str, Any]]:
    """The environment of an ORS server on loopback."""
    async with environment_server(ors_recipe.recipe(Endpoint())) as url:
        server = ORSServer(url, **options)
        yield {"environment_cls": partial(ORSEnvironment, server), "metadata": metadata, "call": call}
        await server.aclose()


FIRST = {"task_spec": {"split": "train", "index": 0}}


@contextlib.asynccontextmanager
async def no_server() -> AsyncIterator[dict[str, Any]]:
    server = ORSServer(CLOSED_PORT, environment="sums")
    yield {"environment_cls": partial(ORSEnvironment, server), "metadata": FIRST}
    await server.aclose()


@contextlib.asynccontextmanager
async def no_schema() -> AsyncIterator[dict[str, Any]]:
    """A server whose tool has an invalid schema."""
    tool = {"name": "fly", "description": "", "input_schema": {"type": "object", "properties": ["where"]}}
    async with JsonServer(lambda request: {"tools": [tool]} if request.path.endswith("/task_tools") else {}) as http:
        server = ORSServer(http.url, environment="toy")
        yield {"environment_cls": partial(ORSEnvironment, server), "metadata": FIRST}
        await server.aclose()


@contextlib.asynccontextmanager
async def dying(folder: Path) -> AsyncIterator[dict[str, Any]]:
    """An MCP server that dies during a request and cannot be started again."""
    env = {"MCP_TOOLS_DEAD": str(folder / "dead")}
    server = McpServer(command=(sys.executable, str(TOOLS)), env=env, only=("end",), name="tools")
    yield {"environment_cls": partial(McpEnvironment, server), "call": "end"}


@contextlib.asynccontextmanager
async def judged(reply: Any) -> AsyncIterator[dict[str, Any]]:
    """A judge with this reply."""

    def answer(request: Asked) -> Any:
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}]}

    async with JsonServer(answer) as server:
        yield {"reward": LLMJudge(Judge("referee", server.url), "Is it true?")}


def _bad() -> Iterator[Bad]:
    start, step = "environment_start", "environment_step"
    yield Bad(
        "a task of an ORS split that there is not",
        "EnvironmentFailure",
        start,
        "MixedEnvironment.start raised ORSError: POST http://…/create: status 400: …split…",
        lambda folder: served({"split": "dev", "index": 0}),
    )
    yield Bad(
        "an ORS server that is not there",
        "EnvironmentFailure",
        start,
        f"MixedEnvironment.start raised ORSError: POST {CLOSED_PORT}/create: cannot connect: …",
        lambda folder: no_server(),
    )
    yield Bad(
        "a tool of an ORS server that raises",
        "EnvironmentFailure",
        step,
        "MixedEnvironment.step raised ORSError: tool 'explode': …boom",
        lambda folder: served(FIRST),
    )
    yield Bad(
        "a secret that there is no value for",
        "EnvironmentFailure",
        step,
        "MixedEnvironment.step raised ORSError: tool 'explode': …boom… "
        "(secrets without a value, so not sent: openai_api_key)",
        lambda folder: served(FIRST, missing_secrets=["openai_api_key"]),
    )
    yield Bad(
        "a tool whose schema is no JSON Schema",
        "EnvironmentFailure",
        start,
        "MixedEnvironment.start raised ORSError: tool 'fly': input_schema has properties ['where']; "
        "expected a JSON schema of an object",
        lambda folder: no_schema(),
    )
    yield Bad(
        "an MCP server that dies while it is asked",
        "EnvironmentFailure",
        step,
        "MixedEnvironment.step raised …MCP server 'tools' did not start: …the disk is gone",
        dying,
        needs="mcp",
    )
    yield Bad(
        "a judge that answers nonsense",
        "RewardFailure",
        "reward",
        "0 of 1 judges gave a verdict, 1 must: judge referee: got …",
        lambda folder: judged("Great answer! 10/10"),
    )


BAD = tuple(_bad())
