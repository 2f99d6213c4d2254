"""Which rollout each batch waited for, and what that rollout did meanwhile.

A batch is sealed when its last group has settled. It waited for one rollout from the end of the last of the others on;
the span of that rollout with the greatest part in this time is what held it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from rollouts.concurrency.times import Span
from rollouts.training.types import Sample, by_rollout

__all__ = ["Batches", "HeldUp", "as_rows"]


@attrs.frozen
class HeldUp:
    """The activity that one batch waited for."""

    batch: int
    group: int
    sample: int
    """Position in the group."""
    activity: str
    name: str
    seconds: float
    """From the end of the last of the other rollouts to the end of this one."""


@attrs.frozen
class _Rollout:
    ended: float
    group: int
    sample: int
    spans: Sequence[Span]


class Batches:
    """The last two rollouts of each batch, of all that were added."""

    def __init__(self) -> None:
        self._last: dict[int, list[_Rollout]] = {}

    def add(self, batch: int | None, group: int, samples: Sequence[Sample]) -> None:
        """Add the samples of a group; groups in no batch do not count."""
        if batch is None:
            return
        last = self._last.setdefault(batch, [])
        positions = {id(sample): position for position, sample in enumerate(samples)}
        for branches in by_rollout(samples):
            timed = [(span, positions[id(branch)]) for branch in branches for span in branch.times]
            if timed:
                latest, position = max(timed, key=lambda item: item[0].ended)
                last.append(_Rollout(latest.ended, group, position, [span for span, _ in timed]))
                last.sort(key=lambda rollout: rollout.ended)
                del last[:-2]

    def held_up(self) -> list[HeldUp]:
        """One entry for each batch of two rollouts or more that have times."""
        return [_held_up(batch, *last) for batch, last in sorted(self._last.items()) if len(last) == 2]


def _held_up(batch: int, other: _Rollout, last: _Rollout) -> HeldUp:
    def overlap(span: Span, began: float, ended: float) -> float:
        return max(0.0, min(span.ended, ended) - max(span.began, began))

    def part(span: Span) -> float:
        """Seconds within the wait; a step counts without its tools, which have their own spans."""
        began, ended = max(span.began, other.ended), min(span.ended, last.ended)
        tools = [one for one in last.spans if one.activity == "tool"] if span.activity == "environment" else []
        return ended - began - sum(overlap(one, began, ended) for one in tools)

    longest = max(last.spans, key=part)
    seconds = last.ended - other.ended
    return HeldUp(batch, last.group, last.sample, longest.activity, longest.name, seconds)


def as_rows(found: Iterable[HeldUp]) -> list[list[Any]]:
    """Plain data, in the order of the fields."""
    return [[*attrs.astuple(one)[:-1], round(one.seconds, 4)] for one in found]
