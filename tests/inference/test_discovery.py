"""Description of the server at a URL."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from aiohttp import web

from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import ServerInfo
from rollouts.inference.discovery import merged
from rollouts.testing.server import StubServer
from tests.inference.client import Client


@pytest.mark.parametrize("old_routes", [False, True])
async def test_an_sglang_server_is_described(client: Client, old_routes: bool) -> None:
    """Version, model, weights and context, by the current or the older routes."""
    async with StubServer(max_context=99, old_routes=old_routes) as server, client.policy(server.url) as policy:
        assert await policy.describe() == ServerInfo("0.5.23", "stub", "v1", 99)


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({"max_req_input_len": 1018, "max_total_num_tokens": 65536}, 1022),  # the end of the context is not used
        ({"max_req_input_len": 494, "max_total_num_tokens": 500}, 498),  # the KV pool is smaller than the context
        ({"max_total_num_tokens": 500}, 498),
        ({"max_total_num_tokens": 65536}, 1024),
        ({"max_req_input_len": None, "max_total_num_tokens": True}, 1024),
    ],
)
async def test_the_room_for_a_request_is_what_context_and_kv_pool_leave(
    client: Client, fields: dict[str, Any], room: int
) -> None:
    """Real servers sample 2 tokens less than the context holds, and no more than the pool holds."""
    info = {"model_path": "stub", **fields}
    async with StubServer(max_context=1024, model_info=info) as server, client.policy(server.url) as policy:
        assert (await policy.describe()).max_context == room


async def test_a_missing_server_is_reported_with_the_fix(client: Client) -> None:
    """The message contains the URL; so does the message of a completion whose wait ends."""
    async with StubServer() as server:
        url = server.url
    async with client.policy(url, max_retries=0, outage_seconds=0) as policy:
        with pytest.raises(EndpointUnavailable, match=rf"no server answers at {url}: .* Start the server, or correct"):
            await policy.describe()
        with pytest.raises(EndpointUnavailable, match=url):
            await client.complete(policy)


async def test_a_server_of_another_kind_is_refused(client: Client) -> None:
    """Missing routes, or other JSON; the message quotes the responses."""
    async with StubServer(model_info=None) as server, client.policy(server.url) as policy:
        with pytest.raises(
            EndpointRefused, match=r"not an SGLang server: GET /model_info returned status 404: .*Expected"
        ):
            await policy.describe()
    async with StubServer(model_info={"hello": 1}) as server, client.policy(server.url) as policy:
        with pytest.raises(EndpointRefused, match=r"returned JSON with version, hello"):
            await policy.describe()


async def site(answer: web.Response) -> tuple[web.AppRunner, str]:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=answer.body, status=answer.status, content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (200, "<html>Welcome to nginx</html>", EndpointRefused, "not an SGLang server: .*Welcome to nginx"),
        (401, '{"error":"who are you"}', EndpointRefused, "who are you. Check Endpoint.api_key"),
        (503, '{"detail":"loading"}', EndpointUnavailable, "status 503: loading. Is it ready?"),
    ],
)
async def test_other_responses_are_distinguished(
    client: Client, status: int, body: str, kind: type[Exception], message: str
) -> None:
    """A web page, a rejected key, and a server that is not ready."""
    runner, url = await site(web.Response(text=body, status=status))
    async with client.policy(url) as policy:
        with pytest.raises(kind, match=message):
            await policy.describe()
    await runner.cleanup()


async def test_workers_agree_on_their_model(client: Client) -> None:
    """The shortest context counts; different models behind one endpoint are a config error."""
    async with StubServer(max_context=9) as one, StubServer(max_context=7) as two:
        async with client.policy(one.url, two.url) as policy:
            assert (await policy.describe()).max_context == 7
    async with StubServer() as one, StubServer(model_info={"model_path": "other"}) as two:
        async with client.policy(one.url, two.url) as policy:
            with pytest.raises(ConfigError, match=r"\['other', 'stub'\]; expected workers that serve one model"):
                await policy.describe()


def test_fields_on_which_workers_differ_are_none() -> None:
    """Two versions of weights are reported as no version."""
    assert merged([ServerInfo(weight_version="a", model="m"), ServerInfo(weight_version="b")]).weight_version is None


async def test_a_dead_server_of_several_is_left_out(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """With a warning that names it; the others describe the endpoint."""
    async with StubServer() as dead:
        pass
    async with StubServer(max_context=7) as alive, client.policy(dead.url, alive.url) as policy:
        assert (await policy.describe()).max_context == 7
    assert f"1 of 2 servers answer: no server answers at {dead.url}" in caplog.text


async def test_a_router_is_described_by_its_workers(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A dead worker is left out, and the router need not report the length of the context."""
    async with StubServer() as dead:
        pass
    async with StubServer(max_context=9) as one, StubServer(max_context=7) as two:
        workers = [dead.url, one.url, two.url]
        async with StubServer(workers=workers, model_info=None) as router, client.policy(router.url) as policy:
            assert await policy.describe() == ServerInfo("0.5.23", "stub", "v1", 7)
    assert f"{router.url} lists the worker {dead.url}, which does not describe itself" in caplog.text


async def test_a_router_whose_workers_are_out_of_reach_describes_itself(client: Client) -> None:
    """They may be in a separate network."""
    async with StubServer() as hidden:
        pass
    async with StubServer(workers=[hidden.url], max_context=5) as router, client.policy(router.url) as policy:
        assert (await policy.describe()).max_context == 5


def test_servers_of_one_named_version_may_report_different_folders() -> None:
    """SGLang's model_path stays the old one after an update that could not flush; other differences are refused."""
    old, new = ServerInfo(model="a", weight_version="7"), ServerInfo(model="b", weight_version="7")
    assert merged([old, new]) == ServerInfo(weight_version="7")
    for version in ("default", None, "8"):
        with pytest.raises(ConfigError, match="workers that serve one model"):
            merged([attrs.evolve(old, weight_version="default" if version == "default" else None),
                    attrs.evolve(new, weight_version=version)])  # fmt: skip
