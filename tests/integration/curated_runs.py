"""A stored run of the start model, whose curated rows the data loaders of trainers read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from rollouts.curation import Selection
from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.engine.process import engine_process
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.runs.writer import RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch

__all__ = ["MODEL", "SELECTION", "assert_replies_trained", "assert_same_ids", "store_run"]

MODEL = Path(__file__).parents[2] / "training" / "start_model"
SELECTION = Selection(where="pass_rate in 0.01..0.99")


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


def assert_same_ids(rows: Sequence[Any], taken: Sequence[Any], trained: int) -> None:
    """Check that a loader took the ids and labels of token rows, of which ``trained`` labels are trained."""
    assert len(taken) == len(rows) > 8
    for row, one in zip(rows, taken, strict=True):
        assert (one["input_ids"], one["labels"]) == (row["input_ids"], row["labels"])
    assert sum(label != -100 for one in taken for label in one["labels"]) == trained


def assert_replies_trained(rows: Sequence[Any], taken: Sequence[Any]) -> None:
    """Check that a loader trains the replies of chat rows, each with its end, and no result of a tool."""
    from transformers import AutoTokenizer

    assert len(taken) == len(rows)
    decode = AutoTokenizer.from_pretrained(MODEL).decode
    for row, one in zip(rows, taken, strict=True):
        text = decode([label for label in one["labels"] if label != -100])
        assert text.count("<|im_end|>") == sum(message["role"] == "assistant" for message in row["messages"])
        assert "<tool_response>" not in text
