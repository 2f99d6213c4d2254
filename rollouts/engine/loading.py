"""Loading of a model folder: weights, tokenizer, stop ids, context length.

Invariant: a loaded model can be served: it is a causal language model whose layers all attend to the whole sequence, as
the attention mask of the slots assumes. Loading never uses the network.

This module does not know slots or requests.
"""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from rollouts.engine.images import PROCESSOR, Expander
from rollouts.errors import ConfigError

__all__ = ["DTYPES", "Loaded", "cache_argument", "load_folder", "load_weights", "stop_ids_of"]

RESERVED = 6
"""Tokens of the context that no prompt gets, as in SGLang 0.5.23."""

DTYPES = ("float32", "bfloat16")

_BUILDING = threading.Lock()
"""transformers builds a model with a default device for the whole process, which another thread would build on, too."""

_EXPECTED = "a folder that transformers can load as a causal language model (config.json and weights)"


@attrs.frozen
class Loaded:
    """A model folder in memory."""

    path: Path
    model: Any
    tokenizer: Any
    """``None`` if the folder has none; requests and responses then contain ids only."""
    eos_ids: frozenset[int]
    vocab_size: int
    max_context: int
    """Limit for prompt and reply together, in tokens."""
    architecture: str
    model_type: str
    dtype: str = "float32"
    images: Expander | None = None
    """Expands the placeholders of images; ``None`` if the folder has no processor."""

    @property
    def max_input(self) -> int:
        """The smallest number of tokens of a prompt that is too long; ``max_req_input_len`` of SGLang 0.5.23."""
        return self.max_context - RESERVED


def load_folder(path: Path, max_context: int | None = None, dtype: str = "float32") -> Loaded:
    """Load a model and its tokenizer from a local folder.

    Args:
        path: the folder.
        max_context: limit for prompt and reply together, in tokens; by default the model's positions.
        dtype: one of :data:`DTYPES`, for the weights and the computation.

    Raises:
        ConfigError: the folder does not load, or some layer does not attend to the whole sequence.
    """
    if not (path / "config.json").is_file():
        raise ConfigError.of("model", str(path), _EXPECTED)
    if dtype not in DTYPES:
        raise ConfigError.of("dtype", dtype, " or ".join(DTYPES))
    model = load_weights(path, dtype)
    config = model.config
    limit = int(getattr(config, "max_position_embeddings", 0) or 2048)
    if max_context is not None and not RESERVED + 2 <= max_context <= limit:
        expected = f"{RESERVED + 2} to {limit}, the positions of the model in {path}"
        raise ConfigError.of("max_context", max_context, expected)
    limit = max_context or limit
    _check_attention(path, config, limit)
    return Loaded(
        path=path,
        model=model,
        tokenizer=_tokenizer(path),
        eos_ids=stop_ids_of(model),
        vocab_size=int(config.vocab_size),
        max_context=limit,
        architecture=type(model).__name__,
        model_type=str(config.model_type),
        dtype=dtype,
        images=Expander(path) if (path / PROCESSOR).is_file() else None,
    )


def stop_ids_of(model: Any) -> frozenset[int]:
    """The ids that end a reply of a model, as its folder names them."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = model.config.eos_token_id if eos is None else eos
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


def cache_argument(model: Any) -> str:
    """The name of the argument of a model's ``forward`` that takes the cache.

    It is ``cache`` from transformers 5.24 on, where ``past_key_values`` gives a warning until 5.40 removes it
    (transformers 5.24.0, models/qwen3/modeling_qwen3.py: Qwen3ForCausalLM.forward).
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_weights(path: Path, dtype: str) -> Any:
    """Load the model of a folder, onto the GPU if there is one.

    Raises:
        ConfigError: the model does not load; the cause is chained.
    """
    disable_progress_bar()
    try:
        with _BUILDING:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
            )
    except ImportError as error:
        causes = [str(error).splitlines()[0]]
        cause = error.__cause__ or error.__context__
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {cause}".splitlines()[0])
            cause = cause.__cause__ or cause.__context__
        raise ConfigError(
            f"model: transformers {transformers.__version__} cannot import the classes of {str(path)!r} in this Python"
            f" environment ({sys.prefix}): {'; '.join(dict.fromkeys(causes))}. A torchvision of another build than"
            " torch is a usual cause: use an environment with rollouts[engine] alone"
        ) from error
    except Exception as error:  # transformers raises many types for an invalid folder
        raise ConfigError(f"model: got {str(path)!r}; expected {_EXPECTED}; {type(error).__name__}: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return cast(torch.nn.Module, model).to(device).eval()


def _check_attention(path: Path, config: Any, limit: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or (window is not None and window < limit):
        got = f"{path} ({config.model_type}, layers {sorted(kinds)}, window {window})"
        raise ConfigError.of("model", got, "a model whose layers all attend to the whole sequence")


def _tokenizer(path: Path) -> Any:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for an invalid folder
        raise ConfigError(f"model: got {str(path)!r}; expected a tokenizer that loads; {error}") from error
