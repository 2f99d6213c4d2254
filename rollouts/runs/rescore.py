"""A stored run under other rewards and another filter, as a new run; nothing is generated.

Invariant: groups are the stored ones, whole, under their numbers, with tokens as they are; batches hold them in order.
Each group of the old run is in the new one once: in a batch, dropped, failed, or accepted without a batch. The new run
has no journal, so it cannot be resumed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import attrs

from rollouts.dtypes import Prompt, as_messages
from rollouts.errors import ConfigError, FilterFailure, GenerateFailure, RewardFailure
from rollouts.recipe import Recipe
from rollouts.runs.reader import StoredSamples, load_run
from rollouts.runs.writer import Format, RunWriter
from rollouts.training.failures import FailureStats
from rollouts.training.group_runner import GroupRunner
from rollouts.training.metrics import Accounting, batch_metrics
from rollouts.training.samples import status_of
from rollouts.training.types import Group, Sample

__all__ = ["rescore"]


async def rescore(
    run: Path, recipe: Recipe, out: Path, *, format: Format = "auto", overwrite: bool = False
) -> Accounting:
    """Score and filter every group of a run anew.

    Args:
        run: the run's folder; may go on, have been killed, or be finished.
        recipe: its rewards, filter, failure policy and batch size are applied; its generate function is not called.
        out: the folder of the new run.
        format: of its batches.
        overwrite: replace the run that is there.

    Returns:
        Where the groups are now; ``returned`` are those that were accepted and fill no batch.

    Raises:
        ConfigError: no run there, groups of another size, or a run in ``out``.
    """
    opening = functools.partial(_opened, run, recipe, out, format, overwrite)
    stored, writer = await anyio.to_thread.run_sync(opening)
    indices = sorted(stored.group_indices)
    scoring = _Scoring(stored, recipe)
    accounting = Accounting()
    ready: list[Group] = []
    wide = recipe.config.groups_in_work
    for start in range(0, len(indices), wide):
        for group in await scoring.play(indices[start : start + wide]):
            accounting.taken += 1
            await anyio.to_thread.run_sync(writer.on_group, group)
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
            numbers = {"batch": writer.batches, **batch_metrics(samples)}
            await anyio.to_thread.run_sync(writer.write_batch, samples, numbers, attrs.evolve(accounting))
    accounting.returned, accounting.ready = accounting.ready, 0
    accounting.check()
    await anyio.to_thread.run_sync(functools.partial(writer.finish, "finished", accounting))
    return accounting


def _opened(run: Path, recipe: Recipe, out: Path, format: Format, overwrite: bool) -> tuple[StoredSamples, RunWriter]:
    stored = load_run(run, "all")
    size = (stored.info.get("config") or {}).get("n_samples_per_prompt")
    if recipe.config.n_samples_per_prompt != size:
        got = recipe.config.n_samples_per_prompt
        raise ConfigError.of("recipe, n_samples_per_prompt", got, f"{size}, as in the run")
    if out.resolve() == run.resolve():
        raise ConfigError.of("--out", str(out), "another folder than the run's own")
    told = {name: stored.info.get(name) for name in ("endpoint", "server", "tokenizer")}
    source = {"run": str(run.resolve()), "recipe": stored.info.get("recipe")}
    description = {**recipe.describe(), **told, "rescored": source}
    return stored, RunWriter(out, description, format=format, overwrite=overwrite)


class _Scoring:
    """Plays stored groups: what is generated is what is there."""

    def __init__(self, stored: StoredSamples, recipe: Recipe) -> None:
        self._stored = stored
        self._held: dict[int | None, list[Sample]] = {}
        config = attrs.evolve(recipe.config, generate_fn=self._generate, failure_budget=None)
        self._player = GroupRunner(config, FailureStats(None, 1), None, {}, lambda: False)

    async def play(self, indices: Sequence[int]) -> list[Group]:
        """These groups, scored and filtered, in order."""
        groups: dict[int, Group] = {}

        async def one(group_index: int, head: Sample) -> None:
            prompt = Prompt(
                head.prompt if isinstance(head.prompt, str) else as_messages(head.prompt),
                label=head.label,
                metadata=head.metadata,
                group_index=group_index,
            )
            groups[group_index] = await self._player.run(prompt, {})

        async with anyio.create_task_group() as tasks:
            for group_index in indices:
                members = self._stored.group(group_index)
                for index, samples in itertools.groupby(members, lambda sample: sample.index):
                    self._held[index] = list(samples)
                tasks.start_soon(one, group_index, members[0])
        for group in groups.values():
            for sample in group.samples:
                if before := self._held.get(sample.index):
                    sample.metrics["attempts"] = before[0].metrics.get("attempts", 1)
        self._held.clear()
        return [groups[group_index] for group_index in indices]

    async def _generate(self, prompts: Sequence[Prompt]) -> list[Sample]:
        (prompt,) = prompts
        if prompt.index not in self._held:
            raise GenerateFailure("the run has no such rollout: its group failed before it was finished")
        return _unscored(self._held[prompt.index])


def _unscored(samples: Sequence[Sample]) -> list[Sample]:
    """A rollout as it was before it was scored."""
    rewards = [reward for sample in samples for reward in sample.step_rewards]
    found = []
    for sample in samples:
        sample = Sample.from_dict(sample.to_dict())
        sample.reward = sum(rewards) if rewards else None
        if sample.failure is not None and sample.failure.kind in _OF_SCORING:
            sample.failure, sample.status = None, status_of(sample.stop_reason)
        found.append(sample.pack())
    return found


_OF_SCORING = (RewardFailure.__name__, FilterFailure.__name__)
