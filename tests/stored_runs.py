"""Small runs for tests: real trajectories without a model, through the real manager and the real writer."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import numpy as np

from rollouts.dtypes import Completion, Message, Prompt, StopReason, VersionSpan
from rollouts.errors import RolloutsError
from rollouts.runs.checksums import CHECKSUM, sealed
from rollouts.runs.start import begin
from rollouts.runs.writer import Format, RunWriter
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, trajectory_to_sample
from rollouts.trajectory import Trajectory, digest


def some_sample(prompt: Prompt, seed: int, *, turns: int = 2) -> Sample:
    """A sound sample of random tokens; its reward is 0 or 1, and a third of the replies change version half way."""
    rng = random.Random(f"{seed}/{prompt.index}")
    trajectory = Trajectory()
    if not turns:
        trajectory.add_context(_ids(rng), [Message("user", "too long")])
    for turn in range(turns):
        shown = Message("tool" if turn else "user", f"text {turn}")
        trajectory.add_context(_ids(rng), [shown])
        ids = _ids(rng)
        half = len(ids) // 2 if rng.random() < 0.3 else 0
        spans = [VersionSpan("v1", 0, half)] * bool(half) + [VersionSpan("v2", half, len(ids))]
        completion = Completion(
            tokens=ids,
            logprobs=[-rng.expovariate(1) for _ in ids],
            finish_reason="stop",
            versions=spans,
            prompt_tokens=len(trajectory),
            prompt_digest=digest(trajectory.tokens),
            request_id=f"{rng.getrandbits(64):016x}",
        )
        trajectory.add_reply(completion, Message("assistant", f"reply {turn}"))
    trajectory.step_rewards.append(float(rng.random() < 0.5))
    trajectory.seal(StopReason.TASK_COMPLETED)
    return trajectory_to_sample(trajectory, prompt, lambda tokens: " ".join(map(str, tokens)))


def _ids(rng: random.Random) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([rng.randrange(1000) for _ in range(rng.randint(2, 9))], np.int32)


def spread(samples: Sequence[Sample]) -> bool:
    """The usual filter, under a short name."""
    return len({sample.reward for sample in samples}) > 1


async def store_run(
    path: Path,
    *,
    seed: int = 0,
    batches: int = 2,
    format: Format = "jsonl",
    fails: Callable[[Prompt], bool] = lambda prompt: prompt.group_index == 3,
    journaled: bool = False,
    prompt: str = "question {}",
    **options: Any,
) -> AsyncRolloutManager:
    """Write a finished run of 2 batches of 3 groups of 4; group 3 fails, groups without spread are dropped."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        if fails(prompts[0]):
            raise RolloutsError("the world ended")
        return [some_sample(prompt, seed) for prompt in prompts]

    sizes = {"batch_size": 3, "n_samples_per_prompt": 4, "over_sampling_factor": 2.0, **options}
    config = RolloutConfig(generate_fn=generate, **{"filter_fn": spread, **sizes})
    rows = [{"prompt": prompt.format(number), "label": number, "metadata": {"n": [number]}} for number in range(20)]
    description, data = {"config": config.describe()}, DataBuffer(rows)
    writer = RunWriter(path, description, format=format)
    with contextlib.ExitStack() as stack:
        run_journal = begin(path, description, data) if journaled else None
        if run_journal is not None:
            stack.enter_context(run_journal.journal)
        async with AsyncRolloutManager(config, data, on_group=writer.on_group, rollout_log=run_journal) as manager:
            for _ in range(batches):
                writer.write_batch(await manager.generate_batch(), manager.metrics, manager.accounting)
            while manager.accounting.in_flight:  # groups that are in no batch, the same ones each time
                await anyio.lowlevel.checkpoint()
        writer.finish("finished", manager.accounting)
    return manager


def store_long_run(path: Path, batches: int, *, format: Format = "jsonl") -> None:
    """Write a run of batches of 24 samples of 3000 tokens, six groups each."""
    writer = RunWriter(path, format=format)
    rng = np.random.default_rng(0)
    for batch in range(batches):
        samples = []
        for number in range(24):
            tokens, mask = rng.integers(0, 10**6, 3000).astype(np.int32), np.ones(3000, np.bool_)
            group = 6 * batch + number // 4
            logprobs = -rng.random(3000).astype(np.float32)
            samples.append(Sample("?", "", tokens, mask, 0.0, group_index=group, index=4 * group + number % 4))
            samples[-1].rollout_log_probs = logprobs
        writer.write_batch(samples, {})


def edit_line(path: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change one stored row (counted from 0) in place, with a valid checksum, as a faulty writer would."""
    lines = path.read_bytes().splitlines(keepends=True)
    row = msgspec.json.decode(lines[number])
    row.pop(CHECKSUM)
    change(row)
    lines[number] = sealed(msgspec.json.encode(row))
    path.write_bytes(b"".join(lines))


def edit_info(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change ``run.json`` in place, with a valid checksum."""
    info = msgspec.json.decode((run / "run.json").read_bytes())
    info.pop(CHECKSUM)
    change(info)
    (run / "run.json").write_bytes(sealed(msgspec.json.encode(info)))
