"""Telemetry of ``rollouts run``: Prometheus metrics and OpenTelemetry spans; imported only if one of them is on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import anyio
import attrs

from rollouts.concurrency.task_groups import first_error
from rollouts.inference.shared import shared_policies
from rollouts.observability.lag import LoopLag
from rollouts.observability.numbers import numbers_of
from rollouts.observability.prometheus import prometheus_client, serving_metrics
from rollouts.observability.tracing import trace_api, trace_completions, traced
from rollouts.recipe import Recipe
from rollouts.runs.run import Watch
from rollouts.training.config import RolloutConfig
from rollouts.training.manager import AsyncRolloutManager

__all__ = ["checked_telemetry"]

_Exported: TypeAlias = contextlib.AbstractAsyncContextManager[tuple[RolloutConfig, Watch | None]]


def checked_telemetry(metrics_port: int | None, trace: bool) -> Callable[[Recipe], _Exported]:
    """Telemetry whose packages are installed.

    Args:
        metrics_port: port of the Prometheus endpoint; ``None``: no endpoint.
        trace: whether to record OpenTelemetry spans.

    Raises:
        ConfigError: a package is not installed.
    """
    if metrics_port is not None:
        prometheus_client()
    if trace:
        trace_api()
    return functools.partial(_exported, metrics_port, trace)


@contextlib.asynccontextmanager
async def _exported(
    metrics_port: int | None, trace: bool, recipe: Recipe
) -> AsyncIterator[tuple[RolloutConfig, Watch | None]]:
    """The config with tracing, and an observer that exports metrics."""
    if trace:
        recipe = attrs.evolve(recipe, config=traced(recipe.config, recipe.name))
        for policy in shared_policies():  # preflight has created the shared policy
            trace_completions(policy)
    if metrics_port is None:
        yield recipe.config, None
        return
    renderer = await anyio.to_thread.run_sync(recipe.renderer)
    with serving_metrics(metrics_port) as metrics:

        async def export_metrics(manager: AsyncRolloutManager) -> None:
            lag = LoopLag()

            def read() -> dict[str, float]:
                return numbers_of(manager, policies=shared_policies(), renderer=renderer, lag=lag)

            async with first_error() as tasks:
                tasks.start_soon(lag.run)
                tasks.start_soon(metrics.run, read)

        yield recipe.config, export_metrics
