"""The protocol of samplers.

Invariant of every sampler: its state is a function of the draws and of the calls of ``observe`` since ``begin``, in
their order. A run records both in this order, so that a resumed run continues with the same state. A sampler needs no
random state: its choice depends on the seed, on the draw and on its state only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollouts.base.validators import finite
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError

__all__ = ["Sampler", "sampler_metrics"]


class Sampler(Protocol):
    """Chooses the prompt of each group."""

    def begin(self, prompts: Sequence[Prompt], seed: int | None) -> None:
        """Start from the beginning, with these data.

        Args:
            prompts: in the order of the data; a position is an index into them.
            seed: that of the data buffer; ``None`` keeps the order of the data.

        Raises:
            ConfigError: the sampler does not fit the data.
        """

    def next(self, draw: int) -> int:
        """Choose a prompt, and change the state as :meth:`drawn` does.

        Args:
            draw: the index of the group; each draw has the next one.

        Returns:
            The position of the prompt.
        """
        ...

    def drawn(self, draw: int, position: int) -> None:
        """Change the state as :meth:`next` did, which returned ``position`` in an earlier process."""

    def observe(self, position: int, rewards: Sequence[float | None]) -> None:
        """Note the rewards of the rollouts of one group, which the filter kept or dropped; never of a failed one."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers for the metrics of a batch; the run adds ``sampler/`` to their names."""
        ...

    def describe(self) -> dict[str, Any]:
        """The name and the numbers of the sampler as plain values, which a resumed run must keep."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values for JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`state_dict`, after :meth:`begin` with the same data."""


def sampler_metrics(sampler: object, found: object) -> dict[str, float]:
    """The numbers of a sampler, with their prefix, from what its :meth:`Sampler.metrics` returned.

    Raises:
        ConfigError: it returned something else than numbers by name.
    """
    place = f"{type(sampler).__name__}.metrics()"
    if not isinstance(found, Mapping):
        raise ConfigError.of(place, found, "a dict of numbers by name, empty if the sampler has none")
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise ConfigError.of(f"{place}, a key", name, "a string")
        number = value if isinstance(value, int | float) else finite(value)
        if number is None:
            raise ConfigError.of(f"{place}[{name!r}]", value, "a number")
        numbers[f"sampler/{name}"] = number
    return numbers
