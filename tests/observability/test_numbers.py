"""The numbers of a run at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Endpoint, Prompt
from rollouts.errors import (
    EndpointUnavailable,
    EnvironmentFailure,
    FilterFailure,
    GenerateFailure,
    RewardFailure,
    RolloutsError,
)
from rollouts.inference.sglang import SGLangPolicy
from rollouts.observability import numbers_of
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.stored_runs import some_sample


async def test_numbers_say_where_prompts_are_and_what_is_waited_for() -> None:
    """While rollouts are at work, and afterwards."""
    begun, go = anyio.Event(), anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        with boundary(EnvironmentFailure, "World.step"):
            begun.set()
            await go.wait()
        return [some_sample(prompt, 0) for prompt in prompts]

    config = RolloutConfig(batch_size=2, n_samples_per_prompt=3, over_sampling_factor=1.0, generate_fn=generate)
    async with AsyncRolloutManager(config, DataBuffer(["a"])) as manager:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.generate_batch)
            await begun.wait()
            await anyio.wait_all_tasks_blocked()
            now = numbers_of(manager)
            assert (now["prompts/in_flight"], now["waits/environment"]) == (2, 6)
            assert now["waits/environment_seconds"] >= 0
            go.set()
        then = numbers_of(manager)
    assert (then["prompts/in_batch"], then["batches"], then["rollouts"]) == (2, 1, 6)
    assert "waits/environment" not in then
    assert then["batch/turns/mean"] == 2


def manager() -> AsyncRolloutManager:
    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        return [some_sample(prompt, 0) for prompt in prompts]

    config = RolloutConfig(batch_size=1, n_samples_per_prompt=1, generate_fn=generate)
    return AsyncRolloutManager(config, DataBuffer(["a"]))


@pytest.mark.parametrize(
    ("failure", "what", "options", "kind"),
    [
        (EnvironmentFailure, "POST machine", {}, "environment"),
        (EnvironmentFailure, "a step without a dot", {"kind": "environment_step"}, "environment"),
        (RewardFailure, "World.reward", {}, "reward"),
        (FilterFailure, "World.step", {}, "filter"),
        (EndpointUnavailable, "updating 127.0.0.1:30000 to weights 'v1.5'", {}, "server"),
        (EndpointUnavailable, "GET 127.0.0.1:30000/model_info", {}, "server"),
        (EndpointUnavailable, "POST host/generate", {"kind": "generation"}, "generation"),
        (RolloutsError, "Tracker.log", {}, "other"),
        (RolloutsError, "World.pause", {"kind": "a_pause"}, "a_pause"),
    ],
)
async def test_a_wait_is_counted_by_its_kind(failure: Any, what: str, options: Any, kind: str) -> None:
    """Not by the text of its name."""
    with boundary(failure, what, **options):
        now = numbers_of(manager())
    assert {name: count for name, count in now.items() if name.startswith("waits/") and "seconds" not in name} == {
        f"waits/{kind}": 1
    }


async def test_a_generate_function_is_no_wait_of_its_own() -> None:
    """It lasts as long as its rollout, whose own waits are counted."""
    with boundary(GenerateFailure, "generate_fn generate"):
        assert not [name for name in numbers_of(manager()) if name.startswith("waits/")]


async def test_a_server_that_does_not_describe_itself_is_no_environment() -> None:
    """``GET …/model_info`` is a wait for the server, whatever its host is called."""

    async def ignore(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, ignore)
        async with SGLangPolicy(Endpoint(base_url=f"http://127.0.0.1:{port}")) as policy:
            tasks.start_soon(policy.describe)
            await anyio.wait_all_tasks_blocked()
            now = numbers_of(manager(), policies=[policy])
            tasks.cancel_scope.cancel()
    assert now["waits/server"] == 1
    assert "waits/environment" not in now
