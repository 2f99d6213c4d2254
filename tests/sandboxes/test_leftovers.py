"""Folders of sandboxes whose process was killed are removed at the next start, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollouts.sandboxes.leftovers import Folders

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no lock that ends with its process")

MAKES = """
import sys
from rollouts.sandboxes.leftovers import Folders
print(Folders("test").new(), flush=True)
sys.stdin.read()
"""


def holder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder, and the folder."""
    environment = {**os.environ, "TMPDIR": str(place)}
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    """With read-only folders in it, by the first folder that another process makes; its lock is removed, too."""
    process, folder = holder(tmp_path)
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("x")
    (folder / "inner").chmod(0o500)
    with process:
        process.kill()
    later, other = holder(tmp_path)
    with later:
        assert not folder.exists()
        assert sorted(tmp_path.iterdir()) == sorted([other, other.with_name(f"{other.name.rpartition('-')[0]}.lock")])
        later.kill()


def test_the_folder_of_a_process_that_lives_stays(tmp_path: Path) -> None:
    """Although other processes make folders at the same place."""
    process, folder = holder(tmp_path)
    later, _ = holder(tmp_path)
    with process, later:
        assert folder.is_dir()
        process.kill()
        later.kill()


def test_the_folders_of_one_process_have_one_lock() -> None:
    """However many it makes; sweeping in the same process leaves them."""
    folders = Folders("test-of-one")
    made = [Path(folders.new()) for _ in range(3)]
    swept, present = folders.sweep(), [folder.is_dir() for folder in made]
    for folder in made:
        folder.rmdir()
    (mark,) = {folder.name.rpartition("-")[0] for folder in made}
    (Path(tempfile.gettempdir()) / f"{mark}.lock").unlink()
    assert (swept, present) == ([], [True, True, True])
