"""Sandboxes that are opened ahead: they follow the order of the data, hide starts, and are alive."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import attrs
import pytest

from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.planning.simulation import VirtualLoop
from rollouts.programs import script
from rollouts.programs.generate import chosen_kind
from rollouts.programs.recipe import program_recipe
from rollouts.programs.warm import WarmSandboxes
from rollouts.recipe import Recipe
from rollouts.sandboxes import (
    Ability,
    Containment,
    Exit,
    NamespaceSandbox,
    Sandbox,
    SandboxError,
    SandboxLimits,
    opened,
)
from rollouts.training import AsyncRolloutManager, DataBuffer, Prompt, RolloutConfig, Sample
from rollouts.training.samplers import PassRateSampler
from tests.manager_semantics.world import answer_at_once


@attrs.define
class World:
    """The history of the sandboxes of a fake kind."""

    start_seconds: float = 20.0
    dies: Callable[[int], bool] = lambda number: False
    opened: list[str] = attrs.Factory(list)
    closed: int = 0
    used_dead: int = 0
    error: type[Exception] = SandboxError


@attrs.define(eq=False)
class Box:
    world: World
    number: int
    listener = None
    workspace = home = "/"

    async def exec(self, argv: Sequence[str], **options: Any) -> Exit:
        if self.world.dies(self.number):
            raise self.world.error("the sandbox ended: no message")
        return Exit(0, "", "", 0.0)

    async def run(self, argv: Sequence[str], env: Any = None, **options: Any) -> Exit:
        self.world.used_dead += self.world.dies(self.number)
        return Exit(0, "", "", 0.0)

    async def close(self) -> None:
        self.world.closed += 1
        if self.world.dies(self.number):
            raise self.world.error("it was gone")


@attrs.frozen
class Kind:
    """A kind of boxes that take seconds to start."""

    world: World = attrs.field(eq=False)
    image: str = "one"
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)
    abilities: frozenset[Ability] = frozenset()

    def containment(self) -> Containment:
        return Containment({}, {}, ())

    async def open(self) -> Any:
        self.world.opened.append(self.image)
        number = len(self.world.opened)
        await anyio.sleep(self.world.start_seconds)
        if self.image == "broken":
            raise SandboxError("no such image")
        return Box(self.world, number)


def on_virtual_clock(function: Callable[[], Any]) -> Any:
    return anyio.run(function, backend_options={"loop_factory": VirtualLoop})


def prompts(images: Sequence[str]) -> list[Prompt]:
    return [Prompt(f"task {number}", metadata={"image": image}) for number, image in enumerate(images)]


def play(world: World, images: Sequence[str], *, batches: int, copies: int = 4, ahead: int = 24) -> WarmSandboxes:
    """A run of the real scheduler whose rollouts take a box, and 30 to 90 s in it; the queue at its end."""
    buffer = DataBuffer(prompts(images), seed=3)
    rng = random.Random(5)

    async def kind_of(prompt: Prompt) -> Sandbox:  # async: a virtual clock does not wait for threads
        return Kind(world, str(prompt.metadata["image"]))

    queue = WarmSandboxes(kind_of, buffer, ahead=ahead, copies=copies)

    async def generate(given: Sequence[Prompt]) -> list[Sample]:
        async with opened(await queue(given[0])) as box:
            await box.run(["agent"], seconds=100.0)
            await anyio.sleep(rng.uniform(30, 90))
        return await answer_at_once(given)

    async def run() -> None:
        config = RolloutConfig(
            batch_size=4, n_samples_per_prompt=copies, over_sampling_factor=1.5, generate_fn=generate
        )
        async with queue:
            await anyio.sleep(world.start_seconds)  # a server that loads its weights takes longer
            async with AsyncRolloutManager(config, buffer) as manager:
                for _ in range(batches):
                    await manager.generate_batch()

    on_virtual_clock(run)
    return queue


@pytest.mark.parametrize("images", [["one"] * 200, [f"image {number % 40}" for number in range(200)]])
def test_a_start_of_twenty_seconds_is_hidden(images: Sequence[str]) -> None:
    """At least nine tenths of it, with one image or forty, in the shuffled order of the data; every box is closed."""
    world = World()
    queue = play(world, images, batches=20)
    used = sum(queue.counts[how] for how in ("warm", "awaited", "cold"))
    assert used >= 20 * 4 * 4
    assert queue.seconds["waited"] <= 0.1 * used * world.start_seconds
    assert world.closed == len(world.opened)
    assert queue.counts["unused"] <= 0.2 * used


@pytest.mark.parametrize("error", [SandboxError, OSError])
def test_no_dead_box_is_handed_out(error: type[Exception]) -> None:
    """A box that does not answer is closed and counted, and its rollout gets another one, whatever it raises."""
    world = World(dies=lambda number: number % 3 == 0, error=error)
    queue = play(world, ["one"] * 100, batches=10)
    assert queue.counts["dead"] >= 30
    assert queue.counts["cold"] == 0
    assert world.used_dead == 0


async def test_boxes_are_opened_in_the_order_of_the_data() -> None:
    """As many as asked for, each as often as its prompt has rollouts; the next ones as these are taken."""
    world = World(start_seconds=0)
    buffer = DataBuffer(prompts(["a", "b", "c", "d"]))
    async with WarmSandboxes(lambda prompt: Kind(world, prompt.metadata["image"]), buffer, ahead=4, copies=2) as queue:
        await anyio.wait_all_tasks_blocked()
        assert world.opened == ["a", "a", "b", "b"]
        (prompt,) = buffer.get_prompts(1)
        async with opened(await queue(prompt)):
            await anyio.wait_all_tasks_blocked()
        assert world.opened == ["a", "a", "b", "b", "c"]  # the other rollout of "a" has not asked yet
        async with opened(await queue(prompt)):
            await anyio.wait_all_tasks_blocked()
        assert world.opened == ["a", "a", "b", "b", "c", "c"]
        assert queue.counts["warm"] == 2
    assert world.closed == 6


async def test_a_start_that_fails_is_of_the_rollout_that_needs_it() -> None:
    """Ahead of it, it is counted and not repeated; neither it nor a function that fails ends the others."""
    world = World(start_seconds=0)

    def choose(prompt: Prompt) -> Sandbox:
        if prompt.metadata["image"] == "unknown":
            raise KeyError("unknown")
        return Kind(world, prompt.metadata["image"])

    buffer = DataBuffer(prompts(["broken", "unknown", "fine"]), epochs=1)
    async with WarmSandboxes(choose, buffer, ahead=3) as queue:
        await anyio.wait_all_tasks_blocked()
        assert (queue.counts["failed"], world.opened) == (2, ["broken", "fine"])
        first, second, third = buffer.get_prompts(3)
        with pytest.raises(SandboxError, match="no such image"):
            await (await queue(first)).open()
        await anyio.wait_all_tasks_blocked()
        assert world.opened == ["broken", "fine", "broken"]
        with pytest.raises(EnvironmentFailure, match="KeyError"):
            await queue(second)
        async with opened(await queue(third)):
            assert queue.counts["warm"] == 1


async def test_outside_of_its_context_it_opens_as_without_it() -> None:
    """So that a check before a run costs one box; the kinds of prompts with one image are equal."""
    world = World(start_seconds=0)
    queue = WarmSandboxes(Kind(world), DataBuffer(prompts(["a", "b"])), ahead=2)
    kind = await queue(Prompt("a"))
    assert kind == await queue(Prompt("b")) == await chosen_kind(queue, Prompt("c"))
    async with opened(kind):
        pass
    assert (world.opened, world.closed, queue.counts["cold"]) == (["one"], 1, 1)
    with pytest.raises(ConfigError, match=r"WarmSandboxes.ahead: got 0; expected an integer >= 1"):
        WarmSandboxes(Kind(world), DataBuffer(prompts(["a"])), ahead=0)


def test_a_recipe_of_programs_opens_the_sandboxes_of_one_prompt_ahead() -> None:
    """By default; none with 0 or with a sampler; a number with a sampler is refused. It is described as without."""
    kind = NamespaceSandbox()

    def made(warm: int | None, **options: Any) -> Recipe:
        given = {"sandbox": kind, "warm": warm, "n_samples_per_prompt": 3, "batch_size": 2, **options}
        return program_recipe("r", Endpoint(model="m"), script, ["a", "b"], **given)

    recipe = made(None)
    assert isinstance(recipe.lifetime, WarmSandboxes)
    assert (recipe.bound["sandbox"], recipe.lifetime._ahead, recipe.lifetime._copies) == (recipe.lifetime, 3, 3)
    assert recipe.describe() == made(0).describe()
    assert (made(0).lifetime, made(0).bound["sandbox"], made(None, sampler="pools").lifetime) == (None, kind, None)
    with pytest.raises(ConfigError, match=r"WarmSandboxes\.buffer"):
        made(2, sampler="pools")
    with pytest.raises(ConfigError, match="warm: got -1; expected an integer >= 0, or None"):
        made(-1)


async def test_prompts_that_were_put_back_come_first() -> None:
    """And the order ends with the data."""
    world = World(start_seconds=0)
    buffer = DataBuffer(prompts(["a", "b", "c"]), epochs=1)
    buffer.put_back(buffer.get_prompts(2)[:1])
    async with WarmSandboxes(lambda prompt: Kind(world, prompt.metadata["image"]), buffer, ahead=9) as queue:
        await anyio.wait_all_tasks_blocked()
        assert world.opened == ["a", "b", "c"]  # "b" is out, and its rollout has not asked yet
        assert queue.counts["failed"] == 0
    with pytest.raises(ConfigError, match=r"WarmSandboxes.buffer: got .*; expected a data buffer without a sampler"):
        WarmSandboxes(Kind(world), DataBuffer(prompts(["a"]), sampler=PassRateSampler()), ahead=1)
