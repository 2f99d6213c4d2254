"""Priorities of requests: in the order of the servers, only where these schedule by them, and only on request."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
import pytest

from rollouts.dtypes import Endpoint, Prompt, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import EndpointUnavailable
from rollouts.inference import vllm_wire
from rollouts.inference.base import CompletionRequest
from rollouts.inference.priorities import AgreedOrder, behind_training
from rollouts.inference.routing import Workers
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.token_json import SequenceCache
from rollouts.inference.vllm import VLLMPolicy
from rollouts.recipe import agent_recipe, preflight
from rollouts.testing.json_server import JsonServer
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from rollouts.training.agent_integration import resuming

ON = {"enable_priority_scheduling": True}
LOWER = {**ON, "schedule_low_priority_values_first": True}
REQUEST = CompletionRequest(packed_tokens([5, 6]), SamplingParams(max_new_tokens=4))


async def test_the_last_rollouts_of_a_group_come_first() -> None:
    """The level rises while the others finish, also between two turns; an evaluation has the lowest."""
    finished: list[int] = []
    async with StubServer(model_info={"model_path": "stub", "weight_version": "v1", **ON}) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, priority=True)) as policy:
            of_rollout = resuming(policy, str, finished.__len__)
            for number in range(6):
                await of_rollout.complete(REQUEST)
                finished.append(number)
            await resuming(policy, str, behind_training).complete(REQUEST)
        assert [asked.body["priority"] for asked in server.requests] == [1, 2, 3, 3, 4, 4, 0]


@pytest.mark.parametrize(
    ("wanted", "flags", "in_group", "sent"),
    [
        (True, ON, True, 1),
        (True, LOWER, True, -1),
        (True, ON, False, None),
        (True, {}, True, None),
        (True, {"enable_priority_scheduling": False}, True, None),
        (False, ON, True, None),
    ],
)
async def test_a_priority_is_sent_where_the_server_schedules_by_it(
    wanted: bool, flags: dict[str, bool], in_group: bool, sent: int | None
) -> None:
    """Higher first or lower first, as the server says; otherwise the request has none."""
    async with StubServer(model_info={"model_path": "stub", "weight_version": "v1", **flags}) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, priority=wanted)) as policy:
            await resuming(policy, str, (lambda: 0) if in_group else None).complete(REQUEST)
        (asked,) = server.requests
        assert asked.body.get("priority") == sent


async def test_a_server_that_does_not_schedule_by_priority_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, and the requests go without."""
    async with StubServer() as server, SGLangPolicy(Endpoint(base_url=server.url, priority=True)) as policy:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await resuming(policy, str, behind_training).complete(REQUEST)
    assert [record.getMessage() for record in caplog.records if "priorities" in record.getMessage()] == [
        "Endpoint.priority: no priorities are sent, since the servers do not say that they schedule by them"
    ]


async def test_the_preflight_of_a_run_says_that_no_priorities_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    """Before its first request; vLLM refused a priority that it does not schedule by, so none is sent."""
    async with StubServer() as server:
        endpoint = Endpoint(base_url=server.url, model=str(DEMO_MODEL), priority=True)
        with caplog.at_level(logging.WARNING):
            await preflight(
                agent_recipe("p", endpoint, CalculatorEnvironment, ["1 + 1?"], reward_fn=lambda sample: 0.0)
            )
        assert server.requests == []
    assert [record.getMessage() for record in caplog.records if "priorities" in record.getMessage()] == [
        "Endpoint.priority: no priorities are sent, since the servers do not say that they schedule by them"
    ]


async def test_servers_of_several_orders_get_no_priorities() -> None:
    """A request may move from one server to another."""
    infos = [{"model_path": "stub", "weight_version": "v1", **flags} for flags in (ON, LOWER)]
    async with StubServer(model_info=infos[0]) as higher, StubServer(model_info=infos[1]) as lower:
        urls = (higher.url, lower.url)
        async with SGLangPolicy(Endpoint(base_url=urls, priority=True)) as policy:
            assert await policy.priority_order() is None
        async with SGLangPolicy(Endpoint(base_url=(higher.url, higher.url), priority=True)) as policy:
            assert await policy.priority_order() == "higher first"


async def test_without_a_server_no_priority_is_agreed() -> None:
    """The question ends, although there is nothing to ask."""
    async with VLLMPolicy(Endpoint(provider="vllm", priority=True)) as policy:

        async def wait(error: EndpointUnavailable) -> None:
            raise error

        order = AgreedOrder(policy.servers.protocol, Workers([]), wait)
        with anyio.fail_after(10):
            for _ in range(2):
                assert await order() is None


async def test_rollouts_that_begin_together_ask_once() -> None:
    """vLLM collects its environment for the answer, which takes seconds."""
    async with JsonServer(lambda asked: {}) as server:
        async with VLLMPolicy(Endpoint(provider="vllm", base_url=server.url, priority=True)) as policy:
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(policy.priority_order)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "order"),
    [
        ({"vllm_config": {"scheduler_config": {"policy": "priority"}}}, "lower first"),
        ({"vllm_config": {"scheduler_config": {"policy": "fcfs"}}}, None),
        ({"vllm_config": "text"}, None),
        ((404, {}), None),
    ],
)
async def test_vllm_says_its_policy_in_dev_mode(answer: Any, order: str | None) -> None:
    """Without it, the server does not say, and gets no priorities."""
    async with JsonServer(lambda asked: answer if asked.path.startswith("/server_info") else (404, {})) as server:
        async with VLLMPolicy(Endpoint(provider="vllm", base_url=server.url, priority=True)) as policy:
            assert await policy.priority_order() == order


def test_vllm_gets_it_in_the_body() -> None:
    """As SGLang does."""
    ids = SequenceCache(None).encode([5, 6])
    options = vllm_wire.request_options(SamplingParams(), ())
    body, _ = vllm_wire.request_body("r", ids, options, priority=-2)
    assert msgspec.json.decode(body)["priority"] == -2
    body, _ = vllm_wire.request_body("r", ids, options)
    assert "priority" not in msgspec.json.decode(body)


async def test_the_policy_of_a_rollout_stops_as_its_servers_do() -> None:
    """With priorities as without: vLLM ends no reply within ``min_new_tokens``, and a reply is cut by the same rule."""
    for kind in (SGLangPolicy, VLLMPolicy):
        for wanted in (False, True):
            async with kind(Endpoint(base_url="http://127.0.0.1:1", priority=wanted)) as policy:
                found = getattr(policy.of_rollout(behind_training), "minimum_delays_stops", None)
                assert found == (kind is VLLMPolicy)


def pickled(prompt: Prompt) -> Prompt:
    text = pickle.dumps(prompt)
    assert len(text) < 1_000
    found: Prompt = pickle.loads(text)
    return found


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
async def test_a_copy_of_a_prompt_has_the_number_of_its_group_and_none_of_the_samples(
    copied: Callable[[Prompt], Prompt],
) -> None:
    """A worker gets a pickled prompt: it must not grow with the group, or fail for what its samples have."""
    found: list[int] = []

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        found.append(copied(prompt).urgency())
        assert prompt.urgency() == len(found) - 1
        sample = Sample(tokens=[*range(2_000)], reward=1.0)
        sample.trainer_record = threading.Lock()  # has no copy
        return [sample]

    config = RolloutConfig(batch_size=1, n_samples_per_prompt=4, generate_fn=generate, in_flight=1, max_attempts=1)
    async with AsyncRolloutManager(config, DataBuffer(["a"], epochs=1)) as manager:
        await manager.generate_batch()
    assert found == [0, 1, 2, 3]
