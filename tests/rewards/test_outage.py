"""Servers of rewards that cannot be reached: finished rollouts wait, deadlines stand still, and nothing is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from aiohttp import web

from rollouts.concurrency.deadlines import deadline, pauses
from rollouts.errors import ConfigError, EndpointAway, RewardFailure
from rollouts.rewards import Judge, LLMJudge, RemoteReward, Teacher
from rollouts.testing.json_server import JsonServer
from rollouts.testing.loopback import on_loopback
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample
from rollouts.training.manager import AsyncRolloutManager
from tests.raw_server import Visit, raw_server


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.rewards.outage._POLL_SECONDS", 0.02)


def lengths(asked: Any) -> Any:
    return {"rewards": [float(len(sample["response"])) for sample in asked["samples"]]}


class Port:
    """A port at which a reward server comes and goes; it records how many samples each request has."""

    def __init__(self) -> None:
        self.number = 0
        self.sizes: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number}"

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            self.sizes.append(len(body["samples"]))
            return web.json_response(lengths(body))

        app = web.Application()
        app.router.add_post("/", handle)
        async with on_loopback(app, self.number) as runner:
            self.number = runner.addresses[0][1]
            yield


@pytest.fixture
async def port() -> Port:
    """The port of a server that is away."""
    found = Port()
    async with found.served():
        pass
    return found


def reward_at(url: str, **options: Any) -> RemoteReward:
    return RemoteReward(url, **{"attempts": 2, "backoff_seconds": 0.01, "batch_size": 1, **options})


def some(count: int) -> list[Sample]:
    return [Sample(response="x" * number, tokens=[1]) for number in range(count)]


async def scored(reward: RemoteReward, samples: list[Sample]) -> list[float]:
    results = [0.0] * len(samples)

    async def one(number: int) -> None:
        results[number] = await reward(samples[number])

    async with anyio.create_task_group() as tasks:
        for number in range(len(samples)):
            tasks.start_soon(one, number)
    return results


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - of a server's callback
            await anyio.sleep(0.01)


@contextlib.asynccontextmanager
async def after(seconds: float, port: Port) -> AsyncIterator[None]:
    """Serve at the port from some seconds after the start on."""
    async with anyio.create_task_group() as tasks:
        stop = anyio.Event()

        async def serve() -> None:
            await anyio.sleep(seconds)
            async with port.served():
                await stop.wait()

        tasks.start_soon(serve)
        yield
        stop.set()


@pytest.mark.parametrize("batch_size", [1, 32])
async def test_finished_samples_wait_for_a_server_that_is_away(
    port: Port, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than their attempts and every deadline around them; one line names the address, and one its return."""
    caplog.set_level(logging.WARNING)
    reward = reward_at(port.url, batch_size=batch_size, seconds=0.3)
    async with after(0.8, port):
        with deadline(0.4) as limit:
            assert await scored(reward, some(20)) == [float(number) for number in range(20)]
        assert not limit.expired
    first, second = [record.getMessage() for record in caplog.records if record.name == "rollouts.rewards.outage"]
    assert first.startswith(
        f"no answer from {port.url}: rewards wait for it for up to 1800 s (outage_seconds); the last: "
    )
    assert second.startswith(f"{port.url} takes requests again after 0.")
    assert sum(port.sizes) == 20


async def test_one_request_at_a_time_asks_whether_the_server_is_back(port: Port) -> None:
    """However many samples wait."""
    reward = reward_at(port.url, seconds=5.0, attempts=1)
    async with after(0.5, port):
        await scored(reward, some(50))
    assert reward._post.requests < 50 + 50 + 0.5 / 0.02 + 10


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_without_its_server_is_waited_for(status: int) -> None:
    """Longer than the attempts; 500 is an error of the server itself."""
    refusals = iter([(status, {"error": "no backend"})] * 8)
    async with JsonServer(lambda asked: next(refusals, lengths(asked.body))) as server:
        assert await reward_at(server.url)(some(2)[1]) == 1.0
    async with JsonServer(lambda asked: (500, {"error": "bug"})) as server:
        with pytest.raises(RewardFailure, match="no reply in 2 attempts; the last: status 500: bug"):
            await reward_at(server.url)(some(1)[0])
        assert len(server.asked) == 2


async def test_a_proxy_that_resets_connections_is_waited_for() -> None:
    """It accepts each connection while its server is away."""
    visits = iter(range(8))

    async def visited(visit: Visit) -> None:
        await visit.request()
        if next(visits, None) is not None:
            visit.reset()
            return
        await visit.say(b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"rewards":[0.5]}')

    async with raw_server(visited) as number:
        assert await reward_at(f"http://127.0.0.1:{number}")(some(1)[0]) == 0.5


async def test_a_response_that_breaks_off_is_no_outage() -> None:
    """The server is there: the attempts are counted."""
    asked = 0

    async def visited(visit: Visit) -> None:
        nonlocal asked
        await visit.request()
        asked += 1
        await visit.say(b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"rewa')

    async with raw_server(visited) as number:
        with pytest.raises(RewardFailure, match=r"no reply in 2 attempts; .*in the middle of the response"):
            await reward_at(f"http://127.0.0.1:{number}")(some(1)[0])
    assert asked == 2


async def test_a_request_that_ends_its_server_fails_alone(port: Port) -> None:
    """The server starts again each time, and the others get their rewards."""
    deaths = 0
    up = anyio.Event()

    async def supervised(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        nonlocal deaths, up
        while True:
            died = anyio.Event()

            async def handle(request: web.Request, died: anyio.Event = died) -> web.Response:
                body = await request.json()
                if body["samples"][0]["response"] == "x" * 3:
                    died.set()
                    assert request.transport is not None
                    request.transport.abort()
                    await anyio.sleep_forever()
                return web.json_response(lengths(body))

            app = web.Application()
            app.router.add_post("/", handle)
            async with on_loopback(app, port.number):
                if not deaths:
                    task_status.started()
                await died.wait()
            deaths += 1
            await anyio.sleep(0.1)

    results: dict[int, Any] = {}
    reward = reward_at(port.url)
    samples = some(6)

    async def one(number: int) -> None:
        try:
            results[number] = await reward(samples[number])
        except RewardFailure as error:
            results[number] = str(error)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as servers:
            await servers.start(supervised)
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(one, number)
            servers.cancel_scope.cancel()
    assert "connection broke" in results.pop(3)
    assert results == {number: float(number) for number in (0, 1, 2, 4, 5)}
    assert deaths <= 8


async def test_a_refusal_ends_the_wait(port: Port) -> None:
    """The server is back: its error is that of the request, as without an outage."""
    async with anyio.create_task_group() as tasks:
        caught: list[str] = []

        async def one() -> None:
            try:
                await reward_at(port.url)(some(1)[0])
            except RewardFailure as error:
                caught.append(str(error))

        tasks.start_soon(one)
        await anyio.sleep(0.2)
        app = web.Application()  # 404 for all
        async with on_loopback(app, port.number):
            await until(lambda: bool(caught))
    assert "status 404" in caught[0]


async def test_a_server_that_takes_requests_and_hangs_is_late(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a request stands still while no server is there, and not while one has the request."""
    monkeypatch.setattr("rollouts.rewards.outage._PROBE_SECONDS", 0.1)
    app = web.Application()

    async def hang(request: web.Request) -> web.Response:
        await anyio.sleep_forever()
        raise AssertionError

    app.router.add_post("/", hang)
    found: list[str] = []

    async def one() -> None:
        with pytest.raises(RewardFailure) as caught:
            await reward_at(port.url, seconds=0.5)(some(1)[0])
        found.append(str(caught.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(0.2)
        async with on_loopback(app, port.number):
            await until(lambda: bool(found))
    assert "did not answer within 0.5 s" in found[0]


async def test_no_answer_for_outage_seconds_ends_the_run(port: Port) -> None:
    """Its prompts are returned, and no group fails; ``outage_seconds=0`` waits for nothing."""
    expected = rf"no answer from {port.url} for 0.1 s \(outage_seconds\); .*cannot connect"
    with pytest.raises(EndpointAway, match=expected):
        await reward_at(port.url, outage_seconds=0.1)(some(1)[0])
    with pytest.raises(RewardFailure, match=r"no reply in 2 attempts; the last: .*cannot connect"):
        await reward_at(port.url, outage_seconds=0)(some(1)[0])
    with pytest.raises(ConfigError, match=r"outage_seconds: got inf; expected a number of seconds >= 0"):
        reward_at(port.url, outage_seconds=float("inf"))


async def test_a_wait_that_was_cancelled_leaves_no_patience_spent(port: Port) -> None:
    """The next request, long after it, waits as long as the first."""
    reward = reward_at(port.url, outage_seconds=0.4)
    with anyio.move_on_after(0.2):
        await reward(some(1)[0])
    await anyio.sleep(0.4)
    async with after(0.2, port):
        assert await reward(some(2)[1]) == 1.0


async def play(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.lowlevel.checkpoint()
    return [Sample(response="x", tokens=[1, 2], loss_mask=[0, 1])]


def manager_of(reward: Callable[..., Any], **options: Any) -> AsyncRolloutManager:
    sizes: dict[str, Any] = {"batch_size": 2, "n_samples_per_prompt": 2, "over_sampling_factor": 2.0}
    config = RolloutConfig(**sizes, generate_fn=play, reward_fn=reward, **options)
    return AsyncRolloutManager(config, DataBuffer([f"p{number}" for number in range(99)]))


@pytest.mark.parametrize("group_rm", [False, True])
async def test_a_run_loses_no_group_by_an_outage(port: Port, group_rm: bool) -> None:
    """Neither by its deadlines of rewards and groups; while it waits, no new group starts."""
    reward = reward_at(port.url, batch_size=32)
    manager = manager_of(reward.group if group_rm else reward, group_rm=group_rm, reward_seconds=0.3, group_seconds=0.4)
    batch: list[Sample] = []

    async def fill() -> None:
        batch.extend(await manager.generate_batch())

    async with after(1.0, port), anyio.create_task_group() as tasks:
        tasks.start_soon(fill)
        await anyio.sleep(0.7)
        assert [pause.what for pause in pauses()] == [f"no answer from {port.url}"]
        manager._top_up()
        assert manager.accounting.taken == 4
    assert pauses() == []
    assert [sample.reward for sample in batch] == [1.0] * 4
    assert manager.accounting.failed == 0


async def test_a_run_ends_with_its_prompts_returned(port: Port) -> None:
    """After ``outage_seconds``; no group fails."""
    manager = manager_of(reward_at(port.url, outage_seconds=0.1))
    with pytest.raises(EndpointAway, match="no answer from"):
        await manager.generate_batch()
    counts = manager.accounting
    assert (counts.taken, counts.returned, counts.failed) == (4, 4, 0)


async def test_a_quorum_does_not_wait_for_a_judge_that_is_away(port: Port) -> None:
    """Its verdict is missing, as before; without a quorum below the number of judges, it is waited for."""
    verdict = {"choices": [{"message": {"content": '{"reason": "", "score": 1}'}}]}
    async with JsonServer(lambda asked: verdict) as server:
        judges = [Judge("here", server.url), Judge("away", port.url)]
        sample = Sample(prompt="?", response="!", tokens=[1], messages=[{"role": "assistant", "content": "!"}])
        options: dict[str, Any] = {"attempts": 1, "backoff_seconds": 0}
        assert await LLMJudge(judges, "good", quorum=1, **options)(sample) == 1.0
        with pytest.raises(EndpointAway):
            await LLMJudge(judges, "good", outage_seconds=0.1, **options)(sample)


async def test_a_teacher_that_is_away_is_waited_for(port: Port) -> None:
    """Teachers are clients of the same kind; an endpoint's ``outage_seconds`` holds for it."""
    sample = Sample(tokens=[1, 2], loss_mask=[0, 1])
    with pytest.raises(EndpointAway, match="outage_seconds"):
        await Teacher(f"{port.url}/generate", attempts=1, outage_seconds=0.1).score(sample)


@pytest.fixture(autouse=True)
def no_pause_stays() -> Iterator[None]:
    yield
    assert pauses() == []
