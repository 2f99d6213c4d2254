"""One boundary around every reader of a run's folder, also if a stranger made it.

Invariant: a reader inside :func:`reading` returns or raises a :class:`RolloutsError`, whatever the files contain; no
reader opens a file that :func:`check_file` refuses. So a FIFO or a device does not block a reader, and a sparse file
does not fill its memory. Changed bits are found by checksums (``damage.py``); this module knows no file's content.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollouts.errors import ConfigError, RolloutsError, text_of

__all__ = ["check_file", "decoded_object", "reading", "unreadable"]

_SPARSE = 64
"""A file that is this many times as large as its blocks on disk is sparse; file systems that compress stay below."""
_SMALL = 64 << 20
"""Bytes up to which a file is read even if it is sparse."""


@contextlib.contextmanager
def reading(place: object, kind: type[RolloutsError] = ConfigError) -> Iterator[None]:
    """Turn whatever a reader raises into an error of this kind that names the place.

    The code inside only reads and computes: an error of an output would be taken for one of the folder.
    """
    try:
        yield
    except RolloutsError:
        raise
    except Exception as error:  # a file that a stranger made may make a reader raise anything
        raise unreadable(place, error, kind) from error


def unreadable(place: object, error: Exception, kind: type[RolloutsError] = ConfigError) -> RolloutsError:
    """The error of a reader at this place, in one line."""
    reason = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0][:200]
    return kind(f"{place}: cannot be read ({reason})")


def check_file(path: Path) -> None:
    """Check that a file may be opened and read.

    Raises:
        ConfigError: it is missing, a folder, a FIFO, a socket, a device or a sparse file, or links lead nowhere.
    """
    try:
        state = os.stat(path)
    except OSError as error:
        raise ConfigError.of("run", str(path), f"a file ({error.strerror})") from error
    if not stat.S_ISREG(state.st_mode):
        raise ConfigError.of("run", str(path), "a file")
    if state.st_size > max(_SMALL, _SPARSE * 512 * state.st_blocks) and (state.st_blocks or not _has_data(path)):
        got = f"{state.st_size} bytes, of which {512 * state.st_blocks} are on disk"
        raise ConfigError(f"run: got {str(path)!r} with {got}; expected a file without holes")


def _has_data(path: Path) -> bool:
    """Whether a file has any block, on a file system that does not count them."""
    with path.open("rb") as file:
        try:
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError:
            return False
    return True


def decoded_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a line or a file.

    Raises:
        ConfigError: it is not JSON, or not an object; the message begins with ``where``.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: corrupted, not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise ConfigError.of(where, value, "an object")
    return dict(value)
