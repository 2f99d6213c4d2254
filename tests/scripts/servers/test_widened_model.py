"""The demo model with wider heads: the same function."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.engine import DEMO_MODEL
from rollouts.engine.teacher import Teacher
from rollouts.errors import ConfigError
from scripts.servers.widened_model import widen


def test_the_function_is_the_same(tmp_path: Path) -> None:
    """Logprobs agree over hundreds of positions, so the rotations do; a model that is wide enough is copied."""
    widen(DEMO_MODEL, tmp_path / "wide")
    widen(tmp_path / "wide", tmp_path / "again")
    ids, positions = np.arange(10, 410, dtype=np.int32), np.arange(1, 400)
    narrow, wide, again = (
        Teacher(folder, "float32").logprobs(ids, positions, 1.0)
        for folder in (DEMO_MODEL, tmp_path / "wide", tmp_path / "again")
    )
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["head_dim"] == 32
    assert np.abs(narrow - wide).max() < 1e-4
    assert (wide == again).all()


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Another family may place its rotary pairs elsewhere."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama", "head_dim": 16}')
    with pytest.raises(ConfigError, match=r"SOURCE: got .*llama with heads of 16 .*; expected qwen3"):
        widen(tmp_path / "other", tmp_path / "wide")
    assert not (tmp_path / "wide").exists()
