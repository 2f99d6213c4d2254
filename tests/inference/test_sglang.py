"""The SGLang client: what goes over the wire, what is believed, what is tried again, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.dtypes import Completion, Endpoint, SamplingParams, VersionSpan
from rollouts.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointUnavailable,
    TokenMismatchError,
)
from rollouts.inference.sglang import SGLangPolicy, shared_policy
from rollouts.inference.transport import Answer
from rollouts.inference.wire import read_completion
from rollouts.testing.server import Fault, Request, StubServer
from rollouts.trajectory import digest

SAMPLING = SamplingParams(max_new_tokens=16)
IDS = np.arange(1, 6, dtype=np.int32)


async def complete(policy: SGLangPolicy, ids: Any = IDS, **options: Any) -> Completion:
    return await policy.complete(np.asarray(ids, np.int32), options.pop("sampling", SAMPLING), **options)


# -- what is sent -----------------------------------------------------------------------------------------------------


async def test_the_request_is_what_sglang_takes() -> None:
    """Ids, output logprobs only, a uuid for a request id, no sampling key that a server does not know."""
    async with StubServer() as server, SGLangPolicy(Endpoint(base_url=server.url, api_key="secret")) as policy:
        sampling = SamplingParams(temperature=0.5, max_new_tokens=7, seed=3, stop=["x"], min_p=0.1)
        await complete(policy, sampling=sampling, stop_token_ids=(2, 9), session="s1")
        (request,) = server.requests
    assert request.input_ids == IDS.tolist()
    assert request.body["return_logprob"] is True
    assert set(request.body) == {"input_ids", "sampling_params", "return_logprob", "rid"}
    assert len(request.rid) == 32
    assert request.sampling_params == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.1, "max_new_tokens": 7, "stop": ["x"],
        "stop_token_ids": [2, 9], "sampling_seed": 3, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    assert request.headers["X-SMG-Routing-Key"] == "s1"
    assert request.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(policy)


async def test_the_completion_is_what_the_server_sampled() -> None:
    """Ids, logprobs, versions and counts come from the answer; the digest is of what was sent."""
    async with (
        StubServer(lambda ids, params: [7, 8, 9]) as server,
        SGLangPolicy(Endpoint(base_url=server.url)) as policy,
    ):
        completion = await complete(policy)
    assert completion.tokens.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == pytest.approx([-1, -1 / 2, -1 / 3])
    assert completion.finish_reason == "stop"
    assert completion.versions == (VersionSpan("v1", 0, 3),)
    assert completion.prompt_tokens == 5
    assert completion.prompt_digest == digest(IDS)
    assert completion.cached_tokens == 4


async def test_a_growing_session_encodes_only_what_is_new() -> None:
    """The body holds all ids each time, and each id was written once."""
    async with StubServer() as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        tokens = np.arange(100, dtype=np.int32)
        for length in (10, 40, 100):
            completion = await complete(policy, tokens[:length], session="a")
            assert completion.prompt_digest == digest(tokens[:length])
        await complete(policy, tokens[50:60], session="a")
        assert [request.input_ids for request in server.requests] == [
            *(list(range(length)) for length in (10, 40, 100)),
            list(range(50, 60)),
        ]
        assert policy.totals.encoded_tokens == 110


@pytest.mark.parametrize("bad", [[1, 2, 50], [-1], [1, 2**31 - 1]])
async def test_ids_that_would_kill_a_server_are_never_sent(bad: list[int]) -> None:
    """The error names the position, the id and the limit."""
    async with StubServer() as server, SGLangPolicy(Endpoint(base_url=server.url), vocab_size=50) as policy:
        with pytest.raises(ConfigError, match=r"token \d of \d: got .*; expected an id below 50"):
            await complete(policy, bad)
        assert not server.requests


async def test_no_ids_are_refused() -> None:
    """An empty prompt is not a request."""
    async with SGLangPolicy(Endpoint()) as policy:
        with pytest.raises(EndpointRefused, match="at least one"):
            await complete(policy, [])


# -- what is believed -------------------------------------------------------------------------------------------------

REFUSED: list[Fault] = ["error_string", "error_type", "no_logprobs"]
RETRIED: list[Fault] = ["reset", "reset_in_body", "error_500", "error_503", "error_in_200", "not_json", "nan"]


@pytest.mark.parametrize("fault", REFUSED)
async def test_a_refusal_is_never_sent_again(fault: Fault) -> None:
    """Whatever its shape, with the server's own words."""
    async with StubServer(faults=[fault]) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        with pytest.raises(EndpointRefused):
            await complete(policy)
        assert len(server.requests) == 1


@pytest.mark.parametrize("fault", RETRIED)
async def test_what_may_pass_is_tried_again_under_a_new_id(fault: Fault) -> None:
    """And what was lost is aborted first, so that no two generations of one call live at once."""
    async with StubServer(faults=[fault]) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        completion = await complete(policy)
        first, second = (request.rid for request in server.requests)
        assert first != second
        assert completion.request_id == second
        assert server.aborted == ([first] if fault.startswith("reset") else [])
        assert policy.totals.retries == 1


async def test_retries_end() -> None:
    """With the last cause, and how often it was tried."""
    async with StubServer(faults=["error_503"] * 5) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, max_retries=1)) as policy:
            with pytest.raises(EndpointUnavailable, match=r"503: The request queue is full. \(after 2 attempts\)"):
                await complete(policy)
        assert len(server.requests) == 2


async def test_a_prompt_that_does_not_fit_is_its_own_error() -> None:
    """The agent loop makes a stop reason of it."""
    async with StubServer(faults=["error_context"]) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        with pytest.raises(ContextOverflow, match="longer than the model's context"):
            await complete(policy)


@pytest.mark.parametrize("fault", ["wrong_ids", "wrong_count"])
async def test_an_answer_that_contradicts_itself_is_a_broken_law(fault: Fault) -> None:
    """It never becomes data, and it is never tried again in silence."""
    async with StubServer(faults=[fault]) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        with pytest.raises(TokenMismatchError):
            await complete(policy)


async def test_an_old_server_is_understood() -> None:
    """Without counts, versions and cache figures there are defaults."""
    async with StubServer(faults=["old"]) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        completion = await complete(policy)
    assert completion.versions == (VersionSpan("default", 0, 3),)
    assert completion.prompt_tokens == 5


async def test_an_aborted_answer_keeps_its_partial_tokens() -> None:
    """It is a completion that says it was aborted."""
    server_reply = StubServer(lambda ids, params: [1, 2, 3, 4], faults=["abort"])
    async with server_reply as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        completion = await complete(policy)
    assert completion.finish_reason == "abort"
    assert completion.tokens.tolist() == [1, 2]


@pytest.mark.parametrize("fault", ["drip", "close_after"])
async def test_slow_and_closing_servers_cost_nothing(fault: Fault) -> None:
    """Every call is answered once, whatever the connection does after it."""
    async with StubServer(faults=[fault] * 20) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        for _ in range(20):
            assert (await complete(policy)).tokens.tolist() == [1, 2, 3]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
META = st.fixed_dictionaries(
    {},
    optional={
        "finish_reason": ANYTHING | st.fixed_dictionaries({"type": st.sampled_from(["stop", "length", "abort", "x"])}),
        "output_token_logprobs": ANYTHING
        | st.lists(st.tuples(st.floats() | st.none(), st.integers(-5, 2**40), st.none()), max_size=4),
        "prompt_tokens": ANYTHING | st.just(5),
        "cached_tokens": ANYTHING,
        "weight_version": ANYTHING,
        "weight_versions": ANYTHING
        | st.lists(
            st.fixed_dictionaries({"version": st.just("v"), "start": st.integers(-1, 4), "end": st.integers(-1, 4)})
        ),
    },
)
BODIES = st.binary(max_size=30) | (
    ANYTHING | st.fixed_dictionaries({"meta_info": META}, optional={"output_ids": st.lists(st.integers(), max_size=4)})
).map(lambda value: msgspec.json.encode(_jsonable(value)))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(entry) for entry in value]
    return value % 2**63 if isinstance(value, int) and not isinstance(value, bool) else value


@settings(max_examples=2000, deadline=None)
@given(body=BODIES, status=st.sampled_from([200, 200, 200, 400, 404, 429, 500, 503]))
def test_any_answer_is_a_completion_or_a_typed_error(body: bytes, status: int) -> None:
    """Nothing that a server says becomes an exception of another kind."""
    options: dict[str, Any] = {"sent": 5, "prompt_digest": 0, "request_id": "r", "seconds": 0.0, "place": "x"}
    try:
        completion = read_completion(Answer(status, body), **options)
    except (EndpointError, TokenMismatchError):
        return
    assert len(completion.tokens) == len(completion.logprobs)
    assert np.isfinite(completion.logprobs).all()


# -- what is left behind ----------------------------------------------------------------------------------------------


async def test_what_is_cancelled_is_aborted() -> None:
    """A hundred requests that nobody waits for any more: the server hears of each."""
    arrived = anyio.Event()

    async def note(request: Request) -> None:
        if len(server.requests) == 100:
            arrived.set()

    async with StubServer(faults=["hang"] * 100, latency=note) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url)) as policy:
            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(complete, policy)
                await arrived.wait()
                tasks.cancel_scope.cancel()
            assert sorted(server.aborted) == sorted(request.rid for request in server.requests)
            assert sum(policy.in_flight) == 0
            assert (await complete(policy)).tokens.tolist() == [1, 2, 3]


async def test_a_call_has_a_deadline() -> None:
    """A server that never answers is given up, and told so."""
    async with StubServer(faults=["hang"]) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, request_seconds=0.05)) as policy:
            with pytest.raises(EndpointUnavailable, match=r"did not answer within 0.05 s"):
                await complete(policy)
        assert server.aborted == [server.requests[0].rid]


async def test_sessions_stay_with_their_worker_and_leave_it_when_it_fails() -> None:
    """Sticky for the prefix cache; the retry goes elsewhere."""
    async with StubServer() as one, StubServer() as two:
        async with SGLangPolicy(Endpoint(base_url=[one.url, two.url])) as policy:
            for session in "abcd":
                for _ in range(3):
                    await complete(policy, session=session)
            sessions = [{request.headers["X-SMG-Routing-Key"] for request in server.requests} for server in (one, two)]
            assert not sessions[0] & sessions[1]
    async with StubServer(faults=["error_503"] * 99) as broken, StubServer() as sound:
        async with SGLangPolicy(Endpoint(base_url=[broken.url, sound.url])) as policy:
            await complete(policy, session="a")
            await complete(policy, session="a")
        assert len(broken.requests) == 1
        assert len(sound.requests) == 2


def test_a_pool_that_nobody_closes_is_closed_with_its_loop() -> None:
    """One for each loop and endpoint, without a warning (which would be an error here)."""

    async def use() -> tuple[SGLangPolicy, int]:
        async with StubServer() as server:
            endpoint = Endpoint(base_url=server.url)
            policy = shared_policy(endpoint)
            async with anyio.create_task_group() as tasks:
                for _ in range(50):
                    tasks.start_soon(complete, shared_policy(endpoint))
            assert server.connections <= 50
            return policy, id(policy._transport._session)

    first, _ = asyncio.run(use())
    second, _ = asyncio.run(use())
    assert first is not second
    del first, second
    gc.collect()


# -- what is it -------------------------------------------------------------------------------------------------------


async def test_describe_tells_what_serves() -> None:
    """Version, model, weights and context."""
    async with StubServer(max_context=99) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        info = await policy.describe()
    assert (info.version, info.model, info.weight_version, info.max_context) == ("0.5.23", "stub", "v1", 99)


async def test_nobody_there_is_said() -> None:
    """With the URL, and what to look at."""
    async with StubServer() as server:
        url = server.url
    async with SGLangPolicy(Endpoint(base_url=url, max_retries=0)) as policy:
        with pytest.raises(EndpointUnavailable, match=rf"{url}: nobody answers there .*is the server up"):
            await policy.describe()
        with pytest.raises(EndpointUnavailable, match=url):
            await complete(policy)


async def test_another_server_is_refused() -> None:
    """One that is not SGLang, by what it lacks."""
    async with StubServer(model_info=None) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        with pytest.raises(EndpointRefused, match="expected an SGLang server"):
            await policy.describe()
    async with StubServer(model_info={"hello": 1}) as server, SGLangPolicy(Endpoint(base_url=server.url)) as policy:
        with pytest.raises(EndpointRefused, match="expected an SGLang server"):
            await policy.describe()
