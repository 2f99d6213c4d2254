"""The trained replies of a row, for trainers that take a prompt and a reply at a time.

Invariant: the mask decides what is trained, and the records of completions only where one reply ends and the next
begins. This module knows no trainer.
"""

from __future__ import annotations

import itertools

from rollouts.training.rows import segments
from rollouts.training.types import Sample

__all__ = ["trained_replies"]


def trained_replies(sample: Sample) -> list[tuple[int, int, bool]]:
    """The replies as ``(start, stop, cut)``, in order: the runs of the mask, split where a completion begins or ends.

    A completion that the mask leaves out is context of the next. ``cut``: the server ended it for its length.

    Raises:
        ConfigError: the sample has no sampled token.
    """
    edges = {edge for one in sample.completions for edge in (one.start, one.stop)}
    cut_at = {one.stop for one in sample.completions if one.finish_reason == "length"}
    replies = []
    for start, stop, sampled in segments(sample):
        bounds = sorted({start, stop, *(edge for edge in edges if start < edge < stop)}) if sampled else ()
        replies += [(first, last, last in cut_at) for first, last in itertools.pairwise(bounds)]
    return replies
