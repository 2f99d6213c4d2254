"""The stub server: it records requests, and has the faults of real servers."""

from __future__ import annotations

from typing import Any

import aiohttp
import anyio
import pytest

from rollouts.errors import ConfigError
from rollouts.testing.replies import Answer, Request, reply_body
from rollouts.testing.server import StubServer


async def post(server: StubServer, route: str = "/generate", **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + route, json={"input_ids": [1, 2], "rid": "r", **body}) as answer,
    ):
        return answer.status, await answer.json(content_type=None) if answer.content_length else None


async def test_a_reply_has_sglangs_shape() -> None:
    """Ids, triples, counts, version spans and the reason of the end."""
    async with StubServer(lambda ids, params: [*ids, 7]) as server:
        status, answer = await post(server)
    meta = answer["meta_info"]
    assert (status, answer["output_ids"]) == (200, [1, 2, 7])
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [1, 2, 7]
    assert meta["finish_reason"] == {"type": "stop", "matched": 7}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 2, 3)
    assert meta["weight_versions"] == [{"version": "v1", "start": 0, "end": 3}]


async def test_a_budget_cuts_a_reply() -> None:
    """As an engine does that runs out of it."""
    async with StubServer(lambda ids, params: [7] * 9) as server:
        _, answer = await post(server, sampling_params={"max_new_tokens": 4})
    assert answer["output_ids"] == [7] * 4
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


async def test_a_script_may_say_logprobs_and_the_end_or_everything() -> None:
    """Three forms of a reply: ids, ids with logprobs and a reason, the body itself."""
    request = Request("r", [1], {}, {}, {})
    body = reply_body(lambda ids, params: ([7], [-0.25], {"type": "abort"}), request, "none")
    assert body["meta_info"]["output_token_logprobs"] == [[-0.25, 7, None]]
    assert body["meta_info"]["finish_reason"] == {"type": "abort"}
    assert reply_body(lambda ids, params: (7, 8, 9), request, "none")["output_ids"] == [7, 8, 9]
    assert reply_body(lambda ids, params: {"x": 1}, request, "none") == {"x": 1}


async def test_what_arrived_is_recorded() -> None:
    """Ids, parameters, headers and the body, in order."""
    async with StubServer() as server:
        await post(server, rid="a", sampling_params={"top_k": 1})
        await post(server, rid="b")
    first, second = server.requests
    assert (first.rid, second.rid) == ("a", "b")
    assert first.sampling_params == {"top_k": 1}
    assert first.headers["Content-Type"] == "application/json"
    assert repr(server) == f"<StubServer {server.url}: 2 requests, 0 aborted>"


async def test_faults_come_one_a_request() -> None:
    """Faults occur in order and then end; an unknown fault is refused."""
    async with StubServer(faults=["error_503", Answer(418, b'"tea"'), "none"]) as server:
        assert [(await post(server))[0] for _ in range(4)] == [503, 418, 200, 200]


async def test_an_abort_ends_a_generation_with_what_there_is() -> None:
    """The waiting request returns part of its reply; requests whose rid starts with its rid are aborted, too."""
    async with StubServer(lambda ids, params: [1, 2, 3, 4], faults=["hang"] * 3) as server:
        answers: dict[str, Any] = {}

        async def ask(rid: str) -> None:
            answers[rid] = (await post(server, rid=rid))[1]

        async with anyio.create_task_group() as tasks:
            for rid in ("t-1", "t-10", "u"):
                tasks.start_soon(ask, rid)
            while len(server.live) < 3:
                await anyio.lowlevel.checkpoint()
            await post(server, "/abort_request", rid="t-")
            assert server.live == {"t-1", "t-10", "u"}
            await post(server, "/abort_request", rid="t-1")
            assert server.live == {"u"}
            await post(server, "/abort_request", rid="u")
        assert all(answer["output_ids"] == [1, 2] for answer in answers.values())
        assert all(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers.values())


async def test_a_broken_connection_does_not_end_a_generation() -> None:
    """The generation lives until it is aborted, and its rid cannot be reused until then."""
    async with StubServer(faults=["reset"]) as server:
        with pytest.raises(aiohttp.ClientError):
            await post(server)
        assert server.live == {"r"}
        status, answer = await post(server)
        assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: r")
        await post(server, "/abort_request")
        assert (await post(server))[0] == 200


async def test_a_fault_that_does_not_exist_is_a_mistake() -> None:
    """Said where the server is made."""
    with pytest.raises(ConfigError, match="faults"):
        StubServer(faults=["nonsense"])  # type: ignore[list-item]
