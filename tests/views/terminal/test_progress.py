"""Progress display: it shows the metrics of the run and does not change it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import attrs
import pytest
from rich.console import Console
from rich.text import Text

from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import listed_pause
from rollouts.concurrency.stalls import Stall, StallWatch, _is_script
from rollouts.dtypes import Prompt, Tool
from rollouts.errors import EnvironmentFailure, FilterFailure, at
from rollouts.runs.folder import read_rows
from rollouts.runs.run import run
from rollouts.runs.writer import RunStatus, RunWriter
from rollouts.testing.random_replies import schema_problems
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, check_reward_nonzero_std
from rollouts.training.metrics import RunMetrics
from rollouts.views.terminal.progress import (
    Progress,
    batch_line,
    panel,
    plain_line,
    summary,
)
from rollouts.views.terminal.tables import failure_kinds, failures_table, groups_table, samples_table
from rollouts.views.terminal.untrained import untrained_line
from rollouts.views.terminal.waiting import duration
from tests.manager_semantics.world import answer_at_once, manager_of, points, sample_for
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
        "batch 2 (3 of 3)",
        f"{counts.in_flight} in flight",
        f"{counts.in_batch + counts.ready} kept",
        f"{counts.dropped} dropped",
        f"{counts.failed} failed",
        "tokens/s",
        f"mean reward {manager.run_metrics.mean_reward:.3f}",
        "no rollout waits",
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
            await Progress(console).watch(manager, batches=2)

        tasks.start_soon(show)
        assert isinstance(console.file, io.StringIO)
        while "in flight" not in console.file.getvalue():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert console.file.getvalue().endswith("\x1b[2K") or "\x1b[?25h" in console.file.getvalue()


async def test_the_summary_adds_up_and_names_the_next_commands(tmp_path: Path) -> None:
    """It contains the accounting, the folder, and three commands."""
    recipe = a_recipe()
    writer = RunWriter(tmp_path / "run", recipe.describe())
    result = await run(recipe, writer)
    text = summary(result, writer).plain
    assert f"{result.accounting.taken} prompts taken = {result.accounting.in_batch} in batch + " in text
    settled = result.accounting.taken - result.accounting.returned + result.unbatched
    assert f"{settled / (result.accounting.in_batch + result.unbatched):.2f} prompts for each kept group" in text
    assert "--failures" not in text
    assert f"rollouts show {writer.path}" in text
    assert f"rollouts view {writer.path}" in text
    assert f"rollouts check-run {writer.path}" in text
    assert "--resume" not in text


@pytest.mark.parametrize("status", ["stopped", "failed"])
async def test_the_summary_of_a_run_that_did_not_finish_has_the_command_that_resumes_it(
    status: RunStatus, tmp_path: Path
) -> None:
    """It is the first of the next commands; a folder with a space is quoted for the shell."""
    recipe = a_recipe()
    writer = RunWriter(tmp_path / "a run", recipe.describe())
    result = attrs.evolve(await run(recipe, writer), status=status)
    assert f"next:  rollouts run --resume '{writer.path}'\n" in summary(result, writer).plain


async def test_each_batch_has_a_line_that_stays(tmp_path: Path) -> None:
    """It is printed when the batch is written, with the change of the mean reward; quiet prints none."""
    printed: list[str] = []
    for quiet in (True, False):
        console = Console(file=io.StringIO(), width=80)
        writer = RunWriter(tmp_path / f"run {quiet}", {})
        result = await run(a_recipe(), writer, on_batch=Progress(console, quiet=quiet).batch)
        assert isinstance(console.file, io.StringIO)
        printed.append(console.file.getvalue())
    assert printed[0] == ""
    lines = printed[1].splitlines()
    means = [batch["reward/mean"] for batch in result.batch_metrics]
    assert lines[0].startswith(f"batch 0: reward {means[0]:.3f} · ")
    assert lines[1].startswith(f"batch 1: reward {means[1]:.3f} ({means[1] - means[0]:+.3f}) · ")
    assert max(map(len, lines)) <= 80


def test_the_line_of_a_batch_of_texts_has_the_tokens_that_the_api_counted() -> None:
    """Texts have no ids; without a count of the API the line has no number of tokens."""
    texts = {"tokens/mean": 0.0, "turns/mean": 1.5, "seconds": 2.0, "episode/replies": 1.5}
    assert batch_line(texts).plain == "batch 0: reward 0.000 · 1.5 turns · 2.0 s"
    line = batch_line({**texts, "episode/completion_tokens": 31.0}).plain
    assert line == "batch 0: reward 0.000 · 31 reply tokens · 1.5 turns · 2.0 s"


def test_the_line_of_a_batch_names_the_faults_of_calls() -> None:
    """The most frequent first; no line if all calls ran."""
    assert "did not run" not in batch_line({"episode/tool_calls": 4.0}).plain
    counted = {"tool_calls": 4.0, "malformed_tool_calls/not_json": 0.5, "unknown_tool_calls": 1.0}
    text = batch_line({f"episode/{name}": mean for name, mean in counted.items()}).plain
    assert text.endswith("\n  of 4 tool calls a sample did not run: 1 unknown tool, 0.5 not_json")


def test_the_untrained_tokens_of_programs_are_named_with_their_option() -> None:
    """The share of all sampled tokens, the reasons, and the option that keeps them; nothing where all are trained."""
    means = {"sampled_tokens": 50.0, "untrained_tokens/side_call": 10.0, "untrained_tokens/undelivered": 1.0}
    batch = {f"episode/{name}": mean for name, mean in means.items()}
    assert untrained_line([batch, {"episode/sampled_tokens": 50.0}]) == (
        '11.0% of the sampled tokens are not trained: 10.0% side_call (Training(side_calls="train") keeps them), '
        "1.0% undelivered\n"
    )
    assert untrained_line([{"episode/sampled_tokens": 50.0, "episode/untrained_tokens/side_call": 0.1}]) == ""
    assert untrained_line([{"reward/mean": 1.0}]) == ""


async def test_the_summary_of_a_resumed_run_is_of_this_process(tmp_path: Path) -> None:
    """A finished run that is resumed says that nothing is left to do, and no speed."""
    recipe = a_recipe()
    writer = RunWriter(tmp_path / "run", recipe.describe())
    result = await run(recipe, writer)
    assert "nothing to do" not in summary(result, writer).plain
    assert " tokens/s, " in summary(result, writer).plain
    again = RunMetrics()
    again.load(result.run_metrics.to_dict())
    resumed = attrs.evolve(result, run_metrics=again, batch_metrics=(), seconds=0.1)
    text = summary(resumed, writer).plain
    assert "nothing to do: all batches of the run exist (2); --batches N asks for more" in text
    assert "tokens/s" not in text


async def test_the_time_left_is_that_at_the_pace_of_this_process(manager: AsyncRolloutManager) -> None:
    """Groups that an earlier process kept do not count for the pace; without a kept group there is no estimate."""
    manager.run_metrics.started = time.monotonic() - 600
    progress = Progress(Console(file=io.StringIO()))
    kept = manager.accounting.in_batch + manager.accounting.ready
    progress.kept_before = kept - 2
    left = 4 * 3 - kept
    assert f" · about {duration(600 * left / 2)} left" in plain_line(manager, batches=4, progress=progress)
    with listed_pause("an outage", lambda: 0):
        assert " left" not in plain_line(manager, batches=4, progress=progress).replace(" s left", "")
    progress.kept_before = kept
    assert "left" not in plain_line(manager, batches=4, progress=progress)


async def test_after_the_last_batch_the_line_says_so(manager: AsyncRolloutManager) -> None:
    """No batch is being filled."""
    assert f"{manager.batches} of {manager.batches} batches are full: " in plain_line(manager, batches=manager.batches)


@pytest.mark.parametrize(("reward", "said"), [(0.0, True), (None, False)])
async def test_a_run_that_keeps_hardly_a_group_says_so_once_and_early(reward: float | None, said: bool) -> None:
    """After 16 dropped groups, with the reason, the mean reward and the option; not if an eighth is kept."""
    rewards = itertools.repeat(reward) if reward is not None else itertools.cycle([0.0, 1.0])

    async def answer(prompts: Sequence[Prompt]) -> list[Sample]:
        return [sample_for(prompt, reward=next(rewards)) for prompt in prompts]

    config = RolloutConfig(
        batch_size=1 if said else 20,
        n_samples_per_prompt=2,
        generate_fn=answer,
        filter_fn=check_reward_nonzero_std,
        patience=20,
    )
    progress = Progress(Console(file=io.StringIO(), width=1000))
    async with AsyncRolloutManager(config, DataBuffer(["why?"])) as manager:
        progress.advise(manager)
        with pytest.raises(FilterFailure) if said else contextlib.nullcontext():
            await manager.generate_batch()
        progress.advise(manager)
        count = manager.accounting.dropped  # one more group may end when the manager closes
        progress.advise(manager)
    assert isinstance(progress.console.file, io.StringIO)
    assert progress.console.file.getvalue() == said * (
        f"0 of {count} groups are kept so far ({count} × check_reward_nonzero_std); "
        f"the mean reward of {2 * count} rollouts is 0. "
        'keep="all" of agent_recipe, in place of a filter, keeps such groups; the built-in model, which runs without '
        "--endpoint have, solves calculator problems alone. After 20 in a row the run stops\n"
    )


async def test_the_rewards_of_the_last_batches_are_shown(manager: AsyncRolloutManager) -> None:
    """As a trend, from the second batch on."""
    progress = Progress(Console(file=io.StringIO()), quiet=True)
    progress.batch({"reward/mean": 0.25})
    assert "by batch" not in plain_line(manager, batches=4, progress=progress)
    progress.batch({"reward/mean": 0.5})
    assert ", by batch 0.25 0.50" in plain_line(manager, batches=4, progress=progress)


async def test_tables_list_groups_and_samples(manager: AsyncRolloutManager, tmp_path: Path) -> None:
    """Each group has a row with prompt, rewards, spread and outcome; each sample one with its numbers."""
    rows = list(read_rows(tmp_path / "run", "all"))
    text = shown(groups_table([rows[:4]]))
    assert f"question {rows[0].data['group_index']}" in text
    assert "batch 0" in text
    assert len(shown(samples_table(rows[:4])).strip().splitlines()) == 5


@pytest.mark.parametrize("failing", [lambda prompt: prompt.group_index == 3, lambda prompt: False])
async def test_tables_can_be_read_at_80_columns(tmp_path: Path, failing: Callable[[Prompt], bool]) -> None:
    """No number and no header is cut, however long the prompts and rewards are; a group has one line."""
    prompt = "a question that is much longer than a terminal is wide, with number {} at its end"
    await store_run(tmp_path / "run", prompt=prompt, fails=failing, n_samples_per_prompt=12)
    rows = [
        attrs.evolve(row, data={**row.data, "group_index": 100_000 + row.data["group_index"], "reward": 1 / 3})
        for row in read_rows(tmp_path / "run", "all")
    ]
    groups = [list(members) for _, members in itertools.groupby(rows, lambda row: row.data["group_index"])]
    for table, count in ((groups_table(groups), len(groups)), (samples_table(rows), len(rows))):
        lines = shown(table, width=80).rstrip().splitlines()
        assert len(lines) == 1 + count
        assert "…" not in lines[0]
        assert max(map(len, lines)) <= 80
    assert "100000" in shown(groups_table(groups), width=80)


async def test_a_failed_group_shows_its_cause(manager: AsyncRolloutManager, tmp_path: Path) -> None:
    """In the table of groups and in that of its samples; the kinds of failures are counted."""
    rows = list(read_rows(tmp_path / "run", "failed"))
    assert "generate" in shown(groups_table([rows]), width=80)
    assert "generate" in shown(samples_table(rows), width=80)
    (kind,) = failure_kinds([rows])
    assert (kind.failure.cause, kind.count, kind.group, kind.sample) == ("generate", len(rows), 3, 0)
    assert "the world ended" in shown(failures_table([kind]), width=80)


async def test_what_blocks_the_event_loop_is_named_while_it_does() -> None:
    """File and line of a user's code, before it ends; not of code of the package."""
    console = Console(file=io.StringIO(), width=200)
    assert isinstance(console.file, io.StringIO)
    progress = Progress(console)
    deadline = time.monotonic() + 20

    async with StallWatch(0.05, progress.blocked):
        await anyio.lowlevel.checkpoint()
        while "test_progress.py" not in console.file.getvalue() and time.monotonic() < deadline:
            sum(range(1000))
        text = console.file.getvalue()
    assert text.startswith("the event loop is blocked, 0.")
    assert f"{Path(__file__).relative_to(Path.cwd())}:" in text
    progress.blocked(Stall(f"{batch_line.__code__.co_filename}:1 in batch_line", False, 1.0, 1))
    assert console.file.getvalue().count("blocked") == 1


async def test_a_stall_of_this_package_names_no_line() -> None:
    """No line of a user was running. On a busy machine lines of this test may stall too, before and after."""
    console = Console(file=io.StringIO(), width=200)
    big = Tool("look", "Look.", {"properties": {f"name_{number}": {"type": "text"} for number in range(50_000)}})
    seen: list[Stall] = []

    def blocked(stall: Stall) -> None:
        if not stall.place.startswith(f"{__file__}:"):
            seen.append(stall)
            Progress(console).blocked(stall)

    async with StallWatch(0.02, blocked):
        await anyio.lowlevel.checkpoint()
        ended = anyio.Event()
        asyncio.get_running_loop().call_soon(schema_problems, big)
        asyncio.get_running_loop().call_soon(ended.set)
        await ended.wait()
    assert [stall.of_user for stall in seen] == [False] * len(seen) != [], "it is seen, but not as a user's line"
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_the_script_of_a_command_is_not_a_line_of_a_user(tmp_path: Path) -> None:
    """``bin/rollouts`` is the outermost frame of every stall; by its own path, a relative one, or a link."""
    script = Path(sysconfig.get_path("scripts")) / "rollouts"
    (tmp_path / "rollouts").symlink_to(script)
    scripts = [str(script), os.path.relpath(script), str(tmp_path / "rollouts")]
    assert [_is_script(name) for name in scripts] == [True] * 3
    assert not _is_script(str(tmp_path / "train"))
    assert not _is_script(str(script.with_suffix(".py")))


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


async def test_a_run_with_slots_shows_the_rollouts_that_run() -> None:
    """And the open groups, on the panel and in the plain line; after the third batch, the advice."""
    lines: list[str] = []

    class Lines(Progress):
        def say(self, text: str | Text, style: str = "dim") -> None:
            lines.append(str(text))

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await points(200 if (prompts[0].index or 0) % 8 == 0 else 1)
        return await answer_at_once(prompts)

    manager = manager_of(generate, n_samples_per_prompt=8, over_sampling_factor=1.5, in_flight=40, batch_size=4)
    progress = Lines(Console(), quiet=True)
    await progress.watch(manager, batches=4)
    async with manager:
        for _ in range(4):
            progress.batch(dict.fromkeys(["batch"], 0.0) | {"slots/busy": 0.1})
        await manager.generate_batch()
        text = f"{manager.slots.running} of 40 rollouts · {manager.accounting.in_flight} groups open"
        assert text in plain_line(manager, batches=4)
        assert text in shown(panel(manager, batches=4))
        assert set(manager.metrics) >= {"slots/running", "slots/busy", "groups/open"}
        assert 0 < manager.metrics["slots/busy"] < 1
    assert sum("in_flight=40 with over_sampling_factor=3" in line for line in lines) == 1
