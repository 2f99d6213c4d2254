"""The laws of a run's journal: how its records are written, and the history that they are read as.

1. Prompts and rollouts. 2. Turns. 3. Tokens are stored once. 4. Groups and batches. 5. Stored before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from rollouts.agent.turn_log import Turn, message_to_dict
from rollouts.dtypes import Completion, Message, Prompt, StopReason, VersionSpan
from rollouts.errors import Failure, GenerateFailure, JournalError
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.run_history import Rollout, RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.training.metrics import Accounting
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Group, Outcome, Sample
from rollouts.trajectory import Trajectory, digest
from tests.processors import picture
from tests.stored_runs import some_sample

IMAGE = picture(6, 5)


def prompt_of(group: int, index: int = 0) -> Prompt:
    return Prompt("What?", group_index=group, index=index)


def played(index: int, turns: int = 2, group: int = 0, reply: str = "reply") -> tuple[Sample, list[Turn]]:
    """A sample of a few tokens, and the turns that its episode logged."""
    trajectory, logged, state = Trajectory(), [], (0, 0, 0, 0)
    for number in range(turns):
        trajectory.add_context(np.arange(3, dtype=np.int32) + 10 * number, [Message("user", f"text {number}")])
        ids = np.array([100 + index, 200 + number], np.int32)
        completion = Completion(
            tokens=ids,
            logprobs=[-0.5, -0.25],
            finish_reason="stop",
            versions=[VersionSpan("v1", 0, 2)],
            prompt_tokens=len(trajectory),
            prompt_digest=digest(trajectory.tokens),
            request_id=f"{index}/{number}",
        )
        trajectory.add_reply(completion, Message("assistant", f"{reply} {number}"))
        logged.append(Turn.since(trajectory, *state))
        state = (len(trajectory), len(trajectory.completions), len(trajectory.messages), len(trajectory.times))
    trajectory.step_rewards.append(1.0)
    trajectory.seal(StopReason.TASK_COMPLETED)
    return trajectory_to_sample(trajectory, prompt_of(group, index), lambda tokens: str(len(tokens))), logged


async def log_turns(run_journal: RunJournal, index: int, turns: Sequence[Turn]) -> None:
    """Store the turns of one attempt, as its episode does."""
    log = await run_journal.turn_log(index).claim()
    assert log is not None
    for turn in turns:
        await log.save(turn)


def sample_records(path: Path) -> list[dict[str, Any]]:
    return [entry.fields for entry in read_journal(path) if entry.kind == "sample"]


def lengths(turns: Sequence[Turn]) -> list[int]:
    return [len(turn.tokens) for turn in turns]


def group_of(number: int, samples: Sequence[Sample], outcome: Outcome = "kept", reason: str = "") -> Group:
    return Group(prompt_of(number), tuple(samples), outcome, reason)


# -- 1. prompts and rollouts ------------------------------------------------------------------------------------------


async def test_prompts_are_counted_and_group_indices_are_not(tmp_path: Path) -> None:
    """1.1 A prompt taken twice counts twice; the groups are those up to the highest index."""
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        for group in (0, 2, 1, 0):
            run_journal.taken(prompt_of(group))
    history = RunHistory.read(tmp_path)
    assert (history.taken, history.groups) == (4, 3)
    assert history.unsettled == [0, 1, 2]


def test_an_index_beyond_every_run_is_damage(tmp_path: Path) -> None:
    """1.1.1 A history has a list of all groups up to the highest index, which such an index would make endless."""
    with Journal(tmp_path) as journal:
        RunJournal(journal).taken(prompt_of(1 << 40))
    with pytest.raises(JournalError, match=rf"a record of kind taken: group {1 << 40} of 1 prompts"):
        RunHistory.read(tmp_path)


def test_an_empty_journal_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    """1.2 Nothing is taken, in use, settled or ready."""
    Journal(tmp_path).close()
    history = RunHistory.read(tmp_path)
    assert (history.taken, history.groups, history.runs) == (0, 0, [])
    assert (history.unsettled, history.ready, history.sealed) == ([], [], [])


def test_every_start_of_the_run_is_kept_in_order(tmp_path: Path) -> None:
    """1.3 The first record is that of the start, the next are those of the resumptions."""
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        run_journal.began({"recipe": "a"})
        run_journal.began({"recipe": "a", "resumed": 1})
    assert RunHistory.read(tmp_path).runs == [{"recipe": "a"}, {"recipe": "a", "resumed": 1}]


async def test_a_rollout_is_finished_when_each_of_its_branches_is_stored(tmp_path: Path) -> None:
    """1.4 A writer that died between two branches left an unfinished rollout; the branches are read in order.

    Until then its lost attempts count, and it resumes from its turns.
    """
    branches = [some_sample(prompt_of(0), seed) for seed in range(3)]
    turns = played(0)[1]
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        run_journal.attempt_lost(0, 1, branches)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished(branches)
    history = RunHistory.read(tmp_path)
    assert history.rollouts[0].finished
    assert (history.attempts, history.turns) == ({}, {})
    assert history.samples(0) == branches
    cut = RunHistory(tmp_path)
    for entry in list(read_journal(tmp_path))[:-1]:
        cut._add(entry)
    assert not cut.rollouts[0].finished
    assert cut.rollouts[0].whole == 3
    assert (cut.attempts, len(cut.read_turns(0))) == ({0: 1}, len(turns))


async def test_a_rollout_that_is_stored_again_replaces_the_first(tmp_path: Path) -> None:
    """1.5 The last record of a rollout counts, also with other branches than before."""
    first, last = [some_sample(prompt_of(0), seed) for seed in (1, 2)], [some_sample(prompt_of(0), 3)]
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await run_journal.finished(first)
        await run_journal.settled(group_of(0, last))
    history = RunHistory.read(tmp_path)
    assert history.samples(0) == last
    assert history.rollouts[0].finished


async def test_a_rollout_that_was_stored_again_in_part_is_the_first(tmp_path: Path) -> None:
    """1.5.2 A writer that died between two branches leaves the finished rollout as it was."""
    first, last = ([some_sample(prompt_of(0), seed) for seed in seeds] for seeds in ((1, 2), (3, 4, 5)))
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await run_journal.finished(first)
        await run_journal.settled(group_of(0, last))
    entries = list(read_journal(tmp_path))
    for number in range(2, len(entries) + 1):
        history = RunHistory(tmp_path)
        for entry in entries[:number]:
            history._add(entry)
        assert history.samples(0) == (first if number < 5 else last)


async def test_a_sample_with_the_same_tokens_and_other_texts_is_another(tmp_path: Path) -> None:
    """1.5.1 It is stored again, although its numbers are those of the one that was finished."""
    (first, _), (other, _) = played(0), played(0, reply="other")
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await run_journal.finished([first])
        await run_journal.settled(group_of(0, [other]))
    assert len(sample_records(tmp_path)) == 2
    (read,) = RunHistory.read(tmp_path).samples(0)
    assert read.messages == other.messages != first.messages


def test_a_lost_attempt_is_counted_until_its_rollout_is_finished(tmp_path: Path) -> None:
    """1.6 Each rollout has the number of its last failed attempt; a finished one has none."""
    lost = some_sample(prompt_of(0), 0)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        run_journal.attempt_lost(0, 1, [lost])
        run_journal.attempt_lost(0, 2, [lost])
        run_journal.attempt_lost(1, 1, [lost])
        journal.flush()
        assert RunHistory.read(tmp_path).attempts == {0: 2, 1: 1}
        anyio.run(run_journal.finished, [lost])
    assert RunHistory.read(tmp_path).attempts == {1: 1}


def test_the_record_of_a_lost_attempt_has_its_first_failure(tmp_path: Path) -> None:
    """1.7 Kind and message, of the first branch that failed; none if no branch has a failure."""
    sound, failed, later = (some_sample(prompt_of(0), seed) for seed in range(3))
    failed.failure, later.failure = Failure.of(GenerateFailure("no world")), Failure.of(GenerateFailure("later"))
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        run_journal.attempt_lost(0, 1, [sound, failed, later])
        run_journal.attempt_lost(0, 2, [sound])
    failures = [entry.fields["failure"] for entry in read_journal(tmp_path)]
    assert failures == [{"kind": "GenerateFailure", "message": "no world"}, {}]


# -- 2. turns ---------------------------------------------------------------------------------------------------------


async def test_the_turns_of_an_unfinished_rollout_are_read_in_order(tmp_path: Path) -> None:
    """2.1 With their numbers, tokens, masks, logprobs and fields; a rollout without turns has none."""
    _, turns = played(0, 3)
    with Journal(tmp_path) as journal:
        await log_turns(RunJournal(journal), 0, turns)
    read = RunHistory.read(tmp_path).read_turns(0)
    assert [turn.number for turn in read] == [1, 2, 3]
    for turn, stored in zip(turns, read, strict=True):
        assert stored.fields == turn.fields
        assert [list(column) for column in (stored.tokens, stored.mask, stored.logprobs)] == [
            list(column) for column in (turn.tokens, turn.mask, turn.logprobs)
        ]
    assert RunHistory.read(tmp_path).read_turns(1) == []


async def test_the_first_turn_of_an_attempt_replaces_those_of_the_one_before(tmp_path: Path) -> None:
    """2.2 Turns of two attempts are never joined, and another rollout keeps its own."""
    _, turns = played(0, 3)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 1, turns[:1])
        await log_turns(run_journal, 0, turns)
        await log_turns(run_journal, 0, turns[:2])
    history = RunHistory.read(tmp_path)
    assert lengths(history.read_turns(0)) == lengths(turns[:2])
    assert lengths(history.read_turns(1)) == lengths(turns[:1])


async def test_the_first_turn_of_a_conversation_of_a_play_discards_none(tmp_path: Path) -> None:
    """2.2.1 The turns of the other conversations of the rollout stay before it."""
    _, turns = played(0, 2)
    both = [attrs.evolve(turn, fields={**turn.fields, "conversation": name}) for name in ("a", "b") for turn in turns]
    with Journal(tmp_path) as journal:
        await log_turns(RunJournal(journal), 0, both)
    read = RunHistory.read(tmp_path).read_turns(0)
    assert [(turn.fields["conversation"], turn.number) for turn in read] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


async def test_a_lost_attempt_discards_its_turns(tmp_path: Path) -> None:
    """2.3 Those of its rollout only."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await log_turns(run_journal, 1, turns)
        run_journal.attempt_lost(0, 1, [sample])
    history = RunHistory.read(tmp_path)
    assert list(history.turns) == [1]
    assert history.read_turns(0) == []


async def test_turns_that_were_voided_are_gone(tmp_path: Path) -> None:
    """2.4 A second episode in one rollout voids the turns of the first, and the sample is stored whole."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        log = run_journal.turn_log(0)
        claimed = await log.claim()
        assert claimed is not None
        await log.save(turns[0])
        assert await log.claim() is None
        assert RunHistory.read(tmp_path).turns == {}
        await run_journal.finished([sample])
    assert sample_records(tmp_path)[0]["from"] == 0
    assert RunHistory.read(tmp_path).samples(0) == [sample]


async def test_the_turns_of_an_earlier_process_start_one_attempt(tmp_path: Path) -> None:
    """2.5 The next attempt at that rollout starts without them, and the other rollouts never have them."""
    _, turns = played(3, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal, {3: turns})
        assert run_journal.turn_log(4).turns == ()
        assert run_journal.turn_log(3).turns == tuple(turns)
        assert run_journal.turn_log(3).turns == ()


async def test_a_finished_rollout_has_no_turns_to_resume_from(tmp_path: Path) -> None:
    """2.6 Its turns belong to its sample."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample])
    history = RunHistory.read(tmp_path)
    assert history.turns == {}
    assert len(history.rollouts[0].turns) == 2


# -- 3. tokens are stored once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("logged", [0, 1, 2, 3])
async def test_a_sample_is_stored_without_the_tokens_of_its_turns(tmp_path: Path, logged: int) -> None:
    """3.1 Its record begins behind them, with the columns of the rest only, and it is read whole."""
    sample, turns = played(0, 3)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns[:logged])
        await run_journal.finished([sample])
    (entry,) = (entry for entry in read_journal(tmp_path) if entry.kind == "sample")
    stored = sum(lengths(turns[:logged]))
    assert entry.fields["from"] == stored
    assert entry.fields["length"] == len(sample)
    assert entry.columns is not None
    assert len(entry.columns.tokens) == len(sample) - stored
    assert RunHistory.read(tmp_path).samples(0) == [sample]


async def test_turns_of_an_earlier_process_are_not_stored_again(tmp_path: Path) -> None:
    """3.2 A resumed rollout refers to them, and to the turns that it adds."""
    sample, turns = played(0, 3)
    with Journal(tmp_path) as journal:
        await log_turns(RunJournal(journal), 0, turns[:1])
    earlier = RunHistory.read(tmp_path).read_turns(0)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal, {0: earlier})
        await log_turns(run_journal, 0, turns[1:2])
        await run_journal.finished([sample])
    assert sample_records(tmp_path)[0]["from"] == sum(lengths(turns[:2]))
    assert RunHistory.read(tmp_path).samples(0) == [sample]


def other_id(sample: Sample) -> None:
    sample.tokens = [*sample.tokens[:2], sample.tokens[2] + 1, *sample.tokens[3:]]


def other_mask(sample: Sample) -> None:
    sample.loss_mask = [1, *sample.loss_mask[1:]]
    sample.versions = []


def other_logprob(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs = [*sample.rollout_log_probs[:3], -9.0, *sample.rollout_log_probs[4:]]


def without_logprobs(sample: Sample) -> None:
    sample.rollout_log_probs = None


@pytest.mark.parametrize("change", [other_id, other_mask, other_logprob, without_logprobs])
async def test_stored_turns_with_other_columns_are_not_reused(tmp_path: Path, change: Callable[[Sample], None]) -> None:
    """3.3 If an id, a mask or a logprob of the sample differs from those of its turns, the sample is stored whole."""
    sample, turns = played(0, 2)
    sample = Sample.from_dict(sample.to_dict())
    change(sample)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample])
    assert sample_records(tmp_path)[0]["from"] == 0
    (read,) = RunHistory.read(tmp_path).samples(0)
    assert list(read.tokens) == list(sample.tokens)
    assert list(read.loss_mask) == list(sample.loss_mask)
    assert read == sample


async def test_a_sample_shorter_than_its_turns_is_stored_whole(tmp_path: Path) -> None:
    """3.4 Also if its tokens are the first of theirs."""
    (short, _), (_, turns) = played(0, 1), played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([short])
    assert sample_records(tmp_path)[0]["from"] == 0
    assert RunHistory.read(tmp_path).samples(0) == [short]


async def test_the_branches_of_a_fork_are_stored_whole(tmp_path: Path) -> None:
    """3.5 Turns are those of one sequence; the record of each branch has its number and how many there are."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample, sample])
    records = sample_records(tmp_path)
    assert [(row["from"], row["branch"], row["branches"]) for row in records] == [(0, 0, 2), (0, 1, 2)]
    assert RunHistory.read(tmp_path).samples(0) == [sample, sample]


async def test_a_changed_sample_still_refers_to_its_turns(tmp_path: Path) -> None:
    """3.6 A new reward costs a record without the tokens of the turns, until the group is settled."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample])
        sample.reward = 0.5
        await run_journal.settled(group_of(0, [sample]))
    assert [row["from"] for row in sample_records(tmp_path)] == [len(sample), len(sample)]
    assert RunHistory.read(tmp_path).samples(0) == [sample]


async def test_a_settled_rollout_no_longer_refers_to_its_turns(tmp_path: Path) -> None:
    """3.6.1 What the writer knows of them is forgotten; if the group is settled again, its samples are stored whole."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample])
        await run_journal.settled(group_of(0, [sample]))
        await run_journal.settled(group_of(0, [sample], "dropped", "too old"))
    assert [row["from"] for row in sample_records(tmp_path)] == [len(sample), 0]
    assert RunHistory.read(tmp_path).group_samples(0) == [sample]


async def test_a_lost_attempt_leaves_no_turns_to_refer_to(tmp_path: Path) -> None:
    """3.7 The sample of the next attempt is stored whole, if that attempt logged none."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        run_journal.attempt_lost(0, 1, [sample])
        await run_journal.finished([sample])
    assert sample_records(tmp_path)[0]["from"] == 0
    assert RunHistory.read(tmp_path).samples(0) == [sample]


@pytest.mark.parametrize("fields", [{}, {"conversation": "a"}], ids=["episode", "play"])
async def test_a_new_attempt_refers_to_its_own_turns(tmp_path: Path, fields: dict[str, str]) -> None:
    """3.8 Also if the turns of the one before were never recorded as lost, e.g. of a group that was put back."""
    sample, turns = played(0, 2)
    _, other = played(7, 2)
    turns, other = ([attrs.evolve(turn, fields=turn.fields | fields) for turn in one] for one in (turns, other))
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, other)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample])
    assert sample_records(tmp_path)[0]["from"] == len(sample)
    assert RunHistory.read(tmp_path).samples(0) == [sample]


async def test_a_sample_of_another_length_than_recorded_is_refused(tmp_path: Path) -> None:
    """3.9 With the position of its record: a turn that is missing never gives a shorter sample."""
    sample, turns = played(0, 3)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await log_turns(run_journal, 0, turns)
        await run_journal.finished([sample])
    history = RunHistory.read(tmp_path)
    rollout = history.rollouts[0]
    history.rollouts[0] = Rollout(rollout.branches, rollout.whole, rollout.turns[:-1])
    (offset,) = rollout.branches
    place = f"segment {offset.segment}, offset {offset.offset}: 10 tokens of 15"
    with pytest.raises(JournalError, match=place):
        history.samples(0)


# -- 4. groups and batches --------------------------------------------------------------------------------------------


async def test_a_settled_group_has_its_outcome_reason_and_rollouts(tmp_path: Path) -> None:
    """4.1 Its samples are read in the group's order, branches included; the other groups are unsettled."""
    samples = [some_sample(prompt_of(1, index), index) for index in (2, 3)]
    fork = [some_sample(prompt_of(1, 4), seed) for seed in (5, 6)]
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        for group in range(3):
            run_journal.taken(prompt_of(group))
        for rollout in (fork, samples[1:], samples[:1]):
            await run_journal.finished(rollout)
        await run_journal.settled(group_of(1, [*samples, *fork], "dropped", "no spread"))
    history = RunHistory.read(tmp_path)
    assert history.settled == {1: ("dropped", "no spread", (2, 3, 4))}
    assert history.group_samples(1) == [*samples, *fork]
    assert history.unsettled == [0, 2]
    assert len(sample_records(tmp_path)) == 4


async def test_the_totals_count_each_settled_group(tmp_path: Path) -> None:
    """4.2 Rollouts, sampled tokens and rewards of each, and the reasons of those that were not kept.

    The sampler gets the rewards of the kept and dropped ones, as in the process that settled them.
    """
    groups = [
        group_of(number, [some_sample(prompt_of(number, 2 * number + place), place) for place in (0, 1)], outcome, why)
        for number, (outcome, why) in enumerate([("kept", ""), ("dropped", "no spread"), ("failed", "no world")])
    ]
    with Journal(tmp_path) as journal:
        for group in groups:
            await RunJournal(journal).settled(group)
    samples = [sample for group in groups for sample in group.samples]
    history = RunHistory.read(tmp_path)
    totals = history.totals
    assert history.draws == [(number, None, list(groups[number].rollout_rewards)) for number in (0, 1)]
    assert totals.rollouts == totals.rewarded == 6
    assert totals.sampled_tokens == sum(sample.sampled_tokens for sample in samples)
    assert totals.reward_sum == sum(sample.reward or 0 for sample in samples)
    assert totals.reasons == {"no spread": 1, "no world": 1}


async def test_a_group_kept_and_then_too_old_counts_once(tmp_path: Path) -> None:
    """4.3 The last outcome holds; its rollouts, tokens and rewards are counted once, its reason once."""
    sample = some_sample(prompt_of(0), 0)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        run_journal.taken(prompt_of(0))
        await run_journal.finished([sample])
        await run_journal.settled(group_of(0, [sample]))
        journal.flush()
        assert RunHistory.read(tmp_path).ready == [0]
        await run_journal.settled(group_of(0, [sample], "dropped", "too old"))
    history = RunHistory.read(tmp_path)
    assert history.settled == {0: ("dropped", "too old", (0,))}
    assert (history.ready, history.unsettled) == ([], [])
    assert history.totals.reasons == {"too old": 1}
    assert (history.totals.rollouts, history.totals.rewarded) == (1, 1)
    assert history.totals.sampled_tokens == sample.sampled_tokens
    assert history.totals.to_dict()["lengths"] == {"kept": [sample.sampled_tokens]}


async def test_accepted_groups_are_ready_until_a_batch_has_them(tmp_path: Path) -> None:
    """4.4 By index, whatever the order in which they were settled; dropped and failed groups never are."""
    outcomes: Mapping[int, Outcome] = {3: "kept", 0: "kept", 1: "dropped", 2: "failed", 4: "kept"}
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        for number, outcome in outcomes.items():
            sample = some_sample(prompt_of(number, number), 0)
            await run_journal.settled(group_of(number, [sample], outcome, "" if outcome == "kept" else "why"))
        journal.flush()
        assert RunHistory.read(tmp_path).ready == [0, 3, 4]
        run_journal.sealed(0, [0, 4], {}, Accounting())
    assert RunHistory.read(tmp_path).ready == [3]


async def test_a_sealed_batch_is_read_as_it_was_handed_out(tmp_path: Path) -> None:
    """4.5 Its number, groups, metrics and accounting; the lengths of later groups count for the next batch."""
    accounting = Accounting(taken=2, in_batch=1, ready=1)
    samples = [some_sample(prompt_of(number, number), number) for number in (0, 1)]
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        await run_journal.settled(group_of(0, samples[:1]))
        run_journal.sealed(7, [0], {"seconds": 1.5}, accounting)
        await run_journal.settled(group_of(1, samples[1:]))
    history = RunHistory.read(tmp_path)
    (batch,) = history.sealed
    assert (batch.number, batch.groups, batch.metrics) == (7, (0,), {"seconds": 1.5})
    assert batch.accounting == attrs.asdict(accounting)
    assert history.totals.to_dict()["lengths"] == {"kept": [samples[1].sampled_tokens]}
    assert history.totals.rollouts == 2


# -- 5. stored before it counts ---------------------------------------------------------------------------------------


async def test_what_is_reported_as_stored_can_be_read_by_another_process(tmp_path: Path) -> None:
    """5.1 A turn, a voided log, a finished rollout and a settled group, each when the call returns."""
    sample, turns = played(0, 2)
    with Journal(tmp_path) as journal:
        run_journal = RunJournal(journal)
        log = run_journal.turn_log(0)
        await log.claim()
        await log.save(turns[0])
        assert len(RunHistory.read(tmp_path).turns[0]) == 1
        await log.claim()
        assert RunHistory.read(tmp_path).turns == {}
        await run_journal.finished([sample])
        assert RunHistory.read(tmp_path).rollouts[0].finished
        await run_journal.settled(group_of(0, [sample]))
        assert 0 in RunHistory.read(tmp_path).settled


SHOWN = Message("user", ("Look: ", IMAGE))


def shown() -> Sample:
    """A sample whose conversation has an image."""
    sample = some_sample(prompt_of(0), 0)
    return attrs.evolve(sample, messages=[SHOWN.to_record()], named_images={IMAGE.sha256: IMAGE})


async def test_the_images_of_a_finished_rollout_are_stored(tmp_path: Path) -> None:
    """5.2 Before its record names them; the sample is read with them."""
    with Journal(tmp_path / "journal") as journal:
        await RunJournal(journal).finished([some_sample(prompt_of(0), 0), shown()])
    (read,) = RunHistory.read(tmp_path / "journal").samples(0)[1:]
    assert read.named_images == {IMAGE.sha256: IMAGE}


async def test_the_images_that_a_reward_adds_are_stored(tmp_path: Path) -> None:
    """5.3 With the group, in which the sample has changed."""
    with Journal(tmp_path / "journal") as journal:
        run_journal = RunJournal(journal)
        await run_journal.finished([some_sample(prompt_of(0), 0)])
        await run_journal.settled(group_of(0, [shown()]))
    (read,) = RunHistory.read(tmp_path / "journal").samples(0)
    assert read.named_images == {IMAGE.sha256: IMAGE}


async def test_the_images_of_a_turn_are_stored(tmp_path: Path) -> None:
    """5.4 Before its record names them; the turn is read with them."""
    _, (turn, _) = played(0, 2)
    fields = {**turn.fields, "messages": [message_to_dict(SHOWN)]}
    turn = attrs.evolve(turn, fields=fields, images={IMAGE.sha256: IMAGE})
    with Journal(tmp_path / "journal") as journal:
        await log_turns(RunJournal(journal), 0, [turn])
    (read,) = RunHistory.read(tmp_path / "journal").read_turns(0)
    assert read.images == {IMAGE.sha256: IMAGE}
