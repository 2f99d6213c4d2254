"""The images of a run: ``images/<sha256>.png``, each once, however many samples and turns name it.

Invariant: that of :mod:`rollouts.runs.hashed_files`. This module knows no sample and no journal.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rollouts.dtypes import Image, hashes_in
from rollouts.runs.hashed_files import HashedFiles

__all__ = ["IMAGES", "ImageFolder", "hashes_of_row"]

IMAGES = "images"
"""The folder of a run with its images."""

_LOADED: weakref.WeakValueDictionary[str, Image] = weakref.WeakValueDictionary()
"""Images in use, by hash: samples of one image share its bytes."""


def hashes_of_row(row: Mapping[str, Any]) -> list[str]:
    """The hashes of all images that a stored sample names: in its prompt, its messages and its tokens."""
    prompt, spans = row.get("prompt"), row.get("images") or ()
    chats = [*(prompt if isinstance(prompt, list) else ()), *(row.get("messages") or ())]
    return list(dict.fromkeys([*hashes_in(chats), *(sha256 for sha256, _, _ in spans)]))


class ImageFolder(HashedFiles):
    """The images of a run, of an evaluation or of an export. Thread-safe.

    Args:
        path: the folder that contains ``images``; it is created with the first image.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path) / IMAGES, ".png", "image")

    def write(self, images: Mapping[str, Image]) -> None:
        """Write the images, by their hashes, that are not there yet; returns when they are on disk.

        Raises:
            OSError: the disk refuses the write.
        """
        self.write_bytes({sha256: image.data for sha256, image in images.items()})

    async def store(self, images: Mapping[str, Image]) -> None:
        """As :meth:`write`, in a worker thread where there is something to write."""
        await self.store_bytes({sha256: image.data for sha256, image in images.items()})

    def load(self, sha256: str) -> Image:
        """The image with this hash.

        Raises:
            ConfigError: there is no such file, or it has other bytes.
        """
        image = _LOADED.get(sha256)
        if image is None:
            image = _LOADED[sha256] = Image(self.read(sha256))
        return image

    def copy_to(self, other: ImageFolder, hashes: Collection[str]) -> None:
        """Write the images with these hashes to another folder."""
        for sha256 in hashes:
            other.write({sha256: self.load(sha256)})
