"""Agents of Harbor on scripted replies: each plays a Trial in a box, and its sampled tokens are the trained ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.dtypes import Endpoint, Message, StopReason, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.tasks import HarborTask, load_task, prompts_of
from rollouts.harbor.trial import HarborAgent, api_of
from rollouts.programs.gateway.session import SessionLimits
from rollouts.runs.verify import check_sample
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import Sample, Status, function_rollout_to_samples
from tests.harbor.folders import write_task
from tests.harbor.roots import base_root
from tests.programs.gateway.programs import demo_renderer, demo_tokenizer, spoken

pytestmark = [
    pytest.mark.harbor,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
pytest.importorskip("harbor")

AGENTS_ROOT = os.environ.get("ROLLOUTS_HARBOR_ROOT", "")
"""The root of an image with the agents, tmux and git."""
TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\ndocker_image = "base"\n'
WRITE = "echo 42 > /app/answer.txt"
DONE = "It is done."


@attrs.frozen
class Guest:
    """How an agent of Harbor is made to do the task."""

    replies: tuple[Message | str, ...]
    """Its model's, one for each turn; the last is repeated."""
    mark: str = "<tool_response>"
    """Counts its turns in a prompt."""


def calls(name: str, **arguments: Any) -> tuple[Message, str]:
    return Message("assistant", "I write.", [ToolCall(name, arguments)]), DONE


def terminus(complete: bool) -> str:
    commands = [] if complete else [{"keystrokes": f"{WRITE}\n", "duration": 0.5}]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete})


GUESTS = {
    "terminus-2": Guest((terminus(False), terminus(True), terminus(True)), "<|im_end|>\n<|im_start|>assistant"),
    "claude-code": Guest(calls("Bash", command=WRITE, description="Writes")),
    "codex": Guest(calls("exec_command", cmd=WRITE)),
    "opencode": Guest(calls("bash", command=WRITE, description="Writes")),
    "qwen-coder": Guest(calls("run_shell_command", command=WRITE, is_background=False)),
    "pi": Guest(calls("bash", command=WRITE)),
    "mini-swe-agent": Guest(
        (
            Message("assistant", "I write.", [ToolCall("bash", {"command": WRITE})]),
            Message("assistant", DONE, [ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})]),
        )
    ),
    "aider": Guest(("answer.txt\n```\n42\n```\n",), ""),
}


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    return load_task(
        write_task(tmp_path / "task", {"environment/Dockerfile": None, "environment/note.txt": "x"}, toml=TOML)
    )


def scripted(answer: Callable[[int], Message | str], mark: str = "<tool_response>") -> ScriptedPolicy:
    """A policy whose reply depends on how often the prompt has a mark."""
    tokenizer = demo_tokenizer()

    def reply(tokens: Any) -> list[int]:
        text = tokenizer.decode(list(tokens))
        return spoken(answer(text.count(mark) if mark else 0))

    return ScriptedPolicy(reply, max_context=400_000)


async def play(name: str, task: HarborTask, root: str, **given: Any) -> tuple[list[Sample], ScriptedPolicy]:
    guest = GUESTS[name]
    policy = given.pop("policy", None)
    if policy is None:
        policy = scripted(lambda turn: guest.replies[min(turn, len(guest.replies) - 1)], guest.mark)
    agent = HarborAgent(name, {task.name: task}, BoxOptions(root=root), {task.name: "carry"})
    samples = await function_rollout_to_samples(
        prompts_of([task])[0],
        function=agent,
        endpoint=Endpoint(model=str(DEMO_MODEL)),
        tokenizer=demo_renderer(),
        policy=policy,
        **given,
    )
    return samples, policy


@pytest.mark.parametrize("name", list(GUESTS))
async def test_an_agent_of_harbor_plays_a_task_with_exact_tokens(name: str, task: HarborTask) -> None:
    """Reward 1 by the tests; every sampled token is trained once or counted; Harbor's own count is ours."""
    if not AGENTS_ROOT:
        pytest.skip("ROLLOUTS_HARBOR_ROOT names no image with the agents")
    samples, policy = await play(name, task, AGENTS_ROOT)
    last = samples[-1]
    assert last.status is not Status.FAILED, last.failure
    assert last.reward == 1.0, last.metadata
    assert last.metadata["verdict"] == {"rewards": {"reward": 1.0}, "rung": "carry"}
    assert [found for sample in samples for found in check_sample(sample)] == []
    sampled = (
        sum(len(completion.tokens) for completion in policy.completions) if hasattr(policy, "completions") else None
    )
    trained = sum(sample.sampled_tokens for sample in samples)
    counted = last.metrics["sampled_tokens"]
    assert trained <= counted
    print(name, "trained", trained, "sampled", counted, sampled, "harbor", last.metadata["trial"])


async def test_a_limit_of_the_session_ends_the_agent_and_not_the_trial(task: HarborTask) -> None:
    """The task is graded, and no box is left."""
    if not AGENTS_ROOT:
        pytest.skip("ROLLOUTS_HARBOR_ROOT names no image with the agents")
    policy = scripted(lambda turn: terminus(False))
    samples, _ = await play("terminus-2", task, AGENTS_ROOT, policy=policy, limits=SessionLimits(max_calls=2))
    last = samples[-1]
    assert last.status is Status.TRUNCATED
    assert last.reward == 1.0
    assert last.metrics["calls"] == 2
    assert last.stop_reason is StopReason.MAX_TURNS or last.stop_reason is not StopReason.FAILED


async def test_an_agent_without_a_model_is_graded_and_has_nothing_to_train(task: HarborTask) -> None:
    """A Trial of the no-op agent is a rollout without a reply."""
    agent = HarborAgent("nop", {task.name: task}, BoxOptions(root=base_root()), {task.name: "kill"})
    [sample] = await function_rollout_to_samples(
        prompts_of([task])[0],
        function=agent,
        endpoint=Endpoint(model=str(DEMO_MODEL)),
        tokenizer=demo_renderer(),
        policy=scripted(lambda turn: DONE),
    )
    assert sample.status is Status.FAILED
    assert sample.failure is not None
    assert sample.failure.kind == "NoReply"
    assert sample.metadata["verdict"]["rewards"] == {"reward": 0.0}


def test_an_agent_that_speaks_googles_api_is_refused() -> None:
    """The gateway has no such API; the message names what it has."""
    from rollouts.errors import ConfigError

    for name in ("gemini-cli", "antigravity-cli", "no-such-agent"):
        with pytest.raises(ConfigError, match="agent: got"):
            api_of(name)
