"""The saved state of a data buffer.

Invariant: if :meth:`BufferState.check` accepts a state, a buffer over the same data can have it: each group index that
is put back was handed out, and has the prompt that it had. This module knows no buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from rollouts.errors import ConfigError

__all__ = ["BufferState", "sampler_entry"]

CLASS = "class"
"""The entry of a sampler's saved state with the name of its class."""


def sampler_entry(sampler: object, state: object) -> dict[str, Any]:
    """The entry of a sampler in a saved state; raises ConfigError if its ``state_dict`` returned no dict."""
    name = type(sampler).__name__
    if not isinstance(state, Mapping):
        raise ConfigError.of(f"{name}.state_dict()", state, "a dict, empty if the sampler has no state")
    return {CLASS: name, **state}


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

    def check(self, now: BufferState, size: int, position_of: Callable[[int], int]) -> None:
        """Check that a buffer can have this state.

        Args:
            now: the buffer's present state.
            size: number of its prompts.
            position_of: the position that a group index has without a sampler.

        Raises:
            ConfigError: it is a state of other data, another seed or another sampler, or no buffer has such numbers.
        """
        for name in ("fingerprint", "metadata"):
            saved, known = getattr(self, name), getattr(now, name)
            if saved not in (known, None):
                raise ConfigError.of(f"BufferState.{name}", saved, f"{known}, that of this data")
        sampler = None if now.sampler is None else now.sampler[CLASS]
        if self.sampler is not None and self.sampler.get(CLASS) != sampler:
            raise ConfigError.of("BufferState.sampler", self.sampler.get(CLASS), f"{sampler}, the buffer's sampler")
        if not 0 <= self.cursor <= size:
            raise ConfigError.of("BufferState.cursor", self.cursor, f"0 to {size}, the number of prompts")
        if self.epoch < 0:
            raise ConfigError.of("BufferState.epoch", self.epoch, "0 or more")
        taken = self.epoch * size + self.cursor
        first = self.next_group_index - taken  # evaluations do not begin with 0
        if first < 0:
            expected = f"at least {taken}, the prompts taken"
            raise ConfigError.of("BufferState.next_group_index", self.next_group_index, expected)
        before = -1
        for position, group_index in sorted(self.leftovers, key=lambda entry: entry[1]):
            number = group_index - first
            fits = before < number < taken
            if fits:  # else no epoch has this number
                fits = 0 <= position < size if self.sampler is not None else position == position_of(number)
            if not fits:
                expected = (
                    f"the position of each prompt, by its own group index, {first} to {self.next_group_index - 1}"
                )
                raise ConfigError.of("BufferState.leftovers", [position, group_index], expected)
            before = number
