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


class _Idle:
    """An idle connection to nowhere."""

    usable, idle_since = True, 0.0

    def abort(self) -> None:
        self.usable = False


async def test_a_request_closes_no_expired_connections() -> None:
    """Thousands may have expired together: the sweeps close a few in a turn of the loop."""
    pool, origin = Pool(connect_seconds=5.0, idle_seconds=0.0), Origin("127.0.0.1", 1, False)
    connections = [_Idle() for _ in range(3)]
    for connection in connections:
        pool.release(origin, connection)  # type: ignore[arg-type]
    assert pool.pop_idle(origin) is None
    assert all(connection.usable for connection in connections)
    pool.close()
