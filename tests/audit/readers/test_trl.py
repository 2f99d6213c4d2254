"""Completions that TRL's own GRPOTrainer logs, without alarm: ``scripts/test --trainers dumps``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollouts.audit import audit, reader_of
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import calculator_prompts
from rollouts.renderer import Renderer
from rollouts.renderer.tokenizer import load_tokenizer
from tests.audit.dumps import said

trl: Any = pytest.importorskip("trl", reason="trl is not installed")
torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]  # trl and datasets issue warnings


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / 10 for text in completions]


def calls(completions: list[str], **_: Any) -> list[float | None]:
    """A reward that does not apply to every completion."""
    return [1.0 if "<tool_call>" in text else None if len(text) % 3 == 0 else 0.0 for text in completions]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "GRPO": ([digits], {}),
    "GRPO, two rewards": ([digits, calls], {"reward_weights": [1.0, 0.5]}),
    "GRPO, a reward that may be missing": ([calls], {}),
    "GRPO, rewards scaled by the batch": ([digits], {"scale_rewards": "batch", "num_iterations": 2}),
    "GRPO with evaluations": ([digits], {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_completions_of_a_trainer_raise_no_alarm(name: str, tmp_path: Path) -> None:
    """Two steps of two groups of four."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rewards, options = CASES[name]
    renderer = Renderer(load_tokenizer(DEMO_MODEL))
    rows = Dataset.from_list([{"prompt": renderer.render(one.messages)} for one in islice(calculator_prompts(3), 8)])
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=4, use_cpu=True,
        max_completion_length=24, log_completions=True, logging_steps=1, report_to=[], save_strategy="no", bf16=False,
        per_device_eval_batch_size=6, disable_tqdm=True, gradient_checkpointing=False, **options,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL),
        args=config,
        reward_funcs=rewards,
        train_dataset=rows,
        eval_dataset=rows.select(range(3)) if "eval_strategy" in options else None,
    )
    trainer.train()
    report = audit(tmp_path / "completions", reader_of("trl"))
    assert said(f"TRL, {name}", report) == []
    assert report.judged["advantages"] >= 4
