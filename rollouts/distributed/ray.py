"""Workers that are Ray actors, on any number of machines.

Invariant: as for processes of one machine; the laws are kept by whoever sends the requests. An actor whose node or
process dies is replaced by another, where there is room, and its rollouts in work are tried again.

A call between Ray processes costs about as much as producing a sample, so what has ended travels in messages of at
least :data:`SAMPLES_A_MESSAGE` rollouts, unless fewer end within :data:`LINGER_SECONDS`. Ray is an extra, imported when
actors are asked for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread

from rollouts.distributed.dispatch import Dispatcher, Link, LinkLost
from rollouts.distributed.worker import ConfigFactory, Player, made
from rollouts.errors import ConfigError

__all__ = ["LINGER_SECONDS", "SAMPLES_A_MESSAGE", "in_actors"]

SAMPLES_A_MESSAGE = 32
LINGER_SECONDS = 0.5
"""How long what has ended waits for company; it is lost with its actor, and played again."""

_START_SECONDS = 300.0
_STARTS = 6
_PAUSE_SECONDS = 2.0
"""Between two starts: Ray takes some seconds to see that a node is gone, and until then may choose it."""
_END_SECONDS = 15.0


@contextlib.asynccontextmanager
async def in_actors(
    factory: ConfigFactory, workers: int, *, address: str | None = None, cpus: float = 1.0
) -> AsyncIterator[Dispatcher]:
    """Start workers on a Ray cluster, spread over its nodes; they end with the context.

    Args:
        factory: makes the config in each actor. The package, and what the factory names, must be importable there.
        workers: how many actors.
        address: of the cluster, as ``ray.init`` takes it. Not used where this process is connected already; with
            ``None``, what Ray finds, or a cluster of this machine alone.
        cpus: that each actor asks Ray for.

    Raises:
        ConfigError: Ray is not installed or not reached, the factory fails in an actor, or no node has room.
    """
    ray = _ray()
    if not ray.is_initialized():
        try:
            await anyio.to_thread.run_sync(functools.partial(ray.init, address=address))
        except Exception as error:  # whatever Ray raises
            raise ConfigError.of("Ray's address", address, f"a cluster that can be reached ({error})") from error
    actors = ray.remote(_Actor).options(num_cpus=cpus, max_restarts=0, scheduling_strategy="SPREAD")
    async with Dispatcher(functools.partial(_start, ray, actors, factory), workers) as dispatcher:
        yield dispatcher


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'rollouts[ray]'") from error


class _Actor:
    """A player in a process of Ray's; its methods are called at once, on one event loop."""

    def __init__(self, factory: ConfigFactory) -> None:
        self._player = Player(made(factory), at_least=SAMPLES_A_MESSAGE, linger=LINGER_SECONDS)

    async def work(self) -> None:
        await self._player.run()

    async def ready(self) -> None:
        await self._player.at_work.wait()

    async def submit(self, message: bytes) -> None:
        self._player.submit(message)

    async def collect(self) -> bytes:
        return await self._player.collect()

    async def stop(self) -> None:
        self._player.stop()


class _ActorLink:
    """The way to an actor (protocol :class:`~rollouts.distributed.dispatch.Link`)."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray = ray
        self._actor = actor
        self._name = name
        self._work = actor.work.remote()
        self._begun = False

    async def ready(self) -> None:
        """Raises LinkLost."""
        await self._call(self._actor.ready)
        self._begun = True

    async def send(self, message: bytes) -> None:
        await self._call(self._actor.submit, message)

    async def receive(self) -> bytes:
        message: bytes = await self._call(self._actor.collect)
        return message

    async def aclose(self) -> None:
        if self._begun:
            with anyio.move_on_after(_END_SECONDS), contextlib.suppress(LinkLost):
                await self._call(self._actor.stop)
                await self._call(lambda: self._work)  # until what was in work has been cancelled, and aborted
        with contextlib.suppress(Exception):  # it may be gone, or the cluster
            self._ray.kill(self._actor)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return await (method.remote(*arguments) if hasattr(method, "remote") else method())
        except Exception as error:  # Ray's own, or what the actor raised
            raise LinkLost(f"{self._name} is gone: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What Ray says is pages long; the actor's own error is its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")


async def _start(ray: Any, actors: Any, factory: ConfigFactory, number: int) -> Link:
    """An actor that works. One that dies at its start, with its node and by no fault of the factory, has a successor.

    Raises:
        ConfigError: the factory cannot be sent or fails there, or no node keeps it alive.
    """
    name = f"worker {number}"
    why = f"no node had room for it within {_START_SECONDS:g} s"
    with anyio.move_on_after(_START_SECONDS):
        for _ in range(_STARTS):
            try:
                link = _ActorLink(ray, actors.remote(factory), name)
            except Exception as error:  # what pickle raises is anything
                raise ConfigError.of("the factory of workers", factory, f"one that Ray can send ({error})") from error
            began = False
            try:
                await link.ready()
                began = True
                return link
            except LinkLost as error:
                why = str(error)
                if getattr(error.__cause__, "actor_init_failed", True):
                    break
            finally:
                if not began:
                    with anyio.CancelScope(shield=True):
                        await link.aclose()
            await anyio.sleep(_PAUSE_SECONDS)
    raise ConfigError(f"{name} cannot start: {why}")
