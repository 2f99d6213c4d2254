"""The images of a run: ``images/<sha256>.png``, each once, however many samples and turns name it.

Invariant: a file appears whole and on disk before a record names it, and its name is the hash of its bytes; a file with
other bytes is refused. This module knows no sample and no journal.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from rollouts.dtypes import Image, hashes_in
from rollouts.errors import ConfigError
from rollouts.runs.reading import check_file

__all__ = ["IMAGES", "ImageFolder", "hashes_of_row"]

IMAGES = "images"
"""The folder of a run with its images."""

_HASH, _DIGITS = 64, set("0123456789abcdef")

_LOADED: weakref.WeakValueDictionary[str, Image] = weakref.WeakValueDictionary()
"""Images in use, by hash: samples of one image share its bytes."""


def hashes_of_row(row: Mapping[str, Any]) -> list[str]:
    """The hashes of all images that a stored sample names: in its prompt, its messages and its tokens."""
    prompt, spans = row.get("prompt"), row.get("images") or ()
    chats = [*(prompt if isinstance(prompt, list) else ()), *(row.get("messages") or ())]
    return list(dict.fromkeys([*hashes_in(chats), *(sha256 for sha256, _, _ in spans)]))


class ImageFolder:
    """The images of a run, of an evaluation or of an export. Thread-safe.

    Args:
        path: the folder that contains ``images``; it is created with the first image.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path) / IMAGES
        self._written: set[str] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ImageFolder {self.path}>"

    def write(self, images: Mapping[str, Image]) -> None:
        """Write the images, by their hashes, that are not there yet; returns when they are on disk.

        Raises:
            OSError: the disk refuses the write.
        """
        with self._lock:
            new = [image for sha256, image in images.items() if sha256 not in self._written]
            lacking = [image for image in new if not self._file(image.sha256).exists()]
            for image in lacking:
                self.path.mkdir(parents=True, exist_ok=True)
                temporary = self.path / f".{image.sha256}.{os.getpid()}.writing"
                with temporary.open("wb") as file:
                    file.write(image.data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._file(image.sha256))
            if lacking:
                folder = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            self._written.update(image.sha256 for image in new)

    async def store(self, images: Mapping[str, Image]) -> None:
        """As :meth:`write`, in a worker thread where there is something to write."""
        if not self._written.issuperset(images):
            await anyio.to_thread.run_sync(self.write, images)

    def load(self, sha256: str) -> Image:
        """The image with this hash.

        Raises:
            ConfigError: there is no such file, or it has other bytes.
        """
        image = _LOADED.get(sha256)
        if image is None:
            image = _LOADED[sha256] = Image(self._bytes(sha256))
        return image

    def problem(self, sha256: str) -> str | None:
        """The fault of the file of an image; ``None`` if its bytes have this hash."""
        try:
            self._bytes(sha256)
        except ConfigError as error:
            return str(error)
        return None

    def names(self) -> list[str]:
        """The hashes that the folder has files of, sorted."""
        return sorted(file.stem for file in self.path.glob("*.png"))

    def clear(self) -> None:
        """Remove the images; files with other names stay, since a folder of this name may be another's."""
        with self._lock:
            for file in self.path.glob("*.png"):
                if len(file.stem) == _HASH and set(file.stem) <= _DIGITS:
                    file.unlink(missing_ok=True)
            self._written.clear()

    def copy_to(self, other: ImageFolder, hashes: Collection[str]) -> None:
        """Write the images with these hashes to another folder."""
        for sha256 in hashes:
            other.write({sha256: self.load(sha256)})

    def _file(self, sha256: str) -> Path:
        return self.path / f"{sha256}.png"

    def _bytes(self, sha256: str) -> bytes:
        if not isinstance(sha256, str) or len(sha256) != _HASH or not set(sha256) <= _DIGITS:
            raise ConfigError.of("image", sha256, "a SHA-256 in hexadecimal digits")
        file = self._file(sha256)
        expected = f"the image with the SHA-256 {sha256}"
        if file.exists():
            check_file(file)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError.of("image", str(file), f"{expected} ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ConfigError.of("image", str(file), f"{expected}; its bytes have another one")
        return data
