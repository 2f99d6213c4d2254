"""Resuming: a run killed at any moment ends with the same result as an uninterrupted one."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import msgspec
import numpy as np
import pytest

from rollouts.dtypes import Completion, Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.environments import ToolEnvironment, tool
from rollouts.errors import ConfigError, JournalError
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import renderer_for
from rollouts.runs.checksums import CHECKSUM, sealed
from rollouts.runs.folder import read_rows
from rollouts.runs.info import read_info
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.reader import load_run
from rollouts.runs.resume import reopen
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import Format, RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample, generate_rollout_batch
from tests.stored_runs import some_sample, spread

BATCHES = 3


def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "label": number} for number in range(9)]


class Counted:
    """A generate function that counts calls, fails where configured, and sleeps."""

    def __init__(self, fails: Sequence[int] = (5,)) -> None:
        self.calls: Counter[int] = Counter()
        self._fails = fails

    async def __call__(self, prompts: Sequence[Prompt]) -> list[Sample]:
        index = prompts[0].index
        assert index is not None
        for _ in range(index * 7 % 5):
            await anyio.lowlevel.checkpoint()
        self.calls[index] += 1
        if index in self._fails:
            raise OSError("broken world")
        sample = some_sample(prompts[0], seed=index)
        branches = [sample]
        if index % 6 == 0:
            branches.append(some_sample(prompts[0], seed=index + 1000))
            for branch in branches:
                branch.history = "fork"
        return branches


def config(generate: Counted, **options: Any) -> RolloutConfig:
    sizes: dict[str, Any] = {"batch_size": 2, "n_samples_per_prompt": 3, "over_sampling_factor": 2.0, **options}
    return RolloutConfig(generate_fn=generate, filter_fn=spread, **sizes)


def buffer() -> DataBuffer:
    return DataBuffer(rows(), seed=3)


async def fill(
    manager: AsyncRolloutManager, writer: RunWriter, run_journal: RunJournal, batches: int = BATCHES
) -> None:
    async with manager:
        for _ in range(manager.batches, batches):
            samples = await manager.generate_batch()
            await run_journal.journal.commit()
            writer.write_batch(samples, manager.metrics, attrs.evolve(manager.accounting))
    writer.finish("finished", manager.accounting)


async def new_run(path: Path, generate: Counted, **options: Any) -> AsyncRolloutManager:
    settings = config(generate, **options)
    description = {"recipe": "test", "config": settings.describe()}
    data = buffer()
    writer = RunWriter(path, description, format="jsonl")
    run_journal = begin(path, description, data)
    with run_journal.journal:
        manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
        await fill(manager, writer, run_journal)
    return manager


async def go_on(
    path: Path, generate: Counted | RolloutConfig, batches: int = BATCHES, **options: Any
) -> AsyncRolloutManager:
    settings = generate if isinstance(generate, RolloutConfig) else config(generate, **options)
    data = buffer()
    opened = reopen(path, {"recipe": "test", "config": settings.describe()}, data)
    with opened.run_journal.journal:
        manager = AsyncRolloutManager(settings, data, on_group=opened.writer.on_group, rollout_log=opened.run_journal)
        manager.restore(opened.state)
        await fill(manager, opened.writer, opened.run_journal, batches)
    return manager


def stored(path: Path) -> dict[int, list[tuple[int, Any, str]]]:
    """Group to index, tokens and outcome of its samples, in their order."""
    found: dict[int, list[tuple[int, Any, str]]] = {}
    for row in read_rows(path, "all"):
        data = row.data
        found.setdefault(data["group_index"], []).append((data["index"], data["tokens"], data["outcome"]))
    return found


def count_batches(run: Path, batches: int) -> None:
    """Change the number of batches in ``run.json``."""
    info = msgspec.json.decode((run / "run.json").read_bytes())
    del info[CHECKSUM]
    (run / "run.json").write_bytes(sealed(msgspec.json.encode({**info, "batches": batches})))


class Photographed(Journal):
    """Copies the run's folder before and after each write, and half way through it."""

    photos: list[Path]

    def flush(self) -> None:
        run = self.path.parent
        self._photo(run)
        segment = sorted(self.path.glob("segment-*"))[-1]
        size = segment.stat().st_size
        super().flush()
        self._photo(run)
        if segment.stat().st_size > size + 1:
            half = self._photo(run) / "journal" / segment.name
            with half.open("r+b") as file:
                file.truncate((size + segment.stat().st_size) // 2)

    def _photo(self, run: Path) -> Path:
        photo = run.parent / f"photo-{len(self.photos):03d}"
        shutil.copytree(run, photo)
        self.photos.append(photo)
        return photo


async def test_a_run_that_dies_at_any_moment_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """No finished rollout is generated again, no prompt is skipped or repeated, and the accounting adds up."""
    plain = await new_run(tmp_path / "plain", Counted())
    expected = stored(tmp_path / "plain")
    generate = Counted()
    settings, data = config(generate), buffer()
    description = {"recipe": "test", "config": settings.describe()}
    writer = RunWriter(tmp_path / "run", description, format="jsonl")
    journal = Photographed(tmp_path / "run" / "journal")
    journal.photos = []
    run_journal = RunJournal(journal)
    run_journal.began({"recipe": "test", "batch_size": 2, "n_samples_per_prompt": 3, "data": data.fingerprint})
    manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
    with journal:
        await fill(manager, writer, run_journal)
    assert len(journal.photos) > 15
    for photo in journal.photos:
        before = RunHistory.read(photo / "journal")
        again = Counted()
        ended = await go_on(photo, again)
        done = {index for index, rollout in before.rollouts.items() if rollout.finished}
        assert not done & again.calls.keys(), f"{photo}: finished rollouts were generated again"
        report = verify_run(photo)
        assert report.ok, f"{photo}: {[str(violation) for violation in report.violations]}"
        found = stored(photo)
        for group in found.keys() & expected.keys():
            assert found[group] == expected[group], f"{photo}: group {group} is another one"
        ended.accounting.check()
        assert ended.batches == plain.batches == BATCHES
        groups = RunHistory.read(photo / "journal").groups
        assert set(found) | set(RunHistory.read(photo / "journal").unsettled) == set(range(groups)), "none is skipped"


async def test_a_journal_cut_at_any_byte_of_its_last_three_records_is_resumed(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It opens with every earlier record and its accounting adds up; every 300th prefix is run to its end.

    Every 25th byte, and each of the last 50; with ``--long`` every byte.
    """
    every = 1 if request.config.getoption("--long") else 25
    await new_run(tmp_path / "whole", Counted())
    whole = tmp_path / "whole" / "journal"
    entries = list(read_journal(whole))
    segment = whole / "segment-000000.journal"
    data = segment.read_bytes()
    ends = [entry.offset.offset for entry in entries[1:]] + [len(data)]
    description = {"recipe": "test", "config": config(Counted()).describe()}
    for number, size in enumerate(range(ends[-4], len(data))):
        if number % every and size < len(data) - 50:
            continue
        path = tmp_path / "cut"
        shutil.copytree(tmp_path / "whole", path)
        (path / "journal" / segment.name).write_bytes(data[:size])
        count_batches(path, len(RunHistory.read(path / "journal").sealed))
        if number % 300:
            opened = reopen(path, description, buffer())
            opened.run_journal.journal.close()
            opened.state.accounting.check()
            kept = sum(end <= size for end in ends)
            assert len(list(read_journal(path / "journal"))) == kept + 1  # and that it was resumed
        else:
            assert (await go_on(path, Counted())).batches == BATCHES
            assert verify_run(path).violations == []
        shutil.rmtree(path)


@pytest.mark.parametrize("scored", [False, True])
async def test_a_group_whose_failure_was_stored_in_part_has_not_failed(tmp_path: Path, scored: bool) -> None:
    """A lost rollout is not a finished one; rollouts that the group's reward failed are finished, without a failure."""

    def judged(samples: list[Sample]) -> list[float]:
        if samples[0].group_index == 1:
            raise OSError("no judge")
        return [float(number % 2) for number in range(len(samples))]

    scoring: dict[str, Any] = {"reward_fn": judged, "group_rm": True} if scored else {}
    await new_run(tmp_path / "run", Counted(() if scored else (3,)), **scoring)
    journal = tmp_path / "run" / "journal"
    failed = next(entry for entry in read_journal(journal) if entry.fields.get("outcome") == "failed")
    segment = journal / "segment-000000.journal"
    segment.write_bytes(segment.read_bytes()[: failed.offset.offset])
    count_batches(tmp_path / "run", len(RunHistory.read(journal).sealed))
    opened = reopen(tmp_path / "run", {"recipe": "test", "config": config(Counted()).describe()}, buffer())
    opened.run_journal.journal.close()
    rollouts = opened.state.finished[failed.fields["group"]]
    assert len(rollouts) == 3 or not scored
    assert [
        sample for samples in rollouts.values() for sample in samples if sample.failure or sample.status == "failed"
    ] == []


async def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    """More batches follow the old ones; groups that were in no batch come first."""
    await new_run(tmp_path / "run", Counted())
    again = Counted()
    manager = await go_on(tmp_path / "run", again, batches=BATCHES + 2)
    assert manager.batches == BATCHES + 2
    assert verify_run(tmp_path / "run").ok
    assert max(again.calls.values()) <= 2


async def test_a_run_that_was_killed_can_be_looked_at(tmp_path: Path) -> None:
    """verify and read_rows work on it: an incomplete line is skipped, groups in the journal are listed."""
    await new_run(tmp_path / "run", Counted())
    RunWriter.reopen(tmp_path / "run")  # says "running" and dies
    with (tmp_path / "run" / "dropped.jsonl").open("ab") as file:
        file.write(b'{"group_index": 77, "tok')
    (tmp_path / "run" / "unbatched.jsonl").unlink(missing_ok=True)
    report = verify_run(tmp_path / "run")
    assert report.ok, report.violations
    assert "rollouts run --resume continues" in str(report)
    ready = {row.data["group_index"] for row in read_rows(tmp_path / "run", "unbatched")}
    assert ready == set(RunHistory.read(tmp_path / "run" / "journal").ready)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 3}, "batch_size: got 3; expected 2"),
        ({"n_samples_per_prompt": 4}, "n_samples_per_prompt: got 4; expected 3"),
    ],
)
async def test_another_recipe_is_refused(tmp_path: Path, change: dict[str, int], words: str) -> None:
    """A resumed run keeps its settings; other settings raise and change nothing."""
    await new_run(tmp_path / "run", Counted())
    before = read_info(tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        await go_on(tmp_path / "run", Counted(), **change)
    assert read_info(tmp_path / "run") == before


@pytest.mark.parametrize("recorded", [False, True])
async def test_the_sampler_is_that_of_the_run_also_before_its_first_record(tmp_path: Path, recorded: bool) -> None:
    """A run that was killed before its journal had a record is compared with ``run.json``; older runs had none."""
    of_pools = {"name": "PoolSampler", "hard": 0.25}
    path, description = tmp_path / "run", {"recipe": "test", "config": config(Counted()).describe()}
    described = {**description, "sampler": of_pools, "settings": {"sampler": of_pools}}
    RunWriter(path, described).finish("stopped", AsyncRolloutManager(config(Counted()), buffer()).accounting)
    (begin(path, described, buffer()).journal if recorded else Journal(path / "journal")).close()
    other = {**described, "settings": {"sampler": {"name": "LevelSampler"}}}
    with pytest.raises(ConfigError, match=r"sampler\.name: got 'LevelSampler'; expected 'PoolSampler'"):
        reopen(path, other, buffer())
    opened = reopen(path, described, buffer())
    opened.run_journal.journal.close()
    assert opened.changed == ()
    old = tmp_path / "old"
    RunWriter(old, description).finish("stopped", AsyncRolloutManager(config(Counted()), buffer()).accounting)
    (begin(old, description, buffer()).journal if recorded else Journal(old / "journal")).close()
    with pytest.raises(ConfigError, match=r"sampler\.name: got 'PoolSampler'; expected None"):
        reopen(old, described, buffer())


async def test_other_data_are_refused(tmp_path: Path) -> None:
    """A group index must have the same prompt as before."""
    await new_run(tmp_path / "run", Counted())
    description = {"recipe": "test", "config": config(Counted()).describe()}
    with pytest.raises(ConfigError, match=r"data: got .*; expected the run's seed and prompts"):
        reopen(tmp_path / "run", description, DataBuffer(rows(), seed=4))


async def test_damage_is_said_by_file_and_offset_before_anything_is_touched(tmp_path: Path) -> None:
    """By resume and by verify."""
    await new_run(tmp_path / "run", Counted())
    segment = next((tmp_path / "run" / "journal").glob("segment-*"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    segment.write_bytes(data)
    with pytest.raises(JournalError, match=r"segment-000000\.journal, offset"):
        await go_on(tmp_path / "run", Counted())
    report = verify_run(tmp_path / "run")
    assert any("segment-000000.journal, offset" in str(violation) for violation in report.violations)


async def test_a_disk_that_takes_no_more_stops_the_run_and_what_is_finished_stays(tmp_path: Path) -> None:
    """The error has the cause; resumed with space on the disk, the run finishes."""

    class Full(Journal):
        def append(self, kind: str, fields: Any, columns: Any = None) -> None:
            if kind == "group" and len(list(read_journal(self.path))) > 20:
                raise JournalError("no space left on device")
            super().append(kind, fields, columns)

    settings, data = config(Counted()), buffer()
    description = {"recipe": "test", "config": settings.describe()}
    writer = RunWriter(tmp_path / "run", description, format="jsonl")
    run_journal = RunJournal(Full(tmp_path / "run" / "journal"))
    manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
    with run_journal.journal, pytest.raises(JournalError, match="no space left"):
        await fill(manager, writer, run_journal)
    writer.finish("failed", manager.accounting)
    done = set(RunHistory.read(tmp_path / "run" / "journal").rollouts)
    again = Counted()
    await go_on(tmp_path / "run", again)
    assert not done & again.calls.keys()
    assert verify_run(tmp_path / "run").ok


# -- replies that no trainer could take -------------------------------------------------------------------------------


class Shelves(ToolEnvironment):
    """One tool, and snapshots."""

    @tool
    def look(self) -> str:
        """Look at the shelf."""
        return "nothing"

    async def snapshot(self) -> None:
        return None

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None


class Lines:
    """Replies of two turns, a call and an answer; the first ``poisoned`` calls have an id outside the vocabulary."""

    def __init__(self, poisoned: int = 0) -> None:
        renderer = renderer_for(str(DEMO_MODEL))
        self.outside = renderer.vocab_size
        self._call = renderer.encode('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>').tolist()
        self._answer = renderer.encode("Nothing.<|im_end|>").tolist()
        self._result = renderer.encode("<tool_response>").tolist()
        self._left = poisoned

    def __call__(self, tokens: Any) -> list[int]:
        ids, mark = np.asarray(tokens).tolist(), self._result
        if any(ids[at : at + len(mark)] == mark for at in range(len(ids))):
            return self._answer
        self._left -= 1
        return [self.outside, *self._call] if self._left >= 0 else self._call


class Unchecked(ScriptedPolicy):
    """Accepts every reply, and refuses to send its ids again, as a client that does not check replies."""

    async def complete(self, request: CompletionRequest) -> Completion:
        if request.tokens.max() >= renderer_for(str(DEMO_MODEL)).vocab_size:
            raise ConfigError("tokens: expected ids of the vocabulary")
        return await super().complete(request)


def shelves(policy: Any) -> RolloutConfig:
    generate = partial(
        generate_rollout_batch,
        environment_cls=Shelves,
        endpoint=Endpoint(),
        tokenizer=str(DEMO_MODEL),
        policy=policy,
    )
    return RolloutConfig(
        generate_fn=generate, reward_fn=_by_index, batch_size=2, n_samples_per_prompt=3, max_attempts=2
    )


def _by_index(sample: Sample) -> float:
    assert sample.index is not None
    return float(sample.index % 2)


def ids_in(path: Path) -> set[int]:
    """Every id that the journal has."""
    return {int(token) for entry in read_journal(path) if entry.columns is not None for token in entry.columns.tokens}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_a_run_with_a_poisoned_turn_in_its_journal_comes_to_its_end(tmp_path: Path, format: Format) -> None:
    """A stored turn has an id outside the vocabulary: its rollout starts again, and the run continues."""
    path, lines = tmp_path / "run", Lines(poisoned=10**6)
    settings, data = shelves(Unchecked(lines)), buffer()
    description = {"recipe": "test", "config": settings.describe()}
    writer, run_journal = RunWriter(path, description, format=format), begin(path, description, data)
    with run_journal.journal:
        manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
        with pytest.raises(ConfigError, match="ids of the vocabulary"):
            await fill(manager, writer, run_journal)
    writer.finish("failed", manager.accounting)
    manager.accounting.check()
    history = RunHistory.read(path / "journal")
    assert history.turns, "a poisoned turn was kept"
    assert lines.outside in ids_in(path / "journal")

    sound = Lines()
    async with StubServer(lambda ids, params: sound(ids)) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url), vocab_size=sound.outside) as policy:
            ended = await go_on(path, shelves(policy))
    assert (ended.batches, ended.accounting.failed) == (BATCHES, 0)
    ended.accounting.check()
    assert verify_run(path).violations == []
    samples = load_run(path)
    assert max(max(sample.tokens) for sample in samples) < sound.outside
    again = {sample.index for sample in samples if "unfit_turns_at_resume" in sample.metrics}
    assert again == history.turns.keys() & {sample.index for sample in samples}
    assert again == {sample.index for sample in samples if "restarted_at_resume" in sample.metrics}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_a_refused_reply_is_never_kept(tmp_path: Path, format: Format) -> None:
    """Its attempt fails; the journal has the reason and none of its ids, and the run continues."""
    lines = Lines(poisoned=3)
    async with StubServer(lambda ids, params: lines(ids)) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url), vocab_size=lines.outside) as policy:
            settings, data = shelves(policy), buffer()
            description = {"recipe": "test", "config": settings.describe()}
            writer, run_journal = RunWriter(tmp_path, description, format=format), begin(tmp_path, description, data)
            with run_journal.journal:
                manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
                await fill(manager, writer, run_journal)
    lost = [entry.fields["failure"] for entry in read_journal(tmp_path / "journal") if entry.kind == "attempt"]
    assert [failure["kind"] for failure in lost] == ["EndpointRefused"] * 3
    assert all(f"got id {lines.outside}; expected 0 <= id < {lines.outside}" in failure["message"] for failure in lost)
    assert lines.outside not in ids_in(tmp_path / "journal")
    assert verify_run(tmp_path).violations == []


# -- a trainer's own checkpoints --------------------------------------------------------------------------------------


async def _one_more(manager: AsyncRolloutManager, batches: list[list[Sample]]) -> None:
    batches.append(await manager.generate_batch())


async def test_a_state_saved_at_any_moment_goes_on_through_json(tmp_path: Path) -> None:
    """Ready and finished groups are not generated again; batches equal those of an uninterrupted run."""
    whole = AsyncRolloutManager(config(Counted()), buffer())
    async with whole:
        expected = [await whole.generate_batch() for _ in range(BATCHES)]
    rng = random.Random(1)
    for _ in range(12):
        generate = Counted()
        manager = AsyncRolloutManager(config(generate), buffer())
        async with manager:
            batches = [await manager.generate_batch() for _ in range(rng.randrange(BATCHES))]
            if rng.random() < 0.7 and len(batches) < BATCHES:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_one_more, manager, batches)
                    for _ in range(rng.randrange(12)):
                        await anyio.lowlevel.checkpoint()
                    state = json.loads(json.dumps(manager.state_dict()))
                    done = {
                        int(group) * 3 + int(number)
                        for group, rollouts in state["finished"].items()
                        for number in rollouts
                    }
                    tasks.cancel_scope.cancel()
                    handed_out = len(batches)  # a batch that is ready at this moment may still come: after the state
                del batches[handed_out:]
            else:
                state, done = json.loads(json.dumps(manager.state_dict())), set()
        again = Counted()
        resumed = AsyncRolloutManager(config(again), buffer())
        resumed.load_state_dict(state)
        assert resumed.batches == len(batches)
        async with resumed:
            batches += [await resumed.generate_batch() for _ in range(BATCHES - len(batches))]
        assert not done & again.calls.keys()
        groups = [sorted({sample.group_index for sample in batch}) for batch in batches]
        assert len({group for batch in groups for group in batch}) == 2 * BATCHES, "no group twice"
        by_index = {sample.index: sample.tokens for batch in expected for sample in batch}
        for sample in (sample for batch in batches for sample in batch):
            if sample.index % 6 and sample.index in by_index:
                assert sample.tokens == by_index[sample.index]
        resumed.accounting.check()


def test_a_state_of_something_else_is_refused() -> None:
    """By version, by shape, and once the manager has begun."""
    manager = AsyncRolloutManager(config(Counted()), buffer())
    state = manager.state_dict()
    for broken in ({"version": 7}, {**state, "ready": 3}, {name: state[name] for name in state if name != "totals"}):
        with pytest.raises(ConfigError, match="state_dict"):
            manager.load_state_dict(broken)
    manager.accounting.taken = manager.accounting.in_flight = 1
    with pytest.raises(ConfigError, match="has not begun"):
        manager.load_state_dict(state)


async def test_a_state_that_comes_too_late_changes_nothing() -> None:
    """The buffer of a manager that has begun keeps its position: no prompt comes out twice, none gets a used index."""
    manager = AsyncRolloutManager(config(Counted()), buffer())
    state = manager.state_dict()
    async with manager:
        first = await manager.generate_batch()
        before = manager.data_buffer.save_state()
        with pytest.raises(ConfigError, match="has not begun"):
            manager.load_state_dict(state)
        assert manager.data_buffer.save_state() == before
        second = await manager.generate_batch()
    assert not {sample.group_index for sample in first} & {sample.group_index for sample in second}
