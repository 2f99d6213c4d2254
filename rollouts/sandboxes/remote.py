"""The common part of the remote kinds: the protocol of sandboxes, on a machine that runs short shell scripts.

Invariant: a machine that was created is deleted when its sandbox is closed, also if it could not be set up or its task
was cancelled meanwhile. A command runs detached from the request that started it, which is repeated until the command
has ended, so that a connection that is lost on the way does not lose the command; it is started once. Its command
line, its variables and its input are in files that are deleted before it starts, never in a request that a service
may log.

A kind defines :meth:`RemoteSandbox._create` and a :class:`Machine`. This module imports no SDK, and knows no service.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import ipaddress
import posixpath
import secrets
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import anyio
import anyio.to_thread
import attrs

from rollouts.base.extras import install_command
from rollouts.base.validators import as_texts, check, number
from rollouts.errors import ConfigError, shortened
from rollouts.sandboxes.base import HOME_ENVIRONMENT, Command, Exit, SandboxError, SandboxLimits, check_size, inner_path
from rollouts.sandboxes.containment import NAMES, Containment
from rollouts.sandboxes.running import Running, stopped_by

__all__ = ["CloudSandbox", "Machine", "RemoteSandbox", "RunningRemote", "received", "sdk"]

_WORKSPACE, _HOME = "/workspace", "/home/agent"
_CREATE_SECONDS = 240.0
"""Deadline of creating a machine: an image may be pulled."""
_ASK_SECONDS = 60.0
"""Deadline of one request; that of a file is longer by a second for each MiB."""
_GRACE_SECONDS = 25.0
"""Deadline of killing a command, and of deleting a machine."""
_WAIT_SECONDS = 20
"""How long one request waits for the end of a command: proxies cut connections that are silent for a minute."""
_TRIES = 3
_SHOWN = 400
"""Characters of an SDK's error that are shown."""
_RETRY_SECONDS = 0.5
_NEEDED = ("base64", "chmod", "cut", "env", "grep", "head", "id", "mkdir", "mkfifo", "mv", "rm", "sleep", "tail", "wc")
_MARK = "ROLLOUTS_COMMAND"
"""The variable by which the processes of a command are found."""

_SHARED = {
    "seconds": "the processes of the command are killed at the deadline",
    "file_size": "RLIMIT_FSIZE",
    "output": "the last bytes are kept",
    "writing": "a separate machine",
    "reading": "a separate machine",
    "signals": "a separate machine",
    "survivors": "the machine is deleted; until then a process that removes its variables outlives its command",
    "environment": "not passed on",
    "descriptors": "the service's streams",
}


class Machine(Protocol):
    """A machine of a service. Any exception of its methods becomes a :class:`SandboxError`."""

    async def execute(self, script: str) -> str:
        """Run a script with ``sh``, whatever its exit code; return its standard output."""
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Write a new file in an existing folder."""
        ...

    async def download(self, path: str, max_bytes: int) -> bytes:
        """Read a file; more than ``max_bytes`` bytes are an error."""
        ...

    async def delete(self) -> None:
        """Delete the machine; a machine that is gone is not an error."""
        ...


@attrs.frozen
class RemoteSandbox(ABC):
    """A machine of a service for each rollout."""

    limits: SandboxLimits = attrs.field(factory=SandboxLimits, kw_only=True)
    lifetime: float = attrs.field(default=7200.0, kw_only=True, validator=number(least=60))
    """Seconds after which the service ends the machine by itself, e.g. after this process was killed."""

    def containment(self) -> Containment:
        """The limits that the service enforces; none of them can be checked from here."""
        enforced = {**_SHARED, **self._enforced()}
        reasons = {"cpu_seconds": "only wall time is limited", **self._not_enforced()}
        return Containment(
            {name: enforced[name] for name in NAMES if name in enforced},
            {name: reasons[name] for name in NAMES if name not in enforced},
            (),
        )

    async def open(self) -> RunningRemote:
        """Create a machine, with an empty workspace."""
        name = type(self).__name__
        # Shielded: a machine whose creation is cut would run without an owner.
        with anyio.CancelScope(shield=True), _errors(f"{name}.open", _CREATE_SECONDS):
            machine = await self._create()
        running = RunningRemote(self, machine)
        try:
            await running.make_folders()
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                try:
                    await running.close()
                except SandboxError as left:
                    error.add_note(str(left))
            raise
        return running

    @abstractmethod
    async def _create(self) -> Machine:
        """Create a machine, and wait until it runs scripts; delete it if this fails."""

    @abstractmethod
    def _enforced(self) -> Mapping[str, str]:
        """The limits that the service enforces in addition to the limits of all kinds."""

    @abstractmethod
    def _not_enforced(self) -> Mapping[str, str]:
        """The limits that the service does not enforce, and why."""


def _are_hosts(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(host, str) and host and not {*host} & {*" ,/:@"} for host in value
    )


def _are_networks(value: Any) -> bool:
    try:
        return isinstance(value, tuple) and all(ipaddress.ip_network(network) for network in value)
    except ValueError:
        return False


def _texts(value: Any) -> Any:
    return None if value is None else as_texts(value)


@attrs.frozen
class CloudSandbox(RemoteSandbox):
    """A remote kind whose service has a firewall. By default the program reaches the internet."""

    hosts: tuple[str, ...] | None = attrs.field(
        default=None,
        kw_only=True,
        converter=_texts,
        validator=check("names of hosts", _are_hosts, optional=True),
    )
    """The hosts that the program may reach, among them that of the gateway."""
    networks: tuple[str, ...] | None = attrs.field(
        default=None,
        kw_only=True,
        converter=_texts,
        validator=check("networks as 192.0.2.0/24", _are_networks, optional=True),
    )
    """The networks that the program may reach."""

    def _firewall(self) -> tuple[str, ...] | None:
        """All that the program may reach; ``None`` if that is not limited."""
        return None if self.hosts is None and self.networks is None else (self.hosts or ()) + (self.networks or ())

    def _enforced(self) -> Mapping[str, str]:
        allowed = self._firewall()
        if allowed is None:
            return {}
        return {"network": f"the service's firewall; allowed: {', '.join(allowed) or 'nothing'}"}

    def _not_enforced(self) -> Mapping[str, str]:
        return {
            "memory": "what the service gives the machine",
            "disk": "what the service gives the machine",
            "processes": "what the service gives the machine",
            "network": "the internet",
            "privileges": "the user of the image, who may be root in the machine",
        }


class RunningRemote(Running):
    """An open sandbox of a remote kind."""

    workspace, home = _WORKSPACE, _HOME
    listener = None

    def __init__(self, kind: RemoteSandbox, machine: Machine) -> None:
        super().__init__()
        self._name, self._limits, self._machine = type(kind).__name__, kind.limits, machine

    def url_inside(self, port: int | None = None) -> NoReturn:
        """A port of this machine is not reached from another one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError.of("gateway", None, f"a PublicAddress: a program in {self._name} reaches no port of ours")

    async def make_folders(self) -> None:
        """Make the workspace and the home, and check what the image has."""
        answer = await self._ask("set-up", _set_up())
        if answer != "ok":
            raise SandboxError(f"{self._name}: the workspace cannot be made: {shortened(answer)}")

    async def read(self, path: str) -> bytes | None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        self._check_open()
        place = inner_path(path, _WORKSPACE, _HOME)
        quoted = _quoted("path", place)
        answer = await self._ask(
            "read", f"if [ -f {quoted} ] && [ -r {quoted} ]; then wc -c < {quoted}; else echo no; fi"
        )
        if answer == "no":
            return None
        if not answer.isdecimal():
            raise SandboxError(f"{self._name}.read: got {shortened(answer)}; expected the size of {path!r}")
        size = int(answer)
        check_size(f"path {path!r}", size, self._limits)
        with _errors(f"{self._name}.read", _file_seconds(size)):
            data = await self._machine.download(place, self._limits.file_bytes)
        if len(data) != size:
            raise SandboxError(f"{self._name}.read: got {len(data):,} bytes of {path!r}; expected {size:,}")
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :class:`~rollouts.sandboxes.base.RunningSandbox`."""
        self._check_open()
        check_size(f"path {path!r}", len(data), self._limits)
        place = inner_path(path, _WORKSPACE, _HOME)
        folder, staged = posixpath.dirname(place), _staged(secrets.token_hex(12))
        await self._upload(staged, data)
        target = _quoted("path", place)
        script = (
            f"mkdir -p {_quoted('path', folder)} && rm -f {target} && mv {staged} {target} && chmod {mode:o} {target}"
        )
        answer = await self._ask("write", f"if e=$( ({script}) 2>&1 ); then echo ok; else rm -f {staged}; echo $e; fi")
        if answer != "ok":
            raise SandboxError(f"path: got {path!r}, which cannot be written: {shortened(answer)}")

    async def close(self) -> None:
        """Delete the machine."""
        if self._closed:
            return
        self._closed = True
        with _errors(f"{self._name}.close", _GRACE_SECONDS):
            await self._machine.delete()

    async def _command(self, command: Command) -> Exit:
        token = secrets.token_hex(12)
        env = {"HOME": _HOME, "TMPDIR": "/tmp"} | HOME_ENVIRONMENT | dict(command.env)
        program = _program(token, command, env, self._limits)
        async with self._turn:
            self._check_open()
            began = time.monotonic()
            end: _End | None = None
            try:
                with anyio.move_on_after(command.seconds) as scope:
                    async with stopped_by(command.stop):
                        if command.stdin:
                            await self._upload(f"{_staged(token)}.in", command.stdin)
                        await self._upload(_staged(token), program)
                        end = await self._wait(token, _start(token) + _poll(token, _WAIT_SECONDS, self._limits))
            except BaseException:
                with anyio.move_on_after(_GRACE_SECONDS, shield=True), contextlib.suppress(SandboxError):
                    await self._ask("kill", _kill(token) + "echo ok")
                raise
            took = time.monotonic() - began
            if end is not None:
                return Exit(end.code, end.out, end.errors, took, False, end.truncated)
            with anyio.move_on_after(_GRACE_SECONDS, shield=True):
                while end is None:  # a command that was just being started is found by the next search
                    end = await self._wait(token, _kill(token) + _poll(token, 1, self._limits), times=1)
            if end is None:
                raise SandboxError(f"{self._name}.run: the command was not killed within {_GRACE_SECONDS:g} s")
            return Exit(-9, end.out, end.errors, took, scope.cancelled_caught, end.truncated)

    async def _wait(self, token: str, script: str, times: int = 0) -> _End | None:
        """Ask for the end of a command until it has ended; at most ``times`` times if that is not 0."""
        asked = failures = 0
        while not times or asked < times:
            try:
                answer = await self._ask("run", script)
            except SandboxError:
                failures += 1
                if failures == _TRIES:
                    raise
                await anyio.sleep(_RETRY_SECONDS * (failures - 1))
                continue
            asked, failures = asked + 1, 0
            if answer != "running":
                return _read_end(answer, self._limits.output_bytes, self._name)
        return None

    async def _ask(self, what: str, script: str) -> str:
        """Run a script; return its output behind a mark, as a login shell may write before it."""
        mark = secrets.token_hex(8)
        with _errors(f"{self._name}.{what}", _ASK_SECONDS):
            answer = await self._machine.execute(f"echo {mark}\n{script}")
        _, found, rest = answer.partition(f"{mark}\n")
        if not found:
            raise SandboxError(f"{self._name}.{what}: got {shortened(answer)}; expected the output of a script")
        return rest.strip()

    async def _upload(self, path: str, data: bytes) -> None:
        with _errors(f"{self._name}.write", _file_seconds(len(data))):
            await self._machine.upload(path, data)


@contextlib.contextmanager
def _errors(what: str, seconds: float) -> Iterator[None]:
    """Turn the exceptions of an SDK into a :class:`SandboxError`, and end after ``seconds``."""
    try:
        with anyio.fail_after(seconds):
            yield
    except (SandboxError, ConfigError):
        raise
    except TimeoutError as error:
        raise SandboxError(f"{what}: no answer within {seconds:g} s") from error
    except Exception as error:
        raise SandboxError(f"{what}: {type(error).__name__}: {str(error)[:_SHOWN]!r}") from error


async def received(chunks: AsyncIterable[bytes], path: str, max_bytes: int) -> bytes:
    """The content of a file of at most ``max_bytes`` bytes, from its chunks."""
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > max_bytes:
            raise SandboxError(f"path {path!r}: got more than {max_bytes:,} bytes")
    return bytes(data)


async def sdk(kind: str, module: str, extra: str, *names: str) -> Any:
    """Import an SDK in a worker thread, as some take seconds; return the module, with these names of it loaded.

    Raises:
        ConfigError: it is not installed.
    """

    def load() -> Any:
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name)
        return loaded

    try:
        return await anyio.to_thread.run_sync(load)
    except ImportError as error:
        raise ConfigError(f"{kind} needs {module}: {install_command(extra)} ({error})") from error


def _file_seconds(size: int) -> float:
    return _ASK_SECONDS + size / (1 << 20)


# -- scripts ----------------------------------------------------------------------------------------------------------


def _staged(token: str) -> str:
    return f"/tmp/.rollouts-{token}"


def _quoted(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError.of(field, text, "a string that UTF-8 can encode, as this sandbox is remote") from None
    return shlex.quote(text)


def _set_up() -> str:
    folders = f"{_WORKSPACE} {_HOME}"
    return (
        f"for c in {' '.join(_NEEDED)}; do command -v $c > /dev/null || "
        '{ echo "the image has no $c"; exit; }; done\n'
        f"mkdir -p {folders} 2> /dev/null\n"
        f'if ! [ -w {_WORKSPACE} ] || ! [ -w {_HOME} ]; then e=$(sudo -n sh -c "mkdir -p {folders} && '
        f'chown $(id -u):$(id -g) {folders}" 2>&1) || {{ echo "$e"; exit; }}; fi\n'
        "echo ok"
    )


def _program(token: str, command: Command, env: Mapping[str, str], limits: SandboxLimits) -> bytes:
    """The script of one command. All parts that differ from command to command are quoted."""
    if "=" in command.argv[0]:
        raise ConfigError.of("argv[0]", command.argv[0], "a program without '=' in its name, as env starts it")
    words = [_quoted("env", f"{name}={value}") for name, value in env.items()]
    words += [_quoted("argv", word) for word in command.argv]
    staged, max_bytes = _staged(token), limits.output_bytes + 1
    source = f"{staged}.in" if command.stdin else "/dev/null"
    return (
        f"d={staged}.d\n"
        f"exec 3< {source}\n"
        f"rm -f {staged} {staged}.in\n"
        'mkfifo "$d/1" "$d/2"\n'
        f'tail -c {max_bytes} < "$d/1" > "$d/out" 3<&- &\n'
        f'tail -c {max_bytes} < "$d/2" > "$d/err" 3<&- &\n'
        "(\n"
        'exec <&3 3<&- > "$d/1" 2> "$d/2"\n'
        f"ulimit -c 0; ulimit -f {-(-limits.file_bytes // 512)}\n"
        f"cd {_quoted('cwd', command.cwd)} || exit 127\n"
        f"exec env {_MARK}={token} {' '.join(words)}\n"
        ")\n"
        'echo $? > "$d/code"\n'
        "exec 3<&-\n"
        f"{_hunt(token)}"
        'mv "$d/code" "$d/status"\n'
        "wait\n"
        'echo > "$d/whole"\n'
    ).encode()


def _hunt(token: str) -> str:
    """Kill the processes that have the token among their variables, and the processes that they start meanwhile."""
    return (
        "n=0\n"
        f'while p=$(grep -ls {_MARK}={token} /proc/[0-9]*/environ | cut -d / -f 3); [ -n "$p" ] && [ $n -lt 100 ]; do\n'
        "kill -9 $p 2> /dev/null; n=$((n+1))\n"
        "done\n"
    )


def _start(token: str) -> str:
    """Start the command once, however often this is run; what the one before it left is removed."""
    folder = f"{_staged(token)}.d"
    return (
        f"if ! [ -d {folder} ]; then rm -rf /tmp/.rollouts-*.d; fi\n"
        f"if mkdir {folder} 2> /dev/null; then\n"
        f"s=setsid; command -v $s > /dev/null || s=\n"
        f"$s sh {_staged(token)} < /dev/null > /dev/null 2>&1 &\n"
        f"echo $! > {folder}/pid\n"
        "fi\n"
    )


def _kill(token: str) -> str:
    """Kill the command; one whose start is still on its way does not start."""
    return f"mkdir -p {_staged(token)}.d\n{_hunt(token)}rm -f {_staged(token)} {_staged(token)}.in\n"


def _poll(token: str, seconds: int, limits: SandboxLimits) -> str:
    """Wait for the end of the command: print ``running``, ``lost``, or its exit code and outputs."""
    max_bytes = limits.output_bytes + 1
    return (
        f"d={_staged(token)}.d; n=0\n"
        f'alive() {{ grep -qs {token} "/proc/$(head -n 1 "$d/pid" 2> /dev/null)/cmdline"; }}\n'
        f'while ! [ -e "$d/status" ] && alive && [ $n -lt {seconds * 10} ]; do sleep 0.1; n=$((n+1)); done\n'
        'n=0; while [ -e "$d/status" ] && ! [ -e "$d/whole" ] && [ $n -lt 10 ]; do sleep 0.1; n=$((n+1)); done\n'
        'if [ -e "$d/status" ]; then\n'
        'w=0; [ -e "$d/whole" ] && w=1\n'
        f'for o in out err; do head -c {max_bytes} "$d/$o" | base64; echo .; done\n'
        'echo "$(head -c 9 "$d/status") $w"\n'
        "elif alive; then echo running; else echo lost; fi"
    )


@attrs.frozen
class _End:
    code: int
    out: str
    errors: str
    truncated: bool


def _read_end(answer: str, max_bytes: int, name: str) -> _End:
    if answer == "lost":  # it killed the shell that waited for it, and with it the ends of its outputs
        return _End(-9, "", "", True)
    try:
        first, second, last = answer.split(".")
        code, whole = map(int, last.split())
        outputs = [base64.b64decode("".join(text.split()), validate=True) for text in (first, second)]
    except (ValueError, binascii.Error):
        raise SandboxError(f"{name}.run: got {shortened(answer)}; expected the end of a command") from None
    code = 128 - code if code > 128 else 127 if code == 126 else code  # as a shell reports signals
    out, errors = (data[-max_bytes:].decode(errors="replace") for data in outputs)
    return _End(code, out, errors, not whole or any(len(data) > max_bytes for data in outputs))
