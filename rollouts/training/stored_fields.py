"""Reading of the fields of a sample from plain data, as a run stores them.

Invariant: :func:`values_of` returns the arguments of the sample whose fields ``fields_to_dict`` wrote. This module
creates no sample.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollouts.dtypes import ImageSpan, LoadImage, hashes_in, with_images
from rollouts.errors import ConfigError
from rollouts.training.sample_fields import FIELDS, with_current_names

__all__ = ["values_of"]


def values_of(data: Mapping[str, Any], names: Collection[str], load_image: LoadImage | None) -> dict[str, Any]:
    """The arguments of a sample with the fields ``names``; raises as ``Sample.from_dict``."""
    values = {key: value for key, value in with_current_names(data).items() if key != "response_length"}
    unknown = values.keys() - names
    if unknown:
        raise ConfigError.of("Sample", sorted(unknown), "fields of a sample")
    for name, _, _, read in FIELDS:
        if read is not None and (value := values.get(name)) is not None:
            try:
                values[name] = read(value)
            except (TypeError, ValueError):
                raise ConfigError.of(f"Sample.{name}", value, "what to_dict wrote") from None
    _restore_images(values, load_image)
    return values


def _restore_images(values: dict[str, Any], load_image: LoadImage | None) -> None:
    """Load the images that fields of a stored sample name."""
    spans, prompt = values.get("images") or (), values.get("prompt") or ""
    chats = [*(() if isinstance(prompt, str) else prompt), *(values.get("messages") or ())]
    hashes = dict.fromkeys([*hashes_in(chats), *(sha256 for sha256, _, _ in spans)])
    if not hashes:
        values["images"] = ()
        return
    if load_image is None:
        expected = "load_image, which returns an image by its hash"
        raise ConfigError.of("Sample.from_dict(load_image)", None, f"{expected}: the sample has images")
    loaded = {sha256: load_image(sha256) for sha256 in hashes}
    values["named_images"] = loaded
    values["images"] = [ImageSpan(loaded[sha256], start, stop) for sha256, start, stop in spans]
    if not isinstance(prompt, str):
        values["prompt"] = with_images(prompt, loaded.__getitem__)
