"""Samples with images: rows that have no place for them are refused, never made without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import PIL.Image
import pytest

from rollouts.dtypes import Image, ImageSpan
from rollouts.errors import ConfigError
from rollouts.training import Sample
from tests.trainer_samples import scored_groups


def with_image() -> Sample:
    """A scored sample whose prompt has an image."""
    sample = scored_groups(1, 1)[0]
    sample.images = (ImageSpan(Image.of(PIL.Image.new("RGB", (4, 3))), 0, 1),)
    return sample


def trl(sample: Sample) -> Any:
    from rollouts.integrations.trl import to_row

    return to_row(sample, 1.0)


def trl_rollout_func(sample: Sample) -> Any:
    from rollouts.integrations.trl import RolloutFunc
    from rollouts.training import RolloutConfig

    async def generate(prompts: Any) -> list[Sample]:
        return []

    return RolloutFunc(RolloutConfig(batch_size=1, generate_fn=generate), [])._row(sample, 1.0)


def tinker(sample: Sample) -> Any:
    from rollouts.integrations.tinker import datum_columns

    return datum_columns(sample, 1.0)


def nemo_rl(sample: Sample) -> Any:
    from rollouts.integrations.nemo_rl import to_message_log

    return to_message_log(sample)


def openrlhf(sample: Sample) -> Any:
    from rollouts.integrations.openrlhf import to_response

    return to_response(sample)


def rllm(sample: Sample) -> Any:
    from rollouts.integrations.rllm import to_episodes

    return to_episodes([sample])


@pytest.mark.parametrize("rows", [trl, trl_rollout_func])
def test_the_refusal_says_what_trl_lacks(rows: Callable[[Sample], Any]) -> None:
    """Neither of its trainers takes inputs of images with a rollout."""
    with pytest.raises(ConfigError, match="pixel_values only of the images of its data set"):
        rows(with_image())


def own_batch(sample: Sample) -> Any:
    from rollouts.training.batch import collate

    return collate([sample])


def own_packed_batch(sample: Sample) -> Any:
    from rollouts.training.batch import collate_packed

    return collate_packed([sample])


NEEDS = {"rllm": "rllm"}


@pytest.mark.parametrize(
    "rows",
    [
        trl,
        trl_rollout_func,
        tinker,
        nemo_rl,
        openrlhf,
        rllm,
        own_batch,
        own_packed_batch,
    ],
)
def test_a_row_without_its_images_is_refused(rows: Callable[[Sample], Any]) -> None:
    """By the sample and the trainer; the same sample without images is a row."""
    if rows.__name__ in NEEDS:
        pytest.importorskip(NEEDS[rows.__name__])
    sample = with_image()
    with pytest.raises(ConfigError, match=r"\.images: got '1 images'; expected .* has no field for it"):
        rows(sample)
    sample.images = ()
    rows(sample)
