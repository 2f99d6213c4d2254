"""Aborts: acknowledged, or an error because the generation may still be running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollouts.dtypes import Endpoint
from rollouts.errors import EndpointUnavailable
from rollouts.http.client import HttpClient
from rollouts.inference.aborts import abort_generation, headers_of
from rollouts.inference.idle import abort_until_idle
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.testing.server import StubServer
from tests.inference.client import Client


@pytest.fixture
async def transport() -> AsyncIterator[HttpClient]:
    transport = HttpClient(connect_seconds=5.0)
    yield transport
    await transport.aclose()


async def test_an_unknown_rid_is_no_error(transport: HttpClient) -> None:
    """The server acknowledges any rid."""
    async with StubServer() as server:
        await abort_generation(transport, server.url, "a" * 32, {})
        assert server.aborted == ["a" * 32]


async def test_a_server_that_is_gone_runs_nothing(transport: HttpClient) -> None:
    """No server listens there any more."""
    async with StubServer() as server:
        url = server.url
    await abort_generation(transport, url, "r", {})


async def test_a_name_that_does_not_resolve_proves_nothing(transport: HttpClient) -> None:
    """The server may still be running."""
    with pytest.raises(EndpointUnavailable):
        await abort_generation(transport, "http://nowhere.invalid", "r", {})


async def test_a_router_without_workers_acknowledges_nothing(transport: HttpClient) -> None:
    """Any of its workers may have been removed while it still runs the request."""
    async with StubServer(workers=[]) as router:
        with pytest.raises(EndpointUnavailable, match="may still be running"):
            await abort_generation(transport, router.url, "r", {})


@pytest.mark.parametrize("first", ["healthy", "refusing", "away"])
async def test_every_worker_of_a_router_gets_the_abort(transport: HttpClient, first: str) -> None:
    """In any order of a healthy, a refusing and an unreachable worker; the abort is not acknowledged."""
    async with StubServer() as healthy, StubServer(workers=[]) as refusing:
        urls = {"healthy": healthy.url, "refusing": refusing.url, "away": "http://no.such.host.invalid:1"}
        order = sorted(urls, key=lambda name: name != first)
        async with StubServer(workers=[urls[name] for name in order]) as router:
            with pytest.raises(EndpointUnavailable, match="a worker of the router: "):
                await abort_generation(transport, router.url, "r", {})
        assert healthy.aborted == ["r"]


async def test_a_worker_that_is_away_does_not_make_its_router_unreachable(client: Client) -> None:
    """A request that may still run there is not sent again; the next one goes to the router."""
    async with StubServer(workers=["http://no.such.host.invalid:1"], faults=["error_500"]) as router:
        policy = client.policy(router.url, max_retries=1)
        with pytest.raises(EndpointUnavailable, match="a worker of the router: "):
            await client.complete(policy)
        assert not policy.servers.workers.all[0].unreachable
        assert len((await client.complete(policy)).tokens) == 3
        await policy.aclose()


async def test_a_dead_worker_is_not_the_death_of_its_router(transport: HttpClient) -> None:
    """Also where the router lists it last."""
    async with StubServer() as dead:
        pass
    async with StubServer() as alive, StubServer(workers=[alive.url, dead.url]) as router:
        assert await abort_generation(transport, router.url, "r", {})
    assert not await abort_generation(transport, router.url, "r", {})


async def test_an_abort_has_the_admin_key(transport: HttpClient) -> None:
    """A server with ``--admin-api-key`` refuses the other key; the message names the option."""
    keys: dict[str, str | None] = {}

    def answer(request: Asked) -> Any:
        keys[request.path] = request.headers.get("Authorization")
        return (401, {"error": "no"}) if keys["/abort_request"] != "Bearer root" else {}

    async with JsonServer(answer) as server:
        endpoint = Endpoint(base_url=server.url, api_key="user", admin_key="root")
        assert await abort_generation(transport, server.url, "r", headers_of(endpoint, admin=True))
        with pytest.raises(EndpointUnavailable, match=r"status 401: no\. Check Endpoint\.admin_key"):
            await abort_generation(transport, server.url, "r", headers_of(endpoint))


async def test_all_requests_are_aborted_until_none_is_left(transport: HttpClient) -> None:
    """On every worker behind the router; a request that is still counted is aborted in another round."""
    counts = [2, 1]

    def load() -> dict[str, float]:
        return {"num_waiting_reqs": counts.pop() if counts else 0}

    async with (
        StubServer(loads=load) as busy,
        StubServer() as plain,
        StubServer(workers=[busy.url, plain.url]) as router,
    ):
        await abort_until_idle(transport, router.url, {}, seconds=5.0, interval=0.0)
        assert (len(busy.aborted), len(plain.aborted)) == (3, 1)


async def test_a_server_that_stays_busy_is_an_error(transport: HttpClient) -> None:
    """A server that refuses the abort is an error, too; a server that has ended runs nothing."""
    async with StubServer(loads=lambda: {"num_running_reqs": 1}) as busy:
        with pytest.raises(EndpointUnavailable, match="aborting all requests"):
            await abort_until_idle(transport, busy.url, {}, seconds=0.1, interval=0.0)
    async with StubServer(workers=[]) as refusing:
        with pytest.raises(EndpointUnavailable, match="may still be running"):
            await abort_until_idle(transport, refusing.url, {}, seconds=5.0)
    await abort_generation(transport, refusing.url, "r", {})
