"""How many requests a server is sent at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import anyio
import anyio.lowlevel
import pytest

from rollouts.dtypes import Endpoint, SamplingParams, packed_tokens
from rollouts.errors import ConfigError
from rollouts.inference import limiter
from rollouts.inference.limiter import AdaptiveLimit, Limiter, Load, read_load
from rollouts.inference.sglang import SGLangPolicy
from rollouts.testing.server import Request, StubServer

ONE = SamplingParams(max_new_tokens=4)


async def test_a_gate_lets_so_many_in_and_the_others_in_their_order() -> None:
    """Each who leaves admits the next."""
    gate = Limiter(2)
    order: list[int] = []
    most = 0

    async def visit(number: int) -> None:
        nonlocal most
        async with gate.place():
            order.append(number)
            most = max(most, gate.inside)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        for number in range(7):
            tasks.start_soon(visit, number)
    assert (order, most, gate.inside, gate.waiting) == (list(range(7)), 2, 0, 0)


async def test_who_gives_up_waiting_takes_no_place() -> None:
    """Whether before or after it was admitted."""
    gate = Limiter(1)
    async with gate.place():
        async with anyio.create_task_group() as tasks:
            scopes = [anyio.CancelScope(), anyio.CancelScope()]

            async def wait(scope: anyio.CancelScope) -> None:
                with scope:
                    async with gate.place():
                        await anyio.lowlevel.checkpoint()

            for scope in scopes:
                tasks.start_soon(wait, scope)
            await anyio.wait_all_tasks_blocked()
            scopes[0].cancel()
            gate.limit = 2  # admits the second, and is cancelled before it runs
            scopes[1].cancel()
    assert (gate.inside, gate.waiting) == (0, 0)


def grown(pace: AdaptiveLimit, load: Load, looks: int, *, waiting: bool = True) -> list[float]:
    """The limits after each of so many looks at one load."""
    limits = []
    for _ in range(looks):
        if waiting and not pace.limiter.waiting:
            pace.limiter._waiting.append(anyio.Event())
        pace.limiter.inside = int(min(pace.limiter.limit, 10**6))
        pace.seen(load)
        limits.append(pace.limiter.limit)
    return limits


async def test_a_limit_doubles_until_the_server_is_full_and_then_grows_by_steps() -> None:
    """Additive increase; multiplicative decrease, at every other look."""
    pace = AdaptiveLimit(Limiter())
    first = limiter.FIRST_LIMIT
    assert grown(pace, Load(60, 0), 2) == [2 * first, 4 * first]
    cut = math.floor(4 * first * limiter.CUT)
    assert grown(pace, Load(100, 40), 2) == [cut, cut]
    assert grown(pace, Load(100, 9), 2) == [cut + limiter.STEP, cut + 2 * limiter.STEP]


async def test_a_full_cache_is_congestion_though_nothing_queues() -> None:
    """What runs then is about to be thrown out."""
    pace = AdaptiveLimit(Limiter())
    assert grown(pace, Load(30, 0, kv_use=0.95), 1) == [math.floor(limiter.FIRST_LIMIT * limiter.CUT)]


async def test_a_limit_that_holds_nobody_back_does_not_grow() -> None:
    """It would mean nothing."""
    pace = AdaptiveLimit(Limiter())
    assert grown(pace, Load(3, 0), 3, waiting=False) == [limiter.FIRST_LIMIT] * 3


async def test_a_limit_never_falls_below_one() -> None:
    """However full the server stays."""
    pace = AdaptiveLimit(Limiter())
    assert grown(pace, Load(1, 500), 100, waiting=False)[-1] == 1


@pytest.mark.parametrize("answer", [None, [], {"loads": []}, {"loads": [3]}, {"version": "x"}])
def test_what_is_no_load_is_none(answer: object) -> None:
    """A router's 404, or another server."""
    assert read_load(answer) is None


def test_ranks_are_added_and_the_fullest_counts() -> None:
    """Fields that are missing are nought; so are numbers that are none."""
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},
        {"num_running_reqs": 4, "token_usage": 0.7},
    ]
    assert read_load({"loads": [*ranks, {"num_running_reqs": "many"}]}) == Load(7, 1, 0.7)


@pytest.mark.parametrize("concurrency", [0, True, "fast", 1.5])
def test_a_concurrency_is_checked(concurrency: object) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=r"Endpoint.concurrency: got .*expected an integer >= 1"):
        Endpoint(concurrency=concurrency)  # type: ignore[arg-type]


async def many(policy: SGLangPolicy, count: int) -> None:
    async with anyio.create_task_group() as tasks:

        async def one(number: int) -> None:
            await policy.complete(packed_tokens([number]), ONE, session=f"s{number}")

        for number in range(count):
            tasks.start_soon(one, number)


async def test_a_fixed_number_is_never_exceeded() -> None:
    """At each server."""
    async with StubServer() as one, StubServer() as two:
        async with SGLangPolicy(Endpoint(base_url=[one.url, two.url], concurrency=3)) as policy:
            await many(policy, 40)
        assert len(one.requests) + len(two.requests) == 40
        assert max(one.most_live, two.most_live) <= 3
        assert "/v1/loads" not in one.asked


class Engine:
    """Has 8 slots: what comes beyond them queues, as its loads say."""

    def __init__(self) -> None:
        self.slots = anyio.Semaphore(8)
        self.here = 0
        self.longest_queue = 0

    async def serve(self, request: Request) -> None:
        self.here += 1
        self.longest_queue = max(self.longest_queue, self.here - 8)
        try:
            async with self.slots:
                await anyio.sleep(0.002)
        finally:
            self.here -= 1

    def loads(self) -> Mapping[str, float]:
        return {"num_running_reqs": min(self.here, 8), "num_waiting_reqs": max(0, self.here - 8)}


async def test_an_adaptive_number_follows_the_server() -> None:
    """It falls from its start until hardly anything queues at the server, by the server's own word."""
    engine = Engine()
    async with StubServer(latency=engine.serve, loads=engine.loads) as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, concurrency="adaptive")) as policy:
            (worker,) = policy._workers.all
            assert worker.adaptive_limit is not None
            worker.adaptive_limit.look_seconds = 0.01
            await many(policy, 600)
            limit = worker.limiter.limit
        assert engine.longest_queue <= limiter.FIRST_LIMIT - 8
        assert limit <= 8 + 2 * limiter.STEP
        assert server.asked.count("/v1/loads") > 3


async def test_a_server_that_does_not_tell_is_not_limited() -> None:
    """Nor asked again."""
    async with StubServer() as server:
        async with SGLangPolicy(Endpoint(base_url=server.url, concurrency="adaptive")) as policy:
            await many(policy, 100)
            (worker,) = policy._workers.all
        assert worker.limiter.limit == math.inf
        assert worker.adaptive_limit is not None
        assert worker.adaptive_limit.deaf


async def test_the_embedded_engine_tells_its_load(engine_url: str) -> None:
    """Its answer is read as a real server's is, and sets the pace."""
    async with SGLangPolicy(Endpoint(base_url=engine_url, concurrency="adaptive")) as policy:
        await many(policy, 40)
        (worker,) = policy._workers.all
    assert worker.adaptive_limit is not None
    assert worker.adaptive_limit.load is not None
    assert not worker.adaptive_limit.deaf


async def test_sessions_leave_a_slow_server() -> None:
    """Of two servers one does not answer: sessions of it that go on later go on at the other."""
    stuck = anyio.Event()

    async def wait(request: Request) -> None:
        await stuck.wait()

    async with StubServer(latency=wait) as slow, StubServer() as fast:
        async with SGLangPolicy(Endpoint(base_url=[slow.url, fast.url])) as policy:
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(policy.complete, packed_tokens([number]), ONE)
                while slow.most_live < 10 or policy.totals.completions < 10:
                    await anyio.lowlevel.checkpoint()
                session = next(f"s{n}" for n in range(99) if policy._workers.of(f"s{n}").url == fast.url)
                policy._workers._sessions["s"] = policy._workers.all[0]
                await policy.complete(packed_tokens([1, 2]), ONE, session="s")
                assert policy._workers.of("s").url == fast.url
                assert policy._workers.of(session).url == fast.url
                assert policy._workers.moved == 1
                stuck.set()
