"""The law book of the group scheduler, section 5: broken laws are crashes.

Each test states one law. Changing a test here is a decision about what the project promises, not a repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.errors import (
    ConfigError,
    RolloutsError,
    TokenMismatchError,
)
from rollouts.runs.journal import Journal, read_journal
from rollouts.runs.resume import state_of_history
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Group,
    Prompt,
    Sample,
)
from tests.manager_semantics.world import (
    Till,
    _raise,
    answer_at_once,
    failed_groups,
    manager_of,
    of_name,
    only_bad_in_group_zero,
    questions,
)


@pytest.mark.parametrize(
    "error",
    [
        TokenMismatchError("ids differ"),
        ExceptionGroup("in a task group", [ValueError("in a sibling"), TokenMismatchError("ids differ")]),
    ],
    ids=of_name,
)
async def test_a_broken_law_stops_the_run(error: Exception) -> None:
    """5.1 Never retried, never counted as failed, also from inside a task group; its prompt goes back."""
    calls: Counter[int | None] = Counter()

    def broken(request: Prompt) -> Any:
        calls[request.index] += 1
        raise error

    till = Till(questions(50))
    manager = manager_of(only_bad_in_group_zero(broken), till)
    with pytest.raises(TokenMismatchError, match="ids differ"):
        await manager.generate_batch()
    assert max(calls.values()) == 1
    assert manager.accounting.failed == 0
    assert till.back[0] == 1
    manager.accounting.check()


async def test_an_accounting_that_does_not_add_up_stops_the_run() -> None:
    """5.1.1 At the latest when the manager closes."""
    manager = manager_of(answer_at_once)
    with pytest.raises(TokenMismatchError, match="the accounting does not add up"):
        async with manager:
            manager.accounting.taken += 1


async def test_a_config_error_stops_the_run() -> None:
    """5.2 An error that the user must correct is raised at once and not retried."""
    manager = manager_of(only_bad_in_group_zero(lambda request: _raise(ConfigError.of("tokenizer", None, "one"))))
    with pytest.raises(ConfigError, match="tokenizer: got None; expected one"):
        await manager.generate_batch()
    manager.accounting.check()


async def test_a_group_that_cannot_be_recorded_is_not_lost() -> None:
    """5.3 When ``on_group`` raises, the run stops; the group runs again without generating anything twice.

    That is without a log, where nothing else has the group.
    """
    calls: Counter[int | None] = Counter()
    reported: list[int] = []
    full = True

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        calls[prompts[0].index] += 1
        return await answer_at_once(prompts)

    def record(group: Group) -> None:
        if full and group.group_index == 1:
            raise OSError(28, "no space left on device")
        reported.append(group.group_index)

    manager = manager_of(generate, on_group=record, over_sampling_factor=1)
    with pytest.raises(Exception, match="recording with record raised OSError"):
        await manager.generate_batch()
    full = False
    batch = await manager.generate_batch()
    assert {sample.group_index for sample in batch} == {0, 1, 2}
    assert sorted(reported) == [0, 1, 2]
    assert calls[2] == calls[3] == 1
    assert not failed_groups(manager.ready_groups)


@pytest.mark.parametrize("outcome", ["kept", "dropped"])
async def test_a_group_that_the_log_has_counts_once(tmp_path: Path, outcome: str) -> None:
    """5.4 When ``on_group`` raises behind the log, the run stops too; the group is settled and never runs again."""
    failing, errors = 1, [OSError(28, "no space left on device")]

    async def keeps(samples: Sequence[Sample]) -> bool:
        return outcome == "kept" or samples[0].group_index != failing

    def record(group: Group) -> None:
        if group.group_index == failing and errors:
            raise errors.pop()

    with Journal(tmp_path) as journal:
        config = manager_of(answer_at_once, filter_fn=keeps, over_sampling_factor=1).config
        buffer = DataBuffer(questions(50))
        manager = AsyncRolloutManager(config, buffer, on_group=record, rollout_log=RunJournal(journal))
        with pytest.raises(RolloutsError, match="recording with record raised OSError"):
            await manager.generate_batch()
        batch = await manager.generate_batch()
        manager.accounting.check()
    assert (failing in {sample.group_index for sample in batch}) is (outcome == "kept")
    entries = [(entry.kind, entry.fields.get("group")) for entry in read_journal(tmp_path)]
    assert (entries.count(("taken", failing)), entries.count(("group", failing))) == (1, 1)
    history = RunHistory.read(tmp_path)
    state = state_of_history(history, DataBuffer(questions(50)), 2)
    assert attrs.asdict(state.accounting) == attrs.asdict(manager.accounting)
    assert history.totals.to_dict() == manager.run_metrics.to_dict()
