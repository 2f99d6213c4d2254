"""Images of slime's samples: the samples that have them, and the prompts of messages that contain them.

Invariant: an image that a sample of slime has is shown to the model in its place, or the rollout is refused by name.
This module decodes no file and fetches nothing: slime's data set has loaded the images
(slime 0.3.1, utils/data.py: Dataset).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollouts.dtypes import Image
from rollouts.errors import ConfigError, EndpointRefused
from rollouts.integrations.slime.records import family

__all__ = ["check_media", "check_prompt_ids", "has_images", "restored", "shown_prompt", "shows_images", "stored"]


def has_images(record: Any) -> bool:
    """Whether slime's sample has images; its data set also sets ``{"images": None}``."""
    return bool((record.multimodal_inputs or {}).get("images"))


def check_media(record: Any, *, recipe: bool) -> None:
    """Check that a sample's images can be shown by our rollouts.

    Args:
        record: slime's sample.
        recipe: whether a recipe plays it, which renders messages itself.

    Raises:
        ConfigError: it has videos or sounds, images with miles, or a prompt that does not say where its images are.
    """
    media = sorted(name for name, value in (record.multimodal_inputs or {}).items() if value is not None)
    place = f"slime sample {record.index}"
    if set(media) - {"images"}:
        raise ConfigError.of(f"{place}.multimodal_inputs", media, "images only, or a custom generate function")
    if not has_images(record):
        return
    if expected := family().refused.get("multimodal_keys"):
        raise ConfigError.of(f"{place}.multimodal_inputs", media, expected)
    if recipe and isinstance(record.prompt, str):
        raise ConfigError.of(f"{place}.prompt", record.prompt[:80], "messages with its images: a recipe renders them")
    if not recipe and not isinstance(record.prompt, str):
        raise ConfigError.of(f"{place}.prompt", type(record.prompt).__name__, "text, of --apply-chat-template")


def check_prompt_ids(record: Any) -> None:
    """Compare the number of prompt ids of slime's processor with that of the server, which expanded the images itself.

    Raises:
        EndpointRefused: they differ: the sample would be trained on other ids than the model saw.
    """
    counted = record.prefix_cache_info.total_prompt_tokens
    expected = len(record.tokens) - record.response_length
    if counted and record.response_length and counted != expected:
        raise EndpointRefused(
            f"meta_info.prompt_tokens: got {counted}; expected {expected}, the ids of the prompt with its images: the"
            " server's processor expands images otherwise. Is it of another version, or has it other settings?"
        )


def shown_prompt(record: Any) -> Any:
    """The prompt of slime's sample; in messages, its image parts have the images that slime's data set loaded.

    Raises:
        ConfigError: there is another number of parts than of images.
    """
    if isinstance(record.prompt, str) or not has_images(record):
        return record.prompt
    left = list(record.multimodal_inputs["images"])
    count = sum(map(_is_image, (part for chat in record.prompt for part in _parts(chat))))
    if count != len(left):
        expected = f"{len(left)}, one for each of its images"
        raise ConfigError.of(f"image parts of the prompt of slime sample {record.index}", count, expected)

    def shown(part: Any) -> Any:
        return {"type": "image", "image": left.pop(0)} if _is_image(part) else part

    return [{**chat, "content": [shown(part) for part in _parts(chat)] or chat["content"]} for chat in record.prompt]


def shows_images(prompt: Any) -> bool:
    """Whether a prompt has images inside its messages."""
    return isinstance(prompt, list) and any(_is_image(part) for chat in prompt for part in _parts(chat))


def _parts(chat: Any) -> list[Any]:
    content = chat.get("content") if isinstance(chat, Mapping) else None
    return list(content) if isinstance(content, list | tuple) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def stored(record: Mapping[str, Any], kept: dict[str, bytes]) -> dict[str, Any]:
    """The dict of slime's sample with PNG bytes in the place of its PIL images, for a file that holds only data.

    Args:
        record: of ``to_dict``.
        kept: the bytes so far, by their hash: samples with the same image share one object, which a file has once.
    """

    def data(image: Any) -> Any:
        if type(image).__module__.partition(".")[0] != "PIL":
            return image
        png = Image.of(image)
        return {_PNG: kept.setdefault(png.sha256, png.data)}

    return _with_images(record, data)


def restored(record: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`stored`."""

    def picture(data: Any) -> Any:
        return Image(data[_PNG]).to_pil() if isinstance(data, Mapping) and data.keys() == {_PNG} else data

    return _with_images(record, picture)


_PNG = "png"


def _with_images(record: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    media = record.get("multimodal_inputs")
    if not isinstance(media, Mapping) or not isinstance(media.get("images"), list):
        return dict(record)
    return {**record, "multimodal_inputs": {**media, "images": [change(image) for image in media["images"]]}}
