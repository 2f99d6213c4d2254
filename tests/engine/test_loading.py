from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rollouts.engine.loading import load_folder  # noqa: E402 - only where torch is
from rollouts.errors import ConfigError  # noqa: E402


def test_a_folder_that_is_no_model_is_named_in_the_error(tmp_path: Path) -> None:
    """The error names the path and what was expected there."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"model: got '{tmp_path}'.*causal language model"):
        load_folder(tmp_path)


def test_a_sliding_window_within_the_context_is_refused(tmp_path: Path) -> None:
    """A model for which the mask of the slots is wrong does not load."""
    config = transformers.MistralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="whole sequence"):
        load_folder(tmp_path)
    assert load_folder(tmp_path, max_context=8).max_context == 8


def test_a_context_beyond_the_positions_is_refused(tiny_folder: Path) -> None:
    """``max_context`` can only narrow."""
    with pytest.raises(ConfigError, match="max_context: got 513; expected 8 to 512"):
        load_folder(tiny_folder, max_context=513)


@pytest.mark.parametrize("tiny_folder", ["llama"], indirect=True)  # the import fails before the family matters
def test_a_broken_torchvision_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    """An environment whose torchvision does not import is the cause, and not the model's folder."""
    module, metadata = tmp_path / "torchvision", tmp_path / "torchvision-0.28.0.dist-info"
    module.mkdir()
    metadata.mkdir()
    (module / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    code = "import sys, pathlib, rollouts.engine.loading as x; x.load_weights(pathlib.Path(sys.argv[1]), 'float32')"
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tiny_folder)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "operator torchvision::nms does not exist. A torchvision of another build than torch" in ended.stderr
    assert f"in this Python environment ({sys.prefix})" in ended.stderr
