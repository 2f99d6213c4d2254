"""A sampler in a run: one order of draws and outcomes in the manager and in the journal, kills, failures, cost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.dtypes import VersionSpan
from rollouts.errors import GenerateFailure, JournalError
from rollouts.planning.simulation import VirtualLoop
from rollouts.runs.journal import read_journal
from rollouts.runs.layout import JOURNAL
from rollouts.runs.resume import reopen
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample
from rollouts.training.filters import check_reward_nonzero_std
from rollouts.training.samplers import LevelSampler, PassRateSampler
from tests.manager_semantics.world import points
from tests.stored_runs import some_sample, spread

SIZE, N = 12, 3


def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "metadata": {"level": number % 3}} for number in range(SIZE)]


class Watched(PassRateSampler):
    """Keeps its state after each change."""

    def __init__(self) -> None:
        super().__init__(N)
        self.states: list[bytes] = []

    def next(self, draw: int) -> int:
        position = super().next(draw)
        self.states.append(state_of(self))
        return position

    def observe(self, position: int, rewards: Sequence[float | None]) -> None:
        super().observe(position, rewards)
        self.states.append(state_of(self))


def state_of(sampler: Any) -> bytes:
    return json.dumps(sampler.state_dict()).encode()


def data(sampler: Any) -> DataBuffer:
    return DataBuffer(rows(), seed=5, sampler=sampler)


class Play:
    """A generate function of uneven length; a tenth of the rollouts fails, a third of the groups has no spread."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    async def __call__(self, prompts: Sequence[Prompt]) -> list[Sample]:
        rng = random.Random(f"{self.seed}/{prompts[0].index}/{prompts[0].replacement}")
        await points(rng.randint(0, 30))
        if rng.random() < 0.1:
            raise OSError("broken world")
        sample = some_sample(prompts[0], seed=rng.randrange(10**6))
        assert prompts[0].group_index is not None
        sample.reward = float(rng.random() < (0.5 if prompts[0].group_index % 3 else 1.0))
        return [sample]


def config(seed: int) -> RolloutConfig:
    sizes: dict[str, Any] = {"batch_size": 2, "n_samples_per_prompt": N, "over_sampling_factor": 3.0, "patience": 50}
    return RolloutConfig(generate_fn=Play(seed), filter_fn=spread, max_attempts=1, **sizes)


async def lived(manager: AsyncRolloutManager, seed: int, writer: RunWriter) -> None:
    """Fill batches until the life is cut somewhere, as by a kill: groups in flight are left behind."""
    rng = random.Random(seed)
    with anyio.move_on_after(60) as life:
        async with manager:
            for _ in range(rng.randint(1, 3)):
                writer.write_batch(await manager.generate_batch(), manager.metrics, attrs.evolve(manager.accounting))
            await points(rng.randint(0, 20))
    assert not life.cancelled_caught


@pytest.mark.parametrize("seed", range(6))
async def test_after_each_resume_the_state_is_that_of_the_moment(tmp_path: Path, seed: int) -> None:
    """Byte by byte, at each event of each life; each group has the prompt that its record names."""
    path, settings = tmp_path / "run", config(seed)
    description = {"config": settings.describe()}
    sampler = Watched()
    buffer, states = data(sampler), sampler.states
    writer = RunWriter(path, description)
    run_journal = begin(path, description, buffer)
    manager = AsyncRolloutManager(settings, buffer, on_group=writer.on_group, rollout_log=run_journal)
    for life in range(4):
        with run_journal.journal:
            await lived(manager, seed + life, writer)
        writer.finish("stopped", manager.accounting)
        history = RunHistory.read(path / JOURNAL)
        prompts = data(None).prompts
        drawn = {number: position for number, position, rewards in history.draws if rewards is None}
        for group in history.settled:
            position = drawn[group]
            assert position is not None
            for sample in history.group_samples(group):
                assert sample.prompt == prompts[position].prompt
        for end in range(1, len(history.draws) + 1):
            repeated = Watched()
            data(repeated).resume_after(0, (), history.draws[:end])
            assert state_of(repeated) == states[end - 1]
        assert len(history.draws) == len(states)
        sampler = Watched()
        buffer = data(sampler)
        opened = reopen(path, description, buffer)
        assert state_of(sampler) == states[-1]
        sampler.states = states
        writer, run_journal = opened.writer, opened.run_journal
        manager = AsyncRolloutManager(settings, buffer, on_group=writer.on_group, rollout_log=run_journal)
        manager.restore(opened.state)
    run_journal.journal.close()


async def test_a_draw_is_recorded_before_its_rollouts(tmp_path: Path) -> None:
    """The record has the position; without a sampler it has none, as in earlier versions."""
    for sampler in (None, PassRateSampler(N)):
        path = tmp_path / str(sampler is None)
        buffer, settings = data(sampler), attrs.evolve(config(1), filter_fn=None)
        run_journal = begin(path, {"config": settings.describe()}, buffer)
        with run_journal.journal:
            await AsyncRolloutManager(settings, buffer, rollout_log=run_journal).generate_batch()
        seen: set[int] = set()
        for entry in read_journal(path / JOURNAL):
            if entry.kind == "taken":
                assert entry.fields.keys() == ({"group"} if sampler is None else {"group", "position"})
                seen.add(entry.fields["group"])
            elif entry.kind == "sample":
                assert entry.fields["index"] // N in seen


def on_virtual_clock(sampler: Any, prompts: int, batches: int, dead: float) -> tuple[AsyncRolloutManager, list[str]]:
    """Fill batches of 8 groups of 8 through the manager; lengths are lognormal, dead prompts have no spread."""
    rng = random.Random(0)
    rates = [float(number % 2) if number < dead * prompts else rng.uniform(0.05, 0.95) for number in range(prompts)]
    order: list[str] = []

    async def generate(asked: Sequence[Prompt]) -> list[Sample]:
        rng = random.Random(asked[0].index)
        await anyio.sleep(rng.lognormvariate(3.0, 1.0))
        sample = Sample(tokens=[1, 2], loss_mask=[0, 1], versions=[VersionSpan("0", 1, 2)])
        sample.rollout_log_probs = [0.0, -1.0]
        sample.reward = float(rng.random() < rates[asked[0].metadata["number"]])
        return [sample]

    async def differs(samples: list[Sample]) -> bool:  # async: a thread would not follow the virtual clock
        return check_reward_nonzero_std(samples)

    async def note(group: Any) -> None:
        order.append(f"{group.group_index} {group.prompt.prompt} {group.outcome}")

    async def filled() -> AsyncRolloutManager:
        data = [{"prompt": f"question {number}", "metadata": {"number": number}} for number in range(prompts)]
        config = RolloutConfig(
            generate_fn=generate,
            filter_fn=differs,
            batch_size=8,
            n_samples_per_prompt=8,
            over_sampling_factor=2.0,
            rollout_seconds=1e9,
            filter_seconds=1e9,
        )
        manager = AsyncRolloutManager(config, DataBuffer(data, seed=1, sampler=sampler), on_group=note)
        async with manager:
            for _ in range(batches):
                await manager.generate_batch()
        return manager

    manager = anyio.run(filled, backend_options={"loop_factory": VirtualLoop})
    return manager, order


def test_the_same_seed_gives_the_same_order() -> None:
    """Without kills, and however long the rollouts take."""
    (_, first), (_, second) = (on_virtual_clock(PassRateSampler(), 60, 12, dead=0.3) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("dead", "most"), [(0.3, 1.32), (0.6, 1.65)])
def test_a_kept_group_costs_few_prompts_in_the_manager(dead: float, most: float) -> None:
    """From the third epoch on, with groups in flight; the metrics of the batch have the numbers of the sampler."""
    prompts, batches = 100, 50
    manager, order = on_virtual_clock(PassRateSampler(), prompts, batches, dead)
    late = [line for line in order if int(line.split()[0]) >= 2 * prompts]
    cost = len(late) / sum(line.endswith("kept") for line in late)
    print(f"{dead:.0%} dead: {cost:.2f} of {len(late)} groups")
    assert len(late) >= 2 * prompts
    assert cost <= most
    numbers = manager.metrics
    assert numbers["sampler/tried"] == prompts
    assert numbers["sampler/always_passed"] + numbers["sampler/never_passed"] >= 0.8 * dead * prompts
    assert numbers["sampler/skipped"] > 0


async def test_a_journal_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    """No rollout starts for a draw without a record; its prompt is back in the buffer, and the accounting adds up."""

    class Full(RunJournal):
        def taken(self, prompt: Prompt, position: int | None = None) -> None:
            if prompt.group_index == 4:
                raise JournalError("the disk is full")
            super().taken(prompt, position)

    buffer, settings = data(PassRateSampler(N)), config(0)
    run_journal = begin(tmp_path / "run", {"config": settings.describe()}, buffer)
    with run_journal.journal:
        manager = AsyncRolloutManager(settings, buffer, rollout_log=Full(run_journal.journal))
        with pytest.raises(JournalError, match="full"):
            await manager.generate_batch()
    manager.accounting.check()
    assert manager.accounting.in_flight == 0
    assert 4 in {group for _, group in buffer.save_state().leftovers}


async def test_a_sampler_that_raises_ends_the_run_with_its_error(tmp_path: Path) -> None:
    """It is not a failure of a rollout: the outcome is in the journal, and no prompt is lost."""

    class Broken(LevelSampler):
        def observe(self, position: int, rewards: Sequence[float | None]) -> None:
            raise GenerateFailure("no such level")

    buffer, settings = data(Broken()), attrs.evolve(config(0), filter_fn=None)
    manager = AsyncRolloutManager(settings, buffer)
    with pytest.raises(GenerateFailure, match="no such level"):
        await manager.generate_batch()
    manager.accounting.check()
