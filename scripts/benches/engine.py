"""Generation speed of the embedded engine over HTTP, in tokens a second."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import anyio
import attrs

from rollouts.engine import DEMO_MODEL, serve

__all__ = ["bench_engine", "engine_options"]

Row = dict[str, float | int | str]


def _serve(model: Path, slots: int, ready: Connection) -> None:
    anyio.run(lambda: serve(model, slots=slots, on_ready=ready.send))


@contextlib.contextmanager
def engine_process(model: Path, slots: int) -> Iterator[str]:
    """Run the engine in its own process; yields its URL."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(model, slots, there), daemon=True)
    process.start()
    try:
        if not here.poll(120):
            raise SystemExit("the engine did not start within 120 s")
        yield here.recv()
    finally:
        process.terminate()
        process.join(10)


@attrs.frozen
class Shape:
    """The shape of a request."""

    prompt: int
    """Number of tokens; all prompts share the first half, as a system prompt."""
    reply: int


SHAPES = {"turn": Shape(prompt=80, reply=20), "long": Shape(prompt=80, reply=200)}
"""``turn`` is a turn of a tool-using agent, where HTTP weighs most."""


async def _post(session: aiohttp.ClientSession, url: str, shape: Shape, rng: random.Random) -> int:
    shared = [(7 * number) % 256 for number in range(shape.prompt // 2)]
    prompt = shared + [rng.randrange(256) for _ in range(shape.prompt - len(shared))]
    sampling = {"max_new_tokens": shape.reply, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
    return len(answer["output_ids"])


async def _measure(url: str, shape: Shape, concurrency: int, seconds: float) -> Row:
    counts: list[int] = []
    rng = random.Random(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await _post(session, url, shape, rng)
        start = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - start < seconds:
                counts.append(await _post(session, url, shape, rng))

        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(client)
        took = time.perf_counter() - start
    return {
        "concurrency": concurrency,
        "requests": len(counts),
        "requests_per_s": len(counts) / took,
        "generated_tokens_per_s": sum(counts) / took,
    }


def bench_engine(options: argparse.Namespace) -> list[Row]:
    """Generated tokens a second over HTTP, the server in its own process, the client in this one."""
    rows: list[Row] = []
    with engine_process(options.model, options.slots) as url:
        for name in options.shape:
            for concurrency in options.concurrency:
                row = anyio.run(_measure, url, SHAPES[name], concurrency, options.seconds)
                rows.append({"shape": name, **row})
    return rows


def engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    parser.add_argument("--slots", type=int, default=128, help="slots of the engine (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128], help="(default: %(default)s)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: %(default)s)")
