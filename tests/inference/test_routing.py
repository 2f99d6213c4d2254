"""Which worker serves which session."""

from __future__ import annotations

import pytest

from rollouts.inference import routing as routing
from rollouts.inference.limiter import AdaptiveLimit, Limiter, Load
from rollouts.inference.routing import Worker, Workers


@pytest.fixture
def three() -> Workers:
    return Workers([Worker(f"http://{name}", name) for name in "abc"])


def test_a_new_session_goes_where_least_is_in_flight(three: Workers) -> None:
    """And stays, though others have less to do then."""
    three.all[0].in_flight, three.all[2].in_flight = 2, 1
    worker = three.of("s")
    assert worker.name == "b"
    worker.in_flight = 9
    assert three.of("s") is worker
    assert three.in_flight == 12


def test_idle_workers_are_used_in_turn(three: Workers) -> None:
    """With nothing in flight, load is what was assigned before."""
    assert sorted(three.of(f"s{n}").name for n in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_a_session_leaves_a_worker_that_has_far_more_to_do(three: Workers) -> None:
    """Computing its tokens again elsewhere is cheaper than its place in that queue; and then it stays there."""
    first = three.of("s")
    first.in_flight = 40
    for worker in three.all:
        if worker is not first:
            worker.in_flight = 16
    assert three.of("s") is first, "more than twice as much, but not by enough"
    first.in_flight = 41
    second = three.of("s")
    assert second is not first
    assert (three.of("s"), three.moved) == (second, 1)


def test_a_session_does_not_move_to_an_unreachable_worker(three: Workers) -> None:
    """However little that has to do."""
    first = three.of("s")
    first.in_flight = 99
    for worker in three.all:
        if worker is not first:
            worker.suspect()
    assert three.of("s") is first


def test_what_waits_for_a_place_counts_as_load() -> None:
    """And so do requests of others, where the server tells of them."""
    gate = Limiter(1)
    worker = Worker("http://a", "a", in_flight=1, limiter=gate, adaptive_limit=AdaptiveLimit(gate))
    assert worker.adaptive_limit is not None
    worker.adaptive_limit.seen(Load(running=5, waiting=0))
    assert worker.load == 6


def test_an_unreachable_worker_is_asked_last(three: Workers) -> None:
    """Though it has the least in flight; if none is better it is asked all the same."""
    three.all[0].suspect()
    assert {three.of(f"s{n}").name for n in range(4)} == {"b", "c"}
    for worker in three.all:
        worker.suspect()
    assert three.of("last") in three.all


def test_a_session_can_be_moved(three: Workers) -> None:
    """To another worker, for good; a single worker has no other."""
    first = three.of("s")
    second = three.instead_of(first, "s")
    assert second is not first
    assert three.of("s") is second
    alone = Workers([Worker("http://a", "a")])
    assert alone.instead_of(alone.of("s"), "s") is alone.all[0]


def test_sessions_are_forgotten_in_the_end(three: Workers) -> None:
    """The least recently used first, so that memory has a bound."""
    first = three.of("first")
    for number in range(routing.MAX_SESSIONS):
        three.of(f"s{number}")
    first.in_flight = 1
    assert three.of("first") is not first


def test_the_repr_is_the_load(three: Workers) -> None:
    """Name and requests in flight of each."""
    assert repr(three) == "<Workers: a 0 in flight, b 0 in flight, c 0 in flight>"
