"""The worker's side: play the requested rollouts, and return finished ones, many in one message.

Invariant: every request gets one result, its samples or the error of a broken law, unless it is cancelled. A player
does not know groups, batches or the journal: they stay in the manager's process.

This module does not know transports: messages enter by :meth:`Player.submit` and leave by :meth:`Player.collect`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import anyio
import attrs
from anyio.abc import TaskGroup

from rollouts.agent.turn_log import Turn, TurnLog
from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.distributed.messages import (
    PICKLED,
    OrderFormat,
    Request,
    broken_record,
    clocks_record,
    leaving_record,
    reset_record,
    sample_records,
    servers_record,
    turn_record,
)
from rollouts.distributed.server_reports import Servers, report_servers, servers_now
from rollouts.distributed.standstill import Standstill
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError, at
from rollouts.inference.pauses import watch_pauses
from rollouts.inference.shared import shared_policies
from rollouts.recipe.files import build, load_recipe
from rollouts.training.config import RolloutConfig
from rollouts.training.rollout_attempt import attempt

__all__ = ["ConfigFactory", "Player", "RecipeConfig", "create_config"]

_CLOCKS_SECONDS = 1.0
"""Pause between two looks for rollouts whose deadlines are paused."""

ConfigFactory: TypeAlias = Callable[[], RolloutConfig]
"""Creates the config in the worker: a module-level function or a ``functools.partial`` of one (it is pickled)."""


@attrs.frozen
class RecipeConfig:
    """A factory of the config of a recipe file, which is loaded where the factory is called."""

    recipe: Path
    endpoint: Endpoint
    options: Mapping[str, str] = attrs.field(factory=dict)

    def __call__(self) -> RolloutConfig:
        return build(load_recipe(self.recipe), self.endpoint, self.options).config


def create_config(factory: ConfigFactory) -> RolloutConfig:
    """Call a factory and check its config.

    Raises:
        ConfigError: the factory raised, or returned something else.
    """
    try:
        config = factory()
    except Exception as error:
        raise ConfigError(f"the config cannot be created in a worker: {type(error).__name__}: {error}") from error
    if not isinstance(config, RolloutConfig):
        raise ConfigError.of("the value that the factory returned in a worker", config, "a RolloutConfig")
    return config


class Player:
    """Plays rollouts of one config.

    Args:
        config: provides ``generate_fn``, ``reward_fn`` and deadlines.
        at_least: finished rollouts that a message waits for.
        linger: the longest wait for them, in seconds; a message never waits when no rollout is in flight.
        orders: the format of submitted messages.
        servers: returns the state of the inference servers, as this process sees it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        at_least: int = 1,
        linger: float = 0.0,
        orders: OrderFormat = PICKLED,
        servers: Callable[[], Servers] = servers_now,
    ) -> None:
        self.config = config
        self._servers = servers
        self.away = ""
        """Why rollouts waited for an inference server at the last report."""
        self._orders = orders
        self._at_least = at_least
        self._linger = linger
        self._tasks: TaskGroup | None = None
        self._playing: dict[int, anyio.CancelScope] = {}
        self._standstill = Standstill()
        self._records: list[bytes] = []
        self._ended = 0
        self._changed = anyio.Event()
        self.started = anyio.Event()
        """Set once rollouts can be submitted."""

    def __repr__(self) -> str:
        return f"<Player: {len(self._playing)} rollouts in flight, {self._ended} finished and not collected>"

    async def run(self) -> None:
        """Play submitted rollouts until cancelled or stopped, which cancels rollouts in flight."""
        with calm_collector():  # as a run in one process does
            async with anyio.create_task_group() as self._tasks:
                self.started.set()
                self._tasks.start_soon(report_servers, self._servers, self._report)
                self._tasks.start_soon(self._report_clocks)
                await watch_pauses(shared_policies)

    def stop(self) -> None:
        """End :meth:`run`."""
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def leave(self) -> None:
        """Announce that this worker leaves; the manager's side waits for its rollouts, and then ends it."""
        self._ended = self._at_least  # the message does not wait for rollouts
        self._put(leaving_record())

    def submit(self, message: bytes) -> None:
        """Start the requests of a message, and cancel the requests that it names."""
        assert self._tasks is not None, "run() is active"
        requests, cancelled = self._orders.read(message)
        for request in requests:
            self._playing[request.number] = anyio.CancelScope()
            self._tasks.start_soon(self._play, request)
        for number in cancelled:
            if number in self._playing:
                self._playing[number].cancel()

    async def collect(self) -> bytes:
        """Wait for records; return all of them as one message."""
        while not self._records:
            await self._changed.wait()
        with anyio.move_on_after(self._linger):  # a linger of 0 ends at the first await
            while self._ended < self._at_least and self._playing:
                await self._changed.wait()
        records, self._records, self._ended = self._records, [], 0
        return b"".join(records)

    async def _play(self, request: Request) -> None:
        number, prompt = request.number, request.prompt
        with self._playing[number] as scope:
            try:
                log = TurnLog(functools.partial(self._log_turn, number), request.turns) if request.logs_turns else None
                place = at(f"group {prompt.group_index} · rollout {prompt.index}")
                with place, self._standstill.around(number):
                    samples = await attempt(self.config, attrs.evolve(prompt, turn_log=log))
                record = sample_records(number, prompt, samples)
            except Exception as error:  # noqa: BLE001 - a broken law; raised in the manager's process
                record = broken_record(number, error)
        del self._playing[number]
        self._standstill.ended(number)
        if scope.cancelled_caught:
            self._notify()
            return
        self._ended += 1
        self._put(record)

    def _report(self, away: str, answered: bool) -> None:
        self.away = away
        self._put(servers_record(away, answered))

    async def _report_clocks(self) -> None:
        while True:
            await anyio.sleep(_CLOCKS_SECONDS)
            paused, running = self._standstill.news()
            if paused or running:
                self._put(clocks_record(paused, running))

    async def _log_turn(self, number: int, turn: Turn | None) -> None:
        self._put(reset_record(number) if turn is None else turn_record(number, turn))

    def _put(self, record: bytes) -> None:
        self._records.append(record)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
