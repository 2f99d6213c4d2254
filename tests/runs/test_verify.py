"""Verification: a sound run passes, and every change in a stored run is found and named."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.base.storable import to_msgpack
from rollouts.dtypes import LOGPROB_TOLERANCE, Prompt, StopReason
from rollouts.errors import ConfigError
from rollouts.runs import parquet
from rollouts.runs.reader import load_run
from rollouts.runs.verify import Report, check_sample, verify_run
from rollouts.runs.writer import Format, RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.stored_runs import edit_info, edit_line, some_sample, spread, store_run

Row = dict[str, Any]
FIRST = "batches/batch-000000.jsonl"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 batches of 3 groups of 4, with dropped, failed and unbatched groups."""
    path = tmp_path_factory.mktemp("sound") / "run"
    anyio.run(partial(store_run, path, over_sampling_factor=4.0))
    assert (path / "unbatched.jsonl").exists()
    assert (path / "dropped.jsonl").exists()
    return path


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def laws(report: Report) -> set[int]:
    return {violation.law for violation in report.violations}


def trained(row: Row) -> list[int]:
    return [position for position, flag in enumerate(row["loss_mask"]) if flag]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_a_sound_run_passes(tmp_path: Path, format: Format) -> None:
    """No law is broken, and the report says how much was checked for each."""
    manager = await store_run(tmp_path / "run", format=format)
    report = verify_run(tmp_path / "run")
    assert report.violations == []
    samples = load_run(tmp_path / "run", "all")
    assert report.checked[1] == {
        "samples": len(samples),
        "completions": sum(len(sample.completions) for sample in samples),
    }
    assert report.checked[2]["tokens"] == sum(len(sample) for sample in samples)
    assert report.checked[4]["prompts taken"] == manager.accounting.taken
    assert report.checked[5]["batches"] == 2
    assert "law 5 (groups): holds, 2 batches" in str(report)


async def test_spread_is_reported(tmp_path: Path) -> None:
    """Every group of a batch has spread, and no group that the filter dropped has any."""
    await store_run(tmp_path / "run")
    spread = verify_run(tmp_path / "run").spread
    assert (spread["kept"].groups, spread["kept"].with_spread) == (6, 6)
    assert spread["dropped"].with_spread == 0


def test_a_loaded_sample_passes_by_itself(sound: Path) -> None:
    """Laws 1 and 2 can be checked on a sample in memory."""
    assert [violation for sample in load_run(sound, "all") for violation in check_sample(sample)] == []


DAMAGES: dict[str, tuple[int, Callable[[Row, Callable[[int], int]], Any]]] = {
    "flip a token": (1, lambda row, pick: flip(row["tokens"], pick(len(row["tokens"])), 1)),
    "change a request's checksum": (
        1,
        lambda row, pick: bump(row["completions"][pick(len(row["completions"]))], "prompt_digest"),
    ),
    "flip the mask": (2, lambda row, pick: flip(row["loss_mask"], pick(len(row["loss_mask"])), 1)),
    "shift the mask": (2, lambda row, pick: row.update(loss_mask=row["loss_mask"][1:] + row["loss_mask"][:1])),
    "cut the mask": (2, lambda row, pick: row["loss_mask"].pop()),
    "an odd mask": (2, lambda row, pick: row["loss_mask"].__setitem__(pick(len(row["loss_mask"])), 2)),
    "no logprobs": (2, lambda row, pick: row.update(rollout_log_probs=None)),
    "a logprob of NaN": (2, lambda row, pick: put_logprob(row, pick, None)),
    "a logprob above 0": (2, lambda row, pick: put_logprob(row, pick, 0.5)),
    "another logprob": (2, lambda row, pick: put_logprob(row, pick, -77.0)),
    "a logprob on context": (2, lambda row, pick: row["rollout_log_probs"].__setitem__(0, -0.1)),
    "no versions": (2, lambda row, pick: row.update(versions=[])),
    "longer versions": (2, lambda row, pick: bump(row["versions"][0], 2)),
    "shorter versions": (2, lambda row, pick: bump(row["versions"][-1], 1)),
    "a longer call": (2, lambda row, pick: bump(row["completions"][0], "stop")),
    "another outcome": (4, lambda row, pick: row.update(outcome="failed")),
    "another batch": (4, lambda row, pick: row.update(batch=7)),
    "another group": (5, lambda row, pick: bump(row, "group_index")),
    "another index": (5, lambda row, pick: bump(row, "index")),
    "another rollout": (5, lambda row, pick: bump(row, "rollout_id")),
    "another prompt": (5, lambda row, pick: row.update(prompt="something else")),
    "another label": (5, lambda row, pick: row.update(label="something else")),
    "a step reward of null": (4, lambda row, pick: row.update(step_rewards=[0.5, None])),
    "a metric of null": (4, lambda row, pick: row.update(metrics={**row["metrics"], "found": None})),
    "a metric of another kind": (4, lambda row, pick: row.update(metrics={"found": "yes"})),
    "a step reward of another completion": (4, lambda row, pick: row.update(step_completions=[2])),
    "more completions than step rewards": (4, lambda row, pick: row.update(step_completions=[0, 1])),
    "shorter advantages": (2, lambda row, pick: row.update(advantages=[0.0] * (len(row["tokens"]) - 1))),
    "an advantage of NaN": (2, lambda row, pick: row.update(advantages=[None] * len(row["tokens"]))),
    "longer logprobs of a teacher": (2, lambda row, pick: row.update(teacher_log_probs=[0.0] * 99)),
    "a negative loss multiplier": (4, lambda row, pick: row.update(loss_multiplier=-1.0)),
    "no loss multiplier": (4, lambda row, pick: row.update(loss_multiplier=None)),
    "a step reward of another kind": (4, lambda row, pick: row.update(step_rewards=["0.5"])),
    "no tokens at all": (4, lambda row, pick: row.pop("tokens")),
    "an id of 33 bits": (1, lambda row, pick: row["tokens"].__setitem__(0, 2**32)),
    "a negative id": (1, lambda row, pick: row["tokens"].__setitem__(pick(len(row["tokens"])), -1)),
}


def flip(column: list[int], position: int, bit: int) -> None:
    column[position] ^= bit


def bump(holder: Any, key: Any) -> None:
    holder[key] += 1


def put_logprob(row: Row, pick: Callable[[int], int], value: float | None) -> None:
    positions = trained(row)
    row["rollout_log_probs"][positions[pick(len(positions))]] = value


@pytest.mark.parametrize("damage", DAMAGES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_change_of_a_sample_is_found(sound: Path, run: Path, damage: str, data: st.DataObject) -> None:
    """A changed sample of a batch is named by file and line under the law that it breaks."""
    shutil.copy(sound / FIRST, run / FIRST)
    line = data.draw(st.integers(0, 11), label="line")
    law, change = DAMAGES[damage]
    edit_line(run / FIRST, line, lambda row: change(row, lambda size: data.draw(st.integers(0, size - 1))))
    report = verify_run(run)
    assert law in laws(report)
    group = range(line // 4 * 4 + 1, line // 4 * 4 + 5)  # a foreign member may be reported at another one of its group
    named = [f"{run / FIRST}, line {number}" for number in group]
    assert any(name in violation.place for violation in report.violations for name in named)


def test_the_line_says_where_what_and_what_instead(run: Path) -> None:
    """A violation names law, file, line, group, index, column, position, value and expectation."""

    def damage(row: Row) -> None:
        damage.at = trained(row)[3]  # type: ignore[attr-defined]
        row["rollout_log_probs"][damage.at] = 0.25  # type: ignore[attr-defined]

    edit_line(run / FIRST, 5, damage)
    (violation,) = verify_run(run).violations
    where = f"{run / FIRST}, line 6 (group "
    assert str(violation).startswith(f"law 2 (mask) broken: {where}")
    assert f"rollout_log_probs, position {damage.at}: got 0.25; expected a finite number <= 0" in str(violation)  # type: ignore[attr-defined]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_step_reward_is_a_finite_number(tmp_path: Path, format: Format, reward: float) -> None:
    """A logprob that is not finite is null in JSON and itself in Parquet; both are found, by position."""
    await store_run(tmp_path, format=format)
    file = tmp_path / FIRST
    if format == "jsonl":
        edit_line(file, 4, lambda row: row.update(step_rewards=[0.5, reward]))
    else:
        file = file.with_suffix(".parquet")
        rows = list(parquet.read(file))
        rows[4]["step_rewards"] = [0.5, reward]
        file.write_bytes(parquet.encode(rows))
    (violation,) = verify_run(tmp_path).violations
    assert violation.law == 4
    assert re.search(
        rf"{file}, line 5 \(.*\), step_rewards, position 1: got (None|nan|inf); expected a finite number",
        str(violation),
    )


def test_a_logprob_may_be_above_0_by_what_a_reply_may(sound: Path) -> None:
    """The tolerance for rounding is that of the reply parser."""
    sample = load_run(sound)[0]
    position = sample.loss_mask.index(1)
    for logprob, broken in ((LOGPROB_TOLERANCE, 0), (1.01 * LOGPROB_TOLERANCE, 1)):
        sample.rollout_log_probs[position] = logprob
        assert len(check_sample(sample)) == broken


@pytest.mark.parametrize("name", ["dropped.jsonl", "failed.jsonl", "unbatched.jsonl"])
def test_groups_outside_batches_are_checked_too(run: Path, name: str) -> None:
    """A changed sample of a dropped, failed or unbatched group is found."""
    edit_line(run / name, 0, lambda row: row.update(index=row["index"] + 100_000))
    assert any(name in violation.place for violation in verify_run(run).violations)


async def test_a_group_whose_filter_sets_a_reward_of_nan_is_sound(tmp_path: Path) -> None:
    """Its failed samples keep the label of their group, with the one whose reward cannot be stored."""

    def spoils(samples: Sequence[Sample]) -> bool:
        if samples[0].group_index == 1:
            samples[0].reward = math.nan
        return spread(samples)

    await store_run(tmp_path / "run", filter_fn=spoils, fails=lambda prompt: False)
    failed = load_run(tmp_path / "run", "failed")
    assert [(sample.label, sample.reward is None) for sample in failed] == [(1, n == 0) for n in range(4)]
    report = verify_run(tmp_path / "run")
    assert report.ok, report.violations


def test_swapped_groups_are_found(run: Path) -> None:
    """A batch is ordered by group index."""
    lines = (run / FIRST).read_bytes().splitlines(keepends=True)
    (run / FIRST).write_bytes(b"".join(lines[4:8] + lines[:4] + lines[8:]))
    (violation,) = verify_run(run).violations
    assert violation.law == 5
    assert "expected groups in order" in str(violation)


def test_swapped_rollouts_are_found(run: Path) -> None:
    """A group is ordered by index."""
    lines = (run / FIRST).read_bytes().splitlines(keepends=True)
    (run / FIRST).write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    assert laws(verify_run(run)) == {5}


def test_a_lost_sample_is_found(run: Path) -> None:
    """A group with a rollout too few is not whole."""
    lines = (run / FIRST).read_bytes().splitlines(keepends=True)
    (run / FIRST).write_bytes(b"".join(lines[:-1]))
    assert laws(verify_run(run)) == {5}


def test_a_request_that_trains_twice_is_found(run: Path) -> None:
    """A request id is in one completion of one sample of the run, across files too."""
    taken = msgspec.json.decode((run / FIRST).read_bytes().splitlines()[0])["completions"][0]["request_id"]
    edit_line(run / "dropped.jsonl", 1, lambda row: row["completions"][1].update(request_id=taken))
    (violation,) = verify_run(run).violations
    assert violation.law == 3
    assert f"request {taken} again" in str(violation)


def test_a_group_in_two_places_is_found(run: Path) -> None:
    """A group that is in two files is reported with both locations."""
    rows = (run / "dropped.jsonl").read_bytes().splitlines(keepends=True)[:4]
    with (run / "unbatched.jsonl").open("ab") as file:  # in one file, both copies could be adjacent and form one group
        file.writelines(rows)
    report = verify_run(run)
    assert {3, 4} <= laws(report)
    assert any("expected one place for it" in str(violation) for violation in report.violations)


@pytest.mark.parametrize("name", ["taken", "in_batch", "dropped", "failed", "returned", "ready", "in_flight"])
def test_wrong_accounting_is_found(run: Path, name: str) -> None:
    """Each number of the accounting is compared with the sum or the files."""
    edit_info(run, lambda info: bump(info["accounting"], name))
    assert laws(verify_run(run)) == {4}


def test_accounting_that_still_adds_up_is_compared_with_the_files(run: Path) -> None:
    """Two wrong numbers that cancel out are found."""

    def shift(info: Row) -> None:
        info["accounting"]["dropped"] += 1
        info["accounting"]["in_batch"] -= 1

    edit_info(run, shift)
    assert len(verify_run(run).violations) == 2


def test_a_missing_batch_is_found(run: Path) -> None:
    """Batches are numbered without a gap, and their number is known."""
    (run / FIRST).unlink()
    assert laws(verify_run(run)) == {4, 5}


def test_a_corrupted_line_is_a_broken_run(run: Path) -> None:
    """A truncated file is reported by file and line, and the rest is still checked."""
    (run / FIRST).write_bytes((run / FIRST).read_bytes()[:-30])
    report = verify_run(run)
    assert any(f"{run / FIRST}, line 12: corrupted" in str(violation) for violation in report.violations)
    assert report.checked[5]["batches"] == 2


def test_a_run_without_an_end_is_checked_as_far_as_it_goes(run: Path) -> None:
    """The accounting of an active run is not compared, which the report notes."""
    edit_info(run, lambda info: info.update(status="running", accounting=None))
    report = verify_run(run)
    assert report.ok
    assert "accounting not compared" in str(report)


def test_sizes_must_be_known(run: Path) -> None:
    """Without the config in run.json, whole groups cannot be checked."""
    edit_info(run, lambda info: info.pop("config"))
    assert laws(verify_run(run)) == {5}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """There is nothing to verify where there is no run."""
    with pytest.raises(ConfigError, match="the folder of a run"):
        verify_run(tmp_path)


# -- branches ---------------------------------------------------------------------------------------------------------


async def _store_forks(path: Path, *, program: bool = False) -> None:
    """A run of 1 batch of 2 groups of 2 rollouts, each with two branches; the second shows what the first sampled.

    Of a program the last branch has the counts of its session, in which 5 sampled tokens are in no branch.
    """

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        first, second = (some_sample(prompt, seed) for seed in (1, 2))
        first.stop_reason = StopReason.FORKED
        if program:
            sampled = first.sampled_tokens + second.sampled_tokens + 5
            second.metrics |= {"sampled_tokens": sampled, "untrained_tokens/side_call": 5}
            return [first, second]
        for sample in (first, second):
            sample.history = "fork"
        return [first, second]

    sizes = {"batch_size": 2, "n_samples_per_prompt": 2, "over_sampling_factor": 1.0}
    config = RolloutConfig(**sizes, generate_fn=generate, reward_fn=_by_length)  # type: ignore[arg-type]
    writer = RunWriter(path, {"config": config.describe()}, format="jsonl")
    async with AsyncRolloutManager(config, DataBuffer(["a", "b", "c"]), on_group=writer.on_group) as manager:
        writer.write_batch(await manager.generate_batch(), manager.metrics, manager.accounting)
    writer.finish("stopped", manager.accounting)


def _by_length(sample: Sample) -> float:
    assert sample.stop_reason is not StopReason.FORKED, "the end of the rollout is not in it"
    return float(len(sample))


async def test_branches_of_one_rollout_are_sound(tmp_path: Path) -> None:
    """They share index and rollout id; the reward is computed once for both."""
    await _store_forks(tmp_path / "run")
    report = verify_run(tmp_path / "run")
    assert report.ok, report.violations
    samples = load_run(tmp_path / "run")
    assert [sample.index for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sample.reward for sample in samples[::2]] == [sample.reward for sample in samples[1::2]]
    assert samples[1].reward == len(samples[1])


async def test_what_a_program_sampled_is_trained_or_counted(tmp_path: Path) -> None:
    """The tokens of its branches and the tokens counted as untrained are all that its session sampled."""
    await _store_forks(tmp_path / "run", program=True)
    report = verify_run(tmp_path / "run")
    assert report.ok, report.violations
    assert report.checked[3]["rollouts of programs"] == 4


@pytest.mark.parametrize("damage", ["a reply in two branches", "a count that is gone", "a count of another type"])
async def test_what_a_program_sampled_and_nothing_accounts_for_is_found(tmp_path: Path, damage: str) -> None:
    """A reply that two branches train has another request id in each; its tokens are more than were sampled."""
    await _store_forks(tmp_path / "run", program=True)
    first = json.loads((tmp_path / "run" / FIRST).read_text().splitlines()[0])

    def change(row: dict[str, Any]) -> None:
        if damage == "a reply in two branches":
            row.update({**first, "stop_reason": "task_completed", "metrics": row["metrics"]})
            row["completions"] = [{**call, "request_id": f"other {call['request_id']}"} for call in row["completions"]]
        else:
            row["metrics"]["untrained_tokens/side_call"] = 0 if damage == "a count that is gone" else "5"

    edit_line(tmp_path / "run" / FIRST, 1, change)
    found = [violation for violation in verify_run(tmp_path / "run").violations if violation.law == 3]
    assert len(found) == 1
    assert "the tokens that its session sampled" in str(found[0])


async def test_a_reply_trained_in_two_branches_is_found(tmp_path: Path) -> None:
    """Also under another request id: the second branch contains and trains the reply of the first one."""
    await _store_forks(tmp_path / "run")
    first = json.loads((tmp_path / "run" / FIRST).read_text().splitlines()[0])

    def copy(row: dict[str, Any]) -> None:
        row.update({**first, "stop_reason": "task_completed"})
        row["completions"] = [{**call, "request_id": f"other {call['request_id']}"} for call in row["completions"]]

    edit_line(tmp_path / "run" / FIRST, 1, copy)
    report = verify_run(tmp_path / "run")
    assert {violation.law for violation in report.violations} == {3}
    assert "trained again" in str(report.violations[0])


def test_hardening_01_an_id_outside_the_vocabulary_is_found(run: Path) -> None:
    """H1: the run's description has the size of the vocabulary; runs that lack it are checked without it."""
    assert verify_run(run).ok
    edit_info(run, lambda info: info.update(vocab_size=3))
    report = verify_run(run)
    assert {violation.law for violation in report.violations} == {1}
    assert all("an id < 3, the size of the vocabulary" in str(violation) for violation in report.violations)


_ZONE = datetime.timezone(datetime.timedelta(hours=2))
_VALUES: dict[str, Any] = {
    "aware": datetime.datetime(2031, 2, 3, 4, 5, 6, 789, tzinfo=_ZONE),
    "first year": datetime.datetime(1, 1, 1, tzinfo=_ZONE),
    "seconds": datetime.datetime(2031, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(seconds=3601))),
    "naive": datetime.datetime(2031, 2, 3, 4, 5),
    "date": datetime.date(2031, 2, 3),
    "bytes": b"\xd7\xff",
    "decimal": decimal.Decimal("1.10"),
    "uuid": uuid.UUID(int=7),
    "set": {1},
    "beyond 64 bits": 2**70,
    "surrogate": ["a\ud800", datetime.datetime(2031, 2, 3, tzinfo=_ZONE), b"ab", uuid.UUID(int=7)],
    "keys": {1: "a", (1, 2): "b"},
    "nan": float("nan"),
}


async def test_27_any_metadata_is_the_same_in_files_and_journal(tmp_path: Path) -> None:
    """Hardening 27: a value that JSON and MessagePack write differently is not a violation; a time keeps its zone."""

    def keep(samples: Sequence[Sample]) -> bool:
        for sample in samples:
            sample.metadata = dict(_VALUES)
        return spread(samples)

    await store_run(tmp_path / "run", journaled=True, filter_fn=keep)
    assert [str(violation) for violation in verify_run(tmp_path / "run").violations] == []
    kept = msgspec.msgpack.decode(to_msgpack({"at": _VALUES["aware"]}))
    assert kept == {"at": "2031-02-03T04:05:06.000789+02:00"}
