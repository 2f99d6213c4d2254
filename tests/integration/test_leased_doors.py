"""Trainers that take their batches from a service get the samples of a run in one process, byte for byte."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Prompt, VersionSpan
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError, DataExhausted
from rollouts.integrations.slime.convert import to_slime
from rollouts.integrations.slime.leased import LeasedRollout
from rollouts.integrations.trl import LeasedRolloutWorker, RolloutRow, to_row
from rollouts.recipe import Recipe
from rollouts.service import Leases, Rollouts, leased_run
from rollouts.service.batches import sample_batches
from rollouts.service.server import Service, serving
from rollouts.training import AsyncRolloutManager, DataBuffer, Sample
from rollouts.training.batch import group_advantages
from tests.distributed import games
from tests.stored_runs import some_sample

PROMPTS = [{"prompt": f"question {number}", "label": "8", "metadata": {"n": number}} for number in range(20)]
ARGS = types.SimpleNamespace(rollout_batch_size=3, n_samples_per_prompt=4, reward_key=None)


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    samples = [some_sample(prompt, 7) for prompt in prompts]
    for sample in samples:  # TRL's versions are numbers
        sample.versions = [VersionSpan("1", span.start, span.stop) for span in sample.versions]
    return samples


def recipe(batches: int) -> Recipe:
    config = attrs.evolve(games.config(), generate_fn=generate, reward_fn=None)
    return Recipe(
        name="doors",
        config=config,
        data_buffer=DataBuffer(PROMPTS),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
        batches=batches,
    )


async def in_process(batches: int) -> list[list[Sample]]:
    played = recipe(batches)
    async with AsyncRolloutManager(played.config, played.data_buffer) as manager:
        return [await manager.generate_batch() for _ in range(batches)]


async def with_service(folder: Path, batches: int, train: Callable[[Rollouts, Leases], Any]) -> Any:
    """The result of a trainer in a thread, and the groups that it acknowledged."""
    async with leased_run(folder, recipe(batches)) as leases, serving(Service(leases)) as url:
        with Rollouts(url, consumer="trainer") as service:
            return await anyio.to_thread.run_sync(train, service, leases)


async def test_slime_gets_the_same_samples(tmp_path: Path) -> None:
    """And a batch is acknowledged when slime asks for the next one, or says that it has trained all."""

    def train(service: Rollouts, leases: Leases) -> list[Any]:
        rollout = LeasedRollout(sample_batches(service, 3))
        outputs = []
        for number in range(3):
            outputs.append(rollout(ARGS, number, None))
            assert len(leases.acknowledged) == 3 * number
        with pytest.raises(DataExhausted):
            rollout(ARGS, 3, None)
        assert len(leases.acknowledged) == 9
        return outputs

    outputs = await with_service(tmp_path, 3, train)
    for output, samples in zip(outputs, await in_process(3), strict=True):
        expected = [to_slime(sample).to_dict() for sample in samples]
        assert [sample.to_dict() for group in output.samples for sample in group] == expected
        assert [len(group) for group in output.samples] == [4, 4, 4]


async def test_a_launch_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Groups of another number than the launch's, which are not acknowledged as trained, and an evaluation."""

    def train(service: Rollouts, leases: Leases) -> None:
        rollout = LeasedRollout(sample_batches(service, 2))
        with pytest.raises(ConfigError, match="got '2 groups'; expected 3 groups"):
            rollout(ARGS, 0, None)
        with pytest.raises(ConfigError, match="leases have no evaluation"):
            rollout(ARGS, 0, None, evaluation=True)
        rollout.trained()
        assert leases.acknowledged == {}

    await with_service(tmp_path, 1, train)


class OneBatch:
    """A lease of one group of four rollouts, sampled at a temperature."""

    def __init__(self, temperature: float | None = None) -> None:
        self.samples = [some_sample(Prompt("?", group_index=0, index=number), 7) for number in range(4)]
        for sample in self.samples:
            sample.completions = [attrs.evolve(one, temperature=temperature) for one in sample.completions]
        self.steps: list[int | None] = []

    def ack(self, step: int | None = None) -> None:
        self.steps.append(step)


def test_slime_gets_a_reward_under_its_key() -> None:
    """As from every function of a launch with --reward-key."""
    args = types.SimpleNamespace(rollout_batch_size=1, n_samples_per_prompt=4, reward_key="score")
    batch = OneBatch()
    (group,) = LeasedRollout([batch])(args, 0, None).samples
    assert [sample.reward for sample in group] == [{"score": sample.reward} for sample in batch.samples]


def test_a_teachers_logprobs_of_a_lease_are_not_trained_as_advantages() -> None:
    """slime carries both in one column, so that the flag of advantages is refused with leases."""
    args = types.SimpleNamespace(rollout_batch_size=1, n_samples_per_prompt=4, use_opd=False)
    args.custom_advantage_function_path = "rollouts.integrations.slime.sample_advantages"
    batch = OneBatch()
    for sample in batch.samples:
        sample.teacher_log_probs = [-0.5] * len(sample)
    with pytest.raises(ConfigError, match=r"custom_advantage_function_path: got .*expected none with leases"):
        LeasedRollout([batch])(args, 0, None)
    assert batch.steps == []


def test_a_batch_that_slime_refuses_is_never_acknowledged() -> None:
    """It was not trained: its lease ends, and it returns. So is one of another temperature than the launch's."""
    args = types.SimpleNamespace(rollout_batch_size=1, n_samples_per_prompt=4, reward_key=None, rollout_temperature=1.0)
    refused, batch = OneBatch(temperature=0.5), OneBatch(temperature=1.0)
    rollout = LeasedRollout([refused, batch])
    with pytest.raises(ConfigError, match=r"temperature: got 0\.5"):
        rollout(args, 0, None)
    rollout(args, 1, None)
    rollout.trained()
    assert (refused.steps, batch.steps) == ([], [1])


async def test_trl_gets_the_same_rows(tmp_path: Path) -> None:
    """And a batch is acknowledged at the update after its last row was taken."""

    def train(service: Rollouts, leases: Leases) -> list[RolloutRow]:
        worker = LeasedRolloutWorker(sample_batches(service, 3), rows_ahead=5)
        worker.start()
        rows = [worker.rollout_buffer.get(timeout=30) for _ in range(13)]
        worker.update_model_version(1)
        assert len(leases.acknowledged) == 3
        rows += [worker.rollout_buffer.get(timeout=30) for _ in range(11)]
        worker.check_health(60)
        worker.update_model_version(2)
        assert len(leases.acknowledged) == 6
        worker._thread.join(60)
        with pytest.raises(RuntimeError, match="leases have ended: the data is exhausted"):
            worker.check_health(60)
        worker.stop()
        return rows

    rows = await with_service(tmp_path, 2, train)
    samples = [sample for batch in await in_process(2) for sample in batch]
    expected = [to_row(sample, float(group)) for sample, group in zip(samples, group_advantages(samples), strict=True)]
    assert [as_bytes(row) for row in rows] == [as_bytes(row) for row in expected]


def test_an_acknowledgement_that_fails_is_an_error_of_trls_worker() -> None:
    """Raised by ``check_health``, not in the step of the trainer; no further row is trained."""

    class Lost(OneBatch):
        def ack(self, step: int | None = None) -> None:
            raise RuntimeError("the lease has ended")

    batches = [Lost(), OneBatch()]
    for sample in [sample for batch in batches for sample in batch.samples]:
        sample.versions = [VersionSpan("1", span.start, span.stop) for span in sample.versions]
    worker = LeasedRolloutWorker(batches, rows_ahead=2)
    worker.start()
    for _ in range(4):
        worker.rollout_buffer.get(timeout=30)
    worker.update_model_version(1)
    worker._thread.join(60)
    with pytest.raises(RuntimeError, match="leases have ended: the lease has ended") as caught:
        worker.check_health(60)
    assert str(caught.value.__cause__) == "the lease has ended"
    worker.update_model_version(2)
    assert worker.rollout_buffer.empty()


def as_bytes(row: RolloutRow) -> dict[str, Any]:
    fields = attrs.asdict(attrs.evolve(row, enqueued_at=None))
    del fields["metrics"]
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
