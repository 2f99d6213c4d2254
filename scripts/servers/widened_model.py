"""Write a Qwen3 model with heads of 16 dimensions as the same function with heads of 32: ``python -m
scripts.servers.widened_model SOURCE TARGET``

vLLM's attention on a CPU knows heads of 32 dimensions and more, and the demo model's have 16. The new dimensions are
zero. Rotary position embeddings rotate pairs of dimensions, each pair by its frequency: pair i of 8 has the
frequency of pair 2i of 16, so the dimensions (i, i + 8) become (2i, 2i + 16). The norm of each head averages over twice
as many dimensions, and the attention divides by another root: together a factor of sqrt(2), which the norm of the keys
takes back. Logits differ by rounding, and by the epsilon of the norms, whose share doubles: 3e-5 for the demo model.

The output head becomes a separate matrix, because vLLM 0.32 on a CPU keeps the old one of tied embeddings in a weight
update.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError

__all__ = ["widen"]

NARROW, WIDE = 16, 32


def widen(source: Path, target: Path) -> None:
    """Write ``source`` to the new folder ``target`` with heads of 32 dimensions; a model that has more is copied.

    Raises:
        ConfigError: another model than Qwen3, or heads of fewer dimensions than 32 but not 16.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config.get("head_dim", 0) >= WIDE:
        shutil.copytree(source, target)
        return
    if config.get("model_type") != "qwen3" or config.get("head_dim") != NARROW:
        got = f"{config.get('model_type')} with heads of {config.get('head_dim')} dimensions in {source}"
        raise ConfigError.of("SOURCE", got, f"qwen3 with heads of {NARROW}")
    shutil.copytree(source, target)
    half = torch.arange(NARROW // 2)
    places = torch.cat([2 * half, 2 * half + NARROW])

    def spread(rows: Any) -> Any:
        """Rows of heads: (heads * 16, ...) becomes (heads * 32, ...)."""
        heads = rows.shape[0] // NARROW
        wide = torch.zeros(heads, WIDE, *rows.shape[1:], dtype=rows.dtype)
        wide[:, places] = rows.reshape(heads, NARROW, *rows.shape[1:])
        return wide.reshape(heads * WIDE, *rows.shape[1:])

    weights = load_file(source / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_norm.weight")):
            weights[name] = spread(value)
        elif name.endswith("k_norm.weight"):
            weights[name] = spread(value) / 2**0.5
        elif name.endswith("o_proj.weight"):
            weights[name] = spread(value.T.contiguous()).T.contiguous()
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    changed = {"head_dim": WIDE, "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config | changed, indent=2) + "\n")


if __name__ == "__main__":
    widen(Path(sys.argv[1]), Path(sys.argv[2]))
