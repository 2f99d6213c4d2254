"""The interface between the event loop and the engine thread: requests in one direction, updates in the other.

Invariant: a rid is in flight from :meth:`Frontend.enter` to :meth:`Frontend.leave` and names one request. A call that
leaves early (a disconnect, a deadline) aborts its requests. All methods run in the event loop and never compute.

This module does not know HTTP.
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
import attrs

from rollouts.engine.adapters import Adapter, load_adapter
from rollouts.engine.loading import Loaded, load_weights
from rollouts.engine.model import SlotModel
from rollouts.engine.protocol import Refusal
from rollouts.engine.requests import Request, Rules
from rollouts.engine.scheduler import Scheduler
from rollouts.errors import ConfigError

__all__ = ["Faults", "Frontend"]

T = TypeVar("T")

COMMAND_SECONDS = 60.0
"""Deadline of a control command, which waits for the current step."""
DRAIN_SECONDS = 600.0
"""Deadline of a weight update's wait for running requests."""
POLL_SECONDS = 0.005
UNFLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued."
    " Retract or finish them, then call /flush_cache."
)
"""The message of SGLang 0.5.23, verbatim: clients match it."""


@attrs.frozen
class Faults:
    """Faults for tests, as documented in :func:`rollouts.engine.running_server`."""

    unflushed_updates: bool = False
    stale_cache: bool = False
    shared_prefixes: bool = False
    reported_model: Path | None = None
    original_logprobs: bool = False


class Frontend:
    """The engine's interface for the event loop. Created and stopped inside a running loop."""

    def __init__(
        self,
        loaded: Loaded,
        slots: int,
        *,
        max_queued: int | None,
        health_seconds: float,
        faults: Faults,
    ) -> None:
        self.loaded = loaded
        self.max_queued = max_queued
        self.health_seconds = health_seconds
        self.started = time.time()
        self.path = loaded.path
        """Folder of the last successful update; an update that could not flush changes the weights but not this."""
        self.version = "default"
        """Version of the last successful update; tokens carry the scheduler's version."""
        self.faults = faults
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[str, Request] = {}
        self._updating = anyio.Lock()
        self._loading = anyio.Lock()
        self.adapters: dict[str, Adapter] = {}
        """The LoRA adapters that requests may name."""
        self.scheduler = Scheduler(
            SlotModel(loaded, slots),
            self._deliver,
            version=self.version,
            decode=self._decode,
            original_logprobs=faults.original_logprobs,
        )
        self.scheduler.start()

    def __repr__(self) -> str:
        return f"Frontend({self.path.name!r}, {len(self._in_flight)} in flight, {self.scheduler!r})"

    @property
    def reported_path(self) -> Path:
        """The folder that the server reports."""
        return self.faults.reported_model or self.path

    async def stop(self) -> None:
        """End the engine thread; requests in flight are aborted."""
        await anyio.to_thread.run_sync(self.scheduler.stop, COMMAND_SECONDS)

    def _decode(self, ids: list[int]) -> str:
        return str(self.loaded.tokenizer.decode(ids))

    def _deliver(self, updated: list[Request]) -> None:
        self._loop.call_soon_threadsafe(_notify, updated)

    # -- requests -----------------------------------------------------------------------------------------------------

    def enter(self, requests: list[Request]) -> None:
        """Start requests.

        Raises:
            Refusal: a rid is taken, or the queue is full.
        """
        for request in requests:
            if request.rid in self._in_flight:
                raise Refusal(f"Duplicate request ID detected: {request.rid}")
            if self.faults.shared_prefixes:
                request.namespace = ""
        if self.max_queued is not None and self.scheduler.queued >= self.max_queued:
            raise Refusal.failed("The request queue is full.", 503)
        for request in requests:
            self._in_flight[request.rid] = request
            self.scheduler.submit(request)

    def leave(self, requests: list[Request]) -> None:
        """Remove requests; unfinished ones are aborted."""
        for request in requests:
            self._in_flight.pop(request.rid, None)
        unfinished = [request for request in requests if request.finish is None]
        if unfinished:
            self.scheduler.abort(unfinished)

    def abort(self, rid: str) -> None:
        """Abort a request in flight and every other whose rid begins with its rid."""
        if rid in self._in_flight:
            self.scheduler.abort(request for other, request in self._in_flight.items() if other.startswith(rid))

    def abort_all(self) -> None:
        self.scheduler.abort(self._in_flight.values())

    # -- control ------------------------------------------------------------------------------------------------------

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine thread; return or raise its result."""
        done = anyio.Event()
        results: list[T] = []
        errors: list[Exception] = []

        def command() -> None:
            try:
                results.append(function())
            except Exception as error:  # noqa: BLE001 - raised in the calling thread
                errors.append(error)
            self._loop.call_soon_threadsafe(done.set)

        self.scheduler.post(command)
        with anyio.fail_after(COMMAND_SECONDS):
            await done.wait()
        if errors:
            raise errors[0]
        return results[0]

    async def flush(self, seconds: float) -> bool:
        """Discard all cached prefixes; wait up to ``seconds`` for an idle engine. Returns whether it succeeded."""
        deadline = anyio.current_time() + seconds
        while not await self.call(self._flush):
            if anyio.current_time() >= deadline:
                return False
            await anyio.sleep(POLL_SECONDS)
        return True

    async def update_weights(self, path: Path, version: str | None, *, flush: bool) -> tuple[bool, str, int]:
        """Load the weights of another folder; returns (success, message, number of paused requests)."""
        async with self._updating:
            races = self.faults.unflushed_updates and bool(self._in_flight) and not self.scheduler.paused
            try:
                weights = await anyio.to_thread.run_sync(load_weights, path, self.loaded.dtype)
                await self._drain()
                waiting = self.scheduler.running + self.scheduler.queued
                flushed = await self.call(lambda: self._replace(path, weights, version, flush, races))
            except ConfigError as error:
                return False, str(error), 0
            except TimeoutError:
                return False, f"requests still run after {DRAIN_SECONDS:g} s; pause generation first", 0
            finally:
                self.scheduler.post(lambda: self.scheduler.set_draining(False))
        return (True, "Succeeded to update model weights.", waiting) if flushed else (False, UNFLUSHED, waiting)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter.

        Raises:
            ConfigError: the name is taken, or the folder is not an adapter of the model.
        """
        async with self._loading:
            if name in self.adapters:
                raise ConfigError(f"Failed to load LoRA adapter {name} because it is already loaded")
            self.adapters[name] = await anyio.to_thread.run_sync(load_adapter, folder, self.scheduler.model.model)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: no further request may name it, and return when its last request has ended.

        Raises:
            ConfigError: no adapter has this name.
        """
        async with self._loading:
            if name not in self.adapters:
                raise ConfigError(f"LoRA with name {name} does not exist. Loaded LoRAs: {', '.join(self.adapters)}")
            adapter = self.adapters.pop(name)
            while self._uses(adapter):  # noqa: ASYNC110 - requests leave one by one
                await anyio.sleep(POLL_SECONDS)

    def _uses(self, adapter: Adapter) -> bool:
        return any(request.adapter is adapter for request in self._in_flight.values())

    def _replace(self, path: Path, weights: object, version: str | None, flush: bool, races: bool) -> bool:
        self.scheduler.replace(weights, version)
        flushed = not flush or (not races and self._flush())
        if flushed:  # in this step: the client that asked may be gone
            self.path, self.version = path, version or self.version
        return flushed

    def _flush(self) -> bool:
        return self.faults.stale_cache or self.scheduler.flush()

    async def _drain(self) -> None:
        """Stop admission and wait until running requests end; does nothing in a paused engine."""
        if self.scheduler.paused:
            return
        await self.call(lambda: self.scheduler.set_draining(True))
        with anyio.fail_after(DRAIN_SECONDS):
            while self.scheduler.running and not self.scheduler.paused:  # noqa: ASYNC110 - the state is the thread's
                await anyio.sleep(POLL_SECONDS)

    async def rename(self, version: str) -> None:
        """Rename the version of the current weights."""
        await self.call(lambda: self._rename(version))

    def _rename(self, version: str) -> None:
        self.scheduler.set_version(version)
        self.version = version

    # -- health -------------------------------------------------------------------------------------------------------

    async def probe(self) -> bool:
        """Return whether the engine samples a token, of a probe or of any request, within ``health_seconds``."""
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


def _notify(updated: Iterable[Request]) -> None:
    for request in updated:
        request.notify(request)
