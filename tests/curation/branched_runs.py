"""Random stored runs with branches, failures, missing rewards, equal rollouts, and rollouts of an earlier run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollouts.dtypes import Completion, Message, Prompt, StopReason, VersionSpan
from rollouts.dtypes.tools import tools_json
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import Failure, GenerateFailure
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.status import Status
from rollouts.training.types import Group
from rollouts.trajectory import Trajectory, digest

TOOLS = tools_json(CalculatorEnvironment().tools)
SYSTEM = "Answer the question of the user as well as you can with the tools that you have been given."


def random_run(path: Path, seed: int, *, groups: int = 12, size: int = 4, words: int = 6) -> list[Sample]:
    """Write a run of random groups; returns its samples in the order of its files."""
    rng = random.Random(seed)
    writer = RunWriter(path, {"endpoint": {"model": f"model-{seed}"}}, format="jsonl")
    batches: list[list[Sample]] = [[]]
    for number in range(groups):
        task = rng.randrange(groups // 2)  # several groups of one task
        samples: list[Sample] = []
        for place in range(size):
            samples += rollout(rng, task, number, size * number + place, words=words)
        outcome = "failed" if any(sample.failure for sample in samples) else rng.choice(["kept", "kept", "dropped"])
        if outcome == "kept":
            batches[-1] += samples
            if rng.random() < 0.3:
                batches.append([])
        else:
            prompt = Prompt("?", group_index=number)
            writer.on_group(Group(prompt, samples, outcome, "of the test"))  # type: ignore[arg-type]
    for batch in filter(None, batches):
        writer.write_batch(batch, {})
    writer.finish("finished")
    return [sample for batch in batches for sample in batch]


def copied_run(path: Path, samples: Sequence[Sample], seed: int) -> None:
    """Write a run that has rollouts of another one, some with other rewards, as ``rescore`` does."""
    rng = random.Random(seed)
    copies = [Sample.from_dict(sample.to_dict()) for sample in samples]
    rewards: dict[str | None, float] = {}
    for sample in copies:
        if sample.reward is not None and sample.failure is None:
            sample.reward = rewards.setdefault(sample.rollout_id, float(rng.random() < 0.8))
    write_run(path, copies)


def write_run(path: Path, samples: Sequence[Sample]) -> None:
    """Write a run of one batch."""
    writer = RunWriter(path, {"endpoint": {"model": "copied"}}, format="jsonl")
    writer.write_batch(samples, {})
    writer.finish("finished")


def rollout(rng: random.Random, task: int, group: int, index: int, *, words: int = 6) -> list[Sample]:
    """The samples of one random rollout: 1 to 3 branches, each with the replies before it as context."""
    prompt = Prompt(
        [Message("system", SYSTEM), Message("user", f"question {task} " + "and more " * (words - 4))],
        label=task,
        metadata={"task": task, "level": {"name": f"l{task % 3}"}},
        group_index=group,
        index=index,
    )
    branches = [Trajectory("fork")]
    branches[0].add_context(np.array([1, 2, task + 3], np.int32), prompt.messages)
    for turn in range(rng.randint(1, 3)):
        if turn and rng.random() < 0.4:
            before, fork = branches[-1], Trajectory("fork")
            fork.add_context(before.tokens, before.messages)
            branches.append(fork)
        if turn:
            branches[-1].add_context(np.array([7, rng.randint(1, 2)], np.int32), [Message("tool", f"result {turn}")])
        reply(rng, branches[-1])
    for branch in branches:
        branch.tools = TOOLS
    failed = rng.random() < 0.15
    for branch in branches[:-1]:
        branch.seal(StopReason.FORKED)
    reason = StopReason.FAILED if failed else rng.choice([StopReason.TASK_COMPLETED, StopReason.MAX_TURNS])
    branches[-1].seal(reason, Failure.of(GenerateFailure("of the test")) if failed else None)
    samples = trajectory_to_samples(branches, prompt, lambda ids: " ".join(map(str, ids)))
    reward = rng.choice([0.0, 0.25, 1.0, 1.0, None])
    for sample in samples:
        sample.reward = rng.choice([reward, 0.0]) if failed else reward  # a failure may have a stale reward
        if reward is None and not failed and rng.random() < 0.3:
            sample.status = Status.ABORTED
    return samples


def reply(
    rng: random.Random,
    branch: Trajectory,
    *,
    ids: Sequence[int] | None = None,
    text: str | None = None,
    message: Message | None = None,
) -> None:
    """Append a reply, by default of 2 to 3 ids from a small set, so that rollouts are equal now and then."""
    if ids is None:
        ids = [rng.randint(10, 12) for _ in range(rng.randint(2, 3))]
    completion = Completion(
        tokens=np.array(ids, np.int32),
        logprobs=[-0.5] * len(ids),
        finish_reason="stop",
        versions=[VersionSpan(str(rng.randint(0, 2)), 0, len(ids))],
        prompt_tokens=len(branch),
        prompt_digest=digest(branch.tokens),
        request_id=f"{rng.getrandbits(64):016x}",
    )
    branch.add_reply(completion, message or Message("assistant", text or "reply " + " ".join(map(str, ids))))
