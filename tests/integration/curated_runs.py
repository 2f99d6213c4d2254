"""A stored run of the start model, whose curated rows the data loaders of trainers read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.engine.process import engine_process
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch

__all__ = ["MODEL", "store_run"]

MODEL = Path(__file__).parents[2] / "training" / "start_model"


def exact(sample: Sample) -> float:
    last = sample.messages[-1] if sample.messages else {}
    return float(last.get("role") == "assistant" and last.get("content") == f"The answer is {sample.label}.")


def store_run(folder: Path) -> Path:
    """A stored run of 24 groups of 8 of the start model, whose groups have right and wrong rollouts."""

    async def store() -> None:
        async with engine_process(MODEL, folder / "engine.log") as engine:
            endpoint = Endpoint(model=str(MODEL), base_url=engine.url, sampling=SamplingParams(max_new_tokens=64))
            generate = partial(
                generate_rollout_batch,
                environment_cls=CalculatorEnvironment,
                endpoint=endpoint,
                tokenizer=str(MODEL),
                max_turns=4,
            )
            sizes = {"batch_size": 24, "n_samples_per_prompt": 8, "over_sampling_factor": 1.0}
            config = RolloutConfig(generate_fn=generate, reward_fn=exact, **sizes)
            writer = RunWriter(folder / "run", {"config": config.describe(), "endpoint": {"model": "start"}})
            prompts = [prompt for _, prompt in zip(range(24), calculator_prompts(5), strict=False)]
            async with AsyncRolloutManager(config, DataBuffer(prompts), on_group=writer.on_group) as manager:
                writer.write_batch(await manager.generate_batch(), manager.metrics, manager.accounting)
            writer.finish("finished", manager.accounting)

    anyio.run(store)
    return folder / "run"
