"""Kinds of failures: failed samples of one cause and message, but for quoted values and numbers."""

from __future__ import annotations

import attrs

from rollouts.errors import Failure
from rollouts.training.failures import same_cause

__all__ = ["FailureKind", "FailureKinds"]


@attrs.define
class FailureKind:
    """The failed samples of one kind."""

    number: int
    """Position among the kinds, in order of their first samples."""
    failure: Failure
    """That of the first sample."""
    group: int | None
    sample: int
    """Number of the first sample in its group."""
    count: int = 0


class FailureKinds:
    """Collects failures by kind."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], FailureKind] = {}

    def add(self, failure: Failure, group: int | None, sample: int) -> FailureKind:
        """Count the failure of a sample, and return its kind."""
        key = failure.cause, same_cause(failure)
        kind = self._found.setdefault(key, FailureKind(len(self._found), failure, group, sample))
        kind.count += 1
        return kind

    @property
    def kinds(self) -> list[FailureKind]:
        """The kinds in order of their first samples."""
        return list(self._found.values())
