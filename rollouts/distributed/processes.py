"""Workers as processes of this machine, each with its own interpreter and event loop.

Invariant: a worker ends with the context that started it, and with its parent, however the parent dies, because the
socket closes. Ctrl-C at the terminal does not reach it. At SIGTERM it leaves: it finishes its rollouts for a while, and
the others play the rest. While it plays, one of its threads sends signs of life; a stopped process, or a native call
that keeps the interpreter's lock, stops them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess

import anyio
import anyio.to_thread

from rollouts.distributed.dispatch import SILENT_SECONDS, Dispatcher, Link, LinkLost, Workers
from rollouts.distributed.worker import ConfigFactory, Player, create_config
from rollouts.errors import ConfigError

__all__ = ["in_processes"]

_SIZE = struct.Struct("<Q")
_CHUNK = 1 << 20
_READY = b"ready"
_RUNS, _BLOCKED = b"runs", b"blocked"
_ROLLOUTS_A_MESSAGE = 32
_LINGER_SECONDS = 0.02
"""Longest wait of a finished rollout for others in its message: each message wakes the parent."""
_START_SECONDS = 300.0
_END_SECONDS = 10.0
_BEAT_SECONDS = 0.5
_BUSY_BEATS = 120
"""Signs of life in a row that count although the worker's event loop does not run: foreign code may block it."""


@contextlib.asynccontextmanager
async def in_processes(
    factory: ConfigFactory, workers: Workers, *, silent_seconds: float = SILENT_SECONDS
) -> AsyncIterator[Dispatcher]:
    """Start workers on this machine; they end with the context.

    Args:
        factory: creates the config in each worker: :class:`RecipeConfig`, a module-level function, or a partial of one.
        workers: number of processes; or the minimum with which the run begins, and the maximum.
        silent_seconds: time without a sign of life after which a worker's rollouts go to the others.

    Raises:
        ConfigError: the factory cannot be pickled, or fails in a worker.
    """
    async with Dispatcher(functools.partial(_start, factory), workers, silent_seconds=silent_seconds) as dispatcher:
        yield dispatcher


class _Socket:
    """Length-prefixed messages over a stream socket."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._name = name
        self._buffer = bytearray()

    async def send(self, message: bytes) -> None:
        """Send a message; raises LinkLost."""
        for part in (_SIZE.pack(len(message)), message):
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[self._connection.send(rest) :]
                except BlockingIOError:
                    await anyio.wait_writable(self._connection)
                except OSError as error:
                    raise LinkLost(f"{self._name} is gone: {error}") from error

    async def receive(self) -> bytes:
        """Wait for a message; raises LinkLost."""
        size = _SIZE.unpack(await self._read_exactly(_SIZE.size))[0]
        return await self._read_exactly(size)

    def close(self) -> None:
        self._connection.close()

    async def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await anyio.wait_readable(self._connection)
            try:
                data = self._connection.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost(f"{self._name} is gone: {error}") from error
            if not data:
                raise LinkLost(f"{self._name} is gone")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


class _Process:
    """A worker process (protocol :class:`~rollouts.distributed.dispatch.Link`)."""

    def __init__(self, name: str, process: BaseProcess, pipe: _Socket, beats: _Socket) -> None:
        self._name = name
        self._process = process
        self._pipe = pipe
        self._beats = beats
        self._busy = 0

    async def send(self, message: bytes) -> None:
        await self._pipe.send(message)

    async def receive(self) -> bytes:
        try:
            return await self._pipe.receive()
        except LinkLost as error:
            await self._join()
            code = self._process.exitcode
            raise LinkLost(f"{self._name} (pid {self._process.pid}) ended with exit code {code}") from error

    async def beat(self) -> None:
        try:
            while True:
                self._busy = 0 if await self._beats.receive() == _RUNS else self._busy + 1
                if self._busy <= _BUSY_BEATS:
                    return
        except LinkLost:  # receive() reports the reason
            await anyio.sleep_forever()

    async def aclose(self) -> None:
        self._pipe.close()
        self._beats.close()
        await self._join()
        if self._process.exitcode is None:
            self._process.kill()
            await self._join()

    async def _join(self) -> None:
        await anyio.to_thread.run_sync(self._process.join, _END_SECONDS)


async def _start(factory: ConfigFactory, number: int) -> Link:
    name = f"worker {number}"
    ours, theirs = socket.socketpair()
    beats, their_beats = socket.socketpair()
    arguments = (theirs, their_beats, factory)
    process = multiprocessing.get_context("spawn").Process(target=_main, args=arguments, name=name)
    try:
        await anyio.to_thread.run_sync(process.start)
    except Exception as error:  # pickle raises any type
        ours.close()
        beats.close()
        raise ConfigError.of("the factory of workers", factory, f"one that can be pickled ({error})") from error
    finally:
        theirs.close()
        their_beats.close()
    link = _Process(name, process, _Socket(ours, name), _Socket(beats, name))
    answer = b""
    try:
        with anyio.move_on_after(_START_SECONDS):
            answer = await link.receive()
    except LinkLost as error:
        answer = str(error).encode()
    finally:
        if answer != _READY:
            with anyio.CancelScope(shield=True):
                process.kill()
                await link.aclose()
    if answer != _READY:
        raise ConfigError(f"{name} cannot start: {answer.decode() or f'not ready within {_START_SECONDS:g} s'}")
    return link


# -- in the worker ----------------------------------------------------------------------------------------------------


def _main(connection: socket.socket, beats: socket.socket, factory: ConfigFactory) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    uvloop = importlib.util.find_spec("uvloop") is not None
    anyio.run(_work, _Socket(connection, "the parent"), beats, factory, backend_options={"use_uvloop": uvloop})


async def _work(pipe: _Socket, beats: socket.socket, factory: ConfigFactory) -> None:
    with contextlib.suppress(LinkLost):
        try:
            player = Player(
                await anyio.to_thread.run_sync(create_config, factory),
                at_least=_ROLLOUTS_A_MESSAGE,
                linger=_LINGER_SECONDS,
            )
        except ConfigError as error:
            await pipe.send(str(error).encode())
            return
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            await pipe.send(_READY)
            await _play(player, pipe, beats, signals)


async def _play(player: Player, pipe: _Socket, beats: socket.socket, signals: AsyncIterator[signal.Signals]) -> None:
    with contextlib.suppress(LinkLost):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(player.run)
            tasks.start_soon(_leave_at, signals, player)
            tasks.start_soon(_send_records, player, pipe)
            tasks.start_soon(_send_beats, beats)
            await player.started.wait()
            try:
                while True:
                    player.submit(await pipe.receive())
            except LinkLost:
                tasks.cancel_scope.cancel()


async def _leave_at(signals: AsyncIterator[signal.Signals], player: Player) -> None:
    async for _ in signals:
        player.leave()


async def _send_records(player: Player, pipe: _Socket) -> None:
    with contextlib.suppress(LinkLost):
        while True:
            await pipe.send(await player.collect())


async def _send_beats(beats: socket.socket) -> None:
    """Send signs of life from a thread, so that a blocked event loop is not taken for a stopped process."""
    runs = threading.Event()
    threading.Thread(target=_beat, args=(beats, runs), name="heartbeat", daemon=True).start()
    while True:
        runs.set()
        await anyio.sleep(_BEAT_SECONDS / 2)


def _beat(beats: socket.socket, runs: threading.Event) -> None:
    with contextlib.suppress(OSError):  # the parent has closed its end
        while True:
            message = _RUNS if runs.is_set() else _BLOCKED
            runs.clear()
            beats.sendall(_SIZE.pack(len(message)) + message)
            time.sleep(_BEAT_SECONDS)
