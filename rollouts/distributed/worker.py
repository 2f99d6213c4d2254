"""The worker's side: plays the rollouts that it is sent, and gives back what has ended, many in one message.

Invariant: every request is answered once, with its samples or with the law that broke, unless it was cancelled. A
player holds no group, no batch and no journal: those stay with whoever sends the requests.

This module knows no transport: messages go in by :meth:`Player.submit` and come out by :meth:`Player.collect`.
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
from rollouts.distributed.messages import Request, broken_record, read_order, reset_record, sample_records, turn_record
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError, at
from rollouts.inference.pauses import watch_pauses
from rollouts.inference.sglang import shared_policies
from rollouts.recipe_files import build, load_recipe
from rollouts.training.config import RolloutConfig
from rollouts.training.rollout_attempt import attempt

__all__ = ["ConfigFactory", "Player", "RecipeConfig", "made"]

ConfigFactory: TypeAlias = Callable[[], RolloutConfig]
"""Makes the config in the worker; a function of a module, or a ``functools.partial`` of one: it is pickled."""


@attrs.frozen
class RecipeConfig:
    """The config of a recipe file, made where it is called."""

    recipe: Path
    endpoint: Endpoint
    options: Mapping[str, str] = attrs.field(factory=dict)

    def __call__(self) -> RolloutConfig:
        return build(load_recipe(self.recipe), self.endpoint, self.options).config


def made(factory: ConfigFactory) -> RolloutConfig:
    """The config of a factory.

    Raises:
        ConfigError: it raised, or gave something else.
    """
    try:
        config = factory()
    except Exception as error:
        raise ConfigError(f"the config cannot be made in a worker: {type(error).__name__}: {error}") from error
    if not isinstance(config, RolloutConfig):
        raise ConfigError.of("what the factory returned in a worker", config, "a RolloutConfig")
    return config


class Player:
    """Plays rollouts of one config.

    Args:
        config: its ``generate_fn``, ``reward_fn`` and deadlines are used.
        at_least: rollouts that a message waits for,
        linger: but no longer than so many seconds, nor when nothing else is in work.
    """

    def __init__(self, config: RolloutConfig, *, at_least: int = 1, linger: float = 0.0) -> None:
        self.config = config
        self._at_least = at_least
        self._linger = linger
        self._tasks: TaskGroup | None = None
        self._playing: dict[int, anyio.CancelScope] = {}
        self._records: list[bytes] = []
        self._ended = 0
        self._news = anyio.Event()
        self.at_work = anyio.Event()
        """Set while rollouts can be submitted."""

    def __repr__(self) -> str:
        return f"<Player: {len(self._playing)} rollouts in work, {self._ended} ended and not collected>"

    async def run(self) -> None:
        """Be at work until cancelled, or stopped; rollouts in work are cancelled then."""
        with calm_collector():  # as a run of one process has it
            async with anyio.create_task_group() as self._tasks:
                self.at_work.set()
                await watch_pauses(shared_policies)

    def stop(self) -> None:
        """Let :meth:`run` end."""
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def submit(self, message: bytes) -> None:
        """Begin what a message asks for, and stop what it no longer wants."""
        assert self._tasks is not None, "the player is at work"
        requests, cancelled = read_order(message)
        for request in requests:
            self._playing[request.number] = anyio.CancelScope()
            self._tasks.start_soon(self._play, request)
        for number in cancelled:
            if number in self._playing:
                self._playing[number].cancel()

    async def collect(self) -> bytes:
        """Wait for records, and take all there are."""
        while not self._records:
            await self._news.wait()
        with anyio.move_on_after(self._linger):  # a linger of 0 passes at the first wait
            while self._ended < self._at_least and self._playing:
                await self._news.wait()
        records, self._records, self._ended = self._records, [], 0
        return b"".join(records)

    async def _play(self, request: Request) -> None:
        number, prompt = request.number, request.prompt
        with self._playing[number] as scope:
            try:
                log = TurnLog(functools.partial(self._keep, number), request.turns) if request.keeps_turns else None
                with at(f"group {prompt.group_index} · rollout {prompt.index}"):
                    samples = await attempt(self.config, prompt, log)
                record = sample_records(number, prompt, samples)
            except Exception as error:  # noqa: BLE001 - a broken law; raised where the manager is
                record = broken_record(number, error)
        del self._playing[number]
        if scope.cancelled_caught:
            self._tell()
            return
        self._ended += 1
        self._put(record)

    async def _keep(self, number: int, turn: Turn | None) -> None:
        self._put(reset_record(number) if turn is None else turn_record(number, turn))

    def _put(self, record: bytes) -> None:
        self._records.append(record)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
