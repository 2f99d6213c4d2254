"""LoRA adapters in PEFT's format: what is read, and what is refused by its name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rollouts.base.peft import checksum_of, read_adapter
from rollouts.errors import ConfigError
from tests.peft_folders import write_adapter


def test_an_adapter_has_its_rank_scale_and_modules(tmp_path: Path) -> None:
    """The scale is alpha over the rank."""
    adapter = read_adapter(write_adapter(tmp_path, 1, rank=4, alpha=6, targets=["q_proj", "lm_head"]))
    assert (adapter.rank, adapter.alpha, adapter.scale) == (4, 6, 1.5)
    assert adapter.modules == ("lm_head", *(f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)))


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(tmp_path: Path) -> None:
    """``use_rslora`` changes the scale."""
    assert read_adapter(write_adapter(tmp_path, 1, rank=4, alpha=6, use_rslora=True)).scale == 6 / math.sqrt(4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_qalora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layer_replication", [[0, 1]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("target_parameters", ["mlp.experts"]),
        ("fan_in_fan_out", True),
        ("peft_type", "LOHA"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    """A server would ignore it in silence, or refuse it in the middle of a run."""
    with pytest.raises(ConfigError, match=rf"adapter_config\.json, {field}: got "):
        read_adapter(write_adapter(tmp_path, 1, **{field: value}))


def test_a_tensor_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    """DoRA's magnitudes, saved modules and embeddings have other names."""
    from safetensors.torch import load_file, save_file

    path = write_adapter(tmp_path, 1) / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.modules_to_save.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"the tensor base_model\.model\.lm_head\.modules_to_save\.weight"):
        read_adapter(tmp_path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    """As a trainer leaves it that is killed while it saves."""
    path = write_adapter(tmp_path, 1) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="a whole file of safetensors"):
        read_adapter(tmp_path)


def test_another_rank_than_that_of_the_config_is_refused(tmp_path: Path) -> None:
    """The scale would be wrong."""
    write_adapter(tmp_path, 1, rank=4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    with pytest.raises(ConfigError, match=r"shape \(4, \d+\)'; expected rank 8"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_its_files_is_refused(tmp_path: Path, missing: str) -> None:
    """The error names the argument, the folder and what is missing."""
    (write_adapter(tmp_path, 1) / missing).unlink()
    with pytest.raises(ConfigError, match=rf"lora: got '{tmp_path}'; expected a folder with.*{missing}"):
        read_adapter(tmp_path)


def test_the_checksum_is_of_the_weights_and_the_config(tmp_path: Path) -> None:
    """Equal files have one checksum, in whatever folder; another seed or alpha has another."""
    of = {
        name: checksum_of(write_adapter(tmp_path / name, seed, alpha=alpha))
        for name, seed, alpha in [("a", 1, 8), ("b", 1, 8), ("c", 2, 8), ("d", 1, 9)]
    }
    assert of["a"] == of["b"]
    assert len(set(of.values())) == 3
