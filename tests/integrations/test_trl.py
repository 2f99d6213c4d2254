"""TRL's hooks without TRL: what is refused before anything is generated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollouts.dtypes import Endpoint, StopReason
from rollouts.errors import ConfigError
from rollouts.integrations.trl import RolloutFunc, RolloutWorker
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample, Status
from tests.trainer_samples import scored_groups


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    return [Sample() for _ in prompts]


def trainer_at(temperature: float) -> SimpleNamespace:
    """The attributes of a ``GRPOTrainer`` that are read."""
    return SimpleNamespace(state=SimpleNamespace(global_step=0), args=SimpleNamespace(temperature=temperature))


def test_the_temperature_is_that_of_the_trainer() -> None:
    """TRL divides logits by that of its ``GRPOConfig``; the sampler's is in the record of each completion."""

    async def sampled(prompts: Sequence[Prompt]) -> list[Sample]:
        (sample,) = scored_groups(1, 1, temperature=0.7)
        sample.index = sample.rollout_id = prompts[0].index
        sample.prompt, sample.label, sample.group_index = prompts[0].prompt, None, None
        return [sample]

    with RolloutFunc(RolloutConfig(batch_size=1, generate_fn=sampled), [Prompt("Hi")]) as rollout_func:
        with pytest.raises(ConfigError, match=r"temperature: got 0\.7; expected 1, by which TRL divides logits"):
            rollout_func(["Hi"], trainer_at(1.0))
        assert rollout_func(["Hi"], trainer_at(0.7))["env_mask"]


def test_variables_of_the_template_belong_to_the_generate_function() -> None:
    """TRL renders no prompt here, so its ``chat_template_kwargs`` would have no effect."""
    trainer = SimpleNamespace(chat_template_kwargs={"enable_thinking": False})
    with RolloutFunc(RolloutConfig(batch_size=1, generate_fn=generate), [Prompt("Hi")]) as rollout_func:
        with pytest.raises(
            ConfigError, match=r"GRPOConfig.chat_template_kwargs: got .*; expected none: .*template_kwargs"
        ):
            rollout_func(["Hi"], trainer)


def test_each_rollout_has_an_index_of_its_own() -> None:
    """A recipe's seed is mixed with it: otherwise each step would sample with the random numbers of the first."""
    played: list[int | None] = []

    async def noted(prompts: Sequence[Prompt]) -> list[Sample]:
        played.extend(prompt.index for prompt in prompts)
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0, -1], reward=1.0) for _ in prompts]

    trainer = trainer_at(1.0)
    with RolloutFunc(RolloutConfig(batch_size=1, generate_fn=noted), [Prompt("Hi")]) as rollout_func:
        for _ in range(2):
            rollout_func(["Hi", "Hi"], trainer)
    assert sorted(index for index in played if index is not None) == [0, 1, 2, 3]
    for rank, step in ((0, 1), (1, 0), (1, 1)):  # a process that continues at step 1, and another one of both
        trainer.accelerator, trainer.state.global_step = SimpleNamespace(process_index=rank), step
        with RolloutFunc(RolloutConfig(batch_size=1, generate_fn=noted), [Prompt("Hi")]) as rollout_func:
            rollout_func(["Hi", "Hi"], trainer)
    assert len(set(played)) == len(played) == 10


def test_one_process_gives_the_server_its_weights() -> None:
    """The others wait for it: all would write to one folder, and each would remove it while the server reads."""
    waited: list[int] = []

    async def sampled(prompts: Sequence[Prompt]) -> list[Sample]:
        return [Sample(tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0, -1], reward=1.0) for _ in prompts]

    trainer = trainer_at(1.0)
    trainer.accelerator = SimpleNamespace(
        process_index=1, is_main_process=False, wait_for_everyone=lambda: waited.append(trainer.state.global_step)
    )
    config, options = RolloutConfig(batch_size=1, generate_fn=sampled), {"endpoint": Endpoint(), "folder": "weights"}
    with RolloutFunc(config, [Prompt("Hi")], **options) as rollout_func:
        for trainer.state.global_step in (0, 0, 1):
            rollout_func(["Hi"], trainer)
    assert (waited, rollout_func.served) == ([0, 1], 1)


RANK = """
import sys
from types import SimpleNamespace
import torch.distributed as dist
from rollouts.dtypes import Endpoint
from rollouts.errors import EndpointRefused
from rollouts.integrations.trl import RolloutFunc
from rollouts.training import Prompt, RolloutConfig, Sample

class Foreign(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

async def generate(prompts):
    return [Sample(tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0, -1], reward=1.0) for _ in prompts]

def fails(model):
    raise EndpointRefused("no room on the disk") if trainer.state.global_step == 0 else Foreign("this", "that")

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
accelerator = SimpleNamespace(
    process_index=rank, is_main_process=rank == 0, unwrap_model=fails, wait_for_everyone=dist.barrier
)
trainer = SimpleNamespace(
    state=SimpleNamespace(global_step=0), args=SimpleNamespace(temperature=1.0), accelerator=accelerator, model=None
)
config = RolloutConfig(batch_size=1, generate_fn=generate)
with RolloutFunc(config, [Prompt("Hi")], endpoint=Endpoint(), folder="weights") as rollout_func:
    for trainer.state.global_step in (0, 1):
        try:
            rollout_func(["Hi"], trainer)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
dist.destroy_process_group()
"""


@pytest.mark.extra
@pytest.mark.timeout(120)
def test_an_update_that_fails_ends_every_process(tmp_path: Path) -> None:
    """Two processes of gloo: the second one has the error of the first, and does not wait for it in the barrier."""
    pytest.importorskip("torch.distributed")
    line = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*line, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        for rank in range(2)
    ]
    try:
        first, second = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert first == ["EndpointRefused: no room on the disk", "Foreign: this and that"]
    assert second == [first[0], "RolloutsError: the main process raised Foreign: this and that"]


async def test_a_rollout_without_a_reply_is_no_row() -> None:
    """Its opening left no room for one. It counts in its group; before, it ended generation."""

    async def played(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        (sample,) = scored_groups(1, 1)
        if prompt.index:
            sample = Sample(tokens=[1, 2], loss_mask=[0, 0], rollout_log_probs=[0, 0], reward=0.0)
            sample.status, sample.stop_reason = Status.TRUNCATED, StopReason.CONTEXT_OVERFLOW
        sample.index = sample.rollout_id = prompt.index
        sample.prompt, sample.label = prompt.prompt, prompt.label
        sample.group_index, sample.reward = prompt.group_index, float(not prompt.index)
        return [sample]

    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=played)
    worker = RolloutWorker(config, DataBuffer([Prompt("Hi")], epochs=1))
    await worker._fill()
    (row,) = [worker.rollout_buffer.get_nowait() for _ in range(worker.rollout_buffer.qsize())]
    assert row.advantage == pytest.approx(0.5**0.5, abs=1e-5)
