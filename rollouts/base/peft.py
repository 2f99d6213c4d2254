"""LoRA adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

Invariant: a folder that :func:`read_adapter` accepts is plain LoRA: its function is that of the base model with
``scale * B @ A`` added to some weight matrices, of one rank and one scale. Everything else that PEFT can store is
refused by its name: servers ignore parts of it in silence, so that tokens would name weights that did not sample them.
SGLang 0.5.23 scales by alpha / rank whatever ``use_rslora`` says (lora/lora.py: LoRAAdapter), and neither SGLang nor
vLLM 0.32.0 loads PEFT's biases.

This module reads the head of a file of tensors, but no tensor.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.base.validators import is_int, is_number
from rollouts.errors import ConfigError

__all__ = ["CONFIG", "PeftAdapter", "checksum_of", "read_adapter"]

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_LARGEST_HEADER = 100_000_000
_DRAWN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of ``init_lora_weights`` that leave the base model as it is; others, such as PiSSA, change its weights."""
_REFUSED = {
    "lora_bias": "false",
    "modules_to_save": "null: whole modules are not a low-rank change",
    "rank_pattern": "none: one rank for all modules",
    "alpha_pattern": "none: one alpha for all modules",
    "layer_replication": "null: the layers of the base model",
    "alora_invocation_tokens": "null: an adapter of all tokens",
    "target_parameters": "null: an adapter of whole modules",
    "trainable_token_indices": "null: an adapter without trained embeddings",
    "fan_in_fan_out": "false: an adapter of linear layers",
}
"""Fields that must be empty or false, and the expected value. So must every ``use_…`` but ``use_rslora``."""


@attrs.frozen
class PeftAdapter:
    """A plain LoRA adapter on disk."""

    folder: Path
    rank: int
    alpha: float
    use_rslora: bool
    modules: tuple[str, ...]
    """Names of the changed modules in the base model, ascending."""

    @property
    def scale(self) -> float:
        """The factor of ``B @ A``."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def tensors(self) -> Path:
        """The file of its tensors: ``(rank, in)`` of each A, ``(out, rank)`` of each B."""
        return self.folder / TENSORS

    @staticmethod
    def names_of(module: str) -> tuple[str, str]:
        """The names of A and B of a module in the file."""
        return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def read_adapter(folder: Path, field: str = "lora") -> PeftAdapter:
    """Read and check an adapter.

    Args:
        folder: the folder that PEFT's ``save_pretrained`` wrote.
        field: name of the argument, for errors.

    Raises:
        ConfigError: the folder is not an adapter, a file is cut, or it is not plain LoRA.
    """
    expected = f"a folder with {CONFIG} and {TENSORS}, as PEFT's save_pretrained writes it"
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
        shapes = _shapes(folder / TENSORS)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError.of(field, str(folder), f"{expected}; {error}") from error
    where = f"{field}, {folder / CONFIG}"
    _check_plain(config, where)
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora")
    if not is_int(rank, 1):
        raise ConfigError.of(f"{where}, r", rank, "an integer >= 1")
    if not is_number(alpha):
        raise ConfigError.of(f"{where}, lora_alpha", alpha, "a number")
    modules = _modules(shapes, rank, f"{field}, {folder / TENSORS}")
    return PeftAdapter(folder, rank, float(alpha), bool(rslora), modules)


def checksum_of(folder: Path) -> str:
    """A checksum of an adapter's config and tensors.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in (CONFIG, TENSORS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
    return digest.hexdigest()


def _check_plain(config: dict[str, Any], where: str) -> None:
    """Refuse everything that is not plain LoRA."""
    kind = str(config.get("peft_type")).upper()
    if kind != "LORA":
        raise ConfigError.of(f"{where}, peft_type", config.get("peft_type"), "LORA")
    if config.get("bias", "none") != "none":
        raise ConfigError.of(f"{where}, bias", config["bias"], "none: an adapter without biases")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _DRAWN_INITS:
        expected = (
            f"true, false or one of {', '.join(_DRAWN_INITS)}: others change the base model; convert it with PEFT"
        )
        raise ConfigError.of(f"{where}, init_lora_weights", init, expected)
    others = {name: "false" for name in config if name.startswith("use_") and name != "use_rslora"}
    for name, expected in {**_REFUSED, **others}.items():
        if config.get(name):
            raise ConfigError.of(f"{where}, {name}", config[name], expected)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a file.

    Raises:
        ConfigError: the file is cut or longer than its head says.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < min(size, _LARGEST_HEADER):
            raise ConfigError.of("lora", str(path), "a whole file of safetensors")
        header = msgspec.json.decode(file.read(length), type=dict[str, Any])
    header.pop("__metadata__", None)
    try:
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError.of("lora", str(path), f"a file of safetensors; {error!r}") from error
    if 8 + length + end != size:
        raise ConfigError.of("lora", str(path), "a whole file of safetensors")
    return shapes


def _modules(shapes: dict[str, tuple[int, ...]], rank: int, where: str) -> tuple[str, ...]:
    """The modules of a file that has A and B of each and nothing else."""
    parts: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigError.of(
                where, f"the tensor {name}", "base_model.model.<module>.lora_A.weight and lora_B.weight"
            )
        if len(shape) != 2 or shape[0 if match["part"] == "A" else 1] != rank:
            raise ConfigError.of(f"{where}, {name}", f"shape {shape}", f"rank {rank}, as r says")
        parts.setdefault(match["module"], set()).add(match["part"])
    halves = sorted(module for module, found in parts.items() if len(found) == 1)
    if halves:
        raise ConfigError.of(f"{where}, {halves[0]}", f"lora_{parts[halves[0]].pop()} alone", "lora_A and lora_B")
    if not parts:
        raise ConfigError.of(where, "no tensors", "lora_A and lora_B of some modules")
    return tuple(sorted(parts))
