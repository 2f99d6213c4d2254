"""Client CPU time of a session of the Open Reward Standard, measured in its own process.

The server is that of ``openreward`` if it is installed, else ours; it runs in its own process. The client of
``openreward`` is measured too, on the same server, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio

from rollouts.engine import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
CALLS = 3
ROUNDS = 4
"""Each figure is the best of so many, because other processes only add time."""
_HAS_PEER = importlib.util.find_spec("openreward") is not None
_ADD: dict[str, Any] = {"amount": 1} if _HAS_PEER else {"a": 1, "b": 1}

Play = Callable[[int], Coroutine[Any, Any, None]]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run a server with an ``add`` tool; yields its URL."""
    own = ["-m", "rollouts", "serve-env", "tests/ors_recipe.py", "--port", "0"]
    line = ["tests/integration/ors_toys.py", "openreward"] if _HAS_PEER else own
    with _process(line) as url:
        yield url


@contextlib.contextmanager
def _process(line: list[str]) -> Iterator[str]:
    environment = {**os.environ, "OPENREWARD_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-u", *line],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        yield next(text for text in process.stdout if "http://" in text).split()[-1]
    finally:
        process.kill()
        process.communicate()


def measure(client: str, url: str, sessions: int) -> dict[str, float | int | str]:
    """Measure a client in a fresh process."""
    line = [sys.executable, "-m", "scripts.benches.ors", client, url, str(sessions)]
    environment = {
        **os.environ,
        "OPENREWARD_DISABLE_UPDATE_CHECK": "1",
        "OPENREWARD_SESSION_URL": url,
        "OPENREWARD_API_URL": url,
    }
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{client}: {done.stderr[-2000:]}")
    row: dict[str, float | int | str] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def bench_ors(options: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """Client CPU of sessions of the Open Reward Standard, three calls each, and of slime's rollouts through them."""
    with server() as url:
        rows = [measure("ours", url, options.sessions)]
        if _HAS_PEER:
            rows += [measure(peer, url, options.sessions) for peer in ("openreward, variant set", "openreward")]
        rows.append(_slime(url, options.samples, options.tokenizer))
    for row in rows:
        row["server"] = "openreward" if _HAS_PEER else "rollouts serve-env"
    return rows


def ors_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=128, help="at once (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of slime's batch (default: %(default)s)")
    parser.add_argument("--tokenizer", default=str(DEMO_MODEL), help="folder or name (default: the demo model)")


# -- in the measured process ------------------------------------------------------------------------------------------


async def _ours(url: str) -> Play:
    from rollouts.dtypes import Message, ToolCall
    from rollouts.environments.ors import ORSEnvironment, ORSServer

    here = ORSServer(url)
    prompts = await here.prompts("train")
    reply = Message("assistant", tool_calls=[ToolCall("add", _ADD, id="c")])

    async def play(number: int) -> None:
        environment = ORSEnvironment(here)
        await environment.start(prompts[number % len(prompts)])
        for _ in range(CALLS):
            await environment.step(reply)
        await environment.close()

    return play


async def _openreward(variant: str | None) -> Play:
    from openreward import AsyncOpenReward

    environment = AsyncOpenReward().environments.get("adder", variant=variant)
    tasks = await environment.list_tasks("train")

    async def play(number: int) -> None:
        async with environment.session(task=tasks[number % len(tasks)]) as session:
            await session.list_tools()
            await session.get_prompt()
            for _ in range(CALLS):
                await session.call_tool("add", _ADD)

    return play


async def _measured(client: str, url: str, sessions: int) -> dict[str, Any]:
    if client == "ours":
        play = await _ours(url)
    else:
        play = await _openreward("adder" if "variant" in client else None)
    async with anyio.create_task_group() as tasks:  # imports, caches, the first connections
        for number in range(4):
            tasks.start_soon(play, number)
    spent: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        began, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for number in range(sessions):
                tasks.start_soon(play, number)
        spent.append((time.process_time() - cpu, time.perf_counter() - began))
    cpu, wall = min(spent)
    return {
        "client": client,
        "at once": sessions,
        "client CPU, ms each": 1000 * cpu / sessions,
        "wall, s": wall,
    }


# -- slime's rollouts through ORS -------------------------------------------------------------------------------------


def serve_replies(tokenizer: str) -> None:
    """An engine that always calls ``add``, in 256 tokens."""
    from rollouts.renderer import renderer_for
    from rollouts.testing.server import StubServer

    renderer = renderer_for(tokenizer)
    call = json.dumps({"name": "add", "arguments": _ADD})
    tail = [*renderer.encode(f"<tool_call>\n{call}\n</tool_call>").tolist(), renderer.stop_token_ids[0]]
    words = renderer.encode("I think about it. " * 200).tolist()
    reply = [*words[: 256 - len(tail)], *tail]

    async def serve() -> None:
        async with StubServer(lambda ids, sampling: reply) as engine:
            print(engine.url, flush=True)
            await anyio.sleep_forever()

    anyio.run(serve)


def _slime(url: str, samples: int, tokenizer: str) -> dict[str, float | int | str]:
    """Rollouts of three turns through the slime integration, the kit's recipe, and an ORS server."""
    with _process(["-m", "scripts.benches.ors", "engine", tokenizer]) as engine:
        line = [sys.executable, "-m", "scripts.benches.ors", "slime", url, str(samples), engine, tokenizer]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"slime: {done.stderr[-2000:]}")
    row: dict[str, float | int | str] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def _slime_measured(url: str, samples: int, engine: str, tokenizer: str, folder: Path) -> dict[str, Any]:
    from rollouts.integrations.slime import close_rollouts, generate_rollout_batch
    from rollouts.integrations.slime.convert import leaves
    from rollouts.integrations.slime.records import records
    from rollouts.recipes.environments.openreward import load_settings, prepare_tasks
    from rollouts.recipes.environments.openreward.tasks import write_tasks

    config, data = folder / "config.yaml", folder / "rows.jsonl"
    config.write_text(f"environments: {{adder: {{base_url: '{url}', max_turns: {CALLS}}}}}")
    rows = anyio.run(prepare_tasks, load_settings(config))
    write_tasks(rows, data)
    size = 8

    class Source:
        taken = 0

        def get_samples(self, count: int) -> list[list[Any]]:
            group = []
            for member in range(size):
                row = rows[self.taken % len(rows)]
                group.append(records().sample(group_index=self.taken, index=self.taken * size + member, **row))
            self.taken += 1
            return [group]

    host, port = engine.removeprefix("http://").split(":")
    args = argparse.Namespace(
        rollout_batch_size=samples // size,
        n_samples_per_prompt=size,
        rollout_temperature=1.0,
        rollout_max_response_len=512,
        hf_checkpoint=tokenizer,
        sglang_router_ip=host,
        sglang_router_port=int(port),
        rollouts_recipe=str(ROOT / "rollouts" / "recipes" / "openreward.py"),
        rollouts_recipe_options={"config": str(config), "data": str(data)},
        rollouts_over_sampling_factor=1.0,
    )
    source = Source()
    try:
        generate_rollout_batch(args, 0, source)
        spent: list[tuple[float, float]] = []
        for number in range(1, ROUNDS + 1):
            began, cpu = time.perf_counter(), time.process_time()
            output = generate_rollout_batch(args, number, source)
            spent.append((time.process_time() - cpu, time.perf_counter() - began))
        cpu, wall = min(spent)
    finally:
        close_rollouts()
    made = list(leaves(output.samples))
    assert all(sum(sample.loss_mask) == 256 * CALLS for sample in made), "three replies of 256 tokens each"
    return {
        "client": f"slime's rollout function, {CALLS} turns of 256 tokens",
        "at once": len(made),
        "client CPU, ms each": 1000 * cpu / len(made),
        "wall, s": wall,
    }


def main() -> None:
    if sys.argv[1] == "engine":
        serve_replies(sys.argv[2])
    elif sys.argv[1] == "slime":
        import tempfile

        url, samples, engine, tokenizer = sys.argv[2:]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_slime_measured(url, int(samples), engine, tokenizer, Path(folder))), flush=True)
    else:
        client, url, sessions = sys.argv[1:]
        measured = functools.partial(_measured, client, url, int(sessions))
        print(json.dumps(anyio.run(measured)), flush=True)
        os._exit(0)  # the peer's background threads need not be waited for


if __name__ == "__main__":
    main()
