"""A folder of files that are named by the SHA-256 of their bytes, each once, however many records name it.

Invariant: a file appears whole and on disk before a record names it; a file with other bytes is refused. This module
does not know the content of the files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from rollouts.base.durable import sync
from rollouts.errors import ConfigError
from rollouts.runs.reading import check_file

__all__ = ["HashedFiles"]

_HASH, _DIGITS = 64, set("0123456789abcdef")


class HashedFiles:
    """The files of one folder. Thread-safe.

    Args:
        path: the folder; it is created with the first file.
        suffix: of each file's name.
        name: of one file's content, in messages.
    """

    def __init__(self, path: Path, suffix: str, name: str) -> None:
        self.path = path
        self._suffix, self._name = suffix, name
        self._written: set[str] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    def write_bytes(self, contents: Mapping[str, bytes]) -> None:
        """Write the contents, by their hashes, that are not there yet; returns when they are on disk.

        Raises:
            OSError: the disk refuses the write.
        """
        with self._lock:
            new = {sha256: data for sha256, data in contents.items() if sha256 not in self._written}
            lacking = {sha256: data for sha256, data in new.items() if not self._file(sha256).exists()}
            for sha256, data in lacking.items():
                self.path.mkdir(parents=True, exist_ok=True)
                temporary = self.path / f".{sha256}.{os.getpid()}.writing"
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._file(sha256))
            if lacking:
                sync(self.path)
            self._written.update(new)

    async def store_bytes(self, contents: Mapping[str, bytes]) -> None:
        """As :meth:`write_bytes`, in a worker thread where there is something to write."""
        if not self._written.issuperset(contents):
            await anyio.to_thread.run_sync(self.write_bytes, contents)

    def read(self, sha256: str) -> bytes:
        """The content with this hash.

        Raises:
            ConfigError: there is no such file, or it has other bytes.
        """
        if not isinstance(sha256, str) or len(sha256) != _HASH or not set(sha256) <= _DIGITS:
            raise ConfigError.of(self._name, sha256, "a SHA-256 in hexadecimal digits")
        file = self._file(sha256)
        if file.exists():
            check_file(file)
        expected = f"the {self._name} with the SHA-256 {sha256}"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError.of(self._name, str(file), f"{expected} ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ConfigError.of(self._name, str(file), f"{expected}; its bytes have another one")
        return data

    def problem(self, sha256: str) -> str | None:
        """The fault of the file with this hash; ``None`` if its bytes have it."""
        try:
            self.read(sha256)
        except ConfigError as error:
            return str(error)
        return None

    def names(self) -> list[str]:
        """The hashes that the folder has files of, sorted."""
        return sorted(file.stem for file in self.path.glob(f"*{self._suffix}"))

    def clear(self) -> None:
        """Remove the files; files with other names stay, since a folder of this name may be another's."""
        with self._lock:
            for file in self.path.glob(f"*{self._suffix}"):
                if len(file.stem) == _HASH and set(file.stem) <= _DIGITS:
                    file.unlink(missing_ok=True)
            self._written.clear()

    def _file(self, sha256: str) -> Path:
        return self.path / f"{sha256}{self._suffix}"
