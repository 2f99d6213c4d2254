"""A real run, killed with SIGKILL and resumed, loses nothing; the long form of this is ``scripts/crash_test``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_killed_run_resumes_without_a_difference() -> None:
    """Two kills; tokens, groups and batches are those of the run without a kill."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.crash_run", "--kills", "2", "--longest", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("passed\n")
