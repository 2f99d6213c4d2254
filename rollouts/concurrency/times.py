"""The timeline of a rollout: spans of wall-clock time, stored in some 24 bytes each.

Invariant: a timeline only grows. Times are seconds since 1970 by one clock of the process, which does not go back when
the clock of the machine is set: two spans of one process are in the order in which they happened.
"""

from __future__ import annotations

import functools
import math
import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from rollouts.errors import ConfigError

__all__ = ["Activity", "Span", "Timeline", "checked_spans", "now"]

_START = time.time() - time.monotonic()

Activity: TypeAlias = Literal["queued", "generating", "environment", "tool", "reward"]
"""The activity of a rollout: ``queued`` before its request was sent (no free slot, a pause, a retry, an outage), was
``generating`` at a server, was in a method of its ``environment`` (``start``, ``step``, ``snapshot``), in a ``tool`` of
a step, or in its ``reward`` function."""

ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


def now() -> float:
    """Seconds since 1970."""
    return _START + time.monotonic()


class Span(NamedTuple):
    """One stretch of time."""

    activity: Activity
    name: str
    """The server, the method of the environment, the tool, or the reward function."""
    began: float
    """Seconds since 1970."""
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


class Timeline:
    """The spans of a rollout, in the order in which they ended."""

    __slots__ = ("_names", "_numbers")

    def __init__(self, spans: Iterable[Iterable[Any]] = ()) -> None:
        self._names: list[tuple[Activity, str]] = []
        self._numbers = array("d")
        """For each span the number of its name, its begin and its seconds."""
        for span in checked_spans(spans):
            self.add(*span)

    def __repr__(self) -> str:
        return f"<Timeline of {len(self)} spans>"

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def __iter__(self) -> Iterator[Span]:
        return self.since(0)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Timeline) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows

    def since(self, first: int) -> Iterator[Span]:
        """The spans from number ``first`` on."""
        numbers = self._numbers
        for at in range(3 * first, len(numbers), 3):
            activity, name = self._names[int(numbers[at])]
            yield Span(activity, name, numbers[at + 1], numbers[at + 2])

    def add(self, activity: Activity, name: str, began: float, seconds: float) -> None:
        """Append a span."""
        key = _shared(activity, name)
        if key not in self._names:
            self._names.append(key)
        self._numbers.extend((self._names.index(key), began, seconds))

    def after(self, span: Span) -> Timeline:
        """A timeline with a span before these."""
        longer = Timeline()
        longer._names = list(self._names)
        longer.add(*span)
        longer._numbers.extend(self._numbers)
        return longer

    def to_list(self, first: int = 0) -> list[list[Any]]:
        """Plain data, to the tenth of a millisecond; the inverse of the constructor."""
        return [[*span[:2], round(span.began, 4), round(span.seconds, 4)] for span in self.since(first)]


@functools.lru_cache(maxsize=1024)
def _shared(activity: Activity, name: str) -> tuple[Activity, str]:
    """One tuple for all timelines."""
    return activity, name


def checked_spans(spans: Iterable[Iterable[Any]]) -> tuple[Span, ...]:
    """Spans of user code or of a file.

    Raises:
        ConfigError: a value is not a span.
    """
    return () if type(spans) is tuple and not spans else tuple([_checked(span) for span in spans])


def _checked(span: Iterable[Any]) -> Span:
    values = tuple(span)
    if len(values) == 4 and values[0] in ACTIVITIES and isinstance(values[1], str):
        floats = type(values[2]) is type(values[3]) is float
        numbers = floats or (isinstance(values[2], int | float) and isinstance(values[3], int | float))
        if numbers and -math.inf < values[2] < math.inf and -math.inf < values[3] < math.inf:  # JSON has no others
            if floats and type(span) is Span:
                return span
            return Span(values[0], values[1], float(values[2]), float(values[3]))
    raise ConfigError.of("times", values, f"one of {', '.join(ACTIVITIES)}, a name, the begin, and the seconds")
