"""Agents of Harbor on scripted replies: each plays a Trial in a box, and its sampled tokens are the trained ones."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.dtypes import Endpoint, Message, StopReason, ToolCall
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.tasks import HarborTask, load_task, prompts_of
from rollouts.harbor.trial import HarborAgent, api_of, secrets_of
from rollouts.programs import ModelServer
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

from rollouts.harbor.environment import RolloutsEnvironment  # noqa: E402 - it imports Harbor

AGENTS_ROOT = os.environ.get("ROLLOUTS_HARBOR_ROOT", "")
"""The root of an image with the agents, tmux and git. pi before 0.77 sends the name in Harbor's ``$NAME`` as key."""
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
    "terminus-2": Guest((terminus(False), terminus(True), terminus(True)), '"analysis": "a"'),
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


async def play(name: str, task: HarborTask, root: str, **given: Any) -> list[Sample]:
    guest = GUESTS[name]
    policy = given.pop("policy", None)
    if policy is None:
        policy = scripted(lambda turn: guest.replies[min(turn, len(guest.replies) - 1)], guest.mark)
    agent = HarborAgent(name, {task.name: task}, BoxOptions(root=root), {task.name: "carry"})
    return await function_rollout_to_samples(
        prompts_of([task])[0],
        function=agent,
        endpoint=Endpoint(model=str(DEMO_MODEL)),
        tokenizer=demo_renderer(),
        policy=policy,
        **given,
    )


@pytest.mark.parametrize("name", list(GUESTS))
async def test_an_agent_of_harbor_plays_a_task_with_exact_tokens(name: str, task: HarborTask) -> None:
    """Reward 1 by the tests; every sampled token is trained once or counted; Harbor's own count is ours."""
    if not AGENTS_ROOT:
        pytest.skip("ROLLOUTS_HARBOR_ROOT names no image with the agents")
    samples = await play(name, task, AGENTS_ROOT)
    last = samples[-1]
    assert last.status is not Status.FAILED, last.failure
    assert last.reward == 1.0, last.metadata
    assert last.metadata["verdict"] == {"rewards": {"reward": 1.0}, "rung": "carry"}
    assert [found for sample in samples for found in check_sample(sample)] == []
    trained = sum(sample.sampled_tokens for sample in samples)
    untrained = sum(value for key, value in last.metrics.items() if key.startswith("untrained_tokens/"))
    assert trained + untrained == last.metrics["sampled_tokens"]
    if (own := last.metadata["trial"]["output_tokens"]) is not None:  # aider does not report it
        assert own == trained


async def test_a_limit_of_the_session_ends_the_agent_and_not_the_trial(task: HarborTask) -> None:
    """The task is graded, and no box is left."""
    if not AGENTS_ROOT:
        pytest.skip("ROLLOUTS_HARBOR_ROOT names no image with the agents")
    policy = scripted(lambda turn: terminus(False))
    samples = await play("terminus-2", task, AGENTS_ROOT, policy=policy, limits=SessionLimits(max_calls=2))
    last = samples[-1]
    assert last.status is Status.TRUNCATED
    assert last.reward == 1.0
    assert last.metrics["calls"] == 2
    assert last.stop_reason is StopReason.MAX_TURNS


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


@pytest.mark.parametrize("name", ["gemini-cli", "antigravity-cli", "devin", "no-such-agent"])
def test_an_agent_that_cannot_speak_with_the_gateway_is_refused(name: str) -> None:
    """By name, before a task is played."""
    with pytest.raises(ConfigError, match="agent: got"):
        api_of(name)


def test_the_page_has_every_agent_with_its_api() -> None:
    """``docs/harbor.md`` names each agent of Harbor once, in the row of the API that it is given, or as refused."""
    from harbor.models.agent.name import AgentName

    titles = {
        "openai_chat_completions": "chat completions",
        "openai_responses": "Responses",
        "anthropic_messages": "Messages",
        None: "no model",
    }
    page = (Path(__file__).resolve().parents[2] / "docs" / "harbor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", page.split("<!-- agents -->")[1].split("<!-- end -->")[0], re.M)
    found = {name: title for title, names in rows for name in re.findall("`([^`]+)`", names)}
    assert set(found) == {name.value for name in AgentName}
    for name, title in found.items():
        if not title.startswith("refused"):
            assert titles[api_of(name)] == title, name
            continue
        with pytest.raises(ConfigError):
            api_of(name)


async def test_a_rollout_that_is_cancelled_leaves_no_box(task: HarborTask) -> None:
    """The Trial is ended by closing its box and waited for: no process of this one is left."""
    if not AGENTS_ROOT:
        pytest.skip("ROLLOUTS_HARBOR_ROOT names no image with the agents")
    before = children()
    asked = anyio.Event()

    def reply(turn: int) -> str:
        asked.set()
        return terminus(False)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(functools.partial(play, "terminus-2", task, AGENTS_ROOT, policy=scripted(reply)))
        await asked.wait()
        assert len(children()) > len(before)
        tasks.cancel_scope.cancel()
    assert children() == before


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_a_trial_that_is_cancelled_while_it_is_graded_leaves_no_box(mode: str, tmp_path: Path) -> None:
    """Also the box of a separate verifier is closed, and its tests are not waited for."""
    test = "touch /logs/artifacts/begun; sleep 300\n"
    toml = f'{TOML}[verifier]\nenvironment_mode = "{mode}"\n'
    files = {"environment/Dockerfile": None, "environment/note.txt": "x", "tests/test.sh": test}
    task = load_task(write_task(tmp_path / "task", files, toml=toml))
    agent = HarborAgent("nop", {task.name: task}, BoxOptions(root=base_root()))
    server = ModelServer("http://127.0.0.1:9", "k" * 32, "m", 1000, "/")
    before = children()
    with anyio.move_on_after(8), anyio.fail_after(100):
        await agent(server, prompts_of([task])[0], anyio.Event(), lambda: None)
    assert children() == before


async def test_a_secret_of_this_process_enters_no_box(task: HarborTask) -> None:
    """A command that contains the value of a variable named like a secret is refused, with the variable's name."""
    environment: Any = RolloutsEnvironment.__new__(RolloutsEnvironment)
    environment.secrets = secrets_of({"SOME_API_KEY": "sk-123456789", "PATH": "/usr/bin:/bin", "TOKEN": "short"})
    environment._merge_env = lambda env: env
    for command, env in (("echo sk-123456789", {}), ("true", {"A": "x sk-123456789"})):
        with pytest.raises(ConfigError, match="SOME_API_KEY"):
            await environment.exec(command, env=env)


def children() -> set[str]:
    """The processes below this one."""
    found, new = set[str](), {str(os.getpid())}
    while new:
        below = {
            pid
            for parent in new
            for path in Path(f"/proc/{parent}/task").glob("*/children")
            for pid in path.read_text().split()
        }
        new = below - found
        found |= below
    return found
