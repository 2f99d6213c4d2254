"""The kind ``container``: its settings, and what is particular to it against a real Podman."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import ContainerSandbox, SandboxError, SandboxLimits, opened
from rollouts.sandboxes.base import FIRST_PROCESS
from rollouts.sandboxes.containers import NumberedTail, left_in
from rollouts.sandboxes.docker_api import DockerApi, DockerError
from tests.sandboxes.engine import IMAGE, Engine

MIB = 1 << 20
LIMITS = SandboxLimits(output_bytes=1000, file_bytes=MIB, memory_bytes=256 * MIB, processes=40)


@pytest.mark.containers
@pytest.mark.parametrize("network", ["none", "bridge"])
@pytest.mark.parametrize("user", ["1000:1000", "0:0", None])
async def test_a_container_opens_with_each_user_and_network(engine: Engine, network: Any, user: str | None) -> None:
    """The user owns the workspace, has its limits, and no capability if it is not root; nothing is left."""
    kind = ContainerSandbox(IMAGE, engine.socket, network=network, user=user, limits=LIMITS)
    async with opened(kind) as sandbox:
        script = "pwd; id -u; touch file && stat -c %u file; grep CapEff /proc/self/status; ulimit -c"
        end = await sandbox.run(["sh", "-c", script], seconds=20)
        number = (user or "0").partition(":")[0]
        lines = end.stdout.split()
        assert lines[:3] == ["/workspace", number, number]
        assert (lines[4] == "0" * 16) == (number != "0")
        assert lines[5] == "0"
        assert (sandbox.listener is not None) == (network == "none")
    assert engine.containers() == []


@pytest.mark.containers
async def test_what_the_image_says_is_used_where_the_kind_says_nothing(engine: Engine) -> None:
    """Its folder, its variables and the home of its user; a command may have another user and its home."""
    kind = ContainerSandbox(
        IMAGE, engine.socket, user=None, workdir=None, home=None, env={"GIVEN": "x"}, cpus=1.5, limits=LIMITS
    )
    async with opened(kind) as sandbox:
        assert (sandbox.workspace, sandbox.home) == ("/srv", "/root")
        script = 'pwd; id -un; echo "$HOME|$GIVEN|$OF_IMAGE"; cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null'
        end = await sandbox.run(["sh", "-c", script], seconds=20)
        assert end.stdout.splitlines()[:3] == ["/srv", "root", "/root|x|yes"]
        assert end.stdout.splitlines()[3:] in ([], ["150000"])  # none with version 2 of control groups
        assert (await sandbox.exec(["useradd", "-m", "bob"])).code == 0
        end = await sandbox.exec(["sh", "-c", 'id -un; echo "$HOME"; id -gn'], user="bob:games")
        assert end.stdout.split() == ["bob", "/home/bob", "games"]
        end = await sandbox.exec(["true"], user="eve")
        assert (end.code, "eve" in end.stderr) == (127, True)


@pytest.mark.containers
async def test_the_limits_of_a_container_hold(engine: Engine) -> None:
    """Memory of all its processes together, their number, and the size of a file."""
    async with opened(ContainerSandbox(IMAGE, engine.socket, limits=LIMITS)) as sandbox:
        end = await sandbox.run(["sh", "-c", "i=0; while [ $i -lt 60 ]; do sleep 9 & i=$((i+1)); done"], seconds=20)
        assert "ork" in end.stderr  # cannot fork
        await sandbox.kill_all()  # nothing starts while all places are taken
        end = await sandbox.run(["python3", "-c", "bytearray(400 << 20)"], seconds=20)
        assert end.code in (-9, 1)
        end = await sandbox.run(["sh", "-c", "head -c 2000000 /dev/zero > big"], seconds=20)
        assert end.code != 0


@pytest.mark.containers
async def test_the_listener_is_in_the_network_of_the_container(engine: Engine) -> None:
    """The server's socket answers there, and is not reached from here; nothing else is reached from there."""
    async with opened(ContainerSandbox(IMAGE, engine.socket)) as sandbox:
        assert sandbox.listener is not None
        assert sandbox.url_inside() == "http://127.0.0.1:8080"
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", 8080), 1):
            pass
        code = "import socket; socket.create_connection(('127.0.0.1', 8080), 5).send(b'hello')"

        async def call() -> None:
            await sandbox.exec(["python3", "-c", code])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_readable(sandbox.listener)
            connection, _ = sandbox.listener.accept()
            with connection:
                connection.setblocking(True)
                assert connection.recv(5) == b"hello"
        away = "import socket; socket.create_connection(('8.8.8.8', 53), 2)"
        assert "unreachable" in (await sandbox.exec(["python3", "-c", away])).stderr


@pytest.mark.containers
async def test_a_container_whose_opening_is_cancelled_is_removed(engine: Engine) -> None:
    """At whatever step: its creation is not cut, because without an answer nothing would know it."""
    for step in range(12):
        with anyio.move_on_after(0.05 * step):
            async with opened(ContainerSandbox(IMAGE, engine.socket)) as sandbox:
                await sandbox.run(["sleep", "60"], seconds=60)
    assert engine.containers() == []


LOCALE = "sh: warning: setlocale: LC_ALL: cannot change locale\n"


@pytest.mark.containers
async def test_the_words_of_a_shell_before_the_number_of_its_command_are_kept(engine: Engine) -> None:
    """A loader that complains of a variable writes first: the group is known nevertheless, and no other is killed."""
    env = {"LD_PRELOAD": "/none.so"}
    async with opened(ContainerSandbox(IMAGE, engine.socket, user="0:0", keep_processes=True)) as sandbox:
        await sandbox.exec(["sh", "-c", "sleep 74.5 >/dev/null 2>&1 &"])
        end = await sandbox.exec(["sh", "-c", "sleep 75.5"], env=env, seconds=2)
        assert end.timed_out
        assert all("/none.so" in line for line in end.stderr.splitlines())
        left = (await sandbox.exec(["ps", "-eo", "args"])).stdout
        assert ("sleep 74.5" in left, "sleep 75.5" in left) == (True, False)


@pytest.mark.containers
async def test_no_program_hides_from_the_deadline_of_its_command(engine: Engine) -> None:
    """It removes what is in /tmp and writes another number there; its group is killed, and no other process."""
    async with opened(ContainerSandbox(IMAGE, engine.socket, user="0:0", keep_processes=True)) as sandbox:
        await sandbox.exec(["sh", "-c", "sleep 71.5 >/dev/null 2>&1 &"])
        hide = (
            "rm -rf /tmp/.process-* /tmp/*; for n in 1 2 3; do echo 1 > /tmp/.process-$n; done; echo 7 >&2; sleep 72.5"
        )
        end = await sandbox.exec(["sh", "-c", hide], seconds=2)
        assert (end.timed_out, end.stderr) == (True, "7\n")
        left = (await sandbox.exec(["ps", "-eo", "args"])).stdout
        assert ("sleep 71.5" in left, "sleep 72.5" in left) == (True, False)


@pytest.mark.containers
@pytest.mark.parametrize("seconds", [0.001, 0.05, 0.2])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_deadline_before_a_command_has_started_ends_no_other(
    engine: Engine, seconds: float, cancelled: bool
) -> None:
    """The engine may need longer than the deadline to start it: that command is killed, and a service lives on."""
    async with opened(ContainerSandbox(IMAGE, engine.socket, user="0:0", keep_processes=True)) as sandbox:
        await sandbox.exec(["sh", "-c", "sleep 76.5 >/dev/null 2>&1 &"])
        with anyio.move_on_after(seconds if cancelled else 100):  # a deadline counts from the start
            end = await sandbox.exec(["sh", "-c", "sleep 77.5"], seconds=100 if cancelled else seconds)
            assert (end.timed_out, end.code, end.stderr) == (True, -9, "")
        left = (await sandbox.exec(["ps", "-eo", "args"])).stdout
        assert ("sleep 76.5" in left, "sleep 77.5" in left) == (True, False)


@pytest.mark.parametrize(
    ("parts", "number", "text"),
    [
        ([b"mark 12\n", b"3\n"], 12, "3\n"),
        ([b"mar", b"k 1", b"2", b"\nfirst ", b"line\n"], 12, "first line\n"),
        ([b"mark 12"], None, "mark 12"),
        ([b"sh: warning: setlocale: LC_ALL: cannot ", b"change locale\nmark 12\nx"], 12, LOCALE + "x"),
        ([b"mark 12\nmark 13\n"], 12, "mark 13\n"),
        ([b"\xff\n12\n"], None, "\N{REPLACEMENT CHARACTER}\n12\n"),
        ([b"a" * 70_000, b"mark 12\n"], None, "a" * 92 + "mark 12\n"),
    ],
)
def test_only_the_line_with_the_mark_is_the_number_of_a_command(parts: list[bytes], number: int, text: str) -> None:
    """However the daemon cuts the stream, and also behind what a loader or the shell itself says before it."""
    tail = NumberedTail(100, "mark")
    for part in parts:
        tail.add(part)
    assert tail.has_begun == (number is not None or sum(map(len, parts)) > 4096)
    assert (tail.number, tail.text, tail.text) == (number, text, text)


@pytest.mark.containers
async def test_a_deadline_of_a_command_whose_group_is_not_known_is_an_error(engine: Engine) -> None:
    """Of a container whose shell does not write the number: every process is killed, and the message says so."""
    async with opened(ContainerSandbox(IMAGE, engine.socket, user="0:0", keep_processes=True)) as sandbox:
        await sandbox.exec(["sh", "-c", "sleep 78.5 >/dev/null 2>&1 &"])
        noise = f"import os, sys\nos.write(2, b'x' * {5000})\nos.execv('/bin/dash', sys.argv)\n"
        await sandbox.write("/tmp/loud", f"#!/usr/bin/python3\n{noise}".encode(), mode=0o755)
        await sandbox.exec(["sh", "-c", "mv /tmp/loud /usr/bin/sh"])
        with pytest.raises(SandboxError, match=r"its group .* is not known, and every process .* was killed"):
            await sandbox.exec(["sleep", "79.5"], seconds=1)
        left = (await sandbox.exec(["ps", "-eo", "args"])).stdout
        assert ("sleep 78.5" in left, "sleep 79.5" in left) == (False, False)


@pytest.mark.containers
async def test_a_process_that_cannot_be_killed_from_inside_is_an_error(engine: Engine) -> None:
    """The daemon's list decides, not the shell of a container whose root replaced it."""
    kind = ContainerSandbox(IMAGE, engine.socket, user="0:0", keep_processes=True)
    async with opened(kind) as sandbox:
        await sandbox.exec(["sh", "-c", "sleep 73.5 & sleep 73.5 & cp /bin/true /tmp/t; mv /tmp/t /usr/bin/dash"])
        with pytest.raises(SandboxError, match=r"[23] processes are left 20 s after they were killed: .*sleep 73\.5"):
            await sandbox.kill_all()


async def test_a_daemon_that_is_not_there_is_an_error() -> None:
    """With the path of its socket."""
    with pytest.raises(SandboxError, match=r"/no/such\.sock: cannot connect: No such file or directory; expected a"):
        await ContainerSandbox("small:1", "/no/such.sock").open()


@pytest.mark.containers
async def test_what_the_daemon_refuses_is_an_error(engine: Engine) -> None:
    """With the request, the status and the daemon's words."""
    with pytest.raises(DockerError, match=r"POST /containers/create at .*: HTTP 404: .*localhost/none:1"):
        await ContainerSandbox("localhost/none:1", engine.socket).open()
    assert await DockerApi(engine.socket).json("GET", "/images/json")


def test_the_containment_says_what_a_bridge_and_root_are() -> None:
    """A network and root are not contained, nor a user that only the image knows."""
    assert sorted(ContainerSandbox("a").containment().not_enforced) == ["cpu_seconds", "disk"]
    open_one = ContainerSandbox("a", network="bridge", user="root").containment()
    assert sorted(open_one.not_enforced) == ["cpu_seconds", "disk", "network", "privileges"]
    assert "privileges" in ContainerSandbox("a", user=None).containment().not_enforced


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": ""}, "ContainerSandbox.image: got ''; expected a non-empty string"),
        ({"image": "a", "network": "host"}, 'ContainerSandbox.network: got \'host\'; expected "none" or "bridge"'),
        ({"image": "a", "cpus": 0}, "ContainerSandbox.cpus: got 0; expected a number > 0, or None"),
        ({"image": "a", "user": ""}, "ContainerSandbox.user: got ''; expected a non-empty string, or None"),
        ({"image": "a", "workdir": 3}, "ContainerSandbox.workdir: got 3; expected a non-empty string, or None"),
    ],
)
def test_a_bad_setting_of_a_container_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        ContainerSandbox(**arguments)


def test_a_process_that_is_named_like_ours_is_not_ours() -> None:
    """Only one child of process 1 is, and where the program is not root, one of root."""
    first = ["root", "1", "0", " ".join(FIRST_PROCESS)]
    ours, mine = ["root", "6", "1", "sleep 3600"], ["1000", "7", "1", "sleep 3600"]
    assert left_in([first, ours], ["root"]) == left_in([first], ["root"]) == left_in([first, mine], None) == []
    assert left_in([first, mine], ["root"]) == left_in([first, ours, mine], None) == ["sleep 3600"]
    assert left_in([first, ["root", "9", "8", "sleep 3600"]], ["root"]) == ["sleep 3600"]
    fake = ["1000", "8", "1", first[3]]
    assert left_in([first, ours, fake], ["root"]) == [first[3]]
    assert left_in([ours], ["root"]) == ["sleep 3600"]
