"""A run with faults: environments raise and hang, replies are lost, rewards are NaN, the engine dies twice.

The engine, and a proxy that breaks its replies, run in their own processes. The checks concern this process: every
batch is filled, the accounting adds up, no tasks, sockets or threads are left, and the event loop is on time. Exits
with 1 if a check fails, or if the loop itself caused a lag of 100 ms or more.

The lag that the loop itself caused is the lesser of two values. The first is its lag minus the time that its thread
waited for a processor, which Linux counts; the rest is its work, waits for a disk, and waits for the interpreter lock
of another thread. The second is the CPU time of all our threads in that period, which bounds the lag on an otherwise
idle machine. All values are printed, and the lag of an idle loop in its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import attrs
from aiohttp import web

from rollouts.concurrency.boundary import abandoned, waits
from rollouts.dtypes import Endpoint, Limits
from rollouts.engine import DEMO_MODEL
from rollouts.inference.shared import shared_policy
from rollouts.recipe import preflight
from rollouts.renderer import renderer_for
from rollouts.runs.verify import verify_run
from rollouts.training.failures import FailurePolicy
from rollouts.training.manager import AsyncRolloutManager
from scripts.faults.harness import Engine, in_process, stored
from scripts.faults.stopped_worker import stopped_worker
from scripts.faults.user_code import Choose, CodeFault, Place, fault_of, recipe_of

BOUND = 100.0
"""Maximum lag in milliseconds that the loop itself may cause."""

FAULTS: Counter[str] = Counter()


async def _hangs_in_thread(world: object) -> None:
    await anyio.to_thread.run_sync(time.sleep, 5.0, abandon_on_cancel=True)


_SHARES: dict[str, list[tuple[float, CodeFault]]] = {
    "start": [
        (0.10, fault_of("start", "raises OSError")),
        (0.20, fault_of("step", "raises KeyError")),
        (0.24, fault_of("step", "awaits for ever")),
        (0.25, CodeFault("step", "hangs in a thread", _hangs_in_thread)),
    ],
    "reward": [(0.015, fault_of("reward", "raises OSError")), (0.03, fault_of("reward", "returns NaN"))],
}
"""By the first of the places that ask: up to which draw between 0 and 1 each fault is chosen."""


def chooser(rng: random.Random) -> Choose:
    """20 % of the episodes raise in start or step, 5 % hang; 3 % of the rewards raise or are NaN."""

    def choose(places: Sequence[Place], group: int | None) -> CodeFault | None:
        draw = rng.random()
        fault = next((fault for end, fault in _SHARES.get(places[0], ()) if draw < end), None)
        if fault is not None:
            FAULTS[f"{fault.place} {fault.name}"] += 1
        return fault

    return choose


# -- the proxy of the engine -----------------------------------------------------------------------------------------


def proxy(target: str, pipe: Connection) -> None:
    """Forward to the engine; one reply of ten is a 500, a 503, a reset before or a reset inside the body.

    While the engine is away, no connection is accepted, as if the client asked the engine itself: a client waits for a
    server that is down, however long its start takes. It tries a server that closes each connection a few times only.
    """
    rng = random.Random(1)
    counts: Counter[str] = Counter()
    away = anyio.Event()
    session: aiohttp.ClientSession

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = "none"
        if request.path == "/generate":
            counts["replies"] += 1
            draw = rng.random()
            fault = next((name for name, end in _CUTS if draw < end), "none")
            counts[fault] += 1
        if fault in ("500", "503"):
            return web.json_response({"error": {"message": "broken on purpose"}}, status=int(fault))
        if fault == "reset":
            return cut(request)
        try:
            async with session.request(request.method, target + request.path_qs, data=body) as answer:
                payload = await answer.read()
        except (aiohttp.ClientError, OSError):
            counts["engine away"] += 1
            away.set()
            return cut(request)
        if fault == "reset in body":
            response = web.StreamResponse(headers={"Content-Length": str(len(payload))})
            with contextlib.suppress(ConnectionError):  # the client has already disconnected
                await response.prepare(request)
                await response.write(payload[: len(payload) // 2])
            return cut(request)
        return web.Response(body=payload, status=answer.status, content_type="application/json")

    def cut(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def listen(runner: web.AppRunner, task_status: Any) -> None:
        """Listen while the engine answers."""
        nonlocal away
        port = 0
        while True:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            port = runner.addresses[0][1]
            with contextlib.suppress(RuntimeError):  # it has started before
                task_status.started(port)
            await away.wait()
            await site.stop()
            while not await answers():  # noqa: ASYNC110 - another process
                await anyio.sleep(0.1)
            away = anyio.Event()

    async def answers() -> bool:
        try:
            async with session.get(f"{target}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def serve() -> None:
        nonlocal session
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            async with anyio.create_task_group() as tasks:
                pipe.send(f"http://127.0.0.1:{await tasks.start(listen, runner)}")
                await anyio.to_thread.run_sync(pipe.recv)
                pipe.send(dict(counts))
                tasks.cancel_scope.cancel()
            await runner.cleanup()

    anyio.run(serve)


_CUTS = (("500", 0.025), ("503", 0.05), ("reset", 0.075), ("reset in body", 0.10))


# -- the run ----------------------------------------------------------------------------------------------------------


def sockets() -> int:
    """Open sockets of this process."""
    names = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum("socket:" in name for name in names)


@attrs.frozen
class Moment:
    """Scheduling times of this thread, in seconds."""

    now: float = attrs.field(factory=time.monotonic)
    worked: float = attrs.field(factory=time.thread_time)
    all_worked: float = attrs.field(factory=time.process_time)
    stood_in_line: float = attrs.field(factory=lambda: stood_in_line())


def stood_in_line() -> float:
    """Seconds that this thread waited for a processor; 0 if the system does not report it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@attrs.frozen
class Lateness:
    """Samples of a loop's lag, in milliseconds."""

    lags: list[float] = attrs.field(factory=list)
    out_of_line: list[float] = attrs.field(factory=list)
    """The lag minus the wait for a processor."""
    own: list[float] = attrs.field(factory=list)
    """The same, bounded by the CPU time of all threads of the process."""
    work: list[float] = attrs.field(factory=list)
    """CPU time of the loop's thread between two samples."""

    async def watch(self) -> None:
        """Sample every 10 ms until cancelled."""
        before = Moment()
        while True:
            await anyio.sleep(0.01)
            after = Moment()
            lag = after.now - before.now - 0.01
            self.lags.append(1e3 * lag)
            out_of_line = max(0.0, lag - (after.stood_in_line - before.stood_in_line))
            self.out_of_line.append(1e3 * out_of_line)
            self.own.append(1e3 * min(out_of_line, after.all_worked - before.all_worked))
            self.work.append(1e3 * (after.worked - before.worked))
            before = after

    def __str__(self) -> str:
        names = {"late": self.lags, "out of line": self.out_of_line, "by itself": self.own, "worked": self.work}
        return "; ".join(f"{name} {_spread(numbers)}" for name, numbers in names.items())


def _spread(numbers: list[float]) -> str:
    found = sorted(numbers)
    return f"median {found[len(found) // 2]:.1f}, p99 {found[len(found) * 99 // 100]:.1f}, most {found[-1]:.1f}"


def control(pipe: Connection) -> None:
    """The lag of an idle loop, sampled in the same way."""

    async def idle() -> Lateness:
        late = Lateness()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.watch)
            await anyio.to_thread.run_sync(pipe.recv)
            tasks.cancel_scope.cancel()
        return late

    pipe.send(str(anyio.run(idle)))


async def restart_twice(manager: AsyncRolloutManager, engine: Engine, groups: int) -> None:
    """Kill and restart the engine after a quarter and after a half of the groups."""
    for share in (0.25, 0.5):
        while manager.accounting.in_batch + manager.accounting.ready < share * groups:  # noqa: ASYNC110 - no event
            await anyio.sleep(0.05)
        await anyio.to_thread.run_sync(engine.kill)
        await anyio.to_thread.run_sync(engine.start)
        FAULTS["engine restarted"] += 1
    await anyio.sleep_forever()


async def play(args: argparse.Namespace, url: str, engine: Engine, out: Path) -> bool:
    failures = {
        "endpoint": FailurePolicy(attempts=12, backoff_seconds=0.5, most_seconds=5.0),
        "environment_start": FailurePolicy(attempts=4, backoff_seconds=0.05),
        "environment_step": FailurePolicy(attempts=4, backoff_seconds=0.05),
        "deadline": FailurePolicy(attempts=3, replacements=2, min_sound=4),
        "reward": FailurePolicy(attempts=4, replacements=1),
    }
    recipe = recipe_of(
        Endpoint(model=str(DEMO_MODEL), base_url=url, max_retries=8),
        chooser(random.Random(0)),
        batches=args.batches,
        limits=Limits(max_turns=6, step_seconds=1.0),
        batch_size=args.groups,
        n_samples_per_prompt=8,
        failures=failures,
        failure_budget=0.9,
        **dict.fromkeys(("reward_seconds", "filter_seconds", "rollout_seconds"), 60.0),
    )
    await preflight(recipe)
    vocab_size = renderer_for(recipe.tokenizer).vocab_size
    await shared_policy(recipe.endpoint, vocab_size).aclose()
    await anyio.sleep(0.1)
    tasks_before, sockets_before = len(asyncio.all_tasks()), sockets()
    threads_before = threading.active_count()
    late = Lateness()
    seen: list[AsyncRolloutManager] = []

    async def watch(manager: AsyncRolloutManager) -> None:
        seen.append(manager)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.watch)
            tasks.start_soon(restart_twice, manager, engine, args.groups * args.batches)

    result = await stored(recipe, out, watch=watch)
    await shared_policy(recipe.endpoint, vocab_size).aclose()
    await anyio.sleep(0.2)
    report = await anyio.to_thread.run_sync(verify_run, out)
    lost = seen[0].failures.lost
    left = {
        "tasks": len(asyncio.all_tasks()) - tasks_before,
        "sockets": sockets() - sockets_before,
        "waits": len(waits()),
    }
    print(f"{result.status} after {result.seconds:.1f} s: {result.batches} of {args.batches} batches")
    print(f"accounting: {result.accounting}")
    print(f"faults made here: {dict(FAULTS)}")
    print(f"attempts lost by cause: {dict(lost)}; rollouts replaced: {seen[0].failures.replaced}")
    bias = {name: round(value, 2) for name, value in seen[0].metrics.items() if name.endswith(("/sound", "/lost"))}
    print(f"lost and sound rollouts of the last batch: {bias}")
    print(f"verify: {len(report.violations)} violations")
    threads = f"threads {threads_before} before, {threading.active_count()} after, {len(abandoned())} abandoned"
    print(f"left over: {left}; {threads}")
    print(f"the loop, in ms, over {len(late.lags)} looks: {late}")
    if result.error is not None:
        print(f"error: {result.error}")
    good = result.status == "finished" and report.ok and not any(left.values()) and FAULTS["engine restarted"] == 2
    if max(late.own) >= BOUND:
        print(f"the loop was late by {max(late.own):.1f} ms by itself; expected less than {BOUND:g}")
    return good and max(late.own) < BOUND


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/faults/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=16, help="in a batch (16)")
    parser.add_argument("--batches", type=int, default=3, help="how many (3)")
    parser.add_argument(
        "--stopped-worker", type=float, metavar="S", help="stop one of two workers for S seconds instead"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        folder = Path(name)
        good = stopped_worker(folder, args.stopped_worker) if args.stopped_worker else broken(args, folder)
    print("passed" if good else "FAILED")
    return 0 if good else 1


def broken(args: argparse.Namespace, folder: Path) -> bool:
    """Play with broken replies and functions, and print."""
    engine = Engine(folder / "engine.log")
    try:
        with in_process(proxy, engine.url) as replies, in_process(control) as idle:
            good = anyio.run(play, args, replies.recv(), engine, folder / "run")
            idle.send("stop")
            print(f"an idle loop in its own process, in ms: {idle.recv()}")
            replies.send("stop")
            print(f"replies: {replies.recv()}")
    finally:
        engine.kill()
    return good


if __name__ == "__main__":
    sys.exit(main())
