"""The child of the supervisor: it confines itself, then becomes the untrusted program.

Invariant: each step runs before the program starts, in the program's own process or an ancestor. A step that fails is
reported to the supervisor, and the program does not start. In namespaces the program sees its own file system: the
interpreter and the system libraries are read-only, and one in-memory folder is writable.

The process chain is supervisor, gate (enters the namespaces), init (process 1 of the namespaces; builds the file
system, drops privileges, waits), program. Without namespaces the gate is also init.
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import select
import signal
import stat
from collections.abc import Iterator, Sequence
from typing import Any

from rollouts.sandboxes import kernel, seccomp
from rollouts.sandboxes.filesystem import DEVICES, SYSTEM, SYSTEM_FILES, build_root

__all__ = ["INNER_USER", "enter", "outer_user"]

INNER_USER = 1000
"""User id of the program inside its namespace."""
_OVERFLOW_USER = 65534
"""User id of the program outside, if the supervisor is root; an account without rights."""

_BOOT = """
import site, sys
site.setquit()
sys.path = [{folder!r}, *sys.path, *{paths!r}]
sys.argv = ["main.py", *{channel!r}]
sys.excepthook = lambda kind, error, trace, show=sys.__excepthook__: show(
    kind, error.with_traceback(trace and trace.tb_next), None
)
__file__ = "main.py"
del site, sys
exec(compile(open("main.py", "rb").read(), "main.py", "exec"))
"""

_IMAGES = "images"
"""The folder, in the program's, of which files are returned."""
_FONTS = "fonts.conf"
"""Without the system's file, each use of matplotlib prints an error."""
_BACKEND = "rollouts_figures"
_BACKEND_SOURCE = """
import os
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "images")
_shown = 0

def show(*args, **options):
    global _shown
    from matplotlib import pyplot
    for number in pyplot.get_fignums():
        _shown += 1
        pyplot.figure(number).savefig(os.path.join(_FOLDER, f"figure-{_shown:03}.png"))
        pyplot.close(number)
"""
"""matplotlib's backend: ``show`` saves every open figure in the folder instead of on a screen."""


class UnreadableError(Exception):
    """The program's user cannot read one of ``paths``."""


def outer_user() -> int:
    """User id of the program outside its namespace: not root if the supervisor is root."""
    return os.geteuid() or _OVERFLOW_USER


def enter(
    request: dict[str, Any],
    folder: str,
    code: bytes,
    streams: tuple[int, int, int],
    status: int,
    go: int,
    supervisor_fds: Sequence[int],
) -> None:
    """Close the supervisor's descriptors and become the program. Never returns."""
    try:
        for number in supervisor_fds:
            os.close(number)
        _enter(request, folder, code, streams, status, go)
    except UnreadableError as error:
        _report(status, broken=str(error), unreadable=True)
    except BaseException as error:  # noqa: BLE001 - the supervisor must learn of any failure
        _report(status, broken=f"{type(error).__name__}: {error}")
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
        _report(status, unshared=os.getpid())
        if os.read(go, 1) != b"g":
            raise OSError("the supervisor did not map the users of the namespace")
        init = os.fork()
        if init:
            os.close(status)
            for number in (*streams, go):
                os.close(number)
            os.waitpid(init, 0)
            os._exit(0)
        kernel.set_hostname(b"sandbox")
        build_root(
            folder,
            disk_bytes=request["disk_bytes"],
            readable=request["readable"],
            hidden=request["hidden"],
            paths=request["paths"],
        )
        os.mkdir("/tmp/work")
        user, folder = INNER_USER, "/tmp/work"
        os.chown(folder, user, user)
        mechanisms.append("namespaces")
    else:
        user = _plain_user(request, folder)
    if request["linux"]:
        _give_up_privileges(user, go)
    for path in request["paths"]:
        _check_readable(path)
    os.chdir(folder)
    with open("main.py", "wb") as file:
        file.write(code)
    if request.get("keep_images"):
        os.mkdir(_IMAGES)
        for name, text in ((f"{_BACKEND}.py", _BACKEND_SOURCE), (_FONTS, "<fontconfig></fontconfig>")):
            with open(name, "w") as helper:
                helper.write(text)
    if request["linux"] and not request["namespaces"] and kernel.landlock_abi():
        _confine(request, folder)
        mechanisms.append("landlock")
    if request.get("bubblewrap"):
        mechanisms.append("bubblewrap")
    if request["namespaces"] or (os.geteuid() != 0 and not (request.get("bubblewrap") and request["root_outside"])):
        mechanisms.append("user")
    program = os.fork()
    if program == 0:
        _become_program(request, folder, mechanisms, streams, status)
    for number in streams:
        os.close(number)
    _wait_for(program, request, status)


def _confine(request: dict[str, Any], folder: str) -> None:
    """Allow only the readable paths, and writing only in the folder."""
    rules = kernel.Landlock()
    roots = [*SYSTEM, *SYSTEM_FILES, *request["readable"]]
    rules.allow_names(roots)
    visible = dict.fromkeys(path for root in roots for path in _without(root, request["hidden"]))
    rules.allow(visible, write=False)
    rules.allow([*DEVICES, folder], write=True)
    rules.enforce()


def _give_up_privileges(user: int, go: int) -> None:
    kernel.drop_capabilities(user, user)
    kernel.no_new_privileges()
    kernel.hide_from_tracers()
    kernel.die_with_parent()
    hung_up = select.poll()
    hung_up.register(go, select.POLLHUP)
    if hung_up.poll(0):
        os._exit(1)  # the supervisor ended before die_with_parent took effect
    os.close(go)


def _plain_user(request: dict[str, Any], folder: str) -> int:
    """The user id without namespaces: 65534 if we are root and that user can run the interpreter, else our own."""
    if os.geteuid() != 0:
        return os.getuid()
    try:
        os.seteuid(_OVERFLOW_USER)
    except OSError:
        return 0
    needed = [path for path in request["readable"] if path not in request["paths"]]
    can = all(os.access(path, os.R_OK, effective_ids=True) for path in [*needed, request["python"]])
    os.seteuid(0)
    if can:
        os.chown(folder, _OVERFLOW_USER, _OVERFLOW_USER)
    return _OVERFLOW_USER if can else 0


def _check_readable(path: str) -> None:
    """Raise if the program's user cannot read a folder of ``paths``; name the folder above it that forbids it."""
    parts = path.split("/")
    for above in ["/".join(parts[:count]) for count in range(2, len(parts) + 1)]:
        if not os.access(above, os.X_OK if above != path and os.path.isdir(above) else os.R_OK, effective_ids=True):
            mode = stat.S_IMODE(os.stat(above).st_mode)
            raise UnreadableError(
                f"paths: got {path!r}, which user {os.geteuid()} of the sandbox cannot read: "
                f"{above} has mode {mode:o}; expected a readable folder: "
                f"chmod o+rx {above}, or copy the packages elsewhere, or run as another user than root"
            )


def _without(root: str, hidden: Sequence[str]) -> Iterator[str]:
    """A path, or what is in it except hidden folders."""
    root = os.path.realpath(root)
    if root in hidden:
        return
    if not any(path.startswith(f"{root}/") for path in hidden):
        yield root
        return
    for name in os.listdir(root):
        yield from _without(os.path.join(root, name), hidden) if not os.path.islink(os.path.join(root, name)) else ()


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
        if request.get("keep_images"):
            environment |= {"MPLBACKEND": f"module://{_BACKEND}", "FONTCONFIG_FILE": f"{folder}/{_FONTS}"}
        boot = _BOOT.format(folder=folder, paths=request["paths"], channel=[str(n) for n in request["channel"]])
        _report(status, begun=mechanisms)
        os.set_inheritable(status, False)
        _close_all_except(status, *request["channel"])
        line = [request["python"], "-I", "-S", "-B", "-X", "utf8", "-c", boot]
        os.execve(request["python"], line, environment)
    except BaseException as error:  # noqa: BLE001 - the supervisor must learn of any failure
        _report(status, broken=f"{type(error).__name__}: {error}")
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
        limits["RLIMIT_NPROC"] = (request["processes"] + 2,) * 2  # plus the gate and init
    for name, values in limits.items():
        if hasattr(resource, name):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                values = (min(values[0], hard), min(values[1], hard))
            resource.setrlimit(kind, values)


def _close_all_except(*kept: int) -> None:
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, 1 << 16)


def _wait_for(program: int, request: dict[str, Any], status: int) -> None:
    """Reap child processes until the program ends; report its images, its exit code and its CPU time."""
    while True:
        ended, how = os.wait()
        if ended == program:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            if request.get("keep_images"):
                _report_images(status, request["images"], request["image_bytes"])
            _report(status, exit=os.waitstatus_to_exitcode(how), cpu=used.ru_utime + used.ru_stime)
            os._exit(0)


def _report_images(status: int, most: int, most_bytes: int) -> None:
    """Report the files of the folder, the first by name with their content.

    This process is confined as the program is: it reads nothing that the program cannot read. Other processes of the
    program may still run, so that nothing is checked before it is opened.
    """
    try:
        folder = os.open(_IMAGES, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        names = sorted(os.listdir(folder))
    except OSError:  # the program removed it, or put something else there
        return
    for name in names[:most]:
        size, data = _plain_file(name, folder, most_bytes)
        shown = os.fsencode(name).decode("utf-8", "replace")
        _report(status, image=[shown, size, None if data is None else base64.b64encode(data).decode()])
    _report(status, more_images=max(len(names) - most, 0))


def _plain_file(name: str, folder: int, most_bytes: int) -> tuple[int | None, bytes | None]:
    """Size and content of a file; no content of a larger file, and no size of a path that is not a readable file."""
    try:  # O_NONBLOCK: a pipe without a writer would be waited for
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None, None
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            return None, None
        with os.fdopen(number, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(number)
    return (len(data), data) if len(data) <= most_bytes else (max(found.st_size, len(data)), None)


def _report(status: int, **what: Any) -> None:
    left = memoryview(json.dumps(what).encode() + b"\n")
    while left:
        left = left[os.write(status, left) :]
