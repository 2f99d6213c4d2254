"""Visual tasks: generated scenes and their labels, the tool that zooms, and published rows with images."""

from __future__ import annotations

import base64
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import PIL.Image
import pytest

from rollouts.dtypes import Image, Message, Prompt
from rollouts.errors import ConfigError
from rollouts.recipes.environments.geo3k import load_geo3k
from rollouts.recipes.environments.visual import VisualEnvironment, visual_prompts
from rollouts.recipes.environments.visual.task import COLOURS
from rollouts.testing.playing import calling, play

SCENES = list(islice(visual_prompts(3, size=120), 60))


def test_the_same_seed_gives_the_same_scenes() -> None:
    """Images, questions and labels; another seed gives others."""
    assert list(islice(visual_prompts(3, size=120), 60)) == SCENES
    assert SCENES[:5] != list(islice(visual_prompts(4, size=120), 5))
    assert len({prompt.label for prompt in SCENES}) > 3


def test_the_label_is_the_number_of_shapes_that_the_question_names() -> None:
    """By the description of the scene; some questions are of a shape that is not there."""
    for prompt in SCENES:
        question = prompt.messages[0].text
        named = question.removeprefix("How many ").partition(" are in")[0].split()
        shapes = [(shape["colour"], f"{shape['kind']}s") for shape in prompt.metadata["shapes"]]
        words = {word for word in named if word != "shapes"}
        assert prompt.label == str(sum(words <= set(shape) for shape in shapes))
    assert "0" in {prompt.label for prompt in SCENES}


def test_the_image_shows_the_shapes_of_the_scene() -> None:
    """Each shape has its colour in the middle of its cell, and no other cell is coloured."""
    for prompt in SCENES:
        picture = prompt.messages[0].images[0].to_pil()
        seen = Counter(picture.getpixel((20 * cell % 120 + 10, 20 * (cell // 6) + 10)) for cell in range(36))
        del seen[(255, 255, 255)]
        assert seen == Counter(COLOURS[shape["colour"]] for shape in prompt.metadata["shapes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"size": 23}, "size: got 23; expected at least 24"), ({"shapes": 37}, "shapes: got 37; expected 1 to 36")],
)
def test_a_scene_that_does_not_fit_is_refused(options: dict[str, int], message: str) -> None:
    """By the option."""
    with pytest.raises(ConfigError, match=message):
        next(visual_prompts(0, **options))


async def test_zoom_shows_a_part_of_the_image_enlarged() -> None:
    """As an image of at most the size of the whole; wrong edges are messages to the model."""
    picture = PIL.Image.new("RGB", (40, 20), (255, 255, 255))
    picture.paste((200, 0, 0), (20, 0, 40, 20))
    prompt = Prompt([Message("user", [Image.of(picture), "What?"])])
    right = {"left": 0.5, "top": 0.0, "right": 1.0, "bottom": 1.0}
    edges = [right, {**right, "left": 1.0}, {**right, "right": 0.51}]
    played = await play(VisualEnvironment(), prompt, [*(calling("zoom", **each) for each in edges), "One."])
    results = [message for message in played.messages if message.role == "tool"]
    assert results[0].images == (Image.of(PIL.Image.new("RGB", (20, 20), (200, 0, 0))),)
    assert [result.content for result in results[1:]] == [
        "Error: expected 0 <= left < right <= 1 and 0 <= top < bottom <= 1",
        "Error: expected a part of at least 0.05 of the image in each direction",
    ]
    assert played.done


async def test_a_prompt_without_an_image_is_refused() -> None:
    """There is nothing to zoom into."""
    with pytest.raises(ConfigError, match=r"prompt: got 'What.'; expected a message with an image"):
        await VisualEnvironment().start(Prompt("What?"))


# -- published rows ---------------------------------------------------------------------------------------------------

RED, BLUE = (Image.of(PIL.Image.new("RGB", (4, 3), colour)) for colour in ((200, 0, 0), (0, 0, 200)))
ROW = {"images": [RED.url, "blue.png"], "problem": "<image>Compare with <image>", "answer": 5}


def rows(folder: Path, *given: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in given))
    return str(path)


def test_rows_have_their_images_in_place(tmp_path: Path) -> None:
    """Data URLs, and paths inside the folder that is allowed."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "blue.png").write_bytes(BLUE.data)
    (prompt,) = load_geo3k(rows(tmp_path, ROW), folder=tmp_path / "pictures")
    assert prompt.messages == (Message("user", (RED, "Compare with ", BLUE)),)
    assert prompt.label == "5"


def test_rows_of_a_parquet_file_have_bytes(tmp_path: Path) -> None:
    """As the hub publishes images: an object with bytes, and a path that is a name only."""
    arrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    row = {"images": [{"bytes": BLUE.data, "path": None}], "problem": "<image>Find x.", "answer": "3"}
    parquet.write_table(arrow.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    (prompt,) = load_geo3k(str(tmp_path / "rows.parquet"), limit=1)
    assert prompt.messages == (Message("user", (BLUE, "Find x.")),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "images": None}, "line 1: got {.*expected an object with images"),
        ({**ROW, "problem": "<image>"}, "line 1: problem: got 1; expected 2 times <image>, one an image"),
        ({**ROW, "images": [RED.url, "../secret.png"]}, r"line 1: images\[1\]: path: got .*expected a file inside"),
        ({**ROW, "images": [RED.url, "/etc/passwd"]}, r"line 1: images\[1\]: path: got .*expected a file inside"),
        ({**ROW, "images": [RED.url, "https://a/b.png"]}, r"line 1: images\[1\]: image: got '.*expected"),
        ({**ROW, "images": [base64.b64encode(b"no").decode(), RED.url]}, r"line 1: images\[0\]: image: got"),
        ({**ROW, "images": [{"bytes": None, "path": None}, RED.url]}, r"line 1: images\[0\]: image: got None"),
        ([1], "line 1: got .*expected an object with images"),
    ],
)
def test_another_row_is_refused_by_its_number(row: Any, message: str, tmp_path: Path) -> None:
    """A file outside the folder is not read, and nothing is downloaded."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "secret.png").write_bytes(RED.data)
    with pytest.raises(ConfigError, match=message):
        load_geo3k(rows(tmp_path, row), folder=tmp_path / "pictures")


def test_paths_are_refused_without_a_folder(tmp_path: Path) -> None:
    """The rows of others would read files of this machine."""
    with pytest.raises(
        ConfigError, match=r"images\[1\]: path: got 'blue.png'; expected bytes or a data: URL; folder=D"
    ):
        load_geo3k(rows(tmp_path, ROW))
