"""Bytes of a token, as ``tracemalloc`` counts them: of samples that are finished, and of rollouts in flight.

A rollout in flight is counted with and without the texts of its messages, whose length depends on the environment and
the model. Both numbers include ids, masks, logprobs, the request that is being sent, the tasks and the connections.
"""

from __future__ import annotations

import functools
import gc
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import anyio
import attrs

from rollouts.dtypes import Endpoint, Limits, Message, SamplingParams
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import Renderer
from rollouts.testing.canned import Canned, canned_server
from rollouts.training import generate_rollout_batch
from scripts.benches.lines import Line
from scripts.benches.workloads import WORKLOADS, Play, Workload

__all__ = ["memory"]


def memory(renderer: Renderer) -> Iterator[Line]:
    """Finished samples of each workload, and rollouts whose last request is being sent."""
    for name in ("S", "A", "H"):
        sealed, live, texts = _measured(renderer, name)
        yield Line.of(f"sealed {name}", "bytes a token of a finished sample, with its texts", [sealed], 12.0)
        what = "bytes a token of a rollout in flight, the texts of its messages apart"
        yield Line.of(f"live {name}", what, [live - texts], 20.0, details={"with them": live})


def _measured(renderer: Renderer, name: str) -> tuple[float, float, float]:
    """Bytes a token: of finished samples; in flight; and the share of the message texts of the latter."""
    rollouts = WORKLOADS[name].in_flight
    play = Play.of(attrs.evolve(WORKLOADS[name], samples=rollouts), renderer)
    with canned_server(Canned([play.reply])) as url:
        anyio.run(_play, play, url, None)  # so that one-time allocations exist
        held: dict[str, int] = {}
        tracemalloc.start()
        try:
            before = _traced()
            samples = anyio.run(_play, play, url, held)
            sealed = _traced() - before
        finally:
            tracemalloc.stop()
    tokens = sum(len(sample) for sample in samples)
    last = tokens - rollouts * len(play.reply)
    return sealed / tokens, (held["bytes"] - before) / last, held["texts"] / last


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _texts() -> int:
    """Bytes of message texts created while memory is traced."""
    messages = [one for one in gc.get_objects() if type(one) is Message]
    texts = {id(text): text for one in messages for text in (one.content, one.reasoning) if text}
    return sum(sys.getsizeof(text) for text in texts.values() if tracemalloc.get_object_traceback(text))


async def _play(play: Play, url: str, held: dict[str, int] | None) -> list[Any]:
    workload = play.workload
    async with SGLangPolicy(Endpoint(base_url=url), vocab_size=play.renderer.vocab_size) as policy:
        if held is not None:
            _count_at_the_last_request(policy, workload, held)
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


def _count_at_the_last_request(policy: SGLangPolicy, workload: Workload, held: dict[str, int]) -> None:
    """Delay every last request until all have arrived, then count."""
    transport: Any = policy.servers.transport
    post, requests, posted = transport.post, workload.samples * workload.turns, 0
    all_there = anyio.Event()
    by_session: dict[str, int] = {}

    async def counted(url: str, body: Any, headers: Any, **options: Any) -> Any:
        nonlocal posted
        posted += 1
        session = headers["X-SMG-Routing-Key"]
        by_session[session] = by_session.get(session, 0) + 1
        if by_session[session] == workload.turns:
            if posted == requests:
                held.update(bytes=_traced(), texts=_texts())
                all_there.set()
            await all_there.wait()
        return await post(url, body, headers, **options)

    transport.post = counted
