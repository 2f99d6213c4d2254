"""The deletion of a tree: only of this user, and through no link."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rollouts.sandboxes.removal import remove_tree

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="rights are not those of POSIX")


def test_a_tree_of_any_rights_is_removed(tmp_path: Path) -> None:
    """Folders that may not be read, written or entered, and links, whose targets stay."""
    target = tmp_path / "target"
    target.mkdir(mode=0o750)
    folder = tmp_path / "tree"
    for name in ("a/b/c", "d"):
        (folder / name).mkdir(parents=True)
    (folder / "a/b/c/file").write_text("x")
    (folder / "a/link").symlink_to(target)
    for name in ("a/b/c", "a/b", "a", "d", "."):
        (folder / name).chmod(0)
    remove_tree(str(folder))
    assert [*tmp_path.iterdir()] == [target]
    assert target.stat().st_mode & 0o777 == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_tree_of_another_user_is_not_touched(tmp_path: Path) -> None:
    """Another user can give a folder in ``/tmp`` the name of a sandbox that is gone."""
    folder = tmp_path / "tree"
    (folder / "inner").mkdir(parents=True)
    os.chown(folder, 1000, 1000)
    folder.chmod(0o755)
    with pytest.raises(OSError, match="another user's"):
        remove_tree(str(folder))
    assert (folder / "inner").is_dir()
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_link_is_not_removed(tmp_path: Path) -> None:
    """Nor the folder that it names, whose rights stay."""
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError, match="it is a link"):
        remove_tree(str(tmp_path / "link"))
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o755
