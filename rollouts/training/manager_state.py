"""The state of a manager that a resume needs; nothing that can be recomputed.

Invariant: the accounting of a loaded state adds up, with groups in flight counted as returned. Every prompt that was
taken and not settled is back in the buffer with its group index. This module schedules nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Image
from rollouts.errors import ConfigError
from rollouts.training.buffer_state import BufferState
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.metrics import Accounting
from rollouts.training.types import Sample

__all__ = ["ManagerState"]

_VERSION = 2
_READ = (1, 2)
"""The versions that can be read; the buffer's state of the first one has no sampler."""


@attrs.define(kw_only=True)
class ManagerState:
    """Saved state of a manager."""

    accounting: Accounting
    batches: int
    ready: dict[int, list[Sample]]
    """Samples of accepted groups that are in no batch, by group index."""
    finished: dict[int, dict[int, list[Sample]]]
    """Finished rollouts of groups in flight, by group index and number in the group."""
    attempts: dict[int, int] = attrs.field(factory=dict)
    """Number of failed attempts at rollouts in flight, by index."""
    totals: dict[str, Any] = attrs.field(factory=dict)
    """Totals of :class:`RunMetrics`."""

    def to_dict(self, buffer: DataBuffer) -> dict[str, Any]:
        """Return plain values, including the state of the buffer."""
        return {
            "version": _VERSION,
            "buffer": buffer.save_state().to_dict(),
            "accounting": attrs.asdict(self.accounting),
            "batches": self.batches,
            "ready": {str(number): _plain(samples) for number, samples in self.ready.items()},
            "finished": {
                str(group): {str(number): _plain(samples) for number, samples in rollouts.items()}
                for group, rollouts in self.finished.items()
            },
            "attempts": {str(index): count for index, count in self.attempts.items()},
            "totals": self.totals,
        }

    @classmethod
    def load(cls, data: Mapping[str, Any], buffer: DataBuffer) -> ManagerState:
        """Read the output of :meth:`to_dict`, and restore the buffer.

        Raises:
            ConfigError: another version, damaged, or saved with other data.
        """
        if data.get("version") not in _READ:
            raise ConfigError.of("state_dict.version", data.get("version"), " or ".join(map(str, _READ)))
        try:
            state = cls(
                accounting=msgspec.convert(data["accounting"], Accounting),
                batches=msgspec.convert(data["batches"], int),
                ready={int(number): _samples(rows) for number, rows in data["ready"].items()},
                finished={
                    int(group): {int(number): _samples(rows) for number, rows in rollouts.items()}
                    for group, rollouts in data["finished"].items()
                },
                attempts={int(index): int(count) for index, count in data["attempts"].items()},
                totals=dict(data["totals"]),
            )
            buffer_state = BufferState.from_dict(data["buffer"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"state_dict: not the output of state_dict() ({type(error).__name__}: {error})") from None
        buffer.load_state(buffer_state)
        return state.with_in_flight_returned()

    def with_in_flight_returned(self) -> ManagerState:
        """Count groups in flight as returned."""
        self.accounting.returned += self.accounting.in_flight
        self.accounting.in_flight = 0
        return self


def _plain(samples: list[Sample]) -> list[dict[str, Any]]:
    return [{**sample.to_dict(), **_urls_of(sample)} for sample in samples]


def _urls_of(sample: Sample) -> dict[str, Any]:
    """The images of a sample: a state has no folder."""
    return {_URLS: [image.url for image in sample.named_images.values()]} if sample.named_images else {}


def _samples(rows: list[dict[str, Any]]) -> list[Sample]:
    samples = []
    for row in rows:
        images = [Image.of(url) for url in row.get(_URLS, ())]
        fields = {name: value for name, value in row.items() if name != _URLS}
        samples.append(Sample.from_dict(fields, {image.sha256: image for image in images}.__getitem__))
    return samples


_URLS = "image_urls"
