"""Archives of an agent's folders are made clean in a time that the agent does not decide."""

from __future__ import annotations

import tarfile
import time
from pathlib import Path

import pytest

from rollouts.harbor.grading import sanitize


def cleaned(folder: Path, names: list[str], exclude: list[str]) -> list[str]:
    with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type = tarfile.REGTYPE if name.endswith(".py") else tarfile.DIRTYPE
            archive.addfile(member)
    sanitize(str(folder / "a.tar"), str(folder / "b.tar"), "/app", exclude, False)
    with tarfile.open(folder / "b.tar") as archive:
        return archive.getnames()


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("b", {"app/b", "app/b/c", "app/b/c/x.py"}),
        ("b/", {"app/b", "app/b/c", "app/b/c/x.py"}),
        ("b/c", {"app/b/c", "app/b/c/x.py"}),
        ("*.py", {"app/b/c/x.py"}),
        ("a*/c", {"app/b/c", "app/b/c/x.py"}),
        ("?", {"app/b", "app/b/c", "app/b/c/x.py"}),
        ("pp/b", set()),
        ("app/b/c/x.p", set()),
    ],
)
def test_a_pattern_is_of_a_member_or_its_last_parts(tmp_path: Path, pattern: str, left_out: set[str]) -> None:
    """With all that is below it."""
    names = ["app", "app/b", "app/b/c", "app/b/c/x.py"]
    assert cleaned(tmp_path, names, [pattern, "nothing"]) == [name for name in names if name not in left_out]


@pytest.mark.parametrize("exclude", [[], ["*.o", ".git"]])
def test_deep_folders_cost_no_time(tmp_path: Path, exclude: list[str]) -> None:
    """A chain of five hundred folders."""
    names = ["app" + "/d" * depth for depth in range(500)]
    began = time.process_time()
    assert cleaned(tmp_path, names, exclude) == names
    assert time.process_time() - began < 3
