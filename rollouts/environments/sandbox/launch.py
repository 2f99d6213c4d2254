"""Our side of the sandbox: starts a warden for one program, hands it the request, takes its answer.

Invariant: the warden inherits no environment variable and, beside its pipes, no descriptor; when our side goes away,
however it goes, its lifeline is cut. What the warden cannot do is a :class:`SandboxError`, never an answer.

It knows no limits' meaning and no messages. Blocking: to be called in a worker thread.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollouts.environments.sandbox.supervisor import BOOT

__all__ = ["Answer", "SandboxError", "run_program"]

_GRACE_SECONDS = 60.0


class SandboxError(RuntimeError):
    """The sandbox itself failed; the program's own failures are answers."""


class Answer(msgspec.Struct, frozen=True):
    """What the warden tells of one program."""

    broken: str | None
    mechanisms: list[str]
    exit_code: int
    timed_out: bool
    truncated: bool
    seconds: float
    sizes: list[int]


def run_program(
    code: bytes, stdin: bytes, paths: Sequence[str], settings: Mapping[str, Any], lifeline: int
) -> tuple[Answer, bytes, bytes]:
    """Run a program to its end, or until the other end of ``lifeline`` is closed.

    Args:
        code: Python source.
        stdin: what it reads.
        paths: folders that it may import from.
        settings: limits in the warden's words, and ``namespaces``.
        lifeline: the reading end of a pipe.

    Returns:
        What became of it, its standard output and its standard error.

    Raises:
        SandboxError: it could not be run as was asked.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    places = [os.path.realpath(path) for path in paths]
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)} - {"/"}
    folder = tempfile.mkdtemp(prefix="rollouts-python-")
    request = {
        **settings,
        "python": python,
        "paths": places,
        "readable": [python, *sorted(prefixes), *places],
        "folder": os.path.realpath(folder),
        "code_bytes": len(code),
        "stdin_bytes": len(stdin),
    }
    payload = msgspec.json.encode(request) + b"\n" + code + stdin
    line = [python, "-I", "-S", "-X", "utf8", "-c", BOOT, str(Path(__file__).parent), str(lifeline)]
    try:
        out, errors, status = _converse(line, payload, lifeline, settings["seconds"] + _GRACE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the warden does it, unless it was killed
    head, _, outputs = out.partition(b"\n")
    try:
        answer = msgspec.json.decode(head, type=Answer)
    except msgspec.DecodeError:
        said = errors.decode(errors="replace").strip()
        raise SandboxError(f"the sandbox's warden ended with status {status} and no answer: {said}") from None
    if answer.broken is not None:
        raise SandboxError(f"the sandbox could not be set up: {answer.broken}")
    return answer, outputs[: answer.sizes[0]], outputs[answer.sizes[0] :]


def _converse(line: list[str], payload: bytes, lifeline: int, seconds: float) -> tuple[bytes, bytes, int]:
    with subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[lifeline],
        env={},
        cwd="/",
        start_new_session=True,
    ) as warden:
        try:
            out, errors = warden.communicate(payload, timeout=seconds)
        except subprocess.TimeoutExpired:
            warden.kill()
            raise SandboxError(f"the sandbox's warden did not answer within {seconds:g} s") from None
    return out, errors, warden.returncode
