"""The common part of the remote kinds, on a folder as machine: starts, lost answers, hostile programs, closing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import attrs
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import SandboxError, SandboxLimits, opened
from rollouts.sandboxes.containment import NAMES
from rollouts.sandboxes.remote import Machine, RemoteSandbox, RunningRemote, sdk
from tests.sandboxes.kinds import needs_a_machine
from tests.sandboxes.machines import FolderSandbox


@needs_a_machine
async def test_a_lost_answer_loses_no_command() -> None:
    """The request is repeated; the command is started once."""
    kind = FolderSandbox()
    async with opened(kind) as sandbox:
        kind.lost.extend(["reset", "reset"])
        end = await sandbox.run(["sh", "-c", "echo x >> runs; cat runs"], seconds=20)
        assert (end.code, end.stdout, kind.lost) == (0, "x\n", [])
        kind.lost.extend(["third", "second", "first"])
        with pytest.raises(SandboxError, match=r"FolderSandbox.run: ConnectionError: 'third'"):
            await sandbox.run(["true"], seconds=20)
        kind.lost.clear()
        assert (await sandbox.exec(["true"])).code == 0


@needs_a_machine
async def test_no_request_has_what_the_service_may_log() -> None:
    """Neither the command line, nor a variable, nor its input is in a script or left in a file."""
    kind = FolderSandbox()
    async with opened(kind) as sandbox:
        await sandbox.run(["echo", "a-word"], {"KEY": "a-secret"}, seconds=20)
        await sandbox.exec(["true"], stdin=b"some-input")
        end = await sandbox.exec(["sh", "-c", "grep -rlE 'a-(word|secret)|some-input' /tmp/.rollouts-* | wc -l"])
        assert end.stdout.strip() == "0"
    assert not [script for script in kind.scripts if "a-word" in script or "a-secret" in script or "input" in script]


@needs_a_machine
async def test_any_words_reach_the_program() -> None:
    """Quotes, lines, bytes beyond ASCII, names of variables that no shell knows, more than a request would hold."""
    words = ["'", '"', "$HOME", "a\nb", "ü", "-n", "`x`", "", "y" * 100_000]
    script = "import json, os, sys; print(json.dumps([[len(a) for a in sys.argv[1:]], os.environ['A.B']]))"
    async with opened(FolderSandbox()) as sandbox:
        end = await sandbox.run(["python3", "-c", script, *words], {"A.B": "'c\n"}, seconds=20)
        lengths = [len(word) for word in words]
        assert end.stdout == f'[{lengths}, "\'c\\n"]\n'


@needs_a_machine
async def test_a_program_that_kills_its_shell_has_ended() -> None:
    """Its output is lost, and the sandbox says so and runs the next command."""
    async with opened(FolderSandbox()) as sandbox:
        end = await sandbox.run(["sh", "-c", "echo x; kill -9 -$(ps -o pgid= $$ | tr -d ' ')"], seconds=20)
        assert (end.code, end.truncated, end.timed_out) == (-9, True, False)
        assert (await sandbox.exec(["true"])).code == 0


@needs_a_machine
async def test_a_file_larger_than_the_limit_ends_its_writer() -> None:
    """As in the other kinds, by the limit of a process."""
    async with opened(FolderSandbox(limits=SandboxLimits(file_bytes=1024))) as sandbox:
        end = await sandbox.run(["sh", "-c", "head -c 4096 /dev/zero > big; wc -c < big"], seconds=20)
        assert end.stdout.strip() == "1024"


@needs_a_machine
@pytest.mark.parametrize(
    "arguments", [{"argv": ["a=b"]}, {"argv": ["\udc80"]}, {"argv": ["a"], "env": {"A": "\udc80"}}]
)
async def test_a_command_that_cannot_be_sent_is_refused(arguments: dict[str, Any]) -> None:
    """By name, before anything is sent."""
    async with opened(FolderSandbox()) as sandbox:
        with pytest.raises(ConfigError, match=r"(argv(\[0\])?|env): got"):
            await sandbox.run(**arguments, seconds=1)


@needs_a_machine
async def test_a_sandbox_that_cannot_be_set_up_is_deleted() -> None:
    """With what the set-up said."""
    kind = FolderSandbox(lost=["no route"])
    with pytest.raises(SandboxError, match=r"FolderSandbox.set-up: ConnectionError: 'no route'"):
        await kind.open()
    assert [folder.deleted for folder in kind.folders] == [True]


@attrs.frozen
class _Slow(FolderSandbox):
    """Its creation has begun when ``begun`` is set, and ends when ``go`` is set."""

    begun: anyio.Event = attrs.field(factory=anyio.Event)
    go: anyio.Event = attrs.field(factory=anyio.Event)

    async def _create(self) -> Machine:
        self.begun.set()
        await self.go.wait()
        return await super()._create()


@needs_a_machine
async def test_a_machine_that_is_being_created_at_a_cancellation_is_deleted() -> None:
    """It is awaited and deleted, as it would run without an owner."""
    kind = _Slow()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kind.open)
        await kind.begun.wait()
        tasks.cancel_scope.cancel()
        kind.go.set()
    assert [folder.deleted for folder in kind.folders] == [True]


@attrs.frozen
class _Silent(RemoteSandbox):
    """A service that answers with this."""

    answer: str = ""

    async def _create(self) -> Machine:
        return _SilentMachine(self.answer)

    def _enforced(self) -> Mapping[str, str]:
        return {}

    def _not_enforced(self) -> Mapping[str, str]:
        return {}


@attrs.frozen
class _SilentMachine:
    answer: str

    async def execute(self, script: str) -> str:
        return self.answer.replace("MARK", script.split()[1])

    async def upload(self, path: str, data: bytes) -> None:
        raise PermissionError(path)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return b""

    async def delete(self) -> None:
        raise RuntimeError("gone")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("motd", r"_Silent.set-up: got 'motd'; expected the output of a script"),
        ("motd\nMARK\nno mkfifo", r"_Silent: the workspace cannot be made: 'no mkfifo'"),
    ],
)
async def test_an_invalid_answer_is_an_error(answer: str, words: str) -> None:
    """With what was answered; a failure to delete the machine is a note."""
    with pytest.raises(SandboxError, match=words) as caught:
        await _Silent(answer=answer).open()
    assert caught.value.__notes__ == ["_Silent.close: RuntimeError: 'gone'"]


def test_a_port_of_ours_is_not_reached() -> None:
    """The call is refused by name, as any address would lead nowhere."""
    with pytest.raises(ConfigError, match=r"gateway: got None; expected a PublicAddress: a program in _Silent reaches"):
        RunningRemote(_Silent(), _SilentMachine("")).url_inside(80)


@pytest.mark.parametrize("lifetime", [0, 59, float("inf"), True, "1h"])
def test_a_bad_lifetime_is_refused(lifetime: Any) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=r"FolderSandbox.lifetime: got .*; expected a number >= 60"):
        FolderSandbox(lifetime=lifetime)


def test_every_name_is_in_one_part_of_the_containment() -> None:
    """Also of a remote kind."""
    containment = FolderSandbox().containment()
    assert sorted([*containment.enforced, *containment.not_enforced]) == sorted(NAMES)


async def test_an_sdk_that_is_not_installed_is_named() -> None:
    """With the command that installs it."""
    with pytest.raises(ConfigError, match=r"A needs no_such_sdk: .*install .*e2b.*\(No module named 'no_such_sdk'\)"):
        await sdk("A", "no_such_sdk", "e2b")
