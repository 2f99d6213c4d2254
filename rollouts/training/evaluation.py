"""How good a policy is: pass@k without bias, with intervals, task by task, and two runs beside each other.

Invariant: every rollout of an evaluation counts, and none is chosen: no filter runs, and one that failed for good is a
rollout that did not pass. What is uncertain is the choice of tasks, so an interval comes from the spread between tasks,
never from treating rollouts of one task as independent.

This module knows no file and no display.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from rollouts.dtypes import Message, Prompt, as_messages
from rollouts.errors import ConfigError, DataExhausted
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.types import Group, Sample

__all__ = [
    "Comparison",
    "Estimate",
    "TaskScore",
    "compare",
    "estimate_mean",
    "estimate_pass_at_k",
    "pass_at_k",
    "run_evaluation",
    "task_key",
    "task_scores",
]

_Z95 = 1.959963984540054
"""Standard deviations of a normal distribution that 95 % lie within."""


@attrs.frozen
class Estimate:
    """A number between 0 and 1 with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@attrs.frozen
class TaskScore:
    """What came of the rollouts of one task."""

    key: str
    """The same for the same prompt and label, in every run; see :func:`task_key`."""
    text: str
    """The last message of the prompt."""
    rollouts: int
    passed: int
    failed: int
    """Rollouts that failed for good; they did not pass, and their reward is 0."""
    mean_reward: float


@attrs.frozen
class Comparison:
    """Run B against run A, on the tasks that both have."""

    tasks: int
    better: int
    """Tasks with a higher share of passes in B."""
    worse: int
    difference: float
    """Mean over tasks of pass@k in B minus that in A."""
    low: float
    high: float
    """95 % interval of the difference; paired, so what makes a task hard for both does not widen it."""


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """The chance that at least one of ``k`` rollouts passes, from ``rollouts`` of which ``passed`` did.

    ``1 - C(n - c, k) / C(n, k)``, which is unbiased (Chen et al. 2021); ``1 - (1 - c/n) ** k`` is not.

    Raises:
        ConfigError: fewer than ``k`` rollouts.
    """
    if not 1 <= k <= rollouts:
        raise ConfigError.of("k", k, f"1 to {rollouts}, the rollouts of a task")
    if not 0 <= passed <= rollouts:
        raise ConfigError.of("passed", passed, f"0 to {rollouts}")
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)


def estimate_pass_at_k(scores: Sequence[TaskScore], k: int) -> Estimate:
    """Mean pass@k over tasks."""
    return _estimate([pass_at_k(score.rollouts, score.passed, k) for score in scores])


def estimate_mean(scores: Sequence[TaskScore]) -> Estimate:
    """Mean reward over tasks, for rewards between 0 and 1."""
    return _estimate([score.mean_reward for score in scores])


def _estimate(values: Sequence[float]) -> Estimate:
    """A mean over tasks with Wilson's interval, for as many trials as would have the standard error that tasks show.

    With tasks that all agree it is that of one trial a task: certainty is never claimed from a small sample.
    """
    if not values:
        raise ConfigError.of("scores", [], "at least one task")
    mean = statistics.fmean(values)
    trials = float(len(values))
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    if error and 0 < mean < 1:
        trials = mean * (1 - mean) / error**2
    spread = _Z95**2 / trials
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(max(mean * (1 - mean), 0.0) / trials + spread / (4 * trials))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), len(values))


def task_key(prompt: object, label: object) -> str:
    """What names a task across runs: a digest of its messages and its label."""
    messages = as_messages(prompt)  # type: ignore[arg-type]  # refuses what is no prompt
    text = json.dumps([[message.to_chat() for message in messages], label], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def task_scores(samples: Iterable[Sample], *, threshold: float = 1.0) -> list[TaskScore]:
    """Scores by task, in the order in which tasks first come; branches of one rollout are one, with their mean reward.

    Args:
        samples: finished rollouts, failed ones among them.
        threshold: a rollout passes if its reward reaches it.
    """
    tasks: dict[str, dict[object, list[Sample]]] = {}
    for number, sample in enumerate(samples):
        rollout = ("place", number) if sample.rollout_id is None else sample.rollout_id
        tasks.setdefault(task_key(sample.prompt, sample.label), {}).setdefault(rollout, []).append(sample)
    scores = []
    for key, rollouts in tasks.items():
        first = next(iter(rollouts.values()))[0]
        failed = [any(branch.failure is not None for branch in branches) for branches in rollouts.values()]
        rewards = [
            0.0 if lost else statistics.fmean(branch.reward or 0.0 for branch in branches)
            for branches, lost in zip(rollouts.values(), failed, strict=True)
        ]
        passed = sum(reward >= threshold and not lost for reward, lost in zip(rewards, failed, strict=True))
        mean = statistics.fmean(rewards)
        scores.append(TaskScore(key, _last_text(first.prompt), len(rewards), passed, sum(failed), mean))
    return scores


def _last_text(prompt: object) -> str:
    messages: tuple[Message, ...] = as_messages(prompt)  # type: ignore[arg-type]
    return messages[-1].content if messages else ""


def compare(before: Sequence[TaskScore], after: Sequence[TaskScore], k: int = 1) -> Comparison:
    """Hold two runs against each other.

    Raises:
        ConfigError: they have no task in common.
    """
    ours = {score.key: score for score in before}
    pairs = [(ours[score.key], score) for score in after if score.key in ours]
    if not pairs:
        raise ConfigError.of("compare", f"{len(before)} and {len(after)} tasks", "runs that have tasks in common")
    differences = [pass_at_k(b.rollouts, b.passed, k) - pass_at_k(a.rollouts, a.passed, k) for a, b in pairs]
    shares = [b.passed / b.rollouts - a.passed / a.rollouts for a, b in pairs]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    return Comparison(
        tasks=len(pairs),
        better=sum(share > 0 for share in shares),
        worse=sum(share < 0 for share in shares),
        difference=mean,
        low=max(-1.0, mean - _Z95 * error),
        high=min(1.0, mean + _Z95 * error),
    )


async def run_evaluation(
    config: RolloutConfig,
    prompts: Iterable[Prompt],
    rollouts: int,
    *,
    done: Mapping[str, int] | None = None,
    concurrency: int = 256,
    on_group: Callable[[Group], None] | None = None,
) -> list[Sample]:
    """Play every task ``rollouts`` times.

    Each rollout is a group of its own, so that one that fails costs no sibling.

    Args:
        config: whose ``generate_fn``, ``reward_fn`` and deadlines to use; its sizes and its filter are not.
        prompts: the tasks; what is given twice is played twice as often.
        rollouts: of each task.
        done: rollouts that exist already, by :func:`task_key`; so many fewer are played.
        concurrency: rollouts in flight.
        on_group: called in a worker thread with every rollout that ends, e.g. to write it to disk.

    Returns:
        The rollouts played now, failed ones among them, in the order of the tasks.

    Raises:
        GenerateFailure: rollouts fail one after the other, so there is nothing to measure.
    """
    left = dict(done or {})
    wanted: list[Prompt] = []
    for prompt in prompts:
        key = task_key(prompt.prompt, prompt.label)
        skipped = min(left.get(key, 0), rollouts)
        left[key] = left.get(key, 0) - skipped
        wanted += [prompt] * (rollouts - skipped)
    if not wanted:
        return []
    groups: dict[int, Group] = {}

    def collect(group: Group) -> None:
        if on_group is not None:
            on_group(group)
        groups[group.group_index] = group

    config = attrs.evolve(
        config,
        batch_size=min(concurrency, len(wanted)),
        n_samples_per_prompt=1,
        over_sampling_factor=1.0,
        filter_fn=None,
        patience=max(64, min(concurrency, len(wanted))),
    )
    async with AsyncRolloutManager(config, DataBuffer(wanted, epochs=1), on_group=collect) as manager:
        try:
            while True:
                await manager.generate_batch()
        except DataExhausted:  # what is left of the last batch was collected as it settled
            pass
    return [sample for number in sorted(groups) for sample in groups[number].samples]
