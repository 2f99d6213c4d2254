"""A run whose batches are leased: generation fills the leases while consumers take, train and acknowledge.

Invariant: a group is delivered only after the seal of its batch is on disk, in the run's journal. A process that was
killed at any moment is continued by the next :func:`leased_run` of the folder: sealed groups that were neither
acknowledged nor dropped are ready again, from the journal, and everything else is generated.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

import anyio.to_thread

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Provider
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe
from rollouts.runs.in_folder import open_in
from rollouts.runs.info import read_info
from rollouts.runs.run import Watch, run
from rollouts.runs.run_history import RunHistory
from rollouts.service.fed_buffer import FedBuffer
from rollouts.service.leases import Leases
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.rows import NO_IDS
from rollouts.training.types import Sample

__all__ = ["LEASES", "PROMPTS", "leased_run"]

LEASES = "leases.log"
"""The log of leases in a run's folder."""
PROMPTS = "prompts.log"
"""The log of prompts in the folder of a run whose buffer is a :class:`FedBuffer`."""

Players: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[Recipe]]
"""Starts what plays a recipe, such as workers; yields the recipe with the config that plays there."""


@contextlib.asynccontextmanager
async def leased_run(
    path: str | Path,
    recipe: Recipe,
    *,
    groups_in_work: int | None = None,
    max_staleness: int | None = None,
    watch: Watch | None = None,
    trains_here: bool = True,
    description: Mapping[str, Any] | None = None,
    allow_changes: bool = False,
    players: Players | None = None,
) -> AsyncIterator[Leases]:
    """Run a recipe in a folder while the context is open, and lease its groups.

    Args:
        path: the folder; its run, if there is one, is continued.
        recipe: of a new run, or equal to that of the run in the folder.
        groups_in_work: most groups that are ready or leased, at least ``batch_size``; by default twice that.
        max_staleness: as for :class:`Leases`.
        watch: as for :func:`rollouts.runs.run.run`.
        trains_here: whether the consumer is in this process, so that its objects are freed as usual.
        description: more fields of ``run.json``, such as ``settings``, which a continued run is compared with.
        allow_changes: continue a run with other settings, and record them.
        players: starts what plays the recipe, once the folder is open; yields the recipe with the config to play.

    Raises:
        ConfigError: the recipe is on a chat API, whose samples no trainer takes.
        ConfigError, JournalError, RolloutsError: as :func:`rollouts.runs.resume.reopen`; an error of generation is
            raised by :meth:`Leases.take` when no group is left.
    """
    if recipe.endpoint.provider not in get_args(Provider):  # a chat API
        raise ConfigError.of("recipe.endpoint", recipe.endpoint, f"a server of tokens: {NO_IDS}")
    size = recipe.config.batch_size
    most = 2 * size if groups_in_work is None else groups_in_work
    if most < size:
        raise ConfigError.of("groups_in_work", most, f"at least batch_size, {size}")
    writer, run_journal, found = await open_in(path, recipe, description, allow_changes=allow_changes)
    file, started = Path(path) / LEASES, read_info(path).get("started")
    with (
        run_journal.journal,
        Leases(file, groups_in_work=most, max_staleness=max_staleness, batch_size=size, run=started) as leases,
        contextlib.ExitStack() as stack,
    ):
        if isinstance(buffer := recipe.data_buffer, FedBuffer):
            stack.enter_context(buffer.opened(Path(path) / PROMPTS, started))
            watch = functools.partial(_watch_fed, buffer, watch)
        await run_journal.journal.sync()  # a killed process may have left a seal that is not on disk
        if found is not None:
            leases.restore(await anyio.to_thread.run_sync(_unsettled, found.history, leases))

        async def deliver(samples: list[Sample]) -> None:
            await leases.room_for(size)
            leases.add(_by_group(samples))
            if writer.batches < recipe.batches:
                await leases.room_for(size)  # no batch is sealed that has no place

        async def generate() -> None:
            if writer.batches < recipe.batches:
                await leases.room_for(size)
            state = None if found is None else found.state
            options: dict[str, Any] = {"watch": watch, "deliver": deliver, "trains_here": trains_here}
            result = await run(played, writer, run_journal=run_journal, state=state, **options)
            leases.finish(result.error)

        async with players() if players is not None else contextlib.nullcontext(recipe) as played:
            async with first_error() as tasks:
                tasks.start_soon(generate)
                yield leases
                tasks.cancel_scope.cancel()


async def _watch_fed(buffer: FedBuffer, watch: Watch | None, manager: AsyncRolloutManager) -> None:
    """Let new prompts start at once, also while a batch waits for other groups."""
    buffer.on_fed = manager.wake
    if watch is not None:
        await watch(manager)


def _unsettled(history: RunHistory, leases: Leases) -> dict[int, list[Sample]]:
    """Sealed groups that were neither acknowledged nor dropped, with their samples."""
    sealed = [number for batch in history.sealed for number in batch.groups]
    return {number: history.group_samples(number) for number in sealed if not leases.is_done(number)}


def _by_group(samples: list[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        assert sample.group_index is not None, "the manager numbers its groups"
        groups.setdefault(sample.group_index, []).append(sample)
    return groups
