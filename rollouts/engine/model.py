"""A causal language model from a folder, run over a fixed number of slots that each keep the K/V of one sequence.

Invariant: after :meth:`SlotModel.forward` with start s and n tokens, positions 0 to s + n - 1 of a slot hold the K/V of
that sequence and of nothing else; what stands behind them is stale and is masked until it is overwritten. Everything is
computed in float32, so that a logprob is the same number whichever rows it was computed beside.

This module knows nothing of requests, of sampling or of time. Any model of transformers works whose layers all attend
to the whole sequence; the cache plugs into the Cache interface of transformers, no model code is repeated here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils.logging import disable_progress_bar

from rollouts.errors import ConfigError

__all__ = ["Loaded", "SlotModel", "load_folder", "load_weights"]

Ids = npt.NDArray[np.int64]

_EXPECTED = "a folder that transformers can load as a causal language model (config.json and weights)"
_SMALL = 50_000_000
"""Below this many parameters a second torch thread costs more than it gives."""


@attrs.frozen
class Loaded:
    """A model folder in memory."""

    path: Path
    model: Any
    tokenizer: Any
    """``None`` when the folder has none; the server then takes and gives ids only."""
    eos_ids: frozenset[int]
    vocab_size: int
    max_context: int
    """Prompt and reply together, in tokens."""
    architecture: str
    model_type: str


def load_folder(path: Path, max_context: int | None = None) -> Loaded:
    """Load a model and its tokenizer from a local folder; nothing is looked for on a network.

    Raises:
        ConfigError: the folder does not load, or the model is of a kind that the slots cannot serve.
    """
    if not (path / "config.json").is_file():
        raise ConfigError.of("model", str(path), _EXPECTED)
    model = load_weights(path)
    config = model.config
    limit = int(getattr(config, "max_position_embeddings", 0) or 2048)
    if max_context is not None and not 2 <= max_context <= limit:
        raise ConfigError.of("max_context", max_context, f"2 to {limit}, the positions of the model in {path}")
    limit = max_context or limit
    _check_attention(path, config, limit)
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = config.eos_token_id if eos is None else eos
    return Loaded(
        path=path,
        model=model,
        tokenizer=_tokenizer(path),
        eos_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        vocab_size=int(config.vocab_size),
        max_context=limit,
        architecture=type(model).__name__,
        model_type=str(config.model_type),
    )


def load_weights(path: Path) -> Any:
    """The model of a folder, in float32, on the GPU where there is one.

    Raises:
        ConfigError: it does not load; the cause says why.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # whatever a foreign folder makes transformers raise
        raise ConfigError(f"model: got {str(path)!r}; expected {_EXPECTED}; {type(error).__name__}: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return cast(torch.nn.Module, model).to(device).eval()


def _check_attention(path: Path, config: Any, limit: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or (window is not None and window < limit):
        found = f"{path} ({config.model_type}, layers {sorted(kinds)}, window {window})"
        raise ConfigError.of("model", found, "a model whose layers all attend to the whole sequence")


def _tokenizer(path: Path) -> Any:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever a foreign folder makes transformers raise
        raise ConfigError(f"model: got {str(path)!r}; expected a tokenizer that loads; {error}") from error


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


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
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
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, torch.finfo(torch.float32).min)
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
