"""Every ready-made environment through ``rollouts run`` on the embedded engine: the demo model solves little, but each
law holds for its replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.commands import main
from rollouts.runs.reader import load_run
from rollouts.runs.verify import verify_run

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "countdown": (None, {}),
    "guess": (None, {"guesses": 3}),
    "function_calling": ("datasets/bfcl_simple_python.jsonl", {"limit": 20}),
    "function_calling-turns": ("datasets/bfcl_multi_turn_base.jsonl", {"variant": "turns", "max_turns": 2}),
    "search": (None, {"max_turns": 3}),
    "visual": (None, {"prompts": 8, "max_turns": 2}),
    "retool": ("datasets/math500.jsonl", {"limit": 8, "max_turns": 2}),
    "search_r1": (None, {"max_turns": 2}),
    "mixed": (None, {"max_turns": 3, "weights": json.dumps({"calculator": 2, "countdown": 1, "guess": 1})}),
}
NEEDS = {"search": "bm25s", "search_r1": "bm25s", "retool": "math_verify"}


def run(name: str, asset: Callable[[str], Path], engine_url: str, out: Path) -> None:
    data, options = RUNS[name]
    options = {"keep": "all", "batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 24, **options}
    arguments = ["--data", str(asset(data))] if data else []
    arguments += [text for option, value in options.items() for text in ("--set", f"{option}={value}")]
    recipe = str(CONFIGS / f"{name.partition('-')[0]}.py")
    assert main(["run", recipe, "--endpoint", engine_url, "--out", str(out), "--format", "jsonl", *arguments]) == 0


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, asset: Callable[[str], Path], engine_url: str, tmp_path: Path) -> None:
    """Whole groups, trained tokens, sound laws."""
    pytest.importorskip(NEEDS.get(name, "rollouts"))
    run(name, asset, engine_url, tmp_path / "run")
    samples = load_run(tmp_path / "run")
    assert len(samples) == 8
    assert all(sample.loss_mask.count(1) > 0 and sample.reward is not None for sample in samples)
    assert verify_run(tmp_path / "run").ok


def test_a_mixed_batch_has_its_metrics_by_environment(
    asset: Callable[[str], Path], engine_url: str, tmp_path: Path
) -> None:
    """Shares and rewards of each environment are metrics under its name."""
    run("mixed", asset, engine_url, tmp_path / "run")
    samples = load_run(tmp_path / "run")
    names = [str(sample.metadata["environment"]) for sample in samples]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = json.loads(lines[-1])
    values = {key: value for key, value in metrics.items() if key.startswith("environment/")}
    assert {key.split("/")[1] for key in values} == set(names)
    for name in set(names):
        rewards = [sample.reward or 0.0 for sample in samples if sample.metadata["environment"] == name]
        assert values[f"environment/{name}/share"] == len(rewards) / len(samples)
        assert values[f"environment/{name}/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
