"""Workers that join over HTTP: a process that anyone starts where it has CPUs, e.g. a pod or a job of a scheduler.

    GET    /v1/workers             what to play: version, recipe, options, servers
    POST   /v1/workers             join, with that as body: 410 if it has changed; 503 while every slot has a worker
    POST   /v1/workers/ID/orders   {after}: 200 orders after that number, with the header Order; 204 none for now
    POST   /v1/workers/ID/records  records, with the header Record: a number that grows by 1
    DELETE /v1/workers/ID          leave: finish or hand back, then 410

Invariant: orders and records arrive once and in order, although requests may be repeated: each has a number. A request
is a sign of life. 410 says that a worker has ended for this side; it may join again. Orders are plain data, never
pickled. A body has at most :data:`MOST_BYTES`; bodies that are not decoded yet have :data:`MOST_HELD` together, beyond
which records are refused with 503 until there is room. Access is checked before a request arrives here.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web

from rollouts.distributed.dispatch import Dispatcher, Link, LinkLost, Workers
from rollouts.distributed.messages import MOST_BYTES, PLAIN, leaving_record
from rollouts.distributed.slots import MESSAGE_BYTES
from rollouts.errors import ConfigError
from rollouts.http.bodies import Bodies
from rollouts.runs.record_bytes import LENGTH

__all__ = ["MOST_HELD", "SILENT_SECONDS", "JoinedWorkers"]

MOST_HELD = 1 << 30
_SMALL = 1 << 20
"""Most bytes of a body that has no records."""
SILENT_SECONDS = 30.0
"""Longer than for processes: a worker answers from its event loop, which foreign code may block."""
_POLL_SECONDS = 1.0
"""Longest wait of a request for orders; a worker then shows that it is alive."""
_LOST_AFTER = 3
"""A worker that is silent for this multiple of the limit is replaced by the next to join."""
_TICKS = 15
"""Silence is counted in waits of this part of the limit: a service that was stopped counts one wait, not its pause."""
_DIGITS = 18
"""Most digits of a number in a header."""
_JOIN_SECONDS = 10.0
"""Longest wait of a worker that joins for a slot."""


class _After(msgspec.Struct, forbid_unknown_fields=True):
    after: int


class JoinedWorkers:
    """The side of the manager: routes for workers, and links to them.

    Args:
        silent_seconds: time without a request after which a worker's rollouts go to the others.
        per_worker: rollouts that one worker plays at once, for :meth:`numbers`.

    Attributes:
        bodies: the bodies that are not decoded yet.
        facts: what a worker plays, :class:`rollouts.distributed.join.Facts` as a dict; ``None`` until it is known.
    """

    def __init__(self, *, silent_seconds: float = SILENT_SECONDS, per_worker: int = 64) -> None:
        self.bodies = Bodies(MOST_HELD)
        self.facts: Mapping[str, Any] | None = None
        self._silent_seconds = silent_seconds
        self._per_worker = per_worker
        self._open_slots: deque[_Vacancy] = deque()
        self._opened = anyio.Event()
        self._workers: dict[str, _JoinedWorker] = {}
        self._dispatcher: Dispatcher | None = None
        self._bounds = (0, 0)

    def __repr__(self) -> str:
        return f"<JoinedWorkers: {len(self._workers)} joined, {len(self._open_slots)} slots open>"

    @property
    def routes(self) -> tuple[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ...]:
        return (
            ("GET", "/v1/workers", self._what_to_play),
            ("POST", "/v1/workers", self._join),
            ("POST", r"/v1/workers/{id:[0-9a-f]{32}}/orders", self._orders),
            ("POST", r"/v1/workers/{id:[0-9a-f]{32}}/records", self._records),
            ("DELETE", r"/v1/workers/{id:[0-9a-f]{32}}", self._leave),
        )

    def dispatcher(self, workers: Workers) -> AbstractAsyncContextManager[Dispatcher]:
        """Play in workers while the context lasts; entered when the minimum has joined."""
        options: dict[str, Any] = {"silent_seconds": self._silent_seconds, "orders": PLAIN, "refills": True}
        self._dispatcher = Dispatcher(self._connect, workers, **options)
        self._bounds = workers if isinstance(workers, tuple) else (workers, workers)
        return self._dispatcher

    def numbers(self) -> dict[str, int]:
        """Gauges; ``workers_wanted`` is the number of workers for the rollouts that are outstanding."""
        numbers = self._dispatcher.numbers() if self._dispatcher is not None else {"outstanding": 0}
        least, most = self._bounds
        wanted = math.ceil(numbers["outstanding"] / self._per_worker)
        bytes_held = {"worker_bytes_held": self.bodies.held, "worker_bodies_refused": self.bodies.refused}
        return {**numbers, **bytes_held, "workers_wanted": min(max(wanted, least), most)}

    async def _connect(self, number: int) -> Link:
        """Wait until a worker joins."""
        vacancy = _Vacancy()
        self._open_slots.append(vacancy)
        self._opened.set()
        self._opened = anyio.Event()
        try:
            await vacancy.filled.wait()
        finally:
            if vacancy in self._open_slots:
                self._open_slots.remove(vacancy)
        assert vacancy.worker is not None, "a vacancy is filled by a worker"
        return vacancy.worker

    # -- routes --

    async def _what_to_play(self, request: web.Request) -> web.Response:
        if self.facts is None:
            return _not_ready()
        return web.Response(body=msgspec.json.encode(self.facts), content_type="application/json")

    async def _join(self, request: web.Request) -> web.Response:
        if built := await self._read_small(request):
            if self.facts is None:
                return _not_ready()
            if built != msgspec.json.encode(self.facts):
                return web.Response(status=410, text="this service plays something else; ask what")
        with anyio.move_on_after(_JOIN_SECONDS):
            while not self._open_slots:
                await self._opened.wait()
        if not self._open_slots:
            return web.Response(status=503, text="every slot has a worker", headers={"Retry-After": "10"})
        identity = secrets.token_hex(16)
        seconds = self._silent_seconds * _LOST_AFTER
        worker = _JoinedWorker(identity, seconds, self._workers, self.bodies.release)
        vacancy = self._open_slots.popleft()
        self._workers[identity] = vacancy.worker = worker
        vacancy.filled.set()
        return web.Response(body=msgspec.json.encode({"worker": identity}), content_type="application/json")

    async def _orders(self, request: web.Request) -> web.Response:
        worker = self._workers.get(request.match_info["id"])
        if worker is None:
            return _gone()
        worker.beats()  # first: a request for which there is no room is a sign of life, too
        try:
            after = msgspec.json.decode(await self._read_small(request), type=_After).after
        except msgspec.DecodeError as error:
            raise ConfigError(f"body of {request.path}: {error}") from None
        with anyio.move_on_after(_POLL_SECONDS):
            if (orders := await worker.orders(after)) is None:
                return _gone()
            return web.Response(body=orders[1], headers={"Order": str(orders[0])})
        return web.Response(status=204)

    async def _records(self, request: web.Request) -> web.Response:
        worker = self._workers.get(request.match_info["id"])
        if worker is None:
            return _gone()
        worker.beats()
        number, body = request.headers.get("Record", ""), await self.bodies.read(request, MOST_BYTES)
        is_kept = False
        try:
            is_framed = _is_framed(body) if len(body) < _SMALL else await anyio.to_thread.run_sync(_is_framed, body)
            if not number.isascii() or not number.isdigit() or len(number) > _DIGITS or not is_framed:
                raise ConfigError(f"body of {request.path}: expected whole records, and the header Record")
            worker.beats()
            is_kept = worker.put(int(number), body)
        finally:
            if not is_kept:
                self.bodies.release(len(body))
        return web.Response()

    async def _read_small(self, request: web.Request) -> bytes:
        body = await self.bodies.read(request, _SMALL)
        self.bodies.release(len(body))
        return body

    async def _leave(self, request: web.Request) -> web.Response:
        worker = self._workers.get(request.match_info["id"])
        if worker is None:
            return _gone()
        worker.leave()
        return web.Response()


def _not_ready() -> web.Response:
    return web.Response(status=503, text="the recipe is not checked yet", headers={"Retry-After": "1"})


def _gone() -> web.Response:
    return web.Response(status=410, text="this worker has ended for the service; join again")


def _is_framed(body: bytes) -> bool:
    """Whether a message consists of whole records."""
    at = 0
    while at + LENGTH.size <= len(body):
        (size,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size + size
    return at == len(body)


class _Vacancy:
    """A slot without a worker."""

    def __init__(self) -> None:
        self.filled = anyio.Event()
        self.worker: _JoinedWorker | None = None


class _JoinedWorker:
    """A worker that joined (protocol :class:`~rollouts.distributed.dispatch.Link`)."""

    def __init__(
        self, identity: str, lost_seconds: float, workers: dict[str, _JoinedWorker], release: Callable[[int], None]
    ) -> None:
        self._identity = identity
        self._lost_seconds = lost_seconds
        self._workers = workers
        self._release = release
        self._numbers = itertools.count(1)
        self._sent: deque[tuple[int, bytes]] = deque()
        """Orders that the worker may not have."""
        self._received: deque[bytes] = deque()
        self._leaves = False
        """Whether the worker said that it leaves, and the dispatcher does not know it yet."""
        self._next_record = 0
        self._changed = anyio.Event()
        self._beat = anyio.Event()
        self._silent_waits = 0
        self.has_ended = False

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # -- the worker's requests --

    def beats(self) -> None:
        self._silent_waits = 0
        self._beat.set()
        self._beat = anyio.Event()

    async def orders(self, after: int) -> tuple[int, bytes] | None:
        """Wait for orders after a number; return as many as fit with the number of the last, ``None`` at the end."""
        while self._sent and self._sent[0][0] <= after:
            self._sent.popleft()
        while not self._sent and not self.has_ended:
            await self._changed.wait()
        last, messages, size = 0, list[bytes](), 0
        for number, message in self._sent:
            if messages and size + len(message) > MESSAGE_BYTES:
                break
            last, size = number, size + len(message)
            messages.append(message)
        return (last, b"".join(messages)) if messages else None

    def put(self, number: int, body: bytes) -> bool:
        """Receive records, and release them later; those of a repeated request are there already."""
        if number > self._next_record:
            raise ConfigError.of("Record", number, f"at most {self._next_record}, the number of the next records")
        if number < self._next_record or self.has_ended:
            return False
        self._next_record += 1
        self._received.append(body)
        self._notify()
        return True

    def leave(self) -> None:
        self._leaves = True
        self._notify()

    # -- the dispatcher --

    async def send(self, message: bytes) -> None:
        self._sent.append((next(self._numbers), message))
        self._notify()

    async def receive(self) -> bytes:
        while not self._received and not self._leaves:
            if self._silent_waits >= _TICKS:
                raise LinkLost(f"the worker {self._identity[:8]} sent no request for {self._lost_seconds:g} s")
            with anyio.move_on_after(self._lost_seconds / _TICKS) as wait:
                await self._changed.wait()
            self._silent_waits += wait.cancelled_caught
        if self._leaves:
            self._leaves = False
            return leaving_record()
        body = self._received.popleft()
        self._release(len(body))
        return body

    async def beat(self) -> None:
        await self._beat.wait()

    async def aclose(self) -> None:
        self.has_ended = True
        self._release(sum(map(len, self._received)))
        self._received.clear()
        self._workers.pop(self._identity, None)
        self._notify()
