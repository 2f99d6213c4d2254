"""Sandboxed execution of Python that a model wrote: :func:`run_python`, and an environment with one tool.

Invariant: each run is a fresh interpreter in an empty folder. Its process tree is gone when the call returns or is
cancelled. :func:`containment` lists what the platform enforces and what it does not. If the platform does not enforce
everything in ``require`` (by default :data:`REQUIRED`), no program runs.

The implementation is in ``rollouts/sandboxes/python/``. This module knows no prompt and no reward.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs

from rollouts.base.extras import install_command
from rollouts.base.validators import check, is_int, number
from rollouts.dtypes import Image, Prompt, Tool
from rollouts.environments.base import ToolEnvironment, ToolResult, tool
from rollouts.errors import ConfigError
from rollouts.sandboxes.base import SandboxError
from rollouts.sandboxes.containment import REQUIRED, Containment, containment_of
from rollouts.sandboxes.python.launch import SavedFile, run_program

__all__ = [
    "REQUIRED",
    "Containment",
    "Execution",
    "PythonLimits",
    "PythonToolEnvironment",
    "SandboxError",
    "SavedFile",
    "containment",
    "notes",
    "run_connected",
    "run_python",
]

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20


_COUNT = check("an integer > 0", lambda value: is_int(value, 1))


@attrs.frozen
class PythonLimits:
    """Resource limits of one run."""

    seconds: float = attrs.field(default=10.0, validator=number(above=0))
    """Wall time from the interpreter's start; at the deadline all processes are killed."""
    cpu_seconds: float = attrs.field(default=10.0, validator=number(above=0))
    """CPU time of each process, rounded up to whole seconds."""
    memory_bytes: int = attrs.field(default=512 * _MIB, validator=_COUNT)
    """Address space of each process."""
    processes: int = attrs.field(default=8, validator=_COUNT)
    """Concurrent processes and threads, including the program's first."""
    file_bytes: int = attrs.field(default=16 * _MIB, validator=_COUNT)
    """Size of one file."""
    disk_bytes: int = attrs.field(default=64 * _MIB, validator=_COUNT)
    """Total size of all files; they are in memory."""
    output_bytes: int = attrs.field(default=64 * 1024, validator=_COUNT)
    """Of standard output and of standard error, each; the rest is discarded."""
    images: int = attrs.field(default=8, validator=_COUNT)
    """Files of the folder ``images`` that are returned, with ``images=True``; the others are counted."""
    image_bytes: int = attrs.field(default=4 * _MIB, validator=_COUNT)
    """Size of one of them; a larger one is returned without its content."""


@attrs.frozen
class Execution:
    """The result of one run."""

    stdout: str
    """Decoded as UTF-8; invalid bytes are replaced."""
    stderr: str
    exit_code: int
    """The program's exit code, or the negated number of the signal that killed it."""
    timed_out: bool
    """The program exceeded its wall time or CPU time."""
    truncated: bool
    """The program wrote more than ``output_bytes``; the beginning is returned."""
    seconds: float
    """Wall time from the interpreter's start."""
    images: tuple[SavedFile, ...] = ()
    """The first files of the folder ``images`` by name, of a program that ended by itself."""
    more_images: int = 0
    """How many further ones there were."""


def containment(namespaces: bool = True) -> Containment:
    """Test with an empty program what this machine enforces; log a warning if anything is not enforced.

    Args:
        namespaces: use namespaces where available; ``False`` tests the machine without them.

    Raises:
        SandboxError: no program can run.
    """
    return _containment(namespaces)


@functools.cache
def _containment(namespaces: bool) -> Containment:
    reasons = [] if namespaces else ["they are not wanted"]
    program = shutil.which("bwrap") if namespaces and sys.platform == "linux" else None
    attempts: list[dict[str, Any]] = [{"namespaces": True}] if namespaces else []
    attempts += [{"namespaces": False, "bubblewrap": program}] if program else []
    for attempt in [*attempts, {"namespaces": False}]:
        try:
            with _lifeline() as (lifeline, _):
                answer, _, errors = run_program(b"", b"", (), attrs.asdict(PythonLimits()) | attempt, lifeline)
            if answer.exit_code != 0:
                raise SandboxError(f"an empty program failed: {errors.decode(errors='replace').strip()}")
        except SandboxError as error:
            reasons.append(str(error))
            continue
        result = containment_of(answer.mechanisms, "; ".join(reasons))
        if result.not_enforced:
            _LOG.warning("%r", result)
        return result
    raise SandboxError("; ".join(reasons))


@functools.lru_cache(maxsize=64)
def _check_paths(paths: tuple[str, ...], namespaces: bool, bubblewrap: bool) -> None:
    """Raise ConfigError if the sandbox cannot read ``paths``: runs an empty program with them."""
    if paths:
        with _lifeline() as (lifeline, _):
            run_program(b"", b"", paths, _settings(PythonLimits(), namespaces, bubblewrap), lifeline)


def _settings(limits: PythonLimits, namespaces: bool, bubblewrap: bool) -> dict[str, Any]:
    program = shutil.which("bwrap") if bubblewrap else None
    return {**attrs.asdict(limits), "namespaces": namespaces, "bubblewrap": program}


_SLOTS: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("rollouts_python_slots")


def _slots() -> anyio.CapacityLimiter:
    """One concurrent program per CPU; a program's wall time does not include the wait for its slot."""
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
    images: bool = False,
) -> Execution:
    """Run an untrusted Python program and wait for its end.

    Args:
        code: the source of ``main.py``, run in an empty folder with the standard library. It sees none of this
            process's environment variables and files.
        stdin: its standard input.
        limits: its resource limits.
        paths: folders with further packages, which it may read and import.
        require: names of :class:`Containment` that must be enforced, or ``"all"``; ``()`` accepts whatever this
            machine enforces.
        namespaces: use namespaces where available.
        images: give the program a folder ``images`` and return its files; ``matplotlib.pyplot.show`` saves figures
            there.

    Raises:
        ConfigError: this machine does not enforce a required name, or the program's user cannot read ``paths``.
        SandboxError: the sandbox could not be set up as :func:`containment` reports. Failures of the program itself
            are in the result.
    """
    known = await anyio.to_thread.run_sync(containment, namespaces)
    known.check(require)
    async with _slots():
        return await _run(code, stdin, limits or PythonLimits(), tuple(paths), known, images=images)


async def run_connected(
    server: str,
    client: str,
    *,
    limits: PythonLimits | None = None,
    require: Collection[str] | Literal["all"] = REQUIRED,
) -> Execution:
    """Run two programs that are connected by two pipes, each in a separate sandbox; return the client's result.

    ``sys.argv[1:]`` of each contains the descriptors that it reads and writes. The server ends with the client. Both
    take one slot. Arguments and errors are as for :func:`run_python`.
    """
    known = await anyio.to_thread.run_sync(containment)
    known.check(require)
    limits = limits or PythonLimits()
    done: list[Execution] = []
    failed: list[SandboxError | ConfigError] = []

    async with _slots():
        with contextlib.ExitStack() as pipes:
            to_server, to_client = (tuple(pipes.enter_context(os.fdopen(n, "rb", 0)) for n in os.pipe()) for _ in "sc")
            async with anyio.create_task_group() as tasks:

                async def run(code: str, channel: Sequence[IO[bytes]], result: list[Execution]) -> None:
                    try:
                        result.append(await _run(code, "", limits, (), known, channel))
                    except (SandboxError, ConfigError) as error:
                        failed.append(error)
                        tasks.cancel_scope.cancel()

                tasks.start_soon(run, server, (to_server[0], to_client[1]), [])
                await run(client, (to_client[0], to_server[1]), done)
                tasks.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint_if_cancelled()
    if failed:
        raise failed[0]
    return done[0]


async def _run(
    code: str,
    stdin: str,
    limits: PythonLimits,
    paths: tuple[str, ...],
    known: Containment,
    channel: Sequence[IO[bytes]] = (),
    *,
    images: bool = False,
) -> Execution:
    """Run a program in a slot; close our ends of its channel once it has them."""
    settings = {**_settings(limits, known.namespaces, known.bubblewrap), "keep_images": images}
    source, data = code.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "surrogatepass")
    with _lifeline() as (lifeline, end):
        failed: SandboxError | ConfigError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_close_on_cancel, end)
            try:
                answer, out, errors = await anyio.to_thread.run_sync(
                    run_program, source, data, paths, settings, lifeline, channel, limiter=anyio.CapacityLimiter(1)
                )
            except (SandboxError, ConfigError) as error:
                failed = error
            tasks.cancel_scope.cancel()
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancelled run has no result
        if failed is not None:  # raised outside the task group, which would wrap it
            raise failed
    if set(answer.mechanisms) != set(known.mechanisms):
        raise SandboxError(f"the program ran with {answer.mechanisms}; expected {list(known.mechanisms)}")
    return Execution(
        stdout=out.decode("utf-8", "replace"),
        stderr=errors.decode("utf-8", "replace"),
        exit_code=answer.exit_code,
        timed_out=answer.timed_out,
        truncated=answer.truncated,
        seconds=answer.seconds,
        images=tuple(answer.images),
        more_images=answer.more_images,
    )


@contextlib.contextmanager
def _lifeline() -> Iterator[tuple[int, IO[bytes]]]:
    """A pipe: the supervisor watches the reading end, and kills everything when the writing end is closed."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as lifeline, os.fdopen(writer, "wb", 0) as end:
        yield lifeline.fileno(), end


async def _close_on_cancel(end: IO[bytes]) -> None:
    """Close the lifeline on cancellation; the supervisor then ends, and with it the thread that waits for it."""
    with end:
        await anyio.sleep_forever()


class PythonToolEnvironment(ToolEnvironment):
    """An environment with one tool, ``python``. Each call is a separate program; calls share no state.

    A subclass adds rewards, e.g. in ``answer``. An episode has no state to save: an interrupted one resumes from its
    last turn.

    Args:
        limits: of each call.
        require: names of :class:`Containment` that must be enforced, or ``"all"``; ``()`` accepts whatever this
            machine enforces.
        paths: folders with further packages.
        images: the model sees the PNG files that a program saves in the folder ``images``, and the figures that
            matplotlib shows.

    Raises:
        ConfigError: this machine does not enforce a required name, the program's user cannot read ``paths``, or
            Pillow is not installed for ``images``.
    """

    system_prompt = "Use the tool to run Python. Print what you want to see."

    def __init__(
        self,
        *,
        limits: PythonLimits | None = None,
        require: Collection[str] | Literal["all"] = REQUIRED,
        paths: Sequence[str] = (),
        images: bool = False,
    ) -> None:
        if images and importlib.util.find_spec("PIL") is None:
            raise ConfigError(f"images: Pillow is not installed; {install_command('images')}")
        self.limits = limits or PythonLimits()
        self.paths = tuple(paths)
        self.images = images
        self.require: Collection[str] | Literal["all"] = require
        known = containment()
        known.check(require)
        _check_paths(self.paths, known.namespaces, known.bubblewrap)

    async def snapshot(self) -> None:
        """``None``: no state is kept between steps. A subclass with state overrides this and ``restore``."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None

    @property
    def tools(self) -> Sequence[Tool]:
        """``python``; with ``images`` its description says where a program saves them."""
        if not self.images:
            return super().tools
        return tuple(
            attrs.evolve(one, description=_WITH_IMAGES) if one.name == "python" else one for one in super().tools
        )

    @tool
    async def python(self, code: str) -> str | ToolResult:
        """Run a Python program in a fresh interpreter and return what it prints."""
        done = await run_python(code, limits=self.limits, paths=self.paths, require=self.require, images=self.images)
        if not self.images:
            return shown(done, self.limits)
        return await anyio.to_thread.run_sync(_shown_with_images, done, self.limits)


_WITH_IMAGES = (
    "Run a Python program in a fresh interpreter and return what it prints, and the PNG files that it saves in the "
    "folder images/, as images."
)


def shown(done: Execution, limits: PythonLimits) -> str:
    """Format a run as text for the model: its output, then its notes."""
    return "\n".join([*_output(done), *notes(done, limits)]) or "[no output]"


def _output(done: Execution) -> list[str]:
    return [text.rstrip("\n") for text in (done.stdout, done.stderr) if text.strip()]


def _shown_with_images(done: Execution, limits: PythonLimits) -> ToolResult:
    """The output, the images, each after its name, then the notes; files that are not shown are notes, and counted."""
    parts: list[str | Image] = []
    lines, hidden = _output(done), []
    for file in done.images:
        try:
            image = _image_of(file, limits)
        except ConfigError as error:
            hidden.append(f"[images/{file.name} is not shown: {error}]")
            continue
        parts += ["\n".join([*lines, f"[images/{file.name}]\n"]), image]
        lines = [""]
    if done.more_images:
        hidden.append(f"[{done.more_images} further files of images: not shown; expected at most {limits.images}]")
    lines += [*hidden, *notes(done, limits)]
    text = "\n".join(lines)
    content = [*parts, text] if parts and text else parts or text or "[no output]"
    return ToolResult(content, metrics={"images_not_shown": len(hidden) - bool(done.more_images) + done.more_images})


def _image_of(file: SavedFile, limits: PythonLimits) -> Image:
    """The image of a file. Raises ConfigError with what was expected."""
    if file.size is None:
        raise ConfigError("expected a file")
    if file.data is None:
        raise ConfigError(f"{file.size} bytes; expected at most {limits.image_bytes} bytes")
    if not file.data.startswith(_PNG):  # as the tool's description says
        raise ConfigError(f"{file.size} bytes; expected a PNG")
    try:
        return Image.of(file.data)
    except ConfigError as error:
        raise ConfigError(f"{file.size} bytes; expected {str(error).rpartition('; expected ')[2]}") from None


_PNG = b"\x89PNG\r\n\x1a\n"


def notes(done: Execution, limits: PythonLimits) -> list[str]:
    """The note after the output: truncation, timeout or a nonzero exit code."""
    lines = [f"[output cut after {limits.output_bytes} bytes]"] if done.truncated else []
    if done.timed_out:
        lines.append(f"[stopped: it ran longer than {min(limits.seconds, limits.cpu_seconds):g} s]")
    elif done.exit_code:
        lines.append(f"[exit code {done.exit_code}]")
    return lines
