"""A run of Python in a folder, with a journal: begun where the folder has no run, continued where it has one.

Invariant: a run that was killed continues where its journal ends. This module knows neither servers nor a command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread

from rollouts.recipe import Recipe
from rollouts.runs.resume import begin, reopen
from rollouts.runs.run import RunResult, run
from rollouts.runs.writer import RunWriter

__all__ = ["run_in"]


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
    path, description, state = Path(path), recipe.describe(), None
    if (path / "run.json").exists():
        found = await anyio.to_thread.run_sync(reopen, path, description, recipe.data_buffer)
        writer, run_journal, state = found.writer, found.run_journal, found.state
    else:
        writer = await anyio.to_thread.run_sync(RunWriter, path, description)
        run_journal = await anyio.to_thread.run_sync(begin, path, description, recipe.data_buffer)
    with run_journal.journal:
        return await run(recipe, writer, run_journal=run_journal, state=state, **options)
