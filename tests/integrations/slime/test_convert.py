"""Conversion between our samples and slime's, and the batch of slime's trainer, computed again from its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import VersionSpan
from rollouts.errors import ConfigError
from rollouts.integrations.slime.convert import (
    Reading,
    check_training_batch,
    from_slime,
    leaves,
    to_slime,
)
from rollouts.integrations.slime.extras import Replay
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.returned_samples import versions_of
from rollouts.training import Prompt, Sample, Status
from tests.integrations.slime.launches import made_sample

PROMPT = Prompt("two and two", label="4", metadata={"row": 7}, group_index=3, index=13)


def placed(**fields: Any) -> Sample:
    values = {"reward": 1.0, "group_index": 3, "index": 13, "rollout_id": 13, **fields}
    return made_sample(PROMPT, **values)


def test_the_response_columns_are_the_tail_of_ours() -> None:
    """The first prompt is cut off; a tool's answer between two replies stays, masked, with logprob 0."""
    sample = placed()
    made = to_slime(sample)
    assert made.response_length == 10
    assert made.tokens == sample.tokens
    assert made.loss_mask == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert made.rollout_log_probs == [-0.5, -0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5, -0.5]
    assert made.tokens[-made.response_length :] == sample.tokens[3:]
    assert (made.group_index, made.index, made.rollout_id) == (3, 13, 13)
    assert (made.response, made.label, made.metadata) == ("reply 13/0", "4", {"row": 7})


def test_the_fields_of_the_template_are_copied() -> None:
    """slime's indices, its own attributes and per-sample paths survive; the template itself is not changed."""
    template = records().sample(group_index=90, index=900, prompt="asked", label="x", train_metadata={"loss": "a"})
    template.custom = "mine"
    made = to_slime(placed(), template=template, session="key")
    assert (made.group_index, made.index, made.rollout_id) == (90, 900, 900)
    assert (made.prompt, made.label, made.train_metadata, made.custom) == ("asked", "x", {"loss": "a"}, "mine")
    assert made.session_id == "key"
    assert (template.tokens, template.metadata, template.reward) == ([], {}, None)


def test_a_teachers_column_of_a_template_is_not_copied() -> None:
    """It is of the tokens of an earlier rollout, whose group is played again. The data source's stays, as in slime."""
    played = records().sample(prompt="asked", response_length=10, teacher_log_probs=[-1.0] * 10)
    assert to_slime(placed(), template=played).teacher_log_probs is None
    assert played.teacher_log_probs == [-1.0] * 10
    given = records().sample(prompt="asked", teacher_log_probs=[-0.5])
    assert to_slime(placed(), template=given).teacher_log_probs == [-0.5]


def test_fields_for_trainers_reach_slime_or_are_refused() -> None:
    """A multiplier of 0 removes the sample, a teacher's logprobs are as wide as the response; others have no field."""
    made = to_slime(placed(loss_multiplier=0, teacher_log_probs=[-0.25] * 13))
    assert made.remove_sample
    assert made.teacher_log_probs.tolist() == [-0.25] * 10
    assert not to_slime(placed()).remove_sample
    for name, value in (("loss_multiplier", 0.5), ("advantages", [0.0] * 13)):
        with pytest.raises(ConfigError, match=f"{name}.*slime has no field for it"):
            to_slime(placed(**{name: value}))


def test_there_and_back_again() -> None:
    """Tokens, mask and logprobs come back as wide as the tokens."""
    sample = placed()
    back = from_slime(to_slime(sample), PROMPT)
    assert (back.tokens, back.loss_mask, back.rollout_log_probs) == (
        sample.tokens,
        sample.loss_mask,
        sample.rollout_log_probs,
    )
    assert (back.reward, back.status, back.metadata) == (1.0, Status.COMPLETED, {"row": 7})


def test_tokens_of_earlier_versions_can_be_masked() -> None:
    """``--mask-offpolicy-in-partial-rollout``: only tokens of the last version are trained."""
    sample = placed(versions=[VersionSpan("1", 3, 7), VersionSpan("1", 9, 11), VersionSpan("2", 11, 13)])
    made = to_slime(sample, mask_earlier_versions=True)
    assert made.loss_mask == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert made.rollout_log_probs == to_slime(sample).rollout_log_probs
    assert made.weight_versions == ["1", "1", "2"]
    assert versions_of(sample, mask_earlier_versions=False) == ["1", "1", "2"]
    assert versions_of(sample, mask_earlier_versions=True) == ["2"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [0] * 13, "versions": []}, "at least one sampled token"),
        ({"loss_mask": [1] * 13, "versions": []}, "at least one prompt token"),
        ({"rollout_log_probs": None}, "a finite logprob"),
        ({"reward": None}, "a finite number"),
        ({"reward": float("inf")}, "a finite number"),
    ],
)
def test_a_sample_that_slime_cannot_process_is_refused(fields: dict[str, Any], message: str) -> None:
    """The error names the sample and the field."""
    with pytest.raises(ConfigError, match=message):
        to_slime(placed(**fields))


def _unequal(groups: list[list[Any]]) -> None:
    groups[1].pop()


def _fewer(groups: list[list[Any]]) -> None:
    groups.pop()


def _mixed(groups: list[list[Any]]) -> None:
    groups[1][0] = [groups[1][0]]


def _shared(groups: list[list[Any]]) -> None:
    groups[1][0].rollout_id = groups[0][0].rollout_id


def _unnumbered(groups: list[list[Any]]) -> None:
    groups[0][1].rollout_id = None


def _text_status(groups: list[list[Any]]) -> None:
    groups[0][1].status = "completed"


def _aborted(groups: list[list[Any]]) -> None:
    groups[0][1].status = records().sample.Status.ABORTED


def _unrewarded(groups: list[list[Any]]) -> None:
    groups[0][1].reward = None


def _short_mask(groups: list[list[Any]]) -> None:
    groups[1][1].loss_mask.pop()


def _no_logprobs(groups: list[list[Any]]) -> None:
    groups[1][1].rollout_log_probs = None


@pytest.mark.parametrize(
    "harm",
    [
        _unequal,
        _fewer,
        _mixed,
        _shared,
        _unnumbered,
        _text_status,
        _aborted,
        _unrewarded,
        _short_mask,
        _no_logprobs,
    ],
)
def test_a_damaged_batch_is_refused(harm: Callable[[list[list[Any]]], None]) -> None:
    """Each of these is a crash in slime, or a silent error."""
    groups = [[to_slime(placed(index=i, rollout_id=i)) for i in (2 * group, 2 * group + 1)] for group in range(2)]
    check_training_batch(groups, (2, 2), Reading(), Replay())
    harm(groups)
    with pytest.raises(ConfigError):
        check_training_batch(groups, (2, 2), Reading(), Replay())


# -- what slime's trainer makes of a batch, derived from the contract -------------------------------------------------


def positional(rewards: list[float], groups: int, n: int) -> list[float]:
    """slime's own normalisation: rows of ``n`` if the count fits, else one row."""
    rows = np.array(rewards, np.float32)
    rows = rows.reshape(-1, n) if len(rewards) == groups * n else rows.reshape(1, -1)
    centred = rows - rows.mean(axis=1, keepdims=True)
    flat: list[float] = (centred / (rows.std(axis=1, ddof=1, keepdims=True) + 1e-6)).ravel().tolist()
    return flat


def train_data(samples: list[Any], groups: int, n: int) -> dict[str, list[Any]]:
    """The columns that slime's trainer gets."""
    ids = [sample.rollout_id for sample in samples]
    sums: dict[int, int] = {}
    for sample, number in zip(samples, ids, strict=True):
        sums[number] = sums.get(number, 0) + sum(sample.loss_mask)
    return {
        "tokens": [sample.tokens for sample in samples],
        "rewards": positional([sample.reward for sample in samples], groups, n),
        "rollout_ids": ids,
        "rollout_mask_sums": [sums[number] for number in ids],
        "truncated": [int(sample.status is records().sample.Status.TRUNCATED) for sample in samples],
    }


def test_equal_groups_survive_positional_normalisation() -> None:
    """Three groups of four: rewards {0,1}, {1,2}, {2,3} become ±0.866; one sample less would ruin all of them."""
    rewards = [group + member % 2 for group in range(3) for member in range(4)]
    samples = [
        to_slime(placed(index=i, rollout_id=i, group_index=i // 4, reward=float(r))) for i, r in enumerate(rewards)
    ]
    normalised = train_data(samples, 3, 4)["rewards"]
    assert np.abs(normalised) == pytest.approx(np.full(12, 0.8660), abs=1e-4)
    assert np.abs(train_data(samples[1:], 3, 4)["rewards"]) != pytest.approx(np.full(11, 0.8660), abs=1e-2)


def test_forks_share_the_denominator_of_their_rollout() -> None:
    """``rollout_mask_sums`` of siblings is their common sum, so a rollout weighs the same however it forks."""
    forks = [to_slime(placed(reply=reply, branch=branch)) for branch, reply in enumerate((2, 5))]
    alone = to_slime(placed(index=14, rollout_id=14))
    data = train_data([*forks, alone], 1, 2)
    assert data["rollout_ids"] == [13, 13, 14]
    assert data["rollout_mask_sums"] == [14, 14, 8]


def test_leaves_go_through_any_nesting() -> None:
    """Groups of samples, or groups of rollouts of samples."""
    assert list(leaves([[1, 2], [3]])) == list(leaves([[[1], [2, 3]]])) == [1, 2, 3]


def test_a_sample_of_another_length_is_named() -> None:
    """The message has the sample's index, so that it can be found in a dump."""
    given = to_slime(placed())
    given.index, given.loss_mask = 17, [1]
    with pytest.raises(ConfigError, match=r"^slime sample 17: Sample: got .*loss_mask"):
        from_slime(given, PROMPT)
