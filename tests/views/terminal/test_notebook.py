"""Progress in a notebook: a cell that shows the state of a run, and changes nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.runs.run import run
from rollouts.runs.writer import RunWriter
from rollouts.views.terminal.notebook import NotebookProgress
from tests.packages import is_installed
from tests.runs.test_run import a_recipe


async def test_a_cell_shows_the_state_and_the_batches(tmp_path: Path) -> None:
    """The first display is empty; the last one has every batch, the newest first."""
    shown: list[str] = []
    recipe = a_recipe(batches=3)
    progress = NotebookProgress(recipe.batches, show=shown.append)
    writer = RunWriter(tmp_path / "run", recipe.describe())
    result = await run(recipe, writer, watch=progress.watch, on_batch=progress.batch)
    assert result.status == "finished"
    assert 'value="0"' in shown[0]
    last = shown[-1]
    assert 'max="3"' in last
    assert last.index("batch 2: reward") < last.index("batch 1: reward") < last.index("batch 0: reward")


def test_texts_are_escaped() -> None:
    """A tool that a model named in HTML stays text."""
    progress = NotebookProgress(1, show=print)
    progress.batch({"batch": 0, "episode/malformed_tool_calls/<img src=x>": 1.0, "episode/tool_calls": 2.0})
    assert "<img" in progress._lines[0]
    assert "<img" not in progress.html("state", done=0.5)
    assert "&lt;img" in progress.html("state", done=0.5)


@pytest.mark.skipif(is_installed("ipython"), reason="IPython is installed")
def test_without_a_notebook_a_function_is_needed() -> None:
    """The message says what to give."""
    with pytest.raises(ConfigError, match=r"NotebookProgress.show: got None; expected a function"):
        NotebookProgress(1)
