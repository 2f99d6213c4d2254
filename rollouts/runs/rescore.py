"""Rescoring of a stored run with other rewards and another filter, into a new run; nothing is generated.

Invariant: the new run contains each stored group once, whole, with its index and its tokens: in a batch, dropped,
failed, or accepted without a batch. Batches contain groups in order. The new run has no journal, so it cannot be
resumed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import attrs

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Prompt, StopReason, as_messages
from rollouts.errors import ConfigError, FilterFailure, GenerateFailure, RewardFailure
from rollouts.recipe import Recipe
from rollouts.runs.reader import StoredSamples, load_run
from rollouts.runs.run import abandon
from rollouts.runs.writer import Format, RunWriter
from rollouts.training.failures import FailureStats
from rollouts.training.group_runner import GroupRunner
from rollouts.training.metrics import Accounting, BatchMetrics
from rollouts.training.rollout_attempt import is_lost
from rollouts.training.samples import status_of
from rollouts.training.types import Group, Sample, Status

__all__ = ["rescore"]


async def rescore(
    run: Path, recipe: Recipe, out: Path, *, format: Format = "auto", overwrite: bool = False
) -> Accounting:
    """Score and filter every group of a stored run again.

    Args:
        run: the run's folder; the run may be active, killed, or finished.
        recipe: supplies rewards, filter, failure policy and batch size; its generate function is not called.
        out: the folder of the new run.
        format: of the new run's batches.
        overwrite: replace an existing run in ``out``.

    Returns:
        The accounting of the new run; ``returned`` counts accepted groups that fill no batch.

    Raises:
        ConfigError: ``run`` is not a run, its groups have another size, or ``out`` contains a run.
    """
    opening = functools.partial(_opened, run, recipe, out, format, overwrite)
    stored, writer = await anyio.to_thread.run_sync(opening)
    accounting = Accounting()
    try:
        await _score_all(stored, recipe, writer, accounting)
    except BaseException as error:
        abandon(recipe, writer, accounting, error)
        raise
    accounting.returned, accounting.ready = accounting.ready, 0
    accounting.check()
    await anyio.to_thread.run_sync(functools.partial(writer.finish, "finished", accounting))
    return accounting


async def _score_all(stored: StoredSamples, recipe: Recipe, writer: RunWriter, accounting: Accounting) -> None:
    """Score and write all groups and batches, and count them."""
    indices = sorted(stored.group_indices)
    scoring = _Scoring(stored, recipe)
    ready: list[Group] = []
    width = recipe.config.max_inflight_groups
    for start in range(0, len(indices), width):
        for group in await scoring.score(indices[start : start + width]):
            await anyio.to_thread.run_sync(writer.on_group, group)
            accounting.taken += 1
            if group.outcome == "kept":
                ready.append(group)
                accounting.ready += 1
            elif group.outcome == "dropped":
                accounting.dropped += 1
            else:
                accounting.failed += 1
        while len(ready) >= recipe.config.batch_size:
            batch, ready = ready[: recipe.config.batch_size], ready[recipe.config.batch_size :]
            accounting.ready -= len(batch)
            accounting.in_batch += len(batch)
            samples = [sample for group in batch for sample in group.samples]
            totals = BatchMetrics()
            totals.add(samples)
            numbers = {"batch": writer.batches, **totals.numbers()}
            await anyio.to_thread.run_sync(writer.write_batch, samples, numbers, attrs.evolve(accounting))


def _opened(run: Path, recipe: Recipe, out: Path, format: Format, overwrite: bool) -> tuple[StoredSamples, RunWriter]:
    stored = load_run(run, "all")
    size = (stored.info.get("config") or {}).get("n_samples_per_prompt")
    if recipe.config.n_samples_per_prompt != size:
        got = recipe.config.n_samples_per_prompt
        raise ConfigError.of("recipe, n_samples_per_prompt", got, f"{size}, as in the run")
    if out.resolve() == run.resolve():
        raise ConfigError.of("--out", str(out), "another folder than the run's")
    copied = {name: stored.info.get(name) for name in ("endpoint", "server", "tokenizer")}
    source = {"run": str(run.resolve()), "recipe": stored.info.get("recipe")}
    description = {**recipe.describe(), **copied, "rescored": source}
    return stored, RunWriter(out, description, format=format, overwrite=overwrite)


class _Scoring:
    """Runs stored groups through the group runner; its generate function returns the stored samples."""

    def __init__(self, stored: StoredSamples, recipe: Recipe) -> None:
        self._stored = stored
        self._keeps_rewards = (stored.info.get("config") or {}).get("reward_fn") is None
        self._rollouts: dict[int | None, list[Sample]] = {}
        config = attrs.evolve(recipe.config, generate_fn=self._generate, failure_budget=None)
        self._runner = GroupRunner(config, FailureStats(None, 1), None, {}, lambda: False)

    async def score(self, indices: Sequence[int]) -> list[Group]:
        """Score and filter these groups; returns them in order."""
        groups: dict[int, Group] = {}

        async def one(group_index: int, head: Sample) -> None:
            prompt = Prompt(
                head.prompt if isinstance(head.prompt, str) else as_messages(head.prompt),
                label=head.label,
                metadata=head.metadata,
                group_index=group_index,
            )
            groups[group_index] = await self._runner.run(prompt, {})

        async with first_error() as tasks:
            for group_index in indices:
                members = self._stored.group(group_index)
                for index, samples in itertools.groupby(members, lambda sample: sample.index):
                    self._rollouts[index] = list(samples)
                tasks.start_soon(one, group_index, members[0])
        for group in groups.values():
            for sample in group.samples:
                if before := self._rollouts.get(sample.index):
                    sample.metrics["attempts"] = before[0].metrics.get("attempts", 1)
        self._rollouts.clear()
        return [groups[group_index] for group_index in indices]

    async def _generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        if prompt.index not in self._rollouts:
            raise GenerateFailure("the run has no such rollout: its group failed before the rollout finished")
        return _unscored(self._rollouts[prompt.index], keeps_rewards=self._keeps_rewards)


def _unscored(samples: Sequence[Sample], *, keeps_rewards: bool) -> list[Sample]:
    """Copies of a rollout's samples without scoring failures, each with the step rewards of its conversation.

    ``keeps_rewards`` is for a run without a reward function, whose rewards its generate function set.
    Without advantages too, which are of the earlier rewards; a branch that ended in a fork has the status of its end.
    """
    rewards: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        rewards.setdefault((sample.seat, sample.conversation), []).extend(sample.step_rewards)
    copies = []
    for sample in samples:
        sample = Sample.from_dict(sample.to_dict(), sample.named_images.__getitem__)
        own = rewards[sample.seat, sample.conversation]
        sample.advantages = None
        if not keeps_rewards:
            sample.reward = sum(own) if own else None
        if not is_lost([sample]):
            sample.failure = None  # of the group's reward or filter, of any kind
        elif sample.failure is not None and sample.failure.kind in _OF_SCORING:
            # Only a rollout that was not lost is scored. A generate function need not give a reason why it stopped.
            ended = sample.stop_reason is not None
            sample.failure, sample.status = None, status_of(sample.stop_reason) if ended else Status.COMPLETED
        copies.append(sample.pack())
    for branch, following in reversed(list(itertools.pairwise(copies))):
        if branch.stop_reason is StopReason.FORKED:
            branch.status = following.status
    return copies


_OF_SCORING = (RewardFailure.__name__, FilterFailure.__name__)
