"""LoRA adapters on disk in PEFT's format, with random weights, and the model that each of them means."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.engine import DEMO_MODEL

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@functools.cache
def small_model() -> Path:
    """A model with random weights, whose logprobs in float32 are more exact than those of the demo model."""
    import torch
    import transformers

    torch.manual_seed(0)
    folder = tempfile.TemporaryDirectory(prefix="rollouts-small-model-")
    _KEPT.append(folder)
    config = transformers.Qwen3Config(
        vocab_size=509, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder.name)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def write_adapter(
    folder: Path,
    seed: int,
    *,
    base: Path = DEMO_MODEL,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = TARGETS,
    spread: float = 0.05,
    **config: Any,
) -> Path:
    """Write an adapter of a base model; ``spread`` is the standard deviation of its numbers."""
    import torch
    import transformers
    from safetensors.torch import save_file

    settings = transformers.AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                numbers = spread * torch.randn(shape, generator=drawn)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    found = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**found, **config}))
    return folder


def merged_folder(adapter: Path, folder: Path, base: Path = DEMO_MODEL) -> Path:
    """Write the model that an adapter means: the base weights with ``scale * B @ A`` added in float64."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, right in factors.items():
        if ".lora_A." in name:
            left = factors[name.replace(".lora_A.", ".lora_B.")]
            of = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            weights[of] = (weights[of].double() + scale * left.double() @ right.double()).to(torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
