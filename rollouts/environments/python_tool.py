"""Python that a model wrote, run where it can do no harm: one function, and an environment with one tool.

Invariant: each run is a fresh interpreter in an empty folder, in a process tree of its own that is gone when the call
returns, also when it is cancelled. What the platform lets us forbid is forbidden; what it does not is in
:func:`containment`. A machine that does not enforce what ``require`` names runs nothing; by default that is
:data:`REQUIRED`.

The rooms behind it are in ``sandbox/``. This module knows no prompt and no reward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs

from rollouts.dtypes import Prompt
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.environments.sandbox.containment import REQUIRED, Containment, containment_of
from rollouts.environments.sandbox.launch import SandboxError, run_program
from rollouts.errors import ConfigError

__all__ = [
    "REQUIRED",
    "Containment",
    "Execution",
    "PythonLimits",
    "PythonToolEnvironment",
    "SandboxError",
    "containment",
    "run_python",
]

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20


def _above_zero(limits: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError.of(f"PythonLimits.{field.name}", value, "a number > 0")
    if field.type in ("int", int) and not isinstance(value, int):
        raise ConfigError.of(f"PythonLimits.{field.name}", value, "an integer > 0")


@attrs.frozen
class PythonLimits:
    """What one run may use."""

    seconds: float = attrs.field(default=10.0, validator=_above_zero)
    """Wall time from the interpreter's start; then everything is killed."""
    cpu_seconds: float = attrs.field(default=10.0, validator=_above_zero)
    """Processor time of each process, in whole seconds rounded up."""
    memory_bytes: int = attrs.field(default=512 * _MIB, validator=_above_zero)
    """Address space of each process."""
    processes: int = attrs.field(default=8, validator=_above_zero)
    """Processes and threads at one time, the program's first one included."""
    file_bytes: int = attrs.field(default=16 * _MIB, validator=_above_zero)
    """Size of one file."""
    disk_bytes: int = attrs.field(default=64 * _MIB, validator=_above_zero)
    """All files together; they are in memory."""
    output_bytes: int = attrs.field(default=64 * 1024, validator=_above_zero)
    """Of standard output and of standard error, each; the rest is read and thrown away."""


@attrs.frozen
class Execution:
    """What became of one run."""

    stdout: str
    """UTF-8; what is not is replaced."""
    stderr: str
    exit_code: int
    """The program's, or minus the signal that ended it."""
    timed_out: bool
    """It was ended for its wall time or its processor time."""
    truncated: bool
    """It wrote more than ``output_bytes``; the beginning is kept."""
    seconds: float
    """Wall time from the interpreter's start."""


def containment(namespaces: bool = True) -> Containment:
    """What is enforced on this machine, found out with a first run; said in the log if anything is not.

    Args:
        namespaces: use them if there are any; otherwise see what is enforced where they are forbidden.

    Raises:
        SandboxError: there is no way to run anything.
    """
    return _found_out(namespaces)


@functools.cache
def _found_out(namespaces: bool) -> Containment:
    reasons = [] if namespaces else ["they are not wanted"]
    for attempt in (True, False)[not namespaces :]:
        try:
            with _lifeline() as (lifeline, _):
                answer, _, errors = run_program(b"", b"", (), _settings(PythonLimits(), attempt), lifeline)
            if answer.exit_code != 0:
                raise SandboxError(f"an empty program failed: {errors.decode(errors='replace').strip()}")
        except SandboxError as error:
            reasons.append(str(error))
            continue
        found = containment_of(answer.mechanisms, "; ".join(reasons))
        if found.not_enforced:
            _LOG.warning("%r", found)
        return found
    raise SandboxError("; ".join(reasons))


def _settings(limits: PythonLimits, namespaces: bool) -> dict[str, Any]:
    return {**attrs.asdict(limits), "namespaces": namespaces}


_SLOTS: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("rollouts_python_slots")


def _slots() -> anyio.CapacityLimiter:
    """As many programs at once as there are processors; others stand in line, which is not counted as their time."""
    try:
        return _SLOTS.get()
    except LookupError:
        _SLOTS.set(anyio.CapacityLimiter(os.cpu_count() or 1))
        return _SLOTS.get()


async def run_python(
    code: str,
    *,
    stdin: str = "",
    limits: PythonLimits | None = None,
    paths: Sequence[str] = (),
    require: Collection[str] | Literal["all"] = REQUIRED,
    namespaces: bool = True,
) -> Execution:
    """Run a Python program that nobody trusts, and wait for its end.

    Args:
        code: the source of ``main.py``, run in an empty folder with the standard library. It sees no variable and no
            file of ours.
        stdin: what it reads.
        limits: what it may use.
        paths: folders with further packages, which it may read and import.
        require: names of :class:`Containment` that must be enforced, or ``"all"``; ``()`` runs it with whatever this
            machine enforces.
        namespaces: use them if there are any.

    Raises:
        ConfigError: something that is required cannot be enforced on this machine.
        SandboxError: the sandbox could not be set up as :func:`containment` says. The program's own failures are in
            the result.
    """
    known = await anyio.to_thread.run_sync(containment, namespaces)
    known.check(require)
    settings = _settings(limits or PythonLimits(), known.namespaces)
    source, given = code.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "surrogatepass")
    async with _slots():
        with _lifeline() as (lifeline, end):
            failed: SandboxError | None = None
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_hold, end)
                try:
                    answer, out, errors = await anyio.to_thread.run_sync(
                        run_program, source, given, tuple(paths), settings, lifeline, limiter=anyio.CapacityLimiter(1)
                    )
                except SandboxError as error:
                    failed = error
                tasks.cancel_scope.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()  # what we ended ourselves is neither answer nor failure
            if failed is not None:  # raised here, where no task group wraps it
                raise failed
    if set(answer.mechanisms) != set(known.mechanisms):
        raise SandboxError(f"it ran with {answer.mechanisms}; at the start that was {list(known.mechanisms)}")
    return Execution(
        stdout=out.decode("utf-8", "replace"),
        stderr=errors.decode("utf-8", "replace"),
        exit_code=answer.exit_code,
        timed_out=answer.timed_out,
        truncated=answer.truncated,
        seconds=answer.seconds,
    )


@contextlib.contextmanager
def _lifeline() -> Iterator[tuple[int, IO[bytes]]]:
    """The end that a warden watches, and the one to close when all shall end."""
    watched, held = os.pipe()
    with os.fdopen(watched, "rb", 0) as lifeline, os.fdopen(held, "wb", 0) as end:
        yield lifeline.fileno(), end


async def _hold(end: IO[bytes]) -> None:
    """Keep a lifeline until we are cancelled: the warden then ends everything, and the thread that waits for it."""
    with end:
        await anyio.sleep_forever()


class PythonToolEnvironment(ToolEnvironment):
    """An environment with one tool, ``python``. Each call is a program of its own; nothing is left for the next.

    A subclass has the reward's side of the task, e.g. its ``answer``. An episode has no state to save: one that was
    interrupted goes on from its last turn.

    Args:
        limits: of each call.
        require: names of :class:`Containment` that must be enforced, or ``"all"``; ``()`` runs programs with whatever
            this machine enforces.
        paths: folders with further packages.

    Raises:
        ConfigError: something that is required cannot be enforced on this machine.
    """

    system_prompt = "Use the tool to run Python. Print what you want to see."

    def __init__(
        self,
        *,
        limits: PythonLimits | None = None,
        require: Collection[str] | Literal["all"] = REQUIRED,
        paths: Sequence[str] = (),
    ) -> None:
        self.limits = limits or PythonLimits()
        self.paths = tuple(paths)
        self.require: Collection[str] | Literal["all"] = require
        containment().check(require)

    async def snapshot(self) -> None:
        """Nothing: it remembers nothing between steps. A subclass that does overrides this and ``restore``."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program in a fresh interpreter and return what it prints."""
        done = await run_python(code, limits=self.limits, paths=self.paths, require=self.require)
        return shown(done, self.limits)


def shown(done: Execution, limits: PythonLimits) -> str:
    """A run as text for a model: what it printed, then whatever it must know beside."""
    notes = []
    if done.truncated:
        notes.append(f"[output cut after {limits.output_bytes} bytes]")
    if done.timed_out:
        notes.append(f"[stopped: it ran longer than {min(limits.seconds, limits.cpu_seconds):g} s]")
    elif done.exit_code:
        notes.append(f"[exit code {done.exit_code}]")
    parts = [text.rstrip("\n") for text in (done.stdout, done.stderr) if text.strip()]
    return "\n".join([*parts, *notes]) or "[no output]"
