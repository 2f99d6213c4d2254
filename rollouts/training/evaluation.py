"""Evaluation of a policy: unbiased pass@k and mean reward with confidence intervals, and comparison of two runs.

Invariant: every rollout counts: no filter runs, and a rollout that failed for good did not pass. The uncertainty is in
the choice of tasks, so an interval comes from the variance between tasks; rollouts of one task are never treated as
independent.

This module does not know files or the display.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from rollouts.base.stable_repr import stable_key
from rollouts.base.storable import stable_json
from rollouts.dtypes import Message, Prompt, as_messages, chat_text
from rollouts.errors import ConfigError, DataExhausted
from rollouts.inference.priorities import behind_training
from rollouts.training.config import RolloutConfig
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.types import Group, Sample, rollout_keys

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
"""Number of standard deviations that contain 95 % of a normal distribution."""


@attrs.frozen
class Estimate:
    """A value between 0 and 1 with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@attrs.frozen
class TaskScore:
    """Results of the rollouts of one task."""

    key: str
    """Identifies prompt and label across runs; see :func:`task_key`."""
    text: str
    """The last message of the prompt."""
    rollouts: int
    passed: int
    failed: int
    """Rollouts that failed for good; they did not pass, and their reward is 0."""
    mean_reward: float


@attrs.frozen
class Comparison:
    """Run B against run A, on the tasks that both contain."""

    tasks: int
    better: int
    """Tasks with a higher pass rate in B."""
    worse: int
    difference: float
    """Mean over tasks of pass@k in B minus pass@k in A."""
    low: float
    high: float
    """95 % interval of the difference; paired by task, so the difficulty of tasks does not widen it."""


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` rollouts passes, if ``passed`` of ``rollouts`` passed.

    ``1 - C(n - c, k) / C(n, k)``, which is unbiased (Chen et al. 2021); ``1 - (1 - c/n) ** k`` is biased.

    Raises:
        ConfigError: fewer than ``k`` rollouts, or ``passed`` is not between 0 and ``rollouts``.
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
    """Mean over tasks with Wilson's interval; the number of trials is computed from the standard error between tasks.

    If all tasks have the same value, one trial a task is assumed, so that the interval is never empty.
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
    # Rounding puts the limit of a mean of 0 or 1 on the wrong side of it.
    low, high = min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))
    return Estimate(mean, low, high, len(values))


def task_key(prompt: object, label: object) -> str:
    """Identify a task across runs: 12 hex digits of a hash of its messages and its label."""
    messages = as_messages(prompt)  # type: ignore[arg-type]  # raises if it is not a prompt
    text = stable_key([[message.to_record() for message in messages], label])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def task_scores(samples: Iterable[Sample], *, threshold: float = 1.0) -> list[TaskScore]:
    """Compute scores by task, in order of first appearance; branches of a rollout count once, with their mean reward.

    Args:
        samples: finished rollouts, including failed ones.
        threshold: a rollout passes if its reward is at least this.
    """
    samples = list(samples)
    tasks: dict[str, dict[tuple[str, int], list[Sample]]] = {}
    for rollout, sample in zip(rollout_keys(samples), samples, strict=True):
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
    return chat_text(messages[-1].content) if messages else ""


def compare(before: Sequence[TaskScore], after: Sequence[TaskScore], k: int = 1) -> Comparison:
    """Compare two runs on their common tasks.

    Raises:
        ConfigError: they have no task in common, or fewer than ``k`` rollouts of one.
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
    first_index: int = 0,
    concurrency: int = 256,
    on_group: Callable[[Group], None] | None = None,
) -> list[Sample]:
    """Run ``rollouts`` rollouts of every task.

    Each rollout is a separate group, so that a failure does not affect other rollouts of the task.

    Args:
        config: provides ``generate_fn``, ``reward_fn`` and deadlines; its sizes and its filter are ignored.
        prompts: the tasks; duplicates add up.
        rollouts: number of rollouts of each task.
        done: number of existing rollouts by :func:`task_key`; they are not repeated.
        first_index: index of the first new rollout, above those of the existing ones: a seed is mixed with the index,
            and rollouts of one task with the same index are copies of each other.
        concurrency: rollouts in flight.
        on_group: called in a worker thread with every finished rollout, e.g. to write it to disk.

    Returns:
        The new rollouts, including failed ones, in the order of the tasks.

    Raises:
        ConfigError: prompts without a text and with other metadata have equal labels, so that they would be one task.
        GenerateFailure: too many consecutive rollouts failed.
    """
    wanted = [attrs.evolve(one, urgency=behind_training) for one in _wanted(prompts, rollouts, done or {})]
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
    buffer = DataBuffer(wanted, epochs=1)
    if first_index:
        buffer.load_state(attrs.evolve(buffer.save_state(), next_group_index=first_index))
    async with AsyncRolloutManager(config, buffer, on_group=collect) as manager:
        try:
            while True:
                await manager.generate_batch()
        except DataExhausted:  # groups that fill no batch were collected by on_group
            pass
    return [sample for number in sorted(groups) for sample in groups[number].samples]


def _wanted(prompts: Iterable[Prompt], rollouts: int, done: Mapping[str, int]) -> list[Prompt]:
    """The prompt of each rollout that is missing."""
    left = dict(done)
    wanted: list[Prompt] = []
    unseen: dict[str, bytes] = {}
    for number, prompt in enumerate(prompts):
        key = task_key(prompt.prompt, prompt.label)
        if not prompt.has_opening and unseen.setdefault(key, shown := stable_json(prompt.metadata)) != shown:
            expected = "another label for each task: these prompts have no text"
            raise ConfigError.of(f"prompts[{number}].label", prompt.label, expected)
        skipped = min(left.get(key, 0), rollouts)
        left[key] = left.get(key, 0) - skipped
        wanted += [prompt] * (rollouts - skipped)
    return wanted
