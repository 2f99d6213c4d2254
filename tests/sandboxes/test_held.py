"""Kinds that keep processes: commands run at once, what they leave lives on, and ``kill_all`` ends every process."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.errors import ConfigError
from rollouts.sandboxes import (
    ContainerSandbox,
    ImageSandbox,
    NamespaceSandbox,
    ProcessSandbox,
    RunningSandbox,
    Sandbox,
    SandboxError,
    archives,
    opened,
    require_abilities,
)
from rollouts.sandboxes.containers import RunningContainer
from rollouts.sandboxes.removal import remove_tree
from tests.sandboxes.kinds import KINDS, KINDS_THAT_KEEP, requested_kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture(params=KINDS_THAT_KEEP)
async def kept(request: pytest.FixtureRequest) -> AsyncIterator[RunningSandbox]:
    kind = requested_kind(request)
    assert isinstance(kind, NamespaceSandbox | ImageSandbox | ContainerSandbox)
    try:
        running = await attrs.evolve(kind, keep_processes=True).open()
    except SandboxError as error:
        if request.param == "container":
            raise
        pytest.skip(f"this machine makes no namespaces: {error}")
    yield running
    await running.close()


async def test_what_a_command_leaves_running_lives_on_until_all_are_killed(kept: RunningSandbox) -> None:
    """Also where it still writes to the output of its command, except in a container, where it gets a broken pipe."""
    where = "> /dev/null" if isinstance(kept, RunningContainer) else ""
    begun = f"(while :; do echo more; sleep 0.01; done) {where} & echo $!"
    end = await kept.exec(["sh", "-c", begun])
    process = end.stdout.split()[0]
    alive = ["sh", "-c", f"sleep 0.1; kill -0 {process}"]
    assert (await kept.exec(alive)).code == 0
    await kept.kill_all()
    assert (await kept.exec(alive)).code == 1


async def test_commands_run_at_once(kept: RunningSandbox) -> None:
    """Each has its own exit, outputs and input; a command that waits for another does not hold it up."""
    await kept.exec(["mkfifo", "pipe"])
    said = {}

    async def run(name: str, script: str, stdin: bytes = b"") -> None:
        end = await kept.exec(["sh", "-c", script], stdin=stdin, seconds=20)
        said[name] = (end.code, end.stdout)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "reader", "cat pipe; exit 3")
        tasks.start_soon(run, "writer", "cat > pipe; echo written", b"x" * 100_000)
        tasks.start_soon(run, "third", "echo three")
    assert said == {"reader": (3, "x" * 65536), "writer": (0, "written\n"), "third": (0, "three\n")}


async def test_a_deadline_kills_the_group_of_its_command_and_no_other(kept: RunningSandbox) -> None:
    """A cancelled command likewise; another command that runs meanwhile is not touched."""
    ends = []

    async def other() -> None:
        ends.append(await kept.exec(["sh", "-c", "sleep 1.5; echo whole"]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        end = await kept.exec(["sh", "-c", "echo begun; sleep 71.5 & sleep 71.5"], seconds=0.6)
        with anyio.move_on_after(0.2):
            await kept.exec(["sh", "-c", "sleep 71.5 & sleep 71.5"])
    assert (end.code, end.stdout, end.timed_out) == (-9, "begun\n", True)
    assert [(end.code, end.stdout) for end in ends] == [(0, "whole\n")]
    assert (await kept.exec(["sh", "-c", "for p in /proc/[0-9]*; do tail -n 1 $p/cmdline; done"])).stdout.count(
        "71.5"
    ) == 0


async def test_a_command_that_is_stopped_at_once_is_killed(kept: RunningSandbox) -> None:
    """Also where it does not lead a group yet."""
    stop = anyio.Event()
    stop.set()
    for _ in range(5):
        began = anyio.current_time()
        assert (await kept.run(["sleep", "8"], seconds=20, stop=stop)).code == -9
        assert anyio.current_time() - began < 5


async def test_all_are_killed_while_commands_run(kept: RunningSandbox) -> None:
    """They end as killed, also a process that left its group; the sandbox runs the next command."""
    ends = []

    async def run(script: str) -> None:
        ends.append(await kept.run(["sh", "-c", script], seconds=30))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "setsid sleep 72.5 & touch ready; sleep 72.5")
        with anyio.fail_after(10):
            while await kept.read("ready") is None:
                await anyio.lowlevel.checkpoint()
        await kept.kill_all()
    assert [(end.code, end.timed_out) for end in ends] == [(-9, False)]
    assert (await kept.exec(["echo", "next"])).stdout == "next\n"


async def test_a_command_has_variables_of_its_own(kept: RunningSandbox) -> None:
    """They replace those of the sandbox, for this command."""
    script = ["sh", "-c", 'echo "$GIVEN|$HOME"']
    assert (await kept.exec(script, env={"GIVEN": "a b", "HOME": "/x"})).stdout == "a b|/x\n"
    assert (await kept.exec(script)).stdout == f"|{kept.home}\n"


@pytest.mark.parametrize("kind", [ProcessSandbox(), NamespaceSandbox(), NamespaceSandbox(keep_processes=True)])
async def test_what_a_kind_cannot_do_is_refused_by_name(kind: Sandbox) -> None:
    """Before work starts, and before a command starts."""
    with pytest.raises(ConfigError, match=r"sandbox: got '\w+'; expected a kind with users; this one has (none|keep)"):
        require_abilities(kind, "users")
    if "keep_processes" not in kind.abilities:
        with pytest.raises(ConfigError, match=r"expected a kind with keep_processes, users; this one has none"):
            require_abilities(kind, "keep_processes", "users")
    try:
        async with opened(kind) as running:
            with pytest.raises(ConfigError, match=r"user: got 'bob'; expected None: \w+ runs commands as one user"):
                await running.exec(["true"], user="bob")
    except SandboxError as error:
        pytest.skip(f"this machine makes no namespaces: {error}")


# -- archives ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[RunningSandbox]:
    try:
        running = await requested_kind(request).open()
    except SandboxError as error:
        if request.param == "container":
            raise
        pytest.skip(f"this machine makes no namespaces: {error}")
    yield running
    await running.close()


async def test_a_folder_is_packed_and_unpacked(sandbox: RunningSandbox, tmp_path: Path) -> None:
    """With links, modes and empty folders; what is missing gives no archive."""
    script = "mkdir -p a/b a/empty; echo x > a/b/f; chmod 741 a/b/f; ln -s /etc/none a/link; mkfifo a/pipe"
    assert (await sandbox.exec(["sh", "-c", script])).code == 0
    archive = tmp_path / "a.tar"
    assert await sandbox.pack("a", archive)
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["a", "a/b", "a/b/f", "a/empty", "a/link", "a/pipe"]
        assert tar.getmember("a/b/f").mode == 0o741
    await sandbox.unpack(archive, "c/d")
    await sandbox.unpack(archive, "c/d")
    check = "test -p c/d/a/pipe && test -d c/d/a/empty && readlink c/d/a/link; cat c/d/a/b/f"
    user = "root" if isinstance(sandbox, RunningContainer) else None  # Podman names root as the owner of all members
    assert (await sandbox.exec(["sh", "-c", check], user=user)).stdout.split()[-1] == "x"
    assert not await sandbox.pack("nothing", tmp_path / "none.tar")
    assert not (tmp_path / "none.tar").exists()


@pytest.mark.parametrize("when", [(1 << 63) - 1, 1 << 40, -(1 << 40)])
async def test_a_file_may_have_any_time(sandbox: RunningSandbox, tmp_path: Path, when: int) -> None:
    """It is packed and unpacked within what can be written; a member with any time is unpacked, too."""
    await sandbox.exec(["sh", "-c", f"mkdir t; echo x > t/f; touch -d @{when} t/f t"])
    assert await sandbox.pack("t", tmp_path / "t.tar")
    with tarfile.open(tmp_path / "t.tar") as tar:
        assert all(0 <= member.mtime <= 1 << 33 for member in tar)
    with tarfile.open(tmp_path / "u.tar", "w") as tar:
        member = tarfile.TarInfo("f")
        member.mtime = when
        tar.addfile(member)
    await sandbox.unpack(tmp_path / "t.tar", "again")
    await sandbox.unpack(tmp_path / "u.tar", "again")
    assert (await sandbox.exec(["cat", "again/t/f"])).stdout == "x\n"


@pytest.mark.timeout(20)
def test_a_deep_tree_is_unpacked_soon(tmp_path: Path) -> None:
    """An agent makes one in a second; if unpacking outlasts the deadline, the rollout gets no verdict."""
    with (tmp_path / "deep.tar").open("wb+") as archive:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for depth in range(1, 1000):
                member = tarfile.TarInfo("/".join("d" * depth))
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
        archive.seek(0)
        archives.unpack(archive, f"{tmp_path}/new", 1 << 30)
    assert os.path.isdir(f"{tmp_path}/new/{'/'.join('d' * 999)}")
    remove_tree(f"{tmp_path}/new")  # pytest's own removal has no stack for it


async def test_a_packed_tree_uses_no_program_of_the_sandbox(sandbox: RunningSandbox, tmp_path: Path) -> None:
    """Nor its stack: a tree deeper than a path can be long, and a file under a hundred folders."""
    deep = "/".join(["d" * 40] * 20)
    script = (
        f"mkdir -p t/{deep}; echo x > t/{deep}/f; cd t; i=0; while [ $i -lt 120 ]; do mkdir {'e' * 60}; cd {'e' * 60}"
    )
    await sandbox.exec(["sh", "-c", f"{script}; i=$((i+1)); done"])
    assert await sandbox.pack("t", tmp_path / "t.tar")
    with tarfile.open(tmp_path / "t.tar") as tar:
        assert f"t/{deep}/f" in tar.getnames()


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("../out", ""),
        ("/out", ""),
        ("link/out", "/tmp"),
        ("link/../out", "/tmp/deep"),
        ("a/../../out", ""),
        ("..", ""),
    ],
)
async def test_a_member_outside_of_the_folder_is_refused(
    sandbox: RunningSandbox, name: str, link: str, tmp_path: Path
) -> None:
    """Also through a link that the archive made before."""
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        if link:
            first = tarfile.TarInfo("link")
            first.type, first.linkname = tarfile.SYMTYPE, link
            tar.addfile(first)
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(SandboxError, match=r"got the member '.*'; expected one inside the folder"):
        await sandbox.unpack(tmp_path / "bad.tar", "in")
    assert not await anyio.Path("/tmp/out").exists()
