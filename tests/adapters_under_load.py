"""Rollouts of several turns that play while adapters are updated, and the judge of their tokens."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np

from rollouts.concurrency.deadlines import pauses
from rollouts.dtypes import Completion, Endpoint, SamplingParams
from rollouts.engine.teacher import Teacher
from rollouts.inference.base import CompletionRequest
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.weights import update_weights

PROMPT = np.array([(17 * number) % 500 for number in range(60)], np.int32)
PROMPTS = tuple(PROMPT[: 30 + number] for number in range(8))
NEWS = tuple(np.array([7, number], np.int32) for number in range(8))


def rollout_of(policy: ServerPolicy) -> ResumablePolicy:
    """The policy of one rollout, as an episode gets it."""
    return ResumablePolicy(policy.of_rollout(), decode=str, backoff_seconds=0.01)


def worst(prompt: Any, completion: Completion, judges: Mapping[str, Teacher], temperature: float = 1.0) -> float:
    """The largest difference of a logprob to the forward pass of the adapter that its token names."""
    return max((abs(one.found - one.exact) for one in judged(prompt, completion, judges, temperature)), default=0.0)


@attrs.frozen
class Judged:
    """One sampled token: its logprob in the reply, and that of the judge."""

    found: float
    exact: float
    after_switch: bool
    """Whether the reply began with another adapter."""

    def __str__(self) -> str:
        where = "after a switch" if self.after_switch else "of the first adapter"
        return f"{abs(self.found - self.exact):.1e} at logprob {self.exact:.1f}, {where}"


def judged(
    prompt: Any, completion: Completion, judges: Mapping[str, Teacher], temperature: float = 1.0
) -> list[Judged]:
    """Each token of a reply with the forward pass of the adapter that it names."""
    tokens = np.concatenate([prompt, completion.tokens])
    rows = []
    for span in completion.versions:
        positions = np.arange(len(prompt) + span.start, len(prompt) + span.stop)
        exact = judges[span.version].logprobs(tokens, positions, temperature)
        pairs = zip(completion.logprobs[span.start : span.stop].tolist(), exact.tolist(), strict=True)
        rows += [Judged(found, right, span.start > 0) for found, right in pairs]
    return rows


@attrs.define
class Load:
    """Eight rollouts at a time, of three turns each; an error of one raises."""

    policy: ServerPolicy
    prompts: Sequence[Any] = PROMPTS
    news: Sequence[Any] = NEWS
    """The ids after each turn of a rollout."""
    replies: list[tuple[Any, Completion]] = attrs.field(factory=list)
    """Each reply and its prompt."""
    paused: list[Any] = attrs.field(factory=list)
    """The pauses that were seen."""
    over: bool = False

    @property
    def versions(self) -> set[str]:
        return {span.version for _, reply in self.replies for span in reply.versions}

    @property
    def tokens(self) -> int:
        return sum(len(reply.tokens) for _, reply in self.replies)

    async def play(self, number: int) -> None:
        began = 0
        while not self.over:
            rollout, tokens, began = rollout_of(self.policy), self.prompts[number], began + 1
            for turn in range(3):
                sampling = SamplingParams(max_new_tokens=40, seed=1000 * number + 10 * began + turn)
                session = f"{number}-{began}"
                reply = await rollout.complete(CompletionRequest(tokens, sampling, session=session))
                self.replies.append((tokens, reply))
                tokens = np.concatenate([tokens, reply.tokens, self.news[number]]).astype(np.int32)

    async def play_over_updates(
        self, endpoint: Endpoint, adapters: Sequence[Path], folder: Path, while_running: Any, updates: int = 6
    ) -> None:
        """Play while each adapter in turn is loaded as the next version, after replies of the one before it."""
        family = endpoint.lora
        await update_weights(endpoint, lora=adapters[0], name=f"{family}-v0")
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(self.play, number)
            for number in range(1, updates + 1):
                while f"{family}-v{number - 1}" not in self.versions:
                    self.paused += pauses()
                    await anyio.sleep(0.01)
                version = folder / f"{family}-v{number}"
                shutil.copytree(adapters[number % len(adapters)], version)
                await update_weights(endpoint, lora=version, name=version.name, while_running=while_running)
            while f"{family}-v{updates}" not in self.versions:  # noqa: ASYNC110 - a reply comes some time
                await anyio.sleep(0.01)
            self.over = True

    def worst(self, judges: Mapping[str, Teacher]) -> float:
        return max(worst(tokens, reply, judges) for tokens, reply in self.replies)

    def judged(self, judges: Mapping[str, Teacher]) -> list[Judged]:
        """Every sampled token with its judge, the largest difference first."""
        rows = [row for tokens, reply in self.replies for row in judged(tokens, reply, judges)]
        return sorted(rows, key=lambda row: -abs(row.found - row.exact))

    def rounding(self, judges: Mapping[str, Teacher], others: Mapping[str, Teacher]) -> float:
        """The largest difference between two judges of the same tokens."""
        return max(
            abs(one.exact - other.exact)
            for tokens, reply in self.replies
            for one, other in zip(judged(tokens, reply, judges), judged(tokens, reply, others), strict=True)
        )
