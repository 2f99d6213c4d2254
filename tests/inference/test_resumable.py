"""Pause and resume: replies continue from their own ids, and deadlines are paused meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import deadline
from rollouts.dtypes import Completion, Endpoint, SamplingParams, TokenColumn, VersionSpan, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.engine.teacher import Teacher
from rollouts.errors import ConfigError, EndpointUnavailable, GenerateFailure
from rollouts.inference.base import CompletionRequest, ServerInfo, describe_once
from rollouts.inference.resumable import ResumablePolicy, SessionRecorder
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer.tokenizer import Codec, load_tokenizer
from rollouts.trajectory import digest
from tests.interruptions import check_stops_at_every_split, deviation_of_repeats, interrupted

PROMPT = packed_tokens([1, 2, 3])


class CountingPolicy:
    """Samples the position as token, one per checkpoint; can be interrupted between two tokens."""

    def __init__(self) -> None:
        self.version = 1
        self.requests: list[TokenColumn] = []
        self.routes: list[str] = []
        self.interruptions = 0
        self.abort_at_once = 0
        self.on_token: Callable[[int], None] = lambda count: None

    async def complete(self, request: CompletionRequest) -> Completion:
        tokens = request.tokens
        self.requests.append(tokens)
        self.routes.append(request.route)
        seen = self.interruptions
        sampled: list[int] = []
        reason = "length"
        if self.abort_at_once:
            self.abort_at_once -= 1
            reason = "abort"
        while reason == "length" and len(sampled) < request.sampling.max_new_tokens:
            sampled.append(len(tokens) + len(sampled))
            self.on_token(sampled[-1])
            await anyio.lowlevel.checkpoint()
            if self.interruptions > seen:
                reason = "abort"
        return Completion(
            tokens=sampled,
            logprobs=[-float(token) for token in sampled],
            finish_reason=reason,  # type: ignore[arg-type]  # one of two
            versions=[VersionSpan(str(self.version), 0, len(sampled))] if sampled else [],
            prompt_tokens=len(tokens),
            prompt_digest=digest(tokens),
            request_id=f"r{len(self.requests)}",
        )

    async def interrupt(self) -> None:
        self.interruptions += 1

    async def describe(self) -> ServerInfo:
        return ServerInfo()

    async def aclose(self) -> None:
        return None


async def test_an_interrupted_reply_continues_from_its_own_ids() -> None:
    """Three parts, three versions, one completion: every id once, with the logprob of its sampling."""
    inner = CountingPolicy()
    policy = ResumablePolicy(inner)
    stops = {7, 9}
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await policy.pause()
            assert policy.in_flight == 0
            inner.version += 1
            policy.resume()

        def watch(token: int) -> None:
            if token in stops:
                stops.remove(token)
                tasks.start_soon(stop)

        inner.on_token = watch
        completion = await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=12)))
    assert completion.tokens.tolist() == list(range(3, 15))
    assert completion.logprobs.tolist() == [-float(token) for token in range(3, 15)]
    assert [span.version for span in completion.versions] == ["1", "2", "3"]
    assert (completion.finish_reason, completion.prompt_tokens) == ("length", 3)
    assert completion.prompt_digest == digest(PROMPT)
    for request, following in zip(inner.requests, inner.requests[1:], strict=False):
        assert following[: len(request)].tolist() == request.tolist()
    assert policy.resumed == 2


async def test_nothing_is_sampled_while_paused() -> None:
    """New requests wait for the resume."""
    inner = CountingPolicy()
    policy = ResumablePolicy(inner)
    await policy.pause()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(policy.complete, CompletionRequest(PROMPT, SamplingParams(max_new_tokens=2)))
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert inner.requests == []
        policy.resume()
    assert len(inner.requests) == 1


async def test_deadlines_do_not_run_while_paused() -> None:
    """An episode that waits for a trainer step does not expire; its deadline continues afterwards."""
    inner = CountingPolicy()
    policy = ResumablePolicy(inner)
    await policy.pause()
    async with anyio.create_task_group() as tasks:

        async def episode() -> None:
            with deadline(0.05) as limit, boundary(GenerateFailure, "a rollout", seconds=0.05):
                await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=2)))
            assert not limit.expired

        tasks.start_soon(episode)
        await anyio.sleep(0.15)
        policy.resume()
    with pytest.raises(GenerateFailure, match="did not answer"), boundary(GenerateFailure, "a rollout", seconds=0.01):
        await anyio.sleep(5)


async def test_an_abort_by_the_server_is_resumed_too() -> None:
    """As by a weight update of another process."""
    inner = CountingPolicy()
    inner.abort_at_once = 1
    policy = ResumablePolicy(inner)
    completion = await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3)))
    assert completion.tokens.tolist() == [3, 4, 5]
    assert completion.finish_reason == "length"


async def test_a_server_that_only_aborts_is_an_error() -> None:
    """After a number of consecutive aborts without a token."""
    inner = CountingPolicy()
    inner.abort_at_once = 1000
    with pytest.raises(EndpointUnavailable, match="before its first token"):
        await ResumablePolicy(inner, backoff_seconds=0.0).complete(
            CompletionRequest(PROMPT, SamplingParams(max_new_tokens=3))
        )


async def test_at_most_limits_requests_in_flight() -> None:
    """Also across pauses; every request completes."""
    inner = CountingPolicy()
    policy = ResumablePolicy(inner, at_most=2)
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, policy.in_flight)

    inner.on_token = watch
    async with anyio.create_task_group() as tasks:
        for _ in range(7):
            tasks.start_soon(policy.complete, CompletionRequest(PROMPT, SamplingParams(max_new_tokens=4)))
        await anyio.lowlevel.checkpoint()
        await policy.pause()
        policy.resume()
    assert most == 2
    assert policy.in_flight == 0


async def test_the_sessions_of_calls_are_recorded() -> None:
    """In order of first use; calls of the policy inside are not listed."""
    policy = ResumablePolicy(CountingPolicy())
    recorder = SessionRecorder(policy)
    for name in ("b", "a", "b"):
        await recorder.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=1), session=name))
    await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=1), session="c"))
    assert recorder.sessions == ["b", "a"]


async def test_recorders_of_one_policy_describe_its_server_once() -> None:
    """Each rollout has a recorder; the server is queried once, also if all begin at the same time."""
    asked = 0

    class Described(CountingPolicy):
        async def describe(self) -> ServerInfo:
            nonlocal asked
            asked += 1
            await anyio.sleep(0.01)
            return ServerInfo(max_context=77)

    policy = ResumablePolicy(Described())
    found: list[ServerInfo] = []

    async def describe() -> None:
        found.append(await describe_once(SessionRecorder(policy)))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(describe)
    await describe()
    assert (asked, {info.max_context for info in found}) == (1, {77})


async def test_an_interrupted_reply_of_the_engine_is_the_same() -> None:
    """Greedy, on the embedded engine: a reply that was interrupted repeatedly equals an uninterrupted one."""
    codec = Codec(load_tokenizer(DEMO_MODEL))
    text = "<|im_start|>user\nWhat is (52 + 19) * 7?<|im_end|>\n<|im_start|>assistant\n"
    ids = packed_tokens(codec.encode(text))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=120)
    async with (
        running_server(DEMO_MODEL) as url,
        SGLangPolicy(Endpoint(model=str(DEMO_MODEL), base_url=url)) as client,
    ):
        whole = await client.complete(CompletionRequest(ids, sampling))
        policy = ResumablePolicy(client)
        pieces: list[Completion] = []
        async with anyio.create_task_group() as tasks:

            async def complete() -> None:
                pieces.append(await policy.complete(CompletionRequest(ids, sampling)))

            tasks.start_soon(complete)
            while not pieces:
                await anyio.sleep(0.004)
                await policy.pause()
                policy.resume()
    assert pieces[0].tokens.tolist() == whole.tokens.tolist()
    assert pieces[0].logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert policy.resumed >= 1


async def test_the_parts_of_a_reply_have_its_route() -> None:
    """A completion that continues after an interruption stays on the route of its sequence."""
    inner = CountingPolicy()
    inner.abort_at_once = 1
    policy = ResumablePolicy(inner, backoff_seconds=0)
    await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=2), session="s", route="r"))
    await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=2), session="s"))
    assert inner.routes == ["r", "r", ""]


# -- law 10: an interrupted reply has the distribution of an uninterrupted one ----------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[SGLangPolicy]:
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(Endpoint(model=str(DEMO_MODEL), base_url=url)) as client:
        yield client


async def test_an_interruption_does_not_repeat_random_numbers(engine: SGLangPolicy) -> None:
    """With seeds, the token after an interruption repeats the first token as often as under the policy."""
    teacher = Teacher(DEMO_MODEL, "float32")
    for after in ((), (1,)):
        deviation = await deviation_of_repeats(engine, teacher, 150, after=after)
        assert abs(deviation) < 4, (after, deviation)


async def test_a_stop_string_may_span_an_interruption(engine: SGLangPolicy) -> None:
    """At every split point, the reply ends as an uninterrupted one: ids, logprobs, versions and finish reason."""
    await check_stops_at_every_split(engine)


async def test_the_budget_and_the_minimum_are_those_of_the_whole_reply(engine: SGLangPolicy) -> None:
    """Parts together have at most ``max_new_tokens``, and no stop id within ``min_new_tokens``."""
    sampling = SamplingParams(temperature=2.0, max_new_tokens=40, min_new_tokens=30, seed=3)
    for after in ([1], [29], [30, 5], [7, 7, 7]):
        reply = await interrupted(engine, PROMPT, sampling, after)
        assert 30 < len(reply.tokens) <= 40 or (len(reply.tokens), reply.finish_reason) == (30, "stop")
    exact = SamplingParams(temperature=2.0, max_new_tokens=30, min_new_tokens=30, seed=3)
    reply = await interrupted(engine, PROMPT, exact, [29])
    assert (len(reply.tokens), reply.finish_reason) == (30, "length")


async def test_stop_strings_need_a_decoder() -> None:
    """Without one, a stop string that spans an interruption would be missed: nothing is sent."""
    inner = CountingPolicy()
    with pytest.raises(
        ConfigError, match=r"SamplingParams\.stop: got \('x',\); expected none, or ResumablePolicy\(decode"
    ):
        await ResumablePolicy(inner).complete(CompletionRequest(PROMPT, SamplingParams(stop="x")))
    assert not inner.requests
