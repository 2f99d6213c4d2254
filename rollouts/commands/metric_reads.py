"""The names in ``sample.metrics`` that rewards and filters read, so that a misspelled one is found before a run.

Invariant: reading never changes a value. Only a name that no rollout of the rehearsal has, and that this package does
not count, is a doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["ReadNames"]


class ReadNames:
    """The names that the functions of a recipe read from ``sample.metrics``."""

    def __init__(self) -> None:
        self._read: dict[str, None] = {}
        self._seen: set[str] = set()

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a sample, which notes the names that are read."""
        self._seen.update(metrics)
        return _Noted(metrics, self)

    def note(self, name: object) -> None:
        """A function reads this name, and the sample does not have it."""
        if isinstance(name, str):
            self._read[name] = None

    def known(self) -> list[str]:
        """The names that some sample of the rehearsal has, and the names that this package counts."""
        from rollouts.training.metric_names import OF_SAMPLES  # here: most recipes misspell no name

        return sorted({*self._seen, *OF_SAMPLES})

    def doubts(self) -> list[str]:
        """A line for each name that was read and that nothing is known to count."""
        unseen = [name for name in self._read if name not in self._seen]
        if not unseen:
            return []
        from rollouts.base.nearest import did_you_mean
        from rollouts.training.metric_names import is_counted

        return [
            f"sample.metrics[{name!r}] is read{did_you_mean(name, self.known())}: no rollout of the rehearsal has it, "
            "and it is not a name of docs/metrics.md"
            for name in unseen
            if not is_counted(name)
        ]


class _Noted(dict[str, float]):
    """Metrics of one sample; a name that they lack is noted, and with ``[]`` an error that names the nearest."""

    def __init__(self, metrics: Mapping[str, float], read: ReadNames) -> None:
        super().__init__(metrics)
        self._read = read

    def __missing__(self, name: str) -> float:
        from rollouts.base.nearest import did_you_mean

        self._read.note(name)
        others = f"; it has {', '.join(self)}"
        raise KeyError(f"sample.metrics has no {name!r}{did_you_mean(str(name), self._read.known()) or others}")

    def get(self, name: Any, default: Any = None) -> Any:
        if name not in self.keys():
            self._read.note(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            self._read.note(name)
            return False
        return True

    def __deepcopy__(self, memo: Any) -> _Noted:
        return _Noted(self, self._read)

    def __reduce_ex__(self, _: Any) -> tuple[Any, Iterable[Any]]:
        return dict, (dict(self),)
