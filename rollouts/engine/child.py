"""The embedded engine in a process of its own, so that its computing and the caller's do not share an interpreter.

Invariant: the child lives no longer than the context that started it, and no longer than the parent process: it ends
when its standard input closes, however the parent went. This module imports no torch; the child does.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.streams.buffered import BufferedByteReceiveStream

from rollouts.engine import serve
from rollouts.errors import ConfigError, EndpointUnavailable, boundary

__all__ = ["running_child"]

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


@contextlib.asynccontextmanager
async def running_child(model: Path, *, slots: int = 64, port: int = 0) -> AsyncIterator[str]:
    """Serve a model folder from a child process while the context lasts; gives the base URL.

    What the child writes to its standard error goes to ours.

    Raises:
        ConfigError: the child ended before it served; its own message stands above.
    """
    command = [sys.executable, "-m", "rollouts.engine.child", str(model), str(slots), str(port)]
    process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with boundary(EndpointUnavailable, "starting the engine", seconds=_START_SECONDS):
            try:
                line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 1000)
            except (anyio.EndOfStream, anyio.IncompleteRead):
                raise ConfigError.of("model", str(model), "a folder that the engine can serve; it ended") from None
        yield line.decode().strip()
    finally:
        with anyio.CancelScope(shield=True):
            await process.stdin.aclose()
            with anyio.move_on_after(_STOP_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.aclose()


async def _serve_until_the_parent_goes(model: Path, slots: int, port: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve, model, slots, port)
        await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()


async def _serve(model: Path, slots: int, port: int) -> None:
    await serve(model, port=port, slots=slots, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    anyio.run(_serve_until_the_parent_goes, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
