"""``scripts/install`` with a fake Python and a fake pip: a failed installation never counts as complete."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"

PYTHON = """\
#!/bin/sh
# Makes a venv in which rollouts can be imported, as an earlier installation leaves it.
[ "$1" = -m ] || exit 0
mkdir -p .venv/bin
cp "$0" .venv/bin/python
[ -e venv-fails ] && { echo "ensurepip is not available"; exit 1; }
cp pip .venv/bin/pip
"""
PIP = """\
#!/bin/sh
echo "$@" >> calls
[ -t 1 ] && echo "a progress bar"
[ -e pip-fails ] || exit 0
echo "ERROR: Could not find a version that satisfies the requirement torch" >&2
exit 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the script, a fake Python and a fake pip."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "install")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    for name, text in (("python", PYTHON), ("pip", PIP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def install(project: Path, extras: str = "test") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [project / "scripts" / "install", extras],
        env={"PATH": os.environ["PATH"], "PYTHON": str(project / "python")},
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )


def stamps(project: Path) -> list[Path]:
    return list((project / ".venv").glob("installed-*"))


def calls(project: Path) -> list[str]:
    return (project / "calls").read_text().splitlines()


def test_a_failed_installation_fails_each_time_until_it_works(project: Path) -> None:
    """The error has pip's message, also after an earlier installation; once it succeeds it is not repeated."""
    (project / "pip-fails").touch()
    for _ in range(2):
        failed = install(project)
        assert failed.returncode == 1, failed
        assert "ERROR: Could not find a version that satisfies the requirement torch" in failed.stderr
        assert failed.stderr.endswith("scripts/install: pip failed with exit code 3; rollouts[test] is not installed\n")
        assert stamps(project) == []
    assert len(calls(project)) == 2
    (project / "pip-fails").unlink()
    for _ in range(2):
        assert install(project).returncode == 0
        assert len(stamps(project)) == 1
    assert len(calls(project)) == 3


def test_an_environment_that_was_not_finished_is_made_again(project: Path) -> None:
    """With a venv without pip, as left by a system without ensurepip, the second call prints the same error."""
    (project / "venv-fails").touch()
    for _ in range(2):
        failed = install(project)
        assert failed.returncode == 1, failed
        assert "ensurepip is not available" in failed.stdout
        assert stamps(project) == []
    (project / "venv-fails").unlink()
    assert install(project).returncode == 0


def test_pip_shows_its_progress_on_a_terminal_and_is_quiet_elsewhere(project: Path) -> None:
    """pip writes to the terminal directly; a log has no line for each package."""
    assert "a progress bar" not in install(project, "test").stdout
    assert "--quiet" in calls(project)[-1]
    ours, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "python")}
    line = [project / "scripts" / "install", "engine"]
    assert subprocess.run(line, env=environment, stdout=theirs, check=False, timeout=60).returncode == 0
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that no process has open
        while part := os.read(ours, 10_000):
            shown += part
    os.close(ours)
    assert b"a progress bar" in shown
    assert "--quiet" not in calls(project)[-1]
