"""Tasksets of verifiers 0.4, played by our agent's environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rollouts.dtypes import Message, Prompt
from rollouts.errors import ConfigError
from rollouts.testing.playing import calling, play

vf: Any = pytest.importorskip("verifiers.v1")
from rollouts.environments.adapters.verifiers import tasks_of  # noqa: E402 - skipped without verifiers

pytestmark = pytest.mark.extra


class Answer(vf.TaskData):  # type: ignore[misc]
    """A task with its answer."""

    answer: str


class Sums(vf.Toolset):  # type: ignore[misc]
    """One tool."""

    TOOL_PREFIX = "sums"

    async def setup_task(self, task: Any) -> None:
        self.unit = task.answer

    @vf.tool  # type: ignore[misc]
    def add(self, a: int, b: int) -> str:
        """Add two integers."""
        if a < 0:
            raise ValueError("no negative numbers")
        return f"{a + b} ({self.unit})"


class Problem(vf.Task[Answer]):  # type: ignore[misc, type-arg]
    """Two rewards and a metric of the trace."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Sums(vf.ToolsetConfig())]

    async def setup(self, trace: Any, runtime: Any) -> None:
        trace.info["setup"] = (await runtime.run(["echo", "ready"], {})).stdout.strip()

    @vf.reward(weight=1.0)  # type: ignore[misc]
    async def right(self, task: Any, trace: Any) -> float:
        return float(task.answer in trace.last_reply)

    @vf.reward(weight=0.5)  # type: ignore[misc]
    async def ready(self, trace: Any) -> float:
        return float(trace.info["setup"] == "ready")

    @vf.metric  # type: ignore[misc]
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)

    @vf.metric  # type: ignore[misc]
    async def tools_used(self, trace: Any) -> float:
        return float(sum(len(message.tool_calls or []) for message in trace.assistant_messages))


class Problems(vf.Taskset[Problem, vf.TasksetConfig]):  # type: ignore[misc, type-arg]
    """Two tasks."""

    def load(self) -> Iterable[Problem]:
        for answer in ("42", "7"):
            yield Problem(Answer(prompt=f"What is {answer}?", system_prompt="Answer.", answer=answer), self.config.task)


def problems() -> Any:
    return Problems(vf.TasksetConfig())


def test_tasks_become_prompts() -> None:
    """System prompt and prompt of each task, in the order of the taskset or of a view of it."""
    prompts, _ = tasks_of(problems())
    assert [prompt.messages for prompt in prompts] == [
        (Message("system", "Answer."), Message("user", "What is 42?")),
        (Message("system", "Answer."), Message("user", "What is 7?")),
    ]
    assert len(tasks_of(problems().take(1))[0]) == 1


async def test_an_episode_has_their_tools_their_rewards_and_their_metrics(compared: Callable[..., None]) -> None:
    """Setup on a runtime, tools with their schemas, weighted rewards over a trace of the conversation."""
    prompts, environment = tasks_of(problems())
    played = environment()
    replies = [calling("sums_add", a=40, b=2), calling("sums_add", a=-1, b=2), "It is 42."]
    result = await play(played, prompts[0], replies)
    (tool,) = played.tools
    assert (tool.name, tool.description) == ("sums_add", "Add two integers.")
    assert {name: one["type"] for name, one in tool.parameters["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }
    said = [message.content for message in result.messages if message.role == "tool"]
    assert said[0] == "42 (42)"
    assert "no negative numbers" in said[1]
    assert result.rewards == [1.5]
    assert result.steps[-1].metrics == {"turns": 3, "tools_used": 2, "reward/right": 1, "reward/ready": 0.5}
    assert [step.metrics.get("tool_errors") for step in result.steps] == [0, 1, None]
    compared("prime-rl, verifiers 0.4.0", "c", "a task as our environment: tools, rewards, metrics", 0.0)


async def test_each_episode_plays_the_task_of_its_prompt() -> None:
    """A wrong answer has the reward of the other function only; a prompt of another data set is refused."""
    prompts, environment = tasks_of(problems())
    assert (await play(environment(), prompts[1], ["It is 42."])).rewards == [0.5]
    with pytest.raises(ConfigError, match=r"metadata\['verifiers_index'\]: got None"):
        await play(environment(), Prompt("Hi"), [])


class Contained(Problem):
    """In a container."""

    NEEDS_CONTAINER = True


class Stopping(Problem):
    """With a stop condition."""

    @vf.stop  # type: ignore[misc]
    async def enough(self, trace: Any) -> bool:
        return False


class Shared(Problems):
    """With a server for all tasks."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Sums(vf.ToolsetConfig())]


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([Contained(Answer(prompt="?", answer="1"))], "Contained 0.NEEDS_CONTAINER: got True"),
        ([Problem(Answer(prompt="?", answer="1", image="ubuntu"))], "NEEDS_CONTAINER"),
        ([Problem(Answer(answer="1"))], "Problem 0.prompt: got None"),
        ([Stopping(Answer(prompt="?", answer="1"))], "Stopping 0: got .*enough"),
        (Shared(vf.TasksetConfig()), "taskset.toolsets: got 'Shared'"),
    ],
    ids=["container", "image", "user", "stop", "shared tools"],
)
def test_what_needs_their_rollout_is_refused_before_the_first_episode(tasks: Any, words: str) -> None:
    """By name: it would be left out in silence otherwise."""
    with pytest.raises(ConfigError, match=words):
        tasks_of(tasks)


class Counted(vf.State):  # type: ignore[misc]
    """A state of a tool."""

    count: int = 0


class Counters(vf.Toolset[vf.ToolsetConfig, Counted]):  # type: ignore[misc, type-arg]
    """Tools whose state verifiers synchronises."""


class Stateful(Problem):
    """With such a tool."""

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Counters(vf.ToolsetConfig())]


async def test_tools_with_a_state_of_their_own_are_refused() -> None:
    """They would each see an empty state."""
    prompts, environment = tasks_of([Stateful(Answer(prompt="?", answer="1"))])
    with pytest.raises(ConfigError, match=r"task.toolsets: got 'Counters'"):
        await play(environment(), prompts[0], [])
