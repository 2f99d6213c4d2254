"""Verification of the branches of one rollout that share the first tokens of another.

Invariant: a shared token is the parent's, and is trained in the parent only. This module does not import branching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollouts.training.sample_laws import Stored

__all__ = ["check_tree"]


def check_tree(rows: Sequence[tuple[Stored, str]], broken: Callable[[int, str, Any, str], None]) -> int:
    """Check the rows of one rollout.

    Args:
        rows: of each sample its stored fields, and its place for messages.
        broken: called with law, place, what was found and what was expected, for each violation.

    Returns:
        The number of branches with a parent.
    """
    by_number = {(stored.seat, stored.conversation): stored for stored, _ in rows}
    branches = [(stored, place) for stored, place in rows if stored.parent is not None]
    for stored, place in branches:
        parent, shared = by_number.get((stored.seat, stored.parent or 0)), stored.shared
        if parent is None or parent is stored:
            broken(4, place, f"parent {stored.parent}", "another conversation of its rollout")
        elif not 0 < shared < len(stored.tokens) or stored.tokens[:shared] != parent.tokens[:shared]:
            broken(1, place, f"other first {shared} tokens than its parent", f"those of conversation {stored.parent}")
        if any(stored.loss_mask[:shared]) or any(one.start < shared for one in stored.completions):
            broken(3, place, f"a sampled token among the first {shared}", "none: its parent trains them")
    return len(branches)
