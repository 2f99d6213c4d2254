"""Agents on SDKs, and further programs, in a sandbox against the gateway with scripted replies.

Skipped unless ``--programs`` is given; ``scripts/test --programs`` installs them. Each writes a file by its own tool
and reads it twice: four calls, whose replies are one branch unless its row says otherwise.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.programs import Launch, ModelServer, aider, cline, openhands, pi
from rollouts.programs.launchers.base import Program
from tests.integration.test_programs import DONE, HELLO, INSTALLED, Guest, play, scripted
from tests.programs.gateway.programs import check_laws

pytestmark = pytest.mark.programs

SCRIPTS = Path(__file__).parent / "sdk_agents"


@pytest.fixture(autouse=True, scope="module")
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--programs"):
        pytest.skip("scripts/test --programs runs this")


def bash(command: str) -> ToolCall:
    return ToolCall("bash", {"command": command})


@attrs.frozen
class Agent:
    """An agent, and the calls of its tools."""

    start: str
    """Its command or its interpreter, below the folder of the installed programs; ``node`` of this machine."""
    script: str = ""
    """Of ``agents/``; else it is a program with a launcher."""
    launcher: Callable[..., Launch] | None = None
    api: str = "chat"
    steps: Sequence[Message | str] = (
        Message("assistant", "I write.", [bash("echo hello > out.txt")]),
        Message("assistant", "I read.", [bash("cat out.txt")]),
        Message("assistant", "I read again.", [bash("cat out.txt")]),
        DONE,
    )
    """Its replies, in order."""
    roots: int = 1
    untrained: int = 0
    """Sampled ids that are not trained."""

    @property
    def folder(self) -> Path:
        """The folder to which its script is copied: Node finds packages from there."""
        return INSTALLED / ("javascript" if self.start == "node" else "agents")

    def guest(self) -> Guest:
        path = str(self.folder / self.script)
        program = functools.partial(_script, path=path, api=self.api) if self.script else self.launcher
        assert program is not None
        return Guest(program, "", self.start, lambda file: bash(f"echo hello > {file}"), lambda *_: [])


def _script(task: str, server: ModelServer, *, command: Sequence[str], path: str, api: str) -> Launch:
    env = {
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.api_key,
        "OPENAI_MODEL": server.model,
        "ANTHROPIC_BASE_URL": server.base_url,
        "AGENT_API": api,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "CREWAI_TRACING_ENABLED": "false",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "OTEL_SDK_DISABLED": "true",
    }
    return Launch((*command, path, task), env)


def react(thought: str, name: str, arguments: str) -> str:
    """A step of DSPy's ReAct as text."""
    parts = {"next_thought": thought, "next_tool_name": name, "next_tool_args": arguments, "completed": ""}
    return "\n\n".join(f"[[ ## {key} ## ]]\n{value}" for key, value in parts.items())


AGENTS = {
    "Agno, chat": Agent("agno/bin/python", "agno_agent.py"),
    "Agno, chat, stream": Agent("agno/bin/python", "agno_agent.py", api="chat, stream"),
    "Agno, Responses": Agent("agno/bin/python", "agno_agent.py", api="responses"),
    "Agno, Messages": Agent("agno/bin/python", "agno_agent.py", api="messages"),
    "CrewAI": Agent("crewai/bin/python", "crewai_agent.py"),
    "Vercel AI SDK": Agent("node", "vercel_agent.mjs"),
    "Vercel AI SDK, stream": Agent("node", "vercel_agent.mjs", api="chat, stream"),
    "LangGraph JS": Agent("node", "langchain_agent.mjs"),
    "Strands": Agent("strands/bin/python", "strands_agent.py"),
    "LlamaIndex": Agent("strands/bin/python", "llamaindex_agent.py"),
    "DSPy": Agent(
        "dspy/bin/python",
        "dspy_agent.py",
        steps=[
            react("I write.", "bash", '{"command": "echo hello > out.txt"}'),
            react("I read.", "bash", '{"command": "cat out.txt"}'),
            react("I am done.", "finish", "{}"),
            "[[ ## reasoning ## ]]\nI wrote it.\n\n[[ ## answer ## ]]\nIt is done.\n\n[[ ## completed ## ]]",
        ],
        roots=4,
    ),
    "AutoGen": Agent("agents/bin/python", "autogen_agent.py"),
    "Haystack": Agent("agents/bin/python", "haystack_agent.py"),
    "Semantic Kernel": Agent("agents/bin/python", "semantic_kernel_agent.py"),
    "instructor": Agent(
        "agents/bin/python",
        "instructor_agent.py",
        steps=[Message("assistant", "", [ToolCall("Command", {"command": "echo hello > out.txt"})])],
    ),
    "LiteLLM": Agent("crewai/bin/python", "litellm_agent.py"),
    "pi": Agent("node_modules/.bin/pi", launcher=pi),
    "cline": Agent(
        "node_modules/.bin/cline",
        launcher=cline,
        steps=[
            Message("assistant", "I work.", [ToolCall("run_commands", {"commands": [command]})])
            for command in ("echo hello > out.txt", "cat out.txt", "cat ./out.txt")
        ]
        + [DONE],
    ),
    "OpenHands": Agent("openhands/bin/python", launcher=openhands),
    "aider": Agent("aider/bin/aider", launcher=aider, steps=[f"I write.\n\nout.txt\n```\n{HELLO}```"]),
}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The rows of the table in ``docs/gateway.md``, printed after the last test."""
    found = ["| agent | calls, roots | sampled = trained + counted | changes of its echoes |", "|---|---|---|---|"]
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *found, sep="\n", flush=True)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_does_its_task(name: str, rows: list[str]) -> None:
    """Its calls continue each other by the kept ids, and every sampled id is trained or counted."""
    agent = AGENTS[name]
    if agent.script:
        agent.folder.mkdir(exist_ok=True)
        for file in (agent.script, "agent_tools.py"):
            shutil.copy(SCRIPTS / file, agent.folder)
    replies = iter(agent.steps)
    policy = scripted(lambda prompt: next(replies, DONE))
    played = await play(agent.guest(), policy)
    tree, counts = played.session.tree, played.session.counts
    assert played.files["out.txt"] is not None, (played.end, counts)
    assert played.files["out.txt"].decode().strip() == HELLO.strip(), (played.end, counts)
    check_laws(played.session, played.branches, policy)
    trained = sum(int(branch.mask.sum()) for branch in played.branches)
    echoes = ", ".join(f"{count} {amount:g}" for count, amount in sorted(counts.items()) if count.startswith("echo/"))
    added_up = f"{tree.sampled} = {trained} + {tree.untrained.total()}"
    rows.append(f"| {name} | {len(tree.calls)}, {len(tree.roots)} | {added_up} | {echoes} |")
    assert (len(tree.calls), len(tree.roots)) == (len(agent.steps), agent.roots), (counts, played.end)
    assert (tree.sampled, tree.untrained.total()) == (trained + agent.untrained, agent.untrained)


def programs() -> dict[str, Program]:
    """The launchers of the table."""
    return {name: agent.launcher for name, agent in AGENTS.items() if agent.launcher is not None}


def test_every_agent_has_a_start() -> None:
    """A script that exists, or a launcher."""
    assert {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".mjs")} == {"agent_tools.py"} | {
        agent.script for agent in AGENTS.values() if agent.script
    }
    assert set(programs()) == {"pi", "cline", "OpenHands", "aider"}
