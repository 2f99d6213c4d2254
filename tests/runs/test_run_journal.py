"""Finished samples in the journal: written once, and again only after a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from rollouts.dtypes import Prompt
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.training.types import Group, Sample
from tests.stored_runs import some_sample

PROMPT = Prompt("What?", metadata={"level": 1}, group_index=0, index=0)


async def settled(path: Path, sample: Sample, change: Callable[[Sample], object]) -> int:
    """Write a finished sample, then its group after a change; returns how often the sample was written."""
    with Journal(path) as journal:
        run_journal = RunJournal(journal)
        await run_journal.finished([sample])
        change(sample)
        await run_journal.settled(Group(PROMPT, (sample.pack(),), "kept"))
    return sum(entry.kind == "sample" for entry in read_journal(path))


CHANGES: dict[str, Callable[[Sample], object]] = {
    "reward": lambda sample: setattr(sample, "reward", 0.25),
    "metadata in place": lambda sample: sample.metadata.update(level=2),
    "metrics in place": lambda sample: sample.metrics.update(score=1),
    "messages": lambda sample: setattr(sample, "messages", [*sample.messages, {"role": "user", "content": "more"}]),
    "completions": lambda sample: setattr(sample, "completions", sample.completions[:-1]),
    "versions": lambda sample: setattr(sample, "versions", []),
    "response": lambda sample: setattr(sample, "response", "other"),
    "tokens": lambda sample: setattr(sample, "tokens", [sample.tokens[0] + 1, *sample.tokens[1:]]),
    "logprobs": lambda sample: setattr(sample, "rollout_log_probs", None),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_what_has_changed_is_written_again(
    tmp_path: Path, change: Callable[[Sample], object], *, small: bool
) -> None:
    """For any change, packed or not: the sample read is the final one."""
    sample = some_sample(PROMPT, 0)
    sample = sample if small else Sample.from_dict(sample.to_dict())
    assert (sample.compact is not None) == small
    assert await settled(tmp_path, sample, change) == 2
    assert RunHistory.read(tmp_path).group_samples(0) == [sample]


@pytest.mark.parametrize("small", [True, False])
async def test_what_was_only_looked_at_is_not(tmp_path: Path, *, small: bool) -> None:
    """A reward or a filter that reads a record does not change it."""
    sample = some_sample(PROMPT, 0)
    sample = sample if small else Sample.from_dict(sample.to_dict())

    def look(sample: Sample) -> object:
        return [getattr(sample, name) for name in ("messages", "completions", "versions", "response", "metadata")]

    assert await settled(tmp_path, sample, look) == 1
    assert RunHistory.read(tmp_path).group_samples(0) == [sample]


async def test_another_sample_in_its_place_is_written(tmp_path: Path) -> None:
    """The record of another sample does not count."""
    sample = some_sample(PROMPT, 0)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await run_journal.finished([sample])
        twin = attrs.evolve(sample, reward=0.75)
        await run_journal.settled(Group(PROMPT, (twin,), "kept"))
    assert RunHistory.read(tmp_path).group_samples(0) == [twin]
