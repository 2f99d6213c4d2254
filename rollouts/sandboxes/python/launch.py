"""The launcher of the sandbox: starts a supervisor for one program, sends the request, reads the answer.

Invariant: the supervisor inherits no environment variable and no descriptor except its pipes. When this process ends,
for any reason, the lifeline pipe closes. A failure of the supervisor is a :class:`SandboxError`, never an answer.

It does not interpret limits and knows no messages. It blocks: call it in a worker thread.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from rollouts.errors import ConfigError
from rollouts.sandboxes.base import SandboxError
from rollouts.sandboxes.filesystem import SYSTEM, SYSTEM_FILES
from rollouts.sandboxes.python.supervisor import BOOT

__all__ = ["Answer", "SavedFile", "run_program"]

_GRACE_SECONDS = 60.0
_WORK = "/tmp/work"
"""The program's folder in bubblewrap."""
_PACKAGES = tuple(f"{lib}/python*/{name}-packages" for lib in ("lib", "lib64", "Lib") for name in ("site", "dist"))


class SavedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that a program saved in the folder ``images``."""

    name: str
    """Its name; bytes that are not UTF-8 are replaced."""
    size: int | None
    """Its bytes; ``None`` if it is not a readable file."""
    data: bytes | None
    """Its content; ``None`` if it is larger than ``image_bytes``, or has no size."""


class Answer(msgspec.Struct, frozen=True):
    """The supervisor's report on one program."""

    broken: str | None
    unreadable: bool
    """It is broken because the program's user cannot read one of ``paths``."""
    mechanisms: list[str]
    exit_code: int
    timed_out: bool
    truncated: bool
    seconds: float
    sizes: list[int]
    images: list[SavedFile]
    more_images: int


def run_program(
    code: bytes,
    stdin: bytes,
    paths: Sequence[str],
    settings: Mapping[str, Any],
    lifeline: int,
    channel: Sequence[IO[bytes]] = (),
) -> tuple[Answer, bytes, bytes]:
    """Run a program to its end, or until the other end of ``lifeline`` is closed.

    Args:
        code: Python source.
        stdin: its standard input.
        paths: folders that it may import from.
        settings: the fields of ``PythonLimits``, ``namespaces``, the path of ``bubblewrap`` if it makes them, and
            ``keep_images`` for a program that has a folder ``images``, whose files are returned.
        lifeline: the reading end of a pipe.
        channel: further files for the program, which finds their descriptors in ``sys.argv``; closed here.

    Returns:
        The report, the standard output and the standard error.

    Raises:
        SandboxError: the sandbox could not be set up, or the supervisor failed.
        ConfigError: one of ``paths`` does not exist, or the program's user cannot read it.
    """
    for path in paths:
        if not os.path.exists(path):
            raise ConfigError.of("paths", path, "a folder that exists")
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    folders = [os.path.realpath(path) for path in paths]
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)} - {"/"}
    folder = tempfile.mkdtemp(prefix="rollouts-python-")
    bubblewrap = settings.get("bubblewrap")
    request = {
        **settings,
        "python": python,
        "paths": folders,
        "hidden": [path for path in _package_folders() if not any(_contains(given, path) for given in folders)],
        "readable": [python, *sorted(prefixes), *folders],
        "folder": _WORK if bubblewrap else os.path.realpath(folder),
        "root_outside": os.geteuid() == 0,
        "channel": [end.fileno() for end in channel],
        "code_bytes": len(code),
        "stdin_bytes": len(stdin),
    }
    payload = msgspec.json.encode(request) + b"\n" + code + stdin
    sources = str(Path(__file__).parents[1])
    line = [python, "-I", "-S", "-X", "utf8", "-c", BOOT, sources, str(lifeline)]
    if bubblewrap:
        line = [*_in_bubblewrap(bubblewrap, request, sources), *line]
    try:
        out, errors, status = _converse(line, payload, lifeline, channel, settings["seconds"] + _GRACE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # in case the supervisor was killed
    head, _, outputs = out.partition(b"\n")
    try:
        answer = msgspec.json.decode(head, type=Answer)
    except msgspec.DecodeError:
        stderr = errors.decode(errors="replace").strip()
        raise SandboxError(f"the sandbox's supervisor ended with status {status} and no answer: {stderr}") from None
    if answer.broken is not None and answer.unreadable:
        raise ConfigError(answer.broken)
    if answer.broken is not None:
        raise SandboxError(f"the sandbox could not be set up: {answer.broken}")
    return answer, outputs[: answer.sizes[0]], outputs[answer.sizes[0] :]


def _in_bubblewrap(bubblewrap: str, request: Mapping[str, Any], sources: str) -> list[str]:
    """The command that starts the supervisor, whose sources are readable, in namespaces that bubblewrap makes."""
    line = [bubblewrap, "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    line += ["--die-with-parent", "--new-session"]
    line += ["--size", str(request["disk_bytes"]), "--tmpfs", "/tmp"]  # first: readable folders may lie below it
    for path in SYSTEM:
        if os.path.islink(path):
            line += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            line += ["--ro-bind", path, path]
    for path in [*SYSTEM_FILES, *request["readable"], sources]:
        line += ["--ro-bind-try", path, path]
    for path in request["hidden"]:
        line += ["--tmpfs", path]
    for path in request["paths"]:
        line += ["--ro-bind", path, path]
    for path in request["hidden"]:
        line += ["--remount-ro", path]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    line += ["--dir", _WORK, "--remount-ro", "/"]
    return [*line, "--chdir", _WORK, "--"]


@functools.cache
def _package_folders() -> tuple[str, ...]:
    """Folders of installed packages, and of sources, below what a program may read for the standard library."""
    roots = {"/usr", "/usr/local", os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    found = {os.path.realpath(f"{root}/src") for root in roots}
    for root in sorted(roots):
        for pattern in _PACKAGES:
            found.update(str(path.resolve()) for path in Path(root).glob(pattern))
    return tuple(sorted(path for path in found if os.path.isdir(path)))


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _converse(
    line: list[str], payload: bytes, lifeline: int, channel: Sequence[IO[bytes]], seconds: float
) -> tuple[bytes, bytes, int]:
    with subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[lifeline, *[end.fileno() for end in channel]],
        env={},
        cwd="/",
        start_new_session=True,
    ) as supervisor:
        for end in channel:
            end.close()  # so that the other program sees the end of this one
        try:
            out, errors = supervisor.communicate(payload, timeout=seconds)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            raise SandboxError(f"the sandbox's supervisor did not answer within {seconds:g} s") from None
    return out, errors, supervisor.returncode
