"""Samples of slime before their rollout: their images, and the state from which a started one continues.

Invariant: an image that a sample of slime has is shown to the model in its place, a rollout continues from exactly the
state of its sample, by slime's own function, or it is refused by name. A finished sample is not continued: if it cannot
be used, e.g. because it is stale, it is played again from its prompt. This module decodes no file and fetches nothing:
slime's data set has loaded the images (slime 0.3.1, utils/data.py: Dataset).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.errors import ConfigError, EndpointRefused
from rollouts.integrations.slime.records import family, records

__all__ = ["check_given", "check_prompt_ids", "has_images", "is_begun", "shown_prompt", "shows_images"]

_COUNTERS = ("spec_info", "prefix_cache_info")
_CONTINUED = ("tokens", "response", "response_length", "weight_versions", "non_generation_time", *_COUNTERS)
"""The fields that slime's own function adds to (slime 0.3.1, rollout/sglang_rollout.py: generate)."""


def has_images(record: Any) -> bool:
    """Whether slime's sample has images; its data set also sets ``{"images": None}``."""
    return bool((record.multimodal_inputs or {}).get("images"))


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


def is_begun(record: Any) -> bool:
    """Whether slime's own function would continue this sample instead of starting from its prompt."""
    return bool(_brought(record))


def _brought(record: Any) -> list[str]:
    """The fields that a sample brings for slime's own function to add to."""
    if getattr(record.status, "value", "") not in ("pending", "aborted"):
        return []
    fresh = records().sample()
    return [name for name in _CONTINUED if getattr(record, name, None) != getattr(fresh, name, None)]


def check_given(record: Any, *, recipe: bool) -> None:
    """Check that slime's sample can be played from its state and with its images, before a request is sent.

    Raises:
        ConfigError: it has videos or sounds, images with miles, a prompt that does not say where its images are, or ids
            or a response that its rollout would not continue from.
    """
    images, place = has_images(record), f"slime sample {record.index}"
    media = sorted(name for name, value in (record.multimodal_inputs or {}).items() if value is not None)
    if set(media) - {"images"}:
        raise ConfigError.of(f"{place}.multimodal_inputs", media, "images only, or a custom generate function")
    if images and (expected := family().refused.get("multimodal_keys")):
        raise ConfigError.of(f"{place}.multimodal_inputs", media, expected)
    if images and recipe is isinstance(record.prompt, str):
        expected = "messages with its images: a recipe renders them" if recipe else "text, of --apply-chat-template"
        got = record.prompt[:80] if recipe else type(record.prompt).__name__
        raise ConfigError.of(f"{place}.prompt", got, expected)
    brought, expected = _brought(record), None
    if brought and recipe:
        expected = "nothing with a recipe, which renders the prompt itself"
    elif brought and family().package != "slime":
        expected = f"nothing with {family().package}: a rollout starts from the prompt"
    elif brought and images and record.response_length:
        expected = "no response with images: slime sends the text of the prompt alone"
    elif brought and not records().is_slime:
        expected = "nothing without slime, whose own function continues from it"
    if expected is not None:
        value = getattr(record, brought[0])
        got = f"{len(value)} ids" if brought[0] == "tokens" else value
        raise ConfigError.of(f"{place}.{brought[0]}", got, expected)
