"""The saved state of a data buffer.

Invariant: a state that :meth:`BufferState.check` accepts is one that a buffer over the same data can have: each group
index that is put back was handed out, and has the prompt that it had. This module changes no buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from rollouts.errors import ConfigError
from rollouts.training.data_buffer import DataBuffer

__all__ = ["BufferState"]

CLASS = "class"
"""The entry of a sampler's saved state with the name of its class."""


@attrs.frozen
class BufferState:
    """Saved state of a buffer; :meth:`to_dict` returns plain values for JSON."""

    cursor: int
    epoch: int
    next_group_index: int
    leftovers: tuple[tuple[int, int], ...]
    """``(position in the data, group index)`` of prompts that were put back."""
    fingerprint: int
    """Checksum of seed and prompts, so that a state is not loaded with other data."""
    sampler: dict[str, Any] | None = None
    """The name of the sampler's class and its state."""
    metadata: int | None = None
    """Checksum of the metadata of all prompts; ``None`` in a state of an earlier version, which is not compared."""

    def to_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BufferState:
        """Create a state from the output of :meth:`to_dict`.

        Raises:
            ConfigError: a field is missing, unknown, or of a wrong type.
        """
        unknown = data.keys() - {field.name for field in attrs.fields(cls)}
        if unknown:
            raise ConfigError.of("BufferState", sorted(unknown), "fields of a buffer's state")
        try:
            return msgspec.convert(dict(data), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"BufferState: {error}") from None

    def check(self, buffer: DataBuffer) -> None:
        """Check that this is a state of the buffer's data, seed and sampler.

        Raises:
            ConfigError: it is of another buffer, or no buffer has such numbers.
        """
        for name, now in (("fingerprint", buffer.fingerprint), ("metadata", buffer.metadata_checksum)):
            if getattr(self, name) not in (now, None):
                raise ConfigError.of(f"BufferState.{name}", getattr(self, name), f"{now}, that of this data")
        sampler = None if buffer.sampler is None else type(buffer.sampler).__name__
        if self.sampler is not None and self.sampler.get(CLASS) != sampler:
            raise ConfigError.of("BufferState.sampler", self.sampler.get(CLASS), f"{sampler}, the buffer's sampler")
        size = len(buffer)
        if not 0 <= self.cursor <= size:
            raise ConfigError.of("BufferState.cursor", self.cursor, f"0 to {size}, the number of prompts")
        if self.epoch < 0:
            raise ConfigError.of("BufferState.epoch", self.epoch, "0 or more")
        taken = self.epoch * size + self.cursor
        if self.next_group_index != taken:
            raise ConfigError.of("BufferState.next_group_index", self.next_group_index, f"{taken}, the prompts taken")
        self._check_leftovers(buffer, size)

    def _check_leftovers(self, buffer: DataBuffer, size: int) -> None:
        in_epochs = buffer.positions_in_epochs()
        before = -1
        for position, group_index in sorted(self.leftovers, key=lambda entry: entry[1]):
            fits = before < group_index < self.next_group_index
            if fits:  # else no epoch has this index
                fits = 0 <= position < size if self.sampler is not None else position == in_epochs(group_index)
            if not fits:
                expected = f"the position of each prompt, by its own group index below {self.next_group_index}"
                raise ConfigError.of("BufferState.leftovers", [position, group_index], expected)
            before = group_index
