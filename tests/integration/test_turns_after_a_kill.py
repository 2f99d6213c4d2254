"""A run of real episodes that is killed at any moment: after a resume, no finished turn is sampled again."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Completion, Endpoint, Prompt, SamplingParams
from rollouts.engine import DEMO_MODEL
from rollouts.inference.base import CompletionRequest
from rollouts.runs.journal import Journal
from rollouts.runs.resume import reopen
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.writer import RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from tests.agent.test_turn_log import TURNS, Counting, Forgetful, script

GROUPS, SIZE = 3, 2


class Numbered(ScriptedPolicy):
    """A policy that records the seed of each request, which is unique for each turn of a run."""

    def __init__(self) -> None:
        super().__init__(script())
        self.seeds: list[int | None] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.seeds.append(request.sampling.seed)
        return await super().complete(request)


class Photographed(Journal):
    """A journal that copies the run's folder after each write, as a process killed there would leave it."""

    photos = 0

    def flush(self) -> None:
        super().flush()
        run = self.path.parent
        shutil.copytree(run, run.parent / f"photo-{self.photos:03d}")
        self.photos += 1


def some_reward(sample: Sample) -> float:
    return float(len(sample))


def config(policy: Numbered, environment_cls: Any) -> RolloutConfig:
    generate = partial(
        generate_rollout_batch,
        environment_cls=environment_cls,
        policy=policy,
        tokenizer=str(DEMO_MODEL),
        endpoint=Endpoint(model=str(DEMO_MODEL), sampling=SamplingParams(seed=7)),
    )
    sizes: dict[str, Any] = {"batch_size": GROUPS, "n_samples_per_prompt": SIZE, "over_sampling_factor": 1.0}
    return RolloutConfig(generate_fn=generate, reward_fn=some_reward, **sizes)


def buffer() -> DataBuffer:
    return DataBuffer([Prompt(f"go {number}") for number in range(GROUPS)])


async def fill(run: Path, policy: Numbered, environment_cls: Any, *, again: bool) -> list[Sample]:
    settings, data, state = config(policy, environment_cls), buffer(), None
    description = {"recipe": "test", "config": settings.describe()}
    if again:
        opened = reopen(run, description, data)
        writer, run_journal, state = opened.writer, opened.run_journal, opened.state
    else:
        writer = RunWriter(run, description, format="jsonl")
        begin(run, description, data).journal.close()
        run_journal = RunJournal(Photographed(run / "journal"))
    with run_journal.journal:
        manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
        if state is not None:
            manager.restore(state)
        async with manager:
            return await manager.generate_batch()


def finished_turns(run: Path) -> int:
    history = RunHistory.read(run / "journal")
    return TURNS * len(history.rollouts) + sum(map(len, history.turns.values()))


@pytest.mark.parametrize("environment_cls", [Counting, Forgetful])
async def test_no_finished_turn_is_sampled_again(tmp_path: Path, environment_cls: Any) -> None:
    """Every other turn is sampled once; without ``restore``, every turn of an unfinished rollout is."""
    policy = Numbered()
    whole = await fill(tmp_path / "run", policy, environment_cls, again=False)
    assert len(set(policy.seeds)) == len(policy.seeds) == GROUPS * SIZE * TURNS
    photos = sorted(tmp_path.glob("photo-*"))  # noqa: ASYNC240 - a test
    left = []
    for photo in photos:
        if RunHistory.read(photo / "journal").sealed:
            continue
        done, resumable = finished_turns(photo), environment_cls is Counting
        if not resumable:
            done = TURNS * len(RunHistory.read(photo / "journal").rollouts)
        later = Numbered()
        samples = await fill(photo, later, environment_cls, again=True)
        assert len(set(later.seeds)) == len(later.seeds)
        assert set(later.seeds) <= set(policy.seeds)
        assert len(later.seeds) == len(policy.seeds) - done, photo
        assert [sample.tokens for sample in samples] == [sample.tokens for sample in whole]
        left.append(len(later.seeds))
    assert len(set(left)) > (GROUPS * SIZE * TURNS) // 2 if environment_cls is Counting else len(set(left)) > 2
    assert min(left) == 0
