"""Laws of leases: each group is acknowledged once, whatever dies, and late tokens change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError, DataExhausted, GenerateFailure, JournalError
from rollouts.planning.simulation import VirtualLoop
from rollouts.recipe import Recipe
from rollouts.runs.info import read_info
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.service import Lease, LeaseLost, Leases, leased_run
from rollouts.service.lease_log import LeaseLog
from rollouts.training import DataBuffer, RolloutConfig, Sample
from tests.distributed import games
from tests.stored_runs import some_sample


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    records: list[dict[str, Any]] = []
    LeaseLog(path, records.append).close()
    return records


def group(number: int, size: int = 2) -> list[Sample]:
    prompts = [Prompt(f"p{number}", group_index=number, index=size * number + member) for member in range(size)]
    return [some_sample(prompt, 1) for prompt in prompts]


def groups(*numbers: int) -> dict[int, list[Sample]]:
    return {number: group(number) for number in numbers}


async def taken(leases: Leases, count: int, **options: Any) -> Lease:
    lease = await leases.take(count, **options)
    assert lease is not None
    return lease


def on_virtual_clock(function: Callable[[], Awaitable[None]]) -> None:
    anyio.run(function, backend_options={"loop_factory": VirtualLoop})


@pytest.mark.parametrize("what", ["acknowledge", "announce_version"])
async def test_a_task_that_is_cancelled_from_outside_leaves_no_half_write(what: str, tmp_path: Path) -> None:
    """``Task.cancel`` and ``asyncio.wait_for`` obey no shield: the record that reaches the disk still counts here."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0, 1))
        token = (await taken(leases, 2)).token
        cancelled: list[asyncio.Task[Any]] = []

        async def write() -> None:
            task = asyncio.current_task()
            assert task is not None
            cancelled.append(task)
            await (leases.acknowledge(token, step=3) if what == "acknowledge" else leases.announce_version("a"))

        async with anyio.create_task_group() as tasks:
            with leases._log._writing:  # the disk is slow
                tasks.start_soon(write)
                await anyio.wait_all_tasks_blocked()
                cancelled[0].cancel()
                while not cancelled[0].done():
                    await anyio.lowlevel.checkpoint()
        with anyio.fail_after(10):
            while (leases.leased, leases._version_is_stored) != (0 if what == "acknowledge" else 2, True):
                await anyio.lowlevel.checkpoint()
        await (leases.acknowledge(token, step=3) if what == "acknowledge" else leases.announce_version("a"))
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        assert (sorted(leases.acknowledged), leases.version) == (([0, 1], None) if what == "acknowledge" else ([], "a"))
    assert len([record for record in records_of(tmp_path / "log") if record["kind"] != "opened"]) == 1


@pytest.mark.parametrize("what", ["acknowledge", "announce_version"])
async def test_a_record_that_is_repeated_while_it_is_written_counts_once(what: str, tmp_path: Path) -> None:
    """``Task.cancel`` ends a wait whose record is still written: the log may have it twice, and opens again."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0))
        token = (await taken(leases, 1)).token

        async def write() -> None:
            await (leases.acknowledge(token) if what == "acknowledge" else leases.announce_version("a"))

        leases._log._writing.acquire()  # the disk is slow
        task = asyncio.get_running_loop().create_task(write())
        while not leases._log._in_order.locked():
            await anyio.lowlevel.checkpoint()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            leases._log._writing.release()
        settled = sorted(leases.acknowledged), leases.version
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        assert (sorted(leases.acknowledged), leases.version) == settled
        await leases.announce_version("b")


@pytest.mark.parametrize("turns", range(9))
async def test_a_lease_whose_acknowledgement_was_cancelled_before_its_write_is_as_before(
    turns: int, tmp_path: Path
) -> None:
    """After any number of turns of the loop it is acknowledged, or it can be released; it is never held for ever."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0, 1))
        token = (await taken(leases, 2)).token
        begun: list[asyncio.Task[Any]] = []

        async def acknowledge() -> None:
            task = asyncio.current_task()
            assert task is not None
            begun.append(task)
            await leases.acknowledge(token, step=3)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acknowledge)
            for _ in range(turns + 1):
                await anyio.lowlevel.checkpoint()
            begun[0].cancel()
        with anyio.fail_after(5):
            while leases.leased:
                with contextlib.suppress(LeaseLost):
                    leases.release(token)
                await anyio.lowlevel.checkpoint()
        ended = leases.ready, sorted(leases.acknowledged)
    assert ended in ((2, []), (0, [0, 1]))
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        assert sorted(leases.acknowledged) == ended[1]


async def test_a_group_is_in_one_lease_at_a_time(tmp_path: Path) -> None:
    """Leases have whole groups, the oldest first; acknowledged groups do not return, nor can they be added again."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(3, 1, 2, 0))
        first, second = await taken(leases, 2), await taken(leases, 2)
        assert (first.groups, second.groups) == ((0, 1), (2, 3))
        assert [sample.index for sample in first.samples] == [0, 1, 2, 3]
        assert await leases.take(1) is None
        await leases.acknowledge(first.token, step=1)
        leases.release(second.token)
        third = await taken(leases, 2)
        assert third.groups == second.groups
        await leases.acknowledge(third.token)
        for number in range(4):
            with pytest.raises(ConfigError, match="not added before"):
                leases.add(groups(number))
        leases.finish()
        with pytest.raises(DataExhausted):
            await leases.take(1)
    assert leases.acknowledged == {0: first.token, 1: first.token, 2: third.token, 3: third.token}


async def test_the_error_of_the_end_stays_as_it_was_raised(tmp_path: Path) -> None:
    """A consumer may ask any number of times; frames of earlier answers are not kept."""
    lengths = set()
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        try:
            raise GenerateFailure("the run")
        except GenerateFailure as error:
            leases.finish(error)
        for _ in range(3):
            with pytest.raises(GenerateFailure) as caught:
                await leases.take(1)
            trace = traceback.extract_tb(caught.value.__traceback__)
            assert trace[-1].line == 'raise GenerateFailure("the run")'
            lengths.add(len(trace))
    assert len(lengths) == 1


def test_a_lease_returns_after_its_time(tmp_path: Path) -> None:
    """A waiting consumer gets its groups within a second of it; a renewed lease stays."""

    async def run() -> None:
        with Leases(tmp_path / "log", groups_in_work=8) as leases:
            leases.add(groups(0, 1))
            began = anyio.current_time()
            first = await taken(leases, 2, lease_seconds=30)
            await anyio.sleep(20)
            leases.renew(first.token, lease_seconds=30)
            await anyio.sleep(20)
            assert leases.held() == [first]
            second = await taken(leases, 2, wait_seconds=60)
            assert 50 <= anyio.current_time() - began <= 51
            assert (second.groups, second.samples) == (first.groups, first.samples)
            with pytest.raises(LeaseLost):
                leases.renew(first.token)

    on_virtual_clock(run)


def test_a_late_acknowledgement_changes_nothing(tmp_path: Path) -> None:
    """1,000 of 1,000: after the end of the lease, after a release, and while another consumer has the groups."""

    async def run() -> None:
        dice, late = random.Random(0), 0
        with Leases(tmp_path / "log", groups_in_work=8) as leases:
            leases.add(groups(0, 1, 2))
            for _ in range(1000):
                lease = await taken(leases, dice.randint(1, 3), lease_seconds=dice.uniform(1, 100))
                if dice.random() < 0.5:
                    await anyio.sleep(100)
                else:
                    leases.release(lease.token)
                other = await taken(leases, 1) if dice.random() < 0.5 else None
                before = (tmp_path / "log").read_bytes()
                with pytest.raises(LeaseLost):
                    await leases.acknowledge(lease.token)
                late += 1
                assert (leases.acknowledged, (tmp_path / "log").read_bytes()) == ({}, before)
                if other is not None:
                    assert leases.held() == [other]
                    leases.release(other.token)
        assert late == 1000

    on_virtual_clock(run)


async def test_tokens_grow_over_restarts(tmp_path: Path) -> None:
    """A token of an earlier process is late, and no later lease has it."""
    tokens: list[int] = []
    for _ in range(5):
        with Leases(tmp_path / "log", groups_in_work=8) as leases:
            leases.restore(groups(0, 1))
            for token in tokens:
                with pytest.raises(LeaseLost):
                    await leases.acknowledge(token)
            tokens += [(await taken(leases, 1)).token for _ in range(2)]
    assert tokens == sorted(set(tokens))
    assert leases.acknowledged == {}


async def test_an_acknowledgement_may_be_repeated(tmp_path: Path) -> None:
    """Also by a consumer that died, or whose service died, before the answer: the file does not change."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0))
        lease = await taken(leases, 1)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(leases.acknowledge, lease.token)
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        before = (tmp_path / "log").read_bytes()
        leases.restore(groups(0))
        await leases.acknowledge(lease.token)
        assert (await leases.take(1), leases.acknowledged) == (None, {0: lease.token})
        assert (tmp_path / "log").read_bytes() == before


async def test_a_kill_at_any_byte_leaves_what_was_acknowledged(tmp_path: Path) -> None:
    """Cut at every byte, also with junk or zeros behind the cut: the whole records hold, the others never were."""
    ends: list[tuple[int, set[int]]] = []
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(*range(6)))
        ends.append(((tmp_path / "log").stat().st_size, set()))
        for count in (1, 2, 3):
            await leases.acknowledge((await taken(leases, count)).token)
            ends.append(((tmp_path / "log").stat().st_size, set(leases.acknowledged)))
    data = (tmp_path / "log").read_bytes()
    dice = random.Random(0)
    for cut in range(len(data) + 1):
        whole = max((end for end in ends if end[0] <= cut), default=(0, set[int]()))
        (tmp_path / "cut").write_bytes(data[:cut] + dice.choice((b"", bytes(7), dice.randbytes(20))))
        with Leases(tmp_path / "cut", groups_in_work=8) as leases:
            assert set(leases.acknowledged) == whole[1]
            leases.restore(groups(*range(6)))
            left = tuple(number for number in range(6) if number not in whole[1])
            assert left == () or (await taken(leases, len(left))).groups == left


async def test_a_flipped_bit_before_an_intact_record_is_an_error(tmp_path: Path) -> None:
    """It would otherwise give out acknowledged groups again."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0, 1))
        first = (tmp_path / "log").stat().st_size
        await leases.acknowledge((await taken(leases, 1)).token)
        second = (tmp_path / "log").stat().st_size
        await leases.acknowledge((await taken(leases, 1)).token)
    data = (tmp_path / "log").read_bytes()
    for at in range(first, second):
        changed = bytearray(data)
        changed[at] ^= 4
        (tmp_path / "flipped").write_bytes(changed)
        with pytest.raises(JournalError, match="intact record follows"):
            Leases(tmp_path / "flipped", groups_in_work=8)


async def test_a_full_disk_never_returns_a_group_that_may_be_acknowledged(tmp_path: Path) -> None:
    """Whether the record is on disk is unknown, so the groups wait for the next opening of the log."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0))
        lease = await taken(leases, 1)
        assert leases._log._file is not None
        os.close(leases._log._file)
        leases._log._file = -1
        for _ in range(2):
            with pytest.raises(JournalError, match="cannot be written"):
                await leases.acknowledge(lease.token)
        assert (leases.leased, leases.acknowledged, await leases.take(1)) == (1, {}, None)
        leases._log._file = None
    with pytest.raises(JournalError, match="cannot be written"):
        await leases.acknowledge(lease.token)
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.restore(groups(0))
        assert (await taken(leases, 1)).groups == (0,)
    with pytest.raises(JournalError, match="is closed"):
        await leases.announce_version("a")


class _SlowLog:
    """A disk that answers when the test lets it."""

    store = LeaseLog.store

    def __init__(self, log: LeaseLog) -> None:
        self._log = log
        self._in_order = threading.Lock()
        self.answers = threading.Event()

    def append(self, record: Mapping[str, Any]) -> None:
        self.answers.wait(30)
        self._log.append(record)

    def close(self) -> None:
        self._log.close()


async def test_a_lease_does_not_end_while_its_acknowledgement_is_written(tmp_path: Path) -> None:
    """However slow the disk is, no other consumer gets the groups, nor can they be released."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        slow = leases._log = _SlowLog(leases._log)  # type: ignore[assignment]
        leases.add(groups(0))
        lease = await taken(leases, 1, lease_seconds=0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.acknowledge, lease.token)
            assert await leases.take(1, wait_seconds=0.2) is None
            with pytest.raises(LeaseLost, match="being acknowledged"):
                leases.release(lease.token)
            slow.answers.set()
    assert leases.acknowledged == {0: lease.token}


async def test_a_wait_during_a_slow_acknowledgement_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is being written does not end, so its end is not waited for."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        slow = leases._log = _SlowLog(leases._log)  # type: ignore[assignment]
        leases.add(groups(0))
        lease = await taken(leases, 1, lease_seconds=0.05)
        looks: list[None] = []
        drop_stale = leases._drop_stale

        async def counted() -> None:
            looks.append(None)
            await drop_stale()

        monkeypatch.setattr(leases, "_drop_stale", counted)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.acknowledge, lease.token)
            assert await leases.take(1, wait_seconds=0.3) is None
            slow.answers.set()
    assert len(looks) <= 3


async def test_a_step_that_cannot_be_stored_changes_nothing(tmp_path: Path) -> None:
    """Neither the log nor the lease, which ends at its time."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        leases.add(groups(0))
        lease = await taken(leases, 1)
        before = (tmp_path / "log").read_bytes()
        steps: list[Any] = [np.int64(3), 1.0, True, -1, "3", 1 << 64]
        for step in steps:
            with pytest.raises(ConfigError, match="step"):
                await leases.acknowledge(lease.token, step=step)
        assert (tmp_path / "log").read_bytes() == before
        leases.release(lease.token)
        assert (await taken(leases, 1)).groups == (0,)


def of(number: int, version: str) -> dict[int, list[Sample]]:
    """A group whose tokens were sampled by one version."""
    samples = group(number, 1)
    for sample in samples:
        sample.versions = [attrs.evolve(span, version=version) for span in sample.versions]
    return {number: samples}


async def test_versions_are_in_order_and_stale_groups_are_dropped(tmp_path: Path) -> None:
    """At the first delivery and after a return; the last version may be repeated; a restart changes nothing."""

    with Leases(tmp_path / "log", groups_in_work=8, max_staleness=1) as leases:
        leases.add(of(0, "a") | of(1, "a"))
        first = await taken(leases, 1)
        for name in ("b", "b"):
            await leases.announce_version(name)
        leases.add(of(2, "b"))
        await leases.announce_version("c")
        for name in ("a", "b", ""):
            with pytest.raises(ConfigError, match="version"):
                await leases.announce_version(name)
        assert (await taken(leases, 1)).groups == (2,)
        assert leases.dropped == {"too old": 1}
        leases.release(first.token)
        assert (await leases.take(1), leases.dropped) == (None, {"too old": 2})
    with Leases(tmp_path / "log", groups_in_work=8, max_staleness=1) as leases:
        leases.restore(of(0, "a") | of(1, "a") | of(2, "b"))
        await leases.announce_version("c")
        assert (leases.dropped, (await taken(leases, 1)).groups) == ({"too old": 2}, (2,))


async def test_a_group_that_gets_too_old_while_another_is_dropped_is_not_delivered(tmp_path: Path) -> None:
    """The next version is announced while the record of the drop waits for an acknowledgement and for it."""

    with Leases(tmp_path / "log", groups_in_work=8, max_staleness=0) as leases:
        for name in ("a", "b"):
            await leases.announce_version(name)
        leases.add(of(2, "b"))
        first = await taken(leases, 1)
        leases.add(of(0, "a") | of(1, "b"))
        delivered: list[Any] = []

        async def take() -> None:
            delivered.append(await leases.take(1))

        async with anyio.create_task_group() as tasks:
            for call, value in ((leases.acknowledge, first.token), (leases.announce_version, "c")):
                tasks.start_soon(call, value)
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(take)
        assert (delivered, leases.dropped) == ([None], {"too old": 2})


async def test_ready_and_leased_groups_are_bounded(tmp_path: Path) -> None:
    """A producer waits for room, which an acknowledgement makes and a returned lease does not."""
    with Leases(tmp_path / "log", groups_in_work=3) as leases:
        leases.add(groups(0, 1))
        with pytest.raises(ConfigError, match="the room of"):
            leases.add(groups(2, 3))
        lease = await taken(leases, 2)
        leases.release(lease.token)
        assert leases.room == 1
        lease = await taken(leases, 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.acknowledge, lease.token)
            await leases.room_for(3)


async def test_bad_arguments_are_errors(tmp_path: Path) -> None:
    """Each names its field; one process writes to a log at a time."""
    with Leases(tmp_path / "log", groups_in_work=3) as leases:
        bad: list[dict[str, Any]] = [{"groups": 0}, {"groups": 4}, {"groups": True}]
        bad += [{"groups": 1, "lease_seconds": 0}, {"groups": 1, "wait_seconds": -1}]
        bad += [{"groups": 1, "lease_seconds": seconds} for seconds in TOO_LONG]
        for options in bad:
            with pytest.raises(ConfigError, match=list(options)[-1]):
                await leases.take(**options)
        with pytest.raises(ConfigError, match="no other process"):
            Leases(tmp_path / "log", groups_in_work=3)
    with pytest.raises(ConfigError, match="groups_in_work"):
        Leases(tmp_path / "other", groups_in_work=0)


TOO_LONG: tuple[Any, ...] = (1e308, float("inf"), float("nan"), 10**400, 604_801, "600", True)
"""No lease is this long: its groups would never return from a consumer that died."""


@pytest.mark.parametrize("seconds", TOO_LONG, ids=["1e308", "inf", "nan", "10**400", "a week", "text", "bool"])
async def test_a_lease_is_renewed_for_a_sensible_time(tmp_path: Path, seconds: Any) -> None:
    """Refused by name, and the lease ends when it would have ended."""
    with Leases(tmp_path / "log", groups_in_work=3) as leases:
        leases.add(groups(0))
        lease = await taken(leases, 1, lease_seconds=0.05)
        with pytest.raises(ConfigError, match=r"lease_seconds: got .*; expected a number of seconds > 0"):
            leases.renew(lease.token, lease_seconds=seconds)
        await anyio.sleep(0.06)
        assert await leases.take(1) is not None


def test_a_log_belongs_to_one_run(tmp_path: Path) -> None:
    """Acknowledgements of another run would skip groups of this one; a log without a name is of an earlier version."""
    for run in (None, "one", "one", None):
        Leases(tmp_path / "log", groups_in_work=3, run=run).__exit__(None, None, None)
    with pytest.raises(ConfigError, match=r"of the run one.*the log of this run, two"):
        Leases(tmp_path / "log", groups_in_work=3, run="two")
    Leases(tmp_path / "log", groups_in_work=3, run="one").__exit__(None, None, None)


# -- over a run -------------------------------------------------------------------------------------------------------


def recipe(batches: int = 5) -> Recipe:
    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(random.random() / 1000)
        return await games.generate(prompts)

    config: RolloutConfig = attrs.evolve(games.config(), generate_fn=generate)
    return Recipe(
        name="leased",
        config=config,
        data_buffer=DataBuffer(games.PROMPTS),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
        batches=batches,
    )


class _Killed(Exception):
    """The process ends here."""


def copied(run: Path, to: Path) -> Path:
    """The files that a kill at this moment leaves: the journal is the newest of them."""
    paths = [path for path in run.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: "journal" in path.parts):
        target = to / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            target.write_bytes(path.read_bytes())
    return to


async def test_a_killed_run_loses_no_group_and_acknowledges_none_twice(tmp_path: Path) -> None:
    """Killed 20 times with a lease in hand: before the acknowledgement, or between the disk and the answer."""
    dice = random.Random(3)
    folder, kills, lost_answers = tmp_path / "0", 0, 0
    token: int | None = None
    while True:
        try:
            async with leased_run(folder, recipe(20)) as leases:
                if token is not None:
                    before = dict(leases.acknowledged)
                    await leases.acknowledge(token)  # the trainer asks again
                    assert leases.acknowledged == before
                    token = None
                while True:
                    lease = await leases.take(2, wait_seconds=30)
                    assert lease is not None
                    assert leases.room >= 0
                    assert len(lease.samples) == 4 * len(lease.groups)
                    killed = kills < 20 and dice.random() < 0.6
                    if not killed or dice.random() < 0.4:
                        await leases.acknowledge(lease.token)
                        token = lease.token if killed else None
                        lost_answers += killed
                    if killed:
                        folder = copied(folder, tmp_path / str(kills + 1))
                        raise _Killed
        except DataExhausted:
            break
        except _Killed:
            kills += 1
    assert (kills, lost_answers > 0) == (20, True)
    acknowledged = [record for record in records_of(folder / "leases.log") if record["kind"] == "acknowledged"]
    stored = [number for record in acknowledged for number in record["groups"]]
    assert sorted(stored) == list(range(60))
    assert verify_run(folder).violations == []
    counts = read_info(folder)["accounting"]
    assert (counts["in_batch"], counts["failed"]) == (60, 0)


async def test_a_run_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    """Another reward function or model is refused by name, or recorded where it is allowed."""
    before: dict[str, Any] = {"settings": {"reward": {"name": "first"}}, "server": {"model": "m"}}
    after: dict[str, Any] = {"settings": {"reward": {"name": "second"}}, "server": {"model": "m"}}
    async with leased_run(tmp_path, recipe(2), description=before) as leases:
        await leases.acknowledge((await taken(leases, 3, wait_seconds=30)).token)
    assert read_info(tmp_path)["server"] == {"model": "m"}
    with pytest.raises(ConfigError, match=r"reward\.name: got 'second'; expected 'first'"):
        async with leased_run(tmp_path, recipe(2), description=after):
            raise AssertionError("the run began")
    async with leased_run(tmp_path, recipe(2), description=after, allow_changes=True) as leases:
        await leases.acknowledge((await taken(leases, 3, wait_seconds=30)).token)
    assert read_info(tmp_path)["settings"] == after["settings"]


async def test_an_overwritten_run_has_no_acknowledgements(tmp_path: Path) -> None:
    """The groups of a new run in the folder are others, with the same numbers."""
    async with leased_run(tmp_path, recipe(1)) as leases:
        await leases.acknowledge((await taken(leases, 3, wait_seconds=30)).token)
        assert leases.is_done(0)
    RunWriter(tmp_path, overwrite=True).finish("stopped")
    with Leases(tmp_path / "leases.log", groups_in_work=3) as leases:
        assert not leases.is_done(0)


@pytest.mark.parametrize(("groups_in_work", "most"), [(3, 1), (5, 3), (None, 4)])
async def test_a_lease_that_a_batch_without_room_may_keep_waiting_is_refused(
    groups_in_work: int | None, most: int, tmp_path: Path
) -> None:
    """Batches of 3: with more groups ready than leave room for a batch, no more come; so many always are."""
    async with leased_run(tmp_path, recipe(4), groups_in_work=groups_in_work) as leases:
        with pytest.raises(ConfigError, match=rf"groups: got {most + 1};.* 1 to {most} .*batch_size, 3"):
            await leases.take(most + 1)
        trained = 0
        with contextlib.suppress(DataExhausted):
            while True:
                lease = await taken(leases, most, wait_seconds=30)
                trained += len(lease.groups)
                await leases.acknowledge(lease.token)
        assert trained == 12


async def test_the_end_of_the_data_needs_no_room(tmp_path: Path) -> None:
    """After the last batch nothing is added, so that the rest of the groups is delivered while there is a lease."""
    async with leased_run(tmp_path, recipe(1), groups_in_work=5) as leases:
        first = await taken(leases, 2, wait_seconds=30)
        assert leases.room < 3
        second = await taken(leases, 3, wait_seconds=5)
        assert (first.groups, second.groups) == ((0, 1), (2,))
