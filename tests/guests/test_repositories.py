"""The ten repositories: each has its defect, and each solution mends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.programs.launchers.repository_task import RUNNER, Files
from rollouts.recipes.environments.repositories.tasks import SOLUTIONS, TASKS


def test_there_are_ten() -> None:
    """Each with a solution."""
    assert len(TASKS) == len(SOLUTIONS) == 10


@pytest.mark.parametrize("name", TASKS)
def test_the_tests_show_the_defect_and_the_solution(name: str, tmp_path: Path) -> None:
    """Without the solution exactly ``fail_to_pass`` fails; with it nothing fails."""
    task = TASKS[name]
    assert isinstance(task.source, Files)
    for path, data in (task.source.files | task.test_files).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    names = [*task.fail_to_pass, *task.pass_to_pass]
    for expected in ([0, 1], [1, 1]):
        line = [sys.executable, "-I", "-B", "-S", "-c", RUNNER, str(tmp_path / "report"), *names]
        subprocess.run(line, input=b"word\n", cwd=tmp_path, capture_output=True, check=True)
        said = (tmp_path / "report").read_text().splitlines()
        assert said == [f"word {good} {name}" for good, name in zip(expected, names, strict=True)]
        (tmp_path / f"{name}.py").write_text(SOLUTIONS[name])
