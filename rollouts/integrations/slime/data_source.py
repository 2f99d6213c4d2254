"""A data source with complete checkpoints: ``--data-source-path rollouts.integrations.slime.CheckpointedDataSource``.

Invariant: every group that left the data set and is in no batch yet is in the checkpoint, with its finished rollouts:
groups in the buffer, and groups in flight. slime's own data source saves only its cursor
(slime 0.3.1, rollout/data_source.py: RolloutDataSource.save). Only our rollout function reports the groups in flight:
with another function, a checkpoint has the buffer alone. No value of a sample makes a checkpoint fail.

It reads no prompts itself: slime's data source, or the class of ``args.rollouts_inner_data_source_path``, does.
"""

from __future__ import annotations

import codecs
import logging
import os
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollouts.errors import ConfigError
from rollouts.integrations.episodes import load_function
from rollouts.integrations.slime import filters
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import family, records
from rollouts.integrations.slime.saved_values import SAFE, check_plain, only_plain, restored, stored
from rollouts.runs.export import replacing

__all__ = ["CheckpointedDataSource"]

_LOG = logging.getLogger(__name__)
_INNER = "{}.rollout.data_source.RolloutDataSource"
_DTYPES = {type(np.dtype(code)) for code in np.typecodes["All"]}
_REBUILT: Sequence[Any] = (np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0], codecs.encode)
_ARRAYS: Sequence[Any] = (np.ndarray, np.dtype, bytes, *_REBUILT, *_DTYPES)
"""The classes and functions by which a file of ``torch.save`` names arrays, NumPy's numbers, and empty bytes."""
_NAMED = 5
"""Values that a warning names."""
_OF_DATA_SET = {"group_index", "index", "rollout_id", "prompt", "multimodal_inputs", "apply_chat_template_kwargs"}
_OF_DATA_SET |= {"label", "metadata", "generate_function_path", "custom_rm_path", "train_metadata"}
"""The fields of a sample that is played again, since a column of its rollout is not plain data."""


class CheckpointedDataSource:
    """slime's data source with a buffer that is saved.

    Attributes:
        buffer: returned groups.
        in_progress: maps a group in flight to the group with its finished rollouts; our rollout function sets it before
            it takes a group.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        inner = getattr(args, "rollouts_inner_data_source_path", None) or _INNER.format(family().package)
        self.inner = load_function(inner)(args)
        path = getattr(args, "buffer_filter_path", None)
        self.buffer_filter = filters.pop_first if path is None else load_function(path)
        self.buffer: list[list[Any]] = []
        self.in_progress: Callable[[list[Any]], list[Any]] | None = None
        self._out: list[list[Any]] = []

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Take groups from the buffer first, then from the data set.

        Raises:
            ConfigError: a sample of the data set has a value that no checkpoint can have.
        """
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        if len(groups) < num_samples:
            new = self.inner.get_samples(num_samples - len(groups))
            for sample in leaves(list(new)):
                check_plain(sample)
            groups = [*groups, *new]
        if self.in_progress is not None:
            self._out += groups
        return groups

    def add_samples(self, samples: Sequence[list[Any]]) -> None:
        """Put returned groups into the buffer.

        Raises:
            ConfigError: a group is not a list of ``n_samples_per_prompt`` samples.
        """
        size = self.args.n_samples_per_prompt
        for group in samples:
            if not isinstance(group, list) or len(group) != size:
                raise ConfigError.of("add_samples(samples)", group, f"groups of {size} samples")
        self.done(samples)
        self.buffer += samples

    def done(self, groups: Sequence[list[Any]]) -> None:
        """Mark groups as in a batch or lost: checkpoints no longer contain them."""
        ended = {_key(group) for group in groups}
        self._out = [group for group in self._out if _key(group) not in ended]

    def save(self, rollout_id: int) -> None:
        """Save the cursor of the data set, and every group that is in no batch yet.

        A value that a function has set on a sample and that is not plain data is left out, with a warning; a rollout
        with such a value in a column is saved without its response, and is played again.
        """
        import torch

        self.inner.save(rollout_id)
        in_flight = [] if self.in_progress is None else [self.in_progress(group) for group in self._out]
        groups = [*in_flight, *self.buffer]
        path = _path(self.args.save, rollout_id)
        images: dict[str, bytes] = {}
        left_out: list[str] = []
        columns = records().sample.__dataclass_fields__.keys() - _OF_DATA_SET

        def plain(sample: Any) -> dict[str, Any]:
            data, lost = only_plain(stored(sample.to_dict(), images))
            left_out.extend(f"slime sample {sample.index}.{place}" for place in lost)
            if columns & {re.split(r"[\[ ]", place, maxsplit=1)[0] for place in lost}:
                data = {name: data[name] for name in _OF_DATA_SET if name in data} | {"status": "pending"}
            return data

        with replacing(Path(path)) as temporary:  # a process that is killed meanwhile leaves the last file complete
            torch.save({"groups": [[plain(sample) for sample in group] for group in groups]}, temporary)
        if left_out:
            named = ", ".join(left_out[:_NAMED])
            more = len(left_out) - _NAMED
            _LOG.warning("%s: left out, since it is not plain data: %s%s", path, named, f", {more} more" * (more > 0))

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state of :meth:`save`; groups that were in flight come out first."""
        self.inner.load(rollout_id)
        if self.args.load is None or not os.path.exists(path := _path(self.args.load, rollout_id)):
            return
        import torch

        kind = records().sample
        try:
            with torch.serialization.safe_globals([*_ARRAYS, *SAFE]):  # loading runs no code of the file
                saved = torch.load(path, weights_only=True)["groups"]
        except pickle.UnpicklingError as error:  # torch names the object, or writes a message of several lines
            found = re.search(r"(?:GLOBAL|class|allowlist) `?([\w.]+)", str(error))
            reason = f"an object of {found[1]}" if found else str(error).partition("\n")[0]
            raise ConfigError(f"{path}: got {reason}; expected tensors, arrays and plain data only") from error
        self.buffer = [[kind.from_dict(restored(sample)) for sample in group] for group in saved]
        self._out = []


def _key(group: list[Any]) -> Any:
    """The identity of a group: its ``group_index``, or else that of its first sample."""
    first = group[0]
    return ("object", id(first)) if first.group_index is None else ("group", first.group_index)


def _path(folder: str, rollout_id: int | None) -> str:
    return os.path.join(folder, f"rollout/rollouts_buffer_{rollout_id}.pt")
