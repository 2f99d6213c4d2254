"""Teacher-forced logprobs: the logprobs that a model folder gives to tokens, computed by transformers alone.

Invariant: one sequence at a time, through the model's cache and attention; nothing of the engine's slots, prefixes
or sampler takes part, so that the result can judge the engine and any other server.

This module does not know requests or stored runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from rollouts.base.peft import CONFIG
from rollouts.engine.adapters import Adapter, load_adapter
from rollouts.engine.loading import cache_argument, load_weights, stop_ids_of
from rollouts.errors import ConfigError

__all__ = ["Teacher", "dtype_of"]

CHUNK = 1024
"""Tokens of one forward pass: the logits of a long sequence at once may not fit into memory."""


def dtype_of(folder: Path) -> str:
    """The dtype in which a model folder's weights are stored.

    Raises:
        ConfigError: the folder has no config.json.
    """
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model: got {str(folder)!r}; expected a folder with a config.json; {error}") from error
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _adapt(model: Any, adapter: Adapter) -> None:
    """Add the changes of an adapter to a model."""

    def changed(name: str, module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + adapter.change(name, inputs[0])

    for name in adapter.factors:
        model.get_submodule(name).register_forward_hook(functools.partial(changed, name))


class Teacher:
    """The model of a folder, or of a LoRA adapter.

    Args:
        folder: a causal language model of transformers, or an adapter of ``base`` in PEFT's format.
        dtype: for its weights and the computation.
        base: folder of the model to which an adapter belongs.

    Raises:
        ConfigError: the folder does not load, or is an adapter and has no ``base``.
    """

    def __init__(self, folder: Path, dtype: str, base: Path | None = None) -> None:
        if not (folder / CONFIG).is_file():
            self._model = load_weights(folder, dtype)
        elif base is None:
            raise ConfigError.of("model", str(folder), "a model: this is a LoRA adapter, whose base model is not given")
        else:
            self._model = load_weights(base, dtype)
            _adapt(self._model, load_adapter(folder, self._model))
        self._cache_argument = cache_argument(self._model)
        self.vocab_size = int(self._model.config.vocab_size)
        self._stop_ids = stop_ids_of(self._model)

    @torch.inference_mode()
    def logprobs(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        temperature: float | npt.NDArray[np.float64],
        *,
        without: Sequence[int] = (),
        masked: npt.NDArray[np.bool_] | None = None,
        chunk: int = CHUNK,
    ) -> npt.NDArray[np.float32]:
        """Logprobs of the tokens at some positions, each given all tokens before it.

        Args:
            tokens: the sequence, ``(n,)``; ids below ``vocab_size``.
            positions: ascending, from 1 to n - 1, ``(m,)``.
            temperature: divides the logits, of all positions or of each, ``(m,)``; above 0.
            without: ids that could not be sampled where ``masked`` is true, in addition to the model's stop ids.
            masked: at which of the positions, ``(m,)``.
            chunk: tokens of one forward pass.

        Returns:
            ``(m,)``
        """
        divisors = torch.tensor(np.broadcast_to(temperature, positions.shape), dtype=torch.float32)
        found = []
        for here, logits in self._logits(tokens, positions, chunk):
            if masked is not None and masked[here].any():
                ids_without = torch.tensor(sorted(self._stop_ids.union(without)), device=logits.device)
                rows_without = torch.from_numpy(np.flatnonzero(masked[here])).to(logits.device)
                logits[rows_without[:, None], ids_without] = -torch.inf
            scores = (logits.float() / divisors[here, None].to(logits.device)).log_softmax(-1)
            targets = torch.from_numpy(tokens[positions[here]].astype(np.int64)).to(logits.device)
            found.append(scores.gather(1, targets[:, None])[:, 0])
        return torch.cat(found).cpu().numpy()

    @torch.inference_mode()
    def top_logprobs(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int32],
        *,
        chunk: int = CHUNK,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logprobs of some ids at each position at temperature 1, and those of the most probable ids, descending.

        Args:
            tokens: the sequence, ``(n,)``; ids below ``vocab_size``.
            positions: ascending, from 1 to n - 1, ``(m,)``.
            ids: K at each position, below ``vocab_size``, ``(m, K)``.
            chunk: tokens of one forward pass.

        Returns:
            ``(m, K)``, and ``(m, K)``
        """
        own, best = [], []
        for here, logits in self._logits(tokens, positions, chunk):
            scores = logits.float().log_softmax(-1)
            own.append(scores.gather(1, torch.from_numpy(ids[here].astype(np.int64)).to(scores.device)))
            best.append(scores.topk(ids.shape[1]).values)
        return torch.cat(own).cpu().numpy(), torch.cat(best).cpu().numpy()

    def _logits(
        self, tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], chunk: int
    ) -> Iterator[tuple[npt.NDArray[np.bool_], torch.Tensor]]:
        """The logits of each pass, ``(part, vocab_size)``, and at which of the positions they are, ``(m,)``."""
        device = self._model.device
        rows = positions - 1
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        cache = DynamicCache(config=self._model.config)
        for start in range(0, int(rows[-1]) + 1, chunk):
            here = (rows >= start) & (rows < start + chunk)
            stop = min(start + chunk, int(rows[-1]) + 1)
            yield (
                here,
                self._model(
                    input_ids=ids[None, start:stop],
                    **{self._cache_argument: cache},
                    use_cache=True,
                    logits_to_keep=torch.from_numpy(rows[here] - start).to(device),
                ).logits[0],
            )
