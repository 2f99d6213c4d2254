"""A view of an evaluation has a group for each task, and a folder with neither is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.views.page import open_source


def row(prompt: str, reward: float) -> bytes:
    return msgspec.json.encode(Sample(prompt, "", [1], [0], reward, label="1").to_dict()) + b"\n"


def test_the_rollouts_of_an_evaluation_are_grouped_by_task(tmp_path: Path) -> None:
    """Sampled and greedy rollouts of one task are two groups; a line that is being written is left out."""
    (tmp_path / "eval.json").write_bytes(b'{"recipe": "calculator"}')
    (tmp_path / "rollouts.jsonl").write_bytes(row("a", 1.0) + row("b", 0.0) + row("a", 0.0) + row("b", 1.0)[:20])
    (tmp_path / "greedy.jsonl").write_bytes(row("a", 1.0))
    found = [
        (entry.number, entry.outcome, [s.reward for s in entry.samples]) for entry in open_source(tmp_path).groups()
    ]
    assert found == [(0, "sampled", [1.0, 0.0]), (1, "sampled", [0.0]), (2, "greedy", [1.0])]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    """The error names the folder; a damaged file is named, too."""
    with pytest.raises(ConfigError, match=r"run: got '.*'; expected the folder of a run"):
        open_source(tmp_path)
    (tmp_path / "eval.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"eval\.json: corrupted, not JSON"):
        open_source(tmp_path)
