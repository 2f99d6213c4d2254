"""Replies that are sampled without end while something happens to a server, and the check of each of their tokens.

``FaultyProxy`` stands between a client and a server, and breaks connections at random bytes.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import attrs
import numpy as np

from rollouts.dtypes import Completion, SamplingParams, TokenColumn, packed_tokens
from rollouts.engine.teacher import Teacher
from rollouts.inference.base import CompletionRequest, Policy

TEMPERATURE = 1.3


@attrs.define
class SamplingLoad:
    """Callers that sample reply after reply, and what they were answered."""

    policy: Policy
    seed: int = 0
    max_new_tokens: int = 80
    cancels: float = 0.0
    """Share of the calls that their caller cancels after a random time."""
    replies: list[tuple[TokenColumn, Completion]] = attrs.field(factory=list)
    cancelled: int = 0

    @asynccontextmanager
    async def running(self, callers: int = 16) -> AsyncIterator[None]:
        """Sample while inside; then wait for the last replies."""
        ended = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for number in range(callers):
                tasks.start_soon(self._call, random.Random(f"{self.seed} {number}"), ended)
            try:
                yield
            finally:
                ended.set()

    async def _call(self, rng: random.Random, ended: anyio.Event) -> None:
        while not ended.is_set():
            prompt = packed_tokens([*range(10, 40), *(rng.randrange(10, 400) for _ in range(rng.randrange(1, 40)))])
            sampling = SamplingParams(
                temperature=TEMPERATURE, max_new_tokens=self.max_new_tokens, seed=rng.randrange(1 << 30)
            )
            seconds = rng.uniform(0.0, 0.6) if rng.random() < self.cancels else float("inf")
            with anyio.move_on_after(seconds) as scope:
                self.replies.append((prompt, await self.policy.complete(CompletionRequest(prompt, sampling))))
            self.cancelled += scope.cancelled_caught

    @property
    def tokens(self) -> int:
        return sum(len(reply.tokens) for _, reply in self.replies)

    def differences(self, models: Mapping[str, Path]) -> np.ndarray:
        """The distance of each logprob from that of the weights that its token names."""
        found: list[np.ndarray] = []
        for folder in dict.fromkeys(models.values()):
            teacher = Teacher(folder, "float32")
            for prompt, reply in self.replies:
                for span in reply.versions:
                    if models[span.version] == folder:
                        positions = len(prompt) + np.arange(span.start, span.stop)
                        exact = teacher.logprobs(np.concatenate([prompt, reply.tokens]), positions, TEMPERATURE)
                        found.append(np.abs(exact - reply.logprobs[span.start : span.stop]))
        return np.concatenate(found)


@attrs.define
class FaultyProxy:
    """Passes bytes on; a share of the connections breaks after a random number of answered bytes."""

    port: int
    faults: float
    """Share of the connections that break."""
    url: str = ""
    broken: int = 0
    _rng: random.Random = attrs.field(factory=lambda: random.Random(0))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._pass_on)
            yield
            tasks.cancel_scope.cancel()
        await listener.aclose()

    async def _pass_on(self, client: anyio.abc.SocketStream) -> None:
        least = self._rng.randrange(1, 6000) if self._rng.random() < self.faults else -1
        try:
            async with client, await anyio.connect_tcp("127.0.0.1", self.port) as server:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._copy, client, server, -1, tasks.cancel_scope)
                    tasks.start_soon(self._copy, server, client, least, tasks.cancel_scope)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass

    async def _copy(
        self, source: anyio.abc.ByteStream, target: anyio.abc.ByteStream, most: int, scope: anyio.CancelScope
    ) -> None:
        """Copy until an end; with ``most``, until so many bytes have passed."""
        passed = 0
        try:
            async for data in source:
                passed += len(data)
                if 0 <= most < passed:
                    self.broken += 1
                    await target.send(data[: len(data) // 2])
                    break
                await target.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()
