"""The protocol of sandboxes, for every kind: what a program does is an ``Exit``, and nothing of it remains."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import RunningSandbox, SandboxError, SandboxLimits, opened
from rollouts.sandboxes.base import Tail, inner_path
from rollouts.sandboxes.containers import RunningContainer
from tests.sandboxes.kinds import KINDS, kind_of, requested_kind

LIMITS = SandboxLimits(output_bytes=1000, file_bytes=1 << 20)


@pytest.fixture(params=KINDS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[RunningSandbox]:
    try:
        running = await requested_kind(request, LIMITS).open()
    except SandboxError as error:
        if request.param in ("process", "container"):
            raise
        pytest.skip(f"this machine makes no namespaces: {error}")
    yield running
    await running.close()


async def test_a_program_has_its_workspace_and_environment(sandbox: RunningSandbox) -> None:
    """An empty workspace as its folder, a home, what it is given, and none of our variables."""
    script = 'pwd; ls -A; echo "$HOME|$TZ|$GIVEN"; env | grep -c PYTEST; test -w "$HOME"; echo $?; echo e > /dev/stderr'
    end = await sandbox.run(["sh", "-c", script], {"GIVEN": "x y"}, seconds=20)
    expected = [sandbox.workspace, f"{sandbox.home}|UTC|x y", "0", "0"]
    assert (end.code, end.stdout.splitlines(), end.stderr) == (0, expected, "e\n")
    assert not end.timed_out
    assert not end.truncated


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["sh", "-c", "exit 7"], 7, []),
        (["sh", "-c", "kill -SEGV $$"], -11, []),
        (["no-such-program"], 127, ["no-such-program", "No such file or directory"]),
        (["/"], 127, ["/", "Permission denied"]),
    ],
)
async def test_a_failure_of_the_program_is_an_exit(
    sandbox: RunningSandbox, argv: list[str], code: int, words: list[str]
) -> None:
    """Never an exception of the sandbox, which runs the next command."""
    end = await sandbox.run(argv, seconds=20)
    assert (end.code, bool(end.stderr)) == (code, bool(words))
    assert all(word in end.stderr for word in words)
    assert (await sandbox.exec(["true"])).code == 0


async def test_the_end_of_each_output_is_kept(sandbox: RunningSandbox) -> None:
    """At most ``output_bytes`` of each, and it says that the beginning is lost."""
    end = await sandbox.run(
        ["sh", "-c", "i=0; while [ $i -lt 999 ]; do echo $i; i=$((i+1)); done; echo q >&2"], seconds=20
    )
    assert (len(end.stdout), end.stdout[-8:], end.stderr, end.truncated) == (1000, "997\n998\n", "q\n", True)


async def test_at_the_deadline_everything_is_killed(sandbox: RunningSandbox) -> None:
    """The program with the processes that it started; what it wrote until then is kept."""
    end = await sandbox.run(["sh", "-c", "echo begun; sleep 61.5 & sleep 61.5"], seconds=0.3)
    assert (end.code, end.stdout, end.timed_out) == (-9, "begun\n", True)
    assert end.seconds < 10
    assert _running("61.5") == 0


async def test_what_a_program_leaves_running_is_killed(sandbox: RunningSandbox) -> None:
    """Its end is not awaited, although it holds the outputs open."""
    end = await sandbox.run(["sh", "-c", "sleep 62.5 & echo done"], seconds=20)
    assert (end.code, end.stdout) == (0, "done\n")
    assert end.seconds < 10
    assert _running("62.5") == 0


async def test_a_cancelled_command_is_killed(sandbox: RunningSandbox) -> None:
    """And the next answer belongs to the next command."""
    with anyio.move_on_after(0.3):
        await sandbox.run(["sh", "-c", "sleep 63.5; echo late"], seconds=20)
    assert (await sandbox.exec(["echo", "next"])).stdout == "next\n"
    assert _running("63.5") == 0


async def test_an_argument_may_be_any_bytes(sandbox: RunningSandbox) -> None:
    """As a name of a file may be."""
    if isinstance(sandbox, RunningContainer):
        pytest.skip("the daemon takes UTF-8 only")
    assert (await sandbox.exec(["touch", "n\udcff"])).code == 0
    end = await sandbox.exec(["sh", "-c", 'test -e "$1" && echo there', "sh", "n\udcff"], env={"A": "\udcfe"})
    assert end.stdout == "there\n"


async def test_set_up_has_standard_input_and_a_folder(sandbox: RunningSandbox) -> None:
    """``exec`` passes bytes of any size, and starts where it is asked to."""
    await sandbox.exec(["mkdir", "sub"])
    end = await sandbox.exec(["sh", "-c", "wc -c; pwd"], stdin=b"x" * 300_000, cwd="sub")
    assert end.stdout.split() == ["300000", f"{sandbox.workspace}/sub"]
    assert (await sandbox.exec(["true"], stdin=b"x" * 300_000)).code == 0


async def test_files_are_written_and_read(sandbox: RunningSandbox) -> None:
    """In the workspace, at home, with folders and mode; any bytes; what is missing is ``None``."""
    data = bytes(range(256)) * 40
    await sandbox.write("a/b.bin", data)
    await sandbox.write("~/.tool/run", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert await sandbox.read(f"{sandbox.workspace}/a/b.bin") == data
    assert (await sandbox.exec([f"{sandbox.home}/.tool/run"])).stdout == "ran\n"
    assert (await sandbox.exec(["sh", "-c", "echo more >> a/b.bin"])).code == 0
    assert [await sandbox.read(path) for path in ("nothing", "a", "a/b.bin/c")] == [None, None, None]


async def test_a_pipe_is_no_file_and_is_replaced(sandbox: RunningSandbox) -> None:
    """A program that plants a pipe does not make us wait for its other end."""
    await sandbox.exec(["mkfifo", "pipe"])
    assert await sandbox.read("pipe") is None
    await sandbox.write("pipe", b"file")
    assert await sandbox.read("pipe") == b"file"


async def test_a_file_over_the_limit_is_refused(sandbox: RunningSandbox) -> None:
    """With its path and the limit, in both directions."""
    with pytest.raises(SandboxError, match=r"path 'big': got 1,048,577 bytes; expected at most file_bytes=1,048,576"):
        await sandbox.write("big", bytes((1 << 20) + 1))
    await sandbox.write("full", bytes(1 << 20))
    assert len(await sandbox.read("full") or b"") == 1 << 20


async def test_after_close_nothing_is_left(sandbox: RunningSandbox) -> None:
    """Closing twice is allowed; a closed sandbox runs nothing."""
    await sandbox.close()
    await sandbox.close()
    assert sandbox.workspace in ("/workspace", "/work") or not _exists(f"{sandbox.workspace}/..")
    for use in (sandbox.exec(["true"]), sandbox.read("x"), sandbox.write("x", b"")):
        with pytest.raises(SandboxError, match="the sandbox is closed"):
            await use


async def test_a_sandbox_is_closed_in_any_case() -> None:
    """Also when its task fails or is cancelled."""
    with anyio.move_on_after(0.2):
        async with opened(kind_of("process")) as sandbox:
            await sandbox.run(["sleep", "64.5"], seconds=20)
    assert not _exists(sandbox.workspace)
    with pytest.raises(KeyError):
        async with opened(kind_of("process")) as sandbox:
            raise KeyError("x")
    assert not _exists(sandbox.workspace)


async def test_a_failed_close_is_an_error_of_the_sandbox() -> None:
    """So that a caller that handles those handles a full disk, too."""

    class Stuck:
        async def open(self) -> Any:
            return self

        async def close(self) -> None:
            raise OSError("no space left")

    stuck: Any = Stuck()
    with pytest.raises(SandboxError, match="Stuck: not closed: no space left"):
        async with opened(stuck):
            pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"argv": []}, "argv: got \\[\\]; expected a list of strings without null characters"),
        ({"argv": "ls"}, "argv: got 'ls'; expected a list"),
        ({"argv": ["a\0"]}, "argv: got"),
        ({"env": {"A=": "b"}}, "env: got {'A=': 'b'}; expected names and values"),
        ({"env": {"A": 1}}, "env: got"),
        ({"seconds": 0}, "seconds: got 0; expected a number > 0"),
        ({"seconds": float("nan")}, "seconds: got nan"),
    ],
)
async def test_a_command_that_no_system_takes_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name, before anything starts."""
    async with opened(kind_of("process")) as sandbox:
        with pytest.raises(ConfigError, match=words):
            await sandbox.run(**{"argv": ["true"], "seconds": 1.0} | arguments)


@pytest.mark.parametrize(
    ("path", "inner"),
    [("a/../b", "/w/b"), ("~/x", "/h/x"), ("/etc/x", "/etc/x"), ("../x", "/x")],
)
def test_a_path_means_one_place_inside(path: str, inner: str) -> None:
    """Relative to the workspace, to the home, or absolute."""
    assert inner_path(path, "/w", "/h") == inner


def test_a_tail_keeps_the_last_bytes() -> None:
    """However they come."""
    tail = Tail(4)
    for part in (b"ab", b"", b"cdefg", b"h"):
        tail.add(part)
    assert (tail.text, tail.truncated) == ("efgh", True)


def _exists(path: str) -> bool:
    return os.path.exists(path)


def _running(argument: str) -> int:
    """How many ``sleep`` processes have this argument, after a second in which killed ones may vanish."""
    count = 0
    end = time.monotonic() + 1
    while time.monotonic() < end:
        count = 0
        for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    count += file.read().split(b"\0")[:2] == [b"sleep", argument.encode()]
            except OSError:
                continue
        if count == 0:
            break
    return count


async def test_a_program_that_is_stopped_keeps_its_output(sandbox: RunningSandbox) -> None:
    """The event kills it before its deadline; what it wrote is there, and the sandbox runs the next command."""
    stop = anyio.Event()

    async def set_at_its_start() -> None:
        stop.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(set_at_its_start)
        end = await sandbox.run(["sh", "-c", "sleep 60"], seconds=50, stop=stop)
    assert (end.code, end.timed_out) == (-9, False)
    later = anyio.Event()
    end = await sandbox.run(["sh", "-c", "echo done"], seconds=20, stop=later)
    assert (end.code, end.stdout) == (0, "done\n")
    assert (await sandbox.exec(["true"])).code == 0
