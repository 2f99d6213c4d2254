"""A run of Python in a folder: begun, continued and verified."""

from __future__ import annotations

from pathlib import Path

import anyio.from_thread
import anyio.lowlevel
import pytest

from rollouts.commands.stored_target import resumed_target
from rollouts.commands.target import RunTarget
from rollouts.errors import ConfigError
from rollouts.runs.in_folder import open_in, run_in
from rollouts.runs.info import read_info
from rollouts.runs.run import run
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from tests.runs.test_run import a_recipe


async def test_a_run_continues_in_its_folder(tmp_path: Path) -> None:
    """The same call begins a run and continues it, up to the recipe's batches; every law holds."""
    first = await run_in(tmp_path / "run", a_recipe(batches=1))
    again = await run_in(str(tmp_path / "run"), a_recipe(batches=3))
    assert (first.batches, again.batches, again.status) == (1, 3, "finished")
    assert verify_run(tmp_path / "run").violations == []
    assert read_info(tmp_path / "run")["batches"] == 3


async def test_a_run_that_is_stopped_while_it_begins_can_be_continued(tmp_path: Path) -> None:
    """A cancellation does not leave a run without a journal, which no later call could continue."""
    with anyio.CancelScope() as scope:

        class Late:
            def __repr__(self) -> str:
                anyio.from_thread.run_sync(scope.cancel)
                return "late"

        writer, run_journal, _ = await open_in(tmp_path / "run", a_recipe(batches=1), {"note": Late()})
        with run_journal.journal:
            writer.finish("stopped")
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert (await run_in(tmp_path / "run", a_recipe(batches=1))).status == "finished"
    assert verify_run(tmp_path / "run").violations == []


@pytest.mark.parametrize("written", ["", "described"])
async def test_a_process_killed_before_its_run_had_a_journal_leaves_a_folder_for_the_next(
    tmp_path: Path, written: str
) -> None:
    """Nothing is lost with a run of which only ``run.json`` is there; the call begins it again."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    if written:
        RunWriter(tmp_path / "run", a_recipe().describe(), overwrite=True)
    assert (await run_in(tmp_path / "run", a_recipe(batches=1))).status == "finished"
    assert verify_run(tmp_path / "run").violations == []


async def test_a_run_without_a_journal_that_has_samples_or_ended_is_not_begun_again(tmp_path: Path) -> None:
    """Its files are not deleted, and neither are those of a process that still writes."""
    await run(a_recipe(batches=1), RunWriter(tmp_path / "bare", a_recipe().describe()))
    RunWriter(tmp_path / "empty", a_recipe().describe()).finish("stopped")
    active = RunWriter(tmp_path / "active", a_recipe().describe())
    for name, expected in [
        ("bare", "a run with a journal"),
        ("empty", "a run with a journal"),
        ("active", "is writing"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            await run_in(tmp_path / name, a_recipe(batches=1))
    active.finish("stopped")
    assert len(list((tmp_path / "bare" / "batches").iterdir())) == 1


async def test_another_recipe_does_not_continue_a_run(tmp_path: Path) -> None:
    """Its sizes are those of the run."""
    await run_in(tmp_path / "run", a_recipe(batches=1))
    with pytest.raises(ConfigError, match="n_samples_per_prompt"):
        await run_in(tmp_path / "run", a_recipe(batches=2, n_samples_per_prompt=2))


async def test_the_command_says_why_it_does_not_resume_a_run_of_python(tmp_path: Path) -> None:
    """A run without a journal cannot be resumed; one with a journal is continued in Python, or with its recipe."""
    await run(a_recipe(batches=1), RunWriter(tmp_path / "bare", a_recipe().describe()))
    with pytest.raises(ConfigError, match=r"--resume: got .*bare'; expected a run with a journal"):
        resumed_target(RunTarget(recipe=None), tmp_path / "bare")
    await run_in(tmp_path / "run", a_recipe(batches=1))
    with pytest.raises(ConfigError, match="does not store its recipe, as a run of Python"):
        resumed_target(RunTarget(recipe=None), tmp_path / "run")
