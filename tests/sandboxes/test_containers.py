"""The kind ``container``, against a strict fake of the Docker API, and a real daemon where one runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import ContainerSandbox, SandboxError, SandboxLimits, opened
from rollouts.sandboxes.docker_api import DockerApi, DockerError
from tests.sandboxes.docker_daemon import Daemon, daemon

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="the fake daemon runs commands in bubblewrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the fake daemon and the listener in a network need root"),
]
LIMITS = SandboxLimits(output_bytes=1000, file_bytes=1 << 20)


@pytest.fixture
def network() -> Iterator[int]:
    """A process in a separate network namespace, as process 1 of a container is."""
    command = ["unshare", "-n", "sh", "-c", "ip link set lo up 2>/dev/null; echo; exec sleep 99"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"\n":
            pytest.skip("this machine makes no network namespace")
        yield process.pid
        process.kill()


@pytest.fixture
async def fake(network: int) -> AsyncIterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:  # a socket's path is short
        async with daemon(Path(folder)) as state:
            state.pid = network
            yield state


async def test_a_container_is_created_used_and_removed(fake: Daemon) -> None:
    """With the limits of its kind, without network and capabilities; nothing of it is left."""
    async with opened(ContainerSandbox("small:1", fake.socket, limits=LIMITS)) as sandbox:
        (container,) = fake.containers.values()
        host = container.created["HostConfig"]
        assert (host["NetworkMode"], host["CapDrop"], host["SecurityOpt"]) == ("none", ["ALL"], ["no-new-privileges"])
        assert (host["Memory"], host["PidsLimit"]) == (LIMITS.memory_bytes, LIMITS.processes)
        end = await sandbox.run(
            ["sh", "-c", 'pwd; echo "$HOME|$GIVEN"; echo e >&2; exit 3'], {"GIVEN": "x"}, seconds=20
        )
        assert (end.code, end.stdout, end.stderr) == (3, "/workspace\n/home/agent|x\n", "e\n")
    assert (fake.containers, len(fake.removed)) == ({}, 1)


async def test_a_container_that_is_being_created_at_a_cancellation_is_removed(fake: Daemon) -> None:
    """Its creation is not cut: without an answer nothing would know it."""
    fake.hold = asyncio.Event()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ContainerSandbox("small:1", fake.socket).open)
            while not fake.containers:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            fake.hold.set()
    assert (fake.containers, len(fake.removed)) == ({}, 1)


async def test_the_laws_of_a_command(fake: Daemon) -> None:
    """Tails, deadline, cancellation, a missing program, standard input: an ``Exit`` as in every kind."""
    async with opened(ContainerSandbox("small:1", fake.socket, limits=LIMITS)) as sandbox:
        end = await sandbox.run(["sh", "-c", "seq 999; echo q >&2; kill -9 $$"], seconds=20)
        assert (end.code, end.stdout[-8:], len(end.stdout), end.stderr, end.truncated) == (
            -9,
            "998\n999\n",
            1000,
            "q\n",
            True,
        )
        end = await sandbox.run(["sh", "-c", "echo begun; sleep 65.5"], seconds=0.5)
        assert (end.code, end.stdout, end.timed_out) == (-9, "begun\n", True)
        stop = anyio.Event()
        stop.set()
        end = await sandbox.run(["sleep", "67.5"], seconds=20, stop=stop)
        assert (end.code, end.timed_out) == (-9, False)
        with anyio.move_on_after(0.3):
            await sandbox.run(["sleep", "66.5"], seconds=20)
        (container,) = fake.containers.values()
        assert all(process.returncode is not None for process in container.processes)
        end = await sandbox.run(["no-such-program"], seconds=20)
        assert (end.code, "executable file not found" in end.stderr) == (127, True)
        await sandbox.exec(["mkdir", "sub"])
        end = await sandbox.exec(["sh", "-c", "wc -c; pwd"], stdin=b"x" * 300_000, cwd="sub")
        assert end.stdout.split() == ["300000", "/workspace/sub"]


async def test_files_of_a_container(fake: Daemon) -> None:
    """Written with their folders and mode, read back; missing ones are ``None``."""
    async with opened(ContainerSandbox("small:1", fake.socket, limits=LIMITS)) as sandbox:
        await sandbox.write("a/b", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await sandbox.exec(["/workspace/a/b"])).stdout == "ran\n"
        assert [await sandbox.read(path) for path in ("a/b", "a", "c")] == [b"#!/bin/sh\necho ran\n", None, None]
        await sandbox.write("~/x", b"y")
        assert (await sandbox.exec(["cat", "/home/agent/x"])).stdout == "y"
        with pytest.raises(SandboxError, match="expected at most file_bytes=1,048,576"):
            await sandbox.write("big", bytes((1 << 20) + 1))


async def test_the_listener_is_in_the_network_of_the_container(fake: Daemon, network: int) -> None:
    """The server's socket answers there, and is not reached from here."""
    async with opened(ContainerSandbox("small:1", fake.socket)) as sandbox:
        assert sandbox.listener is not None
        assert sandbox.url_inside() == "http://127.0.0.1:8080"
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", 8080), 1):
            pass
        code = "import socket; socket.create_connection(('127.0.0.1', 8080), 5).send(b'hello')"
        python = shutil.which("python3") or "python3"
        command = ["nsenter", f"--net=/proc/{network}/ns/net", python, "-c", code]
        client = await anyio.open_process(command)
        await anyio.wait_readable(sandbox.listener)
        connection, _ = sandbox.listener.accept()
        with connection:
            connection.setblocking(True)
            assert connection.recv(5) == b"hello"
        await client.aclose()


async def test_a_network_that_cannot_be_entered_is_refused(fake: Daemon) -> None:
    """As with a daemon on another machine; the container is removed."""
    fake.pid = 1 << 22
    with pytest.raises(SandboxError, match=r"network: got 'none', but process 4194304's network cannot be entered"):
        await ContainerSandbox("small:1", fake.socket).open()
    assert (fake.containers, len(fake.removed)) == ({}, 1)
    async with opened(ContainerSandbox("small:1", fake.socket, network="bridge")) as sandbox:
        assert sandbox.url_inside(81) == "http://host.docker.internal:81"
        with pytest.raises(ConfigError, match="port: got None"):
            sandbox.url_inside()


async def test_what_the_daemon_refuses_is_an_error(fake: Daemon) -> None:
    """With the request, the status and the daemon's words; and so is a daemon that is not there."""
    with pytest.raises(DockerError, match=r"POST /containers/create at .*: HTTP 404: No such image: none:1"):
        await ContainerSandbox("none:1", fake.socket).open()
    with pytest.raises(SandboxError, match=r"cannot connect: No such file or directory; expected a daemon"):
        await ContainerSandbox("small:1", "/no/such.sock").open()


def test_the_containment_says_what_a_bridge_and_root_are() -> None:
    """A network and root are not contained."""
    assert sorted(ContainerSandbox("a").containment().not_enforced) == ["cpu_seconds", "disk"]
    open_one = ContainerSandbox("a", network="bridge", user="root").containment()
    assert sorted(open_one.not_enforced) == ["cpu_seconds", "disk", "network", "privileges"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": ""}, "ContainerSandbox.image: got ''; expected a non-empty string"),
        ({"image": "a", "network": "host"}, 'ContainerSandbox.network: got \'host\'; expected "none" or "bridge"'),
    ],
)
def test_a_bad_setting_of_a_container_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        ContainerSandbox(**arguments)


async def test_a_real_daemon() -> None:
    """The same with Docker, if a daemon runs and has an image with ``sh``."""
    path = "/var/run/docker.sock"
    try:
        images = await DockerApi(path).json("GET", "/images/json")
    except SandboxError as error:
        pytest.skip(f"no daemon: {error}")
    tags = [
        tag for image in images for tag in image["RepoTags"] or () if tag.startswith(("busybox", "alpine", "debian"))
    ]
    if not tags:
        pytest.skip("the daemon has no image of busybox, alpine or debian")
    async with opened(ContainerSandbox(tags[0], limits=LIMITS)) as sandbox:
        await sandbox.write("a", b"hi")
        end = await sandbox.run(["sh", "-c", "cat a; sleep 67.5"], seconds=1)
        assert (end.stdout, end.timed_out) == ("hi", True)
        assert await sandbox.read("a") == b"hi"
