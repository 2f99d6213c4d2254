"""Images at the engine: placeholders are expanded by the folder's processor, and wrong numbers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Image
from rollouts.engine import DEMO_MODEL
from rollouts.engine.images import Expander
from rollouts.errors import ConfigError
from rollouts.renderer import renderer_for
from tests.processors import picture

pytest.importorskip("torch")

PAD = 500
URLS = [picture(97, 61).url, picture(8, 8).url]


@pytest.fixture(scope="module")
def expander() -> Expander:
    return Expander(DEMO_MODEL)


async def test_the_server_counts_the_ids_of_the_processor(client: Any) -> None:
    """``prompt_tokens`` and ``prompt_token_ids`` are of the expanded prompt, whose ids count for the context."""
    sampling = {"max_new_tokens": 1}
    body = {"input_ids": [5, PAD, 6, PAD], "image_data": URLS, "return_prompt_token_ids": True}
    answer = await client.generate(**body, sampling_params=sampling)
    expanded = [5, *[PAD] * 9, 6, *[PAD] * 9]
    assert (answer["meta_info"]["prompt_tokens"], answer["prompt_token_ids"]) == (20, expanded)
    whole = await client.generate(input_ids=expanded, sampling_params={**sampling, "temperature": 0})
    seen = await client.generate(**body, sampling_params={**sampling, "temperature": 0})
    assert seen["output_ids"] == whole["output_ids"]
    batch = {"input_ids": [[5, PAD], [6]], "image_data": [URLS[0], []], "return_prompt_token_ids": True}
    answers = await client.generate(**batch, sampling_params=sampling)
    assert [len(one["prompt_token_ids"]) for one in answers] == [10, 1]
    text = {"text": "a<|endoftext|>", "image_data": URLS[0], "return_prompt_token_ids": True}
    assert len((await client.generate(**text, sampling_params=sampling))["prompt_token_ids"]) == 10


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([5, PAD], URLS, "Prompt has 1 image placeholders but 2 image inputs were provided"),
        ([5, PAD, PAD], URLS[:1], "Prompt has 2 image placeholders but 1 image inputs were provided"),
        ([5], URLS[:1], "Prompt has 0 image placeholders"),
        ([PAD], ["iVBORw0"], "image_data: got 'iVBORw0'; expected a data: URL"),
        ([PAD], ["data:image/png;base64,AAAA"], "expected an image that Pillow decodes"),
    ],
)
async def test_wrong_images_are_refused(ids: list[int], images: list[str], message: str, client: Any) -> None:
    """As SGLang does: also ids that are expanded already."""
    status, answer = await client.post("/generate", input_ids=ids, image_data=images, sampling_params={})
    assert status == 400
    assert message in answer["error"]["message"]


def test_the_renderer_and_the_server_expand_alike(expander: Expander) -> None:
    """Both use the processor of the demo model's folder."""
    renderer = renderer_for(DEMO_MODEL, images=True)
    assert renderer.images is not None
    renderer.images.check_repeats()
    for url in URLS:
        image = Image.of(url)
        expansion = renderer.encode(renderer.images.expanded("<|endoftext|>", [image])).tolist()
        assert expander.expanded([PAD], [url]) == expansion


def test_a_folder_whose_processor_does_not_load_is_named(tmp_path: Path) -> None:
    """At the first image; text is served before."""
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"image_data: got .*expected a processor that loads"):
        Expander(tmp_path).expanded([1], URLS[:1])
