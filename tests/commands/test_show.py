"""``rollouts show`` and the other readers on a run that is running, killed, or finished: each shows its groups."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import msgspec
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.show import show_run
from rollouts.dtypes import Endpoint
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError
from rollouts.integrations.slime import export_run
from rollouts.recipe import Recipe
from rollouts.runs.export import export_rows
from rollouts.runs.info import read_info
from rollouts.runs.reader import load_run
from rollouts.runs.run import run
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample
from tests.stored_runs import some_sample, spread, store_run

STATES = ("active", "killed", "finished")
FIRST = set(range(8))
"""Groups that are settled before the first look."""


@attrs.frozen
class Seen:
    """The results of all readers of a run."""

    shown: str
    broken: list[str]
    notes: list[str]
    groups: set[int | None]


def look(path: Path) -> Seen:
    """Show, verify, load and export, in every format."""
    out = io.StringIO()
    console = Console(file=out, width=160)
    show_run(path, console)
    show_run(path, console, group=0)
    show_run(path, console, group=0, number=0)
    with pytest.raises(ConfigError, match="--group: got 999"):
        show_run(path, console, group=999)
    every = load_run(path, "all")
    for number in FIRST:
        assert [sample.index for sample in every.group(number)] == list(range(4 * number, 4 * number + 4))
    exports = path.parent / f"exports of {path.name}, {read_info(path)['status']}"
    for kind in ("jsonl", "parquet", "hf"):
        export_rows(path, exports / kind, kind, "all")  # type: ignore[arg-type]
    assert export_run(path, exports / "batch_{rollout_id}.pt")
    report = verify_run(path)
    lines = (exports / "jsonl").read_bytes().splitlines()
    groups = {msgspec.json.decode(line)["group_index"] for line in lines}
    return Seen(out.getvalue(), [str(violation) for violation in report.violations], report.notes, groups)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """One run, read while it runs, after a kill at that point (inside a write), and at its end."""
    return anyio.run(_seen, tmp_path_factory.mktemp("runs"))


async def _seen(folder: Path) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    looked = anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        if prompts[0].group_index not in FIRST:
            await looked.wait()
        return [some_sample(prompt, 0) for prompt in prompts]

    async def watch(manager: AsyncRolloutManager) -> None:
        while not writer.batches or manager.accounting.in_flight != manager.accounting.taken - len(FIRST):  # noqa: ASYNC110 - another task of the run
            await anyio.sleep(0.002)  # a loop that spins starves the threads that write
        found["active"] = await anyio.to_thread.run_sync(look, folder / "run")
        shutil.copytree(folder / "run", folder / "killed")
        looked.set()

    sizes = {"batch_size": 3, "n_samples_per_prompt": 4, "over_sampling_factor": 3.0}
    recipe = Recipe(
        name="test",
        config=RolloutConfig(generate_fn=generate, filter_fn=spread, **sizes),  # type: ignore[arg-type]
        data_buffer=DataBuffer([f"question {number}" for number in range(40)]),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
        batches=4,
    )
    writer = RunWriter(folder / "run", recipe.describe(), format="jsonl")
    run_journal = begin(folder / "run", recipe.describe(), recipe.data_buffer)
    with run_journal.journal:
        await run(recipe, writer, run_journal=run_journal, watch=watch)
    for name, torn in (("dropped.jsonl", b'{"group_index": 5, "tok'), ("journal/segment-000000.journal", b"rJ")):
        with (folder / "killed" / name).open("ab") as file:
            file.write(torn)
    found["killed"] = look(folder / "killed")
    found["finished"] = look(folder / "run")
    return found


@pytest.mark.parametrize("state", STATES)
def test_a_run_verifies_in_every_state(seen: dict[str, Seen], state: str) -> None:
    """Stored groups keep the laws; a note names the comparison that is not possible yet."""
    assert seen[state].broken == []
    assert any("is active or was killed" in note for note in seen[state].notes) == (state != "finished")


@pytest.mark.parametrize("state", STATES)
def test_a_run_is_shown_and_exported_in_every_state(seen: dict[str, Seen], state: str) -> None:
    """Every settled group, whether a file or only the journal contains it; nothing of a torn line."""
    assert seen[state].groups >= FIRST
    assert (seen[state].groups == FIRST) == (state != "finished")
    assert "batch 0" in seen[state].shown
    assert ("unbatched" in seen[state].shown) or state == "finished"


async def test_a_run_of_prompts_with_tags_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and folders with ``[/INST]``, ``[x]`` and ``:smile:`` are text for every form of the command."""
    path = tmp_path / "[x] [INST]:smile:"
    await store_run(path, prompt="[/INST] [x] :smile: {}")
    for options in (
        [],
        ["--group", "0"],
        ["--group", "0", "--sample", "0"],
        ["--outcome", "unbatched"],
        ["--limit", "1"],
    ):
        assert await anyio.to_thread.run_sync(main, ["show", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert "[/INST] [x] :smile: 0" in out
    assert f"next: rollouts show '{path}' --group 0 --sample 0" in out
    assert "messages instead of tokens: " in out


async def test_failures_are_shown_with_their_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every form of the command leads to the failed sample: its cause, its message, and where it was raised.

    A folder with a space is quoted for the shell.
    """
    path = tmp_path / "a run"
    await store_run(path)

    async def show(*options: str) -> str:
        assert await anyio.to_thread.run_sync(main, ["show", str(path), *options]) == 0
        return capsys.readouterr().out

    for options in ([], ["--outcome", "failed"]):
        out = await show(*options)
        assert f"next: rollouts show '{path}' --failures\n" in out
        assert f"next: rollouts show '{path}' --group 3 --sample 0\n" in out
    out = await show("--failures")
    assert "1  generate  group 3, sample 0  the world ended" in out
    assert 'stored_runs.py", line ' in out
    assert f"next: rollouts show '{path}' --group 3 --sample 0\n" in out
    assert "contains no failure" in await show("--failures", "--group", "0")
    out = await show("--group", "3", "--sample", "0")
    assert ": the world ended\n" in out
    assert 'stored_runs.py", line ' in out


async def test_the_failed_sample_of_a_group_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the first sample of the group, which may be sound."""
    path = tmp_path / "run"
    await store_run(path, fails=lambda prompt: prompt.index == 14)
    assert await anyio.to_thread.run_sync(main, ["show", str(path), "--group", "3"]) == 0
    assert f"next: rollouts show {path} --group 3 --sample 2\n" in capsys.readouterr().out


async def test_a_missing_sample_is_named_with_the_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the next command can be right."""
    await store_run(tmp_path / "run")
    assert await anyio.to_thread.run_sync(main, ["show", str(tmp_path / "run"), "--sample", "9999"]) == 2
    assert "--sample: got 9999; expected the index of a sample of the run, from 0 to " in capsys.readouterr().err
