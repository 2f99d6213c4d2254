"""Priorities of requests: in the order of the servers, only where these schedule by them, and only on request."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from rollouts.dtypes import Endpoint, SamplingParams, packed_tokens
from rollouts.inference import priorities, vllm_wire
from rollouts.inference.base import CompletionRequest
from rollouts.inference.priorities import behind_training
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.token_json import SequenceCache
from rollouts.inference.vllm import VLLMPolicy
from rollouts.testing.json_server import JsonServer
from rollouts.testing.server import StubServer
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
    priorities.WARNED.clear()
    async with StubServer() as server, SGLangPolicy(Endpoint(base_url=server.url, priority=True)) as policy:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await resuming(policy, str, behind_training).complete(REQUEST)
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
