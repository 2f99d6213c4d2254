"""The completion status of a sample."""

from __future__ import annotations

import enum

__all__ = ["Status"]


class Status(enum.Enum):
    """Completion status of a sample; the values are slime's."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
