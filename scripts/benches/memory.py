"""Bytes of a token, as ``tracemalloc`` counts them: of samples that are finished, and of rollouts in flight."""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import anyio
import attrs

from rollouts.dtypes import Endpoint, Limits, SamplingParams
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import Renderer
from rollouts.testing.canned import Canned, canned_server
from rollouts.training import generate_rollout_batch
from scripts.benches.lines import Line
from scripts.benches.workloads import WORKLOADS, Play

__all__ = ["memory"]

ROLLOUTS = 32


def memory(renderer: Renderer) -> Iterator[Line]:
    """Finished samples of each workload, and rollouts whose last request is being sent."""
    for name in ("S", "A", "H"):
        sealed, live = _measured(renderer, name)
        yield Line.of(f"sealed {name}", "bytes a token of a finished sample, with its texts", [sealed], 12.0)
        yield Line.of(f"live {name}", "bytes a token of a rollout in flight", [live], 20.0)


def _measured(renderer: Renderer, name: str) -> tuple[float, float]:
    """Bytes a token, finished and in flight."""
    play = Play.of(attrs.evolve(WORKLOADS[name], samples=ROLLOUTS, in_flight=ROLLOUTS), renderer)
    with canned_server(Canned([play.reply])) as url:
        anyio.run(_play, play, url, None)  # what is made once is there
        held: dict[str, int] = {}
        tracemalloc.start()
        try:
            before = _traced()
            samples = anyio.run(_play, play, url, held)
            sealed = _traced() - before
        finally:
            tracemalloc.stop()
    tokens = sum(len(sample) for sample in samples)
    last = tokens - ROLLOUTS * len(play.reply)
    return sealed / tokens, (held["bytes"] - before) / last


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _play(play: Play, url: str, held: dict[str, int] | None) -> list[Any]:
    workload = play.workload
    async with SGLangPolicy(Endpoint(base_url=url), vocab_size=play.renderer.vocab_size) as policy:
        if held is not None:
            _count_at_the_last_request(policy, ROLLOUTS * workload.turns, held)
        run = functools.partial(
            generate_rollout_batch,
            environment_cls=play.environment_cls,
            endpoint=Endpoint(base_url=url),
            tokenizer=play.renderer,
            limits=Limits(max_turns=workload.turns + 1),
            sampling=SamplingParams(max_new_tokens=workload.reply),
            policy=policy,
        )
        return [sample.pack() for sample in await run(play.prompts)]


def _count_at_the_last_request(policy: SGLangPolicy, requests: int, held: dict[str, int]) -> None:
    """Hold every last request back until all are there, and count then."""
    transport: Any = policy._transport
    post, turns, posted = transport.post, requests // ROLLOUTS, 0
    all_there = anyio.Event()
    by_session: dict[str, int] = {}

    async def counted(url: str, body: Any, headers: Any, **options: Any) -> Any:
        nonlocal posted
        posted += 1
        session = headers["X-SMG-Routing-Key"]
        by_session[session] = by_session.get(session, 0) + 1
        if by_session[session] == turns:
            if posted == requests:
                held["bytes"] = _traced()
                all_there.set()
            await all_there.wait()
        return await post(url, body, headers, **options)

    transport.post = counted
