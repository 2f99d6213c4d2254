"""Workers as processes: the same samples as without workers, whichever process dies."""

from __future__ import annotations

import argparse
import functools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
from anyio.abc import SocketAttribute, SocketStream

from rollouts.commands import main
from rollouts.commands.arguments import worker_range
from rollouts.distributed import RecipeConfig, in_processes
from rollouts.dtypes import Endpoint, Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, EndpointAway
from rollouts.recipe import Recipe
from rollouts.recipe.files import build, load_recipe
from rollouts.runs.journal import read_journal
from rollouts.runs.reader import load_run, read_info
from rollouts.runs.verify import verify_run
from rollouts.testing.server import StubServer
from rollouts.training import AsyncRolloutManager
from rollouts.training.types import Sample
from tests.distributed import games

ROOT = Path(__file__).resolve().parents[2]


def in_order(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: sample.index or 0)


async def test_two_processes_produce_the_samples_of_one() -> None:
    """Field by field and token by token."""
    alone, _ = await games.batches(games.config())
    async with in_processes(games.config, workers=2) as workers:
        shared, manager = await games.batches(workers.config(games.config()))
    assert in_order(shared) == in_order(alone)
    assert shared[0].label == (shared[0].metadata["n"], None)
    assert manager.accounting.in_batch == 6


async def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    """Its finished rollouts count, those in flight are played again, and the accounting adds up."""
    factory = functools.partial(games.deadly, tmp_path)
    returned: set[int | None] = set()
    async with in_processes(factory, workers=2) as workers:
        config = workers.config(factory())

        async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
            """Kill a worker when the rest of its group has returned."""
            samples = await config.generate_fn(prompts)
            returned.update(sample.index for sample in samples)
            for victim, rest in ((5, {4, 6, 7}), (18, {16, 17, 19})):
                if rest <= returned:
                    (tmp_path / f"kill {victim}").touch()
            return samples

        shared, manager = await games.batches(attrs.evolve(config, generate_fn=generate), 1)
    alone, _ = await games.batches(factory(), 1)
    left_out: dict[str, object] = {"metrics": {}, "times": []}
    without = [{**sample.to_dict(), **left_out} for sample in in_order(shared)]
    assert without == [{**sample.to_dict(), **left_out} for sample in in_order(alone)]
    assert workers.deaths == 2
    assert manager.accounting.failed == 0
    again = [sample.index for sample in shared if sample.metrics["attempts"] > 1]
    assert {5, 18} <= set(again)
    assert {4, 6, 7, 16, 17, 19}.isdisjoint(again), "finished before the death"


async def test_a_stopped_process_costs_its_own_groups_only(tmp_path: Path) -> None:
    """Hardening 14: its rollouts are played by the other; it plays again when it continues."""
    factory = functools.partial(games.stopping, tmp_path)
    async with in_processes(factory, workers=2, silent_seconds=1.0) as workers:
        with anyio.fail_after(30):
            stopped, manager = await games.batches(workers.config(factory()), 2)
        given_away = workers.given_away
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
        with anyio.fail_after(30):
            while not all(slot.alive for slot in workers._slots):
                await anyio.lowlevel.checkpoint()
        after, _ = await games.batches(workers.config(factory()), 2)
    alone, _ = await games.batches(games.config(), 2)
    assert in_order(stopped) == in_order(after) == in_order(alone)
    assert given_away >= 1
    assert (workers.deaths, manager.accounting.failed) == (0, 0)


async def test_a_process_that_gets_sigterm_finishes_its_rollouts(tmp_path: Path) -> None:
    """It costs no attempt, and its slot stays empty while the minimum is there."""
    factory = functools.partial(games.leaving, tmp_path)
    async with in_processes(factory, workers=(1, 2)) as workers:
        with anyio.fail_after(60):
            while len(workers.alive) < 2:
                await anyio.lowlevel.checkpoint()
            shared, manager = await games.batches(workers.config(factory()))
            while not workers.departures:
                await anyio.lowlevel.checkpoint()
        assert len(workers.alive) == 1
    alone, _ = await games.batches(games.config())
    assert in_order(shared) == in_order(alone)
    assert (workers.deaths, workers.departures, workers.given_away) == (0, 1, 0)
    assert (manager.accounting.failed, manager.failures.lost.total()) == (0, 0)


async def test_a_failing_factory_is_an_error_at_the_start() -> None:
    """The message contains the factory's error. A factory that cannot be pickled is an error too."""
    with pytest.raises(ConfigError, match=r"worker 0 cannot start: .* ValueError: no data"):
        async with in_processes(games.broken, workers=1):
            pass
    with pytest.raises(ConfigError, match="can be pickled"):
        async with in_processes(lambda: games.config(), workers=1):
            pass


@pytest.mark.parametrize("workers", [0, True, 1.5, (0, 2), (3, 2), (1, 2, 3), (1, None), [1, 2]])
async def test_a_number_of_workers_is_checked(workers: Any) -> None:
    """Before a process starts."""
    with pytest.raises(ConfigError, match="workers: got"):
        async with in_processes(games.config, workers=workers):
            pass


RECIPE = """
from rollouts.environments import SingleTurnEnvironment
from rollouts.recipe import agent_recipe

def length(sample):
    return float(len(sample.response))

def recipe(endpoint):
    prompts = [f"p{number}" for number in range(6)]
    sizes = {"batch_size": 6, "n_samples_per_prompt": 2, "over_sampling_factor": 1.0, "epochs": 1, "max_attempts": 1}
    return agent_recipe("small", endpoint, SingleTurnEnvironment, prompts, reward_fn=length, keep="all", **sizes)
"""


def recipe_at(url: str, folder: Path, **options: Any) -> tuple[RecipeConfig, Recipe]:
    """A recipe whose rollouts ask the server at ``url``, and its factory for workers."""
    (folder / "small.py").write_text(RECIPE)
    factory = RecipeConfig(folder / "small.py", Endpoint(base_url=url, model=str(DEMO_MODEL), **options))
    return factory, build(load_recipe(factory.recipe), factory.endpoint, {})


async def test_workers_wait_for_a_server_that_starts_after_them(tmp_path: Path) -> None:
    """They skip the preflight: all prompts are played, and all succeed."""
    batch: list[Sample] = []
    looks = 0
    looked, filled = anyio.Event(), anyio.Event()

    async def drop(stream: SocketStream) -> None:
        nonlocal looks
        looks += 1
        await stream.aclose()
        if looks == 4:
            looked.set()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    factory, recipe = recipe_at(f"http://127.0.0.1:{port}", tmp_path)
    async with in_processes(factory, workers=1) as workers:
        manager = AsyncRolloutManager(workers.config(recipe.config), recipe.data_buffer)

        async def fill() -> None:
            batch.extend(await manager.generate_batch())
            filled.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            async with anyio.create_task_group() as away:
                away.start_soon(listener.serve, drop)
                await looked.wait()
                away.cancel_scope.cancel()
            await listener.aclose()
            async with StubServer(port=port):
                await filled.wait()
    assert {sample.prompt for sample in batch} == {f"p{number}" for number in range(6)}
    counts = manager.accounting
    assert (len(batch), counts.taken, counts.in_batch, counts.failed) == (12, 6, 6, 0)


async def test_workers_whose_server_never_comes_return_their_prompts(tmp_path: Path) -> None:
    """The run ends with the error of one process: the URL and the remedy."""
    factory, recipe = recipe_at("http://127.0.0.1:9", tmp_path, outage_seconds=0.1)
    async with in_processes(factory, workers=1) as workers:
        manager = AsyncRolloutManager(workers.config(recipe.config), recipe.data_buffer)
        with pytest.raises(EndpointAway, match=r"no server answers at http://127\.0\.0\.1:9; .*Start"):
            await manager.generate_batch()
    counts = manager.accounting
    assert (counts.taken, counts.returned, counts.failed) == (6, 6, 0)
    counts.check()


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("2:8", (2, 8)), ("3:3", (3, 3))])
def test_the_command_line_takes_a_range_of_workers(text: str, expected: object) -> None:
    """``MIN:MAX``, or one number."""
    assert worker_range(text) == expected


@pytest.mark.parametrize("text", ["0", "3:2", "0:2", "2:", ":2", "1:2:3"])
def test_the_command_line_refuses_other_ranges(text: str) -> None:
    """Before any work starts."""
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        worker_range(text)


def test_a_recipe_runs_in_workers(tmp_path: Path, engine_url: str) -> None:
    """``--workers 2`` yields the rollouts and the journal of one process."""
    line = ["run", str(ROOT / "configs" / "calculator.py"), "--endpoint", engine_url]
    sizes = ["batch_size=2", "n_samples_per_prompt=4", "over_sampling_factor=2.0"]
    line += [part for size in sizes for part in ("--set", size)]
    assert main([*line, "--out", str(tmp_path / "shared"), "--workers", "2"]) == 0
    assert main([*line, "--out", str(tmp_path / "alone")]) == 0
    assert verify_run(tmp_path / "shared").violations == []
    assert read_info(tmp_path / "shared")["config"] == read_info(tmp_path / "alone")["config"]
    shared, alone = (
        {sample.index: (sample.tokens, sample.reward) for sample in load_run(tmp_path / name, "all")}
        for name in ("shared", "alone")
    )
    both = shared.keys() & alone.keys()
    assert len(both) >= 4
    assert {index: shared[index] for index in both} == {index: alone[index] for index in both}
    kinds = [entry.kind for entry in read_journal(tmp_path / "shared" / "journal")]
    assert kinds.count("turn") > 0, "turns are kept as they end"
