"""Control requests to the embedded engine, and the event that a request of it samples, under either protocol."""

from __future__ import annotations

import re

import anyio
import anyio.lowlevel
import msgspec

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.http.client import HttpClient
from rollouts.inference.policy import ServerPolicy

__all__ = ["control", "read", "until_it_samples"]


async def control(url: str, path: str, **body: str) -> None:
    """Send a control request to the server, as a trainer does."""
    transport = HttpClient(connect_seconds=5)
    status, _ = await transport.post(url + path, msgspec.json.encode(body), {"Content-Type": "application/json"})
    assert status == 200
    await transport.aclose()


async def read(url: str) -> bytes:
    """The content of a route of the server."""
    transport = HttpClient(connect_seconds=5)
    status, content = await transport.get(url, {})
    assert status == 200
    await transport.aclose()
    return content


async def sampled(endpoint: Endpoint) -> int:
    """Tokens that the server has sampled."""
    (url,) = endpoint.base_url
    if endpoint.provider == "vllm":
        found = re.search(rb"^vllm:generation_tokens_total\S* (\S+)$", await read(f"{url}/metrics"), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))
    info = msgspec.json.decode(await read(f"{url}/server_info"))
    return int(info["internal_states"][0]["generated_tokens"])


async def until_it_samples(policy: ServerPolicy, sampling: SamplingParams) -> None:
    """Wait until the reply in flight of the policy, which is long and has these parameters, has sampled tokens."""
    await policy.check_sampling(sampling)  # its probe samples too
    before = await sampled(policy.endpoint)
    with anyio.fail_after(60):
        while not policy.in_flight or await sampled(policy.endpoint) == before:
            await anyio.lowlevel.checkpoint()
