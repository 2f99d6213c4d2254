"""Where the event loop and the engine thread meet: requests go one way, news the other.

Invariant: a rid is in flight from :meth:`Frontend.enter` to :meth:`Frontend.leave` and names one request; a call that
leaves before the end (a disconnect, a deadline) aborts what it started. All methods run in the event loop and never
compute.

This module knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from rollouts.engine.loading import Loaded, load_weights
from rollouts.engine.model import SlotModel
from rollouts.engine.protocol import Refusal
from rollouts.engine.requests import Request, Rules
from rollouts.engine.scheduler import Scheduler
from rollouts.errors import ConfigError

__all__ = ["Frontend"]

T = TypeVar("T")

COMMAND_SECONDS = 60.0
"""A command of the control plane waits at most so long for the step that runs."""
DRAIN_SECONDS = 600.0
"""A weight update waits at most so long for the requests that run."""
POLL_SECONDS = 0.005
UNFLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued."
    " Retract or finish them, then call /flush_cache."
)
"""SGLang's own words: clients look for them."""


class Frontend:
    """The engine as the event loop sees it. Made, started and stopped inside a running loop."""

    def __init__(
        self,
        loaded: Loaded,
        slots: int,
        *,
        max_queued: int | None,
        health_seconds: float,
        unflushed_updates: bool = False,
    ) -> None:
        self.loaded = loaded
        self.max_queued = max_queued
        self.health_seconds = health_seconds
        self.started = time.time()
        self.path = loaded.path
        """Of the last update that succeeded; an update that could not flush changes the weights and not this."""
        self.version = "default"
        """As :attr:`path`; tokens carry the scheduler's version."""
        self.unflushed_updates = unflushed_updates
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[str, Request] = {}
        self._updating = anyio.Lock()
        self.scheduler = Scheduler(
            SlotModel(loaded, slots),
            self._deliver,
            version=self.version,
            decode=self._decode,
        )
        self.scheduler.start()

    def __repr__(self) -> str:
        return f"Frontend({self.path.name!r}, {len(self._in_flight)} in flight, {self.scheduler!r})"

    async def stop(self) -> None:
        """End the engine thread; what is in flight is answered as aborted."""
        await anyio.to_thread.run_sync(self.scheduler.stop, COMMAND_SECONDS)

    def _decode(self, ids: list[int]) -> str:
        return str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True))

    def _deliver(self, news: list[Request]) -> None:
        self._loop.call_soon_threadsafe(_spread, news)

    # -- requests -----------------------------------------------------------------------------------------------------

    def enter(self, requests: list[Request]) -> None:
        """Start requests.

        Raises:
            Refusal: a rid is taken, or the queue is full.
        """
        for request in requests:
            if request.rid in self._in_flight:
                raise Refusal(f"Duplicate request ID detected: {request.rid}")
        if self.max_queued is not None and self.scheduler.queued >= self.max_queued:
            raise Refusal.given_up("The request queue is full.", 503)
        for request in requests:
            self._in_flight[request.rid] = request
            self.scheduler.submit(request)

    def leave(self, requests: list[Request]) -> None:
        """Let go of requests; those that have not ended are aborted."""
        for request in requests:
            self._in_flight.pop(request.rid, None)
        unfinished = [request for request in requests if request.finish is None]
        if unfinished:
            self.scheduler.abort(unfinished)

    def abort(self, rid: str) -> None:
        """Abort a request that is in flight, and with it every other whose rid begins with its own."""
        if rid in self._in_flight:
            self.scheduler.abort(request for other, request in self._in_flight.items() if other.startswith(rid))

    def abort_all(self) -> None:
        self.scheduler.abort(self._in_flight.values())

    # -- control ------------------------------------------------------------------------------------------------------

    async def ask(self, question: Callable[[], T]) -> T:
        """Run something in the engine thread and give back what it returned or raised."""
        answered = anyio.Event()
        results: list[T] = []
        errors: list[Exception] = []

        def command() -> None:
            try:
                results.append(question())
            except Exception as error:  # noqa: BLE001 - carried over to the thread that asked
                errors.append(error)
            self._loop.call_soon_threadsafe(answered.set)

        self.scheduler.post(command)
        with anyio.fail_after(COMMAND_SECONDS):
            await answered.wait()
        if errors:
            raise errors[0]
        return results[0]

    async def flush(self, seconds: float) -> bool:
        """Forget all cached prefixes, waiting up to ``seconds`` for an idle engine; say whether it was done."""
        deadline = anyio.current_time() + seconds
        while not await self.ask(self.scheduler.flush):
            if anyio.current_time() >= deadline:
                return False
            await anyio.sleep(POLL_SECONDS)
        return True

    async def update_weights(self, path: Path, version: str | None, *, flush: bool) -> tuple[bool, str, int]:
        """Serve the weights of another folder: (success, message, requests that were paused meanwhile)."""
        async with self._updating:
            races = self.unflushed_updates and bool(self._in_flight) and not self.scheduler.paused
            try:
                weights = await anyio.to_thread.run_sync(load_weights, path, self.loaded.dtype)
                await self._drain()
                waiting = self.scheduler.running + self.scheduler.queued
                flushed = await self.ask(lambda: self._replace(weights, version, flush, races))
            except ConfigError as error:
                return False, str(error), 0
            except TimeoutError:
                return False, f"requests still run after {DRAIN_SECONDS:g} s; pause generation first", 0
            finally:
                self.scheduler.post(lambda: self.scheduler.hold(False))
        if not flushed:
            return False, UNFLUSHED, waiting
        self.path = path
        self.version = version or self.version
        return True, "Succeeded to update model weights.", waiting

    def _replace(self, weights: object, version: str | None, flush: bool, races: bool) -> bool:
        self.scheduler.replace(weights, version)
        return not flush or (not races and self.scheduler.flush())

    async def _drain(self) -> None:
        """Unless the engine is paused: let what runs come to its end, and admit nothing new."""
        if self.scheduler.paused:
            return
        await self.ask(lambda: self.scheduler.hold(True))
        with anyio.fail_after(DRAIN_SECONDS):
            while self.scheduler.running and not self.scheduler.paused:  # noqa: ASYNC110 - the state is the thread's
                await anyio.sleep(POLL_SECONDS)

    async def rename(self, version: str) -> None:
        """Call the weights that are served something else."""
        await self.ask(lambda: self.scheduler.set_version(version))
        self.version = version

    # -- health -------------------------------------------------------------------------------------------------------

    async def probe(self) -> bool:
        """Sample one token, or see that others are being sampled, within ``health_seconds``."""
        ended = anyio.Event()
        probe = Request(f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], Rules(temperature=0.0, limit=1), lambda _: ended.set())
        before = self.scheduler.generated
        self.enter([probe])
        try:
            with anyio.move_on_after(self.health_seconds):
                while not ended.is_set() and self.scheduler.generated == before:
                    with anyio.move_on_after(0.05):
                        await ended.wait()
            return self.scheduler.generated != before
        finally:
            self.leave([probe])


def _spread(news: Iterable[Request]) -> None:
    for request in news:
        request.notify(request)
