"""A real Strands agent plays our episodes: exact tokens, limits before useless tools, clear errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts.agent import run_agent
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, preflight
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.runs.run import run
from rollouts.runs.verify import check_sample, verify_run
from rollouts.runs.writer import RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import DataBuffer, RolloutConfig, generate_rollout_batch
from rollouts.trajectory import Trajectory
from tests.worlds import Speller

strands = pytest.importorskip("strands")

from rollouts.integrations.strands import StrandsEnvironment  # noqa: E402 - after the check that it can be imported

pytestmark = pytest.mark.extra

SYSTEM = "You are a careful assistant."
RAN: list[str] = []


@strands.tool
def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    RAN.append(f"{a}+{b}")
    return str(a + b)


@strands.tool
def fail() -> str:
    """Raise."""
    raise RuntimeError("the disk is gone")


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    RAN.clear()


def make_agent(model: Any, **options: Any) -> Any:
    return strands.Agent(model=model, tools=[add, fail], system_prompt=SYSTEM, callback_handler=None, **options)


def call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO_MODEL)


@pytest.fixture
def played(tokenizer: Any) -> Callable[..., Any]:
    """Returns a function that plays an episode in which the model's replies are these texts."""

    async def play(*texts: str, prompt: Any = "What is 5 + 3?", agent: Any = make_agent, **limits: Any) -> Trajectory:
        replies = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in texts]
        return await run_agent(
            Prompt(prompt),
            partial(StrandsEnvironment, agent),
            ScriptedPolicy(replies),
            renderer_for(tokenizer),
            sampling=SamplingParams(),
            limits=Limits(**limits),
        )

    return play


# -- what the model is shown ------------------------------------------------------------------------------------------


async def test_an_agent_plays_an_episode(played: Any) -> None:
    """Its system prompt, its tools, their results in the order of the calls; it ends when the agent does."""
    trajectory = await played(call(5, 3) + call(1, 1), "The answer is 8.")
    assert trajectory.stop_reason is StopReason.TASK_COMPLETED
    assert [(message.role, message.content) for message in trajectory.messages if message.role != "assistant"] == [
        ("system", SYSTEM),
        ("user", "What is 5 + 3?"),
        ("tool", "8"),
        ("tool", "2"),
    ]
    assert len(trajectory.completions) == 2


async def test_a_conversation_history_is_continued(played: Any) -> None:
    """A prompt of several messages: its system message replaces the agent's, the rest is the agent's history."""
    prompt = [
        Message("system", "Be brief."),
        Message("user", "Hello."),
        Message("assistant", "Hi."),
        Message("user", "And?"),
    ]
    trajectory = await played("Done.", prompt=prompt)
    assert [message.content for message in trajectory.messages] == ["Be brief.", "Hello.", "Hi.", "And?", "Done."]


async def test_errors_of_calls_go_to_the_model(played: Any) -> None:
    """Unreadable calls, unknown tools and tools that raise: each has its error message, in the order of the calls."""
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
    unknown = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'
    raising = '<tool_call>\n{"name": "fail", "arguments": {}}\n</tool_call>'
    trajectory = await played(broken + call(2, 2) + unknown, unknown, raising, "Done.")
    results = [message.content for message in trajectory.messages if message.role == "tool"]
    assert results[1] == "4"
    assert [text.startswith("Error") for text in results] == [True, False, True, True, True]
    assert "fly" in results[2]
    assert "the disk is gone" in results[4]
    assert (trajectory.metrics["malformed_tool_calls"], trajectory.metrics["unknown_tool_calls"]) == (1, 2)


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason", "ran"),
    [
        ({"max_turns": 2}, StopReason.MAX_TURNS, ["5+3"]),
        ({"max_tool_calls": 1}, StopReason.MAX_TOOL_CALLS, ["5+3"]),
        ({"max_tool_calls": 0}, StopReason.MAX_TOOL_CALLS, []),
        ({"max_turns": 1}, StopReason.MAX_TURNS, []),
        ({"max_sampled_tokens": 20}, StopReason.MAX_TOKENS, []),
    ],
)
async def test_limits_stop_before_a_tool_runs_for_nothing(
    played: Any, limits: dict[str, int], reason: StopReason, ran: list[str]
) -> None:
    """A tool does not run if the model would never read its result."""
    trajectory = await played(call(5, 3), call(1, 1), "Done.", **limits)
    assert (trajectory.stop_reason, RAN) == (reason, ran)


async def test_a_deadline_ends_an_agent_whose_tool_hangs(played: Any) -> None:
    """The step fails, and the tool is cancelled with it."""
    ended = []

    @strands.tool
    async def hang() -> str:
        """Hang."""
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)
        return ""

    def agent(model: Any) -> Any:
        return strands.Agent(model=model, tools=[hang], callback_handler=None)

    text = '<tool_call>\n{"name": "hang", "arguments": {}}\n</tool_call>'
    trajectory = await played(text, agent=agent, step_seconds=0.5)
    assert trajectory.failure.cause == "deadline"
    assert ended == [True]


# -- what cannot be trained exactly -----------------------------------------------------------------------------------


async def test_an_agent_that_trims_its_conversation_fails_by_name(played: Any) -> None:
    """The model would need other tokens than it has seen."""
    from strands.agent.conversation_manager import SlidingWindowConversationManager

    agent = partial(make_agent, conversation_manager=SlidingWindowConversationManager(window_size=2, per_turn=True))
    trajectory = await played(call(1, 1), call(2, 2), call(3, 3), "Done.", agent=agent)
    assert trajectory.stop_reason is StopReason.FAILED
    assert "NullConversationManager" in trajectory.failure.message


async def test_an_agent_that_changes_its_tools_fails_by_name(played: Any) -> None:
    """Tools are part of the prompt."""

    def agent(model: Any) -> Any:
        made = make_agent(model)

        @strands.tool
        def grow() -> str:
            """Add a tool."""
            made.tool_registry.register_tool(later)
            return "grown"

        @strands.tool
        def later() -> str:
            """Do it later."""
            return ""

        made.tool_registry.register_tool(grow)
        return made

    trajectory = await played('<tool_call>\n{"name": "grow", "arguments": {}}\n</tool_call>', "Done.", agent=agent)
    assert "changed its tools" in trajectory.failure.message


def test_a_factory_without_an_agent_is_refused() -> None:
    """So is one whose agent has another model."""
    with pytest.raises(ConfigError, match="make_agent"):
        StrandsEnvironment(lambda model: object())
    other = StrandsEnvironment(make_agent)._model
    with pytest.raises(ConfigError, match="whose model is the one given"):
        StrandsEnvironment(lambda model: make_agent(other))


# -- compared with our own agent --


class Adder(ToolEnvironment):
    """The same task, as an environment of ours."""

    system_prompt = SYSTEM

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)


def spelling_server(tokenizer: Any) -> StubServer:
    """A model that calls the adder twice and answers, in ids that no tokenizer would choose."""
    speller = Speller(tokenizer, renderer_for(tokenizer).stop_token_ids[0], seed=3, odd=1.0)

    def reply(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        speller.rng = random.Random(len(input_ids))
        turn = tokenizer.decode(input_ids).count("<tool_response>")
        return [*speller.spell(call(turn, 3) if turn < 2 else "The answer is 8."), speller.stop]

    return StubServer(reply=reply)


async def stored_run(environment_cls: Any, tokenizer: Any, folder: Path) -> list[list[int]]:
    """Write a run of two groups of two to disk; return the token ids of the server's requests."""
    async with spelling_server(tokenizer) as server:
        endpoint = Endpoint(base_url=server.url)
        generate_fn = partial(
            generate_rollout_batch, environment_cls=environment_cls, endpoint=endpoint, tokenizer=tokenizer
        )
        config = RolloutConfig(
            batch_size=2, n_samples_per_prompt=2, generate_fn=generate_fn, reward_fn=lambda sample: 1.0
        )
        recipe = Recipe(
            name="strands",
            config=config,
            data_buffer=DataBuffer([f"What is {n} + 3?" for n in range(8)]),
            endpoint=endpoint,
            tokenizer=tokenizer,
            environment_cls=environment_cls,
        )
        await preflight(recipe)
        result = await run(recipe, RunWriter(folder, recipe.describe(), format="jsonl"))
        assert (result.status, result.accounting.failed) == ("finished", 0)
        return [request.input_ids for request in server.requests]


async def test_a_strands_agent_and_our_own_are_both_exact(tokenizer: Any, tmp_path: Path) -> None:
    """The same task through the same server, with unusual token ids: both runs keep laws 1 to 5.

    Strands describes a tool in its own words in the prompt; behind the prompt both read the same.
    """
    after_the_prompt: dict[str, set[str]] = {}
    for name, environment_cls in (("ours", Adder), ("strands", partial(StrandsEnvironment, make_agent))):
        requests = await stored_run(environment_cls, tokenizer, tmp_path / name)
        report = verify_run(tmp_path / name)
        assert report.ok, report.violations
        rows = [
            json.loads(line) for line in (tmp_path / name / "batches" / "batch-000000.jsonl").read_text().splitlines()
        ]
        assert len(rows) == 4
        for row in rows:
            for sampled in row["completions"]:
                assert row["tokens"][: sampled["start"]] in requests
            assert row["tokens"] != tokenizer.encode(tokenizer.decode(row["tokens"]), add_special_tokens=False)
            first = row["completions"][0]["start"]
            after_the_prompt.setdefault(tokenizer.decode(row["tokens"][first:]), set()).add(name)
    assert list(after_the_prompt.values()) == [{"ours", "strands"}]


async def test_an_agent_plays_on_the_embedded_engine(engine_url: str, tokenizer: Any) -> None:
    """With a real model, whose replies are arbitrary: nothing fails, and every sample is valid."""
    samples = await generate_rollout_batch(
        [Prompt("What is 5 + 3?", index=index, group_index=0) for index in range(4)],
        environment_cls=partial(StrandsEnvironment, make_agent),
        endpoint=Endpoint(base_url=engine_url, sampling=SamplingParams(max_new_tokens=48)),
        tokenizer=tokenizer,
        max_turns=4,
    )
    assert [sample.failure for sample in samples] == [None] * 4
    assert [list(check_sample(sample)) for sample in samples] == [[]] * 4
    assert all(sample.loss_mask.count(1) > 0 for sample in samples)
