"""axolotl's own loader on curated rows: ``scripts/test --trainers axolotl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.curation import curate, write_folder
from tests.integration.curated_runs import MODEL, SELECTION, assert_replies_trained, assert_same_ids, store_run

pytest.importorskip("axolotl", reason="axolotl is not installed")

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]  # of axolotl and its dependencies


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("run"))


def loaded(data: Path, **options: Any) -> Any:
    """The rows of a data set as axolotl's loader prepares them for its trainer."""
    from axolotl.utils.data import sft
    from axolotl.utils.dict import DictDefault
    from transformers import AutoTokenizer

    dataset = DictDefault({"path": str(data), "split": "train", **options})
    cfg = DictDefault({"sequence_len": 4096, "datasets": [dataset], "train_on_inputs": False})
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows, _ = sft._load_and_process_single_dataset(dataset, cfg, tokenizer, "train", seed=0)
    return rows


@pytest.mark.parametrize("source", [True, False])
def test_the_loader_keeps_exactly_our_ids(run: Path, source: bool, tmp_path: Path) -> None:
    """Of every token row: ids and labels, with the settings of the card; the column ``source`` does no harm there."""
    curation = curate(run, "tokens", SELECTION)
    write_folder(curation, tmp_path / "data", without_source=not source)
    rows = list(curation)
    taken = loaded(tmp_path / "data", type="")
    assert_same_ids(rows, taken, curation.account.trained)


def test_chat_rows_train_the_replies(run: Path, tmp_path: Path) -> None:
    """The settings of the card; the trained text is that of the replies."""
    curation = curate(run, "chat", SELECTION)
    write_folder(curation, tmp_path / "data")
    rows = list(curation)
    taken = loaded(tmp_path / "data", type="chat_template", roles_to_train=["assistant"], train_on_eos="turn")
    assert_replies_trained(rows, taken)
