"""Unit costs that must not grow: with the connections, the history of an episode, the samples of a run."""

from __future__ import annotations

import functools
import gc
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import attrs
import numpy as np

from rollouts.agent import run_agent
from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.dtypes import Completion, Limits, Prompt, SamplingParams, VersionSpan
from rollouts.environments import SimulatedUser
from rollouts.inference import generate_wire
from rollouts.inference.base import CompletionRequest
from rollouts.inference.token_json import SequenceCache
from rollouts.renderer import Renderer
from rollouts.runs.journal import Journal
from rollouts.runs.run_journal import RunJournal
from rollouts.testing.canned import Canned, canned_server
from rollouts.testing.latency import Latency
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample, Status
from rollouts.training.filters import check_reward_nonzero_std
from scripts.benches.lines import Line
from scripts.benches.ratios import played
from scripts.benches.workloads import Play, Workload

__all__ = ["concurrency", "history", "samples"]

FEW, MANY = 256, 4096


def concurrency(renderer: Renderer, rounds: int) -> Iterator[Line]:
    """CPU time of a turn with 4,096 requests in flight over that with 256."""
    _allow_files(2 * MANY + 256)
    shape = Workload(turns=4, reply=64, prompt=200, observation=64, samples=MANY, in_flight=MANY)
    many = Play.of(shape, renderer)
    few = attrs.evolve(many, workload=attrs.evolve(shape, in_flight=FEW))
    turns = shape.samples * shape.turns
    with canned_server(Canned([many.reply], latency=Latency(0.2))) as url:
        pairs = [(played(many, url).cpu, played(few, url).cpu) for _ in range(rounds)]
    details = {f"{n} ms/turn": 1000 * min(p[side] for p in pairs) / turns for side, n in ((0, MANY), (1, FEW))}
    yield Line.of("connections", "a turn at 4,096 / at 256 in flight", [a / b for a, b in pairs], 2.0, details=details)


def _allow_files(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- the history of an episode ----------------------------------------------------------------------------------------


class _Timed:
    """A policy with a constant reply, which builds requests as a real one and sends none.

    It records the CPU time between two replies, by the length of the history.
    """

    def __init__(self, reply: Sequence[int]) -> None:
        self.reply = np.array(reply, np.int32)
        self.turns: list[tuple[int, float]] = []
        self._cache = SequenceCache()
        self._answered = 0.0

    async def complete(self, request: CompletionRequest) -> Completion:
        ids = self._cache.encode(request.tokens, request.session)
        options = generate_wire.request_options(request.sampling, request.stop_token_ids)
        ids.move_into(*generate_wire.request_body("rid", ids, options))
        completion = Completion(
            tokens=self.reply,
            logprobs=np.full(len(self.reply), -0.5, np.float32),
            finish_reason="stop",
            versions=[VersionSpan("bench", 0, len(self.reply))],
            prompt_tokens=ids.count,
            prompt_digest=ids.digest,
            request_id=str(ids.count),
        )
        now = time.thread_time()
        if self._answered:
            self.turns.append((len(request.tokens), now - self._answered))
        self._answered = now
        return completion


def _turns(renderer: Renderer, longest: int) -> list[tuple[int, float]]:
    """History and CPU seconds of each turn of one long episode."""
    reply = [*renderer.encode("The answer to this is not known to me. " * 10).tolist(), renderer.stop_token_ids[0]]

    async def user(conversation: object) -> str:
        return "And what about the other one, which is longer? " * 20

    policy = _Timed(reply)
    run = functools.partial(
        run_agent,
        sampling=SamplingParams(max_new_tokens=4096),
        limits=Limits(max_turns=10_000, max_tokens=longest + 4000),
    )
    anyio.run(run, Prompt("Well?"), functools.partial(SimulatedUser, user), policy, renderer)
    return policy.turns


def _medians(turns: Sequence[tuple[int, float]], histories: Sequence[int]) -> list[tuple[int, float]]:
    """The number of turns near each history length, and the median of their seconds."""
    medians = []
    for history in histories:
        near = sorted(seconds for length, seconds in turns if abs(length - history) <= max(history / 10, 1500))
        medians.append((len(near), near[len(near) // 2]))
    return medians


def history(renderer: Renderer, rounds: int) -> Iterator[Line]:
    """CPU time of a turn of the loop, its request written and not sent, at 64,000 tokens over that at 2,000."""
    values, low, high = [], 1e9, 1e9
    for _ in range(rounds):
        (_, short), (_, long) = _medians(_turns(renderer, 64_000), (2000, 64_000))
        values.append(long / short)
        low, high = min(low, short), min(high, long)
    details = {"2k ms": 1000 * low, "64k ms": 1000 * high}
    yield Line.of("history", "a turn at 64k / at 2k tokens, sending apart", values, 1.3, details=details)


# -- the samples of a run ---------------------------------------------------------------------------------------------


def samples(rounds: int, many: int = 100_000, few: int = 1000) -> Iterator[Line]:
    """CPU time of a sample in a run of 100,000 that are all kept, over that in a run of 1,000."""
    values, details = [], {}
    for _ in range(rounds):
        short = min(_sample_cpu(few) for _ in range(5))
        long = _sample_cpu(many)
        values.append(long / short)
        details = {"1k ms/sample": 1000 * short, "100k ms/sample": 1000 * long}
    yield Line.of("samples", "a sample of 100,000 / of 1,000", values, 1.2, details=details)


def _sample_cpu(count: int, n: int = 8, groups: int = 25) -> float:
    """Seconds for each of ``count`` samples, all of them alive: groups, rewards, filter, metrics, journal."""
    tokens = np.arange(200, dtype=np.int32)
    mask = tokens >= 100

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        assert prompts[0].index is not None
        return [
            Sample(
                prompt="Well?", response="Yes.", tokens=tokens.copy(), loss_mask=mask.copy(),
                rollout_log_probs=-mask.astype(np.float32), versions=[VersionSpan("1", 100, 200)],
                reward=float(prompts[0].index % 2), status=Status.COMPLETED,
            )
        ]  # fmt: skip

    async def run(journal: Path) -> float:
        config = RolloutConfig(
            batch_size=groups, n_samples_per_prompt=n, over_sampling_factor=1, generate_fn=generate,
            filter_fn=_keeps,  # async, so that no thread takes part
        )  # fmt: skip
        kept: list[Sample] = []
        with Journal(journal) as held:
            async with AsyncRolloutManager(config, DataBuffer(["Well?"]), rollout_log=RunJournal(held)) as manager:
                began = time.process_time()
                while len(kept) < count:
                    kept += await manager.generate_batch()
                return (time.process_time() - began) / len(kept)

    folder = Path(tempfile.mkdtemp(prefix="rollouts-bench-"))
    gc.collect()
    try:
        with calm_collector():
            return anyio.run(run, folder / "journal")
    finally:
        shutil.rmtree(folder)


async def _keeps(group: Sequence[Sample]) -> bool:
    return check_reward_nonzero_std(group)
