"""Export of a run's metrics to Prometheus over HTTP (extra: ``prometheus``).

Invariant: a scrape runs in another thread and reads a snapshot that the run's loop takes every second: it cannot stall
the loop, and it sees consistent values.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio

from rollouts.base.extras import imported
from rollouts.errors import ConfigError

__all__ = ["MetricsServer", "prometheus_client", "serving_metrics"]

REFRESH_SECONDS = 1.0
_COUNTERS = ("requests/sent", "requests/retried", "requests/aborted", "sessions/moved", "tokens/", "rollouts")
"""Prefixes of metrics that only grow; all others are gauges."""
_GAUGES = ("tokens/mean",)


class MetricsServer:
    """Collector of the latest metrics; :func:`serving_metrics` serves it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._latest: Mapping[str, float] = {}

    async def run(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Take a snapshot of the metrics every second until cancelled."""
        while True:
            self._latest = dict(read())
            await anyio.sleep(REFRESH_SECONDS)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; prometheus_client calls this at a scrape."""
        latest = self._latest
        core = importlib.import_module("prometheus_client.core")
        families: dict[str, list[str]] = {}
        for name in latest:
            metric = "rollouts_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            families.setdefault(f"{metric.removesuffix('_total')}_total" if _counts(name) else metric, []).append(name)
        for metric, names in families.items():
            # Names that differ in punctuation alone, such as those of two environments, are one metric with a label.
            labels = ["name"] if len(names) > 1 else []
            kind = core.CounterMetricFamily if all(map(_counts, names)) else core.GaugeMetricFamily
            family = kind(metric, f"{' and '.join(names)} of the run", labels=labels)
            for name in names:
                family.add_metric([name] if labels else [], latest[name])
            yield family


def _counts(name: str) -> bool:
    return name.startswith(_COUNTERS) and name not in _GAUGES


def prometheus_client() -> Any:
    """The package, imported; raises as :func:`~rollouts.base.extras.imported`."""
    return imported("prometheus_client", "prometheus-client", "prometheus")


@contextmanager
def serving_metrics(port: int, host: str = "127.0.0.1") -> Iterator[MetricsServer]:
    """Serve ``/metrics`` in a thread while the context lasts.

    Args:
        port: 0 selects a free port; see :attr:`MetricsServer.port`.
        host: the address to listen on.

    Raises:
        ConfigError: prometheus-client is not installed, or the port is taken.
    """
    client = prometheus_client()
    registry = client.CollectorRegistry()
    metrics = MetricsServer(port)
    registry.register(metrics)
    try:
        server, thread = client.start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise ConfigError.of("--metrics-port", port, f"a port that is free ({error})") from error
    metrics.port = server.server_port
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
