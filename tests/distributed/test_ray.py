"""Workers as Ray actors on a real cluster of three nodes: the laws hold, whichever node dies."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.distributed.ray import in_actors
from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe
from rollouts.runs.journal import read_journal
from rollouts.runs.run import run
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.training import DataBuffer
from rollouts.training.types import Sample
from tests.distributed import games

ray = pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for workers, and two nodes with room for two each."""
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **_SMALL})
        for _ in range(2):
            started.add_node(num_cpus=2, **_SMALL)
        ray.init(address=started.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        yield started
        ray.shutdown()
        started.shutdown()


_SMALL = {"object_store_memory": 100 << 20}


def in_order(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: sample.index or 0)


async def test_actors_on_two_nodes_produce_the_samples_of_one_process(cluster: Any, tmp_path: Path) -> None:
    """The same samples, field by field and token by token."""
    alone, _ = await games.batches(games.config())
    async with in_actors(functools.partial(games.located, tmp_path), 4) as workers:
        shared, manager = await games.batches(workers.config(games.config()))
    nodes = os.listdir(tmp_path)
    assert in_order(shared) == in_order(alone)
    assert manager.accounting.in_batch == 6
    assert len(nodes) == 2


async def test_a_run_on_actors_keeps_the_laws(cluster: Any, tmp_path: Path) -> None:
    """The folder and the journal pass every check although an actor dies."""
    tombs = tmp_path / "tombs"
    tombs.mkdir()
    for victim in (5, 18):
        (tombs / f"kill {victim}").touch()
    factory = functools.partial(games.deadly, tombs)
    recipe = Recipe(
        name="ray",
        config=factory(),
        data_buffer=DataBuffer(games.PROMPTS),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
        batches=2,
    )
    folder = tmp_path / "run"
    writer = RunWriter(folder, recipe.describe())
    run_journal = begin(folder, recipe.describe(), recipe.data_buffer)
    with run_journal.journal:
        async with in_actors(factory, 2) as workers:
            result = await run(
                attrs.evolve(recipe, config=workers.config(recipe.config)), writer, run_journal=run_journal
            )
    assert (result.status, result.accounting.in_batch, result.accounting.failed) == ("finished", 12, 0)
    assert workers.deaths in (1, 2)
    assert verify_run(folder).violations == []
    settled = [entry.fields["group"] for entry in read_journal(folder / "journal") if entry.kind == "group"]
    assert sorted(settled) == list(range(12)), "each group once"


async def test_a_node_that_dies_costs_no_rollout(cluster: Any) -> None:
    """Actors on another node replace its actors, and its groups are played again."""
    node = cluster.add_node(num_cpus=2, resources={"doomed": 2}, **_SMALL)
    some = anyio.Event()
    samples: list[Sample] = []
    async with in_actors(games.slow, 6) as workers:

        async def counted(prompts: Sequence[Prompt]) -> list[Sample]:
            rollout = await workers.generate(prompts)
            if workers.rollouts >= 8:
                some.set()
            return rollout

        config = attrs.evolve(workers.config(games.slow()), batch_size=12, generate_fn=counted)
        async with anyio.create_task_group() as tasks:

            async def play() -> None:
                samples.extend((await games.batches(config, 1))[0])

            tasks.start_soon(play)
            await some.wait()
            await anyio.to_thread.run_sync(functools.partial(cluster.remove_node, node, allow_graceful=False))
    assert len({sample.index for sample in samples}) == 48
    assert workers.deaths == 2


async def test_a_node_that_joins_is_used(cluster: Any) -> None:
    """A run begins with its minimum; actors that wait for room start on the new node within 30 seconds."""
    async with in_actors(games.config, (1, 6)) as workers:
        samples, _ = await games.batches(workers.config(games.config()), 1)
        with anyio.fail_after(60):
            while len(workers.alive) < 4:
                await workers.changed()
        node = cluster.add_node(num_cpus=2, **_SMALL)
        with anyio.fail_after(30):
            while len(workers.alive) < 6:
                await workers.changed()
    await anyio.to_thread.run_sync(functools.partial(cluster.remove_node, node))
    assert len({sample.index for sample in samples}) == 12


async def test_an_actor_that_gets_sigterm_finishes_its_rollouts(cluster: Any, tmp_path: Path) -> None:
    """It costs no attempt; a rollout has one."""
    factory = functools.partial(games.leaving, tmp_path)
    alone, _ = await games.batches(games.config())
    async with in_actors(factory, (1, 2)) as workers:
        with anyio.fail_after(120):
            while len(workers.alive) < 2:
                await workers.changed()
            shared, manager = await games.batches(workers.config(factory()))
            while not workers.departures:
                await workers.changed()
        assert len(workers.alive) == 1
    assert in_order(shared) == in_order(alone)
    assert (workers.deaths, workers.departures, workers.given_away) == (0, 1, 0)
    assert (manager.accounting.failed, manager.failures.lost.total()) == (0, 0)


async def test_a_message_contains_many_samples(cluster: Any) -> None:
    """At least 32, except the last message of each actor."""
    config = attrs.evolve(games.config(), batch_size=128)
    async with in_actors(games.config, 2) as workers:
        samples, _ = await games.batches(workers.config(config), 1)
    assert len(samples) == 512
    assert workers.messages <= workers.rollouts / 32 + 2


async def test_an_actor_that_dies_at_its_start_is_replaced(cluster: Any, tmp_path: Path) -> None:
    """Ray may have chosen a node whose death it has not detected yet."""
    async with in_actors(functools.partial(games.stillborn, tmp_path), 1) as workers:
        samples, _ = await games.batches(workers.config(games.config()), 1)
    assert (tmp_path / "stillborn").exists()
    assert len({sample.index for sample in samples}) == 12


async def test_a_failing_factory_in_an_actor_is_an_error(cluster: Any) -> None:
    """The message contains the factory's error."""
    with pytest.raises(ConfigError, match=r"worker 0 cannot start: .*ValueError: no data"):
        async with in_actors(games.broken, 1):
            pass
