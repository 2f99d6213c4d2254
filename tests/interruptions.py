"""Replies that are interrupted at chosen tokens, on any server, and the count that shows repeated random numbers.

An interruption is exact without timing: a part is requested with a budget of as many tokens, and its end by length is
reported as an abort. The server cannot tell it from an abort after this token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import numpy as np

from rollouts.dtypes import Completion, SamplingParams, TokenColumn, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.engine.teacher import Teacher
from rollouts.inference.base import CompletionRequest, ServerInfo
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.renderer.tokenizer import Codec, load_tokenizer

PROMPT = packed_tokens(range(10, 40))


class Interrupted:
    """A policy whose replies are aborted after some numbers of tokens; afterwards they run to their end."""

    def __init__(self, inner: ServerPolicy, after: Sequence[int]) -> None:
        self.inner = inner
        self.left = list(after)
        """Numbers of tokens of the next parts."""
        self.minimum_delays_stops = inner.minimum_delays_stops

    async def complete(self, request: CompletionRequest) -> Completion:
        sampling = request.sampling
        count = self.left.pop(0) if self.left else sampling.max_new_tokens
        if count >= sampling.max_new_tokens:
            return await self.inner.complete(request)
        least = min(sampling.min_new_tokens, count)
        part = attrs.evolve(sampling, max_new_tokens=count, min_new_tokens=least)
        reply = await self.inner.complete(attrs.evolve(request, sampling=part))
        return attrs.evolve(reply, finish_reason="abort") if reply.finish_reason == "length" else reply

    async def interrupt(self) -> None:
        raise NotImplementedError

    async def describe(self) -> ServerInfo:
        return await self.inner.describe()

    async def aclose(self) -> None:
        return None


async def interrupted(
    policy: ServerPolicy, tokens: TokenColumn, sampling: SamplingParams, after: Sequence[int], **options: Any
) -> Completion:
    """One reply that is interrupted after each of these numbers of tokens, and resumed."""
    decode = options.pop("decode", None)
    return await ResumablePolicy(Interrupted(policy, after), decode=decode).complete(
        CompletionRequest(tokens, sampling, **options)
    )


async def deviation_of_repeats(
    policy: ServerPolicy, teacher: Teacher, replies: int, *, after: Sequence[int], at: int = 1, temperature: float = 2.0
) -> float:
    """How far the number of replies whose token ``at`` repeats the first one is from its expectation.

    Each reply has a seed and is interrupted ``after`` some tokens. The expectation is exact: the sum of the
    probabilities of these tokens under the policy, each given its own reply so far.

    Returns:
        The deviation in standard deviations of the count.
    """
    found: list[Completion] = []
    limiter = anyio.CapacityLimiter(32)

    async def reply(seed: int) -> None:
        sampling = SamplingParams(temperature=temperature, max_new_tokens=at + 1, seed=seed)
        async with limiter:
            found.append(await interrupted(policy, PROMPT, sampling, after, session=str(seed)))

    async with anyio.create_task_group() as tasks:
        for seed in range(replies):
            tasks.start_soon(reply, seed)
    chances, repeats = [], 0
    known: dict[bytes, float] = {}
    for one in found:
        if len(one.tokens) > at:  # else it ended before
            repeats += int(one.tokens[at] == one.tokens[0])
            ids = np.concatenate([PROMPT, one.tokens[:at], one.tokens[:1]])
            if ids.tobytes() not in known:
                known[ids.tobytes()] = math.exp(teacher.logprobs(ids, np.array([len(ids) - 1]), temperature)[0])
            chances.append(known[ids.tobytes()])
    return (repeats - sum(chances)) / math.sqrt(sum(chance * (1 - chance) for chance in chances))


async def check_stops_at_every_split(policy: ServerPolicy) -> None:
    """Compare replies that end at a stop string of several tokens with the same ones, interrupted at each token.

    The server has the demo model. One budget is longer than the reply, the other one ends with the stop string.
    """
    codec = Codec(load_tokenizer(DEMO_MODEL))
    ids = codec.encode("<|im_start|>user\nWhat is (52 + 19) * 7?<|im_end|>\n<|im_start|>assistant\n")
    for stop in ((', "multiply"',), (" is 36", "ply"), ("er is 3630. a", "nothing")):
        sampling = SamplingParams(temperature=0.0, max_new_tokens=24, stop=stop)
        whole = await policy.complete(CompletionRequest(ids, sampling))
        count = len(whole.tokens)
        assert whole.finish_reason == "stop"
        assert 4 < count < 20
        for budget in (24, count):
            bounded = attrs.evolve(sampling, max_new_tokens=budget)
            for after in (*([split] for split in range(1, count)), [1] * count):
                joined = await interrupted(policy, ids, bounded, after, decode=codec.decode)
                assert joined.tokens.tolist() == whole.tokens.tolist(), (stop, budget, after)
                assert np.abs(joined.logprobs - whole.logprobs).max() < 1e-4
                assert joined.finish_reason == "stop"
                assert {one.version for one in joined.versions} == {one.version for one in whole.versions}
