"""CPU-heavy scoring in worker processes: the event loop never waits for it, and what overruns is killed.

Invariant: a call ends in a value or in a :class:`RewardFailure`; no process outlives its event loop, nor a parent that
was killed. A worker that overran, was cancelled or died is replaced at the next call.

At most as many run at once as there are cores; standing in line is not counted against the deadline. Nothing imports
the main script: one without ``if __name__ == "__main__"`` works as well.
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
from rollouts.training.rewards import worker_main
from rollouts.training.types import RewardFn, Sample

__all__ = ["call_in_process", "in_process"]

_COMMAND = [sys.executable, "-P", worker_main.__file__]
_CLOSE_SECONDS = 5.0


@attrs.define(eq=False)
class _Worker:
    """One process, which does one thing at a time."""

    process: Process
    requests: ByteSendStream
    answers: BufferedByteReceiveStream

    @classmethod
    async def start(cls) -> _Worker:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        process = await anyio.open_process(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is for the run, which ends its workers itself
        )
        assert isinstance(process.stdin, ByteSendStream)
        assert isinstance(process.stdout, ByteReceiveStream)
        return cls(process, process.stdin, BufferedByteReceiveStream(process.stdout))

    async def ask(self, request: bytes) -> Any:
        await self.requests.send(len(request).to_bytes(worker_main.LENGTH_BYTES, "big") + request)
        length = int.from_bytes(await self.answers.receive_exactly(worker_main.LENGTH_BYTES), "big")
        return pickle.loads(await self.answers.receive_exactly(length))

    async def end(self) -> None:
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()


class _Pool:
    """The workers of one event loop: those that rest are taken first, and all end with the loop."""

    def __init__(self) -> None:
        self.gate = anyio.CapacityLimiter(os.cpu_count() or 2)
        self.resting: list[_Worker] = []
        self._holder: AsyncGenerator[None, None] | None = None

    async def call(self, request: bytes) -> Any:
        if self._holder is None:
            self._holder = self._hold()
            await anext(self._holder)
        worker = self.resting.pop() if self.resting else await _Worker.start()
        sound = False
        try:
            answer = await worker.ask(request)
            sound = True
        finally:
            if sound:
                self.resting.append(worker)
            else:
                await worker.end()
        return answer

    async def _hold(self) -> AsyncGenerator[None, None]:
        # The loop knows each async generator that was started in it and closes it when it shuts down.
        try:
            yield
        finally:
            self._holder = None
            while self.resting:
                await self.resting.pop().end()


_POOL: RunVar[_Pool] = RunVar("rollouts_reward_processes")


async def call_in_process(what: str, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Call a function of an importable module in a worker process.

    Args:
        what: names it in messages, and in ``waits()`` while it runs.
        function: found by its name in the worker; its arguments and its answer are pickled.
        seconds: deadline, after which the process is killed. A new process takes a second or two to import things.

    Raises:
        RewardFailure: it raised, overran, or its process died.
    """
    pool = _POOL.get(None)
    if pool is None:
        pool = _Pool()
        _POOL.set(pool)
    with boundary(RewardFailure, what):
        request = pickle.dumps((function, arguments))
    with boundary(RewardFailure, f"a free process for {what}"):
        await pool.gate.acquire()
    try:
        with boundary(RewardFailure, what, seconds=seconds):
            try:
                answer = await pool.call(request)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
                raise RewardFailure(f"{what}: its process died") from error
    finally:
        pool.gate.release()
    if not answer[0]:
        failure = RewardFailure(f"{what}{answer[1]}")
        failure.add_note(answer[2])
        raise failure
    return answer[1]


def in_process(reward_fn: RewardFn, *, seconds: float = 60.0) -> RewardFn:
    """A sync ``reward_fn`` that runs in worker processes: for scoring that computes for long.

    Args:
        reward_fn: a function, or a partial of one, of a module that a new process can import; a recipe file is none.
        seconds: deadline of one call.

    Raises:
        ConfigError: it cannot be found by name in another process.
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
