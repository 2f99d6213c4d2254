"""A causal language model over a fixed number of slots; each slot stores the K/V of one sequence.

Invariant: after :meth:`SlotModel.forward` with start s and n tokens, positions 0 to s + n - 1 of a slot contain the K/V
of that sequence only. Later positions are stale, and masked until they are overwritten. In float32 a logprob does not
depend on the other rows of the batch; in bfloat16 it does, within rounding.

This module does not know requests, sampling or time. It runs any transformers model whose layers all attend to the
whole sequence: it implements the Cache interface of transformers and copies no model code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rollouts.engine.adapters import Adapter, Adapters
from rollouts.engine.loading import Loaded, cache_argument
from rollouts.errors import ConfigError

__all__ = ["SlotModel"]

Ids = npt.NDArray[np.int64]

_SMALL = 50_000_000
"""Number of parameters below which a second torch thread costs more than it saves."""


@attrs.define
class _Rows:
    """Slots and positions of the tokens in the current forward pass."""

    slots: torch.Tensor
    """Slot of each row, ascending, ``(rows,)``."""
    view: slice | None
    """The same slots as a slice if they are contiguous: then reading K/V needs no copy."""
    positions: torch.Tensor
    """``(rows, width)``"""
    keys: int
    """Number of positions up to the last that any row attends to."""


class _SlotLayer(CacheLayerMixin):
    """The K/V of one layer, each ``(slots, heads, capacity, head size)``."""

    is_sliding = False

    def __init__(self, owner: SlotModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._blank(key_states)
        self.values = self._blank(value_states)
        self.is_initialized = True

    def _blank(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self.owner.slots, heads, self.owner.capacity, size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.owner.rows
        return self._store(self.keys, key_states, rows), self._store(self.values, value_states, rows)

    @staticmethod
    def _store(cache: torch.Tensor | None, states: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Write new states; return all states that the rows attend to."""
        assert cache is not None
        if states.shape[2] == 1:
            cache[rows.slots, :, rows.positions[:, 0]] = states[:, :, 0]
        else:
            cache[rows.slots[:, None], :, rows.positions] = states.transpose(1, 2)
        if rows.view is not None:
            return cache[rows.view, :, : rows.keys]
        return cache[:, :, : rows.keys].index_select(0, rows.slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.rows.keys, 0

    def get_seq_length(self) -> int:
        return self.owner.rows.keys

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in early releases of transformers 5


class SlotModel:
    """Runs a model over slots. One thread at a time."""

    def __init__(self, loaded: Loaded, slots: int) -> None:
        self.model = loaded.model
        self.slots = slots
        self.capacity = 256
        self.device = self.model.device
        self._cache_argument = cache_argument(self.model)
        self.rows: _Rows
        self._adapters = Adapters()
        layers = self.model.config.num_hidden_layers
        self._layers = [_SlotLayer(self) for _ in range(layers)]
        self._cache = Cache(layers=cast(Any, self._layers))
        if sum(parameter.numel() for parameter in self.model.parameters()) < _SMALL:
            torch.set_num_threads(1)

    def __repr__(self) -> str:
        return f"SlotModel({type(self.model).__name__}, slots={self.slots}, capacity={self.capacity})"

    @torch.inference_mode()
    def forward(
        self,
        slots: Ids,
        starts: Ids,
        tokens: Ids,
        lengths: Ids,
        *,
        every_position: bool = False,
        adapters: Sequence[Adapter | None] = (),
    ) -> torch.Tensor:
        """Compute the next tokens of some rows.

        Args:
            slots: slot of each row, ascending, ``(rows,)``.
            starts: number of positions of the slot that are already computed, ``(rows,)``.
            tokens: the next tokens, right-padded with any id, ``(rows, width)``.
            lengths: number of tokens without padding, ``(rows,)``.
            every_position: return the logits of all positions, not only of each row's last.
            adapters: the adapter of each row; empty if no row has one.

        Returns:
            Logits in float32: ``(rows, vocabulary)``, or ``(rows, width, vocabulary)``.
        """
        width = tokens.shape[1]
        positions = starts[:, None] + np.arange(width)
        keys = int(starts.max()) + width
        self._reserve(keys)
        contiguous = int(slots[-1] - slots[0]) + 1 == len(slots)
        position_ids = torch.from_numpy(positions).to(self.device)
        self.rows = _Rows(
            slots=torch.from_numpy(slots).to(self.device),
            view=slice(int(slots[0]), int(slots[-1]) + 1) if contiguous else None,
            positions=position_ids,
            keys=keys,
        )
        hidden = torch.arange(keys, device=self.device) > position_ids[:, :, None]
        dtype = self.model.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, torch.finfo(dtype).min)
        last = lengths - 1
        columns = np.arange(width) if every_position else np.unique(last)
        with self._adapters.rows(self.model, adapters):
            logits = self.model(
                input_ids=torch.from_numpy(tokens).to(self.device),
                attention_mask=mask[:, None],
                position_ids=position_ids,
                **{self._cache_argument: self._cache},
                use_cache=True,
                logits_to_keep=torch.from_numpy(columns).to(self.device),
            ).logits.float()
        if every_position:
            return cast(torch.Tensor, logits)
        if len(columns) == 1:
            return cast(torch.Tensor, logits[:, 0])
        return cast(torch.Tensor, logits[torch.arange(len(slots)), torch.from_numpy(np.searchsorted(columns, last))])

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the K/V of the first ``length`` positions from one slot to another."""
        for layer in self._layers:
            for cache in (layer.keys, layer.values):
                if cache is not None:
                    cache[target, :, :length] = cache[source, :, :length]

    def replace(self, model: Any) -> None:
        """Replace the weights by others of the same shapes. The K/V of the old weights stay.

        Raises:
            ConfigError: the shapes differ.
        """
        old = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        new = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        if old != new:
            differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
            raise ConfigError.of(
                "model_path", f"other shapes, e.g. of {differing[0]}", "weights of the model that is served"
            )
        self.model = model

    @torch.inference_mode()
    def _reserve(self, positions: int) -> None:
        if positions <= self.capacity:
            return
        while self.capacity < positions:
            self.capacity *= 2
        for layer in self._layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = self._grown(layer.keys), self._grown(layer.values)

    def _grown(self, cache: torch.Tensor) -> torch.Tensor:
        slots, heads, length, size = cache.shape
        grown = cache.new_zeros(slots, heads, self.capacity, size)
        grown[:, :, :length] = cache
        return grown
