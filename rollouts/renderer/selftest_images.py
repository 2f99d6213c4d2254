"""The steps of the self-test with images: openings and bridges, compared with the ids and inputs of the processor.

Invariant: a step is ``exact`` only if the ids and the inputs equal the processor's for the whole text, or if the
template refuses images there. This module does not know model families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from rollouts.dtypes import Message, Tool
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError
from rollouts.renderer.bridge import STRATEGIES, bridge_text
from rollouts.renderer.history_diff import shared
from rollouts.renderer.images import ImageProcessor, example_images
from rollouts.renderer.model_format import ModelFormat, images_of
from rollouts.renderer.selftest import Step, Verdict, tool_turn

__all__ = ["run_image_steps"]


def run_image_steps(model: ModelFormat, images: ImageProcessor, strategy: str, tools: Sequence[Tool]) -> Iterator[Step]:
    """Compare openings and bridges with images with what the processor itself gives for the whole text.

    A template that leaves out the images of tool results, or raises on them, is not refused for that: such results are
    refused when they occur.
    """
    template = model.template
    first, second, third = example_images()
    opening = [Message("user", ("userone", first, "and", second))]
    history = [*opening, Message("assistant", "finalone")]
    turns = {"image, user": (history, [Message("user", (third, "usertwo", first))])}
    if tools:
        turn = tool_turn("", tools, 1, 1, reasons=False)
        result = attrs.evolve(turn.new[0], content=("resultone", third))
        turns["image, tool"] = ([*opening, turn.reply], [result])
    yield Step("image, opening", *_image_verdict(model, images, template.render(opening, tools), opening))
    for name, (before, new) in turns.items():
        try:
            text = template.render([*before, *new], tools)
            bridge = bridge_text(template, STRATEGIES[strategy], before, new, tools, model.stops)
        except ConfigError as error:
            yield Step(name, "exact", f"images are refused here: {error}")
            continue
        if name == "image, tool" and bridge.count(images.placeholder) != 1:
            yield Step(name, "exact", "images are refused here: the template leaves them out")
            continue
        yield Step(name, *_image_verdict(model, images, text, [*before, *new], (bridge, new)))


def _image_verdict(
    model: ModelFormat,
    images: ImageProcessor,
    text: str,
    messages: Sequence[Message],
    bridge: tuple[str, Sequence[Message]] | None = None,
) -> tuple[Verdict, str]:
    """Compare ids and inputs with those of the processor; ``bridge`` is the end of the text, with its messages."""
    all_images = images_of(messages)
    try:
        expected, inputs = images.processor_ids(text, all_images)
        ids = model.encode(text, all_images, counted=False).tolist()
        joined = images.inputs(all_images)
        if bridge is not None:
            tail = model.encode(bridge[0], images_of(bridge[1]), counted=False)
            ids = ids[: -len(tail)] + tail.tolist()
    except ConfigError as error:
        return "refused", str(error)
    if ids != expected:
        at = shared(ids, expected)
        return "refused", f"the processor gives the ids …{expected[at : at + 5]} where ours are …{ids[at : at + 5]}"
    if inputs.keys() != joined.keys() or not all(np.array_equal(joined[name], inputs[name]) for name in joined):
        return "refused", f"the processor gives other {', '.join(inputs)} for several images than for each alone"
    return "exact", ""
