"""The kind ``namespaces``: the program reaches our listener, its own files, and nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import NamespaceSandbox, RunningSandbox, SandboxError, SandboxLimits, opened
from rollouts.sandboxes.held import RunningHeld
from tests.sandboxes.kinds import kind_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
MIB = 1 << 20
LIMITS = SandboxLimits(memory_bytes=256 * MIB, processes=20, disk_bytes=8 * MIB, file_bytes=4 * MIB)


async def opened_here(kind: NamespaceSandbox) -> RunningHeld:
    try:
        return await kind.open()
    except SandboxError as error:
        pytest.skip(f"this machine makes no namespaces: {error}")


@pytest.fixture(params=["namespaces", "bubblewrap"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[RunningSandbox]:
    kind = kind_of(request.param, LIMITS)
    assert isinstance(kind, NamespaceSandbox)
    running = await opened_here(kind)
    yield running
    await running.close()


INTERPRETER = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


async def python(sandbox: RunningSandbox, code: str) -> str:
    """The last line that a Python program wrote in the sandbox."""
    end = await sandbox.run([INTERPRETER, "-I", "-S", "-c", code], seconds=20)
    return (end.stdout or end.stderr).strip().splitlines()[-1]


async def test_the_program_reaches_the_listener_and_nothing_else(sandbox: RunningSandbox) -> None:
    """The listener answers in the sandbox, from our process; our own ports and the world do not exist there."""
    assert sandbox.listener is not None
    assert sandbox.url_inside() == sandbox.url_inside(9) == "http://127.0.0.1:8080"
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/').read())"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
    async with anyio.create_task_group() as group:
        group.start_soon(_answer_once, sandbox.listener, answer)
        assert await python(sandbox, fetch) == "b'hi'"
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert await python(sandbox, connect) == "ConnectionRefusedError: [Errno 111] Connection refused"
    for address in ("8.8.8.8", "169.254.169.254"):
        connect = f"import socket; socket.create_connection(('{address}', 53), 2)"
        assert await python(sandbox, connect) == "OSError: [Errno 101] Network is unreachable"


async def _answer_once(listener: socket.socket, answer: bytes) -> None:
    await anyio.wait_readable(listener)
    connection, _ = listener.accept()
    with connection:
        connection.setblocking(False)
        await anyio.wait_readable(connection)
        connection.recv(65536)
        connection.send(answer)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(open({secret!r}).read())", "FileNotFoundError"),
        ("open('/usr/planted', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("open('/etc/planted', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("open('/dev/planted', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("import os; os.kill(1, 9); print(sorted(p for p in os.listdir('/proc') if p.isdigit())[0])", "1"),
        ("import os; os.readlink('/proc/1/fd/0')", "PermissionError"),
        ("open('/proc/1/mem', 'rb')", "PermissionError"),
        ("import os; os.chroot('.')", "PermissionError"),
        ("import os; os.setuid(0)", ("PermissionError", "OSError: [Errno 22]")),
        ("print(open('/etc/hostname').read())", "FileNotFoundError"),
        ("print(*open('/proc/self/status').read().split('CapEff:')[1].split()[:1])", "0000000000000000"),
        ("for n in range(9): open(f'f{n}', 'wb').write(bytes(2 << 20))", "OSError: [Errno 28] No space left on device"),
        ("open('f', 'wb').write(bytes(5 << 20))", "OSError: [Errno 27] File too large"),
        ("bytearray(400 << 20)", "MemoryError"),
        (
            "import pty, os; pid, fd = pty.fork(); pid or print('in a terminal'); pid and print(os.read(fd, 99))",
            "b'in a",
        ),
    ],
)
async def test_what_a_program_may_not_do(
    sandbox: RunningSandbox, code: str, words: str | tuple[str, ...], tmp_path: Path
) -> None:
    """Read our files, write outside, reach the holder, become root, fill the disk, take the memory."""
    (tmp_path / "secret").write_text("canary")
    said = await python(sandbox, code.replace("{secret!r}", repr(str(tmp_path / "secret"))))
    assert said.startswith(words), said


async def test_no_signal_of_a_program_ends_the_holder(sandbox: RunningSandbox) -> None:
    """Process 1 has no handler, such as Python's for the interrupt, that a signal from inside could reach."""
    for signal in ("INT", "TERM", "HUP", "CHLD"):
        await sandbox.run(["sh", "-c", f"kill -{signal} 1; sleep 0.1"], seconds=20)
        assert (await sandbox.run(["echo", "here"], seconds=20)).stdout == "here\n"


async def test_no_program_cripples_the_holder(sandbox: RunningSandbox) -> None:
    """It has the holder's user, whom the kernel lets change limits and priorities; the next command runs."""
    tries = (
        "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
        "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
        "os.sched_setaffinity(1, {0})",
        "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
        "os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    )
    for attempt in tries:
        said = await python(sandbox, f"import os, resource; {attempt}; print('done')")
        assert said == "PermissionError: [Errno 1] Operation not permitted", attempt
    mine = "import os, resource; resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 0)); os.nice(1); print('mine')"
    assert await python(sandbox, mine) == "mine"
    assert (await sandbox.exec(["echo", "next"])).stdout == "next\n"


async def test_processes_are_limited() -> None:
    """A program that starts processes without end is stopped by their number, where the user is not root outside."""
    kind = NamespaceSandbox(limits=LIMITS, bubblewrap=False)
    running = await opened_here(kind)
    try:
        assert "processes" in kind.containment().enforced
        code = "import os, time\nfor n in range(99):\n if os.fork() == 0: time.sleep(20)\n"
        assert (await python(running, code)).startswith("BlockingIOError")
    finally:
        await running.close()


async def test_readable_folders_are_shown_read_only(tmp_path: Path) -> None:
    """At the same path, also below /tmp; their neighbours are not."""
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "run").write_text("#!/bin/sh\necho ran; touch $0\n")
    (tmp_path / "tool" / "run").chmod(0o777)
    (tmp_path / "other").write_text("")
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(0o755)
    running = await opened_here(NamespaceSandbox(readable=str(tmp_path / "tool")))
    try:
        end = await running.run([str(tmp_path / "tool" / "run")], seconds=20)
        assert (end.stdout, "Read-only file system" in end.stderr) == ("ran\n", True)
        assert (await running.exec(["ls", str(tmp_path)])).stdout == "tool\n"
    finally:
        await running.close()


@pytest.mark.parametrize("bubblewrap", [False, True])
async def test_the_namespaces_end_with_this_process(bubblewrap: bool) -> None:
    """Also where it is killed while a program runs."""
    kind = kind_of("bubblewrap" if bubblewrap else "namespaces")
    assert isinstance(kind, NamespaceSandbox)
    await (await opened_here(kind)).close()
    code = f"""
import anyio
from rollouts.sandboxes import NamespaceSandbox
async def main():
    running = await NamespaceSandbox(bubblewrap={bubblewrap}).open()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: running.run(["sleep", "68.5"], seconds=60))
        await anyio.Path("/dev/stdout").write_text("begun\\n")
anyio.run(main)
"""
    process = await anyio.open_process([sys.executable, "-c", code])
    assert process.stdout is not None
    await process.stdout.receive()
    with anyio.fail_after(20):
        while _processes("68.5") == 0:
            await anyio.lowlevel.checkpoint()
        process.kill()
        while _processes("68.5"):
            await anyio.lowlevel.checkpoint()
    await process.aclose()


def _processes(argument: str) -> int:
    """How many ``sleep`` processes have this argument."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            count += Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\0" + argument.encode() + b"\0"
        except OSError:
            continue
    return count


async def test_an_outside_end_of_the_holder_is_an_error_of_the_sandbox() -> None:
    """The error says what is known; it is not an ``Exit`` of the program."""
    running = await opened_here(NamespaceSandbox())
    assert running.process is not None
    running.process.kill()
    with pytest.raises(SandboxError, match="the sandbox ended: no message"):
        await running.run(["sleep", "9"], seconds=20)
    await running.close()


async def test_a_read_that_is_cancelled_in_its_answer_spoils_no_other(sandbox: RunningSandbox) -> None:
    """The cancellation passes at once, and the next answer belongs to the next request."""
    assert isinstance(sandbox, RunningHeld)
    await sandbox.write("large", bytes(LIMITS.file_bytes))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.read, "large")
            while len(sandbox._answers.buffer) < 1000:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert (await sandbox.exec(["echo", "hi"])).stdout == "hi\n"


async def test_a_set_up_that_fails_is_named() -> None:
    """With the step that failed."""
    await (await opened_here(NamespaceSandbox())).close()
    limits = SandboxLimits(disk_bytes=1 << 70)
    with pytest.raises(SandboxError, match=r"namespaces: the sandbox could not be set up: .*mount /tmp: Invalid arg"):
        await NamespaceSandbox(limits=limits, bubblewrap=False).open()


async def test_no_descriptor_is_lost() -> None:
    """Opening and closing leaves as many descriptors as before."""
    await (await opened_here(NamespaceSandbox())).close()
    before = len(os.listdir("/proc/self/fd"))
    async with opened(NamespaceSandbox()) as sandbox:
        await sandbox.exec(["true"])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="for another user both ways enforce the same")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_root_in_bubblewrap_is_said() -> None:
    """The containment says what bubblewrap does not enforce for root, which is why it is not the default there."""
    assert sorted(NamespaceSandbox(bubblewrap=True).containment().not_enforced) == [
        "cpu_seconds",
        "privileges",
        "processes",
    ]
    assert sorted(NamespaceSandbox().containment().not_enforced) == ["cpu_seconds"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"readable": "/no/such"}, "NamespaceSandbox.readable: got '/no/such'; expected absolute paths"),
        ({"readable": ["usr"]}, "NamespaceSandbox.readable: got 'usr'"),
        ({"readable": ["/tmp/"]}, "NamespaceSandbox.readable: got '/tmp'"),
        ({"port": 80}, "NamespaceSandbox.port: got 80; expected a port from 1024 to 65535"),
    ],
)
def test_a_bad_setting_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name, when the kind is made."""
    with pytest.raises(ConfigError, match=words):
        NamespaceSandbox(**arguments)
