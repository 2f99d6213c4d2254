"""Workers as Ray actors, on any number of machines.

Invariant: as in :mod:`processes`, the manager's process keeps the laws. An actor whose node or process dies is replaced
where the cluster has room, and its rollouts in flight are retried. At SIGTERM an actor leaves: it finishes its rollouts
for a while, and the others play the rest.

A Ray call costs about as much as producing a sample, so finished rollouts travel in messages of at least
:data:`SAMPLES_A_MESSAGE`, unless fewer finish within :data:`LINGER_SECONDS`. Ray is an extra, imported on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
from anyio.from_thread import start_blocking_portal

from rollouts.base.extras import install_command
from rollouts.distributed.dispatch import Dispatcher, Link, LinkLost, Workers
from rollouts.distributed.worker import ConfigFactory, Player, create_config
from rollouts.errors import ConfigError

__all__ = ["LINGER_SECONDS", "SAMPLES_A_MESSAGE", "in_actors"]

SAMPLES_A_MESSAGE = 32
LINGER_SECONDS = 0.5
"""Longest wait of a finished rollout for others in its message; if its actor dies meanwhile, it is played again."""

_START_SECONDS = 300.0
_STARTS = 6
_PAUSE_SECONDS = 2.0
"""Pause between two starts: Ray takes seconds to detect a dead node, and may choose it until then."""
_END_SECONDS = 15.0
_CALLS = 8
"""Calls of an actor at once: its work, the wait for records, orders, and signs of life."""
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0
"""Longer than for processes: an actor answers from its event loop, which foreign code may block."""


@contextlib.asynccontextmanager
async def in_actors(
    factory: ConfigFactory, workers: Workers, *, address: str | None = None, cpus: float = 1.0
) -> AsyncIterator[Dispatcher]:
    """Start workers on a Ray cluster, spread over its nodes; they end with the context.

    Args:
        factory: creates the config in each actor. This package and the factory's module must be importable there.
        workers: number of actors; or the minimum with which the run begins, and the maximum. Actors that wait for room
            are the demand that Ray's autoscaler reads.
        address: of the cluster, as for ``ray.init``; ignored if this process is already connected. With ``None``, Ray
            finds a cluster or starts one on this machine.
        cpus: CPUs that each actor reserves.

    Raises:
        ConfigError: Ray is not installed or not reachable, the factory fails in an actor, or no node has room for
            the minimum.
    """
    ray = _ray()
    if not ray.is_initialized():
        try:
            await anyio.to_thread.run_sync(functools.partial(ray.init, address=address))
        except Exception as error:  # Ray raises any type
            raise ConfigError.of("Ray's address", address, f"the address of a reachable cluster ({error})") from error
    options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": _CALLS, "scheduling_strategy": "SPREAD"}
    actors = ray.remote(_Actor).options(num_cpus=cpus, **options)
    start = functools.partial(_start, ray, actors, factory)
    async with Dispatcher(start, workers, silent_seconds=_SILENT_SECONDS) as dispatcher:
        yield dispatcher


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {install_command('ray')}") from error


class _Actor:
    """A player in a Ray process; Ray calls its methods in threads.

    No method is ``async``: Ray would run nothing of the actor in the main thread, where Python sets handlers of signals
    (Ray 2.60.0).
    """

    def __init__(self, factory: ConfigFactory) -> None:
        config = create_config(factory)
        options = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
        self._loop = start_blocking_portal(backend_options=options, name="player")  # runs until the process ends
        self._portal = self._loop.__enter__()
        new_player = functools.partial(Player, config, at_least=SAMPLES_A_MESSAGE, linger=LINGER_SECONDS)
        self._player: Player = self._portal.call(new_player)
        signal.signal(signal.SIGTERM, self._leave)  # in place of Ray's handler, which ends the process

    def _leave(self, number: int, frame: object) -> None:
        self._portal.start_task_soon(self._player.leave)

    def work(self) -> None:
        self._portal.call(self._player.run)

    def ready(self) -> None:
        self._portal.call(self._player.started.wait)

    def submit(self, message: bytes) -> None:
        self._portal.call(self._player.submit, message)

    def collect(self) -> bytes:
        return self._portal.call(self._player.collect)

    def stop(self) -> None:
        self._portal.call(self._player.stop)


class _ActorLink:
    """A connection to an actor (protocol :class:`~rollouts.distributed.dispatch.Link`)."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray = ray
        self._actor = actor
        self._name = name
        self._work = actor.work.remote()
        self._is_ready = False

    async def ready(self) -> None:
        """Wait until the actor is ready; raises LinkLost."""
        await self._call(self._actor.ready)
        self._is_ready = True

    async def send(self, message: bytes) -> None:
        await self._call(self._actor.submit, message)

    async def receive(self) -> bytes:
        message: bytes = await self._call(self._actor.collect)
        return message

    async def beat(self) -> None:
        await anyio.sleep(_BEAT_SECONDS)
        with contextlib.suppress(LinkLost):  # receive() reports the reason
            await self._call(self._actor.ready)
            return
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        if self._is_ready:
            with anyio.move_on_after(_END_SECONDS), contextlib.suppress(LinkLost):
                await self._call(self._actor.stop)
                await self._call(lambda: self._work)  # until rollouts in flight are cancelled and aborted
        with contextlib.suppress(Exception):  # the actor or the cluster may be gone
            self._ray.kill(self._actor)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return await (method.remote(*arguments) if hasattr(method, "remote") else method())
        except Exception as error:  # Ray's error, or the actor's
            raise LinkLost(f"{self._name} is gone: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The error of the actor: the last line with "Error" of Ray's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")


async def _start(ray: Any, actors: Any, factory: ConfigFactory, number: int) -> Link:
    """Start an actor; retry if it dies at its start with its node, not by the factory.

    Raises:
        ConfigError: the factory cannot be sent or fails in the actor, or no start succeeded.
    """
    name = f"worker {number}"
    why = f"no node had room for it within {_START_SECONDS:g} s"
    with anyio.move_on_after(_START_SECONDS):
        for _ in range(_STARTS):
            try:
                link = _ActorLink(ray, actors.remote(factory), name)
            except Exception as error:  # pickle raises any type
                raise ConfigError.of("the factory of workers", factory, f"one that Ray can send ({error})") from error
            ready = False
            try:
                await link.ready()
                ready = True
                return link
            except LinkLost as error:
                why = str(error)
                if getattr(error.__cause__, "actor_init_failed", True):
                    break
            finally:
                if not ready:
                    with anyio.CancelScope(shield=True):
                        await link.aclose()
            await anyio.sleep(_PAUSE_SECONDS)
    raise ConfigError(f"{name} cannot start: {why}")
