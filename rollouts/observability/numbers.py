"""Current metrics of a run: accounting, tokens, caches, waits, seconds by stage, lag.

Invariant: it only reads counters that exist anyway; a run that is not observed pays nothing. This module knows no
export format.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import attrs

from rollouts.concurrency.boundary import abandoned, waits
from rollouts.errors import Kind
from rollouts.inference.policy import ServerPolicy
from rollouts.observability.lag import LoopLag
from rollouts.renderer import Renderer
from rollouts.training.manager import AsyncRolloutManager

__all__ = ["numbers_of"]


def numbers_of(
    manager: AsyncRolloutManager,
    *,
    policies: Iterable[ServerPolicy] = (),
    renderer: Renderer | None = None,
    lag: LoopLag | None = None,
) -> dict[str, float]:
    """Metrics by name.

    Args:
        manager: the run's manager.
        policies: the policies that send its requests.
        renderer: the renderer that its rollouts share.
        lag: the lag of its event loop.

    Returns:
        ``prompts/…`` (accounting), ``batches``, ``sampled_tokens``, ``rollouts``, ``requests/…``, ``tokens/…`` (prompt,
        cached, sampled, tokenised), ``prefix_cache_hit_rate``, ``waits/…`` (number of waits by kind, and seconds of the
        longest), ``batch/…`` (metrics of the last batch, seconds of generation and environment among them),
        ``loop_lag/…`` in seconds, ``abandoned_threads``.
    """
    numbers: dict[str, float] = {f"prompts/{name}": count for name, count in attrs.asdict(manager.accounting).items()}
    totals = manager.run_metrics
    numbers |= {"batches": manager.batches, "sampled_tokens": totals.sampled_tokens, "rollouts": totals.rollouts}
    numbers |= {f"batch/{name}": value for name, value in manager.metrics.items() if not name.startswith("prompts/")}
    numbers |= _of_policies(list(policies)) | _of_waits()
    numbers["abandoned_threads"] = len(abandoned())
    if renderer is not None:
        numbers["tokens/tokenised"] = renderer.encoded_tokens
    if lag is not None:
        numbers |= {"loop_lag/p50": lag.quantile(0.5), "loop_lag/p99": lag.quantile(0.99), "loop_lag/max": lag.longest}
    return numbers


def _of_policies(policies: list[ServerPolicy]) -> dict[str, float]:
    if not policies:
        return {}
    every = [policy.totals for policy in policies]
    prompt, cached = sum(one.prompt_tokens for one in every), sum(one.cached_tokens for one in every)
    return {
        "requests/sent": sum(one.requests for one in every),
        "requests/retried": sum(one.retries for one in every),
        "requests/aborted": sum(one.aborts for one in every),
        "requests/in_flight": sum(policy.in_flight for policy in policies),
        "requests/waiting": sum(policy.waiting for policy in policies),
        "sessions/moved": sum(policy.moved for policy in policies),
        "tokens/prompt": prompt,
        "tokens/cached": cached,
        "tokens/sampled": sum(one.sampled_tokens for one in every),
        "prefix_cache_hit_rate": cached / prompt if prompt else 0.0,
    }


_COUNTED: Mapping[Kind, str] = {"environment_start": "environment", "environment_step": "environment"}
"""Names of kinds of waits in metrics, where they differ."""


def _of_waits() -> dict[str, float]:
    """Number of waits, and seconds of the longest, by kind."""
    numbers: dict[str, float] = {}
    now = time.monotonic()
    for wait in waits():  # oldest first
        if wait.kind == "rollout":
            continue  # it contains other waits, which are listed
        kind = _COUNTED.get(wait.kind, wait.kind)
        numbers[f"waits/{kind}"] = numbers.get(f"waits/{kind}", 0) + 1
        numbers.setdefault(f"waits/{kind}_seconds", now - wait.since)
    return numbers
