"""The expansion of image placeholders by the processor of a model folder.

The engine is a stand-in for a server of a vision model: it loads images, counts their tokens and refuses wrong numbers
as SGLang 0.5.23 does, but the model computes with the embedding of the placeholder and sees no pixel.

Invariant: the ids around placeholders stay as they are. This module does not know requests or models.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.dtypes import Image
from rollouts.errors import ConfigError

__all__ = ["PROCESSOR", "Expander"]

PROCESSOR = "processor_config.json"
"""The file of a model folder that describes its processor."""
_COUNTS_KEPT = 4096


class Expander:
    """The processor of a folder, loaded at the first image. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        """The number of placeholders of an image, by its hash."""

    def expanded(self, ids: Sequence[int], image_data: Sequence[Any]) -> list[int]:
        """The ids with each placeholder repeated as often as its image has tokens.

        Raises:
            ConfigError: there is another number of placeholders than images, or an image cannot be decoded.
        """
        with self._lock:
            placeholder = self._placeholder
            found = list(ids).count(placeholder)
            if found != len(image_data):  # the message of SGLang 0.5.23
                raise ConfigError(
                    f"Prompt has {found} image placeholders but {len(image_data)} image inputs were provided"
                )
            counts = iter([self._count(entry) for entry in image_data])
        return [token for one in ids for token in ([one] * next(counts) if one == placeholder else [one])]

    def _count(self, entry: Any) -> int:
        if not isinstance(entry, str) or not entry.startswith("data:"):
            raise ConfigError.of("image_data", str(entry)[:80], "a data: URL")
        image = Image.of(entry)
        count = self._counts.get(image.sha256)
        if count is None:
            text = self._processor.image_token
            output = self._processor(text=[text], images=[image.to_pil()], text_kwargs={"add_special_tokens": False})
            count = self._counts[image.sha256] = [int(one) for one in output["input_ids"][0]].count(self._placeholder)
            if len(self._counts) > _COUNTS_KEPT:
                del self._counts[next(iter(self._counts))]
        return count

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor  # slow, and needed only where there are images

        try:
            return AutoProcessor.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the loader may raise anything
            raise ConfigError.of("image_data", str(self._path), f"a processor that loads ({error})") from error

    @functools.cached_property
    def _placeholder(self) -> int:
        return int(self._processor.tokenizer.convert_tokens_to_ids(self._processor.image_token))
