"""Tasks are checked before a run: at the base, with the reference, and in the folder of an image."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.programs.launchers.repository_task import Files, InImage, RepositoryTask, evaluate, prepare
from rollouts.programs.launchers.workspace import RepositoryWorkspace
from rollouts.programs.task_check import TaskReport, check_repository_task, checks_of, reports
from rollouts.recipes.environments.repositories.tasks import TASKS
from rollouts.sandboxes import ImageSandbox, ProcessSandbox, opened
from tests.harbor.roots import add_program, base_root

TASK = TASKS["leap"]
SANDBOX = ProcessSandbox()
SHOWN, KEPT = "tests.test_leap.Tests.test_defect", "tests.test_leap.Tests.test_before"


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        ({}, []),
        ({"fail_to_pass": KEPT, "pass_to_pass": ()}, [f"passes at the base, where fail_to_pass fails: {KEPT}"]),
        (
            {"fail_to_pass": KEPT, "pass_to_pass": SHOWN},
            [
                f"passes at the base, where fail_to_pass fails: {KEPT}",
                f"fails at the base, where pass_to_pass passes: {SHOWN}",
            ],
        ),
        ({"reference": b"no diff"}, ["diff_not_applied with the reference solution"]),
        (
            {"reference": b"--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+x\n"},
            [f"tests_failed with the reference solution: {SHOWN}"],
        ),
    ],
)
async def test_the_tests_of_a_task_tell_a_solution(change: dict[str, Any], findings: list[str]) -> None:
    """They fail without one, pass with one, and pass_to_pass passes in both; else each fault has a sentence."""
    report = await check_repository_task(attrs.evolve(TASK, **change), SANDBOX)
    assert list(report.findings) == findings
    assert report.good == (not findings)


async def test_a_task_without_a_reference_is_checked_at_its_base() -> None:
    """The report says that the rest is not known."""
    report = await check_repository_task(attrs.evolve(TASK, reference=None), SANDBOX)
    assert (report.good, report.note) == (True, "no reference solution: only its base")


async def test_a_sandbox_that_fails_is_a_finding_of_its_task() -> None:
    """The other tasks are checked, too."""
    broken = attrs.evolve(TASK, setup=(["false"],))
    checks = RepositoryWorkspace({"broken": broken, "leap": TASK}).checks(SANDBOX)
    first, second = [report async for report in reports(checks)]
    assert "ended with 1" in first.findings[0]
    assert second == TaskReport("leap", output=second.output)


def test_a_recipe_without_tasks_has_no_checks() -> None:
    """Its workspace is named."""
    with pytest.raises(ConfigError, match=r"recipe: got .NoneType.; expected a workspace whose tasks have checks"):
        checks_of(functools.partial(print, sandbox=SANDBOX))


def test_the_verb_prints_a_line_for_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with 0 only if all are good."""
    line = ["check-task", "repositories", "--set", "sandbox=process"]
    assert main([*line, "--task", "leap", "--task", "roman"]) == 0
    assert capsys.readouterr().out.splitlines() == ["roman: good", "leap: good", "2 tasks: all good"]
    assert main([*line, "--task", "none"]) == 2
    assert main(["check-task", "calculator_program"]) == 2


# -- a repository that is installed from its folder --------------------------------------------------------------------

INSTALLED = RepositoryTask(
    name="installed",
    problem="x",
    source=InImage("/testbed"),
    test_files={"test_a.py": b"import unittest, a\nclass T(unittest.TestCase):\n def test(s): s.assertEqual(a.A, 2)\n"},
    fail_to_pass="test_a.T.test",
    reference=b"--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 2\n",
    test_command=["sh", "-c", 'PYTHONPATH=/testbed/src exec python3 -m unittest "$1"', "sh"],
)
"""Its tests import it from the folder of the image, as after ``pip install -e /testbed``."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ImageSandbox:
    """An image with a repository."""
    if os.geteuid() != 0:
        pytest.skip("the kind image maps users as root")
    root = tmp_path_factory.mktemp("image") / "root"
    shutil.copytree(base_root(), root, symlinks=True)
    for program in ("git", "diff", "mktemp", "readlink", "rmdir", "tar"):
        found = shutil.which(program)
        assert found is not None, program
        add_program(root, found, f"usr/bin/{program}")
    (root / "testbed" / "src").mkdir(parents=True)
    (root / "testbed" / "src" / "a.py").write_text("A = 1\n")
    return ImageSandbox(str(root), workdir="/work")


async def test_a_repository_installed_from_its_folder_is_found_bad(image: ImageSandbox) -> None:
    """With a copy as the workspace, a right diff changes nothing: the check says so before a run."""
    report = await check_repository_task(INSTALLED, image)
    assert report.findings == (
        "tests_failed with the reference solution: test_a.T.test. It changes no result: do the tests import /testbed?"
        " InImage('/testbed', in_place=True) makes it the workspace",
    )


async def test_the_folder_of_the_image_can_be_the_workspace(image: ImageSandbox) -> None:
    """A link in its place: the diff is of the files that the tests import."""
    task = attrs.evolve(INSTALLED, source=InImage("/testbed", in_place=True))
    assert task.reference is not None
    assert (await check_repository_task(task, image)).good
    assert (await evaluate(task, image, task.reference)).resolved


async def test_a_folder_of_this_machine_is_not_replaced(tmp_path: Path) -> None:
    """A sandbox with this machine's file system would lose the user's folder: refused, and nothing is changed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text("A = 1\n")
    task = attrs.evolve(INSTALLED, source=InImage(str(tmp_path / "mine"), in_place=True))
    with pytest.raises(ConfigError, match=r"InImage.in_place: got True; expected False in a sandbox that has"):
        async with opened(SANDBOX) as place:
            await prepare(task, place)
    assert [path.name async for path in anyio.Path(tmp_path).iterdir()] == ["mine"]
    assert not await anyio.Path(tmp_path / "mine").is_symlink()


def test_a_task_of_files_is_unchanged() -> None:
    """Its diff for checks is never shown."""
    assert "reference" not in repr(TASK)
    assert isinstance(TASK.source, Files)
