"""A server that is paused for new weights, by the embedded engine: nobody fails of it, and everybody can see it."""

from __future__ import annotations

import anyio
import anyio.to_thread
import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from rollouts.concurrency.deadlines import deadline, pauses
from rollouts.concurrency.wait_report import report
from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import EndpointUnavailable
from rollouts.http.client import HttpClient
from rollouts.inference.pauses import Pause, is_ready, ordered, watch_pauses
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import update_weights
from rollouts.testing.server import StubServer

PROMPT = packed_tokens(range(1, 30))
LONG = SamplingParams(max_new_tokens=900, temperature=3.0)


async def some_time(seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await anyio.sleep_forever()


async def tell(url: str, path: str, **body: str) -> None:
    """What a trainer says to the server, past the policy."""
    transport = HttpClient(connect_seconds=5)
    status, _ = await transport.post(url + path, msgspec.json.encode(body), {"Content-Type": "application/json"})
    assert status == 200
    await transport.aclose()


async def test_a_pause_of_our_own_makes_no_turn_late() -> None:
    """It is told as what it is, costs no attempt, and the turn has its own time afterwards."""
    async with running_server(DEMO_MODEL) as url:
        endpoint = Endpoint(base_url=url, request_seconds=3.0, max_retries=0)
        async with SGLangPolicy(endpoint) as policy:
            await policy.complete(PROMPT, SamplingParams(max_new_tokens=1))  # the engine is warm
            await tell(url, "/pause_generation", mode="retract")
            answers: list[Completion] = []

            async def turn() -> None:
                answers.append(await policy.complete(PROMPT, SamplingParams(max_new_tokens=2)))

            async with anyio.create_task_group() as tasks:
                with ordered(url):
                    for _ in range(3):
                        tasks.start_soon(turn)
                    await some_time(3.5)
                    assert answers == []
                    (still,) = pauses()
                    assert str(still).startswith(f"{url} is paused for new weights for ")
                    assert str(still).endswith("3 turns wait")
                    assert "3 turns wait" in report()
                    await tell(url, "/continue_generation")
            assert [len(answer.tokens) for answer in answers] == [2, 2, 2]
            assert (policy.totals.requests, policy.totals.retries, policy.totals.aborts) == (4, 0, 0)
            assert pauses() == []


async def test_a_pause_that_somebody_else_ordered_is_seen() -> None:
    """By whoever watches, while a reply is on its way; and its end."""
    async with running_server(DEMO_MODEL) as url, SGLangPolicy(Endpoint(base_url=url)) as policy:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_pauses, lambda: [policy], name="watch")

                async def end(watching: anyio.CancelScope) -> None:
                    with deadline(30) as limit:
                        await policy.complete(PROMPT, LONG)
                    assert not limit.expired
                    watching.cancel()

                tasks.start_soon(end, tasks.cancel_scope)
                while not policy.in_flight:
                    await anyio.lowlevel.checkpoint()
                await tell(url, "/pause_generation", mode="in_place")
                while not pauses():
                    await some_time(0.05)
                assert str(pauses()[0]).endswith(", 1 turns wait")
                await tell(url, "/continue_generation")
        await policy.look_for_pauses()
        assert pauses() == []
        assert (policy.totals.requests, policy.totals.retries) == (1, 0)


async def test_new_weights_take_no_time_of_a_turn() -> None:
    """However long they load: the time of a turn is shorter here than its pause."""
    async with running_server(DEMO_MODEL) as url:
        endpoint = Endpoint(base_url=url, request_seconds=30.0, max_retries=0)
        async with SGLangPolicy(endpoint) as policy:
            seen: list[str] = []

            async def watch() -> None:
                while True:
                    seen.extend(map(str, pauses()))
                    await some_time(0.01)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await update_weights(endpoint, DEMO_MODEL, "2", while_running="retract")
                tasks.cancel_scope.cancel()
            assert seen == []  # nobody had asked this server for anything: nobody stands still
            await policy.complete(PROMPT, SamplingParams(max_new_tokens=1))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await update_weights(endpoint, DEMO_MODEL, "3", while_running="retract")
                tasks.cancel_scope.cancel()
            assert any("is paused for new weights" in text for text in seen)
            assert pauses() == []


async def test_a_pause_ordered_in_another_thread_is_known_here() -> None:
    """A trainer has a thread of its own."""
    pause = Pause("http://there", "there")
    clocks = pause.entered()
    with deadline(60):
        before = [pause.is_on]
        async with anyio.create_task_group() as tasks:
            begun, over = anyio.Event(), anyio.Event()

            def order() -> None:
                with ordered("http://there"):
                    anyio.from_thread.run_sync(begun.set)
                    anyio.from_thread.run(over.wait)

            tasks.start_soon(anyio.to_thread.run_sync, order)
            await begun.wait()
            before.append(pause.is_on)
            over.set()
        await anyio.lowlevel.checkpoint()
        before.append(pause.is_on)
    pause.left(clocks)
    assert before == [False, True, False]


async def test_what_was_only_seen_is_not_believed_for_ever() -> None:
    """Whoever paused the server may be dead: then deadlines run again, and turns fail as ever."""
    pause = Pause("http://there", "there", patience=0.0)
    pause.seen(True)
    assert not pause.is_on
    patient = Pause("http://there", "there")
    patient.seen(True)
    assert patient.is_on
    patient.seen(False)
    assert not patient.is_on


async def test_one_that_leaves_does_not_start_the_clock_of_all() -> None:
    """A deadline that several turns are in, of their group, stands still while one of them waits."""
    pause = Pause("http://there", "there")
    with deadline(60) as limit:
        turns = [pause.entered(), pause.entered()]
        with ordered("http://there"):
            pause.left(turns[0])
            assert limit.ends == float("inf")
        assert limit.ends < float("inf")
        pause.left(turns[1])


async def test_a_server_that_does_not_say_is_not_paused() -> None:
    """An older one, a router, or none at all."""
    transport = HttpClient(connect_seconds=5)
    async with StubServer() as server:
        assert await is_ready(transport, server.url, {}) is None
    assert await is_ready(transport, "http://127.0.0.1:9", {}) is None
    await transport.aclose()
    policy = SGLangPolicy(Endpoint(base_url="http://127.0.0.1:9", max_retries=0))
    await policy.look_for_pauses()
    with pytest.raises(EndpointUnavailable):
        await policy.complete(PROMPT, SamplingParams(max_new_tokens=1))
    await policy.aclose()
