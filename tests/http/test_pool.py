"""Connections of one event loop. What is kept, and for how long, is tried through ``Transport``."""

from __future__ import annotations

import gc

import pytest

from rollouts.http.pool import Pool
from rollouts.http.request import Origin
from tests.raw_server import Visit, raw_server


async def test_a_pool_that_was_closed_meanwhile_makes_no_connection() -> None:
    """Whoever was still connecting is told so, and nothing stays open."""

    async def handle(visit: Visit) -> None:
        await visit.ended()

    pool = Pool(connect_seconds=5.0, idle_seconds=4.0)
    async with raw_server(handle) as port:
        pool.close()
        with pytest.raises(ConnectionAbortedError):
            await pool.connect(Origin("127.0.0.1", port, False))
    gc.collect()
