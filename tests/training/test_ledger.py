"""Law 4: each change of state moves a group from one place to another, in the counts, the buffer and the ready list."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError
from rollouts.training.data_buffer import DataBuffer
from rollouts.training.ledger import Ledger
from rollouts.training.manager_state import ManagerState
from rollouts.training.types import Group, Outcome
from tests.stored_runs import some_sample


def ledger_of(*outcomes: Outcome) -> Ledger:
    """A ledger of two epochs of three prompts, with a group of each outcome."""
    ledger = Ledger(DataBuffer(["a", "b", "c"], epochs=2))
    for outcome in outcomes:
        prompt = taken(ledger)
        ledger.account_for(Group(prompt, (some_sample(prompt, 0),), outcome, "" if outcome == "kept" else "reason"))
        ledger.landed(prompt)
    return ledger


def taken(ledger: Ledger) -> Prompt:
    prompt = ledger.take(version=0)
    assert prompt is not None
    ledger.finished_rollouts.setdefault(prompt.group_index or 0, {})
    return prompt


@pytest.mark.parametrize(
    ("outcome", "counts"),
    [("kept", {"ready": 1}), ("dropped", {"dropped": 1}), ("failed", {"failed": 1})],
)
def test_a_group_counts_once_by_its_outcome(outcome: Outcome, counts: dict[str, int]) -> None:
    """The counts add up, and no group is in flight."""
    ledger = ledger_of(outcome)
    ledger.accounting.check()
    assert {name: getattr(ledger.accounting, name) for name in counts} == counts
    assert (ledger.accounting.in_flight, ledger.started, ledger.finished_rollouts) == (0, {}, {})


def test_a_prompt_that_is_put_back_comes_out_again_with_its_finished_rollouts() -> None:
    """It has the same group index, and its group counts as restarted."""
    ledger = ledger_of()
    prompt = taken(ledger)
    ledger.finished_rollouts[0][1] = [some_sample(prompt, 1)]
    ledger.put_back(prompt)
    ledger.landed(prompt)
    ledger.accounting.check()
    assert ledger.accounting.returned == 1
    assert taken(ledger) == prompt
    assert ledger.restarted == {0}
    assert list(ledger.finished_rollouts[0]) == [1]


def test_a_restored_ledger_goes_on_where_the_saved_one_was() -> None:
    """Its counts, finished rollouts and failed attempts are the same, and its group in flight was returned."""
    ledger = ledger_of("kept", "dropped")
    prompt = taken(ledger)
    ledger.finished_rollouts[2][1] = [some_sample(prompt, 1)]
    ledger.failed_attempts[5] = 2
    restored = Ledger(DataBuffer(["a", "b", "c"], epochs=2))
    restored.restore(ManagerState.load(ledger.state(batches=0), restored.data_buffer))
    assert str(restored.accounting) == "3 prompts taken = 0 in batch + 1 dropped + 0 failed + 1 returned + 1 ready"
    assert restored.totals.to_dict() == ledger.totals.to_dict()
    assert (restored.failed_attempts, list(restored.finished_rollouts[2])) == ({5: 2}, [1])
    assert restored.ready == ledger.ready


@pytest.mark.parametrize("end", ["seal", "drop"])
def test_the_prompt_of_a_ready_group_is_done_when_the_group_leaves(end: str) -> None:
    """Until then a saved state includes it; afterwards it cannot be put back."""
    ledger = ledger_of("kept")
    (group,) = ledger.ready
    assert [number for _, number in ledger.data_buffer.save_state().leftovers] == [0]
    if end == "seal":
        ledger.seal([group])
    else:
        ledger.drop_ready([group], "too old")
    ledger.accounting.check()
    assert (ledger.ready, ledger.accounting.ready) == ([], 0)
    assert ledger.accounting.in_batch + ledger.accounting.dropped == 1
    with pytest.raises(ConfigError, match="put_back"):
        ledger.data_buffer.put_back([group.prompt])


def test_no_prompt_is_taken_from_an_exhausted_buffer() -> None:
    """Nothing is counted for it."""
    ledger = ledger_of("kept", "kept", "kept", "kept", "kept", "kept")
    before: Any = str(ledger.accounting)
    assert ledger.take(version=0) is None
    assert str(ledger.accounting) == before


def test_dropped_groups_are_counted_until_the_next_batch() -> None:
    """The manager tells the filter from this number whether the batch lacks groups."""
    ledger = ledger_of("dropped", "dropped", "kept")
    assert ledger.dropped_for_batch == 2
    ledger.seal(ledger.ready)
    assert ledger.dropped_for_batch == 0
