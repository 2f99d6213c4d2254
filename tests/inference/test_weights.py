"""New weights for a running server, against the embedded engine."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import anyio.lowlevel

from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import WhileRunning, update_weights

PROMPT = packed_tokens(range(1, 30))


def endpoint_at(url: str) -> Endpoint:
    return Endpoint(base_url=url, sampling=SamplingParams(max_new_tokens=400))


async def longest(policy: SGLangPolicy) -> Completion:
    """A reply that does not stop by itself."""
    return await policy.complete(PROMPT, SamplingParams(max_new_tokens=900, temperature=3.0), session="one")


async def test_later_tokens_carry_the_new_version() -> None:
    """And the server says that it serves it."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        await update_weights(endpoint_at(url), DEMO_MODEL, "7")
        assert (await policy.describe()).weight_version == "7"
        completion = await policy.complete(PROMPT, SamplingParams(max_new_tokens=3))
        assert {span.version for span in completion.versions} == {"7"}


@pytest.mark.parametrize("while_running", ["retract", "in_place", "wait", "abort"])
async def test_no_server_is_left_paused(while_running: WhileRunning) -> None:
    """Whatever becomes of requests that run, the next one is answered."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(longest, policy)
            await anyio.lowlevel.checkpoint()
            await update_weights(endpoint_at(url), DEMO_MODEL, "1", while_running=while_running)
        completion = await policy.complete(PROMPT, SamplingParams(max_new_tokens=3))
        assert {span.version for span in completion.versions} == {"1"}


async def test_weights_that_do_not_load_are_refused(tmp_path: Path) -> None:
    """The server goes on with the old ones, and is not left paused."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(endpoint_at(url)) as policy:
        with pytest.raises(EndpointRefused, match="update_weights_from_disk"):
            await update_weights(endpoint_at(url), tmp_path, "1", while_running="retract")
        completion = await policy.complete(PROMPT, SamplingParams(max_new_tokens=3))
        assert {span.version for span in completion.versions} == {"default"}


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    """Said with its URL."""
    with pytest.raises(EndpointUnavailable, match=r"127\.0\.0\.1"):
        await update_weights(Endpoint(base_url="http://127.0.0.1:9"), DEMO_MODEL, "1")


async def test_an_unknown_way_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="while_running"):
        await update_weights(Endpoint(), DEMO_MODEL, "1", while_running="hope")  # type: ignore[arg-type]
