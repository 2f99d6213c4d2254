"""LLaMA-Factory's own loader on curated rows: ``scripts/test --trainers llamafactory``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.curation import curate, write_folder
from tests.integration.curated_runs import MODEL, SELECTION, assert_replies_trained, assert_same_ids, store_run

pytest.importorskip("llamafactory", reason="llamafactory is not installed")

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]  # of llamafactory and its dependencies


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def newer_packages() -> Iterator[None]:
    """LLaMA-Factory refuses the transformers and datasets of this environment without this variable."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    yield
    del os.environ["DISABLE_VERSION_CHECK"]


def loaded(out: Path, **options: Any) -> Any:
    """The training rows as LLaMA-Factory's loader prepares them for its trainer."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from transformers import AutoTokenizer, Seq2SeqTrainingArguments

    data = DataArguments(template="qwen", cutoff_len=4096, **options)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = get_template_and_fix_tokenizer(tokenizer, data)
    training = Seq2SeqTrainingArguments(output_dir=str(out), use_cpu=True, report_to=[])
    model = ModelArguments(model_name_or_path=str(MODEL), cache_dir=str(out / "cache"))
    return get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)["train_dataset"]


def test_the_loader_keeps_exactly_our_ids(run: Path, tmp_path: Path) -> None:
    """Of every token row, by ``tokenized_path``: ids and labels, with the settings of the card."""
    from datasets import DatasetDict, load_dataset

    curation = curate(run, "tokens", SELECTION)
    write_folder(curation, tmp_path / "data")
    rows = list(curation)
    split = load_dataset(str(tmp_path / "data"), split="train")
    DatasetDict({"train": split}).save_to_disk(str(tmp_path / "tokenized"))
    taken = loaded(tmp_path, tokenized_path=str(tmp_path / "tokenized"))
    assert_same_ids(rows, taken, curation.account.trained)


def test_chat_rows_train_the_replies(run: Path, tmp_path: Path) -> None:
    """With the entry of ``dataset_info.json`` on the card; the trained text is that of the replies."""
    curation = curate(run, "chat", SELECTION)
    write_folder(curation, tmp_path / "data")
    rows = list(curation)
    text = (tmp_path / "data" / "README.md").read_text()
    entry = json.loads(text.partition("with the fields\n  `")[2].partition("`")[0])
    (tmp_path / "dataset_info.json").write_text(json.dumps({"curated": {"file_name": "data/data", **entry}}))
    taken = loaded(tmp_path, dataset="curated", dataset_dir=str(tmp_path))
    assert_replies_trained(rows, taken)
