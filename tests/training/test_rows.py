"""Views of samples as trainers take them: rows end in a sampled token, versions are numbers, branches are in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import pytest

from rollouts.dtypes import Image, ImageSpan, VersionSpan
from rollouts.errors import ConfigError
from rollouts.training import Sample
from rollouts.training.rows import (
    by_rollout,
    check_fields,
    check_one_branch,
    image_column,
    int_version,
    reward_of,
    row_columns,
    row_images,
    segments,
    split,
    trimmed,
    turn_column,
    version_column,
)
from rollouts.trajectory import CompletionRecord
from tests.processors import picture


def a_sample(tail: int = 0, **fields: Any) -> Sample:
    """Prompt of 2, reply of 2, tool result of 1, reply of 1; then ``tail`` tokens that no reply answered."""
    width = 6 + tail
    sound: dict[str, Any] = {
        "tokens": [*range(10, 10 + width)],
        "loss_mask": [0, 0, 1, 1, 0, 1] + [0] * tail,
        "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0] + [0.0] * tail,
        "versions": [VersionSpan("3", 2, 4), VersionSpan("4", 5, 6)],
        "completions": [
            CompletionRecord("a", 2, 4, "stop", 0, 0, 0.1),
            CompletionRecord("b", 5, 6, "length", 0, 0, 0.1),
        ],
        "reward": 1.0,
        "status": "truncated",
    }
    return Sample(**{**sound, **fields}).pack()


def test_a_row_ends_in_a_sampled_token() -> None:
    """A bridge that no reply answered is cut from every column; what belongs to the replies stays."""
    advantages = np.arange(9, dtype=np.float32)
    sample = a_sample(3, advantages=advantages, teacher_log_probs=[-1.0] * 9)
    row = trimmed(sample)
    assert row.tokens == [10, 11, 12, 13, 14, 15]
    assert row.loss_mask == [0, 0, 1, 1, 0, 1]
    assert row.rollout_log_probs == [0.0, 0.0, -0.5, -0.25, 0.0, -1.0]
    assert row.advantages == [0, 1, 2, 3, 4, 5]
    assert row.teacher_log_probs == [-1.0] * 6
    assert (row.versions, row.completions) == (sample.versions, sample.completions)
    assert (row.reward, row.status) == (sample.reward, sample.status)
    assert len(sample) == 9
    assert np.shares_memory(row.token_column, sample.token_column)
    assert trimmed(row) is row


def test_a_row_without_a_sampled_token_is_refused() -> None:
    """There is nothing to train, and no trainer accepts an empty response."""
    with pytest.raises(ConfigError, match=r"loss_mask.*expected at least one sampled token"):
        trimmed(Sample(tokens=[1, 2]))


def test_a_row_splits_at_its_first_sampled_token() -> None:
    """Prompt and response are views of the columns, without the unanswered end."""
    sample = a_sample(2)
    row = split(sample)
    assert (row.prompt.tolist(), row.response.tolist()) == ([10, 11], [12, 13, 14, 15])
    assert row.mask.tolist() == [True, True, False, True]
    assert row.logprobs.tolist() == [-0.5, -0.25, 0.0, -1.0]
    assert (row.prompt.dtype, row.mask.dtype, row.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert np.shares_memory(row.response, sample.token_column)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": "failed"}, r"status.*expected a rollout that ended"),
        ({"status": "aborted"}, r"status.*expected a rollout that ended"),
        ({"rollout_log_probs": None}, r"rollout_log_probs.*expected a finite logprob for each sampled token"),
        ({"loss_mask": [1, 1, 1, 1, 1, 1], "versions": []}, r"tokens.*at least one prompt token"),
    ],
)
def test_a_row_that_no_trainer_takes_is_refused(fields: dict[str, Any], expected: str) -> None:
    """The error names the sample and the field."""
    with pytest.raises(ConfigError, match=expected):
        split(a_sample(**fields))


def test_the_version_of_a_row_is_the_oldest() -> None:
    """Each version is a decimal number; the staleness of a row is that of its oldest token."""
    assert int_version(a_sample()) == 3
    assert version_column(a_sample(1)).tolist() == [-1, -1, 3, 3, -1, 4]
    assert version_column(a_sample()).dtype == np.int64


@pytest.mark.parametrize("name", ["default", "3.5", "-1", "³", ""])
def test_a_version_that_is_no_number_is_refused(name: str) -> None:
    """A plain server names its weights "default"; no number is made up for it, and the argument ``version`` helps."""
    sample = a_sample(versions=[VersionSpan(name, 2, 4), VersionSpan("4", 5, 6)])
    for read in (int_version, version_column):
        with pytest.raises(ConfigError, match=r"versions.*expected decimal numbers, or version="):
            read(sample)
    assert int_version(sample, 7) == 7
    assert version_column(sample, 7).tolist() == [-1, -1, 7, 7, -1, 7]
    with pytest.raises(ConfigError, match="version"):
        int_version(sample, -1)


def test_a_row_without_versions_needs_one() -> None:
    """A sample of a custom generate function may have none."""
    with pytest.raises(ConfigError, match="versions"):
        int_version(a_sample(versions=[]))
    assert int_version(a_sample(versions=[]), 0) == 0


def test_turn_ids_are_the_turns_of_the_completions() -> None:
    """-1 on context; a completion that continues a turn has its number; without completions the runs count."""
    records = [
        CompletionRecord("a", 1, 3, "stop", 0, 0, 0.1),
        CompletionRecord("b", 4, 5, "stop", 0, 0, 0.1, continues=True),
        CompletionRecord("c", 6, 8, "stop", 0, 0, 0.1),
    ]
    sample = Sample(tokens=[*range(9)], loss_mask=[0, 1, 1, 0, 1, 0, 1, 1, 0], completions=records)
    assert turn_column(sample).tolist() == [-1, 0, 0, -1, 0, -1, 1, 1]
    sample.completions = records[1:]
    assert turn_column(sample).tolist() == [-1, -1, -1, -1, 0, -1, 1, 1], "of a branch that begins inside a turn"
    sample.completions = []
    assert turn_column(sample).tolist() == [-1, 0, 0, -1, 1, -1, 2, 2]


def test_the_columns_of_a_row_are_those_that_a_trainer_can_take() -> None:
    """As wide as the row; a sample that it cannot take is refused, as by ``split`` and ``check_fields``."""
    sample = a_sample(3)
    row = row_columns(sample, "It", "advantages")
    assert (row.tokens.tolist(), row.mask.tolist()) == (sample.tokens[:6], [False, False, True, True, False, True])
    assert row.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, -1.0]
    assert np.shares_memory(row.tokens, sample.token_column)
    with pytest.raises(ConfigError, match=r"status.*expected a rollout that ended"):
        row_columns(a_sample(status="failed"), "It")
    with pytest.raises(ConfigError, match=r"advantages.*It has no field for it"):
        row_columns(a_sample(advantages=[0.0] * 6), "It", "advantages")


def test_a_trainer_without_forks_refuses_branches() -> None:
    """Each would count as a rollout of the group."""
    check_one_branch([a_sample(rollout_id=0), a_sample(rollout_id=1), a_sample(), a_sample()], "It")
    with pytest.raises(ConfigError, match="got '2 branches'; expected one row for each rollout: It takes no forks"):
        check_one_branch([a_sample(rollout_id=1), a_sample(rollout_id=1)], "It")


def test_branches_of_a_rollout_are_together_and_in_order() -> None:
    """Rollouts come in the order of their first sample; a sample without ``rollout_id`` is a separate rollout."""
    first, other, second, loose = (a_sample(rollout_id=number) for number in (5, 2, 5, None))
    grouped = by_rollout([first, loose, other, second, loose])
    assert [[id(sample) for sample in samples] for samples in grouped] == [
        [id(first), id(second)], [id(loose)], [id(other)], [id(loose)]
    ]  # fmt: skip


def test_segments_are_the_runs_of_the_mask() -> None:
    """They cover the row without its unanswered end."""
    assert segments(a_sample(2)) == [(0, 2, False), (2, 4, True), (4, 5, False), (5, 6, True)]
    assert segments(a_sample(loss_mask=[1] * 6, versions=[])) == [(0, 6, True)]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_row_without_a_reward_is_refused(reward: float | None) -> None:
    """The trainer would compute with it in silence."""
    assert reward_of(a_sample()) == 1.0
    sample = a_sample()
    sample.reward = reward
    with pytest.raises(ConfigError, match=r"reward.*expected a finite number"):
        reward_of(sample)


@pytest.mark.parametrize("name", ["loss_multiplier", "advantages", "teacher_log_probs", "images"])
def test_a_field_that_a_trainer_lacks_is_refused(name: str) -> None:
    """A weight, advantages or logprobs that a trainer has no field for are never lost in silence."""
    values: dict[str, Any] = {"loss_multiplier": 0.0, "advantages": [0.0] * 6, "teacher_log_probs": [0.0] * 6}
    values["images"] = [ImageSpan(picture(2, 2), 0, 1)]
    check_fields(a_sample(), "verl", name)
    check_fields(a_sample(**{name: values[name]}), "verl")
    with pytest.raises(ConfigError, match=rf"{name}.*verl has no field for it"):
        check_fields(a_sample(**{name: values[name]}), "verl", name)


def test_a_trimmed_sample_keeps_its_images_and_what_makes_their_tensors() -> None:
    """Those of the tokens that are left."""
    image = Image.of(PIL.Image.new("RGB", (4, 3)))
    sample = a_sample(tail=2, images=[ImageSpan(image, 0, 1), ImageSpan(image, 6, 8)])
    sample.image_inputs = lambda images: {"count": np.array([len(images)])}
    cut = trimmed(sample)
    assert cut.images == (ImageSpan(image, 0, 1),)
    assert cut.multimodal_train_inputs == {"count": np.array([1])}


def test_the_arrays_of_a_row_are_those_of_its_images() -> None:
    """Images behind the last sampled token are left out, as their ids are; a row of text has no arrays."""
    first, second = picture(4, 3), picture(5, 2)
    sample = a_sample(tail=2, images=[ImageSpan(first, 0, 1), ImageSpan(second, 4, 5), ImageSpan(first, 6, 8)])
    sample.image_inputs = lambda images: {"width": np.array([image.width for image in images])}
    assert {name: array.tolist() for name, array in row_images(sample).items()} == {"width": [4, 5]}
    assert row_images(a_sample(tail=2)) == {}
    assert row_images(a_sample(tail=2, images=[ImageSpan(first, 6, 8)])) == {}


def test_a_row_that_ends_inside_an_image_is_refused() -> None:
    """It would have placeholder ids without their image: such an id was sampled."""
    sample = a_sample(tail=2, images=[ImageSpan(picture(4, 3), 5, 7)])
    sample.image_inputs = lambda images: {"count": np.array([len(images)])}
    with pytest.raises(ConfigError, match=r"images: got \(5, 7\); expected .* the end of the row, 6"):
        row_images(sample)


def test_arrays_that_a_trainer_does_not_pass_on_are_refused() -> None:
    """It knows some names, and the model would compute without the others."""
    sample = a_sample(images=[ImageSpan(picture(4, 3), 0, 2)])
    sample.image_inputs = lambda images: {"pixel_values": np.zeros((1, 3)), "image_sizes": np.zeros((1, 2))}
    assert row_images(sample, "verl", "pixel_values", "image_sizes").keys() == {"pixel_values", "image_sizes"}
    with pytest.raises(
        ConfigError, match=r"multimodal_train_inputs: got \['image_sizes', .*pixel_values: verl passes no others"
    ):
        row_images(sample, "verl", "pixel_values")
    assert row_images(a_sample(), "verl", "pixel_values") == {}


def test_the_ids_of_images_are_marked() -> None:
    """As wide as the row: an image after the last sampled token is left out."""
    spans = [ImageSpan(picture(4, 3), 0, 1), ImageSpan(picture(4, 3), 4, 5), ImageSpan(picture(4, 3), 6, 8)]
    assert image_column(a_sample(tail=2, images=spans)).astype(int).tolist() == [1, 0, 0, 0, 1, 0]
