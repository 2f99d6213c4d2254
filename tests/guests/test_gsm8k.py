"""GSM8K: final answers, valid rows, and the recipe on a real engine with real rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from rollouts.commands import main
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.recipes.environments.gsm8k import gsm8k_reward, load_gsm8k
from rollouts.rewards import final_number
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run
from rollouts.training import Sample

RECIPE = str(Path(__file__).parents[2] / "configs" / "gsm8k.py")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48 / 2 = 24, so 48 + 24 = 72. The answer is 72.", "72"),
        ("The answer is: $1,250.50", "1250.50"),
        ("so \\boxed{-7} and not 8", "-7"),
        ("first #### 3 then #### 4", "4"),
        ("The answer is 5. No wait. The answer is 6.", "6"),
        ("it is 10 or 12", "12"),
        ("The answer is unclear after 3 tries", "3"),
        ("The answer is 72 apples, 3 each.\nDone in 2 steps.", "72"),
        ("\\boxed{x} 5", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_that_a_text_commits_to(text: str, answer: str | None) -> None:
    """The answer is the last marked number, else the last number; a mark without a number is ignored."""
    assert final_number(text) == (None if answer is None else Decimal(answer))


@pytest.mark.parametrize(
    ("reply", "label", "reward"),
    [("72", "72", 1.0), ("72.0", "72", 1.0), ("1,000", "1000", 1.0), ("721", "72", 0.0), ("-72", "72", 0.0)],
)
def test_the_reward_is_exact(reply: str, label: str, reward: float) -> None:
    """Numbers are compared as decimals; a number that only contains the label is wrong."""
    messages = [{"role": "user", "content": "72?"}, {"role": "assistant", "content": f"The answer is {reply}."}]
    assert gsm8k_reward(Sample(messages=messages, label=label)) == reward
    assert gsm8k_reward(Sample(messages=messages[:1], label=label)) == 0.0


def test_a_row_without_a_number_is_refused(tmp_path: Path) -> None:
    """The error names the row and the label."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": "many"}\n')
    with pytest.raises(ConfigError, match="row 2: label: got 'many'; expected a number"):
        load_gsm8k(path)


def test_rows_load_as_the_authors_publish_them(tmp_path: Path) -> None:
    """``question`` is the prompt, and the label is the number after ``####`` in ``answer``; without one it is named."""
    path = tmp_path / "rows.jsonl"
    row = {"question": "How many?", "answer": "600 * 2 = <<600*2=1200>>1200\n#### 1,200"}
    path.write_text(json.dumps(row) + "\n")
    assert load_gsm8k(path) == [Prompt("How many?", label="1,200")]
    path.write_text(json.dumps({**row, "answer": "unknown"}) + "\n")
    with pytest.raises(ConfigError, match="row 1: label: got 'unknown'; expected a number"):
        load_gsm8k(path)


def test_real_rows_load(asset: Callable[[str], Path]) -> None:
    """Every row of the data set has a prompt and a number."""
    assert len(load_gsm8k(asset("datasets/gsm8k_train.jsonl"))) == 2500


@pytest.mark.parametrize("variant", ["single_turn", "calculator"])
def test_the_recipe_runs_on_the_embedded_engine(
    asset: Callable[[str], Path], engine_url: str, tmp_path: Path, variant: str
) -> None:
    """Real rows through the whole flow: the demo model solves none, but every law holds for its replies."""
    out = tmp_path / "run"
    options = {
        "variant": variant, "keep": "all", "batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 24,
        "max_turns": 2, "limit": 8,
    }  # fmt: skip
    settings = [text for name, value in options.items() for text in ("--set", f"{name}={value}")]
    data = str(asset("datasets/gsm8k_train.jsonl"))
    assert main(["run", RECIPE, "--endpoint", engine_url, "--data", data, "--out", str(out), *settings]) == 0
    samples = load_run(out)
    assert len(samples) == 4
    assert all(sample.loss_mask.count(1) > 0 for sample in samples)
    assert verify_run(out).ok
    info = json.loads((out / "run.json").read_text())
    assert info["recipe"] == f"gsm8k-{variant}"
