"""A worker that inference servers do not answer: it costs its own time, not the run, unless it is an outage for all."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import attrs
import pytest

from rollouts.chat_api import BudgetSpent
from rollouts.concurrency.deadlines import paused_deadlines, pauses
from rollouts.distributed import in_processes
from rollouts.distributed.join import _Built, _wait_for_servers
from rollouts.distributed.server_reports import CUT_OFF_SECONDS, ServerReports, report_servers
from rollouts.dtypes import Endpoint, Prompt
from rollouts.errors import EndpointAway, EndpointUnavailable
from rollouts.planning.simulation import VirtualLoop
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.distributed import games
from tests.distributed.links import Local, local_workers

BEAT = {"beat_seconds": 0.5}
AWAY = "no server answers at http://10.0.0.7:30000"


def on_virtual_clock(function: Callable[[], object]) -> None:
    anyio.run(function, backend_options={"loop_factory": VirtualLoop})


def config(generate: Callable[[Sequence[Prompt]], object] = games.generate) -> RolloutConfig:
    """Groups of four that have one attempt; a lost rollout ends the run."""
    whole = attrs.evolve(games.config(attempts=1), generate_fn=generate, reward_fn=None, on_failure="stop")
    return attrs.evolve(whole, rollout_seconds=36_000.0, group_seconds=36_000.0, batch_seconds=36_000.0)


class Servers:
    """Servers that do not answer some workers: a request waits, and after the patience it is an error."""

    def __init__(self, unanswered: set[int], patience: float) -> None:
        self.unanswered, self.patience = unanswered, patience
        self.waiting: set[int] = set()
        self.answers = 0

    def seen_by(self, number: int) -> tuple[str, int]:
        return (AWAY, 0) if number in self.waiting else ("", self.answers)

    def give(self, local: Local) -> None:
        """Let each new worker ask."""
        for link in local.links:
            number = link.number
            link.player.config = config(functools.partial(self.generate, number))

    async def generate(self, number: int, prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(1)
        if number in self.unanswered:
            self.waiting.add(number)
            await anyio.sleep(self.patience)
            raise EndpointAway(f"{AWAY}; no request was answered for {self.patience:g} s")
        self.answers += 1
        return await games.generate(prompts)


@pytest.mark.parametrize("patience", [1800.0, 2.0])
def test_a_worker_that_is_cut_off_costs_the_run_nothing(patience: float, caplog: pytest.LogCaptureFixture) -> None:
    """The other worker plays its rollouts, long before the patience is over; it is named once, and costs no attempt."""

    async def run() -> None:
        servers = Servers({0}, patience)
        async with local_workers(config(), (1, 2), servers=servers.seen_by, **BEAT) as (local, workers):
            await anyio.sleep(1)
            servers.give(local)
            samples, manager = await games.batches(workers.config(config()), 5)
            assert anyio.current_time() < CUT_OFF_SECONDS + 30
        assert sorted(sample.index or 0 for sample in samples) == list(range(60))
        assert (workers.cut_off, workers.deaths, workers.departures) == (1, 0, 0)
        assert (manager.accounting.failed, manager.failures.lost.total()) == (0, 0)
        assert workers.numbers()["workers_cut_off"] == 1

    with caplog.at_level(logging.WARNING, "rollouts.distributed"):
        on_virtual_clock(run)
    (record,) = caplog.records
    assert "worker 0 is cut off" in record.getMessage()
    assert AWAY in record.getMessage()


@pytest.mark.parametrize("unanswered", [{0}, {0, 1}], ids=["the only worker", "all workers"])
def test_an_outage_for_all_workers_ends_the_run_after_its_patience(unanswered: set[int]) -> None:
    """As in one process: nothing is cut off before, and every prompt is returned."""

    async def run() -> None:
        servers = Servers(unanswered, 120.0)
        async with local_workers(config(), len(unanswered), servers=servers.seen_by, **BEAT) as (local, workers):
            servers.give(local)
            async with AsyncRolloutManager(workers.config(config()), DataBuffer(games.PROMPTS)) as manager:
                with pytest.raises(EndpointAway, match="no request was answered for 120 s"):
                    await manager.generate_batch()
            assert 120 <= anyio.current_time() < 180
        assert (manager.accounting.failed, workers.cut_off) == (0, 0)

    on_virtual_clock(run)


def test_an_outage_ends_the_run_although_a_worker_is_idle() -> None:
    """The idle worker tries once; workers that start again do not pass the rollouts on for ever, and none fails."""

    async def run() -> None:
        servers, started = Servers({0, 1}, 1800.0), list[Local]()

        def starts(number: int) -> bool:
            for local in started:
                servers.waiting.discard(number)
                local.config = config(functools.partial(servers.generate, number))
            return True

        one_group = attrs.evolve(config(), batch_size=1)
        async with local_workers(one_group, 2, servers=servers.seen_by, room=starts, **BEAT) as (local, workers):
            started.append(local)
            servers.give(local)
            async with AsyncRolloutManager(workers.config(one_group), DataBuffer(games.PROMPTS)) as manager:
                with pytest.raises(EndpointAway, match="no request was answered for"):
                    await manager.generate_batch()
            assert anyio.current_time() < CUT_OFF_SECONDS + 1800 + 10
        assert (manager.accounting.failed, workers.cut_off) == (0, 1)

    on_virtual_clock(run)


def test_no_group_starts_while_no_worker_is_answered() -> None:
    """An outage for all is listed in the manager's process; it ends with the first answer, and with the workers."""

    async def run() -> None:
        servers = Servers({0, 1}, 1800.0)
        waits = lambda: [pause.what for pause in pauses() if pause.blocks_new_work]  # noqa: E731
        async with local_workers(config(), 2, servers=servers.seen_by, **BEAT) as (local, workers):
            servers.give(local)
            whole = workers.config(config())
            async with (
                AsyncRolloutManager(whole, DataBuffer(games.PROMPTS)) as manager,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(manager.generate_batch)
                await anyio.sleep(20)
                assert waits() == [f"no worker is answered: {AWAY}"]
                servers.waiting.clear()
                await anyio.sleep(3)
                assert waits() == []
                servers.waiting |= {0, 1}
                await anyio.sleep(3)
                assert len(waits()) == 1
                tasks.cancel_scope.cancel()
        assert waits() == []

    on_virtual_clock(run)


def test_one_answered_worker_is_no_outage() -> None:
    """New groups go to it."""

    async def run() -> None:
        servers = Servers({0}, 1800.0)
        async with local_workers(config(), 2, servers=servers.seen_by, **BEAT) as (local, workers):
            servers.give(local)
            async with AsyncRolloutManager(workers.config(config()), DataBuffer(games.PROMPTS)) as manager:
                with anyio.move_on_after(20):
                    await manager.generate_batch()
                assert workers.alive == (1,)
                assert not [pause for pause in pauses() if pause.blocks_new_work]

    on_virtual_clock(run)


def test_a_worker_without_a_budget_ends_the_run() -> None:
    """With the worker's message, as an outage does in one process: no worker is cut off, and no attempt is lost."""

    async def spent(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(1)
        raise BudgetSpent("--budget: $2 is spent")

    async def run() -> None:
        async with local_workers(config(spent), 2, **BEAT) as (_, workers):
            async with AsyncRolloutManager(workers.config(config()), DataBuffer(games.PROMPTS)) as manager:
                with pytest.raises(EndpointAway, match=r"--budget: \$2 is spent"):
                    await manager.generate_batch()
        assert (workers.cut_off, workers.deaths, manager.accounting.failed) == (0, 0, 0)

    on_virtual_clock(run)


def test_a_wait_that_ends_is_no_cut() -> None:
    """A server restarts for twenty seconds, and another worker is answered meanwhile."""

    async def run() -> None:
        reports = ServerReports()
        reports.take(0, {"away": AWAY, "answered": False})
        await anyio.sleep(20)
        reports.take(1, {"away": "", "answered": True})
        assert reports.over(idle=True) == {}
        reports.take(0, {"away": "", "answered": True})
        assert not reports.is_away(0)
        reports.take(0, {"away": AWAY, "answered": False})
        await anyio.sleep(5)
        reports.take(1, {"away": "", "answered": True})
        await anyio.sleep(35)
        assert reports.over(idle=False) == {}, "the other was answered before"
        assert reports.over(idle=True) == {0: AWAY}
        reports.take(1, {"away": "", "answered": False})
        assert reports.over(idle=False) == {}, "no server answered it"
        reports.take(1, {"away": "", "answered": True})
        assert reports.over(idle=False) == {0: AWAY}
        assert [reports.cut_off(0) for _ in range(8)] == [10, 20, 40, 80, 160, 320, 600, 600]

    on_virtual_clock(run)


def test_a_report_of_a_silent_worker_counts() -> None:
    """A wait that ends while a worker is silent is not held against it later."""

    async def run() -> None:
        state = {0: (AWAY, 0), 1: ("", 0)}
        async with local_workers(config(), 2, servers=lambda number: state[number], **BEAT) as (local, workers):
            await anyio.sleep(3)
            assert workers.alive == (1,)
            local.links[0].stop()
            await anyio.sleep(7)
            state[0] = ("", 0)
            await anyio.sleep(3)
            local.links[0].running.set()
            await anyio.sleep(2)
            assert workers.alive == (0, 1)
            for answers in range(1, 8):
                state[1] = ("", answers)
                await anyio.sleep(CUT_OFF_SECONDS / 5)
            assert (workers.alive, workers.cut_off) == ((0, 1), 0)

    on_virtual_clock(run)


def test_a_report_from_a_network_is_not_trusted() -> None:
    """Missing fields, other types and long texts neither raise nor fill the log."""

    async def run() -> None:
        reports = ServerReports()
        for fields in ({}, {"away": None, "answered": [1]}, {"away": 0, "answered": "yes"}):
            reports.take(0, fields)
            assert not reports.is_away(0)
        reports.take(1, {"away": "x" * 100_000})
        await anyio.sleep(CUT_OFF_SECONDS)
        assert reports.over(idle=False) == {}
        assert reports.over(idle=True) == {1: "x" * 500}

    on_virtual_clock(run)


def test_reports_are_few() -> None:
    """One when a wait begins or ends, one in five seconds during a wait or while answers come, and none otherwise."""

    async def run() -> None:
        state, said = ("", 0), list[tuple[str, bool]]()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(report_servers, lambda: state, lambda away, answered: said.append((away, answered)))
            await anyio.sleep(60.5)
            assert said == []
            state = ("", 3)
            await anyio.sleep(20)
            assert said == [("", True)]
            state = (AWAY, 3)
            await anyio.sleep(11)
            assert said[1:] == [(AWAY, False)] * 3
            state = ("", 4)
            await anyio.sleep(1)
            assert said[4:] == [("", True)]
            tasks.cancel_scope.cancel()

    on_virtual_clock(run)


async def test_a_process_that_is_cut_off_does_not_end_the_run(tmp_path: Path) -> None:
    """No server answers the first of two processes for its ``outage_seconds``; the other plays everything."""
    factory = functools.partial(games.unanswered, tmp_path)
    async with in_processes(factory, workers=2, silent_seconds=60.0) as workers:
        samples, manager = await games.batches(workers.config(factory()), 1)
    assert sorted(sample.index or 0 for sample in samples) == list(range(12))
    assert (workers.cut_off, workers.deaths, manager.accounting.failed) == (1, 0, 0)
    assert manager.failures.lost.total() == 0


async def test_a_worker_joins_only_while_a_server_answers_it() -> None:
    """It ends with an error if none answers for its patience."""
    built, said = _Built(None), list[str]()
    built.endpoint = Endpoint(base_url="http://127.0.0.1:9", model="m")
    with pytest.raises(EndpointUnavailable, match=r"127\.0\.0\.1:9"):
        await _wait_for_servers(built, 0.0, said.append)
    async with StubServer() as server:
        built.endpoint = Endpoint(base_url=server.url, model="m")
        await _wait_for_servers(built, 0.0, said.append)
    assert said == []


@pytest.mark.parametrize("limit", ["rollout_seconds", "group_seconds"])
def test_deadlines_stand_still_while_a_worker_waits_for_a_server(limit: str) -> None:
    """As in one process: only the rollouts that wait are given more time, and each has its whole time afterwards."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index == 0:  # an outage or a pause for new weights
            await anyio.sleep(50)
            with paused_deadlines():
                await anyio.sleep(1000)
        await anyio.sleep(90 if prompts[0].group_index == 1 else 40)
        return await games.generate(prompts)

    async def run() -> None:
        played = attrs.evolve(config(generate), **{limit: 100.0})
        async with local_workers(played, 2, **BEAT) as (_, workers):
            samples, manager = await games.batches(workers.config(played), 1)
            assert 1080 < anyio.current_time() < 1100
        assert len(samples) == 12
        assert manager.accounting.failed == 0

    on_virtual_clock(run)


@pytest.mark.parametrize("paused", [False, True], ids=["plays", "waited before"])
def test_a_deadline_ends_a_rollout_that_does_not_wait(paused: bool) -> None:
    """A pause that is over, or of another rollout, gives it no time."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        if prompts[0].group_index in ((0, 1, 2) if paused else (1, 2)):
            with paused_deadlines():
                await anyio.sleep(1000)
        if prompts[0].group_index == 0:
            await anyio.sleep_forever()
        return await games.generate(prompts)

    async def run() -> None:
        played = attrs.evolve(config(generate), group_seconds=100.0, on_failure="drop_group")
        async with local_workers(played, 2, **BEAT) as (_, workers):
            _, manager = await games.batches(workers.config(played), 1)
            assert 1000 <= anyio.current_time() < 1120
        assert manager.accounting.failed == 1

    on_virtual_clock(run)
