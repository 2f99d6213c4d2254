"""Concurrency limit of a server, fixed and adaptive."""

from __future__ import annotations

import math
from collections.abc import Mapping

import anyio
import anyio.lowlevel
import pytest

from rollouts.dtypes import Endpoint, SamplingParams, packed_tokens
from rollouts.errors import ConfigError
from rollouts.inference import limiter
from rollouts.inference.base import CompletionRequest
from rollouts.inference.limiter import AdaptiveLimit, Load, read_load
from rollouts.inference.sglang import SGLangPolicy
from rollouts.testing.server import Request, StubServer

ONE = SamplingParams(max_new_tokens=4)


async def limits_after(adaptive: AdaptiveLimit, load: Load, updates: int, *, waiting: bool = True) -> list[float]:
    """Return the limit after each of several updates with one load, while all slots are taken."""
    limits: list[float] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(updates):
            while adaptive.limiter.available_tokens > 0:
                adaptive.limiter.acquire_on_behalf_of_nowait(object())
            if waiting:
                tasks.start_soon(adaptive.limiter.acquire_on_behalf_of, object())
                await anyio.wait_all_tasks_blocked()
            adaptive.update(load)
            limits.append(adaptive.limiter.total_tokens)
        tasks.cancel_scope.cancel()
    return limits


async def test_a_limit_doubles_until_the_server_is_full_and_then_grows_by_steps() -> None:
    """Additive increase; multiplicative decrease at every other query."""
    adaptive = AdaptiveLimit(anyio.CapacityLimiter(1))
    first = limiter.FIRST_LIMIT
    assert await limits_after(adaptive, Load(60, 0), 2) == [2 * first, 4 * first]
    cut = math.floor(4 * first * limiter.CUT)
    assert await limits_after(adaptive, Load(100, 40), 2) == [cut, cut]
    assert await limits_after(adaptive, Load(100, 9), 2) == [cut + limiter.STEP, cut + 2 * limiter.STEP]


async def test_a_full_cache_is_congestion_though_nothing_queues() -> None:
    """The server is about to retract running requests."""
    adaptive = AdaptiveLimit(anyio.CapacityLimiter(1))
    assert await limits_after(adaptive, Load(30, 0, kv_use=0.95), 1) == [math.floor(limiter.FIRST_LIMIT * limiter.CUT)]


async def test_a_limit_for_which_no_request_waits_does_not_grow() -> None:
    """Nothing in the load would justify its growth."""
    adaptive = AdaptiveLimit(anyio.CapacityLimiter(1))
    assert await limits_after(adaptive, Load(3, 0), 3, waiting=False) == [limiter.FIRST_LIMIT] * 3


async def test_a_limit_never_falls_below_one() -> None:
    """However full the server stays."""
    adaptive = AdaptiveLimit(anyio.CapacityLimiter(1))
    assert (await limits_after(adaptive, Load(1, 500), 100, waiting=False))[-1] == 1


@pytest.mark.parametrize("answer", [None, [], {"loads": []}, {"loads": [3]}, {"version": "x"}])
def test_other_responses_are_no_load(answer: object) -> None:
    """A router's 404, or another server."""
    assert read_load(answer) is None


def test_ranks_are_added_and_the_fullest_counts() -> None:
    """Missing and invalid numbers count as 0."""
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},
        {"num_running_reqs": 4, "token_usage": 0.7},
    ]
    assert read_load({"loads": [*ranks, {"num_running_reqs": "many"}]}) == Load(7, 1, 0.7)


@pytest.mark.parametrize("concurrency", [0, True, "fast", 1.5])
def test_a_concurrency_is_checked(concurrency: object) -> None:
    """The message contains the field."""
    with pytest.raises(ConfigError, match=r"Endpoint.concurrency: got .*expected an integer >= 1"):
        Endpoint(concurrency=concurrency)  # type: ignore[arg-type]


async def complete_many(policy: SGLangPolicy, count: int) -> None:
    async with anyio.create_task_group() as tasks:

        async def one(number: int) -> None:
            await policy.complete(CompletionRequest(packed_tokens([number]), ONE, session=f"s{number}"))

        for number in range(count):
            tasks.start_soon(one, number)


async def test_a_fixed_number_is_never_exceeded() -> None:
    """At each server."""
    async with StubServer() as one, StubServer() as two:
        async with SGLangPolicy(Endpoint(base_url=[one.url, two.url], concurrency=3)) as policy:
            await complete_many(policy, 40)
        assert len(one.requests) + len(two.requests) == 40
        assert max(one.most_live, two.most_live) <= 3
        assert "/v1/loads" not in one.asked


class Engine:
    """An engine with 8 slots and a queue, which reports both as its load."""

    def __init__(self) -> None:
        self.slots = anyio.Semaphore(8)
        self.in_flight = 0
        self.longest_queue = 0

    async def serve(self, request: Request) -> None:
        self.in_flight += 1
        self.longest_queue = max(self.longest_queue, self.in_flight - 8)
        try:
            async with self.slots:
                await anyio.sleep(0.002)
        finally:
            self.in_flight -= 1

    def loads(self) -> Mapping[str, float]:
        return {"num_running_reqs": min(self.in_flight, 8), "num_waiting_reqs": max(0, self.in_flight - 8)}


async def test_an_adaptive_number_follows_the_server() -> None:
    """It decreases until the server reports almost no queue."""
    engine = Engine()
    async with StubServer(latency=engine.serve, loads=engine.loads) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, concurrency="adaptive")) as policy:
            (worker,) = policy.servers.workers.all
            assert worker.adaptive_limit is not None
            worker.adaptive_limit.query_seconds = 0.01
            await complete_many(policy, 600)
            limit = worker.limiter.total_tokens
        assert engine.longest_queue <= limiter.FIRST_LIMIT - 8
        assert limit <= 8 + 2 * limiter.STEP
        assert server.asked.count("/v1/loads") > 3


async def test_a_server_without_loads_is_not_limited() -> None:
    """And its load is not queried again."""
    async with StubServer() as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, concurrency="adaptive")) as policy:
            await complete_many(policy, 100)
            (worker,) = policy.servers.workers.all
        assert worker.limiter.total_tokens == math.inf
        assert worker.adaptive_limit is not None
        assert worker.adaptive_limit.unsupported


async def test_the_embedded_engine_reports_its_load(engine_url: str) -> None:
    """In the format of a real server."""
    async with SGLangPolicy(Endpoint(base_url=engine_url, concurrency="adaptive")) as policy:
        await complete_many(policy, 40)
        (worker,) = policy.servers.workers.all
    assert worker.adaptive_limit is not None
    assert worker.adaptive_limit.load is not None
    assert not worker.adaptive_limit.unsupported


async def test_sessions_leave_a_slow_server() -> None:
    """Sessions of a server that does not answer move to the other one at their next call."""
    released = anyio.Event()

    async def wait(request: Request) -> None:
        await released.wait()

    async with StubServer(latency=wait) as slow, StubServer() as fast:
        async with SGLangPolicy(Endpoint(base_url=[slow.url, fast.url])) as policy:
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(policy.complete, CompletionRequest(packed_tokens([number]), ONE))
                while slow.most_live < 10 or policy.totals.completions < 10:
                    await anyio.lowlevel.checkpoint()
                session = next(f"s{n}" for n in range(99) if policy.servers.workers.worker_for(f"s{n}").url == fast.url)
                policy.servers.workers._sessions["s"] = policy.servers.workers.all[0]
                await policy.complete(CompletionRequest(packed_tokens([1, 2]), ONE, session="s"))
                assert policy.servers.workers.worker_for("s").url == fast.url
                assert policy.servers.workers.worker_for(session).url == fast.url
                assert policy.servers.workers.moved == 1
                released.set()
