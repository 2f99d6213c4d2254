"""Progress display: it shows the metrics of the run and does not change it."""

from __future__ import annotations

import io
from pathlib import Path

import anyio
import attrs
import pytest
from rich.console import Console

from rollouts.concurrency.boundary import boundary
from rollouts.display.progress import groups_table, panel, plain_line, samples_table, summary, watch
from rollouts.errors import EnvironmentFailure, at
from rollouts.runs.folder import read_rows
from rollouts.runs.run import run
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager
from tests.runs.test_run import a_recipe
from tests.stored_runs import store_run


def shown(what: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what, soft_wrap=isinstance(what, str))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncRolloutManager:
    return await store_run(tmp_path / "run")


async def test_the_panel_shows_where_the_groups_are(manager: AsyncRolloutManager) -> None:
    """Groups in flight, kept, dropped and failed, tokens a second, mean reward, and what is waited for."""
    text = shown(panel(manager, batches=3))
    counts = manager.accounting
    for part in (
        "batch 3/3",
        f"{counts.in_flight} in flight",
        f"{counts.in_batch + counts.ready} kept",
        f"{counts.dropped} dropped",
        f"{counts.failed} failed",
        "tokens/s",
        f"mean reward {manager.run_metrics.mean_reward:.3f}",
        "waiting for",
    ):
        assert part in text


async def test_a_plain_line_has_the_same_fields(manager: AsyncRolloutManager) -> None:
    """Without a terminal one line contains all of them."""
    line = plain_line(manager, batches=2)
    assert "\n" not in line
    assert f"{manager.accounting.dropped} dropped · {manager.accounting.failed} failed" in line


async def test_the_live_panel_is_drawn_on_a_terminal(manager: AsyncRolloutManager) -> None:
    """On a terminal the panel appears at once, and the cursor is restored when it is cancelled."""
    console = Console(file=io.StringIO(), force_terminal=True, width=90)
    async with anyio.create_task_group() as tasks:

        async def show() -> None:
            await watch(manager, batches=2, console=console)

        tasks.start_soon(show)
        assert isinstance(console.file, io.StringIO)
        while "in flight" not in console.file.getvalue():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert console.file.getvalue().endswith("\x1b[2K") or "\x1b[?25h" in console.file.getvalue()


async def test_the_summary_adds_up_and_names_the_next_commands(tmp_path: Path) -> None:
    """It contains the accounting, the batches' rewards, the folder, and two commands."""
    recipe = a_recipe()
    writer = RunWriter(tmp_path / "run", recipe.describe())
    result = await run(recipe, writer)
    text = summary(result, writer).plain
    assert f"{result.accounting.taken} prompts taken = {result.accounting.in_batch} in batch + " in text
    assert f"mean reward {result.batch_metrics[1]['reward/mean']:.3f}" in text
    assert f"rollouts show {writer.path}" in text
    assert f"rollouts verify {writer.path}" in text


async def test_the_summary_names_the_faults_of_calls(tmp_path: Path) -> None:
    """The most frequent first; no line if all calls ran."""
    with anyio.fail_after(60):
        writer = RunWriter(tmp_path / "run", {})
        result = await run(a_recipe(batches=1), writer=writer)
    assert "did not run" not in summary(result, writer).plain
    counted = {"tool_calls": 4.0, "malformed_tool_calls/not_json": 0.5, "unknown_tool_calls": 1.0}
    batch = {f"episode/{name}": mean for name, mean in counted.items()}
    text = summary(attrs.evolve(result, batch_metrics=(batch,)), writer).plain
    assert "of 4 tool calls a sample did not run: 1 unknown tool, 0.5 not_json\n" in text


async def test_tables_list_groups_and_samples(manager: AsyncRolloutManager, tmp_path: Path) -> None:
    """Each group has a row with prompt, rewards, spread and outcome; each sample one with its numbers."""
    rows = list(read_rows(tmp_path / "run", "all"))
    text = shown(groups_table([rows[:4]]))
    assert f"question {rows[0].data['group_index']}" in text
    assert "batch 0" in text
    assert len(shown(samples_table(rows[:4])).strip().splitlines()) == 5


HOSTILE = "[/INST] [x] :smile: \x1b[2J\x9b\u202e"
SHOWN = "[/INST] [x] :smile: ␛[2J<U+009B><U+202E>"


async def test_a_prompt_is_text_and_not_markup(manager: AsyncRolloutManager, tmp_path: Path) -> None:
    """Tags of Mistral's and Llama's templates are shown; no stored text controls the terminal."""
    (row, *_) = read_rows(tmp_path / "run", "all")
    for prompt in (HOSTILE, [{"role": "user", "content": HOSTILE}]):
        hostile = attrs.evolve(row, data={**row.data, "prompt": prompt, "batch": HOSTILE})
        text = shown(groups_table([[hostile]]), width=200)
        assert text.count(SHOWN) == 2
        assert not set("\x1b\x9b\u202e") & set(text)


async def test_what_is_waited_for_is_text(manager: AsyncRolloutManager) -> None:
    """The name of a place is shown as it is, in the panel and in the line."""
    with at(HOSTILE), boundary(EnvironmentFailure, "World.step"):
        assert SHOWN in shown(panel(manager, batches=2), width=200)
        assert SHOWN in plain_line(manager, batches=2)
