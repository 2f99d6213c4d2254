"""Scored samples with images, with the ids and the arrays of a real processor."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from rollouts.dtypes import Message, Prompt, StopReason
from rollouts.renderer import Renderer
from rollouts.renderer.images import ImageProcessor
from rollouts.training import Sample, trajectory_to_samples
from rollouts.trajectory import Trajectory
from tests.processors import CHATML, FAMILIES, build_processor, load_tokenizer_of, picture
from tests.trainer_samples import completion

SHOWN = ((1,), (2, 1), (1, 0, 2), (3,))
"""For each rollout how many images it shows before each of its replies."""


@attrs.frozen
class VisionModel:
    """A tokenizer with the real processor of a family."""

    tokenizer: Any
    processor: Any
    template: str
    renderer: Renderer
    images: ImageProcessor
    placeholder: int
    """The id of an image."""


@functools.cache
def vision_model(name: str, small_tokenizer_folder: Callable[[str], Path]) -> VisionModel:
    """The model of a family, built once."""
    family = FAMILIES[name]
    tokenizer = load_tokenizer_of(family, str(small_tokenizer_folder("qwen3")))
    template = CHATML.replace("PLACEHOLDER", family.written.replace("\n", "\\n"))
    processor = build_processor(family, tokenizer)
    renderer = Renderer(tokenizer, chat_template=template, images=processor)
    assert renderer.images is not None
    placeholder = tokenizer.convert_tokens_to_ids(processor.image_token)
    return VisionModel(tokenizer, processor, template, renderer, renderer.images, placeholder)


def image_samples(
    model: VisionModel, shown: Sequence[Sequence[int]] = SHOWN, *, unanswered: Sequence[int] = (1,)
) -> list[Sample]:
    """One group of a rollout for each entry of ``shown``; ``unanswered`` are those that end in an image of context."""
    renderer = model.renderer
    samples = []
    for index, counts in enumerate(shown):
        rng, trajectory, sampled = random.Random(index), Trajectory(), list[int]()
        for turn, count in enumerate([*counts, *([1] if index in unanswered else [])]):
            pictures = [picture(30 + 17 * index, 61 + 9 * number, seed=turn) for number in range(count)]
            new = [Message("user", (f"Look {turn}: ", *pictures, "."))]
            ids = renderer.bridge(trajectory.messages, new, tail=sampled) if turn else renderer.opening(new)
            trajectory.add_context(ids, new, renderer.image_spans(ids, new))
            if turn < len(counts):
                text = rng.choice(["yes", "no", "a long answer"])
                sampled = renderer.encode(f"{text}<|im_end|>").tolist()
                trajectory.add_reply(completion(trajectory, sampled, rng, "3"), Message("assistant", text))
        trajectory.seal(StopReason.MAX_TOKENS if index in unanswered else StopReason.TASK_COMPLETED)
        prompt = Prompt(trajectory.messages[:1], label="yes", group_index=0, index=index)
        (sample,) = trajectory_to_samples(
            [trajectory], prompt, lambda tokens: "reply", image_inputs=model.images.inputs
        )
        sample.reward, sample.rollout_id = rng.randrange(17) / 16, index
        samples.append(sample)
    return samples
