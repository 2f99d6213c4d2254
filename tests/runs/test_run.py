"""Execution of a run: at every kind of end, finished groups are on disk and the accounting adds up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.dtypes import Endpoint
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import DataExhausted, EndpointUnavailable, GenerateFailure, RolloutsError, TokenMismatchError
from rollouts.recipe import Recipe
from rollouts.runs.info import read_info
from rollouts.runs.reader import load_run
from rollouts.runs.run import RunResult, Stop, run
from rollouts.runs.run_history import RunHistory
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample
from tests.stored_runs import some_sample, spread


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.lowlevel.checkpoint()
    return [some_sample(prompt, 0) for prompt in prompts]


def a_recipe(generate_fn: Any = generate, *, batches: int = 2, epochs: int | None = None, **sizes: Any) -> Recipe:
    sizes = {"batch_size": 3, "n_samples_per_prompt": 4, "filter_fn": spread, **sizes}
    return Recipe(
        name="test",
        config=RolloutConfig(generate_fn=generate_fn, **sizes),
        data_buffer=DataBuffer([f"question {number}" for number in range(8)], epochs=epochs),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
        batches=batches,
    )


async def stored(recipe: Recipe, path: Path, **options: Any) -> RunResult:
    """Run, and check that the folder passes verification and agrees with the result."""
    result = await run(recipe, RunWriter(path, recipe.describe()), **options)
    assert verify_run(path).violations == []
    assert read_info(path)["status"] == result.status
    assert read_info(path)["accounting"] == attrs.asdict(result.accounting)
    return result


async def test_a_run_fills_its_batches(tmp_path: Path) -> None:
    """Each batch is a file of whole groups; the end is recorded."""
    result = await stored(a_recipe(), tmp_path / "run")
    assert (result.status, result.batches, result.error) == ("finished", 2, None)
    assert len(load_run(tmp_path / "run")) == 2 * 3 * 4
    assert [numbers["batch"] for numbers in result.batch_metrics] == [0, 1]


async def test_a_stop_while_a_batch_is_delivered_loses_no_metrics(tmp_path: Path) -> None:
    """Each batch that was written is given to ``on_batch`` and to the result, wherever the stop comes."""
    stop, seen = Stop(), list[float]()

    async def deliver(samples: list[Sample]) -> None:
        stop.ask()
        await anyio.sleep_forever()

    result = await stored(
        a_recipe(), tmp_path / "run", stop=stop, deliver=deliver, on_batch=lambda numbers: seen.append(numbers["batch"])
    )
    assert (result.status, result.batches, seen) == ("stopped", 1, [0])
    assert [numbers["batch"] for numbers in result.batch_metrics] == [0]


async def test_a_long_run_keeps_the_metrics_of_its_last_batches(tmp_path: Path) -> None:
    """Those of all would grow without limit."""
    recipe = a_recipe(batches=102, batch_size=1, n_samples_per_prompt=1, filter_fn=None)
    writer = RunWriter(tmp_path / "run", recipe.describe())
    result = await run(recipe, writer)
    assert [numbers["batch"] for numbers in result.batch_metrics] == [*range(2, 102)]


async def test_data_that_run_dry_cost_nothing(tmp_path: Path) -> None:
    """A run that cannot fill its batch keeps accepted groups, and the result has the reason."""
    result = await stored(a_recipe(batches=9, epochs=1, batch_size=5), tmp_path / "run")
    assert result.status == "failed"
    assert isinstance(result.error, DataExhausted)
    kept = {sample.group_index for place in ("kept", "unbatched") for sample in load_run(tmp_path / "run", place)}  # type: ignore[arg-type]
    assert len(kept) == result.accounting.in_batch + result.unbatched
    assert "no prompt is left" in read_info(tmp_path / "run")["error"]


async def test_a_stop_keeps_what_is_finished(tmp_path: Path) -> None:
    """A stopped run returns prompts in flight and writes accepted groups."""
    stop = Stop()

    async def some_hang(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index not in (0, 1, 2):
            await anyio.sleep_forever()
        return await generate(prompts)

    async def watch(manager: AsyncRolloutManager) -> None:
        while manager.accounting.in_flight != 2:
            await anyio.lowlevel.checkpoint()
        stop.ask()

    recipe = a_recipe(some_hang, batch_size=4, over_sampling_factor=1.25, filter_fn=None)
    result = await stored(recipe, tmp_path / "run", stop=stop, watch=watch)
    assert (result.status, result.error) == ("stopped", None)
    assert (result.unbatched, result.accounting.returned) == (3, 5)
    assert {sample.group_index for sample in load_run(tmp_path / "run", "unbatched")} == {0, 1, 2}


async def test_a_stop_with_a_reason_is_a_failure(tmp_path: Path) -> None:
    """A run that is stopped because its server died has this error."""
    stop = Stop()
    stop.ask(EndpointUnavailable("the server died"))

    async def hang(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep_forever()
        return []

    result = await stored(a_recipe(hang), tmp_path / "run", stop=stop)
    assert (result.status, str(result.error)) == ("failed", "the server died")


async def test_failures_without_end_end_the_run(tmp_path: Path) -> None:
    """A world that never works ends the run with its cause, and every lost group is on disk."""

    async def broken(prompts: Sequence[Prompt]) -> list[Sample]:
        raise RolloutsError("the world ended")

    result = await stored(a_recipe(broken, patience=6), tmp_path / "run")
    assert isinstance(result.error, GenerateFailure)
    assert "the world ended" in str(result.error)
    stored_groups = {sample.group_index for sample in load_run(tmp_path / "run", "failed")}
    assert len(stored_groups) == result.accounting.failed > 0


async def test_a_batch_that_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    """If the disk refuses a batch, its groups are stored as unbatched and counted as returned."""
    path = tmp_path / "run"
    recipe = a_recipe()
    writer = RunWriter(path, recipe.describe())
    (path / "batches").write_text("in the way")
    result = await run(recipe, writer)
    (path / "batches").unlink()
    assert "cannot be written" in str(result.error)
    assert result.accounting.in_batch == 0
    assert verify_run(path).violations == []
    assert len({sample.group_index for sample in load_run(path, "unbatched")}) == result.unbatched >= 3


async def test_a_broken_law_is_raised_after_everything_is_written(tmp_path: Path) -> None:
    """A bug of ours ends the run at once, and still nothing finished is lost."""

    async def lawless(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index == 2:
            raise TokenMismatchError("law 1")
        return await generate(prompts)

    result = await stored(a_recipe(lawless, filter_fn=None, batch_size=8), tmp_path / "run")
    assert isinstance(result.error, TokenMismatchError)


async def test_a_cancelled_run_is_written(tmp_path: Path) -> None:
    """Cancelled from outside, a run still ends its folder."""

    async def hang(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep_forever()
        return []

    recipe = a_recipe(hang)
    with anyio.CancelScope() as scope:

        async def watch(manager: AsyncRolloutManager) -> None:
            while not manager.accounting.in_flight:
                await anyio.lowlevel.checkpoint()
            scope.cancel()

        await run(recipe, RunWriter(tmp_path / "run", recipe.describe()), watch=watch)
    assert scope.cancelled_caught
    assert verify_run(tmp_path / "run").violations == []
    assert read_info(tmp_path / "run")["status"] == "stopped"


@pytest.mark.parametrize(
    "error",
    [
        IndexError("list index \x1b[2J"),
        BrokenPipeError(),
        ExceptionGroup("both", [ValueError("one")]),
        SystemExit(1),  # what rich raises where its pipe is closed
        pytest.skip.Exception("later"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_observer_does_not_end_a_run(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An observer's error is printed once with its location and ends the observer; the run continues."""

    async def watch(manager: AsyncRolloutManager) -> None:
        while not manager.accounting.in_flight:
            await anyio.lowlevel.checkpoint()
        raise error

    assert (await stored(a_recipe(), tmp_path / "run", watch=watch)).status == "finished"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rollouts: watch is off, it raised {error!r} at {__file__}:")
    assert line.endswith(" in watch; the run continues")
    assert "\x1b" not in line


async def test_an_observer_with_a_closed_standard_error_does_not_end_a_run(tmp_path: Path) -> None:
    """If standard error is closed, too, the run continues."""
    script = f"""
import anyio, os, sys
from pathlib import Path
from rollouts.runs.run import run
from rollouts.runs.writer import RunWriter
from tests.runs.test_run import a_recipe

async def watch(manager):
    raise IndexError

recipe = a_recipe()
sys.stderr = open(os.devnull, "w")
sys.stderr.close()
result = anyio.run(lambda: run(recipe, RunWriter(Path({str(tmp_path / "run")!r}), recipe.describe()), watch=watch))
print(result.status)
"""
    done = await anyio.run_process([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False)
    assert done.stdout == b"finished\n"


@pytest.mark.parametrize("batches", [1, 3])
async def test_the_end_adds_up(tmp_path: Path, batches: int) -> None:
    """Prompts taken are in batches, dropped, failed, or returned."""
    counts = (await stored(a_recipe(batches=batches), tmp_path / "run")).accounting
    assert counts.in_batch == 3 * batches
    assert counts.taken == counts.in_batch + counts.dropped + counts.failed + counts.returned


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import anyio
from rollouts.runs.run import run
from rollouts.runs.resume import reopen
from rollouts.runs.start import begin
from rollouts.runs.writer import RunWriter
from tests.runs.test_run import a_recipe, generate

async def noted(prompts):
    print("generated", prompts[0].index)
    return await generate(prompts)

async def main(path, size):
    recipe = a_recipe(noted, batches=30)
    if not size:
        opened = reopen(path, recipe.describe(), recipe.data_buffer)
        writer, run_journal, state = opened.writer, opened.run_journal, opened.state
    else:
        writer, state = RunWriter(path, recipe.describe(), format="jsonl"), None
        run_journal = begin(path, recipe.describe(), recipe.data_buffer)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with run_journal.journal:
        result = await run(recipe, writer, run_journal=run_journal, state=state)
    print(result.status, result.batches, str(result.error).splitlines()[0])

anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("size", [3_000, 20_000, 100_000])
def test_a_disk_that_is_full_stops_the_run_and_what_is_finished_stays(tmp_path: Path, size: int) -> None:
    """For any file refused first: one error, no traceback, sound files; with space, the run resumes."""
    line = [sys.executable, "-c", _FULL_DISK, str(tmp_path / "run")]
    done = subprocess.run([*line, str(size)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "\nfailed " in done.stdout
    assert "File too large" in done.stdout
    finished = RunHistory.read(tmp_path / "run" / "journal").rollouts
    assert verify_run(tmp_path / "run").violations == []
    done = subprocess.run([*line, "0"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    *generated, end = done.stdout.splitlines()
    assert end == "finished 30 None"
    assert verify_run(tmp_path / "run").violations == []
    assert not finished.keys() & {int(text.removeprefix("generated ")) for text in generated}


class Abrupt(BaseException):
    """As pytest's outcomes and panics of native libraries: no Exception."""


@pytest.mark.parametrize("error", [Abrupt("the library panicked"), ValueError("no such key")])
async def test_26_an_error_that_is_raised_is_in_run_json(tmp_path: Path, error: BaseException) -> None:
    """Where a run ends with a traceback, its status is failed, and its error is not empty."""

    class Full(RunWriter):
        def write_batch(self, *arguments: Any) -> Path:
            raise error

    recipe = a_recipe()
    with pytest.raises(type(error)):
        await run(recipe, Full(tmp_path / "run", recipe.describe()))
    info = read_info(tmp_path / "run")
    assert info["status"] == "failed"
    assert str(error) in info["error"]
