"""The real TRL on curated rows: the trained ids are ours, counted in the collator, and each trainer takes a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.curation import Curation, Selection, Target, curate, write_folder
from tests.integration.curated_runs import MODEL, store_run
from training.sft import Job, rows_of_form, sft_trainer

trl = pytest.importorskip("trl", reason="trl is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]  # trl and datasets issue warnings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def written(run: Path, target: Target, out: Path) -> tuple[Curation, Any]:
    """The curation of a run, and its folder as a data set of ``datasets``."""
    from datasets import load_dataset

    curation = curate(run, target, Selection(where="pass_rate in 0.01..0.99"))
    write_folder(curation, out)
    return curation, load_dataset(str(out), split="train")


def options(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out), "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "logging_steps": 1,
    }  # fmt: skip


def loaded() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return {"model": model, "processing_class": AutoTokenizer.from_pretrained(MODEL)}


def steps(trainer: Any) -> None:
    """Two optimizer steps with a finite loss that change the weights."""
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(map(torch.isfinite, torch.tensor(losses)))
    assert any(not torch.equal(one, two) for one, two in zip(before, trainer.model.parameters(), strict=True))


def test_the_collator_of_sft_trains_exactly_our_ids(run: Path, tmp_path: Path) -> None:
    """Of every row, the labels of TRL's batch are the ids under our mask, and nothing is cut."""
    curation, _ = written(run, "tokens", tmp_path / "data")
    trainer = sft_trainer(Job(data=tmp_path / "data", model=MODEL, out=tmp_path / "out", steps=2, rows=4))
    rows = list(curation)
    assert len(trainer.train_dataset) == len(rows) > 8
    trained = 0
    for row, taken in zip(rows, trainer.train_dataset, strict=True):
        batch = trainer.data_collator([taken])
        assert batch["input_ids"][0].tolist() == row["input_ids"]
        assert batch["labels"][0].tolist() == row["labels"]
        trained += int((batch["labels"] != -100).sum())
    assert trained == curation.account.trained
    steps(trainer)


def test_chat_rows_are_trained_by_sft_as_the_card_says(run: Path, tmp_path: Path) -> None:
    """TRL's defaults train every token of ``messages``, and the results of tools of ``completion``."""
    written(run, "chat", tmp_path / "data")
    counts = {}
    for form in ("completion", "chat"):
        trainer = sft_trainer(Job(data=tmp_path / "data", model=MODEL, out=tmp_path / form, form=form, steps=2, rows=4))
        batch = trainer.data_collator([trainer.train_dataset[0]])
        counts[form] = int((batch["labels"] != -100).sum()), int(batch["attention_mask"].sum())
        steps(trainer)
    assert counts["chat"][0] == counts["chat"][1], "everything"
    sampled = next(iter(curate(run, "tokens", Selection(where="pass_rate in 0.01..0.99"))))
    ours = sum(label != -100 for label in sampled["labels"])
    assert ours < counts["completion"][0] < counts["completion"][1]
    assert rows_of_form(tmp_path / "data", "chat").column_names == ["messages", "tools"]


def test_dpo_takes_our_pairs(run: Path, tmp_path: Path) -> None:
    """Two steps; the trained ids are those of one reply."""
    from trl import DPOConfig, DPOTrainer

    _, rows = written(run, "pairs", tmp_path / "data")
    trainer = DPOTrainer(args=DPOConfig(**options(tmp_path)), train_dataset=rows, **loaded())
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert "</tool_response>" not in trainer.processing_class.decode(
        batch["input_ids"][0][batch["completion_mask"][0] == 1]
    )
    steps(trainer)


def test_kto_takes_our_judged_replies(run: Path, tmp_path: Path) -> None:
    """Two steps on rows of both labels."""
    from trl import KTOConfig, KTOTrainer

    _, rows = written(run, "kto", tmp_path / "data")
    assert set(rows["label"]) == {True, False}
    steps(KTOTrainer(args=KTOConfig(**options(tmp_path)), train_dataset=rows, **loaded()))


def test_the_reward_trainer_takes_our_pairs(run: Path, tmp_path: Path) -> None:
    """Two steps of a model with one output."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    _, rows = written(run, "pairs", tmp_path / "data")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    config = RewardConfig(**options(tmp_path))
    steps(RewardTrainer(model=model, processing_class=tokenizer, args=config, train_dataset=rows))
