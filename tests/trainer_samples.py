"""Scored groups for the adapters of trainers: random tokens, several turns, forks, and rows that end in context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollouts.dtypes import Completion, FinishReason, Message, Prompt, StopReason, VersionSpan
from rollouts.training import Sample, trajectory_to_samples
from rollouts.training.comparisons import COMPARISON
from rollouts.trajectory import Trajectory, digest


def scored_groups(
    groups: int = 4,
    n: int = 4,
    *,
    forks: bool = False,
    version: str = "3",
    tails: bool = True,
    temperature: float = 1.0,
) -> list[Sample]:
    """Groups of ``n`` rollouts, each with one to three turns and a reward; with ``tails`` every third ends in context.

    The rollouts of a group have one opening. Rewards are exact in float32. Turns after the first have the next version,
    if it is a number.

    With ``forks`` every second rollout has a second branch: it shows the first reply of the first branch as context,
    after a rewritten opening.
    """
    samples = []
    for group in range(groups):
        for number in range(n):
            index = group * n + number
            prompt = Prompt(f"question {group}", label=str(group), group_index=group, index=index)
            rng = random.Random(index)
            opening = _ids(random.Random(f"opening of {group}"))
            branches = [_branch(rng, opening, 1 + index % 3, version, temperature, unanswered=tails and index % 3 == 2)]
            if forks and index % 2:
                branches[0].seal(StopReason.FORKED)
                shown = branches[0].tokens[-3:].tolist()
                branches.append(_branch(rng, [*_ids(rng), *shown], 1, version, temperature, unanswered=False))
            branches[-1].seal(StopReason.MAX_TOKENS if index % 3 == 2 else StopReason.TASK_COMPLETED)
            made = trajectory_to_samples(branches, prompt, lambda tokens: " ".join(map(str, tokens)))
            reward = rng.randrange(17) / 16
            for sample in made:
                sample.reward, sample.rollout_id = reward, index
            samples += made
    return samples


def two_seats() -> list[Sample]:
    """A group of three plays of a zero-sum game: each of its rollouts has a sample of either seat."""
    first, second = scored_groups(1, 6), scored_groups(2, 6)[6:]  # each seat has one opening
    rows = [(first, second)[number % 2][number] for number in range(6)]
    for number, sample in enumerate(rows):
        index, sample.seat = divmod(number, 2)[0], "player0" if number % 2 == 0 else "player1"
        sample.group_index = 0
        sample.index = sample.rollout_id = index
        sample.reward = (1.0, -1.0, 2.0)[index] * (1 if number % 2 == 0 else -1)
    return rows


def proposed(rollouts: int = 2) -> list[Sample]:
    """Rollouts of one group: in each a proposer, and three solvers that are compared with each other only."""
    rows = scored_groups(1, 4 * rollouts)
    for number, sample in enumerate(rows):
        rollout, role = divmod(number, 4)
        sample.index = sample.rollout_id = rollout
        sample.seat, sample.conversation = ("solver", role - 1) if role else ("proposer", 0)
        sample.reward = float(role == 1) + rollout
        if role:
            sample.metadata[COMPARISON] = "episode"
    return rows


def _branch(
    rng: random.Random, opening: Sequence[int], turns: int, version: str, temperature: float, *, unanswered: bool
) -> Trajectory:
    trajectory = Trajectory()
    for turn in range(turns):
        context = _ids(rng) if turn else opening
        trajectory.add_context(np.array(context, np.int32), [Message("tool" if turn else "user", f"text {turn}")])
        name = str(int(version) + min(turn, 1)) if version.isdecimal() else version
        reply = completion(trajectory, _ids(rng), rng, name)
        trajectory.add_reply(reply, Message("assistant", "reply"), temperature=temperature)
        trajectory.add_rewards([turn / 4])
    if unanswered:
        trajectory.add_context(np.array(_ids(rng), np.int32), [Message("tool", "not answered")])
    return trajectory


def completion(
    trajectory: Trajectory, ids: list[int], rng: random.Random, version: str, reason: FinishReason = "stop"
) -> Completion:
    """A completion of the trajectory so far."""
    return Completion(
        tokens=ids,
        logprobs=[-rng.expovariate(1) for _ in ids],
        finish_reason=reason,
        versions=[VersionSpan(version, 0, len(ids))],
        prompt_tokens=len(trajectory),
        prompt_digest=digest(trajectory.tokens),
        request_id=f"{rng.getrandbits(64):016x}",
    )


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(1, 1000) for _ in range(rng.randint(3, 9))]


def columns(sample: Sample) -> tuple[list[int], list[bool], list[float]]:
    """Tokens, mask and logprobs of the row, without what no reply answered: what a trainer must get."""
    stop = len(sample) - int(sample.mask_column[::-1].argmax())
    logprobs: Any = sample.logprob_column
    return sample.token_column[:stop].tolist(), sample.mask_column[:stop].tolist(), logprobs[:stop].tolist()


def tiny_model() -> Any:
    """A bigram model over the ids of :func:`scored_groups`, for one step of a trainer's loss."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 1000))


def token_logprobs(model: Any, tokens: Any) -> Any:
    """The logprob of each id of ``[B, T]`` after the one before it, ``[B, T]``; 0 for the first."""
    import torch

    logits = model(tokens[:, :-1]).log_softmax(-1)
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))
