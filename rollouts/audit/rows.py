"""One row of a foreign dump, in the terms that the laws need, and the checks that a dump may or may not permit.

Invariant: a field that the dump lacks is ``None`` and never a default value: a check without its premise is listed as
not judged. Readers fill rows; this module reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from rollouts.training.sample_laws import Violation

__all__ = ["CHECKS", "AuditedRow", "Check", "Finding", "Kind", "Reader", "Span"]

Kind = Literal["broken", "unusual"]
Span = tuple[int, int]

Check = Literal[
    "requests",
    "text",
    "vocabulary",
    "mask",
    "logprobs",
    "roles",
    "once",
    "rows",
    "rewards",
    "failures",
    "groups",
    "advantages",
    "weights",
]

CHECKS: Mapping[Check, tuple[int, str, str]] = {
    "requests": (1, "a request begins with the ids of the request and reply before it", "the ids of each request"),
    "text": (1, "stored text is the text of its ids", "token ids with their text"),
    "vocabulary": (1, "an id is below the size of the vocabulary", "token ids"),
    "mask": (2, "the mask of 0 and 1 is as wide as the tokens", "a loss mask"),
    "logprobs": (2, "a trained token has a finite logprob of at most 0", "logprobs of trained tokens"),
    "roles": (2, "the mask covers replies, and no header, tool result or padding", "token ids with a loss mask"),
    "once": (3, "a reply is trained in one branch", "several sequences of one rollout"),
    "rows": (4, "a rollout is stored once, in a readable row", "rollouts with a name or number"),
    "rewards": (4, "a reward is a finite number", "rewards"),
    "failures": (4, "a failed rollout is not trained with a reward", "the status of a rollout"),
    "groups": (5, "groups have one size, one prompt and one label", "groups"),
    "advantages": (5, "advantages are those of the group's rewards", "advantages of known rewards"),
    "weights": (8, "a logprob is that of the weights", "token ids with logprobs"),
}
"""For each check its law, its rule, and what of a row it needs."""


@attrs.frozen
class Finding:
    """A broken rule, or an unusual value, and its location."""

    kind: Kind
    check: Check
    violation: Violation

    @classmethod
    def of(cls, kind: Kind, check: Check, place: str, got: Any, expected: str) -> Finding:
        return cls(kind, check, Violation(CHECKS[check][0], place, got, expected))

    def __str__(self) -> str:
        one = self.violation
        return f"{self.kind}, law {one.law} ({self.check}): {one.place}: got {one.got}; expected {one.expected}"


@attrs.define(eq=False)
class AuditedRow:
    """One training sequence of a dump, or one scored text. Columns are as wide as the tokens if the dump is sound."""

    place: str
    """File, row or line, and the names that the dump gives."""
    tokens: Sequence[int] | None = None
    mask: Sequence[Any] | None = None
    logprobs: Sequence[float | None] | None = None
    trainer_logprobs: Sequence[float | None] | None = None
    """Logprobs of the same tokens by the trainer's own forward pass."""
    texts: Sequence[tuple[int, int, str]] = ()
    """Positions ``start`` to ``stop`` with their stored text."""
    group: Hashable | None = None
    rollout: Hashable | None = None
    """Equal for the branches of one rollout only."""
    prompt: Any = None
    label: Any = None
    rewards: Sequence[float | None] | None = None
    """The numbers of its reward; ``None`` within it for a missing one. ``None`` if the format has no rewards."""
    failed: str | None = None
    """Why the rollout failed."""
    has_status: bool = False
    trained: bool = True
    """Whether the trainer of this dump trains the row."""
    ended: bool = False
    """Whether the dump says that the last reply is complete."""
    advantage: float | None = None
    has_images: bool = False
    findings: list[Finding] = attrs.field(factory=list)
    """Of the reader: rules of the form, such as a column that is not as wide as its node."""
    judged: set[Check] = attrs.field(factory=set)
    """The checks that the reader made."""


@attrs.frozen
class Reader:
    """A format of dumps. Packages add one by an entry point in the group ``rollouts.audit_readers``."""

    read: Callable[[Path], Iterator[AuditedRow]]
    """Reads a file, row by row.

    Raises:
        ConfigError: the file is not of this format.
    """
    suffixes: tuple[str, ...]
    """The names of files in a folder that are read."""
    lacks: Mapping[Check, str] = attrs.field(factory=dict)
    """Why a check cannot be judged from this format, a sentence each."""
    fixed_groups: bool = False
    """Whether the system writes whole groups of one size."""
    keeps_last: bool = False
    """Whether a file has the last rows of a log, so that its first group may lack rows."""
