"""Untrusted Python: what it can do, what it cannot, and that nothing of it is left.

Each attempt to get out is made twice: as an ordinary process, where it succeeds (so the test would see it), and in the
sandbox, where it must not; with namespaces, and without, as on a machine that forbids them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from rollouts.dtypes import Image, Message, Prompt, ToolCall
from rollouts.environments import Environment, Resumable, tool
from rollouts.environments.python_tool import (
    Execution,
    PythonLimits,
    PythonToolEnvironment,
    containment,
    run_python,
)
from rollouts.errors import ConfigError
from rollouts.recipes.environments.retool.tags import CodeTagsEnvironment
from rollouts.sandboxes.containment import REQUIRED, containment_of

MIB = 1 << 20
SECRET = "canary-4b1d"
QUICK = PythonLimits(seconds=20)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is tested on Linux")


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def namespaces(request: pytest.FixtureRequest) -> bool:
    if request.param and not containment().namespaces:
        pytest.skip(f"namespaces are forbidden here: {containment()!r}")
    if set(REQUIRED) & set(containment(request.param).not_enforced):
        pytest.skip(f"what is required by default is not enforced here: {containment(request.param)!r}")
    return bool(request.param)


def openly(code: str, folder: Path, **how: object) -> subprocess.CompletedProcess[str]:
    """Run a program without the sandbox."""
    line = [sys.executable, "-I", "-c", code]
    return subprocess.run(line, cwd=folder, text=True, capture_output=True, timeout=60, check=False, **how)  # type: ignore[call-overload, no-any-return]


def named(name: str) -> list[int]:
    """Processes that gave themselves this name, in whatever namespace they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == name:
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return found


CALL_ME = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)\n"
"""Give this process a name that :func:`named` finds."""


_LIBC = ctypes.CDLL(None)
_LIBC.shmat.restype = ctypes.c_void_p

# -- ways out ---------------------------------------------------------------------------------------------------------


class Scene:
    """The targets that a program may attack, and whether it did."""

    def __init__(self, folder: Path, own: Path) -> None:
        self.folder, self.own = folder, own
        folder.chmod(0o777)
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.victim = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"KEY": SECRET}, stderr=subprocess.DEVNULL
        )
        self.shm = Path(f"/dev/shm/rollouts-{os.getpid()}-{id(self)}")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", 0))
        self.datagrams.setblocking(False)
        self.key = os.getpid() << 8 | id(self) >> 4 & 0xFF
        self.segment = _LIBC.shmget(0, 4096, 0o1666)
        at = _LIBC.shmat(self.segment, None, 0)
        ctypes.memmove(at, SECRET.encode(), len(SECRET))
        _LIBC.shmdt(ctypes.c_void_p(at))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0rollouts-{os.getpid()}-{id(self)}")
        self.abstract.listen()
        self.abstract.setblocking(False)

    def names(self) -> dict[str, object]:
        return {
            "folder": str(self.folder),
            "secret": str(self.secret),
            "victim": self.victim.pid,
            "tester": os.getpid(),
            "shm": str(self.shm),
            "port": self.listener.getsockname()[1],
            "datagrams": self.datagrams.getsockname()[1],
            "abstract": self.abstract.getsockname().decode(),
            "key": self.key,
            "segment": self.segment,
        }

    def close(self) -> None:
        for held in (self.listener, self.datagrams, self.abstract):
            held.close()
        _LIBC.shmctl(self.segment, 0, None)
        self.shm.unlink(missing_ok=True)
        self.victim.kill()
        self.victim.communicate()


def someone_called(held: Callable[[Scene], socket.socket]) -> Callable[[Scene, str], bool]:
    def seen(scene: Scene, printed: str) -> bool:
        try:
            held(scene).accept()[0].close()
        except BlockingIOError:
            return False
        return True

    return seen


def datagram_came(scene: Scene, printed: str) -> bool:
    try:
        return bool(scene.datagrams.recv(10))
    except BlockingIOError:
        return False


def secret_printed(scene: Scene, printed: str) -> bool:
    return SECRET in printed


def out_printed(scene: Scene, printed: str) -> bool:
    return "OUT" in printed


def secret_changed(scene: Scene, printed: str) -> bool:
    return not scene.secret.exists() or scene.secret.read_text() != SECRET


def victim_died(scene: Scene, printed: str) -> bool:
    try:
        scene.victim.wait(0.3)
    except subprocess.TimeoutExpired:
        return "T" in Path(f"/proc/{scene.victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return True


def file_made(scene: Scene, printed: str) -> bool:
    return (scene.folder / "made").exists()


@attrs.frozen
class Escape:
    """An attempt to get out."""

    name: str
    forbidden_by: str
    """The name of the containment that must prevent it."""
    code: str
    seen: Callable[[Scene, str], bool]


TRY = "import os, sys, glob, signal, socket, ctypes, shutil, subprocess, threading\nprint('began', flush=True)\n"
ESCAPES = [
    Escape(
        "a TCP connection",
        "network",
        "socket.create_connection(('127.0.0.1', N['port']), 2)",
        someone_called(lambda scene: scene.listener),
    ),
    Escape(
        "a UDP datagram",
        "network",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', N['datagrams']))",
        datagram_came,
    ),
    Escape(
        "an abstract socket",
        "network",
        "socket.socket(socket.AF_UNIX).connect(N['abstract'])",
        someone_called(lambda scene: scene.abstract),
    ),
    Escape("a virtual machine's socket", "network", "socket.socket(socket.AF_VSOCK); print('OUT')", out_printed),
    Escape("a new file outside", "writing", "open(N['folder'] + '/made', 'w').write('x')", file_made),
    Escape(
        "a link out of the folder",
        "writing",
        "os.symlink(N['folder'], 'link'); open('link/made', 'w').write('x')",
        file_made,
    ),
    Escape("a file changed", "writing", "open(N['secret'], 'w').write('x')", secret_changed),
    Escape("a file cut", "writing", "os.truncate(N['secret'], 0)", secret_changed),
    Escape("a file deleted", "writing", "os.unlink(N['secret'])", secret_changed),
    Escape(
        "a file moved in",
        "writing",
        "os.rename(N['secret'], N['folder'] + '/other')",
        secret_changed,
    ),
    Escape(
        "rights changed",
        "writing",
        "os.chmod(N['secret'], 0o600)",
        lambda scene, printed: scene.secret.stat().st_mode & 0o777 == 0o600,
    ),
    Escape(
        "a time changed",
        "writing",
        "os.utime(N['secret'], (1, 1))",
        lambda scene, printed: scene.secret.stat().st_mtime == 1,
    ),
    Escape(
        "shared memory",
        "writing",
        "open(N['shm'], 'w').write('x')",
        lambda scene, printed: scene.shm.exists(),
    ),
    Escape("a secret file", "reading", "print(open(N['secret']).read())", secret_printed),
    Escape(
        "a secret through a link", "reading", "os.symlink(N['secret'], 'l'); print(open('l').read())", secret_printed
    ),
    Escape(
        "another process's environment",
        "reading",
        "print(open(f\"/proc/{N['victim']}/environ\").read())",
        secret_printed,
    ),
    Escape(
        "every process's environment",
        "reading",
        """
for path in glob.glob('/proc/*/environ'):
    try: print(open(path).read())
    except OSError: pass
""",
        secret_printed,
    ),
    Escape("the tester's memory", "reading", "open(f\"/proc/{N['tester']}/mem\", 'rb'); print('OUT')", out_printed),
    Escape(
        "a shared memory segment of System V",
        "reading",
        f"""
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(N['segment'], None, 0o10000)
if at not in (None, ctypes.c_void_p(-1).value): print(ctypes.string_at(at, {len(SECRET)}).decode())
""",
        secret_printed,
    ),
    Escape(
        "a semaphore left behind",
        "survivors",
        "ctypes.CDLL(None).semget(N['key'], 1, 0o1666)",
        lambda scene, printed: _LIBC.semctl(_LIBC.semget(scene.key, 1, 0), 0, 0) == 0,
    ),
    Escape(
        "a watch on a folder",
        "reading",
        """
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
if libc.inotify_add_watch(watch, b'/tmp', 0x100) >= 0: print('OUT')
""",
        out_printed,
    ),
    Escape(
        "a killed process by the owner of a descriptor",
        "signals",
        """
import fcntl
ours, theirs = os.pipe()
fcntl.fcntl(ours, 10, signal.SIGKILL)
fcntl.fcntl(ours, fcntl.F_SETOWN, N['victim'])
fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
os.write(theirs, b'x')
""",
        victim_died,
    ),
    Escape("a killed process", "signals", "os.kill(N['victim'], signal.SIGKILL)", victim_died),
    Escape("a stopped process", "signals", "os.kill(N['victim'], signal.SIGSTOP)", victim_died),
    Escape(
        "a limit on a process",
        "signals",
        "import resource; resource.prlimit(N['victim'], resource.RLIMIT_NOFILE, (17, 17))",
        lambda scene, printed: " 17 " in Path(f"/proc/{scene.victim.pid}/limits").read_text(),
    ),
    Escape(
        "a process left behind",
        "survivors",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(15, b'left-behind', 0, 0, 0)
        for number in (0, 1, 2): os.close(number)
        import time; time.sleep(60)
    os._exit(0)
os.wait()
""",
        lambda scene, printed: bool([os.kill(pid, signal.SIGKILL) for pid in named("left-behind")]),
    ),
    Escape(
        "a daemon that holds the output",
        "survivors",
        """
if os.fork() == 0:
    os.setsid()
    import time; time.sleep(0.4)
    open(N['folder'] + '/made', 'w').write('x')
    os._exit(0)
""",
        lambda scene, printed: bool(time.sleep(0.8)) or file_made(scene, printed),
    ),
    Escape(
        "thirty processes",
        "processes",
        """
made = 0
for _ in range(30):
    if os.fork() == 0: signal.pause()
    made += 1
    if made > 12: print('OUT', flush=True); os.killpg(0, signal.SIGKILL)
""",
        out_printed,
    ),
    Escape(
        "much memory", "memory", "held = [bytearray(b'x' * (1 << 20)) for _ in range(600)]; print('OUT')", out_printed
    ),
    Escape("a large file", "file_size", "open('large', 'wb').write(bytes(20 << 20)); print('OUT')", out_printed),
    Escape(
        "a full disk",
        "disk",
        "for n in range(9): open(f'f{n}', 'wb').write(bytes(9 << 20))\nprint('OUT')",
        out_printed,
    ),
    Escape(
        "a new namespace",
        "privileges",
        "ctypes.CDLL(None).unshare(0x10000000) == 0 and print('OUT')",
        out_printed,
    ),
    Escape(
        "a secret in the environment",
        "environment",
        "print(os.environ.get('ROLLOUTS_TEST_KEY'))",
        secret_printed,
    ),
    Escape(
        "an open descriptor",
        "descriptors",
        """
for number in range(3, 200):
    try: print(os.pread(number, 99, 0))
    except OSError: pass
""",
        secret_printed,
    ),
]


@contextlib.contextmanager
def inheritable(path: Path) -> Iterator[None]:
    with open(path) as file:
        os.set_inheritable(file.fileno(), True)
        yield


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("ROLLOUTS_TEST_KEY", SECRET)
    folder, own = tmp_path / "outside", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    for parent in [tmp_path, *tmp_path.parents][:3]:  # so that it is the sandbox that refuses, not their rights
        about = parent.stat()
        if about.st_uid == os.getuid() and not about.st_mode & stat.S_ISVTX:
            parent.chmod(about.st_mode | 0o755)
    made = Scene(folder, own)
    yield made
    made.close()


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name.replace(" ", "-"))
async def test_no_way_out(escape: Escape, namespaces: bool, scene: Scene) -> None:
    """The attempt has no effect. (The next test shows that an effect would be seen.)"""
    held = containment(namespaces)
    if escape.forbidden_by in held.not_enforced:
        pytest.skip(f"{escape.forbidden_by} is not enforced: {held.not_enforced[escape.forbidden_by]}")
    code = f"{TRY}N = {scene.names()!r}\n{escape.code}"
    with inheritable(scene.secret):
        done = await run_python(code, limits=QUICK, namespaces=namespaces)
    assert "began" in done.stdout, done
    assert not escape.seen(scene, done.stdout), done


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name.replace(" ", "-"))
def test_the_attempt_would_have_been_seen(escape: Escape, scene: Scene) -> None:
    """The same program in an ordinary process does what it attempts."""
    if escape.name == "a new namespace" and not containment().namespaces:
        pytest.skip("not available on this machine")
    if escape.name == "a virtual machine's socket" and "OUT" not in openly(TRY + escape.code, scene.own).stdout:
        pytest.skip("this kernel has none")
    code = f"{TRY}N = {scene.names()!r}\n{escape.code}"
    with inheritable(scene.secret):
        done = openly(code, scene.own, close_fds=False, start_new_session=True)
    assert escape.seen(scene, done.stdout), done


# -- limits, and programs that do not want to end ---------------------------------------------------------------------


async def ran(code: str, namespaces: bool, stdin: str = "", paths: tuple[str, ...] = (), **limits: float) -> Execution:
    held = PythonLimits(**{"seconds": 20, **limits})  # type: ignore[arg-type]
    return await run_python(code, stdin=stdin, limits=held, paths=paths, namespaces=namespaces)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_flood_is_cut_and_said(stream: str, namespaces: bool) -> None:
    """The beginning is kept, the rest is discarded, and the program runs to its end."""
    code = f"import sys\nfor _ in range(3000): sys.{stream}.write('x' * 1000)\nexit(7)"
    done = await ran(code, namespaces, output_bytes=1000)
    assert getattr(done, stream) == "x" * 1000
    assert (done.truncated, done.exit_code, done.timed_out) == (True, 7, False)
    exact = await ran("print('x' * 999)", namespaces, output_bytes=1000)
    assert (len(exact.stdout), exact.truncated) == (1000, False)


STUBBORN = {
    "signals ignored": """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1)
""",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "an endless flood": "while True: print('x' * 10000)",
    "reads nothing": "import time\ntime.sleep(100)",
    "an exception swallowed": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
}


@pytest.mark.parametrize("name", STUBBORN)
async def test_the_deadline_ends_whatever_runs(name: str, namespaces: bool) -> None:
    """``timed_out`` is set, the delay is small, and no process is left."""
    mark = f"d{os.getpid()}-{'n' if namespaces else 'w'}-{list(STUBBORN).index(name)}"
    code = CALL_ME.format(name=mark) + STUBBORN[name]
    done = await ran(code, namespaces, stdin="x" * MIB, seconds=1.5, output_bytes=10)
    assert done.timed_out, done
    assert 1.5 <= done.seconds < 15
    assert named(mark) == []


async def test_processor_time_is_limited_apart_from_wall_time(namespaces: bool) -> None:
    """CPU time ends a loop, not a wait."""
    looped = await ran("while True: pass", namespaces, cpu_seconds=1)
    assert (looped.timed_out, looped.exit_code) == (True, -signal.SIGXCPU)
    waited = await ran("import time; time.sleep(1.3)", namespaces, cpu_seconds=1)
    assert (waited.timed_out, waited.exit_code) == (False, 0)


@pytest.mark.parametrize("target", ["os.getppid()", "1", "0", "os.getpid()"])
async def test_signals_reach_the_program_alone(target: str, namespaces: bool) -> None:
    """Whatever it kills, the call returns a result."""
    code = f"import os, signal\nprint(1, flush=True)\nfor n in (signal.SIGTERM, signal.SIGKILL): os.kill({target}, n)"
    done = await ran(code, namespaces)
    assert done.stdout == "1\n"
    assert done.exit_code in (-signal.SIGTERM, -signal.SIGKILL, 1, 0), done


async def test_everybody_in_a_process_namespace_is_oneself() -> None:
    """``kill(-1)`` is the worst that a process can do to its user."""
    if not containment().namespaces:
        pytest.skip("too dangerous without namespaces")
    done = await ran("import os, signal\nprint(1, flush=True)\nos.kill(-1, signal.SIGKILL)\nprint(2)", True)
    assert "ProcessLookupError" in done.stderr


async def test_recursion_without_end_is_the_programs_own_death(namespaces: bool) -> None:
    """By a signal or a ``RecursionError``, never ours."""
    deep = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f(y) for y in map(f, [x])]\nf(1)"
    done = await ran(deep, namespaces, memory_bytes=128 * MIB)
    assert done.exit_code != 0
    assert (await ran("def f(): f()\nf()", namespaces)).stderr.endswith("maximum recursion depth exceeded\n")


async def test_memory_that_is_not_there_is_a_memory_error(namespaces: bool) -> None:
    """Which the program may catch."""
    code = "try:\n    x = bytearray(200 << 20)\nexcept MemoryError:\n    print('no')"
    assert (await ran(code, namespaces, memory_bytes=128 * MIB)).stdout == "no\n"


async def test_no_folder_is_left(tmp_path: Path) -> None:
    """Also deep, unreadable and oddly named entries; the target of a link stays."""
    (tmp_path / "kept").write_text("x")
    code = f"""
import os, sys
print(os.getcwd())
os.symlink({str(tmp_path)!r}, "link")
os.mkdir("closed", 0); os.mkdir("\\udcff\\n")
for _ in range(1500):
    os.mkdir("d", 0o700); os.chdir("d")
os.mkdir("closed", 0); open("file", "w").close(); os.symlink({str(tmp_path)!r}, "link")
"""
    done = await ran(code, False)
    assert done.exit_code == 0, done
    assert not await anyio.Path(done.stdout.strip()).exists()
    assert await anyio.Path(tmp_path / "kept").exists()


async def test_a_cancelled_run_is_gone_when_the_cancellation_is(namespaces: bool) -> None:
    """With the processes that it started."""
    mark = f"c{os.getpid()}-{namespaces:d}"
    code = CALL_ME.format(name=mark) + "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
    code += "try: os.fork()\nexcept OSError: pass\ntime.sleep(100)"
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ran, code, namespaces)
            await anyio.to_thread.run_sync(_until, lambda: bool(named(mark)))
            tasks.cancel_scope.cancel()
    assert named(mark) == []


async def test_a_cancelled_run_is_no_failure_of_the_sandbox(namespaces: bool) -> None:
    """A cancelled call raises the cancellation and no other error."""
    mark = f"n{os.getpid()}-{namespaces:d}"
    seen: list[type[BaseException]] = []

    async def run() -> None:
        try:
            await ran(CALL_ME.format(name=mark) + "import time; time.sleep(100)", namespaces)
        except BaseException as error:
            seen.append(type(error))
            raise

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.to_thread.run_sync(_until, lambda: bool(named(mark)))
            tasks.cancel_scope.cancel()
    assert seen == [anyio.get_cancelled_exc_class()]


def test_a_run_dies_with_us(namespaces: bool) -> None:
    """Also when we are killed."""
    mark = f"k{os.getpid()}-{namespaces:d}"
    program = CALL_ME.format(name=mark) + "import time; time.sleep(100)"
    ours = "import anyio, functools\nfrom rollouts.environments.python_tool import *\n"
    ours += f"anyio.run(functools.partial(run_python, {program!r}, limits=PythonLimits(seconds=99), "
    ours += f"namespaces={namespaces}))"
    process = subprocess.Popen([sys.executable, "-c", ours], cwd=Path(__file__).parents[2])
    try:
        _until(lambda: bool(named(mark)))
    finally:
        process.kill()
        process.wait()
    _until(lambda: not named(mark))


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_where_namespaces_are_forbidden_it_says_so_and_goes_on(tmp_path: Path) -> None:
    """A kernel without namespaces: the log lists at the start what is not enforced, with the reason."""
    if not containment().namespaces:
        pytest.skip("they are forbidden here anyway")
    script = """
import ctypes, os, anyio
from pathlib import Path
user, group = os.geteuid(), os.getegid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
from rollouts.environments.python_tool import PythonToolEnvironment, run_python
PythonToolEnvironment()
print(anyio.run(run_python, "print(1 + 1)").stdout)
PythonToolEnvironment(require="all")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, text=True, capture_output=True, check=False)
    assert done.stdout.strip() == "2", done
    assert "disk: NOT ENFORCED, no namespaces here (the sandbox could not be set up: OSError: " in done.stderr
    assert "unshare" in done.stderr
    assert "ConfigError: require: got 'all'; this machine does not enforce disk (no namespaces here (" in done.stderr


UNSHARE, LANDLOCK, PRCTL = {"x86_64": (272, 444, 157), "aarch64": (97, 444, 167)}.get(platform.machine(), (0, 0, 0))
REFUSALS = {
    "namespaces": (UNSHARE, None, errno.EPERM),
    "landlock": (LANDLOCK, None, errno.ENOSYS),
    "seccomp": (PRCTL, 22, errno.EINVAL),
}
"""For each mechanism its system call, the first argument that is refused (``None``: any), and with which error."""

REFUSE = """
import ctypes, struct
step = lambda code, value, yes=0, no=0: struct.pack("=HBBI", code, yes, no, value)
program = step(0x20, 0)
for call, argument, error in {refused!r}:
    refuse = step(0x06, 0x50000 | error)
    if argument is not None:
        refuse = step(0x20, 16) + step(0x15, argument, no=1) + refuse + step(0x06, 0x7FFF0000)
    program += step(0x15, call, no=len(refuse) // 8) + refuse
program += step(0x06, 0x7FFF0000)
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0) == 0
"""


def where_it_lacks(mechanisms: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process whose kernel refuses these mechanisms, as an old kernel or a container does."""
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the numbers of its system calls are not known here")
    refused = [REFUSALS[name] for name in mechanisms]
    root = Path(__file__).parents[2]
    line = [sys.executable, "-c", REFUSE.format(refused=refused) + script]
    return subprocess.run(line, cwd=root, text=True, capture_output=True, check=False, timeout=120)


def test_without_any_mechanism_it_refuses_to_start(tmp_path: Path) -> None:
    """By default, with the names of what is missing, what the machine lacks, and what to pass to run without."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    script = f"""
import anyio
from rollouts.environments.python_tool import PythonToolEnvironment, run_python
from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.rewards import code_tests
program = "print(open({str(secret)!r}).read())"
sample = Sample(messages=[{{"role": "assistant", "content": program}}], metadata={{"test_list": ["assert True"]}})
for start in (PythonToolEnvironment, lambda: anyio.run(run_python, program), lambda: anyio.run(code_tests, sample)):
    try:
        print("started:", start())
    except ConfigError as error:
        print("refused:", error)
"""
    done = where_it_lacks(list(REFUSALS), script)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["refused"] * 3, done
    for line in lines:
        assert "this machine does not enforce network, signals, survivors (no namespaces here (" in line
        assert "unshare: Operation not permitted" in line
        assert "and no system call filter), writing (" in line
        assert "reading (no namespaces here (" in line
        assert "and no Landlock)" in line
        assert line.endswith("pass require=[] to run without")


def test_what_is_missing_is_given_up_by_name() -> None:
    """A kernel without namespaces and Landlock: reading and writing are refused until ``require`` leaves them out."""
    script = """
import anyio, functools
from rollouts.environments.python_tool import PythonToolEnvironment, run_python
from rollouts.errors import ConfigError
try:
    PythonToolEnvironment()
except ConfigError as error:
    print(error)
PythonToolEnvironment(require=["network", "signals", "survivors"])
print(anyio.run(functools.partial(run_python, "print(1 + 1)", require=())).stdout)
"""
    done = where_it_lacks(["namespaces", "landlock"], script)
    refused, ran = done.stdout.split("\n", 1)
    assert ran.strip() == "2", done
    assert "does not enforce writing (" in refused
    assert "reading (" in refused
    assert refused.endswith("pass require=['network', 'signals', 'survivors'] to run without")


def test_landlock_and_seccomp_are_enough_to_start() -> None:
    """Where only namespaces are refused, the default starts and runs."""
    if set(REQUIRED) & set(containment(False).not_enforced):
        pytest.skip(f"this kernel has not both: {containment(False)!r}")
    script = """
import anyio
from rollouts.environments.python_tool import PythonToolEnvironment, run_python
PythonToolEnvironment()
print(anyio.run(run_python, "print(1 + 1)").stdout)
"""
    done = where_it_lacks(["namespaces"], script)
    assert done.stdout.strip() == "2", done


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_is_tried_where_we_may_make_no_namespaces() -> None:
    """Before Landlock alone; its own error is among the reasons if it may not either, as here."""
    script = """
from rollouts.environments.python_tool import PythonToolEnvironment, containment
print(containment().not_enforced["disk"])
PythonToolEnvironment()
"""
    done = where_it_lacks(["namespaces"], script)
    assert "unshare: Operation not permitted" in done.stdout, done
    assert "bwrap: " in done.stdout, done


# -- what a program can do --------------------------------------------------------------------------------------------


async def test_a_program_reads_prints_and_ends(namespaces: bool) -> None:
    """With its input, its streams apart, its exit code, and files while it lasts."""
    code = "import sys\nopen('f', 'w').write(input()[::-1])\nprint(open('f').read())\nsys.stderr.write('e')\nexit(3)"
    done = await ran(code, namespaces, stdin="größer\n")
    assert done == Execution("reßörg\n", "e", 3, False, False, done.seconds)
    assert 0 < done.seconds < 20


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", 'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\n    1 / 0'),
        ("def f(:", '  File "main.py", line 1\n    def f(:'),
        ("x = '\udcff'", "SyntaxError: (unicode error)"),
        ("x = 1\0", "null byte"),
        ("raise SystemExit('bye')", "bye\n"),
    ],
)
async def test_its_errors_are_shown_as_python_shows_them(code: str, words: str) -> None:
    """Without a frame of ours."""
    done = await run_python(code)
    assert words in done.stderr
    assert "<string>" not in done.stderr
    assert done.exit_code == 1


async def test_bytes_that_are_no_text_are_replaced() -> None:
    """A model's program may print anything."""
    done = await run_python("import sys; sys.stdout.buffer.write(b'a\\xffb\\0')")
    assert done.stdout == "a\ufffdb\0"


async def test_packages_are_there_where_they_are_given(namespaces: bool) -> None:
    """Read-only; without them there is the standard library alone."""
    packages = str(Path(np.__file__).parents[1])
    code = "import numpy; print(int(numpy.arange(5).sum())); open(numpy.__file__, 'a')"
    given = await ran(code, namespaces, paths=(packages,), memory_bytes=2048 * MIB)
    assert given.stdout == "10\n", given
    assert given.stderr.strip().startswith("Traceback")
    assert "ModuleNotFoundError" in (await ran(code, namespaces)).stderr


async def test_packages_of_the_base_interpreter_are_hidden(namespaces: bool) -> None:
    """Hardening 20: with packages installed next to the standard library, reference answers would be readable."""
    code = """
import glob, os, sys, sysconfig
paths = glob.glob(os.path.dirname(os.__file__) + "/site-packages/*") + glob.glob("/usr/lib/python*/dist-packages/*")
read = []
for path in paths:
    files = [path] if os.path.isfile(path) else glob.glob(path + "/*.py")
    try: read += [(file, open(file).close()) for file in files]
    except OSError: pass
print(read)
import json.decoder, xml.dom, sqlite3
"""
    done = await ran(code, namespaces)
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_a_package_of_the_base_interpreter_is_there_where_it_is_given(namespaces: bool, tmp_path: Path) -> None:
    """One package below a hidden folder, and not those next to it."""
    (folder,) = glob.glob(f"{sys.base_prefix}/lib/python*/site-packages")
    given = Path(folder, "pip")
    code = f"import os; print(open({str(given)!r} + '/__init__.py').read() != ''); open({folder!r} + '/README.txt')"
    done = await ran(code, namespaces, paths=(str(given),))
    assert done.stdout == "True\n", done
    assert "Error" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only for root is the sandbox's user another one")
def test_a_path_that_the_user_of_the_sandbox_cannot_read_is_named(tmp_path: Path) -> None:
    """A folder of mode 700 as root: named at the start with its remedy, in each mode."""
    script = f"""
from rollouts.environments.python_tool import PythonToolEnvironment
from rollouts.errors import ConfigError
try:
    PythonToolEnvironment(paths=[{str(tmp_path / "home" / "packages")!r}])
except ConfigError as error:
    print(error)
"""
    packages = tmp_path / "home" / "packages"
    packages.mkdir(parents=True)
    packages.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=60, check=False)
    words = f"paths: got '{packages}', which user {{}} of the sandbox cannot read: {packages} has mode 700; expected"
    if containment().namespaces:
        assert words.format(1000) in done.stdout, done
        assert f"chmod o+rx {packages}" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_folder_above_that_forbids_is_named() -> None:
    """Without namespaces the program sees the whole path, and a home of mode 700 stops it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        packages = Path(root, "home", "packages")
        packages.mkdir(parents=True)
        Path(root).chmod(0o755)
        packages.parent.chmod(0o700)
        script = f"""
import os
from rollouts.sandboxes.python.child import UnreadableError, _check_readable
os.seteuid(65534)
try:
    _check_readable({str(packages)!r})
except UnreadableError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=60, check=False)
        assert f"cannot read: {packages.parent} has mode 700; expected a readable folder" in done.stdout, done


def test_a_path_that_does_not_exist_is_refused() -> None:
    """It would be left out without a word, and each import fail."""
    with pytest.raises(ConfigError, match=r"paths: got '/no/such'; expected a folder that exists"):
        PythonToolEnvironment(paths=["/no/such"])


async def test_many_run_at_once(namespaces: bool) -> None:
    """Each has its own folder and its own result; the wait for a slot does not count as its time."""
    answers: dict[int, str] = {}

    async def one(number: int) -> None:
        code = f"open('f', 'x').write('{number}'); print(open('f').read())"
        answers[number] = (await ran(code, namespaces)).stdout

    async with anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(one, number)
    assert answers == {number: f"{number}\n" for number in range(12)}


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "10", True, None])
def test_limits_are_numbers_above_zero(value: object) -> None:
    """Bytes and counts are whole."""
    with pytest.raises(ConfigError, match=r"PythonLimits\.seconds: got .*; expected a number > 0"):
        PythonLimits(seconds=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"PythonLimits\.processes: got 1\.5; expected an integer > 0"):
        PythonLimits(processes=1.5)  # type: ignore[arg-type]


# -- the environment --------------------------------------------------------------------------------------------------


async def answered(environment: PythonToolEnvironment, code: str) -> str:
    reply = Message("assistant", "", tool_calls=(ToolCall("python", {"code": code}, id="1"),))
    (message,) = (await environment.step(reply)).messages
    return message.content


async def test_an_episode_with_the_tool() -> None:
    """The tool returns the output with notes for the model; a reply without a call ends the episode."""
    environment = PythonToolEnvironment(limits=PythonLimits(seconds=3, output_bytes=20))
    assert isinstance(environment, Environment)
    assert isinstance(environment, Resumable)
    assert [entry.name for entry in environment.tools] == ["python"]
    assert [message.role for message in await environment.start(Prompt("6 * 7?"))] == ["system", "user"]
    assert await answered(environment, "print(6 * 7)") == "42"
    assert await answered(environment, "x = 1") == "[no output]"
    assert await answered(environment, "print(x)") == "Traceback (most rece\n[output cut after 20 bytes]\n[exit code 1]"
    assert await answered(environment, "print(1, flush=True)\nwhile 1: pass") == "1\n[stopped: it ran longer than 3 s]"
    await environment.restore(Prompt("6 * 7?"), await environment.snapshot())
    assert (await environment.step(Message("assistant", "42"))).done


def test_what_is_required_must_be_enforced() -> None:
    """By name, before the first episode."""
    held = containment_of(["seccomp", "user"], "not today", "linux")
    assert held.check(["network", "seconds"]) is None
    lacks = r"does not enforce reading \(no namespaces here \(not today\) and no Landlock\)"
    with pytest.raises(ConfigError, match=rf"require: got \['network', 'reading'\]; this machine {lacks}"):
        held.check(["network", "reading"])
    with pytest.raises(ConfigError, match=r"require: got 'reading'; .* pass require=\[\] to run without"):
        held.check("reading")
    with pytest.raises(ConfigError, match=r"require: got 'all'; this machine does not enforce disk \("):
        held.check("all")
    with pytest.raises(ConfigError, match=r"require: got 'netwrok'; expected \"all\" or some of seconds, "):
        PythonToolEnvironment(require=["netwrok"])


# -- images -----------------------------------------------------------------------------------------------------------

PNG = """
import os, struct, zlib

def png(path, width, height, colour=(200, 30, 40)):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = (b"\\0" + bytes(colour) * width) * height
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), chunk(b"IDAT", zlib.compress(rows))]
    with open(path, "wb") as file:
        file.write(b"\\x89PNG\\r\\n\\x1a\\n" + b"".join(parts) + chunk(b"IEND", b""))
"""
"""For a program that writes a PNG file without a library."""


async def saved(code: str, namespaces: bool, **limits: int) -> Execution:
    chosen = attrs.evolve(QUICK, **limits)
    return await run_python(PNG + code, limits=chosen, namespaces=namespaces, images=True)


async def test_the_files_of_the_folder_images_are_returned(namespaces: bool) -> None:
    """In the order of their names, also of a program that fails; without ``images`` there is no such folder."""
    code = "png('images/b.png', 3, 2); open('images/a.txt', 'w').write('hello'); png('c.png', 1, 1); 1 / 0"
    done = await saved(code, namespaces)
    assert [(file.name, file.size) for file in done.images] == [
        ("a.txt", 5),
        ("b.png", len(done.images[1].data or b"")),
    ]
    assert done.images[0].data == b"hello"
    image = Image.of(done.images[1].data)
    assert (image.width, image.height, image.to_pil().getpixel((2, 1))) == (3, 2, (200, 30, 40))
    assert (done.exit_code, done.more_images) == (1, 0)
    done = await run_python("import os; print(os.listdir())", limits=QUICK, namespaces=namespaces)
    assert (done.stdout, done.images) == ("['main.py']\n", ())


async def test_returned_files_are_bounded_in_number_and_bytes(namespaces: bool) -> None:
    """The first by name are returned; a larger one has no data, and the others are counted."""
    code = "for name in 'dcba': open(f'images/{name}', 'wb').write(bytes(ord(name) - 95))"
    done = await saved(code, namespaces, images=3, image_bytes=3)
    assert [(file.name, file.size, file.data) for file in done.images] == [
        ("a", 2, bytes(2)),
        ("b", 3, bytes(3)),
        ("c", 4, None),
    ]
    assert done.more_images == 1


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("os.symlink('/etc/passwd', 'images/a'); os.mkfifo('images/b'); os.mkdir('images/c')", ["a", "b", "c"]),
        ("os.umask(0o777); open('images/a', 'w').write('x')", ["a"]),
        ("os.rmdir('images'); os.symlink('/etc', 'images')", []),
        ("os.rmdir('images'); open('images', 'w').write('x')", []),
        ("os.rmdir('images'); os.mkdir('images', 0)", []),
        ("open(b'images/\\xff', 'w').write('x')", ["\ufffd"]),
    ],
    ids=["no plain files", "unreadable", "a link", "a file", "unreadable folder", "no UTF-8"],
)
async def test_only_plain_files_of_the_folder_are_read(code: str, names: list[str], namespaces: bool) -> None:
    """A link is not followed, a pipe is not waited for, and what cannot be read is a file without data."""
    done = await saved(code, namespaces)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [file.name for file in done.images] == names
    assert [file.data for file in done.images if file.name != "\ufffd"] == [None] * len(set(names) - {"\ufffd"})


async def test_a_name_of_a_file_is_no_message_of_the_sandbox() -> None:
    """A file that is named like the program's start does not move the deadline."""
    done = await saved("open('images/begun', 'w'); open('images/\\n{\"exit\": 7}', 'w')", containment().namespaces)
    assert (done.exit_code, [file.name for file in done.images]) == (0, ['\n{"exit": 7}', "begun"])
    assert done.seconds > 0


async def seen(code: str, **options: Any) -> tuple[Any, Any]:
    environment = PythonToolEnvironment(images=True, **{"limits": QUICK, **options})
    step = await environment.step(
        Message("assistant", "", tool_calls=(ToolCall("python", {"code": PNG + code}, id="1"),))
    )
    return step.messages[0].content, step.metrics


async def test_the_model_sees_the_images_that_its_program_saves() -> None:
    """After the output, each after its name; a file that is not an image is described and counted."""
    code = "print(6 * 7); png('images/a.png', 3, 2); png('images/b.png', 2, 2); open('images/c.png', 'w').write('no')"
    content, metrics = await seen(code)
    first, shown, second, other, rest = content
    assert (first, second) == ("42\n[images/a.png]\n", "\n[images/b.png]\n")
    assert (shown.width, other.width) == (3, 2)
    assert rest == "\n[images/c.png is not shown: 2 bytes; expected a PNG]"
    assert metrics == {"tool_errors": 0, "images_not_shown": 1}
    (only, _), _ = await seen("png('images/a.png', 3, 2)")
    assert only == "[images/a.png]\n"
    assert await seen("pass") == ("[no output]", {"tool_errors": 0, "images_not_shown": 0})
    assert (await seen("png('images/a.png', 3, 2); 1 / 0"))[0][-1] == "\n[exit code 1]"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("png('images/a', 9, 9)", r"images/a is not shown: \d+ bytes; expected at most 60 bytes"),
        ("os.mkdir('images/a')", "images/a is not shown: expected a file"),
        (
            "open('images/a', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + b'x' * 9)",
            r"images/a is not shown: 17 bytes; expected an image that Pillow decodes as .*",
        ),
        ("[open(f'images/{n}', 'w') for n in range(5)]", "3 further files of images: not shown; expected at most 2"),
    ],
    ids=["large", "folder", "broken", "many"],
)
async def test_a_file_that_is_not_shown_is_described(code: str, expected: str) -> None:
    """With what was expected, and it is counted."""
    content, metrics = await seen(code, limits=attrs.evolve(QUICK, images=2, image_bytes=60))
    assert re.fullmatch(rf"\[{expected}\]", content.splitlines()[-1])
    assert metrics["images_not_shown"] == (5 if "range" in code else 1)


async def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    """A few bytes can hold one."""
    code = (
        "png('images/a.png', 1, 1); file = open('images/a.png', 'r+b'); data = bytearray(file.read())\n"
        "data[16:24] = struct.pack('>II', 9000, 9000); data[29:33] = struct.pack('>I', zlib.crc32(data[12:29]))\n"
        "file.seek(0); file.write(data)"
    )
    content, _ = await seen(code)
    assert content == "[images/a.png is not shown: 69 bytes; expected at most 67,108,864 pixels]"


async def test_a_program_that_is_stopped_shows_no_images() -> None:
    """Its files end with it."""
    content, metrics = await seen("png('images/a.png', 3, 2)\nwhile 1: pass", limits=attrs.evolve(QUICK, seconds=1))
    assert (content, metrics["images_not_shown"]) == ("[stopped: it ran longer than 1 s]", 0)


class WithNotes(PythonToolEnvironment):
    @tool
    def note(self, text: str) -> str:
        """Keep a note."""
        return text


def test_the_tool_says_where_images_go() -> None:
    """In its description, and in no other tool's; an environment that answers in text takes no images."""
    assert sorted(one.description for one in WithNotes(images=True).tools if "images/" not in one.description) == [
        "Keep a note."
    ]
    (one,), (other,) = PythonToolEnvironment().tools, PythonToolEnvironment(images=True).tools
    assert "images" not in one.description
    assert "images/" in other.description
    assert one.parameters == other.parameters
    with pytest.raises(TypeError, match="images"):
        CodeTagsEnvironment(images=True)  # type: ignore[call-arg]


async def test_a_figure_of_matplotlib_is_seen() -> None:
    """Saved in the folder, or shown: ``show`` saves every open figure there and closes it."""
    matplotlib = pytest.importorskip("matplotlib")
    code = """
import matplotlib.pyplot as plt
plt.figure(figsize=(2, 1), dpi=50); plt.plot([1, 2]); plt.savefig("images/mine.png"); plt.close()
plt.figure(figsize=(1, 1), dpi=50); plt.figure(figsize=(3, 1), dpi=50); plt.show()
plt.figure(figsize=(1, 2), dpi=50); plt.show(); plt.show()
"""
    packages = str(Path(matplotlib.__file__).parents[1])
    limits = attrs.evolve(QUICK, seconds=60, cpu_seconds=60)  # only so that a busy machine does not stop it
    content, metrics = await seen(code, paths=[packages], limits=limits)
    names = [part.strip() for part in content if isinstance(part, str)]  # no line on fonts before them
    assert names == [*(f"[images/figure-{number}.png]" for number in ("001", "002", "003")), "[images/mine.png]"]
    sizes = [(part.width, part.height) for part in content if isinstance(part, Image)]
    assert sizes == [(50, 50), (150, 50), (50, 100), (100, 50)]
    assert metrics["images_not_shown"] == 0
