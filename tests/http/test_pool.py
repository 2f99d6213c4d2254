"""Connection pool; reuse and expiry are tested through ``HttpClient`` in ``test_client.py``."""

from __future__ import annotations

import gc

import pytest

from rollouts.http.pool import Pool
from rollouts.http.request import Origin
from tests.raw_server import Visit, raw_server


async def test_a_pool_that_is_closed_while_connecting_opens_no_connection() -> None:
    """The connect call raises, and no socket stays open."""

    async def handle(visit: Visit) -> None:
        await visit.ended()

    pool = Pool(connect_seconds=5.0, idle_seconds=4.0)
    async with raw_server(handle) as port:
        pool.close()
        with pytest.raises(ConnectionAbortedError):
            await pool.connect(Origin("127.0.0.1", port, False))
    gc.collect()
