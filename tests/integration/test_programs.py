"""Real programs in a sandbox with a network of its own, against a gateway with scripted replies and the demo model.

Skipped unless ``--programs`` is given; ``scripts/test --programs`` installs the programs and runs only these. What a
program tried to reach elsewhere is read from the counters of the sandbox's network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.dtypes import Completion, Endpoint, Message, SamplingParams, TokenColumn, ToolCall
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import EndpointUnavailable
from rollouts.inference.base import CompletionRequest, Policy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.programs import Launch, ModelServer, claude_code, codex, mini_swe_agent, opencode, qwen_code
from rollouts.programs.gateway.server import Gateway
from rollouts.programs.gateway.session import ProgramSession
from rollouts.programs.launchers.base import Program
from rollouts.recipes.configs import repositories
from rollouts.sandboxes import Exit, NamespaceSandbox, RunningSandbox, opened
from rollouts.testing.policy import ScriptedPolicy
from rollouts.trajectory import Trajectory
from tests.programs.gateway.programs import check_laws, demo_renderer, demo_tokenizer, spoken

pytestmark = pytest.mark.programs

INSTALLED = Path(__file__).resolve().parents[2] / ".programs"
TASK = "Write hello into out.txt and say when it is done."
HELLO = "hello\n"
DONE = "It is done."
SECONDS = 150.0


@pytest.fixture(autouse=True, scope="module")
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--programs"):
        pytest.skip("scripts/test --programs runs this")


@attrs.frozen
class Guest:
    """A program, and the calls of its own tools."""

    program: Callable[..., Launch]
    package: str
    """Of npm, or of PyPI."""
    command: str
    """Below the folder of the installed programs."""
    write: Callable[[str], ToolCall]
    """Writes ``hello`` into a file of the workspace."""
    edit: Callable[[str, str, str], list[ToolCall]]
    """Replaces a line of a file of the workspace by another one; a call for each turn."""
    agent: Callable[[str], ToolCall] | None = None
    """Gives a task to an agent of the program's own."""
    end: ToolCall | None = None
    """Ends the program; else a reply without a call does."""
    api: str = "chat"

    @property
    def version(self) -> str:
        """Of the installed package."""
        described = INSTALLED / "node_modules" / self.package / "package.json"
        if described.exists():
            return str(json.loads(described.read_text())["version"])
        folder = f"venv/lib/python*/site-packages/{self.package.replace('-', '_')}-*.dist-info"
        return next(INSTALLED.glob(folder)).name.removesuffix(".dist-info").rpartition("-")[2]

    def of(self, **options: Any) -> Program:
        command = ["node"] if self.command == "node" else [str(INSTALLED / self.command)]
        return functools.partial(self.program, command=command, **options)


def shell(name: str, argument: str) -> Callable[[str], ToolCall]:
    return lambda file: ToolCall(name, {argument: f"echo hello > {file}"})


def patch(file: str, old: str, new: str) -> list[ToolCall]:
    text = f"*** Begin Patch\n*** Update File: {file}\n@@\n-{old}\n+{new}\n*** End Patch"
    return [ToolCall("exec_command", {"cmd": f"apply_patch <<'EOF'\n{text}\nEOF"})]


def edit_with(
    read: str, edit: str, file_path: str, old_string: str, new_string: str
) -> Callable[[str, str, str], list[ToolCall]]:
    """Two tools with these names and parameters: an edit needs the file to be read before."""

    def calls(file: str, old: str, new: str) -> list[ToolCall]:
        path = {file_path: f"/workspace/{file}"}
        return [ToolCall(read, path), ToolCall(edit, {**path, old_string: old, new_string: new})]

    return calls


GUESTS = {
    "claude-code": Guest(
        claude_code,
        "@anthropic-ai/claude-code",
        "node_modules/.bin/claude",
        lambda file: ToolCall("Write", {"file_path": f"/workspace/{file}", "content": HELLO}),
        edit_with("Read", "Edit", "file_path", "old_string", "new_string"),
        lambda task: ToolCall("Agent", {"description": "A part", "prompt": task, "subagent_type": "general-purpose"}),
        api="Messages",
    ),
    "codex": Guest(
        codex, "@openai/codex", "node_modules/.bin/codex", shell("exec_command", "cmd"), patch, api="Responses"
    ),
    "opencode": Guest(
        opencode,
        "opencode-ai",
        "node_modules/.bin/opencode",
        lambda file: ToolCall("write", {"filePath": f"/workspace/{file}", "content": HELLO}),
        edit_with("read", "edit", "filePath", "oldString", "newString"),
        lambda task: ToolCall("task", {"description": "A part", "prompt": task, "subagent_type": "general"}),
    ),
    "qwen-code": Guest(
        qwen_code,
        "@qwen-code/qwen-code",
        "node_modules/.bin/qwen",
        lambda file: ToolCall("write_file", {"file_path": f"/workspace/{file}", "content": HELLO}),
        edit_with("read_file", "edit", "file_path", "old_string", "new_string"),
        lambda task: ToolCall("agent", {"description": "A part", "prompt": task, "subagent_type": "general-purpose"}),
    ),
    "mini-swe-agent": Guest(
        mini_swe_agent,
        "mini-swe-agent",
        "venv/bin/mini",
        shell("bash", "command"),
        lambda file, old, new: [ToolCall("bash", {"command": f"sed -i 's/^{old}$/{new}/' {file}"})],
        end=ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ),
}


@attrs.frozen
class Played:
    """One run of a program, ended."""

    end: Exit
    files: Mapping[str, bytes | None]
    session: ProgramSession
    branches: list[Trajectory]

    def check(self, policy: ScriptedPolicy, *, roots: int = 1, calls: int, depth: int) -> None:
        """Check the tree and its laws."""
        tree = self.session.tree
        seen = (len(tree.roots), len(tree.calls), max((len(call.path()) for call in tree.calls), default=0))
        assert seen == (roots, calls, depth), (self.session.counts, self.end)
        check_laws(self.session, self.branches, policy)
        unknown = {name for name in self.session.counts if name.startswith("unknown_route")}
        assert unknown == set()


def readable() -> list[str]:
    """The folders of the installed programs, and of the Pythons of their environments."""
    homes = [
        line.partition("=")[2].strip()
        for file in INSTALLED.glob("*/pyvenv.cfg")
        for line in file.read_text().splitlines()
        if line.startswith("home")
    ]
    found = {Path(home).resolve().parent for home in homes}
    return [str(INSTALLED), *(str(folder) for folder in found if not folder.is_relative_to("/usr"))]


async def network(sandbox: RunningSandbox) -> tuple[int, int]:
    """Refused routes and sent datagrams of the sandbox's network, since it was made."""
    end = await sandbox.exec(["cat", "/proc/net/snmp"])
    lines = [line.split() for line in end.stdout.splitlines()]
    table = {
        names[0]: dict(zip(names[1:], map(int, values[1:]), strict=True))
        for names, values in zip(lines[::2], lines[1::2], strict=True)
    }
    later = (await sandbox.exec(["cat", "/proc/net/snmp6"])).stdout.split()
    six = dict(zip(later[::2], map(int, later[1::2]), strict=True))
    routes = table["Ip:"]["OutNoRoutes"] + six.get("Ip6OutNoRoutes", 0)
    return routes, table["Udp:"]["OutDatagrams"] + six.get("Udp6OutDatagrams", 0)


async def play(
    guest: Guest, policy: Policy, *, task: str = TASK, files: tuple[str, ...] = ("out.txt",), window: int = 400_000,
    sampling: SamplingParams | None = None, max_context: int | None = None, **options: Any,
) -> Played:  # fmt: skip
    """Run a program to its end."""
    if guest.command != "node" and not (INSTALLED / guest.command).exists():
        pytest.fail(f"{guest.command} is not installed: scripts/test --programs installs it")
    async with Gateway() as gateway, opened(NamespaceSandbox(readable=readable())) as sandbox:
        assert sandbox.listener is not None
        session = ProgramSession(
            policy, demo_renderer(), sampling or SamplingParams(max_new_tokens=4096), max_context=max_context
        )
        async with session, gateway.listening(sandbox.listener):
            url = gateway.open(session, sandbox.url_inside())
            server = ModelServer(url, session.key, "demo", context_window=window, home=sandbox.home)
            launch = guest.of(**options)(task, server)
            for path, data in launch.files.items():
                await sandbox.write(path, data)
            end = await sandbox.run(launch.argv, launch.env, seconds=SECONDS)
            session.end()
            gateway.close(session)
        written = {name: await sandbox.read(name) for name in files}
        assert await network(sandbox) == (0, 0), "it tried to reach another address"
    return Played(end, written, session, session.branches())


def scripted(answer: Callable[[str], Message | str]) -> ScriptedPolicy:
    """Replies that depend on the text of the prompt."""
    return ScriptedPolicy(script(answer))


def script(answer: Callable[[str], Message | str]) -> Callable[[TokenColumn], list[int]]:
    tokenizer = demo_tokenizer()
    return lambda tokens: spoken(answer(tokenizer.decode(tokens.tolist())))


def writes(guest: Guest) -> Callable[[str], Message | str]:
    """A reply that writes the file, and one that ends."""

    def answer(prompt: str) -> Message | str:
        if "<tool_response>" not in prompt:
            return Message("assistant", "I write it.", [guest.write("out.txt")])
        return Message("assistant", DONE, [guest.end] if guest.end else [])

    return answer


class FailingPolicy(ScriptedPolicy):
    """Fails at its first call."""

    failed = False

    async def complete(self, request: CompletionRequest) -> Completion:
        if not self.failed:
            self.failed = True
            raise EndpointUnavailable("the server failed")
        return await super().complete(request)


class SlowPolicy(ScriptedPolicy):
    """Thinks for more than a minute about its first reply."""

    async def complete(self, request: CompletionRequest) -> Completion:
        if not self.requests:
            await anyio.sleep(61)
        return await super().complete(request)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The rows of the table in ``docs/gateway.md``, printed after the last test."""
    rows = ["| package | version | API | prompt of the first call | calls, roots, depth | sampled, trained |"]
    rows += ["|---|---|---|---|---|---|"]
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *rows, sep="\n", flush=True)


ELSEWHERE = """
import socket
socket.socket(type=socket.SOCK_DGRAM).sendto(b"name?", ("127.0.0.1", 53))
socket.create_connection(("8.8.8.8", 80), 2)
"""


async def test_what_a_program_tries_elsewhere_is_counted() -> None:
    """A datagram and a connection to an address; neither gets out. Names have no server, and are not looked up."""
    async with opened(NamespaceSandbox()) as sandbox:
        assert await network(sandbox) == (0, 0)
        end = await sandbox.run(["python3", "-c", ELSEWHERE], seconds=20)
        assert await network(sandbox) == (1, 1)
    assert end.stderr.splitlines()[-1] == "OSError: [Errno 101] Network is unreachable"


@pytest.mark.parametrize("name", list(GUESTS))
async def test_a_program_writes_a_file(name: str, table: list[str]) -> None:
    """It calls its own tool, gets the result, ends; its two replies are one branch, and it reached only the gateway."""
    guest = GUESTS[name]
    policy = scripted(writes(guest))
    played = await play(guest, policy)
    assert played.files["out.txt"] == HELLO.encode()
    assert played.end.code == 0
    played.check(policy, calls=2, depth=2)
    tree, trained = played.session.tree, sum(int(branch.mask.sum()) for branch in played.branches)
    cells = [f"`{guest.package}`", guest.version, guest.api, f"{len(policy.requests[0]):,} tokens", "2, 1, 2"]
    table.append("| " + " | ".join([*cells, f"{tree.sampled}, {trained}"]) + " |")


@pytest.mark.parametrize("name", list(GUESTS))
async def test_a_program_asks_again_after_a_500(name: str) -> None:
    """Its first request fails; it asks again, and the reply is sampled once."""
    guest = GUESTS[name]
    policy = FailingPolicy(script(writes(guest)))
    played = await play(guest, policy)
    assert played.session.counts["failed_calls"] == 1
    assert len(policy.requests) == 2
    assert played.files["out.txt"] == HELLO.encode()
    played.check(policy, calls=2, depth=2)


@pytest.mark.parametrize("name", [name for name, guest in GUESTS.items() if guest.agent])
async def test_agents_of_a_program(name: str) -> None:
    """It gives two parts to agents of its own at the same time; each is a root, and each reply is trained once."""
    guest = GUESTS[name]
    files = ("a.txt", "b.txt")

    def answer(prompt: str) -> Message | str:
        part = next((file for file in files if f"PART {file}" in prompt and TASK not in prompt), None)
        if "<tool_response>" in prompt:
            return DONE
        if part is not None:
            return Message("assistant", "I write it.", [guest.write(part)])
        assert guest.agent is not None
        return Message("assistant", "Two parts.", [guest.agent(f"PART {file}: write it.") for file in files])

    policy = scripted(answer)
    played = await play(guest, policy, files=files)
    assert set(played.files.values()) == {HELLO.encode()}
    played.check(policy, roots=3, calls=6, depth=2)


async def test_codex_compacts() -> None:
    """Near the end of the window that it knows it asks for a summary, and goes on from it; all is trained once."""
    guest = GUESTS["codex"]

    def answer(prompt: str) -> Message | str:
        if "SUMMARY" in prompt:
            return DONE
        if "CONTEXT CHECKPOINT COMPACTION" in prompt:
            return "SUMMARY: the file is written."
        if "<tool_response>" in prompt:
            return Message("assistant", "I write it.", [guest.write("out.txt")])
        return Message("assistant", "I count.", [ToolCall("exec_command", {"cmd": "seq 1 900"})])

    policy = scripted(answer)
    played = await play(guest, policy, window=22_300)
    assert played.files["out.txt"] == HELLO.encode()
    played.check(policy, roots=3, calls=4, depth=2)


async def test_claude_code_waits_a_minute() -> None:
    """It waits 61 s for the head of a reply, behind pings, and does not ask again."""
    guest = GUESTS["claude-code"]
    policy = SlowPolicy(script(writes(guest)))
    played = await play(guest, policy)
    assert played.end.seconds > 61
    assert not {"retries_joined", "retries_served", "undelivered"} & set(played.session.counts)
    played.check(policy, calls=2, depth=2)


@pytest.mark.parametrize("name", list(GUESTS))
async def test_a_program_mends_a_repository(name: str) -> None:
    """In the recipe of the ten repositories: it edits the module by its own tool, and the fresh sandbox passes it."""
    guest, old = GUESTS[name], "    return year % 4 == 0"
    new = "    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)"
    steps: list[Message | str] = [Message("assistant", "I edit.", [call]) for call in guest.edit("leap.py", old, new)]
    steps.append(Message("assistant", DONE, [guest.end] if guest.end else []))
    policy = scripted(lambda prompt: steps[min(prompt.count("<tool_response>"), len(steps) - 1)])
    recipe = repositories.recipe(
        Endpoint(model=str(DEMO_MODEL)),
        program=name.replace("-", "_"),  # type: ignore[arg-type]
        command=(str(INSTALLED / guest.command),),
        readable=(str(INSTALLED),),
    )
    generate, reward_fn = recipe.config.generate_fn, recipe.config.reward_fn
    assert isinstance(generate, functools.partial)
    assert isinstance(reward_fn, functools.partial)
    prompt = next(one for one in recipe.data_buffer.prompts if one.metadata["task"] == "leap")
    (sample,) = await generate([prompt], policy=policy, context_window=400_000)
    assert await reward_fn(sample) == 1.0, (sample.metadata, sample.metrics)
    assert sample.metadata["verdict"]["outcome"] == "resolved"
    assert sample.metrics["calls"] == len(steps)
    assert sample.sampled_tokens == sample.metrics["sampled_tokens"]


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with positions for the prompts of programs, of which it has seen only the first 1,024."""
    folder = tmp_path_factory.mktemp("model") / "long"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65_536}))
    return folder


@pytest.mark.parametrize("name", list(GUESTS))
async def test_a_program_with_the_demo_model(name: str, long_model: Path) -> None:
    """Whatever the model says, every sampled token is trained or counted."""
    guest = GUESTS[name]
    options = {"bare": True} if name == "claude-code" else {}
    async with running_server(long_model, slots=2) as url:
        endpoint = Endpoint(base_url=url, model="demo")
        async with contextlib.aclosing(SGLangPolicy(endpoint)) as policy:
            sampling = SamplingParams(max_new_tokens=32)
            played = await play(guest, policy, sampling=sampling, max_context=65_536, window=65_536, **options)
    assert played.session.tree.calls
    assert played.session.failure is None
    check_laws(played.session, played.branches)
