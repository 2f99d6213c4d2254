"""Pauses of the embedded engine for new weights: they fail no turn, and are listed."""

from __future__ import annotations

import threading

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.concurrency.deadlines import deadline, pauses
from rollouts.concurrency.wait_report import report
from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import EndpointUnavailable
from rollouts.http.client import HttpClient
from rollouts.inference.base import CompletionRequest
from rollouts.inference.pauses import Pause, is_ready, ordered, watch_pauses
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import update_weights
from rollouts.testing.server import StubServer
from tests.engine_requests import control

PROMPT = packed_tokens(range(1, 30))
LONG = SamplingParams(max_new_tokens=900, temperature=3.0)


async def sleep(seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await anyio.sleep_forever()


async def test_a_pause_by_this_process_does_not_expire_deadlines() -> None:
    """It is listed as a pause, costs no attempt, and the deadline of the turn continues afterwards."""
    async with running_server(DEMO_MODEL) as url:
        endpoint = Endpoint(base_url=url, request_seconds=3.0, max_retries=0)
        async with SGLangPolicy(endpoint) as policy:
            await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=1)))  # the engine is warm
            await control(url, "/pause_generation", mode="retract")
            answers: list[Completion] = []

            async def turn() -> None:
                answers.append(await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=2))))

            async with anyio.create_task_group() as tasks:
                with ordered(url):
                    for _ in range(3):
                        tasks.start_soon(turn)
                    await sleep(3.5)
                    assert answers == []
                    (pause,) = pauses()
                    assert str(pause).startswith(f"{url} is paused for new weights for ")
                    assert str(pause).endswith("3 turns wait")
                    assert "3 turns wait" in report()
                    await control(url, "/continue_generation")
            assert [len(answer.tokens) for answer in answers] == [2, 2, 2]
            assert (policy.totals.requests, policy.totals.retries, policy.totals.aborts) == (4, 0, 0)
            assert pauses() == []


async def test_a_pause_by_another_process_is_detected() -> None:
    """By ``watch_pauses`` while a request is in flight; so is its end."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(Endpoint(base_url=url)) as policy:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_pauses, lambda: [policy], name="watch")

                async def end(watching: anyio.CancelScope) -> None:
                    with deadline(30) as limit:
                        await policy.complete(CompletionRequest(PROMPT, LONG))
                    assert not limit.expired
                    watching.cancel()

                tasks.start_soon(end, tasks.cancel_scope)
                while not policy.in_flight:
                    await anyio.lowlevel.checkpoint()
                await control(url, "/pause_generation", mode="in_place")
                while not pauses():
                    await sleep(0.05)
                assert str(pauses()[0]).endswith(", 1 turns wait")
                await control(url, "/continue_generation")
        await policy.poll_pauses()
        assert pauses() == []
        assert (policy.totals.requests, policy.totals.retries) == (1, 0)


async def test_a_weight_update_does_not_expire_deadlines() -> None:
    """An update is listed as a pause if turns have used the server."""
    async with running_server(DEMO_MODEL) as url:
        endpoint = Endpoint(base_url=url, request_seconds=30.0, max_retries=0)
        async with SGLangPolicy(endpoint) as policy:
            listed: list[str] = []

            async def watch() -> None:
                while True:
                    listed.extend(map(str, pauses()))
                    await sleep(0.01)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await update_weights(endpoint, DEMO_MODEL, "2", while_running="retract")
                tasks.cancel_scope.cancel()
            assert listed == []  # no request was sent to this server: no pause to list
            await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=1)))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await update_weights(endpoint, DEMO_MODEL, "3", while_running="retract")
                tasks.cancel_scope.cancel()
            assert any("is paused for new weights" in text for text in listed)
            assert pauses() == []


async def test_a_pause_by_another_thread_is_known() -> None:
    """A trainer may run in another thread."""
    pause = Pause("http://there", "there")
    clocks = pause.entered()
    with deadline(60):
        states = [pause.is_on]
        async with anyio.create_task_group() as tasks:
            started, finish = anyio.Event(), anyio.Event()

            def order() -> None:
                with ordered("http://there"):
                    anyio.from_thread.run_sync(started.set)
                    anyio.from_thread.run(finish.wait)

            tasks.start_soon(anyio.to_thread.run_sync, order)
            await started.wait()
            states.append(pause.is_on)
            finish.set()
        await anyio.lowlevel.checkpoint()
        states.append(pause.is_on)
    pause.left(clocks)
    assert states == [False, True, False]


async def test_a_turn_that_starts_as_a_pause_ends_has_its_deadline() -> None:
    """Another thread has ended the pause, and the event loop has not heard of it yet."""
    pause = Pause("http://there", "there")
    first = pause.entered()
    started, finish = anyio.Event(), threading.Event()

    def order() -> None:
        with ordered("http://there"):
            anyio.from_thread.run_sync(started.set)
            finish.wait()
        ended.set()

    ended = threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, order)
        await started.wait()
        assert pause.is_on
        finish.set()
        ended.wait(20)  # blocks the loop, which therefore does not run what the thread scheduled
        with deadline(60) as limit:
            second = pause.entered()
            assert limit.ends < float("inf")
            pause.left(second)
    pause.left(first)


async def test_a_detected_pause_expires() -> None:
    """Its initiator may be dead: then deadlines run again, and turns fail as usual."""
    pause = Pause("http://there", "there", patience=0.0)
    pause.detected(True)
    assert not pause.is_on
    patient = Pause("http://there", "there")
    patient.detected(True)
    assert patient.is_on
    patient.detected(False)
    assert not patient.is_on


async def test_a_turn_that_ends_does_not_resume_the_deadline_of_others() -> None:
    """A deadline shared by several turns of a group stays paused while one of them waits."""
    pause = Pause("http://there", "there")
    with deadline(60) as limit:
        turns = [pause.entered(), pause.entered()]
        with ordered("http://there"):
            pause.left(turns[0])
            assert limit.ends == float("inf")
        assert limit.ends < float("inf")
        pause.left(turns[1])


async def test_a_server_without_ready_is_not_paused() -> None:
    """An older server, a router, or no server."""
    transport = HttpClient(connect_seconds=5)
    async with StubServer() as server:
        assert await is_ready(transport, server.url, {}) is None
    assert await is_ready(transport, "http://127.0.0.1:9", {}) is None
    await transport.aclose()
    policy = SGLangPolicy(Endpoint(base_url="http://127.0.0.1:9", max_retries=0, outage_seconds=0))
    await policy.poll_pauses()
    with pytest.raises(EndpointUnavailable):
        await policy.complete(CompletionRequest(PROMPT, SamplingParams(max_new_tokens=1)))
    await policy.aclose()
