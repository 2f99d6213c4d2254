"""Files that survive the death of a machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rollouts.base.durable import sync, sync_all

DESCRIPTORS = Path("/proc/self/fd")


def written(below: Path, act: Callable[[], None]) -> list[str]:
    """The files and folders below a folder, relative to it, for which ``act`` asks the kernel to write them to disk.

    A profiler sees each call of ``os.fsync``; the descriptor is found by the file that it is open for.
    """
    found: list[str] = []

    def see(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called is os.fsync:
            places = [Path(os.readlink(link)) for link in DESCRIPTORS.iterdir() if link.exists()]
            found.extend(place.relative_to(below).as_posix() for place in places if place.is_relative_to(below))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="the system does not list the descriptors of a process")
def test_a_file_and_a_folder_with_everything_in_it_are_written(tmp_path: Path) -> None:
    """Each file, and each folder with the names in it, also where none may be written to."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "c"
    file.write_bytes(b"text")
    file.chmod(0o400)
    assert written(tmp_path, lambda: sync(file)) == written(tmp_path, lambda: sync_all(file)) == ["a/b/c"]
    assert written(tmp_path, lambda: sync(tmp_path / "a")) == ["a"]
    assert sorted(written(tmp_path, lambda: sync_all(tmp_path / "a"))) == ["a", "a/b", "a/b/c"]


@pytest.mark.parametrize("function", [sync, sync_all])
def test_a_path_that_is_missing_is_an_error(function: Callable[[Path], None], tmp_path: Path) -> None:
    """Otherwise a name that is misspelt would count as written."""
    with pytest.raises(FileNotFoundError):
        function(tmp_path / "none")
