"""A change of a repository is scored in a fresh place, whatever its program did to the first."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from rollouts.errors import ConfigError
from rollouts.harbor.grading import open_box
from rollouts.programs.launchers.repository_task import (
    Files,
    GitCommit,
    InImage,
    RepositoryTask,
    Tarball,
    Verdict,
    evaluate,
    prepare,
    take_diff,
)
from rollouts.recipes.environments.repositories.tasks import SOLUTIONS, TASKS
from rollouts.sandboxes import ProcessSandbox, SandboxError, SandboxLimits, opened
from rollouts.sandboxes.process import RunningProcess
from tests.sandboxes.kinds import kind_of

TASK = TASKS["leap"]
SOLVED = SOLUTIONS["leap"]
SANDBOX = ProcessSandbox()
PASSING = "import unittest\nclass Tests(unittest.TestCase):\n def test_defect(s): pass\n def test_before(s): pass\n"
"""A test file in which every test passes."""


async def verdict_of(script: str, task: RepositoryTask = TASK, **variables: str) -> Verdict:
    """Run a shell script as the program, and score what it did."""
    async with opened(SANDBOX) as place:
        prepared = await prepare(task, place)
        await place.run(["sh", "-c", script], {"SOLVED": SOLVED, "PASSING": PASSING} | variables, seconds=20)
        diff = await take_diff(prepared, place)
    return await evaluate(task, SANDBOX, diff)


SOLVE = 'printf %s "$SOLVED" > leap.py; '


class Stuck(ProcessSandbox):
    """Its folder is deleted with an error, as where a process that left its group still writes."""

    async def open(self) -> RunningProcess:
        running = await super().open()
        close = running.close

        async def close_and_fail() -> None:
            await close()
            raise SandboxError("cannot be deleted")

        running.close = close_and_fail  # type: ignore[method-assign]
        return running


@pytest.mark.parametrize(("diff", "outcome"), [(TASK.reference, "resolved"), (b"nonsense", "diff_not_applied")])
async def test_a_sandbox_that_does_not_close_costs_no_verdict(
    diff: bytes, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a solution whose tests leave a process that writes would lose its verdict where it fails; it is logged."""
    assert (await evaluate(TASK, Stuck(), diff)).outcome == outcome
    assert "cannot be closed: cannot be deleted" in caplog.text
    async with open_box(Stuck(), None, seconds=20) as box:
        assert (await box.shell("true")).code == 0


async def test_a_solution_is_resolved() -> None:
    """Also with new files, committed or not; the diff and each test's result are in the metadata."""
    verdict = await verdict_of(SOLVE + "printf '\\000\\377' > new.bin; git commit -qam x; exit 1")
    assert verdict.outcome == "resolved"
    assert verdict.results == {"tests.test_leap.Tests.test_defect": True, "tests.test_leap.Tests.test_before": True}
    metadata = verdict.metadata()
    assert metadata["resolved"]
    assert "year % 400" in metadata["diff"]
    assert "GIT binary patch" in metadata["diff"]
    assert "test_defect passed" in metadata["output"]


@pytest.mark.parametrize("commit", ["", "git -C n add -A; git -C n -c user.name=x -c user.email=x@x commit -qm x"])
async def test_a_repository_that_a_program_made_in_a_folder_is_part_of_its_change(commit: str) -> None:
    """git refuses the whole change for one without a commit, and leaves out the files of one with commits."""
    verdict = await verdict_of(SOLVE + "git init -q n; echo 1 > n/file; " + commit)
    assert (verdict.outcome, b"n/file" in verdict.diff) == ("resolved", True)


@pytest.mark.parametrize("commit", ["", "git -C n add -A; git -C n -c user.name=x -c user.email=x@x commit -qm x; "])
async def test_a_repository_inside_the_base_is_part_of_the_change(commit: str) -> None:
    """It stays a repository, in every place of the task; so does a broken one, as a submodule without its own is."""
    script = "git init -q n; echo 1 > n/file; git -C n add -A; git -C n -c user.name=x -c user.email=x@x commit -qm x; "
    script += "mkdir 'b r'; echo gitdir: ../none > 'b r/.git'; echo 1 > 'b r/file'"
    task = attrs.evolve(TASK, setup=[["sh", "-c", script]])
    change = "git -C n log > log; echo 2 > n/file; echo 2 > n/new; echo 2 > 'b r/file'; "
    verdict = await verdict_of(SOLVE + change + commit, task)
    assert verdict.outcome == "resolved"
    assert [name in verdict.diff for name in (b"n/file", b"n/new", b"b r/file", b"+commit", b".git")] == [True] * 4 + [
        False
    ]
    async with opened(SANDBOX) as place:
        await prepare(task, place)
        assert (await place.exec(["git", "-C", "n", "status", "--porcelain"])).stdout == ""
        assert await place.read("b r/.git") == b"gitdir: ../none\n"


@pytest.mark.parametrize(
    ("script", "outcome", "restored"),
    [
        ("", "no_change", []),
        ("exit 9", "no_change", []),
        ("kill -9 $$", "no_change", []),
        ('printf %s "$PASSING" > tests/test_leap.py', "tests_failed", ["tests/test_leap.py"]),
        ("rm -r tests; touch tests", "tests_failed", ["tests", "tests/__init__.py", "tests/test_leap.py"]),
        (
            'mkdir tests/test_leap; printf %s "$PASSING" > tests/test_leap/__init__.py',
            "tests_failed",
            ["tests/test_leap/__init__.py"],
        ),
        ("rm -r tests; mkdir t; ln -s t tests", "tests_failed", ["tests", "tests/__init__.py", "tests/test_leap.py"]),
        (
            "for f in conftest sitecustomize; do echo 'import os; os._exit(0)' > $f.py; done",
            "tests_failed",
            ["conftest.py", "sitecustomize.py"],
        ),
        ("echo 'import os; os._exit(0)' > leap.py", "tests_failed", []),
        ("echo 'import unittest; raise unittest.SkipTest' > leap.py", "tests_failed", []),
        ("echo 'raise SystemExit(0)' > unittest.py", "tests_failed", []),
        ("echo 'def leap(' > leap.py", "tests_failed", []),
        ("rm leap.py", "tests_failed", []),
        (SOLVE + "rm -rf .git; git init -q; git commit -q --allow-empty -m x", "resolved", []),
        (
            SOLVE + "git checkout -q --orphan x; git commit -qam x; git branch -D main; git gc -q --prune=now",
            "resolved",
            [],
        ),
        (SOLVE + "git config core.fsmonitor /bin/false; git config diff.external /bin/false", "resolved", []),
        (SOLVE + "rm -rf tests", "resolved", ["tests/__init__.py", "tests/test_leap.py"]),
    ],
)
async def test_known_ways(script: str, outcome: str, restored: list[str]) -> None:
    """Nothing done, a crash, tests edited, deleted or shadowed, planted files, exits, a rewritten history."""
    verdict = await verdict_of(script)
    assert (verdict.outcome, list(verdict.restored)) == (outcome, restored), verdict.output


async def test_in_namespaces() -> None:
    """Both places may be of any kind; git and the tests run without the machine's settings."""
    kind = kind_of("namespaces")
    try:
        place = await kind.open()
    except SandboxError as error:
        pytest.skip(f"this machine makes no namespaces: {error}")
    try:
        prepared = await prepare(TASK, place)
        await place.run(["sh", "-c", SOLVE], {"SOLVED": SOLVED}, seconds=20)
        diff = await take_diff(prepared, place)
    finally:
        await place.close()
    assert (await evaluate(TASK, kind, diff)).outcome == "resolved"


async def test_a_program_that_is_late_is_scored_by_what_it_did() -> None:
    """The deadline ends the program; its workspace is what counts."""
    async with opened(SANDBOX) as place:
        prepared = await prepare(TASK, place)
        end = await place.run(["sh", "-c", SOLVE + "sleep 60"], {"SOLVED": SOLVED}, seconds=0.5)
        verdict = await evaluate(TASK, SANDBOX, await take_diff(prepared, place))
    assert (end.timed_out, verdict.outcome) == (True, "resolved")


async def test_tests_that_do_not_end() -> None:
    """Those before the deadline keep their result."""
    task = attrs.evolve(TASK, test_seconds=1.0)
    verdict = await verdict_of("echo 'while True: pass' > leap.py", task)
    assert (verdict.outcome, set(verdict.results.values())) == ("tests_timed_out", {False})


@pytest.mark.parametrize(
    ("path", "section"),
    [
        (".pytest.ini", "pytest"),
        ("setup.cfg", "tool:pytest"),
        ("pyproject.toml", "tool.pytest.ini_options"),
    ],
)
async def test_a_setting_of_the_test_runner_is_put_back(path: str, section: str) -> None:
    """One that has pytest collect tests and run none ends with exit code 0."""
    task = attrs.evolve(
        TASK, test_command=[sys.executable, "-m", "pytest"], fail_to_pass=["tests/test_leap.py"], pass_to_pass=[]
    )
    option = '"--collect-only"' if "toml" in path else "--collect-only"
    verdict = await verdict_of(f"printf '[{section}]\naddopts = {option}\n' > {path}", task)
    assert (verdict.outcome, list(verdict.restored)) == ("tests_failed", [path]), verdict.output


async def test_a_command_for_each_test() -> None:
    """Its exit code is the result; each gets the name of one test."""
    task = attrs.evolve(TASK, test_command=["python3", "-m", "unittest"])
    assert (await verdict_of(SOLVE, task)).outcome == "resolved"
    verdict = await verdict_of("touch new", task)
    assert (verdict.outcome, list(verdict.results.values())) == ("tests_failed", [False, True])


async def test_every_place_has_the_same_base() -> None:
    """The hash of the base commit, which prompts contain, does not depend on the time or the place."""
    bases = []
    for _ in range(2):
        async with opened(SANDBOX) as place:
            bases.append((await prepare(TASK, place)).base)
            assert (await place.exec(["git", "status", "--porcelain"])).stdout == ""
    assert bases[0] == bases[1]


async def test_a_diff_that_does_not_fit_or_cannot_be_taken() -> None:
    """Is an outcome with git's words."""
    verdict = await evaluate(TASK, SANDBOX, b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    assert verdict.outcome == "diff_not_applied"
    assert "x: does not exist in index" in verdict.output
    small = ProcessSandbox(SandboxLimits(file_bytes=300_000))
    async with opened(small) as place:
        prepared = await prepare(TASK, place)
        await place.run(["sh", "-c", "head -c 400000 /dev/urandom > big"], seconds=20)
        diff = await take_diff(prepared, place)
    assert isinstance(diff, str)
    assert "expected at most file_bytes=300,000" in diff
    assert await evaluate(TASK, small, diff) == Verdict("diff_not_taken", output=diff)


async def test_a_set_up_that_fails_is_an_error() -> None:
    """Of the task, which is named, with the command and its words."""
    task = attrs.evolve(TASK, setup=[["sh", "-c", "echo why >&2; exit 4"]])
    async with opened(SANDBOX) as place:
        with pytest.raises(SandboxError, match=r"task 'leap': .*exit 4.* ended with 4: why; expected 0"):
            await prepare(task, place)


async def test_sources(tmp_path: Path) -> None:
    """A folder, a commit without its history, a tar archive, a folder of the image: the same files."""
    folder = tmp_path / "repository"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("$Format:%H$")
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x"]
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        await anyio.run_process([*git, *line])
    (folder / ".git" / "info" / "attributes").write_text("a.txt export-subst\nsub export-ignore\n")
    (folder / "sub" / "a.txt").chmod(0o755)
    await anyio.run_process([*git, "commit", "-qam", "two"])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder / "sub", "sub")
    (tmp_path / "a.tgz").write_bytes(buffer.getvalue())
    sources = [
        Files.of_folder(folder),
        GitCommit(str(folder), "HEAD"),
        Tarball(str(tmp_path / "a.tgz")),
        InImage(str(folder)),
    ]
    for source in sources:
        async with opened(SANDBOX) as place:
            await prepare(attrs.evolve(TASK, source=source), place)
            assert (await place.exec(["git", "ls-files"])).stdout == "sub/a.txt\n"
            assert (await place.exec(["test", "-x", "sub/a.txt"])).code == 0
            assert (await place.exec(["git", "rev-list", "--count", "--all"])).stdout == "1\n"
            assert await place.read("sub/a.txt") == b"$Format:%H$"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fail_to_pass": ()}, r"RepositoryTask.fail_to_pass: got \(\); expected names of tests"),
        ({"pass_to_pass": "-x"}, r"RepositoryTask.pass_to_pass: got \('-x',\)"),
        ({"test_files": {"../x": b""}}, r"RepositoryTask.test_files: got '../x'; expected paths inside"),
        ({"test_seconds": 0}, r"RepositoryTask.test_seconds: got 0"),
    ],
)
def test_a_bad_task_is_refused(change: dict[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=words):
        attrs.evolve(TASK, **change)


async def test_a_source_that_is_missing_is_named(tmp_path: Path) -> None:
    """With what git or the system says."""
    for source, words in (
        (GitCommit(str(tmp_path), "HEAD"), "not a git repository"),
        (Tarball(str(tmp_path / "no")), "Tarball.path: got"),
    ):
        with pytest.raises(ConfigError, match=words):
            await source.tree()
    with pytest.raises(ConfigError, match="folder: got '/no/such'; expected a folder that exists"):
        Files.of_folder("/no/such")
