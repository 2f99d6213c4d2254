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
from rollouts.renderer import renderer_for
from rollouts.runs.journal import Journal
from rollouts.runs.resume import reopen
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.branching import generate_branched_batch
from rollouts.trajectory import digest
from tests.agent.test_turn_log import TURNS, Counting, Forgetful, script
from tests.training.test_branching import TURNS as CLIMBS
from tests.training.test_branching import Climb

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


class Seeded(Numbered):
    """Its replies depend on the seed of the request and on all tokens before them."""

    async def complete(self, request: CompletionRequest) -> Completion:
        self.seeds.append(request.sampling.seed)
        number = (digest(request.tokens) + (request.sampling.seed or 0)) % 7
        text = renderer_for(str(DEMO_MODEL)).encode("up " * (1 + number))
        return await ScriptedPolicy([[*text, *renderer_for(str(DEMO_MODEL)).stop_token_ids[:1]]]).complete(request)


def config(policy: Numbered, environment_cls: Any, generate_fn: Any = generate_rollout_batch) -> RolloutConfig:
    generate = partial(
        generate_fn,
        environment_cls=environment_cls,
        policy=policy,
        tokenizer=str(DEMO_MODEL),
        endpoint=Endpoint(model=str(DEMO_MODEL), sampling=SamplingParams(seed=7)),
    )
    sizes: dict[str, Any] = {"batch_size": GROUPS, "n_samples_per_prompt": SIZE, "over_sampling_factor": 1.0}
    return RolloutConfig(generate_fn=generate, reward_fn=some_reward, **sizes)


def buffer() -> DataBuffer:
    return DataBuffer([Prompt(f"go {number}") for number in range(GROUPS)])


async def fill(
    run: Path, policy: Numbered, environment_cls: Any, generate_fn: Any = generate_rollout_batch, *, again: bool
) -> list[Sample]:
    settings, data, state = config(policy, environment_cls, generate_fn), buffer(), None
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


async def test_branches_of_a_killed_run_continue(tmp_path: Path) -> None:
    """Killed at any write: no logged turn of a rollout or of its branches is sampled again, and all ids are equal."""
    tree = partial(generate_branched_batch, turn=2, n=3)
    policy = Seeded()
    whole = await fill(tmp_path / "run", policy, Climb, tree, again=False)
    of_tree = CLIMBS + 2 * (CLIMBS - 2)
    assert len(set(policy.seeds)) == len(policy.seeds) == GROUPS * SIZE * of_tree
    assert [(one.conversation, one.parent) for one in whole] == [(0, None), (1, 0), (2, 0)] * GROUPS * SIZE
    left = []
    for photo in sorted(tmp_path.glob("photo-*"))[::5]:  # noqa: ASYNC240 - a test
        history = RunHistory.read(photo / "journal")
        if history.sealed:
            continue
        done = of_tree * len(history.rollouts) + sum(map(len, history.turns.values()))
        later = Seeded()
        samples = await fill(photo, later, Climb, tree, again=True)
        assert set(later.seeds) <= set(policy.seeds)
        assert len(set(later.seeds)) == len(later.seeds) == len(policy.seeds) - done, photo
        assert [content(sample) for sample in samples] == [content(sample) for sample in whole]
        left.append(len(later.seeds))
    assert len(set(left)) > GROUPS * SIZE * of_tree // 8
    assert verify_run(photo).ok


def content(sample: Sample) -> tuple[Any, ...]:
    """All but times and the counts of a resume."""
    return sample.tokens, sample.loss_mask, sample.conversation, sample.parent, sample.shared, sample.reward
