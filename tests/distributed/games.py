"""Configs that tests play in workers, created by module-level functions, which can be pickled."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import attrs

from rollouts.dtypes import Prompt
from rollouts.errors import EndpointAway, TokenMismatchError
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.stored_runs import some_sample, spread

PROMPTS = [{"prompt": f"question {number}", "label": (number, None), "metadata": {"n": number}} for number in range(20)]


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.lowlevel.checkpoint()
    return [some_sample(prompt, 7) for prompt in prompts]


def reward(sample: Sample) -> float:
    """Check that the label is still a tuple, a type that MessagePack lacks."""
    assert isinstance(sample.label, tuple)
    return float(sample.tokens[-1] % 2)


def config(*, attempts: int = 2) -> RolloutConfig:
    """Small groups whose samples depend on their index only."""
    return RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=4,
        over_sampling_factor=1.0,
        generate_fn=generate,
        reward_fn=reward,
        max_attempts=attempts,
    )


def broken() -> RolloutConfig:
    raise ValueError("no data")


def lawless() -> RolloutConfig:
    """A law breaks in the first rollout."""

    async def generate_and_break(prompts: Sequence[Prompt]) -> list[Sample]:
        raise TokenMismatchError("the ids are not those that were sent")

    return RolloutConfig(batch_size=3, n_samples_per_prompt=4, generate_fn=generate_and_break)


def failing() -> RolloutConfig:
    """The reward of every third rollout raises."""

    def picky(sample: Sample) -> float:
        if sample.index is not None and sample.index % 3 == 0:
            raise ValueError("not this one")
        return 1.0

    return RolloutConfig(batch_size=3, n_samples_per_prompt=1, generate_fn=generate, reward_fn=picky, max_attempts=1)


def deadly(tombs: Path) -> RolloutConfig:
    """The first worker that plays rollout 5 or 18 kills its process, as soon as the file ``kill 5`` or ``kill 18`` is
    there."""

    async def generate_or_die(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        tomb = tombs / str(prompt.index)
        if prompt.index in (5, 18) and not tomb.exists():
            tomb.touch()
            go = tombs / f"kill {prompt.index}"
            for _ in itertools.takewhile(lambda _: not go.exists(), itertools.count()):
                await anyio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return await generate(prompts)

    return RolloutConfig(
        batch_size=6,
        n_samples_per_prompt=4,
        over_sampling_factor=1.0,
        generate_fn=generate_or_die,
        reward_fn=reward,
        max_attempts=4,
    )


def unanswered(tombs: Path) -> RolloutConfig:
    """No inference server answers the first process that calls this."""
    try:
        (tombs / "unanswered").mkdir()
    except FileExistsError:
        return config(attempts=1)

    async def generate_and_wait(prompts: Sequence[Prompt]) -> list[Sample]:
        raise EndpointAway("no server answers; no request was answered for 1800 s")

    return attrs.evolve(config(attempts=1), generate_fn=generate_and_wait)


def stillborn(tombs: Path) -> RolloutConfig:
    """The first process that calls this dies at once, as if its node died."""
    tomb = tombs / "stillborn"
    if not tomb.exists():
        tomb.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return config()


def located(folder: Path) -> RolloutConfig:
    """Creates a file named after each Ray node that plays."""

    async def generate_somewhere(prompts: Sequence[Prompt]) -> list[Sample]:
        import ray

        (folder / ray.get_runtime_context().get_node_id()).touch()
        return await generate(prompts)

    return attrs.evolve(config(), generate_fn=generate_somewhere)


def slow() -> RolloutConfig:
    """Groups of four whose last rollout takes four seconds, with five attempts each."""

    async def generate_slowly(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(4.0 if (prompts[0].index or 0) % 4 == 3 else 0.05)
        return await generate(prompts)

    return RolloutConfig(
        batch_size=3, n_samples_per_prompt=4, over_sampling_factor=1.0, generate_fn=generate_slowly, max_attempts=5
    )


async def batches(config: RolloutConfig, count: int = 2) -> tuple[list[Sample], AsyncRolloutManager]:
    """Play ``count`` batches; return their samples and the manager."""
    samples: list[Sample] = []
    async with AsyncRolloutManager(config, DataBuffer(PROMPTS)) as manager:
        for _ in range(count):
            samples += await manager.generate_batch()
    manager.accounting.check()
    return samples, manager


__all__ = ["batches", "broken", "config", "deadly", "failing", "generate", "lawless", "reward", "spread"]


def stopping(tombs: Path) -> RolloutConfig:
    """The first worker that plays rollout 5 stops its process, and leaves its process id."""

    async def generate_or_stop(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        tomb = tombs / "pid"
        if prompt.index == 5 and not tomb.exists():
            tomb.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return await generate(prompts)

    return attrs.evolve(config(attempts=1), generate_fn=generate_or_stop)


def leaving(tombs: Path) -> RolloutConfig:
    """The first worker that plays rollout 5 gets SIGTERM in the middle of it."""

    async def generate_and_leave(prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        tomb = tombs / str(prompt.index)
        if prompt.index == 5 and not tomb.exists():
            tomb.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep(0.5)
        return await generate(prompts)

    return attrs.evolve(config(attempts=1), generate_fn=generate_and_leave)
