"""Aborts of all requests on servers, until they are idle.

Invariant: :func:`abort_until_idle` returns only if no request runs or waits on the server. Otherwise it raises.

This module is imported on use: few runs end the requests of other clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import anyio

from rollouts.concurrency.boundary import boundary
from rollouts.errors import EndpointUnavailable, without_password
from rollouts.http.answers import message_of
from rollouts.http.client import ConnectFailed, HttpClient
from rollouts.inference.aborts import SGLANG_ABORTS, AbortRoutes, post_abort, workers_behind

__all__ = ["abort_until_idle"]


async def abort_until_idle(
    transport: HttpClient,
    url: str,
    headers: Mapping[str, str],
    routes: AbortRoutes = SGLANG_ABORTS,
    *,
    seconds: float,
    grace: float = 0.0,
    interval: float = 0.2,
) -> None:
    """Abort the requests of all clients on a server, or on the workers behind a router, until it is idle.

    A request that arrives between an abort and the query of the load is aborted in the next round. A server that
    does not report its load counts as idle after one acknowledged abort. With ``grace``, a server that becomes idle
    within so many seconds is not sent an abort.

    Raises:
        EndpointUnavailable: not acknowledged, or still not idle, within ``seconds``.
    """
    with boundary(EndpointUnavailable, f"aborting all requests on {without_password(url)}", seconds=seconds):
        for worker in [*await workers_behind(transport, url, headers)] or [url]:
            if grace and await _becomes_idle(transport, worker, headers, routes, grace, interval):
                continue
            while True:
                status, payload = await post_abort(transport, worker + routes.all, routes.all_body, headers)
                if status != 200:
                    raise EndpointUnavailable(
                        f"requests may still be running: POST {without_password(worker)}{routes.all} returned"
                        f" status {status}: {message_of(payload)}"
                    )
                if not await _is_busy(transport, worker, headers, routes):
                    break
                await anyio.sleep(interval)


async def _becomes_idle(
    transport: HttpClient,
    url: str,
    headers: Mapping[str, str],
    routes: AbortRoutes,
    seconds: float,
    interval: float,
) -> bool:
    """Poll until a server is idle, for at most ``seconds``; return whether it is."""
    for _ in range(math.ceil(seconds / interval)):
        if not await _is_busy(transport, url, headers, routes):
            return True
        await anyio.sleep(interval)
    return False


async def _is_busy(transport: HttpClient, url: str, headers: Mapping[str, str], routes: AbortRoutes) -> bool:
    try:
        status, payload = await transport.get(url + routes.load, headers)
    except ConnectFailed as error:
        if error.refused:
            return False
        raise
    load = routes.read_load(payload) if status == 200 else None
    return load is not None and load.running + load.waiting > 0
