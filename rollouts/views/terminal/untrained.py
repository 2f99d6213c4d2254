"""The line on the sampled tokens of programs that are not trained, at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rollouts.base.terminal import visible

__all__ = ["untrained_line"]

_KEPT_BY = {
    "side_call": 'side_calls="train"',
    "dropped": 'siblings="keep"',
    "by_hand": 'by_hand="train"',
    "constrained": 'constrained="train"',
}
"""The option of ``Training`` with which replies that are not trained by default are."""
_LEAST_SHARE = 0.005
"""Of the sampled tokens: what is not trained for a reason is printed from here on."""


def untrained_line(batches: Sequence[Mapping[str, float]]) -> str:
    """A line on the sampled tokens of programs that are not trained, by reason; empty if there are few."""
    prefix = "episode/untrained_tokens/"
    sampled = sum(batch.get("episode/sampled_tokens", 0.0) for batch in batches)
    tokens: Counter[str] = Counter()
    for batch in batches:
        tokens.update({name.removeprefix(prefix): mean for name, mean in batch.items() if name.startswith(prefix)})
    shares = [(reason, mean / sampled) for reason, mean in tokens.most_common() if mean > _LEAST_SHARE * sampled]
    if not sampled or not shares:
        return ""
    reasons = [f"{share:.1%} {reason}" + _kept_by(reason) for reason, share in shares]
    return visible(
        f"{sum(share for _, share in shares):.1%} of the sampled tokens are not trained: {', '.join(reasons)}\n"
    )


def _kept_by(reason: str) -> str:
    return f" (Training({_KEPT_BY[reason]}) keeps them)" if reason in _KEPT_BY else ""
