"""Images of coloured shapes, questions about them, and a tool that returns a part of the image.

Invariant: the same seed gives the same scenes and answers. Shapes do not touch, so that each can be counted. The label
of a prompt is the number that answers its question.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from rollouts.base.extras import install_command
from rollouts.dtypes import Image, Message, Prompt
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.errors import ConfigError

__all__ = ["COLOURS", "SHAPES", "Shape", "VisualEnvironment", "visual_prompts"]

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
_GRID = 6
"""Cells in a row and in a column; a cell has at most one shape."""
_SHORTEST_SIDE = 0.05
"""The shortest side of a part that the tool shows, as a share of the image."""


@attrs.frozen
class Shape:
    """One shape of a scene, in a cell of the grid."""

    colour: str
    kind: str
    column: int
    row: int


def visual_prompts(seed: int, *, size: int = 240, shapes: int = 12) -> Iterator[Prompt]:
    """Yield scenes with a question without end; ``metadata["shapes"]`` describes the scene.

    Args:
        seed: of the scenes.
        size: pixels of the image's width and height.
        shapes: the most shapes of a scene.

    Raises:
        ConfigError: the image is too small for its cells, or has too few cells for the shapes.
    """
    if size < 4 * _GRID:
        raise ConfigError.of("size", size, f"at least {4 * _GRID} pixels")
    if not 1 <= shapes <= _GRID * _GRID:
        raise ConfigError.of("shapes", shapes, f"1 to {_GRID * _GRID}")
    chance = random.Random(seed)
    while True:
        cells = chance.sample(range(_GRID * _GRID), chance.randint(1, shapes))
        scene = [Shape(chance.choice([*COLOURS]), chance.choice(SHAPES), cell % _GRID, cell // _GRID) for cell in cells]
        asked = chance.choice(scene) if chance.random() < 0.8 else Shape(chance.choice([*COLOURS]), SHAPES[0], 0, 0)
        question, count = _question(chance.choice(["both", "colour", "kind"]), asked, scene)
        yield Prompt(
            [Message("user", [_drawn(scene, size), f"{question} Finish with: The answer is N."])],
            label=str(count),
            metadata={"shapes": [attrs.asdict(shape) for shape in scene]},
        )


def _question(about: str, asked: Shape, scene: Sequence[Shape]) -> tuple[str, int]:
    colour = asked.colour if about in ("both", "colour") else None
    kind = asked.kind if about in ("both", "kind") else None
    found = [shape for shape in scene if colour in (None, shape.colour) and kind in (None, shape.kind)]
    named = " ".join(word for word in (colour, f"{kind}s" if kind else "shapes") if word)
    return f"How many {named} are in the image?", len(found)


def _drawn(scene: Sequence[Shape], size: int) -> Image:
    try:
        import PIL.Image  # part of an extra
        import PIL.ImageDraw
    except ImportError as error:
        raise ConfigError(f"visual: Pillow is not installed; {install_command('images')}") from error

    picture = PIL.Image.new("RGB", (size, size), (255, 255, 255))
    draw = PIL.ImageDraw.Draw(picture)
    cell = size / _GRID
    for shape in scene:
        left, top = shape.column * cell + cell * 0.15, shape.row * cell + cell * 0.15
        right, bottom = left + cell * 0.7, top + cell * 0.7
        colour = COLOURS[shape.colour]
        if shape.kind == "circle":
            draw.ellipse((left, top, right, bottom), fill=colour)
        elif shape.kind == "square":
            draw.rectangle((left, top, right, bottom), fill=colour)
        else:
            draw.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)
    return Image.of(picture)


class VisualEnvironment(ToolEnvironment):
    """The first image of the prompt, and a tool that shows a part of it, enlarged. A reply without a call ends it."""

    system_prompt = "Answer the question about the image. Look closer with the tool where it helps."

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        images = [image for message in prompt.messages for image in message.images]
        if not images:
            raise ConfigError.of("prompt", prompt.prompt, "a message with an image")
        self.image = images[0]
        return await super().start(prompt)

    @tool
    def zoom(self, left: float, top: float, right: float, bottom: float) -> Any:
        """Show a part of the image, enlarged; the edges are shares of its width and height, from 0 to 1."""
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise ValueError("expected 0 <= left < right <= 1 and 0 <= top < bottom <= 1")
        if min(right - left, bottom - top) < _SHORTEST_SIDE:
            raise ValueError(f"expected a part of at least {_SHORTEST_SIDE} of the image in each direction")
        width, height = self.image.width, self.image.height
        edges = (round(left * width), round(top * height), round(right * width), round(bottom * height))
        part = self.image.to_pil().crop(edges)
        factor = min(width / part.width, height / part.height)
        return part.resize((max(1, round(part.width * factor)), max(1, round(part.height * factor))))
