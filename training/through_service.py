"""The training of ``training.learn`` with its batches from a service: ``scripts/learn --service``.

    python -m training.through_service --out runs/service

``rollouts up`` plays the recipe in its own process, on the embedded engine. This process leases a batch, trains, writes
the weights, acknowledges the batch, and publishes the weights. The held-out kinds have numbers from 60 on, which no
training problem has.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from rich.console import Console

from rollouts.dtypes import Prompt
from rollouts.engine.process import server_process
from rollouts.recipe.files import build, load_recipe
from rollouts.service import Rollouts, ServiceError
from rollouts.service.batches import SampleBatch, sample_batches
from training.board import Board
from training.grpo import GrpoConfig
from training.learn import HELD_OUT_KINDS, Lesson, changes, endpoint_of, evaluate, exit_code, spend, trainer_of

__all__ = ["learn_through_service"]


async def learn_through_service(lesson: Lesson, groups: int, console: Console) -> dict[str, Any]:
    """Train; returns the content of ``result.json``.

    Raises:
        RolloutsError: an invalid recipe, or a server that ended.
        ServiceError: the service failed.
    """
    lesson.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(lesson.out / "run", ignore_errors=True)  # else the service continues it
    async with endpoint_of(lesson, lesson.model) as endpoint:
        recipe = build(load_recipe(lesson.recipe), endpoint, lesson.options)
        held_out: dict[str, list[Prompt]] = {}
        for kind in lesson.kinds:
            other = build(load_recipe(lesson.recipe), endpoint, {**lesson.options, "kind": kind})
            held_out[kind] = other.data_buffer.hold_out(lesson.held_out)
        trainer = await anyio.to_thread.run_sync(trainer_of, lesson, lesson.model)
        with Board(lesson.out / "steps.csv", console, steps=lesson.steps) as board:
            before = await evaluate(lesson, recipe, held_out, board, "before")
            command = [sys.executable, "-m", "rollouts", "up", str(lesson.recipe), "--out", str(lesson.out / "run")]
            command += ["--endpoint", *endpoint.base_url, "--model", str(lesson.model), "--port", "0"]
            command += ["--batches", str(lesson.steps), "--stop-with-stdin"]
            command += [word for name, value in lesson.options.items() for word in ("--set", f"{name}={value}")]
            async with server_process(command, lesson.out / "service.log", "rollouts up") as process:
                with Rollouts(process.url, consumer="trainer") as service:
                    batches = sample_batches(service, groups)
                    began = time.monotonic()
                    while (taken := await anyio.to_thread.run_sync(_next, batches)) is not None:
                        step = trainer.batches + 1
                        numbers = await anyio.to_thread.run_sync(spend, trainer, taken.samples, lesson, step)
                        folder = lesson.out / "weights" / str(step)
                        await anyio.to_thread.run_sync(trainer.model.save_pretrained, folder)
                        await anyio.to_thread.run_sync(taken.ack, step)
                        await anyio.to_thread.run_sync(service.publish, f"step-{step}", folder.resolve())
                        await anyio.to_thread.run_sync(shutil.rmtree, folder)
                        board.add(step, {**numbers, "elapsed": time.monotonic() - began})
            after = await evaluate(lesson, recipe, held_out, board, "after")
        result = {
            "before": {kind: scores.describe() for kind, scores in before.items()},
            "after": {kind: scores.describe() for kind, scores in after.items()},
            "steps": trainer.batches,
        }
    (lesson.out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if before:
        console.print(changes(before, after))
    return result


def _next(batches: Iterator[SampleBatch]) -> SampleBatch | None:
    return next(batches, None)


def main(arguments: list[str]) -> int:
    """Train and print the scores before and after; returns the exit code."""
    first = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m training.through_service", description=first)
    parser.add_argument("--out", type=Path, default=Path("runs/service"), help="folder of the run and the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=25, help="of 16 x 8 rollouts (default: 25)")
    parser.add_argument("--groups", type=int, default=16, help="groups of a batch (default: 16)")
    parser.add_argument("--held-out", type=int, default=96, help="problems of each kind to score (default: 96)")
    args = parser.parse_args(arguments)
    lesson = Lesson(
        recipe=Path("calculator_grpo"),
        out=args.out,
        options={"seed": str(args.seed), "batch_size": str(args.groups)},
        grpo=GrpoConfig(lr=5e-4, seed=args.seed),
        steps=args.steps,
        held_out=args.held_out,
        held_out_rollouts=1,
        kinds=HELD_OUT_KINDS,
    )
    train = functools.partial(anyio.run, learn_through_service, lesson, args.groups, Console())
    return exit_code("training.through_service", train, ServiceError)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    sys.exit(main(sys.argv[1:]))
