"""Record and replay: replayed samples equal the stored ones, without server and environment; differences raise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec
import pytest

from rollouts.base.storable import to_json
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, TokenColumn
from rollouts.engine import DEMO_MODEL
from rollouts.environments.base import Environment, StepResult
from rollouts.errors import ConfigError, ContextOverflow, ReplayDiverged
from rollouts.recipe import Recipe
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.runs.journal import Journal
from rollouts.runs.reader import load_run
from rollouts.runs.recording import RECORDING, recorded
from rollouts.runs.replay import replay
from rollouts.runs.resume import reopen
from rollouts.runs.run import Stop, run
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.testing.policy import Reply, ScriptedPolicy
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.samplers import PassRateSampler
from tests.worlds import RandomWorld, Speller

CHANCE = random.Random(7)
"""Shared by all draws, so that no episode can be repeated without a recording."""


class Chaos(RandomWorld):
    """Sends random messages, sometimes fails to start or close, and has snapshots."""

    def __init__(self) -> None:
        super().__init__(CHANCE.getrandbits(32), turns=3)

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        if CHANCE.random() < 0.2:
            raise OSError("no world today")
        return await super().start(prompt)

    async def close(self) -> None:
        if CHANCE.random() < 0.3:
            raise OSError("it does not close")

    async def snapshot(self) -> int:
        return self.left

    async def restore(self, prompt: Prompt, snapshot: int) -> None:
        self.left = snapshot


class Stuck(Chaos):
    """Never gets beyond its second step."""

    async def step(self, reply: Message) -> StepResult:
        if self.left < 3:
            await anyio.sleep_forever()
        return await super().step(reply)


def no_world() -> Environment:
    raise AssertionError("a replay makes no environment")


def babbling() -> ScriptedPolicy:
    speller = Speller(
        load_tokenizer(DEMO_MODEL), renderer_for(str(DEMO_MODEL)).stop_token_ids[0], CHANCE.getrandbits(32)
    )

    def answer(tokens: TokenColumn) -> Reply:
        if len(tokens) > 60 and CHANCE.random() < 0.2:
            raise ContextOverflow("too long")
        return Reply(speller.reply())

    return ScriptedPolicy(answer)


def length_reward(sample: Sample) -> float:
    return len(sample.response) / 7


def a_recipe(environment_cls: Any = no_world, reward_fn: Any = length_reward, **sizes: Any) -> Recipe:
    generate_fn = partial(
        generate_rollout_batch,
        environment_cls=environment_cls,
        endpoint=Endpoint(),
        tokenizer=str(DEMO_MODEL),
        limits=sizes.pop("limits", Limits(max_turns=6)),
    )
    sizes = {"batch_size": 3, "n_samples_per_prompt": 4, "max_attempts": 20, **sizes}
    return Recipe(
        name="chaos",
        config=RolloutConfig(generate_fn=generate_fn, reward_fn=reward_fn, **sizes),
        data_buffer=DataBuffer([f"question {number}" for number in range(6)], seed=1),
        endpoint=Endpoint(),
        tokenizer=str(DEMO_MODEL),
        environment_cls=environment_cls,
        batches=2,
    )


async def record(
    path: Path, recipe: Recipe, *, resume: bool = False, stop: Stop | None = None, watch: Any = None
) -> None:
    """Start or resume a run, and record it."""
    description = recipe.describe()
    if resume:
        opened = reopen(path, description, recipe.data_buffer)
        writer, run_journal, state = opened.writer, opened.run_journal, opened.state
    else:
        writer = RunWriter(path, description, format="jsonl")
        run_journal, state = begin(path, description, recipe.data_buffer), None
    with run_journal.journal, Journal(path / RECORDING) as journal:
        config = recipe.config
        generate_fn = recorded(config.generate_fn, journal, recipe.environment_cls, babbling())
        recipe = attrs.evolve(recipe, config=attrs.evolve(config, generate_fn=generate_fn))
        await run(recipe, writer, run_journal=run_journal, state=state, stop=stop, watch=watch)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "chaos"
    anyio.run(record, path, a_recipe(Chaos))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


async def test_a_replay_is_bit_identical(a_run: Path, tmp_path: Path) -> None:
    """Every field of every sample, although environment and model were random, failed and were retried."""
    done = await replay(a_run, a_recipe(), tmp_path / "played.jsonl")
    stored = [msgspec.json.decode(to_json(sample.to_dict())) for sample in load_run(a_run, "all")]
    assert lines(tmp_path / "played.jsonl") == stored
    assert (done.samples, done.left_out) == (len(stored), 0)
    assert {sample.stop_reason.value for sample in load_run(a_run)} >= {"task_completed", "context_overflow"}  # type: ignore[union-attr]
    assert sum(sample.metrics.get("close_failures", 0) for sample in load_run(a_run)) > 0
    assert max(sample.metrics["attempts"] for sample in load_run(a_run)) > 1


async def test_a_run_with_a_sampler_replays_the_recorded_draws(tmp_path: Path) -> None:
    """Also without the sampler: each group has the prompt of its record, not that of its number."""
    known = [Sample(prompt=f"question {each}", reward=0.0, rollout_id=roll) for each in range(4) for roll in range(99)]

    def sampled(environment_cls: Any, sampler: PassRateSampler | None) -> Recipe:
        buffer = DataBuffer([f"question {number}" for number in range(6)], seed=1, sampler=sampler)
        return attrs.evolve(a_recipe(environment_cls), data_buffer=buffer)

    path = tmp_path / "run"
    await record(path, sampled(Chaos, PassRateSampler.from_runs([known], n=4)))
    stored = {sample.group_index: sample.prompt for sample in load_run(path, "all")}
    order = [prompt.prompt for prompt in a_recipe().data_buffer.get_prompts(6)]
    assert [stored[number] for number in sorted(stored)][:6] != order[: len(stored)]
    for sampler in (PassRateSampler.from_runs([known], n=4), None):
        done = await replay(path, sampled(no_world, sampler))
        assert (done.samples, done.left_out) == (len(load_run(path, "all")), 0)


async def test_a_replay_is_not_written_into_the_files_of_a_run(a_run: Path) -> None:
    """The output must not replace the stored samples."""
    with pytest.raises(ConfigError, match=r"--out: got .*; expected a place outside the files of the run in"):
        await replay(a_run, a_recipe(), a_run / "metrics.jsonl")
    assert verify_run(a_run).ok


async def test_a_run_that_was_interrupted_replays_as_one(tmp_path: Path) -> None:
    """Episodes resumed from a snapshot: events after the first process's last stored turn are dropped."""
    stop = Stop()
    path = tmp_path / "run"

    async def watch(manager: AsyncRolloutManager) -> None:
        while sum("Stuck.step" in text for text in manager.waiting_for(99)) < 12:
            await anyio.lowlevel.checkpoint()
        stop.ask()

    await record(path, a_recipe(Stuck), stop=stop, watch=watch)
    await record(path, a_recipe(Chaos), resume=True)
    assert sum("turns_before_resume" in sample.metrics for sample in load_run(path, "all")) > 5
    done = await replay(path, a_recipe())
    assert (done.samples, done.left_out) == (len(load_run(path, "all")), 0)


def _shouting(sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (lambda: a_recipe(reward_fn=_shouting), r"group \d+ · index \d+, reward: got 1.0; expected "),
        (
            lambda: a_recipe(limits=Limits(max_turns=1)),
            r"rollout \d+, event \d+: the rollout ended; expected (step|complete)",
        ),
        (
            lambda: a_recipe(limits=Limits(max_sampled_tokens=300)),
            r"max_new_tokens: got \d+; expected \d+",
        ),
    ],
)
async def test_the_first_difference_is_raised(a_run: Path, recipe: Any, words: str) -> None:
    """Another reward, another stop of the loop, another request."""
    with pytest.raises(ReplayDiverged, match=words):
        await replay(a_run, recipe())


async def test_another_prompt_is_raised(a_run: Path, tmp_path: Path) -> None:
    """An environment with another opening, from the tape of another rollout."""
    recipe = a_recipe()
    with pytest.raises(ConfigError, match=r"recipe, data: got .*; expected the seed and the prompts"):
        await replay(a_run, attrs.evolve(recipe, data_buffer=DataBuffer(["other"], seed=1)))
    with pytest.raises(ConfigError, match="n_samples_per_prompt: got 3; expected 4, as in the run"):
        await replay(a_run, a_recipe(n_samples_per_prompt=3))


async def test_a_run_without_a_record_is_refused(tmp_path: Path) -> None:
    """The message has the option that records a run."""
    RunWriter(tmp_path / "run", {})
    with pytest.raises(ConfigError, match="a recorded run: rollouts run --record"):
        await replay(tmp_path / "run", a_recipe())
