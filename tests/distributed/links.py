"""Workers inside the test's process: real players behind links that a test can cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
import attrs
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rollouts.distributed.dispatch import Dispatcher, LinkLost, Workers
from rollouts.distributed.server_reports import Servers
from rollouts.distributed.worker import Player
from rollouts.errors import ConfigError
from rollouts.training import RolloutConfig


@attrs.define(eq=False)
class LocalLink:
    """A link to a player on this loop."""

    player: Player
    scope: anyio.CancelScope
    back: MemoryObjectReceiveStream[bytes]
    beat_seconds: float = 0.005
    number: int = 0
    orders: int = 0
    running: anyio.Event = attrs.field(factory=anyio.Event)
    """Not set: the worker is stopped. It gives no sign of life, and its messages do not arrive."""

    def __attrs_post_init__(self) -> None:
        self.running.set()

    def stop(self) -> None:
        """As SIGSTOP does."""
        self.running = anyio.Event()

    async def beat(self) -> None:
        await self.running.wait()
        await anyio.sleep(self.beat_seconds)

    async def send(self, message: bytes) -> None:
        if self.scope.cancel_called:
            raise LinkLost("cut")
        self.orders += 1
        self.player.submit(message)

    async def receive(self) -> bytes:
        try:
            message = await self.back.receive()
            await self.running.wait()
            return message
        except anyio.EndOfStream:
            raise LinkLost("the worker was cut off") from None

    async def aclose(self) -> None:
        self.cut()
        self.back.close()

    def cut(self) -> None:
        """Kill the worker."""
        self.scope.cancel()


@attrs.define(eq=False)
class Local:
    """Starts players and records their links."""

    tasks: TaskGroup
    config: RolloutConfig
    options: Mapping[str, Any]
    links: list[LocalLink] = attrs.field(factory=list)
    refuses: bool = False
    room: Callable[[int], bool] = lambda number: True
    """Whether there is room for a worker with this number."""
    beat_seconds: float = 0.005
    servers: Callable[[int], Servers] = lambda number: ("", 0)
    """The inference servers, as the worker with this number sees them."""

    async def connect(self, number: int) -> LocalLink:
        if self.refuses or not self.room(number):
            raise ConfigError("there is no room")
        records, back = anyio.create_memory_object_stream[bytes](100)
        player = Player(self.config, servers=functools.partial(self.servers, number), **self.options)
        link = LocalLink(player, anyio.CancelScope(), back, self.beat_seconds, number)
        try:
            await self.tasks.start(_work, link, records)
        except BaseException:  # cancelled before it was ready
            await link.aclose()
            raise
        self.links.append(link)
        return link


@contextlib.asynccontextmanager
async def local_workers(
    config: RolloutConfig,
    count: Workers,
    *,
    silent_seconds: float = 5.0,
    room: Callable[[int], bool] = lambda number: True,
    beat_seconds: float = 0.005,
    servers: Callable[[int], Servers] = lambda number: ("", 0),
    **options: Any,
) -> AsyncIterator[tuple[Local, Dispatcher]]:
    """Players of a config, and their dispatcher."""
    async with anyio.create_task_group() as tasks:
        local = Local(tasks, config, options, room=room, beat_seconds=beat_seconds, servers=servers)
        async with Dispatcher(local.connect, count, silent_seconds=silent_seconds) as workers:
            yield local, workers
        tasks.cancel_scope.cancel()


async def _work(link: LocalLink, records: MemoryObjectSendStream[bytes], *, task_status: Any) -> None:
    with records, link.scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.player.run)
            await link.player.started.wait()
            task_status.started()
            while True:
                await records.send(await link.player.collect())
