"""``rollouts check-task`` on a folder of Harbor tasks, and the recipe that uses its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.commands import main
from rollouts.dtypes import Endpoint
from rollouts.harbor.check import CHECKED, load_checks
from rollouts.recipe.files import build, load_recipe
from tests.harbor.folders import write_task
from tests.harbor.roots import usable_root

TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'


@pytest.fixture
def root() -> str:
    return usable_root()


def test_a_folder_is_checked_and_its_rungs_are_used(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has oracle and no-op of each rung; a bad task is an exit code of 1; the recipe has the stored rung."""
    write_task(tmp_path / "good", toml=TOML)
    write_task(tmp_path / "bad", {"tests/test.sh": "true\n"}, toml=TOML)
    line = ["check-task", str(tmp_path), "--set", f"root={root}"]
    assert main([*line, "--task", "good"]) == 0
    assert "1 / 0" in capsys.readouterr().out
    assert main(line) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 tasks are bad" in printed
    assert "bad: the solution gets no verdict" in printed
    assert {name: check.rung for name, check in load_checks(tmp_path / CHECKED).items()} == {
        "good": "carry",
        "bad": None,
    }
    options = {"data": str(tmp_path / "good"), "program": "claude_code", "root": root}
    assert main(["check-task", options["data"], "--set", f"root={root}"]) == 0
    recipe = build(load_recipe("harbor"), Endpoint(model="m"), options)
    assert recipe.bound["workspace"].rungs == {"good": "carry"}


def test_a_folder_that_is_wrong_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without tasks, with an unknown name of a task, or with an unknown option."""
    assert main(["check-task", str(tmp_path)]) == 2
    write_task(tmp_path / "good", toml=TOML)
    assert main(["check-task", str(tmp_path), "--task", "other"]) == 2
    assert main(["check-task", str(tmp_path), "--set", "rot=/x"]) == 2
    errors = capsys.readouterr().err
    for words in ("a folder with task.toml", "--task: got 'other'", "BoxOptions: got ['rot']"):
        assert words in errors
