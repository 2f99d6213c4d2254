"""The kind ``image``: the files and the users of an image, contained, and nothing left of it."""

from __future__ import annotations

import glob
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from rollouts.errors import ConfigError
from rollouts.sandboxes import Image, ImageSandbox, SandboxError, SandboxLimits, load_image, opened
from rollouts.sandboxes.control_groups import make_groups
from rollouts.sandboxes.held import RunningHeld
from tests.sandboxes.roots import small_root

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="Linux, as root")
MIB = 1 << 20
LIMITS = SandboxLimits(memory_bytes=256 * MIB, processes=20, disk_bytes=8 * MIB, file_bytes=4 * MIB)


async def opened_here(**settings: Any) -> RunningHeld:
    try:
        return await ImageSandbox(**{"image": small_root(), "workdir": "/work", "limits": LIMITS, **settings}).open()
    except SandboxError as error:
        pytest.skip(f"this machine makes no namespaces, or no overlay in them: {error}")


@pytest.fixture
async def box() -> AsyncIterator[RunningHeld]:
    running = await opened_here()
    yield running
    await running.close()


async def sh(box: RunningHeld, script: str, **options: Any) -> str:
    """The output of a script, to both streams."""
    end = await box.exec(["sh", "-c", f"{{ {script}; }} 2>&1"], seconds=20, **options)
    return end.stdout.strip()


def children_of(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def users_of(process: int) -> list[str]:
    """Its users outside: real, effective, saved, and of its files."""
    return Path(f"/proc/{process}/status").read_text().split("Uid:")[1].split()[:4]


def chain_of(box: RunningHeld) -> list[int]:
    """The launcher, the gate and the holder."""
    assert box.process is not None
    (gate,) = children_of(box.process.pid)
    return [box.process.pid, gate, *children_of(gate)[:1]]


async def test_a_holder_that_reads_nothing_blocks_no_caller() -> None:
    """The request that it does not read ends at its deadline, also of a caller that is cancelled, with the sandbox."""
    box = await opened_here()
    box.send_seconds = 0.5
    holder = chain_of(box)[-1]
    os.kill(holder, signal.SIGSTOP)
    with anyio.fail_after(20):
        with pytest.raises(SandboxError, match=r"a request is not read 0\.5 s after it was sent"):
            await box.write("large", bytes(4 * MIB))
        await box.close()
        while await anyio.Path(f"/proc/{holder}").exists():
            await anyio.lowlevel.checkpoint()
        for _ in range(3):  # the event loop closes the pipe with the rest of the request
            await anyio.lowlevel.checkpoint()


async def test_a_holder_without_descriptors_starts_nothing_and_lives() -> None:
    """The command ends with 127 and the reason; with a descriptor to spare the next one runs."""
    box = await opened_here(keep_processes=True)
    holder = chain_of(box)[-1]
    before = resource.prlimit(holder, resource.RLIMIT_NOFILE)
    resource.prlimit(holder, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{holder}/fd")) + 1, before[1]))
    end = await box.exec(["echo", "x"])
    assert (end.code, end.stderr) == (127, "echo: Too many open files\n")
    resource.prlimit(holder, resource.RLIMIT_NOFILE, before)
    assert await sh(box, "echo next") == "next"
    await box.close()


# -- what the program sees --------------------------------------------------------------------------------------------


async def test_the_image_is_written_over_and_never_changed(box: RunningHeld) -> None:
    """A program that is root may change every file of it; the next sandbox sees the image."""
    assert await sh(box, "id -u; cat /etc/secret") == "0\nof root"
    change = "echo mine > /etc/secret; rm -r /home/bob; echo x > /new; chown 1000 /bin/ls; cat /etc/secret"
    assert await sh(box, change) == "mine"
    root = Path(small_root())
    assert ((root / "etc/secret").read_text(), (root / "home/bob").is_dir()) == ("of root\n", True)
    assert not (root / "new").exists()
    assert (root / "bin/ls").stat().st_uid == 0
    again = await opened_here()
    assert await sh(again, "cat /etc/secret; ls /home; test -e /new || echo none") == "of root\nbob\nnone"
    await again.close()


async def test_upper_layers_cover_lower_ones(tmp_path: Path) -> None:
    """Several folders are one root, the first on top."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/secret").write_text("of the layer\n")
    os.chmod(tmp_path, 0o755)
    box = await opened_here(image=Image([str(tmp_path), small_root()]))
    assert await sh(box, "cat /etc/secret; ls /home") == "of the layer\nbob"
    await box.close()


async def test_users_are_those_of_the_image() -> None:
    """By name, number or with a group: their rights, groups and home; files of root stay closed to them."""
    box = await opened_here(user="bob")
    assert (box.home, box.workspace) == ("/home/bob", "/work")
    assert await sh(box, "id -u; id -G; pwd; echo $HOME $USER; touch file && ls -ln file | grep -c ' 1000 '") == (
        "1000\n1000 2000\n/work\n/home/bob bob\n1"
    )
    assert "Permission denied" in await sh(box, "cat /etc/secret")
    await box.write("~/deep/file", b"x")
    assert await sh(box, "ls -ln ~/deep/file | grep -c ' 1000 '; rm ~/deep/file && echo gone") == "1\ngone"
    assert await sh(box, "cat /etc/secret; echo $HOME; grep CapBnd /proc/self/status", user="root") == (
        "of root\n/root\nCapBnd:\t00000000a80405fb"
    )
    assert await sh(box, "id -u; id -g", user="7:team") == "7\n2000"
    end = await box.exec(["true"], user="eve")
    assert (end.code, end.stderr) == (127, "true: user 'eve' is not in /etc/passwd\n")
    await box.close()


async def test_root_of_the_image_has_no_rights_outside(box: RunningHeld) -> None:
    """Its processes, and its files where they were seen from outside, belong to a user without rights."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sh, box, "sleep 74.5")
        with anyio.fail_after(10):
            while not (running := children_of(chain_of(box)[-1])):
                await anyio.lowlevel.checkpoint()
        assert users_of(running[0]) == [str(1 << 30)] * 4
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 1; echo $?; cat /proc/1/environ", "0\ncat: /proc/1/environ: Permission denied"),
        ("ls /proc/1/fd/", "Permission denied"),
        ("cat /proc/1/mem", "Permission denied"),
        ("echo 1 > /proc/sys/kernel/core_pattern", "Permission denied"),
        ("echo 99 > /proc/sys/user/max_user_namespaces", "Permission denied"),
        ("cat /proc/kcore; cat /proc/kmsg", "Permission denied"),
        ("i=0; while [ $i -lt 60 ]; do sleep 5 & i=$((i+1)); done", "Cannot fork"),
        ("cat /dev/zero > big", "File too large"),
        ("for n in 1 2 3 4; do cat /bin/* /bin/* > big$n; done", "No space left on device"),
        ("set -- /proc/[0-9]*; echo $#", "2"),  # process 1, and the shell
        (
            "echo x > /dev/null && echo $(ls /dev)",
            "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero",
        ),
    ],
)
async def test_what_root_of_the_image_may_not_do(box: RunningHeld, script: str, words: str) -> None:
    """Reach the holder or the machine, get privileges, take more than the limits."""
    assert words in await sh(box, script)


async def test_only_the_listener_is_reached(box: RunningHeld) -> None:
    """Or with ``network="host"`` the servers of this machine, and then there is no listener."""
    assert box.listener is not None
    assert (box.url_inside(), "network" in ImageSandbox(small_root()).containment().enforced) == (
        "http://127.0.0.1:8080",
        True,
    )
    inside = await sh(box, "cat /proc/net/dev | grep -c :; cat /proc/net/tcp | grep -c ':1F90 '")
    assert inside == "1\n1"  # one interface, and one server at port 8080
    open_box = await opened_here(network="host")
    assert (open_box.listener, open_box.url_inside(81)) == (None, "http://127.0.0.1:81")
    with pytest.raises(ConfigError, match="port: got None"):
        open_box.url_inside()
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen = await sh(open_box, f"grep -c ':{server.getsockname()[1]:04X} ' /proc/net/tcp")
        assert int(seen) > 0
    assert "network" in ImageSandbox(small_root(), network="host").containment().not_enforced
    await open_box.close()


async def test_all_processes_together_have_memory_and_processors() -> None:
    """By control groups, which are gone with the sandbox, also where its launcher or we are killed."""
    box = await opened_here()
    await box.close()
    settings: dict[str, Any] = {"cpus": 0.2, "memory_bytes": 136 * MIB, "limits": LIMITS}
    try:
        box = await ImageSandbox(small_root(), **settings).open()
    except SandboxError as error:
        pytest.skip(f"no control groups: {error}")
    groups = box.settings["groups"]
    assert existing(groups) == groups
    end = await box.run(["sh", "-c", "grep -a x /dev/zero & grep -a x /dev/zero; wait; echo done"], seconds=30)
    assert end.stdout in ("done\n", "")  # the kernel kills one process or more, never the holder
    assert (await box.exec(["echo", "next"])).stdout == "next\n"
    await box.run(["sh", "-c", "while :; do :; done"], seconds=1.0)
    assert "nr_throttled 0\n" not in content(f"{groups[-1]}/cpu.stat")
    assert "oom_kill 0\n" not in content(f"{groups[0]}/memory.oom_control")
    await box.close()
    assert existing(groups) == []
    for number in range(3):
        box = await ImageSandbox(small_root(), **settings).open()
        os.kill(chain_of(box)[number], signal.SIGKILL)
        await box.close()
        assert existing(box.settings["groups"]) == []


def existing(paths: list[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


def content(path: str) -> str:
    """That of a file of control groups; nothing where their version does not have it."""
    return Path(path).read_text() if os.path.exists(path) else ""


def test_control_groups_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    """By the limit's name; none is left."""
    with pytest.raises(SandboxError, match=r"memory and cpus: no control group can be made \(.*: No such file or dir"):
        make_groups(1 << 20, 2, str(tmp_path))
    (tmp_path / "memory").mkdir()
    with pytest.raises(SandboxError, match="expected to be root on a machine whose control groups can be written"):
        make_groups(1 << 20, 2, str(tmp_path))


# -- a hostile image --------------------------------------------------------------------------------------------------


async def test_the_holder_runs_nothing_that_a_program_wrote(box: RunningHeld, tmp_path: Path) -> None:
    """Modules and libraries that a program plants are not loaded, and a pipe in place of a table is not waited for."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [f"/usr/lib/{version}", f"{sys.base_prefix}/lib/{version}", "/lib", "/"]
    plant = "import os; os.mkdir('/caught')"
    for place in places:
        for name in ("sitecustomize", "grp", "bz2", "traceback", "encodings/idna"):
            await box.write(f"{place}/{name}.py", plant.encode())
    await sh(box, "echo 'passwd: planted' > /etc/nsswitch.conf; echo x > /lib/libnss_planted.so.2")
    await sh(box, "mkdir made; touch made/f")
    await sh(box, "rm /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group")
    with anyio.fail_after(10):
        assert (await box.exec(["true"], user="root")).code == 0
        assert (await box.exec(["true"], user="bob")).code == 127
        assert await box.pack("/work", tmp_path / "w.tar")
        await box.unpack(tmp_path / "w.tar", "/back")
        assert await box.read("\udcff") is None
        await box.kill_all()
    assert await sh(box, "ls /back/work/made; test -e /caught || echo clean") == "f\nclean"


async def test_the_user_of_the_kind_is_known_without_the_tables_of_the_image() -> None:
    """A program that is root and deletes or changes them keeps no command and no file of its user from us."""
    box = await opened_here(user="bob")
    await sh(box, "rm /etc/group; echo 'bob:x:0:0::/root:/bin/sh' > /etc/passwd", user="root")
    await box.write("file", b"x")
    assert await sh(box, "id -u; id -G; echo $HOME; ls -ln file | grep -c ' 1000 '") == "1000\n1000 2000\n/home/bob\n1"
    await box.close()


async def test_links_of_a_program_lead_nowhere_outside(box: RunningHeld, tmp_path: Path) -> None:
    """Our reads and writes through them stay in the sandbox."""
    (tmp_path / "canary").write_text("canary")
    await sh(box, f"ln -s {tmp_path} out; ln -s {tmp_path}/canary file")
    assert await box.read("file") is None
    await box.write("file", b"own")
    assert await box.read("file") == b"own"
    assert await box.read("/proc/1/root/etc/passwd") == await box.read("/etc/passwd")
    assert (tmp_path / "canary").read_text() == "canary"


# -- its end ----------------------------------------------------------------------------------------------------------


def left() -> tuple[list[str], int]:
    """The processes of the users of images, and the mounts of images that this process sees."""
    processes = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            users = users_of(int(number))
            line = Path(f"/proc/{number}/cmdline").read_bytes()
        except OSError:
            continue
        if str(1 << 30) in users and b"75.5" in line:
            processes.append(number)
    return processes, Path("/proc/self/mountinfo").read_text().count("upperdir=/usr/upper")


def files_of(root: str) -> list[str]:
    return sorted(str(path) for path in Path(root).rglob("*"))


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How many processes are killed: fifty with ``--long``."""
    return 50 if request.config.getoption("--long") else 6


async def last_words(box: RunningHeld) -> str:
    """The error of the first command that is refused."""
    while True:
        try:
            await box.exec(["true"])
        except SandboxError as error:
            return str(error)


async def test_a_killed_holder_leaves_nothing(kills: int) -> None:
    """Nor a killed launcher or gate: no process, no mount and no folder; the next call is an error of the sandbox."""
    await (await opened_here()).close()
    files, before = files_of(small_root()), left()
    for number in range(kills):
        box = await opened_here(keep_processes=True)
        await sh(box, "setsid sleep 75.5 > /dev/null & sleep 75.5 > /dev/null & echo")
        os.kill(chain_of(box)[number % 3], signal.SIGKILL)
        with anyio.fail_after(20):
            assert "the sandbox ended" in await last_words(box)
        await box.close()
    with anyio.fail_after(10):
        while left() != before:
            await anyio.lowlevel.checkpoint()
    assert files_of(small_root()) == files


async def test_a_killed_process_of_ours_leaves_nothing(kills: int) -> None:
    """With programs under way in several sandboxes."""
    await (await opened_here()).close()
    before, grouped = left(), os.access("/sys/fs/cgroup/cpu", os.W_OK)
    code = f"""
import anyio
from rollouts.sandboxes import ImageSandbox
async def main():
    settings = {{"keep_processes": True, "cpus": 1 if {grouped} else None}}
    boxes = [await ImageSandbox({small_root()!r}, **settings).open() for _ in range(2)]
    async with anyio.create_task_group() as group:
        for box in boxes:
            group.start_soon(lambda box=box: box.run(["sleep", "75.5"], seconds=60))
            await box.exec(["sh", "-c", "setsid sleep 75.5 > /dev/null &"])
        print("begun", flush=True)
anyio.run(main)
"""
    for _ in range(max(1, kills // 6)):
        process = await anyio.open_process([sys.executable, "-c", code])
        assert process.stdout is not None
        try:
            assert await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 99) == b"begun"
        finally:
            process.kill()
            await process.aclose()
        with anyio.fail_after(20):
            while grouped and glob.glob(f"/sys/fs/cgroup/cpu/rollouts-{process.pid}-*"):  # the launcher removes them
                await anyio.lowlevel.checkpoint()
        with anyio.fail_after(20):
            while left() != before:
                await anyio.lowlevel.checkpoint()


async def test_no_descriptor_is_lost() -> None:
    """Opening and closing leaves as many descriptors as before."""
    await (await opened_here()).close()
    before = len(os.listdir("/proc/self/fd"))
    async with opened(ImageSandbox(small_root())) as box:
        await box.exec(["true"])
    assert len(os.listdir("/proc/self/fd")) == before


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"image": "/no/such"}, "Image.roots: got '/no/such'; expected absolute paths of folders that exist"),
        ({"workdir": "work"}, "ImageSandbox.workdir: got 'work'; expected an absolute path, or None"),
        ({"network": "bridge"}, 'ImageSandbox.network: got \'bridge\'; expected "none" or "host"'),
        ({"cpus": 0}, "ImageSandbox.cpus: got 0; expected a number > 0"),
        ({"memory_bytes": 0.5}, "ImageSandbox.memory_bytes: got 0.5; expected an integer >= 1"),
        (
            {"memory_bytes": 1 << 30},
            "ImageSandbox.memory_bytes: got 1073741824; expected at least 1,207,959,552",
        ),
        ({"user": ""}, "ImageSandbox.user: got ''; expected a user of the image, or None"),
        ({"keep_processes": 1}, "ImageSandbox.keep_processes: got 1; expected True or False"),
    ],
)
def test_a_bad_setting_of_an_image_sandbox_is_refused(arguments: dict[str, Any], words: str) -> None:
    """By name, when the kind is made."""
    with pytest.raises(ConfigError, match=words):
        ImageSandbox(**{"image": small_root(), **arguments})


async def test_a_user_that_the_image_lacks_is_an_error_of_the_set_up() -> None:
    """With its name, and nothing is left."""
    await (await opened_here()).close()
    with pytest.raises(SandboxError, match=r"image: the sandbox could not be set up: .*user 'eve' is not in /etc/pass"):
        await ImageSandbox(small_root(), user="eve").open()


def test_kinds_with_the_same_settings_are_equal() -> None:
    """So that a check before a run opens each once."""
    one = ImageSandbox(load_image(small_root()), env={"A": "b"})
    assert one == ImageSandbox(small_root(), env={"A": "b"})
    assert one != attrs.evolve(one, user="bob")
