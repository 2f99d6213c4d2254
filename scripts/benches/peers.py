"""The same job in the loops of other packages: 256 episodes of 3 turns of 256 tokens with a calculator. Not in CI.

Equal work: the same prompts with the schemas of the same tools, the same replies from the same server in its own
process, calls parsed and run, the ids, mask and logprob of each token in the result, and a reward. No text is used in
two rounds. Only CPU time of the client's process counts; the loops alternate.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import attrs

from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Endpoint, Limits, SamplingParams
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import load_tokenizer
from rollouts.testing.canned import canned_server
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.types import GenerateFn
from scripts.benches.peers_in_process import PEERS as IN_PROCESS
from scripts.benches.peers_in_process import in_process, side_by_side
from scripts.benches.peers_job import (
    EPISODES,
    IN_FLIGHT,
    REPLY,
    SYSTEM,
    TOOLS,
    TURNS,
    Calculator,
    Job,
    calculated,
    reward,
)
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_peers", "peers_options"]

Row = dict[str, float | int | str]
PEERS: dict[str, tuple[str, str, float | None]] = {
    "strands-sglang": ("strands_sglang", "strands-sglang==0.4.2", 3.5),
    "strands-sglang-async": ("strands_sglang", "strands-sglang==0.4.2", None),
    "verifiers": ("verifiers", "verifiers==0.4.0", 10.0),
}
"""Module, distribution, and the target: the least multiple of our CPU time."""


@attrs.frozen
class Played:
    """The result of a loop in a round, which shows whether all did the same work."""

    cpu: float
    tokens: int
    """Tokens of all samples; observations differ by a digit or two."""
    trained: int
    logprobs: int
    rewards: float


def timed(run: Callable[[], Awaitable[list[Any]]]) -> tuple[float, list[Any]]:
    """CPU seconds of this process, all threads, and the result; every loop runs with the calm collector."""
    with calm_collector():
        began = time.process_time()
        done = anyio.run(run)
        return time.process_time() - began, done


def agents(job: Job, url: str, policy: SGLangPolicy) -> GenerateFn:
    """Our agents for the job."""
    return functools.partial(
        generate_rollout_batch,
        environment_cls=Calculator,
        endpoint=Endpoint(base_url=url),
        tokenizer=job.renderer,
        policy=policy,
        limits=Limits(max_turns=TURNS + 2),
        sampling=SamplingParams(max_new_tokens=REPLY),
    )


def ours(job: Job, url: str, number: int) -> Played:
    """Through the manager."""

    async def scored(sample: Sample) -> float:
        return reward(sample.messages[-1]["content"])

    async def run() -> list[Sample]:
        async with SGLangPolicy(Endpoint(base_url=url), vocab_size=job.renderer.vocab_size) as policy:
            config = RolloutConfig(
                batch_size=IN_FLIGHT,
                n_samples_per_prompt=1,
                over_sampling_factor=1,
                reward_fn=scored,
                generate_fn=agents(job, url, policy),
            )
            samples: list[Sample] = []
            async with AsyncRolloutManager(config, DataBuffer(job.prompts(number))) as manager:
                while len(samples) < EPISODES:
                    samples += await manager.generate_batch()
            return samples

    cpu, samples = timed(run)
    return Played(
        cpu,
        sum(len(sample.token_column) for sample in samples),
        sum(sum(sample.loss_mask) for sample in samples),
        sum(len(sample.rollout_log_probs or ()) for sample in samples),
        sum(float(sample.reward or 0) for sample in samples),
    )


def strands(job: Job, url: str, number: int, *, waits: bool = False) -> Played:
    """A strands agent for each episode; client and tokenizer are shared, as in the README of strands-sglang.

    Its tools are plain functions, as in that README and as ours; with ``waits`` they are asynchronous, so that it needs
    no threads.
    """
    from strands import Agent
    from strands import tool as strands_tool
    from strands_sglang import SGLangClient, SGLangModel

    def a_tool(name: str, description: str, schema: Any, value: Callable[[float, float], float]) -> Any:
        def calculate(a: float, b: float) -> str:
            return calculated(value(float(a), float(b)))

        async def calculate_later(a: float, b: float) -> str:
            return calculated(value(float(a), float(b)))

        function: Any = calculate_later if waits else calculate
        return strands_tool(name=name, description=description, inputSchema=schema)(function)

    values = {"add": float.__add__, "subtract": float.__sub__, "multiply": float.__mul__, "divide": float.__truediv__}
    tools = [a_tool(one.name, one.description, dict(one.parameters), values[one.name]) for one in TOOLS]
    tokenizer = load_tokenizer(job.folder)

    async def run() -> list[tuple[Any, float]]:
        async with SGLangClient(url) as client:

            async def one(prompt: str) -> tuple[Any, float]:
                model = SGLangModel(client=client, tokenizer=tokenizer, sampling_params={"max_new_tokens": REPLY})
                agent = Agent(model=model, tools=tools, system_prompt=SYSTEM, callback_handler=None)
                await agent.invoke_async(prompt)
                rollout = model.rollout
                row = (list(rollout.token_ids), list(rollout.loss_mask), list(rollout.logprobs))
                return row, reward(agent.messages[-1]["content"][0]["text"])

            return await side_by_side(one, job.prompts(number), IN_FLIGHT)

    cpu, done = timed(run)
    return Played(
        cpu,
        sum(len(row[0]) for row, _ in done),
        sum(sum(row[1]) for row, _ in done),
        sum(len(row[2]) for row, _ in done),
        sum(one for _, one in done),
    )


def verifiers(job: Job, url: str, number: int) -> Played:
    """Environment, interception server, training client and renderer of verifiers; see ``peers_verifiers.py``."""
    sys.path.insert(0, str(Path(__file__).parent))  # verifiers finds plug-ins by the name of a module
    try:
        module = importlib.import_module("peers_verifiers")
    finally:
        sys.path.pop(0)
    cpu, rows = timed(functools.partial(module.play, job.folder, url, job.prompts(number), IN_FLIGHT, REPLY))
    return Played(
        cpu,
        sum(len(tokens) for tokens, _, _, _ in rows),
        sum(sum(mask) for _, mask, _, _ in rows),
        sum(len(logprobs) for _, _, logprobs, _ in rows),
        sum(scored for *_, scored in rows),
    )


LOOPS: dict[str, Callable[[Job, str, int], Played]] = {
    "ours": ours,
    "strands-sglang": strands,
    "strands-sglang-async": functools.partial(strands, waits=True),
    "verifiers": verifiers,
}


def bench_peers(options: argparse.Namespace) -> list[Row]:
    """CPU time of an episode of 3 turns of 256 tokens with a calculator: ours and that of other packages."""
    if options.in_process is not None:
        names = options.in_process or list(IN_PROCESS)
        return in_process(names, str(options.tokenizer or default_tokenizer()), options.rounds)
    missing = sorted({PEERS[name][1] for name in options.peers if not importlib.util.find_spec(PEERS[name][0])})
    if missing:
        raise SystemExit(
            f"not installed in {sys.prefix}: {', '.join(missing)}; scripts/bench peers installs the extra bench-peers"
        )
    job = Job.of(str(options.tokenizer or default_tokenizer()))
    loops = {name: LOOPS[name] for name in ("ours", *options.peers)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    work: dict[str, Played] = {}
    with canned_server(job.canned) as url:
        for number in range(options.rounds + 1):  # the first is to warm up
            for name, loop in loops.items():
                played = work[name] = loop(job, url, number)
                if (played.trained, played.rewards) != (EPISODES * TURNS * REPLY, EPISODES):
                    raise SystemExit(f"{name} did other work: {played}")
                if (
                    abs(played.tokens / work["ours"].tokens - 1) > 0.01
                ):  # numbers of calculations have more or fewer digits
                    raise SystemExit(f"{name} has other tokens: {played}, ours {work['ours']}")
                times[name] += [played.cpu] * (number > 0)
            times_so_far = ", ".join(
                f"{name} {1000 * seconds[-1] / EPISODES:.2f}" for name, seconds in times.items() if seconds
            )
            print(f"round {number}: ms/episode {times_so_far or '(warming up)'}", file=sys.stderr)
    return [_row(name, seconds, times["ours"], work[name]) for name, seconds in times.items()]


def _row(name: str, seconds: list[float], ours: list[float], played: Played) -> Row:
    ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
    at_least = PEERS[name][2] if name in PEERS else None
    return {
        "loop": name,
        "ms/episode": 1000 * statistics.median(seconds) / EPISODES,
        "times ours": statistics.median(ratios),
        "lowest to highest (rounds)": f"{min(ratios):.2f} to {max(ratios):.2f} ({len(ratios)})",
        "target": "" if at_least is None else f"at least {at_least:g}",
        "met": "" if at_least is None else "yes" if statistics.median(ratios) >= at_least else "NO",
        "tokens/episode": played.tokens / EPISODES,
    }


def peers_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="(default: all)")
    parser.add_argument(
        "--in-process",
        nargs="*",
        choices=list(IN_PROCESS),
        help="loops of trainers instead, on the same replies without a server, each in its own environment",
    )
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
