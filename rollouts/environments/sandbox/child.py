"""The inside: what the warden's child does to itself before it becomes the program that is not trusted.

Invariant: each step is taken before the program begins, in the process that the program will be or descend from; a step
that fails is told to the warden, and the program does not begin. In namespaces the program sees a file system of its
own, with the interpreter and the system's libraries read-only and one folder of memory to write to.

The chain is warden, gate (enters the namespaces), init (their process 1; builds the file system, gives up privileges,
waits), program. Without namespaces the gate is its own init.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
from collections.abc import Sequence
from typing import Any

from rollouts.environments.sandbox import kernel, seccomp

__all__ = ["INNER_USER", "SYSTEM", "enter", "outer_user"]

INNER_USER = 1000
"""Who the program is, as it sees itself in its namespace."""
NOBODY = 65534
"""Who it is outside, where the warden is root."""

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_BOOT = """
import site, sys
site.setquit()
sys.path = [{folder!r}, *sys.path, *{paths!r}]
sys.argv = ["main.py"]
sys.excepthook = lambda kind, error, trace, show=sys.__excepthook__: show(
    kind, error.with_traceback(trace and trace.tb_next), None
)
__file__ = "main.py"
del site, sys
exec(compile(open("main.py", "rb").read(), "main.py", "exec"))
"""


def outer_user() -> int:
    """The user outside that the program runs as: never root where root can become somebody else."""
    return os.geteuid() or NOBODY


def enter(
    request: dict[str, Any],
    folder: str,
    code: bytes,
    streams: tuple[int, int, int],
    status: int,
    go: int,
    not_ours: Sequence[int],
) -> None:
    """Become the program, without the descriptors that are the warden's. Never returns."""
    try:
        for number in not_ours:
            os.close(number)
        _enter(request, folder, code, streams, status, go)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the warden must hear of it
        _tell(status, broken=f"{type(error).__name__}: {error}")
    os._exit(1)


def _enter(
    request: dict[str, Any], folder: str, code: bytes, streams: tuple[int, int, int], status: int, go: int
) -> None:
    os.setsid()
    os.umask(0o022)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    mechanisms: list[str] = []
    if request["namespaces"]:
        kernel.die_with_parent()
        kernel.unshare(kernel.NAMESPACES)
        _tell(status, unshared=os.getpid())
        if os.read(go, 1) != b"g":
            raise OSError("the warden did not let it go on")
        init = os.fork()
        if init:
            os.close(status)
            for number in (*streams, go):
                os.close(number)
            os.waitpid(init, 0)
            os._exit(0)
        kernel.set_hostname(b"sandbox")
        _build_root(request, folder)
        user, folder = INNER_USER, "/tmp/work"
        os.chown(folder, user, user)
        mechanisms.append("namespaces")
    else:
        user = _plain_user(request, folder)
    if request["linux"]:
        _give_up_privileges(user, go)
    os.chdir(folder)
    with open("main.py", "wb") as file:
        file.write(code)
    if request["linux"] and not request["namespaces"] and kernel.landlock_abi():
        rules = kernel.Landlock()
        rules.allow([*SYSTEM, *_SYSTEM_FILES, *request["readable"]], write=False)
        rules.allow([*_DEVICES, folder], write=True)
        rules.close_the_door()
        mechanisms.append("landlock")
    if os.geteuid() != 0 or request["namespaces"]:
        mechanisms.append("user")
    program = os.fork()
    if program == 0:
        _become_program(request, folder, mechanisms, streams, status)
    for number in streams:
        os.close(number)
    _wait_for(program, status)


def _give_up_privileges(user: int, go: int) -> None:
    kernel.drop_capabilities(user, user)
    kernel.no_new_privileges()
    kernel.hide_from_tracers()
    kernel.die_with_parent()
    hung_up = select.poll()
    hung_up.register(go, select.POLLHUP)
    if hung_up.poll(0):
        os._exit(1)  # the warden ended before the kernel knew our wish
    os.close(go)


def _plain_user(request: dict[str, Any], folder: str) -> int:
    """Nobody where we are root and nobody can run the interpreter; otherwise who we are."""
    if os.geteuid() != 0:
        return os.getuid()
    try:
        os.seteuid(NOBODY)
    except OSError:
        return 0
    can = all(os.access(path, os.R_OK, effective_ids=True) for path in [*request["readable"], request["python"]])
    os.seteuid(0)
    if can:
        os.chown(folder, NOBODY, NOBODY)
    return NOBODY if can else 0


# -- the file system --------------------------------------------------------------------------------------------------


def _build_root(request: dict[str, Any], folder: str) -> None:
    """A root of our own: what may be read, bound read-only; devices; and ``/tmp``, of limited size, in memory."""
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    folders = [path for path in SYSTEM if path not in links]
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    limits = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", folder, "tmpfs", limits, "size=1m,mode=755")
    os.mkdir(f"{folder}/old")
    kernel.pivot_root(folder, f"{folder}/old")
    os.chdir("/")
    os.mkdir("/tmp")
    inodes = max(256, request["disk_bytes"] // 4096)
    kernel.mount("tmpfs", "/tmp", "tmpfs", limits, f"size={request['disk_bytes']},nr_inodes={inodes},mode=1777")
    os.mkdir("/tmp/work")
    for path in [*folders, *_SYSTEM_FILES, *request["readable"]]:
        if os.path.exists(f"/old{path}") and not _shown(path):
            kernel.bind_read_only(f"/old{path}", _place_for(path))
    for path, target in links.items():
        os.symlink(target, path)
    for path in _DEVICES:
        kernel.bind_read_only(f"/old{path}", _place_for(path), devices=True)
    os.symlink("/tmp", "/dev/shm")
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.read_only("/", recursive=False, devices=True)


def _shown(path: str) -> bool:
    """Whether it is there already, inside something shown before; where it is a mere mount point it is not."""
    try:
        return os.path.samefile(path, f"/old{path}")
    except OSError:
        return False


def _place_for(path: str) -> str:
    """An empty file or folder to bind on."""
    if os.path.isdir(f"/old{path}"):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    return path


# -- the program ------------------------------------------------------------------------------------------------------


def _become_program(
    request: dict[str, Any], folder: str, mechanisms: list[str], streams: tuple[int, int, int], status: int
) -> None:
    try:
        for target, source in enumerate(streams):
            os.dup2(source, target)
        _set_limits(request)
        if request["linux"] and seccomp.forbid_syscalls(alone=not request["namespaces"]):
            mechanisms.append("seccomp")
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "TZ": "UTC"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        boot = _BOOT.format(folder=folder, paths=request["paths"])
        _tell(status, begun=mechanisms)
        os.set_inheritable(status, False)
        _close_all_but(status)
        line = [request["python"], "-I", "-S", "-B", "-X", "utf8", "-c", boot]
        os.execve(request["python"], line, environment)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the warden must hear of it
        _tell(status, broken=f"{type(error).__name__}: {error}")
    os._exit(1)


def _set_limits(request: dict[str, Any]) -> None:
    cpu = math.ceil(request["cpu_seconds"])
    limits = {
        "RLIMIT_CPU": (cpu, cpu + 1),
        "RLIMIT_AS": (request["memory_bytes"],) * 2,
        "RLIMIT_FSIZE": (request["file_bytes"],) * 2,
        "RLIMIT_NOFILE": (128, 128),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
    }
    if request["namespaces"]:
        limits["RLIMIT_NPROC"] = (request["processes"] + 2,) * 2  # beside the gate and init
    for name, values in limits.items():
        if hasattr(resource, name):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                values = (min(values[0], hard), min(values[1], hard))
            resource.setrlimit(kind, values)


def _close_all_but(kept: int) -> None:
    highest = 1 << 16
    os.closerange(3, kept)
    os.closerange(kept + 1, highest)


def _wait_for(program: int, status: int) -> None:
    """Reap whatever ends, until the program does; tell how."""
    while True:
        ended, how = os.wait()
        if ended == program:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            _tell(status, exit=os.waitstatus_to_exitcode(how), cpu=used.ru_utime + used.ru_stime)
            os._exit(0)


def _tell(status: int, **what: Any) -> None:
    os.write(status, json.dumps(what).encode() + b"\n")
