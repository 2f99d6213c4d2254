"""CPU-heavy scoring in worker processes: it does not block the event loop, and a late call is killed.

Invariant: a call ends in a value or in a :class:`RewardFailure`. No process outlives its event loop or a killed parent.
A worker that timed out, was cancelled or died is replaced at the next call.

At most one worker a core runs at a time; the wait for a free one does not count against the deadline. The main script
is never imported, so it needs no ``if __name__ == "__main__"``. ``anyio.to_process`` kills late workers as well, but it
imports the main script, its workers receive Ctrl-C, and it loses an exception that cannot be pickled.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import attrs
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.lowlevel import RunVar
from anyio.streams.buffered import BufferedByteReceiveStream

from rollouts.concurrency.boundary import boundary, function_name
from rollouts.errors import ConfigError, RewardFailure
from rollouts.rewards import worker_main
from rollouts.training.types import RewardFn, Sample

__all__ = ["call_in_process", "in_process"]

_COMMAND = [sys.executable, "-P", worker_main.__file__]
_CLOSE_SECONDS = 5.0


@attrs.define(eq=False)
class _Worker:
    """One process, which runs one call at a time."""

    process: Process
    requests: ByteSendStream
    responses: BufferedByteReceiveStream

    @classmethod
    async def start(cls) -> _Worker:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        process = await anyio.open_process(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C must reach the run only, which ends its workers itself
        )
        assert isinstance(process.stdin, ByteSendStream)
        assert isinstance(process.stdout, ByteReceiveStream)
        return cls(process, process.stdin, BufferedByteReceiveStream(process.stdout))

    async def call(self, request: bytes) -> Any:
        await self.requests.send(len(request).to_bytes(worker_main.LENGTH_BYTES, "big") + request)
        length = int.from_bytes(await self.responses.receive_exactly(worker_main.LENGTH_BYTES), "big")
        return pickle.loads(await self.responses.receive_exactly(length))

    async def end(self) -> None:
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()


class _Pool:
    """The workers of one event loop: idle workers are reused, and all end with the loop."""

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(os.cpu_count() or 2)
        self.idle: list[_Worker] = []
        self._closer: AsyncGenerator[None, None] | None = None

    async def call(self, request: bytes) -> Any:
        if self._closer is None:
            self._closer = self._close_with_loop()
            await anext(self._closer)
        worker = self.idle.pop() if self.idle else await _Worker.start()
        sound = False
        try:
            response = await worker.call(request)
            sound = True
        finally:
            if sound:
                self.idle.append(worker)
            else:
                await worker.end()
        return response

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        # An event loop closes the async generators that were started in it when it shuts down.
        try:
            yield
        finally:
            self._closer = None
            while self.idle:
                await self.idle.pop().end()


_POOL: RunVar[_Pool] = RunVar("rollouts_reward_processes")


async def call_in_process(what: str, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Call a function of an importable module in a worker process.

    Args:
        what: name of the call in messages, and in ``waits()`` while it runs.
        function: imported by name in the worker; its arguments and its result are pickled.
        seconds: deadline, after which the process is killed. A new process takes one or two seconds for its imports.

    Raises:
        RewardFailure: the function raised or timed out, or its process died.
    """
    pool = _POOL.get(None)
    if pool is None:
        pool = _Pool()
        _POOL.set(pool)
    with boundary(RewardFailure, what):
        request = pickle.dumps((function, arguments))
    with boundary(RewardFailure, f"a free process for {what}"):
        await pool.limiter.acquire()
    try:
        with boundary(RewardFailure, what, seconds=seconds):
            try:
                response = await pool.call(request)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
                raise RewardFailure(f"{what}: its process died") from error
    finally:
        pool.limiter.release()
    if not response[0]:
        failure = RewardFailure(f"{what}{response[1]}")
        failure.add_note(response[2])
        raise failure
    return response[1]


def in_process(reward_fn: RewardFn, *, seconds: float = 60.0) -> RewardFn:
    """Run a sync ``reward_fn`` in worker processes, for CPU-heavy scoring.

    Args:
        reward_fn: a function, or a partial of one, of a module that can be imported by name; not of a recipe file.
        seconds: deadline of one call.

    Raises:
        ConfigError: another process cannot import the function by name.
    """
    inner: Any = reward_fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    expected = "a function at the top of a module that can be imported by name, not of a script or a recipe file"
    try:
        pickle.dumps(reward_fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"in_process(reward_fn): {error}; expected {expected}") from None
    module = str(getattr(inner, "__module__", "") or "")
    top = module.partition(".")[0]
    known = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top) is not None
    if not known or top == "__main__":
        raise ConfigError.of("in_process(reward_fn)", f"{module}.{function_name(reward_fn)}", expected)

    async def scored(sample: Sample) -> Any:
        return await call_in_process(f"reward {function_name(reward_fn)}", reward_fn, sample, seconds=seconds)

    scored.__name__ = function_name(reward_fn)
    return scored
