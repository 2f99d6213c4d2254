"""The rows of a data set with images, and one reply to each.

Invariant: each ``<image>`` in a problem is one of the row's images, in order, and none is left over. A path in a row is
read only from the folder that the caller allows. The reward is :func:`rollouts.rewards.boxed_math`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from rollouts.dtypes import Image, Message, Prompt
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.training.prompt_files import Columns, rows_of

__all__ = ["Geo3kEnvironment", "load_geo3k"]

PLACEHOLDER = "<image>"
_EXPECTED = "an object with images (a list), problem (text with one <image> for each) and answer"


class Geo3kEnvironment(SingleTurnEnvironment):
    """One reply with the reasoning and the answer."""

    def __init__(self) -> None:
        super().__init__(system_prompt="Solve the problem step by step. Finish with the final answer in \\boxed{}.")


def load_geo3k(
    source: str, *, folder: Path | None = None, limit: int | None = None, **columns: Unpack[Columns]
) -> list[Prompt]:
    """Load rows of ``images``, ``problem`` and ``answer``.

    An image is an object with ``bytes`` (as Parquet files of the Hugging Face hub have it), a ``data:`` URL, or a path.

    Args:
        source: as for :func:`~rollouts.training.prompt_files.rows_of`.
        folder: where paths of images start, and the only folder that is read; without it, paths are refused.
        limit: number of rows to take, from the start.
        columns: names of the columns, as for :func:`rollouts.training.load_prompts`.

    Raises:
        ConfigError: a missing file, or a row of another shape, with its number.
    """
    prompts: list[Prompt] = []
    for place, row in rows_of(source, **columns):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(_prompt(row, place, folder))
    if not prompts:
        raise ConfigError.of("data", str(source), "at least one row")
    return prompts


def _prompt(row: Any, place: str, folder: Path | None) -> Prompt:
    if not isinstance(row, Mapping):
        raise ConfigError.of(place, row, _EXPECTED)
    given = row.get("images")
    problem, answer = row.get("prompt", row.get("problem")), row.get("label", row.get("answer"))
    if not isinstance(given, list) or not isinstance(problem, str) or not isinstance(answer, str | int | float):
        raise ConfigError.of(place, row, _EXPECTED)
    texts = problem.split(PLACEHOLDER)
    if len(texts) != len(given) + 1:
        raise ConfigError.of(f"{place}: problem", len(texts) - 1, f"{len(given)} times {PLACEHOLDER}, one an image")
    content: list[str | Image] = [texts[0]]
    for number, (image, text) in enumerate(zip(given, texts[1:], strict=True)):
        try:
            content += [_image(image, folder), text]
        except ConfigError as error:
            raise ConfigError(f"{place}: images[{number}]: {error}") from None
    return Prompt([Message("user", content)], label=str(answer))


def _image(given: Any, folder: Path | None) -> Image:
    if isinstance(given, Mapping):
        given = given["bytes"] if given.get("bytes") is not None else given.get("path")
    if not isinstance(given, str) or given.startswith("data:"):
        return Image.of(given)
    if folder is None:
        raise ConfigError.of("path", given, "bytes or a data: URL; folder=DIR allows the paths of a folder")
    path = (folder / given).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError.of("path", given, f"a file inside {folder}")
    return Image.of(path)
