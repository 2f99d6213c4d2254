"""Workers that are processes of this machine, each with its own event loop and interpreter.

Invariant: a worker ends with the context that started it, and with its parent, however that dies: its end of the socket
closes. A Ctrl-C at the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import signal
import socket
import struct
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess

import anyio
import anyio.to_thread

from rollouts.distributed.dispatch import Dispatcher, Link, LinkLost
from rollouts.distributed.worker import ConfigFactory, Player, made
from rollouts.errors import ConfigError

__all__ = ["in_processes"]

_SIZE = struct.Struct("<Q")
_CHUNK = 1 << 20
_READY = b"ready"
_A_MESSAGE = 32
_LINGER_SECONDS = 0.02
"""How long what has ended waits for company: each message wakes the one parent."""
_START_SECONDS = 300.0
_END_SECONDS = 10.0


@contextlib.asynccontextmanager
async def in_processes(factory: ConfigFactory, workers: int) -> AsyncIterator[Dispatcher]:
    """Start workers on this machine; they end with the context.

    Args:
        factory: makes the config in each worker: :class:`RecipeConfig`, a function of a module, or a partial of one.
        workers: how many processes.

    Raises:
        ConfigError: the factory cannot be pickled, or fails in a worker.
    """
    async with Dispatcher(functools.partial(_start, factory), workers) as dispatcher:
        yield dispatcher


class _Socket:
    """Messages over a stream socket."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._name = name
        self._read = bytearray()

    async def send(self, message: bytes) -> None:
        """Raises LinkLost."""
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
        """Raises LinkLost."""
        size = _SIZE.unpack(await self._take(_SIZE.size))[0]
        return await self._take(size)

    def close(self) -> None:
        self._connection.close()

    async def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            await anyio.wait_readable(self._connection)
            try:
                data = self._connection.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost(f"{self._name} is gone: {error}") from error
            if not data:
                raise LinkLost(f"{self._name} is gone")
            self._read += data
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken


class _Process:
    """A worker process (protocol :class:`~rollouts.distributed.dispatch.Link`)."""

    def __init__(self, name: str, process: BaseProcess, pipe: _Socket) -> None:
        self._name = name
        self._process = process
        self._pipe = pipe

    async def send(self, message: bytes) -> None:
        await self._pipe.send(message)

    async def receive(self) -> bytes:
        try:
            return await self._pipe.receive()
        except LinkLost as error:
            await self._join()
            code = self._process.exitcode
            raise LinkLost(f"{self._name} (pid {self._process.pid}) ended with exit code {code}") from error

    async def aclose(self) -> None:
        self._pipe.close()
        await self._join()
        if self._process.exitcode is None:
            self._process.kill()
            await self._join()

    async def _join(self) -> None:
        await anyio.to_thread.run_sync(self._process.join, _END_SECONDS)


async def _start(factory: ConfigFactory, number: int) -> Link:
    name = f"worker {number}"
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_main, args=(theirs, factory), name=name)
    try:
        await anyio.to_thread.run_sync(process.start)
    except Exception as error:  # what pickle raises is anything
        ours.close()
        raise ConfigError.of("the factory of workers", factory, f"one that can be pickled ({error})") from error
    finally:
        theirs.close()
    link = _Process(name, process, _Socket(ours, name))
    said = b""
    try:
        with anyio.move_on_after(_START_SECONDS):
            said = await link.receive()
    except LinkLost as error:
        said = str(error).encode()
    finally:
        if said != _READY:
            with anyio.CancelScope(shield=True):
                process.kill()
                await link.aclose()
    if said != _READY:
        raise ConfigError(f"{name} cannot start: {said.decode() or f'not ready within {_START_SECONDS:g} s'}")
    return link


# -- in the worker ----------------------------------------------------------------------------------------------------


def _main(connection: socket.socket, factory: ConfigFactory) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C ends
    uvloop = importlib.util.find_spec("uvloop") is not None
    anyio.run(_work, _Socket(connection, "the parent"), factory, backend_options={"use_uvloop": uvloop})


async def _work(pipe: _Socket, factory: ConfigFactory) -> None:
    with contextlib.suppress(LinkLost):
        try:
            player = Player(await anyio.to_thread.run_sync(made, factory), at_least=_A_MESSAGE, linger=_LINGER_SECONDS)
        except ConfigError as error:
            await pipe.send(str(error).encode())
            return
        await pipe.send(_READY)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(player.run)
            tasks.start_soon(_give_back, player, pipe)
            await player.at_work.wait()
            try:
                while True:
                    player.submit(await pipe.receive())
            except LinkLost:
                tasks.cancel_scope.cancel()


async def _give_back(player: Player, pipe: _Socket) -> None:
    with contextlib.suppress(LinkLost):
        while True:
            await pipe.send(await player.collect())
