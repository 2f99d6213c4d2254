"""Selection: which rollouts of the runs become rows, and why the others do not.

Invariant: each rollout that was read is either selected or refused for one reason, in this order: no verdict, images,
``where``, the verdict that ``select`` asks for, overlap with held-out texts, an exact duplicate, the limit of its task.
A rollout without a verdict is in no pass rate; one of two runs is in it once, with the verdict of the run that is named
first. Two passes over the same runs select the same rollouts: ties are broken by a digest of the seed and the
rollout's place, and nothing depends on time or on the order of a set.

Memory: some numbers for each task, 8 to 24 bytes for each distinct rollout.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rollouts.base.storable import to_json
from rollouts.base.validators import is_int, is_number
from rollouts.curation.duplicates import HashSet, HeldOut, digest_of
from rollouts.curation.expression import Where
from rollouts.curation.stored import StoredRollout, StoredRun
from rollouts.errors import ConfigError

__all__ = ["Selection", "Selector", "TaskStats"]

_CHOICES = re.compile(r"(correct|all)|(best|shortest)(?::([1-9]\d*))?")

NO_VERDICT = "no verdict: it failed, was aborted, or has no reward"
IMAGES = "has images, which no row has a column for"
HELD_OUT = "overlap with held-out texts"
WHERE = "not in --where"
SEVERAL = "several conversations, or unlike rewards: curate takes one agent's rollouts"
NOT_PASSED = "reward below --passing"
DUPLICATE = "exact duplicate of an earlier one"
OVER = "beyond the limit of its task"


@attrs.frozen
class Selection:
    """Which rollouts are selected.

    Raises:
        ConfigError: a value is of a wrong form.
    """

    where: str | None = None
    """An expression of :mod:`rollouts.curation.expression`."""
    select: str | None = None
    """``correct``, ``best[:N]``, ``shortest[:N]`` or ``all``; by default ``correct``, for preferences ``all``."""
    passing: float = 1.0
    """A rollout passes with at least this reward."""
    per_task: int | None = None
    """The most rollouts of a task, over all runs; for pairs, the most pairs."""
    seed: int = 0
    """Decides between rollouts of a task that are equally good."""
    near: float | None = None
    """Similarity from which a row is a near duplicate of an earlier row; ``None``: rows are not compared."""
    not_in: Sequence[str | Path] = ()
    """Files of prompts, or runs, that no row may overlap with."""
    tools: str | Path | None = None
    """A JSON file with the tools of runs that did not store them."""

    def __attrs_post_init__(self) -> None:
        if self.select is not None and not _CHOICES.fullmatch(str(self.select)):
            raise ConfigError.of("--select", self.select, '"correct", "best[:N]", "shortest[:N]" or "all"')
        if not is_number(self.passing):
            raise ConfigError.of("--passing", self.passing, "a finite number")
        if self.per_task is not None and not is_int(self.per_task, 1):
            raise ConfigError.of("--per-task", self.per_task, "an integer >= 1")
        if not is_int(self.seed, 0):
            raise ConfigError.of("--seed", self.seed, "an integer >= 0")
        if self.where is not None:
            Where(self.where)


@attrs.define
class TaskStats:
    """The rewards of one task, over all runs."""

    n: int = 0
    passed: int = 0
    failed: int = 0
    total: float = 0.0
    best: float = -math.inf
    worst: float = math.inf

    def add(self, reward: float | None, passing: float) -> None:
        """Count a rollout."""
        if reward is None:
            self.failed += 1
            return
        self.best = max(self.best, reward)
        self.worst = min(self.worst, reward)
        self.n += 1
        self.passed += reward >= passing
        self.total += reward

    def facts(self) -> dict[str, float]:
        """The fields of :data:`rollouts.curation.expression.TASK_FIELDS`; without a verdict only the counts."""
        counts: dict[str, float] = {"n": self.n, "failed": self.failed}
        if not self.n:
            return counts
        rates = {"pass_rate": self.passed / self.n, "mean": self.total / self.n}
        return {**counts, **rates, "best": self.best, "spread": self.best - self.worst}


class Selector:
    """Selects the rollouts of runs.

    Args:
        runs: the runs; their rollouts are pooled by task.
        selection: the criteria.
        limits_rollouts: whether ``per_task`` limits rollouts; else the rows have another limit.
        held_out: the texts of ``selection.not_in``.

    Attributes:
        read: the number of rollouts that were read.
        refused: the number of refused rollouts by reason.
        tasks: the rewards by task.
    """

    def __init__(
        self,
        runs: Sequence[StoredRun],
        selection: Selection,
        *,
        limits_rollouts: bool = True,
        held_out: HeldOut | None = None,
    ) -> None:
        self._runs, self._selection, self._held_out = runs, selection, held_out
        self._where = None if selection.where is None else Where(selection.where)
        match = _CHOICES.fullmatch(selection.select or "correct")
        assert match is not None, "a selection is checked"
        self._kind = match[1] or match[2]
        limits = [int(match[3] or 1)] if match[2] else []
        if selection.per_task is not None and limits_rollouts:
            limits.append(selection.per_task)
        self._limit = min(limits) if limits else None
        self.read = 0
        self.refused: Counter[str] = Counter()
        self.tasks: dict[str, TaskStats] = {}

    def __iter__(self) -> Iterator[StoredRollout]:
        """Yield the selected rollouts in the order of the runs; the counts are complete at the end."""
        self.read, self.refused, self.tasks = 0, Counter(), {}
        counted = HashSet()
        for rollout in self._all():
            self.read += 1
            task = self.tasks.setdefault(rollout.task, TaskStats())
            if len(self._runs) > 1 and (requests := rollout.requests) is not None and not counted.add(requests):
                continue
            task.add(rollout.reward, self._selection.passing)
        chosen = None if self._limit is None else self._best(self._limit)
        for rollout in self._admitted(self.refused):
            if chosen is None or rollout.place in chosen:
                yield rollout
            else:
                self.refused[OVER] += 1
        if self._where is not None and self.read:
            self._where.check_seen()

    def _all(self) -> Iterator[StoredRollout]:
        for run in self._runs:
            yield from run

    def _best(self, limit: int) -> set[tuple[int, int]]:
        """The places of the ``limit`` best rollouts of each task."""
        heaps: dict[str, list[tuple[Any, ...]]] = {}
        for rollout in self._admitted(Counter()):
            heap = heaps.setdefault(rollout.task, [])
            entry = (*self._rank(rollout), rollout.place)
            if len(heap) < limit:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
        return {entry[-1] for heap in heaps.values() for entry in heap}

    def _rank(self, rollout: StoredRollout) -> tuple[float, ...]:
        """Higher is better."""
        key = f"{self._selection.seed}/{rollout.run.digest}/{rollout.number}"
        chance = float(digest_of(key.encode()))
        reward = rollout.reward or 0.0
        if self._kind == "best":
            return (reward, -rollout.sampled, chance)
        return (-rollout.sampled, reward, chance) if self._kind == "shortest" else (chance,)

    def _admitted(self, refused: Counter[str]) -> Iterator[StoredRollout]:
        """Yield the rollouts that no filter but the limit of the task refuses, and count the others."""
        seen = HashSet()
        for rollout in self._all():
            reason = self._reason(rollout, seen)
            if reason is None:
                yield rollout
            else:
                refused[reason] += 1

    def _reason(self, rollout: StoredRollout, seen: HashSet) -> str | None:
        passing = self._selection.passing
        if rollout.reward is None:
            return NO_VERDICT
        if rollout.has_images:
            return IMAGES
        if self._where is not None:
            facts = {**rollout.facts(passing), **self.tasks[rollout.task].facts()}
            if not self._where(facts):
                return WHERE
        if rollout.has_several_conversations:
            return SEVERAL
        if self._kind in ("correct", "shortest") and rollout.reward < passing:
            return NOT_PASSED
        if self._held_out is not None and self._held_out.has(rollout.prompt_text, rollout.texts()):
            return HELD_OUT
        if rollout.is_text:
            replies = [one for one in rollout.branches[0]["messages"] if one.get("role") == "assistant"]
            parts = [to_json([[one.get("content"), _calls_of(one)] for one in replies])]
        else:
            parts = [column[mask].tobytes() for column, mask in zip(rollout.ids, rollout.masks, strict=True)]
        return None if seen.add(digest_of(rollout.task.encode(), *parts)) else DUPLICATE


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The calls of a stored message without their ids, which an API makes at random."""
    return [call.get("function") for call in message.get("tool_calls") or ()]
