"""The SGLang policy: requests, checks, retries, and at most one running generation per call."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import threading
import uuid
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from rollouts.concurrency.boundary import waits
from rollouts.concurrency.wait_report import where_of_users
from rollouts.dtypes import Completion, Endpoint, SamplingParams, VersionSpan
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable, at
from rollouts.inference import generate_probe
from rollouts.inference.base import ExtrasRequest
from rollouts.inference.policy import full_jitter
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.shared import shared_policy
from rollouts.testing.replies import Answer, Fault, Request
from rollouts.testing.server import StubServer
from tests.inference.client import Client
from tests.raw_server import Visit, answer, raw_server


def crc(ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(ids, "<i4").tobytes())


def arrivals(count: int) -> tuple[anyio.Event, Any]:
    """Return an event that is set after ``count`` requests have arrived, and the latency that sets it."""
    seen, arrived = [], anyio.Event()

    async def latency(request: Request) -> None:
        seen.append(request)
        if len(seen) == count:
            arrived.set()

    return arrived, latency


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_the_request_contains_only_known_fields(client: Client) -> None:
    """Ids, logprobs of the output only, a UUID as rid, and only sampling keys that every server knows."""
    sampling = SamplingParams(temperature=0.5, max_new_tokens=7, seed=3, stop=["x"], min_p=0.1)
    async with StubServer() as server, client.policy(server.url, api_key="secret") as policy:
        await client.complete(policy, sampling=sampling, stop_token_ids=(8, 9), session="s1")
        await client.complete(policy)
        full, plain = server.requests
    assert {name: value for name, value in full.body.items() if name != "rid"} == {
        "input_ids": [1, 2, 3, 4, 5],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "sampling_params": {
            "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.1, "max_new_tokens": 7, "stop": ["x"],
            "stop_token_ids": [8, 9], "sampling_seed": 3, "skip_special_tokens": False, "no_stop_trim": True,
        },
    }  # fmt: skip
    assert not {"stop", "stop_token_ids", "sampling_seed"} & set(plain.sampling_params)
    assert uuid.UUID(full.rid).hex == full.rid
    assert full.headers["Authorization"] == "Bearer secret"
    assert full.headers["X-SMG-Routing-Key"] == "s1"
    assert "X-SMG-Routing-Key" not in plain.headers


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(17), "max_new_tokens: 16 ids were requested, 17 received"),
        ([4, 2, 5], "stop_token_ids: the reply continues after its stop id 2"),
    ],
)
async def test_ignored_sampling_fields_are_an_error(client: Client, ids: Sequence[int], message: str) -> None:
    """A reply that continues after max_new_tokens or a stop id: a router dropped the fields."""
    triples = [[-1.0, token, None] for token in ids]
    answer = {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": triples}}
    async with StubServer(lambda *_: answer) as server, client.policy(server.url) as policy:
        with pytest.raises(EndpointRefused, match=f"{message}: a proxy drops fields of requests"):
            await client.complete(policy, stop_token_ids=(9, 2))
        assert len(server.requests) == 1


async def test_a_session_with_any_name_can_be_a_header(client: Client) -> None:
    """Characters that are not allowed in a header are percent-encoded."""
    async with StubServer() as server, client.policy(server.url) as policy:
        await client.complete(policy, session="group 1\r\nX: ä")
        assert server.requests[0].headers["X-SMG-Routing-Key"] == "group%201%0D%0AX%3A%20%C3%A4"


async def test_the_completion_contains_what_the_server_sampled(client: Client) -> None:
    """Ids, logprobs, versions and counts come from the response; the digest is of the sent ids."""
    async with StubServer(lambda ids, params: [7, 8, 9]) as server, client.policy(server.url) as policy:
        completion = await client.complete(policy)
    assert completion.tokens.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == pytest.approx([-1, -1 / 2, -1 / 3])
    assert completion.finish_reason == "stop"
    assert completion.versions == (VersionSpan("v1", 0, 3),)
    assert completion.prompt_tokens == 5
    assert completion.prompt_digest == crc([1, 2, 3, 4, 5])
    assert completion.cached_tokens == 4
    assert completion.request_id == server.requests[0].rid


async def test_megabytes_of_routed_experts_are_read(client: Client) -> None:
    """A reply of this size is decoded in a thread, piece by piece; the bound of a response allows it."""
    width = 100_000
    column = np.arange(7 * width, dtype=np.int32)
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 5,
        "output_token_logprobs": [[-1.0, token, None] for token in (7, 8, 9)],
        "routed_experts": base64.b64encode(column.tobytes()).decode(),
    }
    script = {"output_ids": [7, 8, 9], "meta_info": meta}
    async with StubServer(lambda ids, params: script) as server, client.policy(server.url) as policy:
        completion = await client.complete(policy, extras=ExtrasRequest(experts_width=width))
    assert completion.extras is not None
    assert np.array_equal(completion.extras.experts, column.reshape(7, width))


async def test_a_growing_session_encodes_each_id_once(client: Client) -> None:
    """Every body contains all ids; a sequence that does not extend the last one is encoded in full."""
    tokens = list(range(100))
    prompts = [tokens[:10], tokens[:40], tokens, tokens[50:60], [0, 1, 2, 3, 7, *range(5, 20)]]
    async with StubServer() as server, client.policy(server.url) as policy:
        digests = [(await client.complete(policy, ids, session="a")).prompt_digest for ids in prompts]
        assert [request.input_ids for request in server.requests] == prompts
        assert digests == [crc(ids) for ids in prompts]
        assert policy.totals.encoded_tokens == 100 + 10 + 20


async def test_a_very_long_prompt_is_sent_whole(client: Client) -> None:
    """More than 1 MiB of text."""
    ids = np.full(200_000, 151_000, dtype=np.int32)
    async with StubServer() as server, client.policy(server.url) as policy:
        completion = await client.complete(policy, ids)
        assert server.requests[0].input_ids == ids.tolist()
    assert completion.prompt_digest == crc(ids.tolist())


async def test_an_endless_reply_is_bounded_by_what_was_asked_for(client: Client) -> None:
    """Hardening 24: 16 new tokens do not need more than 512 bytes each; more new tokens may."""
    body = b"0" * 300_000

    async def serve(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(body))
        await visit.ended()

    async with raw_server(serve) as port, client.policy(f"http://127.0.0.1:{port}", max_retries=0) as policy:
        with pytest.raises(EndpointUnavailable, match=r"longer than the 27[0-9]{4} bytes that the request allows"):
            await client.complete(policy)
        with pytest.raises(EndpointUnavailable, match="not JSON"):  # it was read
            await client.complete(policy, sampling=SamplingParams(max_new_tokens=1000))


@pytest.mark.parametrize(("bad", "message"), [([1, 2, 50], r"\[2\]: got id 50"), ([-1], r"\[0\]: got id -1")])
async def test_ids_that_would_kill_a_server_are_never_sent(client: Client, bad: list[int], message: str) -> None:
    """The error names the position, the id and the limit, for prompts and for stop ids."""
    async with StubServer() as server, client.policy(server.url, vocab_size=50) as policy:
        with pytest.raises(ConfigError, match=rf"tokens{message}; expected 0 <= id < 50"):
            await client.complete(policy, bad)
        with pytest.raises(ConfigError, match=rf"stop_token_ids{message}; expected 0 <= id < 50"):
            await client.complete(policy, stop_token_ids=tuple(bad))
        assert not server.requests


async def test_the_vocabulary_is_read_once(client: Client) -> None:
    """Rollouts that start together wait for one reading of the tokenizer; another one would load it again."""
    read: list[int] = []
    last = threading.Event()

    def vocab_size() -> int:
        read.append(50)
        last.wait(10)
        return 50

    async with StubServer() as server, SGLangPolicy(Endpoint(base_url=server.url), vocab_size=vocab_size) as policy:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(client.complete, policy)
            await anyio.wait_all_tasks_blocked()
            last.set()
        assert len(server.requests) == 8
    assert read == [50]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (([7, 50], [-0.1, -0.2], None), r"output_ids\[1\]: got id 50; expected 0 <= id < 50 \(vocab_size\)"),
        (([7, 8], [-0.1, 5.0], None), r"output_token_logprobs\[1\]: got 5\.0; expected a logprob <= 0"),
    ],
    ids=["id", "logprob"],
)
async def test_a_reply_that_cannot_be_trained_is_refused(client: Client, reply: Any, message: str) -> None:
    """It does not count as a completion, and the request is not sent again."""
    async with StubServer(lambda *_: reply) as server, client.policy(server.url, vocab_size=50) as policy:
        with pytest.raises(EndpointRefused, match=message):
            await client.complete(policy)
        assert len(server.requests) == 1
        assert policy.totals.completions == 0


# -- response checks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("error_string", "unknown sampling parameter: max_tokens"),
        ("error_object", "top_p must be in"),
        ("error_type", "bad request"),
        ("no_logprobs", "without the requested output_token_logprobs"),
        ("wrong_rid", "renames requests"),
        (Answer(401, b'{"detail":"who?"}'), r"status 401: who.*Check Endpoint\.api_key"),
        (Answer(403, b"<h1>no</h1>"), "status 403: <h1>no</h1>"),
        (Answer(404, b""), r"status 404: \(empty body\)"),
        (Answer(422, b'{"detail":[1]}'), "status 422"),
        (Answer(307, b"elsewhere"), "status 307: elsewhere"),
        (Answer(200, b'{"object":"chat.completion","choices":[]}'), "not a response of SGLang's /generate"),
    ],
)
async def test_a_refusal_is_never_sent_again(client: Client, fault: Fault | Answer, message: str) -> None:
    """In every error format; the message quotes the server."""
    async with StubServer(faults=[fault]) as server, client.policy(server.url) as policy:
        with pytest.raises(EndpointRefused, match=message):
            await client.complete(policy)
        assert len(server.requests) == 1
        assert not server.aborted


@pytest.mark.parametrize("fault", ["error_context", "error_budget"])
async def test_a_prompt_that_does_not_fit_is_its_own_error(client: Client, fault: Fault) -> None:
    """For both messages of the server; the agent loop converts it to a stop reason."""
    async with StubServer(faults=[fault]) as server, client.policy(server.url) as policy:
        with pytest.raises(ContextOverflow, match="context length"):
            await client.complete(policy)
        assert len(server.requests) == 1


@pytest.mark.parametrize("fault", ["wrong_ids", "wrong_count"])
async def test_a_response_about_other_ids_is_refused(client: Client, fault: Fault) -> None:
    """It is never stored and never retried."""
    async with StubServer(faults=[fault]) as server, client.policy(server.url) as policy:
        with pytest.raises(EndpointRefused):
            await client.complete(policy)
        assert len(server.requests) == 1


@pytest.mark.parametrize("fault", ["nan", "nan_happened"])
async def test_broken_numbers_fail_the_call(client: Client, fault: Fault) -> None:
    """A retry would hide a broken model."""
    async with StubServer(faults=[fault]) as server, client.policy(server.url) as policy:
        with pytest.raises(EndpointUnavailable, match=r"NaN|nan"):
            await client.complete(policy)
        assert len(server.requests) == 1


async def test_an_aborted_reply_keeps_its_partial_tokens(client: Client) -> None:
    """Its finish reason is ``abort``; it is empty if it was still queued."""
    script = lambda ids, params: [1, 2, 3, 4]  # noqa: E731
    async with StubServer(script, faults=["abort", "abort_queued"]) as server, client.policy(server.url) as policy:
        partial, empty = await client.complete(policy), await client.complete(policy)
    assert (partial.finish_reason, partial.tokens.tolist()) == ("abort", [1, 2])
    assert (empty.finish_reason, empty.tokens.tolist()) == ("abort", [])


@pytest.mark.parametrize("fault", ["old", "no_output_ids"])
async def test_an_older_server_is_understood(client: Client, fault: Fault) -> None:
    """Missing fields have defaults; without ``output_ids`` the ids come from the logprobs."""
    async with StubServer(faults=[fault]) as server, client.policy(server.url) as policy:
        completion = await client.complete(policy)
    assert completion.tokens.tolist() == [1, 2, 3]
    assert completion.prompt_tokens == 5
    assert completion.versions == (VersionSpan("default" if fault == "old" else "v1", 0, 3),)


# -- retries --------------------------------------------------------------------------------------------------------

LEFT_RUNNING: list[Fault] = ["reset", "reset_in_body", "error_500", "error_duplicate", "not_http"]
OVER: list[Fault | Answer] = ["error_503", "error_in_200", "abort_503", "not_json", Answer(429, b"slow down")]


@pytest.mark.parametrize("fault", [*LEFT_RUNNING, *OVER])
async def test_a_transient_error_is_retried_and_never_runs_twice(client: Client, fault: Fault | Answer) -> None:
    """Under a new rid; a generation that may still be running is aborted first."""
    async with StubServer(faults=[fault]) as server, client.policy(server.url) as policy:
        completion = await client.complete(policy)
        first, second = (request.rid for request in server.requests)
        assert completion.request_id == second != first
        assert server.aborted == ([first] if fault in LEFT_RUNNING else [])
        assert server.most_live == 1
        assert not server.live
        assert policy.totals.retries == 1


async def test_nothing_is_sent_again_before_an_abort_is_acknowledged(client: Client) -> None:
    """A lost request to a server that cannot abort: one generation, and an error."""
    async with StubServer(faults=["reset"], workers=[]) as server, client.policy(server.url, max_retries=3) as policy:
        with pytest.raises(EndpointUnavailable, match=r"after 4 attempts: a generation may still be running"):
            await client.complete(policy)
        assert len(server.requests) == 1
        assert server.most_live == 1


async def test_an_abort_goes_to_all_workers_of_a_router(client: Client) -> None:
    """A router does not pass aborts on, and any worker may run the generation."""
    async with StubServer() as one, StubServer() as two:
        async with StubServer(faults=["reset"], workers=[one.url, two.url]) as router:
            async with client.policy(router.url) as policy:
                await client.complete(policy)
            lost = router.requests[0].rid
        assert one.aborted == two.aborted == [lost]


async def test_a_server_that_is_gone_runs_nothing(client: Client) -> None:
    """Its lost request is not aborted: the call continues on another server."""
    async with StubServer() as healthy:
        async with StubServer() as dying:
            async with client.policy(dying.url, healthy.url) as policy:
                await client.complete(policy, session="a")
                await dying.__aexit__(None, None, None)
                completion = await client.complete(policy, session="a")
                assert completion.request_id == healthy.requests[0].rid


async def test_the_error_after_all_retries_contains_the_last_cause(client: Client) -> None:
    """And the number of attempts."""
    busy = [Answer(429, b"slow down")] * 5
    async with StubServer(faults=busy) as server, client.policy(server.url, max_retries=1) as policy:
        with pytest.raises(EndpointUnavailable, match=r"after 2 attempts: status 429: slow down") as raised:
            await client.complete(policy)
        assert isinstance(raised.value.__cause__, EndpointUnavailable)
        assert len(server.requests) == 2


async def test_connections_that_the_server_closed_while_idle_are_replaced(client: Client) -> None:
    """Every reused connection is dead and max_retries is 0, but each call is answered, once."""
    async with StubServer(closes_idle=True) as server, client.policy(server.url, max_retries=0) as policy:
        for _ in range(20):
            assert (await client.complete(policy)).tokens.tolist() == [1, 2, 3]
        assert len(server.requests) == 20
        assert policy.totals.retries > 0


async def test_a_pool_of_dead_connections_costs_one_replacement(client: Client) -> None:
    """The replacement uses a new connection, not the next dead one."""
    arrived, latency = arrivals(8)

    async def together(request: Request) -> None:
        await latency(request)
        await arrived.wait()

    async with StubServer(closes_idle=True, latency=together) as server:
        async with client.policy(server.url, max_retries=0) as policy:
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(client.complete, policy)
            await client.complete(policy)
            assert len(server.requests) == 9
            assert policy.totals.retries == 1


@pytest.mark.parametrize("fault", ["drip", "close_after"])
async def test_slow_and_closing_servers_need_no_retry(client: Client, fault: Fault) -> None:
    """Every call is answered once, even if its connection is closed afterwards."""
    async with StubServer(faults=[fault] * 20) as server, client.policy(server.url, max_retries=0) as policy:
        for _ in range(20):
            assert (await client.complete(policy)).tokens.tolist() == [1, 2, 3]
        assert not server.live


def test_the_backoff_is_random_below_a_bound_that_doubles() -> None:
    """Full jitter: from 0 up to 0.5 s, 1 s, 2 s, and so on up to 15 s."""
    for failures, bound in [(1, 0.5), (2, 1.0), (3, 2.0), (6, 15.0), (1000, 15.0)]:
        delays = [full_jitter(failures) for _ in range(200)]
        assert 0 <= min(delays) < bound / 4
        assert bound * 3 / 4 < max(delays) <= bound


async def test_no_rid_is_ever_used_twice(client: Client) -> None:
    """Under all faults: a new rid for each attempt, all of one width, and no generation left running."""
    faults: list[Fault] = ["reset", "error_500", "error_503", "reset_in_body", "none", "abort_503"]
    async with StubServer(faults=faults * 20) as server, client.policy(server.url, max_retries=20) as policy:
        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(client.complete, policy, [number])
        rids = [request.rid for request in server.requests]
        assert len(set(rids)) == len(rids) == policy.totals.requests
        assert {len(rid) for rid in rids} == {32}
        assert not server.live


# -- aborts ----------------------------------------------------------------------------------------------------------


async def test_a_cancelled_request_is_aborted(client: Client) -> None:
    """The server receives the abort of each before the cancelled caller continues."""
    arrived, latency = arrivals(100)
    async with StubServer(faults=["hang"] * 100, latency=latency) as server, client.policy(server.url) as policy:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(client.complete, policy)
            await arrived.wait()
            tasks.cancel_scope.cancel()
        assert sorted(server.aborted) == sorted(request.rid for request in server.requests)
        assert not server.live
        assert policy.totals.aborts == 100
        assert (await client.complete(policy)).tokens.tolist() == [1, 2, 3]


async def test_a_task_cancelled_by_asyncio_aborts_too(client: Client) -> None:
    """For callers that do not use anyio."""
    arrived, latency = arrivals(1)
    async with StubServer(faults=["hang"], latency=latency) as server, client.policy(server.url) as policy:
        task = asyncio.create_task(client.complete(policy))  # noqa: TID251 - the caller under test is asyncio's
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.aborted == [server.requests[0].rid]


async def test_a_call_has_a_deadline(client: Client) -> None:
    """A request to a server that never answers expires and is aborted."""
    async with StubServer(faults=["hang"]) as server, client.policy(server.url, request_seconds=0.05) as policy:
        with pytest.raises(EndpointUnavailable, match=rf"POST {server.url}/generate did not answer within 0.05 s"):
            await client.complete(policy)
        assert server.aborted == [server.requests[0].rid]


async def test_a_deadline_after_failures_has_the_last_failure_as_cause(client: Client) -> None:
    """Even if the deadline expires during the backoff."""
    async with StubServer(faults=[Answer(429, b"slow down")]) as server:
        endpoint = Endpoint(base_url=server.url, request_seconds=0.05)
        async with SGLangPolicy(endpoint, backoff=lambda failures: 60.0) as policy:
            with pytest.raises(EndpointUnavailable, match="did not answer within") as raised:
                await client.complete(policy)
    assert "slow down" in str(raised.value.__cause__)


async def test_requests_in_flight_are_listed(client: Client) -> None:
    """The place, the URL and the deadline of each request in flight, and nothing afterwards."""
    arrived, latency = arrivals(1)
    async with StubServer(faults=["hang"], latency=latency) as server, client.policy(server.url) as policy:
        async with anyio.create_task_group() as tasks:
            with at("group 3"):
                tasks.start_soon(client.complete, policy)
            await arrived.wait()
            (wait,) = waits()
            line = where_of_users(wait)
            tasks.cancel_scope.cancel()
        assert (wait.place, wait.what) == ("group 3", f"POST {server.url}/generate")
        assert (wait.shown, line) == ("the model", ""), "a line of the HTTP client says nothing to a user"
        assert wait.deadline is not None
        assert not waits()


# -- several workers --------------------------------------------------------------------------------------------------


async def test_sessions_stay_with_their_worker(client: Client) -> None:
    """New ones go to the least loaded worker, and all calls of one session to one worker."""
    async with StubServer() as one, StubServer() as two, client.policy(one.url, two.url) as policy:
        for session in "abcd" * 3:
            await client.complete(policy, session=session)
        places = [{request.headers["X-SMG-Routing-Key"] for request in server.requests} for server in (one, two)]
    assert places in ([{"a", "c"}, {"b", "d"}], [{"b", "d"}, {"a", "c"}])


async def test_the_sequences_of_one_route_stay_with_its_worker(client: Client) -> None:
    """Sequences that share a beginning go to one worker; each has a separate cache of encoded ids."""
    async with StubServer() as one, StubServer() as two, client.policy(one.url, two.url) as policy:
        for session in "abcd" * 2:
            await client.complete(policy, session=session, route="r")
        assert policy.totals.encoded_tokens == 4 * len(client.ids)
        requests = [len(server.requests) for server in (one, two)]
        headers = {request.headers["X-SMG-Routing-Key"] for request in [*one.requests, *two.requests]}
    assert (sorted(requests), headers) == ([0, 8], {"r"})


async def test_a_session_leaves_a_worker_that_fails_it(client: Client) -> None:
    """The next attempt goes to another worker, and so do later calls."""
    async with StubServer(faults=["error_503"] * 9) as full, StubServer() as healthy:
        async with client.policy(full.url, healthy.url) as policy:
            for _ in range(3):
                await client.complete(policy, session="a")
        assert (len(full.requests), len(healthy.requests)) == (1, 3)


async def test_a_failed_abort_does_not_route_back_to_its_server(client: Client) -> None:
    """It does not count as a failure of the server that was chosen instead."""
    behind: list[str] = []
    async with StubServer() as healthy, StubServer(faults=["reset"] * 9, workers=behind) as dying:

        def pause(failures: int) -> float:
            behind.extend([healthy.url] if failures == 2 else [])  # from the second abort on it is acknowledged
            return 0.0

        async with SGLangPolicy(Endpoint(base_url=(dying.url, healthy.url)), backoff=pause) as policy:
            await client.complete(policy, session="a")
        assert (len(dying.requests), len(healthy.requests)) == (1, 1)


async def test_a_cancelled_request_is_aborted_where_it_runs(client: Client) -> None:
    """Not at the first URL, and not at all of them."""
    arrived, latency = arrivals(2)
    async with StubServer(faults=["hang"], latency=latency) as one, StubServer(faults=["hang"], latency=latency) as two:
        async with client.policy(one.url, two.url) as policy:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.complete, policy)
                tasks.start_soon(client.complete, policy)
                await arrived.wait()
                tasks.cancel_scope.cancel()
        for server in (one, two):
            assert server.aborted == [server.requests[0].rid]


# -- pools ------------------------------------------------------------------------------------------------------------


async def test_many_first_uses_open_one_pool(client: Client) -> None:
    """256 concurrent calls on a new policy."""
    async with StubServer() as server:
        endpoint = Endpoint(base_url=server.url)
        async with anyio.create_task_group() as tasks:
            for _ in range(256):
                tasks.start_soon(client.complete, shared_policy(endpoint))
        policy = shared_policy(endpoint)
        assert policy.totals.completions == 256
        assert "opened 1 times" in repr(policy.servers.transport)
        assert server.connections <= 256


async def test_one_policy_for_each_endpoint_and_vocabulary() -> None:
    """Endpoints with different keys have different policies; endpoints that differ in sampling share one."""
    here = Endpoint()
    assert shared_policy(here) is shared_policy(Endpoint(sampling=SamplingParams(temperature=0.1)))
    assert shared_policy(here) is not shared_policy(Endpoint(api_key="k"))
    assert shared_policy(here) is not shared_policy(here, vocab_size=9)


def use_shared(client: Client, runner: Any) -> SGLangPolicy:
    async def use() -> SGLangPolicy:
        async with StubServer() as server:
            policy = shared_policy(Endpoint(base_url=server.url))
            await client.complete(policy)
            return policy

    policy: SGLangPolicy = runner(use)
    gc.collect()
    return policy


@pytest.mark.parametrize("runner", [lambda use: asyncio.run(use()), anyio.run], ids=["asyncio", "anyio"])
def test_an_unclosed_pool_is_closed_with_its_loop(client: Client, runner: Any) -> None:
    """Without a warning, which would be an error; the next loop has another pool."""
    first, second = use_shared(client, runner), use_shared(client, runner)
    assert first is not second
    assert "closed" in repr(first.servers.transport)


def test_a_policy_can_be_used_in_consecutive_loops(client: Client) -> None:
    """Its pool is closed with each loop; its counters continue."""

    async def use() -> Completion:
        async with StubServer() as server:
            policy.servers.workers.all[0].url = server.url
            return await client.complete(policy)

    policy = client.policy("http://127.0.0.1:1")
    for _ in range(2):
        assert asyncio.run(use()).tokens.tolist() == [1, 2, 3]
    assert policy.totals.completions == 2


# -- repr and secrets ------------------------------------------------------------------------------------------------


async def test_the_repr_is_the_state(client: Client) -> None:
    """URLs, requests in flight and counters."""
    async with StubServer(faults=["error_503"]) as server, client.policy(server.url) as policy:
        await client.complete(policy)
        assert repr(policy) == (
            f"<SGLangPolicy {server.url}: 0 in flight; 1 completions from 2 requests, 1 retries, 0 aborts;"
            " tokens: 5 prompt (4 cached), 3 sampled>"
        )


async def test_the_key_is_never_shown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """Not in the repr, not in errors and their causes, not in logs; not even if a server echoes it."""
    caplog.set_level(logging.DEBUG)
    errors: list[BaseException | None] = []
    echo = b'{"error":"bad key hunter2"}'
    for fault in (Answer(401, echo), Answer(503, echo), Answer(500, echo), "reset", "not_http"):
        async with StubServer(faults=[fault], workers=[]) as server:
            async with client.policy(server.url, max_retries=0, outage_seconds=0, api_key="hunter2") as policy:
                with pytest.raises((EndpointRefused, EndpointUnavailable)) as raised:
                    await client.complete(policy)
                errors.append(raised.value)
                assert "hunter2" not in repr(policy) + repr(policy.endpoint)
    while errors:
        error = errors.pop()
        if error is not None:
            errors += [error.__cause__, error.__context__ if not error.__suppress_context__ else None]
            assert "hunter2" not in repr(error) + str(error) + repr(error.args)
    assert "hunter2" not in caplog.text


def test_a_key_that_is_no_valid_header_is_a_config_error(client: Client) -> None:
    """Raised at once, without the key in the message."""
    with pytest.raises(ConfigError, match="api_key") as raised:
        client.policy("http://x", api_key="hunter2\r\nX: y")
    assert "hunter2" not in str(raised.value)


# -- the kind of the server's logprobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("original", [False, True], ids=["tempered", "original"])
async def test_the_probe_tells_what_the_engine_reports(client: Client, original: bool) -> None:
    """A server of logprobs before the temperature is refused by name where they differ, before a token is sampled."""
    tempered = attrs.evolve(client.sampling, temperature=0.7)
    async with running_server(DEMO_MODEL, original_logprobs=original) as url, client.policy(url) as policy:
        for same in (attrs.evolve(client.sampling, temperature=0.0), attrs.evolve(tempered, top_k=1), client.sampling):
            await policy.check_sampling(same)
            await client.complete(policy, sampling=same)
        asked = policy.totals.requests
        if original:
            message = r"temperature 0.7'; expected temperature 0 or 1: .* without SGLANG_RETURN_ORIGINAL_LOGPROB"
            with pytest.raises(ConfigError, match=message):
                await policy.check_sampling(tempered)
            with pytest.raises(ConfigError, match=message):
                await client.complete(policy, sampling=tempered)
            assert policy.totals.sampled_tokens <= 3 * client.sampling.max_new_tokens
        else:
            assert len((await client.complete(policy, sampling=tempered)).tokens) > 0
            assert policy.totals.requests == asked + 1


async def test_a_server_is_probed_once_and_only_where_it_matters(client: Client) -> None:
    """Two requests for each server, however many calls begin together; no request at temperature 0 or 1."""
    tempered = attrs.evolve(client.sampling, temperature=0.7)
    async with StubServer() as server, client.policy(server.url) as policy:
        await client.complete(policy)
        assert server.asked == []
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(partial(client.complete, policy, sampling=tempered))
        assert server.asked == ["the probe of logprobs"] * 2
        assert len(server.requests) == 6


async def test_a_server_that_comes_back_has_its_logprobs_probed_again(client: Client) -> None:
    """It may have been started otherwise."""
    tempered = attrs.evolve(client.sampling, temperature=0.7)
    async with StubServer() as server, client.policy(server.url, outage_seconds=60) as policy:
        await policy.describe()
        await client.complete(policy, sampling=tempered)
        server.original_logprobs = True
        await client.complete(policy, sampling=tempered)
        (worker,) = policy.servers.workers.all
        worker.unreachable = True
        with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await client.complete(policy, sampling=tempered)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({1: -1.0, 2: -1.001}, {1: -1.0, 2: -1.0005}, "two ids are 0.001 apart at temperature 1"),
        ({1: -1.0, 2: -3.0}, {1: -1.0, 2: -2.4}, "and 0.7 of it at temperature 2"),
        ({1: -1.0, 2: -3.0}, {3: -1.0, 4: -2.4}, "two ids are 0 apart"),
    ],
)
def test_a_probe_that_shows_nothing_is_refused(first: dict[int, float], second: dict[int, float], message: str) -> None:
    """Equal logprobs, other ids, or a distance that is neither."""
    with pytest.raises(EndpointRefused, match=message):
        generate_probe.reported_by(first, second)


def test_an_answer_without_the_probed_ids_is_refused_or_tried_again() -> None:
    """A proxy dropped the field; or a weight update aborted the request."""
    with pytest.raises(EndpointRefused, match="output_top_logprobs: got 0 ids; expected 8"):
        generate_probe.top_logprobs(b'{"meta_info": {"finish_reason": {"type": "length"}}}')
    with pytest.raises(EndpointUnavailable, match="aborted"):
        generate_probe.top_logprobs(b'{"meta_info": {"finish_reason": {"type": "abort"}}}')


async def test_top_k_1_is_sent_and_recorded_as_temperature_0(client: Client) -> None:
    """SGLang tempers the logprob of such a token only in a batch with requests that are not greedy."""
    sampling = SamplingParams(temperature=0.5, top_k=1)
    assert (sampling.greedy, sampling.sent_temperature) == (True, 0.0)
    async with StubServer() as server, client.policy(server.url) as policy:
        await client.complete(policy, sampling=sampling)
    assert server.requests[0].sampling_params["temperature"] == 0.0
    assert server.asked == [], "greedy logprobs are the same on all servers"


@pytest.mark.parametrize("name", ["", "json_schema", "regex", "ebnf"])
async def test_the_record_names_the_distribution(client: Client, name: str) -> None:
    """Logprobs are over the ids that the grammar allowed."""
    sampling = SamplingParams(max_new_tokens=8, **({name: '{"type": "object"}'} if name else {}))
    async with StubServer() as server, client.policy(server.url) as policy:
        completion = await client.complete(policy, sampling=sampling)
    assert completion.logprobs_of == ("constrained" if name else "tempered")
