"""Routing of sessions to workers."""

from __future__ import annotations

import math
import time

import anyio
import pytest

from rollouts.inference import routing
from rollouts.inference.limiter import AdaptiveLimit, Load
from rollouts.inference.routing import Worker, Workers


@pytest.fixture
def workers() -> Workers:
    return Workers([Worker(f"http://{name}", name) for name in "abc"])


def test_a_new_session_goes_to_the_least_loaded_worker(workers: Workers) -> None:
    """And stays there, even if the others have a lower load later."""
    workers.all[0].in_flight, workers.all[2].in_flight = 2, 1
    worker = workers.worker_for("s")
    assert worker.name == "b"
    worker.in_flight = 9
    assert workers.worker_for("s") is worker
    assert workers.in_flight == 12


def test_idle_workers_are_used_in_turn(workers: Workers) -> None:
    """Without requests in flight, the number of assigned sessions decides."""
    assert sorted(workers.worker_for(f"s{n}").name for n in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_a_session_leaves_a_worker_with_a_much_higher_load(workers: Workers) -> None:
    """Computing its tokens again elsewhere is cheaper than the queue; then it stays there."""
    first = workers.worker_for("s")
    first.in_flight = 40
    for worker in workers.all:
        if worker is not first:
            worker.in_flight = 16
    assert workers.worker_for("s") is first, "more than twice the load, but within SKEW_REQUESTS"
    first.in_flight = 41
    second = workers.worker_for("s")
    assert second is not first
    assert (workers.worker_for("s"), workers.moved) == (second, 1)


def test_a_session_does_not_move_to_an_unreachable_worker(workers: Workers) -> None:
    """Not even without any load there."""
    first = workers.worker_for("s")
    first.in_flight = 99
    for worker in workers.all:
        if worker is not first:
            worker.suspect()
    assert workers.worker_for("s") is first


def test_load_counts_waiting_requests_and_other_clients() -> None:
    """Those of other clients if the server reports its load."""
    limiter = anyio.CapacityLimiter(1)
    worker = Worker("http://a", "a", in_flight=1, limiter=limiter, adaptive_limit=AdaptiveLimit(limiter))
    assert worker.adaptive_limit is not None
    worker.adaptive_limit.update(Load(running=5, waiting=0))
    assert worker.load == 6


def test_an_unreachable_worker_is_the_last_choice(workers: Workers) -> None:
    """Even with the lowest load; if all are unreachable, one of them is used."""
    workers.all[0].suspect()
    assert {workers.worker_for(f"s{n}").name for n in range(4)} == {"b", "c"}
    for worker in workers.all:
        worker.suspect()
    assert workers.worker_for("last") in workers.all


def test_a_session_can_be_moved(workers: Workers) -> None:
    """To another worker, for good; a single worker keeps its sessions."""
    first = workers.worker_for("s")
    second = workers.reassign(first, "s")
    assert second is not first
    assert workers.worker_for("s") is second
    alone = Workers([Worker("http://a", "a")])
    assert alone.reassign(alone.worker_for("s"), "s") is alone.all[0]


def test_the_number_of_sessions_is_bounded(workers: Workers) -> None:
    """The least recently used one is evicted first."""
    first = workers.worker_for("first")
    for number in range(routing.MAX_SESSIONS):
        workers.worker_for(f"s{number}")
    first.in_flight = 1
    assert workers.worker_for("first") is not first


def test_the_repr_is_the_load(workers: Workers) -> None:
    """Name and requests in flight of each."""
    assert repr(workers) == "<Workers: a 0 in flight, b 0 in flight, c 0 in flight>"


def test_a_late_reply_of_earlier_weights_is_not_a_return_to_them() -> None:
    """Only a request sent after the first reply of the present weights shows that earlier ones replaced them."""
    worker = Worker("http://a", "a")
    start = time.monotonic()
    assert [worker.served(version, start) for version in ("v1", "v2", "v1", "v2")] == [False] * 4
    assert worker.changed[1].startswith("v2 ")
    assert worker.served("v1", math.inf)
    assert worker.changed[1].startswith("v1 ")
    assert list(worker.versions) == ["v2", "v1"]
