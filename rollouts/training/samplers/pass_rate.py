"""Fewer draws of prompts whose rollouts all pass or all fail.

A group teaches only if its rewards differ. The earlier groups of a prompt say how probable that is for the next: the
pass rate has a Beta distribution, so ``n`` rollouts neither all pass nor all fail with a known probability. Divided by
that of an untried prompt, it is the prompt's share (:mod:`rollouts.training.samplers.passes`). So a prompt that still
teaches is drawn once in a pass, whatever its pass rate, and a prompt that seems solved or hopeless is tried again once
in ``1 / floor`` passes, because the policy may have changed.

Invariant: a prompt is drawn at least once in ``ceil(1 / floor)`` passes. Failed groups change no estimate.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import msgspec

from rollouts.base.validators import is_int, is_number
from rollouts.dtypes import Message, Prompt, as_messages, hashes_in, with_images
from rollouts.errors import ConfigError
from rollouts.training.evaluation import task_key
from rollouts.training.samplers.passes import PassSampler
from rollouts.training.types import Sample

__all__ = ["PassRateSampler"]

_RUNS, _IMAGES = "rollouts.runs.folder", "rollouts.runs.images"
"""Imported at their first use: stored runs are a layer above this package."""
_SHARPNESS = 1.5
"""Exponent of the share. With 1 a prompt whose only group of 8 had no spread is drawn in 31 % of the passes, with 1.5
in 17 %: one group of each prompt then saves most of the draws that teach nothing."""
_BINS = 10


@attrs.frozen
class _Seen:
    """The rollouts of a prompt, of which older ones count less."""

    passed: float = 0.0
    failed: float = 0.0
    number: int = 0
    """The pass in which the last group was observed."""

    def at(self, number: int, forget: float) -> _Seen:
        """The same as it counts in a later pass."""
        weight = forget ** (number - self.number)
        return _Seen(self.passed * weight, self.failed * weight, number)


class PassRateSampler(PassSampler):
    """Draws a prompt in proportion to the probability that its rollouts differ.

    Args:
        n: rollouts in a group.
        passing: a rollout with a reward above it passes. Where rewards are not 0 or 1, a group with different rewards
            counts with at least one pass and at least one failure.
        prior: both parameters of the Beta distribution of an untried prompt; small numbers expect rates near 0 and 1.
        floor: the smallest share.
        forget: weight of what was observed one pass ago.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self, n: int = 8, *, passing: float = 0.5, prior: float = 0.1, floor: float = 0.2, forget: float = 0.95
    ) -> None:
        if not is_int(n, 2):
            raise ConfigError.of("PassRateSampler.n", n, "an integer >= 2: one rollout has no spread")
        if not is_number(passing):
            raise ConfigError.of("PassRateSampler.passing", passing, "a number")
        for name, value, most in (("prior", prior, 100), ("floor", floor, 1), ("forget", forget, 1)):
            if not is_number(value) or not 0 < value <= most:
                raise ConfigError.of(f"PassRateSampler.{name}", value, f"a number above 0, at most {most}")
        self.n, self.passing, self.prior, self.floor, self.forget = n, passing, prior, floor, forget
        self._known: dict[str, _Seen] = {}
        self._untried = self._spread(_Seen())

    @classmethod
    def from_runs(cls, runs: Sequence[str | Path | Iterable[Sample]], **numbers: Any) -> Self:
        """A sampler that begins with the rewards of stored runs or evaluations, matched by prompt and label.

        Args:
            runs: folders; or samples. Rollouts that failed do not count.
            **numbers: as for the class.

        Raises:
            ConfigError: a folder has neither a run nor an evaluation, or lacks an image that a prompt names.
        """
        sampler = cls(**numbers)
        for run in runs:
            tasks: dict[str, dict[object, list[float]]] = {}
            for row in _rows(run):
                if row.get("failure") is None and row.get("reward") is not None:
                    rollouts = tasks.setdefault(task_key(row["prompt"], row.get("label")), {})
                    rollouts.setdefault((row.get("group_index"), row.get("rollout_id")), []).append(row["reward"])
            for key, rollouts in tasks.items():
                rewards = [statistics.fmean(branches) for branches in rollouts.values()]
                sampler._known[key] = sampler._with(sampler._known.get(key, _Seen()), rewards)
        return sampler

    def begin(self, prompts: Sequence[Prompt], seed: int | None) -> None:
        super().begin(prompts, seed)
        keys = [task_key(prompt.messages, prompt.label) for prompt in prompts] if self._known else []
        self._seen = {position: self._known[key] for position, key in enumerate(keys) if key in self._known}
        self._count_all()

    def _count_all(self) -> None:
        self._bins = Counter(map(_bin, self._seen.values()))
        self._never = sum(not seen.passed for seen in self._seen.values())
        self._always = sum(not seen.failed for seen in self._seen.values())

    def share(self, position: int, number: int) -> float:
        seen = self._seen.get(position)
        if seen is None:
            return 1.0
        relative = self._spread(seen.at(number, self.forget)) / self._untried
        return min(1.0, max(self.floor, math.pow(relative, _SHARPNESS)))

    def _spread(self, seen: _Seen) -> float:
        """The probability that ``n`` rollouts neither all pass nor all fail."""
        passed, failed = self.prior + seen.passed, self.prior + seen.failed
        all_pass = all_fail = 1.0
        for number in range(self.n):
            all_pass *= (passed + number) / (passed + failed + number)
            all_fail *= (failed + number) / (passed + failed + number)
        return 1.0 - all_pass - all_fail

    def observe(self, position: int, rewards: Sequence[float | None]) -> None:
        before = self._seen.get(position)
        number = self.pass_of(position)
        after = self._with(_Seen() if before is None else before.at(number, self.forget), rewards, number)
        if not after.passed + after.failed:
            return
        self._seen[position] = after
        for seen, change in ((before, -1), (after, 1)):
            if seen is not None:
                self._bins[_bin(seen)] += change
                self._never += change * (not seen.passed)
                self._always += change * (not seen.failed)

    def _with(self, seen: _Seen, rewards: Sequence[float | None], number: int = 0) -> _Seen:
        known = [reward for reward in rewards if reward is not None]
        passed = sum(reward > self.passing for reward in known)
        if known and min(known) != max(known):
            passed = min(max(passed, 1), len(known) - 1)
        return _Seen(seen.passed + passed, seen.failed + len(known) - passed, number)

    def metrics(self) -> Mapping[str, float]:
        """Prompts tried, also by estimated pass rate; prompts of which each or no rollout passed; prompts skipped."""
        rates = {f"pass_rate/{one / _BINS:.1f}-{(one + 1) / _BINS:.1f}": self._bins[one] for one in range(_BINS)}
        counts = {"tried": len(self._seen), "always_passed": self._always, "never_passed": self._never}
        return {**counts, **super().metrics(), **rates}

    def describe(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("n", "passing", "prior", "floor", "forget")}
        known = {key: [seen.passed, seen.failed] for key, seen in sorted(self._known.items())}
        runs = {"from_runs": f"{zlib.crc32(json.dumps(known).encode()):08x}"} if known else {}
        return {"name": type(self).__name__, **numbers, **runs}

    def state_dict(self) -> dict[str, Any]:
        seen = {str(position): [*attrs.astuple(seen)] for position, seen in self._seen.items()}
        return {**super().state_dict(), "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._seen = {int(position): _Seen(*values) for position, values in state["seen"].items()}
        self._count_all()


def _bin(seen: _Seen) -> int:
    return min(int(_BINS * seen.passed / (seen.passed + seen.failed)), _BINS - 1)


def _rows(run: str | Path | Iterable[Sample]) -> Iterator[Mapping[str, Any]]:
    """The stored fields of the samples of a run, of an evaluation, or of samples in memory."""
    if not isinstance(run, str | Path):
        names = ("prompt", "label", "reward", "failure", "group_index", "rollout_id")
        yield from ({name: getattr(sample, name) for name in names} for sample in run)
    elif (evaluation := Path(run) / "rollouts.jsonl").is_file():
        with evaluation.open("rb") as lines:
            yield from _with_images(map(msgspec.json.decode, lines), run)
    else:
        rows = (row.data for row in importlib.import_module(_RUNS).read_rows(run, "all"))
        yield from _with_images(rows, run)


def _with_images(rows: Iterable[Mapping[str, Any]], run: str | Path) -> Iterator[Mapping[str, Any]]:
    """The rows with the images of their prompts in place of hashes; rows of a group, which follow each other, share."""
    load = importlib.import_module(_IMAGES).ImageFolder(run).load
    before: Any = None
    messages: Sequence[Message] = ()
    for row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, str) or not hashes_in(prompt):
            yield row
            continue
        if prompt != before:
            before, messages = prompt, as_messages(with_images(prompt, load))
        yield {**row, "prompt": messages}
