"""A causal language model, run over a fixed number of slots that each keep the K/V of one sequence.

Invariant: after :meth:`SlotModel.forward` with start s and n tokens, positions 0 to s + n - 1 of a slot hold the K/V of
that sequence and of nothing else; what stands behind them is stale and is masked until it is overwritten. In
float32 a logprob is the same number whichever rows it was computed beside; in bfloat16 it is within rounding.

This module knows nothing of requests, of sampling or of time. Any model of transformers works whose layers all attend
to the whole sequence; the cache plugs into the Cache interface of transformers, no model code is repeated here.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rollouts.engine.loading import Loaded
from rollouts.errors import ConfigError

__all__ = ["SlotModel"]

Ids = npt.NDArray[np.int64]

_SMALL = 50_000_000
"""Below this many parameters a second torch thread costs more than it gives."""


@attrs.define
class _Rows:
    """Where the tokens of the forward pass that is running belong."""

    slots: torch.Tensor
    """Slot of each row, ascending, ``(rows,)``."""
    view: slice | None
    """The same slots as a slice, where they are neighbours: then no K/V is copied to read them."""
    positions: torch.Tensor
    """``(rows, width)``"""
    keys: int
    """How many positions any of the rows can see."""


class _SlotLayer(CacheLayerMixin):
    """The K/V of one layer: ``(slots, heads, capacity, size of a head)``."""

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
        return self._through(self.keys, key_states, rows), self._through(self.values, value_states, rows)

    @staticmethod
    def _through(kept: torch.Tensor | None, states: torch.Tensor, rows: _Rows) -> torch.Tensor:
        assert kept is not None
        if states.shape[2] == 1:
            kept[rows.slots, :, rows.positions[:, 0]] = states[:, :, 0]
        else:
            kept[rows.slots[:, None], :, rows.positions] = states.transpose(1, 2)
        if rows.view is not None:
            return kept[rows.view, :, : rows.keys]
        return kept[:, :, : rows.keys].index_select(0, rows.slots)

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
        self.rows: _Rows
        layers = self.model.config.num_hidden_layers
        self._layers = [_SlotLayer(self) for _ in range(layers)]
        self._cache = Cache(layers=cast(Any, self._layers))
        if sum(parameter.numel() for parameter in self.model.parameters()) < _SMALL:
            torch.set_num_threads(1)

    def __repr__(self) -> str:
        return f"SlotModel({type(self.model).__name__}, slots={self.slots}, capacity={self.capacity})"

    @torch.inference_mode()
    def forward(
        self, slots: Ids, starts: Ids, tokens: Ids, lengths: Ids, *, every_position: bool = False
    ) -> torch.Tensor:
        """Run some rows further.

        Args:
            slots: slot of each row, ascending, ``(rows,)``.
            starts: how many positions of the slot are already computed, ``(rows,)``.
            tokens: the tokens that follow, padded on the right with any id, ``(rows, width)``.
            lengths: how many of them are real, ``(rows,)``.
            every_position: give the logits of all positions, not only of the last one of each row.

        Returns:
            Logits in float32: ``(rows, vocabulary)``, or ``(rows, width, vocabulary)``.
        """
        width = tokens.shape[1]
        positions = starts[:, None] + np.arange(width)
        keys = int(starts.max()) + width
        self._reserve(keys)
        neighbours = int(slots[-1] - slots[0]) + 1 == len(slots)
        place = torch.from_numpy(positions).to(self.device)
        self.rows = _Rows(
            slots=torch.from_numpy(slots).to(self.device),
            view=slice(int(slots[0]), int(slots[-1]) + 1) if neighbours else None,
            positions=place,
            keys=keys,
        )
        hidden = torch.arange(keys, device=self.device) > place[:, :, None]
        dtype = self.model.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, torch.finfo(dtype).min)
        last = lengths - 1
        wanted = np.arange(width) if every_position else np.unique(last)
        logits = self.model(
            input_ids=torch.from_numpy(tokens).to(self.device),
            attention_mask=mask[:, None],
            position_ids=place,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(wanted).to(self.device),
        ).logits.float()
        if every_position:
            return cast(torch.Tensor, logits)
        if len(wanted) == 1:
            return cast(torch.Tensor, logits[:, 0])
        return cast(torch.Tensor, logits[torch.arange(len(slots)), torch.from_numpy(np.searchsorted(wanted, last))])

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot the first ``length`` positions of another."""
        for layer in self._layers:
            for kept in (layer.keys, layer.values):
                if kept is not None:
                    kept[target, :, :length] = kept[source, :, :length]

    def replace(self, model: Any) -> None:
        """Go on with other weights of the same shape. The K/V stay as the old weights made them.

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

    def _grown(self, kept: torch.Tensor) -> torch.Tensor:
        slots, heads, length, size = kept.shape
        grown = kept.new_zeros(slots, heads, self.capacity, size)
        grown[:, :, :length] = kept
        return grown
