"""Distribution of groups among workers: the manager's laws hold whichever worker plays them."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.agent.turn_log import Turn
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, GenerateFailure, TokenMismatchError
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.run_journal import RunJournal
from rollouts.training import AsyncRolloutManager, DataBuffer, Sample
from tests.distributed import games
from tests.distributed.links import local_workers


@pytest.mark.parametrize("in_flight", [None, 1, 4])
async def test_the_rollouts_of_a_group_go_to_one_worker(in_flight: int | None) -> None:
    """Groups are distributed over all workers, also if their rollouts run one after the other."""
    where: dict[int, set[int]] = defaultdict(set)
    config = attrs.evolve(games.config(), in_flight=in_flight)
    async with local_workers(config, 3) as (local, workers):
        for number, link in enumerate(local.links):

            async def note(prompts: Sequence[Prompt], number: int = number) -> list[Sample]:
                where[prompts[0].group_index or 0].add(number)
                return await games.generate(prompts)

            link.player.config = attrs.evolve(config, generate_fn=note)
        await games.batches(workers.config(config))
    assert all(len(homes) == 1 for homes in where.values())
    assert in_flight is not None or set.union(*where.values()) == {0, 1, 2}


@pytest.mark.usefixtures("thawed")
async def test_a_worker_freezes_the_garbage_collector() -> None:
    """A full collection in a worker skips the objects that existed before its first rollout."""
    seen: list[int] = []

    async def note(prompts: Sequence[Prompt]) -> list[Sample]:
        seen.append(gc.get_freeze_count())
        return await games.generate(prompts)

    async with local_workers(attrs.evolve(games.config(), generate_fn=note), 1) as (_, workers):
        await games.batches(workers.config(games.config()))
    assert min(seen) > 0
    assert gc.get_freeze_count() == 0


async def test_a_dead_worker_costs_an_attempt_and_no_rollout() -> None:
    """Its rollouts fail as GenerateFailure, are tried again on the next worker, and the accounting adds up."""
    async with local_workers(games.config(), 2) as (local, workers):

        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            if prompts[0].index == 6 and len(local.links) == 2:
                for link in local.links:
                    link.cut()
                await anyio.sleep_forever()
            return await games.generate(prompts)

        for link in local.links:
            link.player.config = attrs.evolve(games.config(), generate_fn=generate)
        samples, manager = await games.batches(workers.config(games.config()))
    assert len({sample.index for sample in samples}) == 24
    assert (workers.deaths, len(local.links)) == (2, 4)
    assert manager.failures.metrics()["lost/generate"] >= 1


async def test_without_attempts_left_a_death_costs_the_group() -> None:
    """The error names the worker's death."""
    config = attrs.evolve(games.config(attempts=1), on_failure="stop")
    async with local_workers(config, 1) as (local, workers):

        async def hang(prompts: Sequence[Prompt]) -> list[Sample]:
            local.links[0].cut()
            await anyio.sleep_forever()
            return []

        local.links[0].player.config = attrs.evolve(config, generate_fn=hang)
        with pytest.raises(GenerateFailure, match="the worker was cut off"):
            await games.batches(workers.config(config))


async def test_failures_keep_their_cause() -> None:
    """A reward that raises in a worker is a failed reward, with its traceback, as without workers."""
    config = games.failing()
    lost: list[Sample] = []
    async with local_workers(config, 2) as (_, workers):
        shared = workers.config(config)
        rows = DataBuffer(games.PROMPTS)
        keep = lambda group: lost.extend(sample for sample in group.samples if group.outcome == "failed")  # noqa: E731
        async with AsyncRolloutManager(shared, rows, on_group=keep) as manager:
            await manager.generate_batch()
    assert {(sample.failure.kind, sample.failure.cause) for sample in lost if sample.failure} == {
        ("RewardFailure", "reward")
    }
    assert all(sample.failure and "in picky" in sample.failure.traceback for sample in lost)
    assert manager.accounting.failed == len(lost) > 0


async def test_a_law_that_breaks_in_a_worker_stops_the_run() -> None:
    """The behaviour is the same without workers."""
    async with local_workers(games.lawless(), 2) as (_, workers):
        with pytest.raises(TokenMismatchError, match="not those that were sent"):
            await games.batches(workers.config(games.lawless()))


async def test_workers_that_only_die_stop_the_run() -> None:
    """They are not replaced for ever."""
    async with local_workers(games.config(), 1) as (local, workers):
        async with anyio.create_task_group() as tasks:

            async def cut() -> None:
                while True:
                    for link in local.links:
                        link.cut()
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(cut)
            with pytest.raises(ConfigError, match="3 workers in a row died"):
                await games.batches(attrs.evolve(workers.config(games.config()), max_attempts=9))
            tasks.cancel_scope.cancel()


async def test_a_worker_that_cannot_be_replaced_leaves_its_work_to_the_others() -> None:
    """The run continues, with the groups of the dead worker."""
    async with local_workers(games.config(), 2) as (local, workers):

        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            local.refuses = True
            local.links[0].cut()
            await anyio.sleep_forever()
            return []

        local.links[0].player.config = attrs.evolve(games.config(), generate_fn=generate)
        samples, _ = await games.batches(workers.config(games.config()))
    assert len({sample.index for sample in samples}) == 24
    assert (workers.deaths, len(local.links)) == (1, 2)


async def test_a_silent_worker_loses_its_rollouts_to_the_others() -> None:
    """Hardening 14: a stopped worker of two costs no attempt and no rollout; its late results are refused."""
    hung = anyio.Event()
    async with local_workers(games.config(), 2, silent_seconds=0.1) as (local, workers):
        late: list[list[Sample]] = []

        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            samples = await games.generate(prompts)
            if not hung.is_set():
                hung.set()
                local.links[0].stop()
            late.append(samples)
            return samples

        local.links[0].player.config = attrs.evolve(games.config(), generate_fn=generate)
        samples, manager = await games.batches(workers.config(games.config(attempts=1)))
        assert late
        assert workers.given_away >= len(late)
        assert workers.refused == 0
        local.links[0].running.set()
        with anyio.fail_after(5):
            while workers.refused < 1 or not workers._slots[0].alive:
                await anyio.lowlevel.checkpoint()
        again, _ = await games.batches(workers.config(games.config(attempts=1)))
    assert sorted(sample.index or 0 for sample in samples) == list(range(24))
    assert manager.accounting.failed == 0
    assert manager.failures.lost.total() == 0
    assert (workers.deaths, len(again)) == (0, 24)


async def test_a_worker_that_stays_silent_is_replaced() -> None:
    """A native deadlock does not end by itself."""
    async with local_workers(games.config(), 1, silent_seconds=0.05) as (local, workers):

        async def hang(prompts: Sequence[Prompt]) -> list[Sample]:
            local.links[0].stop()
            await anyio.sleep_forever()
            return []

        local.links[0].player.config = attrs.evolve(games.config(), generate_fn=hang)
        samples, _ = await games.batches(workers.config(games.config()))
    assert sorted(sample.index or 0 for sample in samples) == list(range(24))
    assert (workers.deaths, len(local.links)) == (1, 2)


async def test_a_cancelled_rollout_is_cancelled_in_its_worker() -> None:
    """A manager that closes leaves no rollout in flight in a worker."""
    begun = anyio.Event()

    async def hang(prompts: Sequence[Prompt]) -> list[Sample]:
        begun.set()
        await anyio.sleep_forever()
        return []

    config = attrs.evolve(games.config(), generate_fn=hang)
    async with local_workers(config, 1) as (local, workers):
        async with AsyncRolloutManager(workers.config(config), DataBuffer(games.PROMPTS)) as manager:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(manager.generate_batch)
                await begun.wait()
                tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            while local.links[0].player._playing:
                await anyio.lowlevel.checkpoint()


async def test_many_samples_come_in_one_message() -> None:
    """With ``at_least=32`` every message but the last has at least 32."""
    config = attrs.evolve(games.config(), batch_size=64, n_samples_per_prompt=4)
    async with local_workers(config, 1, at_least=32, linger=5.0) as (_, workers):
        samples, _ = await games.batches(workers.config(config), 1)
    assert len(samples) == 256
    assert workers.rollouts / workers.messages >= 32


async def test_the_bytes_of_a_sample_are_bounded() -> None:
    """Nine bytes a token, the text of its messages, and at most 700 bytes more."""
    config = attrs.evolve(games.config(), batch_size=16, n_samples_per_prompt=4)
    async with local_workers(config, 1, at_least=32, linger=5.0) as (_, workers):
        samples, _ = await games.batches(workers.config(config), 1)
    tokens = sum(len(sample.tokens) for sample in samples)
    words = sum(len(sample.response or "") + len(str(sample.messages)) for sample in samples)
    assert workers.bytes <= 9 * tokens + words + 700 * len(samples)


async def test_a_group_begins_with_one_message() -> None:
    """Requests of one event loop iteration travel together."""
    config = games.config()
    async with local_workers(config, 1) as (local, workers):
        await games.batches(workers.config(config), 1)
    assert local.links[0].orders <= 3


async def test_a_prompt_that_cannot_be_pickled_is_an_error() -> None:
    """It is raised before the request is sent."""
    async with local_workers(games.config(), 1) as (_, workers):
        with pytest.raises(ConfigError, match="can be pickled for a worker"):
            await workers.generate([Prompt("x", label=lambda: 0, group_index=0, index=0)])


async def test_turns_of_a_worker_are_journaled_here(tmp_path: Path) -> None:
    """Each when it ends, so a killed run resumes from the last turn of an episode."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        samples = await games.generate(prompts)
        log = await prompts[0].turn_log.claim()
        column: Any = samples[0].token_column
        await log.save(Turn(1, column, samples[0].mask_column, samples[0].logprob_column, {"messages": []}))  # type: ignore[arg-type]
        return samples

    config = attrs.evolve(games.config(), generate_fn=generate)
    with Journal(tmp_path) as journal:
        async with local_workers(config, 2) as (_, workers):
            run_journal = RunJournal(journal)
            buffer = DataBuffer(games.PROMPTS)
            async with AsyncRolloutManager(workers.config(config), buffer, rollout_log=run_journal) as manager:
                samples = await manager.generate_batch()
    turns = {entry.fields["index"]: entry for entry in read_journal(tmp_path) if entry.kind == "turn"}
    for sample in samples:
        columns = turns[sample.index].columns
        assert columns is not None
        assert columns.tokens.tolist() == sample.tokens
