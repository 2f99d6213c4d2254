"""A run of Python in a folder, with a journal: begun where the folder has no run, continued where it has one.

Invariant: a run that was killed continues where its journal ends. This module knows neither servers nor a command line.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from rollouts.recipe import Recipe
from rollouts.runs.info import is_growing
from rollouts.runs.layout import RUN_FILES
from rollouts.runs.resume import Reopened, reopen
from rollouts.runs.run import RunResult, run
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.writer import RunWriter
from rollouts.training.data_buffer import DataBuffer

__all__ = ["open_in", "run_in"]


async def run_in(path: str | Path, recipe: Recipe, **options: Any) -> RunResult:
    """Run a recipe up to its number of batches, and write everything to a folder.

    Args:
        path: the folder; its run, if there is one, is continued.
        recipe: of a new run, or equal to that of the run in the folder, perhaps with more batches.
        options: ``stop``, ``watch``, ``on_batch`` and ``loggers`` of :func:`rollouts.runs.run.run`.

    Raises:
        ConfigError, JournalError, RolloutsError: as :func:`rollouts.runs.resume.reopen` and
            :func:`rollouts.runs.run.run`.
    """
    writer, run_journal, found = await open_in(path, recipe)
    with run_journal.journal:
        state = None if found is None else found.state
        return await run(recipe, writer, run_journal=run_journal, state=state, **options)


async def open_in(
    path: str | Path, recipe: Recipe, description: Mapping[str, Any] | None = None, *, allow_changes: bool = False
) -> tuple[RunWriter, RunJournal, Reopened | None]:
    """Begin the run of a folder, or reopen it; arguments and errors as :func:`rollouts.runs.resume.reopen`.

    Without ``description``, the settings of the recipe are neither recorded nor compared.
    """
    path, given = Path(path), description or {}
    description = {**recipe.describe(), **given}
    was_killed = _was_killed_at_its_start(path)
    if (path / "run.json").exists() and not was_killed:
        reopening = functools.partial(reopen, allow_changes=allow_changes)
        found = await anyio.to_thread.run_sync(reopening, path, description, recipe.data_buffer)
        if given:
            found.writer.update(**description)
        return found.writer, found.run_journal, found
    return await anyio.to_thread.run_sync(_begun, path, description, recipe.data_buffer, was_killed)


def _was_killed_at_its_start(path: Path) -> bool:
    """Whether the run has no journal and no other file yet: ``run.json`` is alone, and is empty or says "running"."""
    if [name for name in RUN_FILES if (path / name).exists()] != ["run.json"]:
        return False
    return (path / "run.json").stat().st_size == 0 or is_growing(path)


def _begun(
    path: Path, description: Mapping[str, Any], buffer: DataBuffer, overwrite: bool
) -> tuple[RunWriter, RunJournal, None]:
    """Create the files of a new run, in one step: a run without a journal cannot be continued."""
    return RunWriter(path, description, overwrite=overwrite), begin(path, description, buffer), None
