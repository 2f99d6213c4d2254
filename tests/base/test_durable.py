"""Files that survive the death of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.base.durable import sync, sync_all


def test_a_file_and_a_folder_with_everything_in_it_are_written(tmp_path: Path) -> None:
    """Also of a file or a folder that cannot be written to; what is not there is an error."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "c"
    file.write_bytes(b"text")
    file.chmod(0o400)
    for path in (tmp_path / "a", file):
        sync(path)
        sync_all(path)
    for missing in (sync, sync_all):
        with pytest.raises(FileNotFoundError):
            missing(tmp_path / "none")
