"""The server of prebuilt responses: responses and faults equal those of StubServer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import msgspec
import pytest

from rollouts.dtypes import Endpoint, SamplingParams
from rollouts.errors import ConfigError, EndpointUnavailable, RolloutsError
from rollouts.http.client import HttpClient
from rollouts.inference.sglang import SGLangPolicy
from rollouts.testing.canned import Canned, canned_server
from rollouts.testing.latency import Latency
from rollouts.testing.replies import Fault, Request, reply_body

CANNED = Canned([[1, 2, 3], [4, 5, 6, 7, 8]])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with canned_server(CANNED) as served:
        yield served


def body(ids: list[int], budget: int, rid: str = "r") -> dict[str, Any]:
    return {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": budget}}


@pytest.mark.parametrize("encode", [msgspec.json.encode, lambda value: msgspec.json.format(msgspec.json.encode(value))])
@pytest.mark.parametrize("budget", [2, 3, 4, 100])
async def test_it_says_what_the_other_stub_says(url: str, budget: int, encode: Callable[[Any], bytes]) -> None:
    """Byte for byte, whatever the budget and however the request is written; the ids are only counted."""
    transport = HttpClient(connect_seconds=5)
    status, payload = await transport.post(f"{url}/generate", encode(body([7, 8, 9], budget, "abc")), {})
    asked = Request("abc", [7, 8, 9], {"max_new_tokens": budget}, {}, {})
    assert (status, payload) == (200, msgspec.json.encode(reply_body(CANNED.script, asked, "none")))
    await transport.aclose()


@pytest.mark.parametrize(("ids", "number"), [([1], 0), ([1, 70, 70], 0), ([1, 7, 2], 1), ([7, 3, 7], 2), ([7] * 5, 2)])
async def test_a_mark_in_each_reply_makes_them_come_one_after_the_other(ids: list[int], number: int) -> None:
    """The request's ids contain the earlier replies with their marks; both stubs count them alike."""
    canned = Canned([[7, 1], [7, 2], [7, 3]], texts=["one", "two", "three"], mark=7)
    with canned_server(canned) as served:
        transport = HttpClient(connect_seconds=5)
        _, payload = await transport.post(f"{served}/generate", msgspec.json.encode(body(ids, 9)), {})
        answer = msgspec.json.decode(payload)
        assert (tuple(answer["output_ids"]), answer["text"]) == (canned.replies[number], canned.texts[number])
        assert canned.script(ids, {})[0] == canned.replies[number]
        await transport.aclose()


async def test_vllm_would_say_the_same(url: str) -> None:
    """Ids, logprobs and why it ended, in the form of vLLM's endpoint of ids."""
    transport = HttpClient(connect_seconds=5)
    for budget, ids, finish in ((3, [1, 2, 3], "stop"), (2, [1, 2], "length")):
        asked = {"model": "m", "token_ids": [7, 8], "sampling_params": {"stop_token_ids": [3], "max_tokens": budget}}
        _, payload = await transport.post(f"{url}/inference/v1/generate", msgspec.json.encode(asked), {})
        (choice,) = msgspec.json.decode(payload)["choices"]
        logprobs = CANNED.script([7, 8], {"max_new_tokens": budget})[1][:budget]
        expected = [(f"token_id:{token}", logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        assert [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]] == expected
        assert (choice["token_ids"], choice["finish_reason"]) == (ids, finish)
    await transport.aclose()


async def test_a_policy_takes_its_answers(url: str) -> None:
    """All checks of a real reply hold, over one connection or many."""
    async with SGLangPolicy(Endpoint(base_url=url)) as policy:
        completion = await policy.complete([1, 2, 3, 4], SamplingParams(max_new_tokens=5))
        assert completion.tokens.tolist() == [4, 5, 6, 7, 8]
        assert (await policy.describe()).max_context == CANNED.max_context


@pytest.mark.parametrize("fault", ["reset", "reset_in_body", "error_503", "not_json", "not_http", "wrong_count"])
async def test_a_fault_is_that_of_the_other_stub(fault: Fault) -> None:
    """A share of 1 is every request."""
    with canned_server(Canned([[1, 2]], faults={fault: 1.0})) as served:
        async with SGLangPolicy(Endpoint(base_url=served, max_retries=0, outage_seconds=0)) as policy:
            with pytest.raises(RolloutsError):
                await policy.complete([1], SamplingParams(max_new_tokens=4))


async def test_a_hung_generation_ends_with_its_abort() -> None:
    """As on a real server, an aborted generation returns its partial reply."""
    with canned_server(Canned([[1, 2]], faults={"hang": 1.0})) as served:
        transport = HttpClient(connect_seconds=5)
        answers: list[tuple[int, bytes]] = []

        async def ask() -> None:
            answers.append(await transport.post(f"{served}/generate", msgspec.json.encode(body([1], 9)), {}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not answers:
                await transport.post(f"{served}/abort_request", b'{"rid": "r"}', {}, new_connection=True)
        assert msgspec.json.decode(answers[0][1])["meta_info"]["finish_reason"]["type"] == "abort"
        await transport.aclose()


async def test_all_that_runs_can_be_aborted_at_once() -> None:
    """Also for requests without a rid; ``/workers`` lists the server, as a router does."""
    with canned_server(Canned([[1, 2]], faults={"hang": 1.0})) as served:
        transport = HttpClient(connect_seconds=5)
        answers: list[tuple[int, bytes]] = []

        async def ask() -> None:
            answers.append(await transport.post(f"{served}/generate", b'{"input_ids": [1]}', {}))

        _, workers = await transport.post(f"{served}/workers", b"", {})
        assert msgspec.json.decode(workers) == {"workers": [{"url": served}]}
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            while len(answers) < 3:
                await transport.post(f"{served}/abort_request", b'{"abort_all": true}', {}, new_connection=True)
        await transport.aclose()


async def test_a_latency_is_waited_for() -> None:
    """A hanging response runs into the client's deadline."""
    with canned_server(Canned([[1, 2]], latency=Latency(1000.0))) as served:
        async with SGLangPolicy(Endpoint(base_url=served, request_seconds=0.2)) as policy:
            with pytest.raises(EndpointUnavailable, match="did not answer"):
                await policy.complete([1], SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"replies": []}, "Canned.replies"),
        ({"replies": [[1], [2]]}, "Canned.replies"),
        ({"replies": [[1]], "texts": ["a", "b"]}, "Canned.texts"),
        ({"replies": [[1]], "faults": {"drip": 0.5}}, "Canned.faults"),
        ({"replies": [[1]], "faults": {"reset": 2}}, r"Canned.faults\['reset'\]"),
    ],
)
def test_what_cannot_be_served_is_refused(wrong: dict[str, Any], named: str) -> None:
    """By name, before a process is started."""
    with pytest.raises(ConfigError, match=named):
        Canned(**wrong)
