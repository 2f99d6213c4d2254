"""The holder: process 1 of a namespace sandbox. It makes the listener, and starts, watches and kills the commands.

Invariant: when it answers ``kill_all``, or a command whose processes are not kept, every other process of its namespace
is gone. When its standard input ends, it ends, and with it the namespace and its files. No program can trace, kill or
limit it: it is process 1, cannot be dumped, and a filter of system calls refuses to change its limits. It runs nothing
that a program may have written: it imports no module after its set-up, and calls no look-up of the C library.

It uses the standard library only: its source is passed to an interpreter that sees no installed package. Without
bubblewrap it first enters the namespaces itself; the chain is then launcher, gate, holder.

Protocol: a request is a line of JSON with a ``number``, then ``bytes`` bytes; an answer is a line of JSON with the same
number, then ``sizes`` bytes. Several commands may be under way; ``stop`` ends one of them, and has no answer. The
descriptor of an archive comes through the control socket, just before its request.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from rollouts.sandboxes import archives, kernel, seccomp
from rollouts.sandboxes.filesystem import build_root
from rollouts.sandboxes.image_root import build_image_root, map_image

__all__ = ["BOOT", "main"]

BOOT = """
import json, os, sys, types
text = b""
while len(text) < int(sys.argv[1]):
    text += os.read(0, int(sys.argv[1]) - len(text)) or sys.exit(1)
request = json.loads(text)
for name, source in request["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), module.__dict__)
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)
sys.modules["rollouts.sandboxes.holder"].main(request)
"""
"""Program text with one argument, the length of the first request, which has the sources of the modules."""

_USER = 1000
_OVERFLOW_USER = 65534
_FIRST_USER, _USERS = 1 << 30, 1 << 16
"""The users outside that the users of an image are mapped to. No other user of a machine is so high by habit."""
_CHUNK = 1 << 16
_TABLE_BYTES = 1 << 20


def main(request: dict[str, Any]) -> None:
    """Set up the sandbox, then serve requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores what it does not handle; Python handles this one
    for name in ("ascii", "latin-1", "utf-8"):
        codecs.lookup(name)  # now: it imports a module
    control = socket.socket(fileno=request["control"])
    if not request["bubblewrap"]:
        _enter_namespaces(request, control)
    sys.path.clear()  # a later import would find files that a program may have written
    sys.meta_path.clear()
    kernel.no_new_privileges()
    kernel.hide_from_tracers()
    seccomp.protect_first_process()
    os.umask(0o022)
    if request["port"] is not None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", request["port"]))
            listener.listen(1024)
            socket.send_fds(control, [b"l"], [listener.fileno()])
    _Holder(request, control).serve()


# -- namespaces without bubblewrap ------------------------------------------------------------------------------------


def _enter_namespaces(request: dict[str, Any], control: socket.socket) -> None:
    """Return in process 1 of new namespaces; the launcher and the gate wait for it, and end as it ends."""
    image = request["image"]
    unshared, say_unshared = os.pipe()
    go, say_go = os.pipe()
    ours, theirs = socket.socketpair()
    gate = os.fork()
    if gate:
        os.close(say_unshared)
        theirs.close()
        control.close()
        for number in (0, 1):
            os.close(number)
        if os.read(unshared, 1):
            _map_users(gate, whole=image is not None)
            roots = [] if image is None else map_image(image["roots"], gate)
            socket.send_fds(ours, [b"g"], roots)
            for number in roots:
                os.close(number)
        ours.close()
        code = os.waitstatus_to_exitcode(os.waitpid(gate, 0)[1]) & 0x7F
        _leave(request["groups"])
        os._exit(code)
    ours.close()
    kernel.die_with_parent()
    kernel.unshare(kernel.NAMESPACES if request["port"] is not None else kernel.NAMESPACES & ~kernel.NEW_NETWORK)
    os.write(say_unshared, b"u")
    said, roots, _, _ = socket.recv_fds(theirs, 1, 0 if image is None else len(image["roots"]))
    theirs.close()
    if said != b"g":
        raise OSError("the users of the namespace were not mapped")
    holder = os.fork()
    if holder:
        control.close()
        for number in (0, 1, *roots):
            os.close(number)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]) & 0x7F)
    for number in (unshared, say_unshared, go, say_go):
        os.close(number)
    kernel.set_hostname(b"sandbox")
    if request["port"] is not None:
        kernel.loopback_up()
    if image is not None:
        if roots:  # else we are the one user that is mapped
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        build_image_root(
            "/usr",  # any folder, here and below: the mount there becomes the root, and no longer covers it
            roots or [kernel.mapped_tree(path, None) for path in image["roots"]],
            disk_bytes=request["disk_bytes"],
            files=request["files"],
        )
        _no_user_namespaces()
        _make_folder(request["cwd"], _account(request["user"]))
        kernel.keep_capabilities(kernel.CONTAINER_CAPABILITIES)
        kernel.die_with_parent()
        return
    build_root(
        "/usr",
        disk_bytes=request["disk_bytes"],
        readable=request["readable"],
        files=request["files"],
        workspace=True,
    )
    _no_user_namespaces()
    for path in ("/workspace", request["home"]):
        os.chown(path, _USER, _USER)
    kernel.drop_capabilities(_USER, _USER)
    kernel.die_with_parent()


def _leave(groups: list[str]) -> None:
    """Leave the control groups, and remove them; the process that launched us removes what is left."""
    for group in groups:
        with contextlib.suppress(OSError):
            _put(os.path.join(os.path.dirname(group), "cgroup.procs"), "0")
            os.rmdir(group)


def _no_user_namespaces() -> None:
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def _make_folder(path: str, account: _Account) -> None:
    """Make the workspace of an image that lacks it, as Docker does, but as its user's."""
    if not os.path.isdir(path):
        os.makedirs(path)
        os.chown(path, account.user, account.group)


def _map_users(gate: int, *, whole: bool) -> None:
    """Map the users of a namespace to users without rights if we are root, else one of them to us.

    With ``whole`` they are all users of an image, of whom only root is mapped if we are not root; else root, for the
    set-up, and the user of the programs.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        users = groups = f"0 {_FIRST_USER} {_USERS}\n" if whole else f"0 0 1\n{_USER} {_OVERFLOW_USER} 1\n"
    else:
        _put(f"/proc/{gate}/setgroups", "deny")
        inner = 0 if whole else _USER
        users, groups = f"{inner} {user} 1\n", f"{inner} {group} 1\n"
    _put(f"/proc/{gate}/uid_map", users)
    _put(f"/proc/{gate}/gid_map", groups)


def _put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# -- requests ---------------------------------------------------------------------------------------------------------


class _Command:
    """A command under way."""

    def __init__(self, request: dict[str, Any], process: int, began: float) -> None:
        self.request, self.process, self.began = request, process, began
        self.deadline = began + float(request["seconds"])
        self.outputs = [bytearray(), bytearray()]
        self.streams: dict[int, bytearray] = {}
        """The ends of its outputs that are still read, and what was read from them."""
        self.code: int | None = None
        self.truncated = self.timed_out = self.stopped = False

    @property
    def over(self) -> bool:
        return self.code is not None or self.timed_out or self.stopped


class _Holder:
    def __init__(self, settings: dict[str, Any], control: socket.socket) -> None:
        self.settings, self.control = settings, control
        self.account = _account(settings["user"])  # now: a program may change the tables of users
        self.unread = b""
        self.commands: dict[int, _Command] = {}
        self.wakeup, wake = os.pipe()
        for number in (self.wakeup, wake):
            os.set_blocking(number, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, self._requests)
        self.selector.register(self.wakeup, selectors.EVENT_READ, self._woken)

    def serve(self) -> None:
        _answer(0, {"ready": True, "home": self.settings["home"] or self.account.home})
        while True:
            deadlines = [command.deadline for command in self.commands.values()]
            wait = max(min(deadlines) - time.monotonic(), 0) if deadlines else None
            for key, _ in self.selector.select(wait):
                key.data()
            _reap(self.commands.values())
            now = time.monotonic()
            for command in list(self.commands.values()):
                command.timed_out = command.code is None and now >= command.deadline
                if command.over:
                    self._finish(command)

    def _requests(self) -> None:
        self._receive()
        while b"\n" in self.unread:
            line, _, self.unread = self.unread.partition(b"\n")
            request = json.loads(line)
            data = self._bytes(request.get("bytes", 0))
            if request["op"] == "run":
                self._start(request, data)
            elif request["op"] == "stop":
                if request["of"] in self.commands:
                    self.commands[request["of"]].stopped = True
            elif request["op"] == "kill_all":
                self._kill_all()
                _answer(request["number"], {})
            elif request["op"] == "read":
                self._read(request)
            elif request["op"] == "write":
                self._write(request, data)
            else:
                self._archive(request)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, _CHUNK)

    def _bytes(self, count: int) -> bytes:
        parts, size = [self.unread[:count]], min(count, len(self.unread))
        self.unread = self.unread[size:]
        while size < count:
            self._receive(min(count - size, 1 << 20))
            parts.append(self.unread)
            size += len(self.unread)
            self.unread = b""
        return b"".join(parts)

    def _receive(self, most: int = _CHUNK) -> None:
        data = os.read(0, most)
        if not data:
            os._exit(0)  # the end of process 1 is the end of its namespace
        self.unread += data

    # -- files --

    def _read(self, request: dict[str, Any]) -> None:
        most, number = self.settings["file_bytes"], request["number"]
        try:
            file = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            _answer(number, {"missing": True})
            return
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                parts, size = [], 0
                while size <= most and (part := os.read(file, 1 << 20)):
                    parts.append(part)
                    size += len(part)
                if size > most:
                    _answer(number, {"too_large": True})
                else:
                    _answer(number, {}, b"".join(parts))
            else:
                _answer(number, {"missing": True})
        except OSError:
            _answer(number, {"missing": True})
        finally:
            os.close(file)

    def _write(self, request: dict[str, Any], data: bytes) -> None:
        path = request["path"]
        try:
            with _acting_as(self.account):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # it may be a link or a pipe
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                    os.fchmod(file.fileno(), request["mode"])
        except (OSError, ValueError) as error:
            _answer(request["number"], {"error": _words(error)})
        else:
            _answer(request["number"], {})

    def _archive(self, request: dict[str, Any]) -> None:
        _, (descriptor,), _, _ = socket.recv_fds(self.control, 1, 1)
        most = self.settings["disk_bytes"]
        try:
            if request["op"] == "pack":
                with open(descriptor, "wb") as archive:
                    found = archives.pack(request["path"], archive, most)
                _answer(request["number"], {"found": found})
            else:
                with open(descriptor, "rb") as archive:
                    archives.unpack(archive, request["path"], most)
                _answer(request["number"], {})
        except Exception as error:  # noqa: BLE001 - whatever a program put in the way of tarfile, the holder lives
            _answer(request["number"], {"error": _words(error)})

    # -- commands --

    def _start(self, request: dict[str, Any], data: bytes) -> None:
        began = time.monotonic()
        pipes: list[tuple[int, int]] = []
        try:
            pipes += [os.pipe()]
            pipes += [os.pipe()]
            process = os.fork()
        except OSError as error:  # no descriptor or process is left
            for number in (number for pair in pipes for number in pair):
                os.close(number)
            words = f"{request['argv'][0]}: {_words(error)}\n".encode()
            report = {"code": 127, "seconds": time.monotonic() - began, "timed_out": False, "truncated": False}
            _answer(request["number"], report, b"", words)
            return
        if process == 0:
            self._become(request, data, pipes[0][1], pipes[1][1])
        command = _Command(request, process, began)
        for (readable, writable), output in zip(pipes, command.outputs, strict=True):
            os.close(writable)
            os.set_blocking(readable, False)
            command.streams[readable] = output
            self.selector.register(readable, selectors.EVENT_READ, self._collector(command, readable, output))
        self.commands[request["number"]] = command

    def _collector(self, command: _Command, source: int, output: bytearray) -> Callable[[], None]:
        def collect() -> None:
            if _collect(source, output) == _ENDED:
                self._close(command, source)
            over: int = len(output) - self.settings["output_bytes"]
            if over > 0:
                command.truncated = True
                del output[:over]

        return collect

    def _close(self, command: _Command, source: int) -> None:
        self.selector.unregister(source)
        os.close(source)
        del command.streams[source]

    def _finish(self, command: _Command) -> None:
        """Kill what a command leaves, unless it ended by itself and its processes are kept; then answer."""
        if not command.request["keep"]:
            self._kill_all(command)
        elif command.code is None:
            for kill in (os.killpg, os.kill):  # the second where it is stopped before it leads a group
                with contextlib.suppress(ProcessLookupError):
                    kill(command.process, signal.SIGKILL)
            command.code = os.waitstatus_to_exitcode(os.waitpid(command.process, 0)[1])
        self._report(command)

    def _report(self, command: _Command) -> None:
        for source, output in command.streams.items():
            while _collect(source, output) == _MORE:
                pass
        command.truncated |= any(len(output) > self.settings["output_bytes"] for output in command.outputs)
        for output in command.outputs:
            del output[: max(0, len(output) - self.settings["output_bytes"])]
        for source in list(command.streams):
            if command.request["keep"]:  # a process that lives on may write to it, and would end with a broken pipe
                self.selector.modify(source, selectors.EVENT_READ, self._drain(command, source))
            else:
                self._close(command, source)
        del self.commands[command.request["number"]]
        report = {
            "code": -signal.SIGKILL if command.code is None else command.code,
            "seconds": time.monotonic() - command.began,
            "timed_out": command.timed_out,
            "truncated": command.truncated,
        }
        _answer(command.request["number"], report, *map(bytes, command.outputs))

    def _drain(self, command: _Command, source: int) -> Callable[[], None]:
        def drain() -> None:
            if _collect(source, bytearray()) == _ENDED:
                self._close(command, source)

        return drain

    def _kill_all(self, besides: _Command | None = None) -> None:
        """Kill every process of the namespace but this one; the commands under way end as killed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        _reap(self.commands.values(), block=True)
        for command in list(self.commands.values()):
            if command is not besides:
                self._report(command)

    def _become(self, request: dict[str, Any], data: bytes, out: int, errors: int) -> None:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            if data:
                source = os.memfd_create("stdin")
                with open(os.dup(source), "wb") as file:
                    file.write(data)
                os.lseek(source, 0, os.SEEK_SET)
                os.fchmod(source, 0o444)
            else:
                source = os.open("/dev/null", os.O_RDONLY)
            for target, number in enumerate((source, out, errors)):
                os.dup2(number, target)
            os.closerange(3, 1 << 12)
            with contextlib.suppress(OSError):
                _put("/proc/self/oom_score_adj", "1000")  # where memory is short, the program ends and not the holder
            account = _account(request["user"]) if request["user"] else self.account
            self._limit()
            if account.user != os.geteuid() or account.group != os.getegid():
                os.setgroups(account.groups)
                os.setresgid(account.group, account.group, account.group)
                os.setresuid(account.user, account.user, account.user)
            os.chdir(request["cwd"])
            env = request["env"]
            env.setdefault("HOME", account.home)
            for name in ("USER", "LOGNAME"):
                env.setdefault(name, account.name)
            os.execvpe(request["argv"][0], request["argv"], env)
        except BaseException as error:  # noqa: BLE001 - a program that cannot start has ended
            os.write(2, f"{request['argv'][0]}: {_words(error)}\n".encode())
        os._exit(127)

    def _limit(self) -> None:
        settings = self.settings
        limits = {
            resource.RLIMIT_DATA: settings["memory_bytes"],
            resource.RLIMIT_NPROC: settings["processes"] + 3,  # the launcher, the gate and the holder
            resource.RLIMIT_FSIZE: settings["file_bytes"],
            resource.RLIMIT_CORE: 0,
        }
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


_MORE, _NOTHING_YET, _ENDED = "more", "nothing yet", "ended"


def _collect(source: int, output: bytearray) -> str:
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return _NOTHING_YET
    output += data
    return _MORE if data else _ENDED


def _reap(commands: Iterable[_Command], *, block: bool = False) -> None:
    """Wait for the processes that have ended, with ``block`` for all; note the exit codes of commands."""
    by_process = {command.process: command for command in commands}
    while True:
        try:
            ended, how = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            return
        if ended in by_process:
            by_process[ended].code = os.waitstatus_to_exitcode(how)


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def _answer(number: int, head: dict[str, Any], *parts: bytes) -> None:
    head |= {"number": number, "sizes": [len(part) for part in parts]}
    for part in (json.dumps(head).encode() + b"\n", *parts):
        left = memoryview(part)
        while left:
            left = left[os.write(1, left) :]


# -- users ------------------------------------------------------------------------------------------------------------


class _Account(NamedTuple):
    name: str
    user: int
    group: int
    groups: list[int]
    home: str


def _account(name: str | None) -> _Account:
    """A user of the sandbox by name, number or ``user:group``; ``None`` is the user of this process.

    ``root`` is user 0 whatever the program wrote to ``/etc/passwd``. The file is read here: the C library's look-up
    would load libraries that the program may have changed.

    Raises:
        OSError: there is no such user or group.
    """
    if name is None:
        return _Account("agent", os.geteuid(), os.getegid(), [], "/")
    who, _, of_group = name.partition(":")
    rows = {row[0]: row for row in _table("/etc/passwd") if len(row) > 5}
    found = next((row for row in rows.values() if who in (row[0], row[2])), None)
    if who in ("root", "0"):
        found = ["root", "", "0", "0", "", "/root"]
    if found is None and not who.isdecimal():
        raise OSError(errno.EINVAL, f"user {who!r} is not in /etc/passwd")
    found = found or [who, "", who, who, "", "/"]
    groups = _table("/etc/group")
    group = found[3]
    if of_group:
        named = [row[2] for row in groups if len(row) > 2 and row[0] == of_group]
        if not named and not of_group.isdecimal():
            raise OSError(errno.EINVAL, f"group {of_group!r} is not in /etc/group")
        group = named[0] if named else of_group
    further = [row[2] for row in groups if len(row) > 3 and found[0] in row[3].split(",") and row[2].isdecimal()]
    return _Account(found[0], int(found[2]), int(group), [int(group), *map(int, further)], found[5])


def _table(path: str) -> list[list[str]]:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a program may have made it a pipe
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                return []
            text = file.read(_TABLE_BYTES).decode(errors="replace")
        return [line.strip().split(":") for line in text.splitlines()]
    except OSError:
        return []


@contextlib.contextmanager
def _acting_as(account: _Account) -> Iterator[None]:
    """Make files as a user; other accesses are checked as for it."""
    user, group = os.geteuid(), os.getegid()
    if account.user == user:
        yield
        return
    os.setegid(account.group)
    os.seteuid(account.user)
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)
        kernel.die_with_parent()  # a change of user has reset it
