"""Tasks on a repository, as in SWE-bench: a program changes it in place A; the change is scored in a fresh place B.

Invariant: the score depends on the diff alone. In B the diff is applied to the untouched repository; then files that
steer test runners and the test files are put back; then the tests run. Nothing that the program did to its git history,
its interpreter, its home or its tests reaches B.

The solution's code runs in the process of its tests. A test counts as passed only if the runner says so with a word
that the diff cannot know; a solution that is written to deceive the runner from inside is not detected.
"""

from __future__ import annotations

import fnmatch
import io
import json
import posixpath
import secrets
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

import anyio
import anyio.to_thread
import attrs

from rollouts.base.validators import as_texts, number
from rollouts.errors import ConfigError
from rollouts.sandboxes import Exit, RunningSandbox, Sandbox, SandboxError, opened
from rollouts.sandboxes.base import log_close_failure

__all__ = [
    "Files",
    "GitCommit",
    "InImage",
    "Prepared",
    "RepositoryTask",
    "Tarball",
    "Verdict",
    "evaluate",
    "prepare",
    "score",
    "take_diff",
]

PROTECTED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
)
"""Names of files that change how tests run: in B they are as in the repository. The last two have other settings, too;
with one option of pytest among them no test runs, and the exit code is 0."""

Outcome: TypeAlias = Literal[
    "resolved", "tests_failed", "tests_timed_out", "no_change", "diff_not_taken", "diff_not_applied"
]

_GIT = (
    *("env", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null"),
    *("GIT_AUTHOR_NAME=agent", "GIT_AUTHOR_EMAIL=agent@sandbox", "GIT_AUTHOR_DATE=2024-01-01T00:00:00Z"),
    *("GIT_COMMITTER_NAME=agent", "GIT_COMMITTER_EMAIL=agent@sandbox", "GIT_COMMITTER_DATE=2024-01-01T00:00:00Z"),
    "git",
)
"""Fixed names and dates: the base commit has the same hash in all places of a task."""
_DIFF = ("diff", "--cached", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index")
_ADD_BASE = """
rename() { find . -mindepth 2 -name "$1" -prune -exec sh -c 'for at; do mv "$at" "${at%/*}/$0"; done' "$2" {} + || :; }
rename .git "$1" 2>/dev/null
git add -A -- . ":(exclude,glob)**/$1" ":(exclude,glob)**/$1/**"; end=$?
rename "$1" .git 2>/dev/null
exit $end
"""
"""Adds all files of the workspace, also of the repositories below it, which stay repositories: git adds no file of one,
but tracks the files that it has, and new ones in their folders."""
_OPEN_UP = "find . -mindepth 2 -name .git -prune -exec rm -rf {} + 2>/dev/null || :"
"""Makes the repositories below the workspace plain folders: git would leave the files of a new one out of a diff. git
itself leaves out a folder that cannot be read."""
_TAIL = 4000

RUNNER = """
import os, sys, traceback, unittest
word = sys.stdin.readline().strip()
with open(sys.argv[1], "w") as report:
    sys.path.insert(0, os.getcwd())
    for name in sys.argv[2:]:
        result = unittest.TestResult()
        try:
            unittest.defaultTestLoader.loadTestsFromName(name).run(result)
            bad = [*result.errors, *result.failures]
            good = result.wasSuccessful() and result.testsRun > 0 and not (result.skipped or result.expectedFailures)
        except BaseException:
            bad, good = [("", traceback.format_exc())], False
        print(name, "passed" if good else "failed", *(text for _, text in bad), file=sys.stderr)
        report.write(f"{word} {int(good)} {name}\\n")
        report.flush()
"""
"""Runs tests of ``unittest`` by name, and reports each with a word that it reads before it imports them."""


@attrs.frozen
class Files:
    """A repository given as its files."""

    files: Mapping[str, bytes] = attrs.field(repr=False)
    """Content by path."""
    executable: Collection[str] = ()
    """Paths of files that may be executed."""

    @classmethod
    def of_folder(cls, folder: str | Path) -> Files:
        """Read a folder, without its ``.git``."""
        root = Path(folder)
        if not root.is_dir():
            raise ConfigError.of("folder", str(folder), "a folder that exists")
        paths = [
            path for path in sorted(root.rglob("*")) if path.is_file() and ".git" not in path.relative_to(root).parts
        ]
        names = {path.relative_to(root).as_posix(): path for path in paths}
        executable = tuple(name for name, path in names.items() if path.stat().st_mode & 0o111)
        return cls({name: path.read_bytes() for name, path in names.items()}, executable)

    async def tree(self) -> bytes:
        """The files as a tar archive."""
        return _archive(self.files, self.executable)


@attrs.frozen
class GitCommit:
    """A commit of a git repository on this machine. Its history is not shown: it may contain the solution."""

    path: str
    commit: str

    async def tree(self) -> bytes:
        """The files of the commit as a tar archive, as they are in the commit.

        The repository's own attributes may keep files out of archives, and expand text in them: the archive is made in
        a folder with the same objects, whose attributes take precedence.
        """
        here = ["git", "-C", self.path, "rev-parse", "--path-format=absolute"]
        commit = (await self._done([*here, "--verify", "--end-of-options", self.commit])).decode().strip()
        objects = await self._done([*here, "--git-path", "objects"])
        form = (await self._done([*here, "--show-object-format"])).decode().strip()
        with tempfile.TemporaryDirectory(prefix="rollouts-commit-") as name:
            folder = Path(name)
            await self._done(["git", "init", "-q", "--bare", "--template=", f"--object-format={form}", name])
            (folder / "objects" / "info" / "alternates").write_bytes(objects)
            (folder / "info").mkdir()
            (folder / "info" / "attributes").write_text("* -export-ignore -export-subst\n")
            return await self._done(["git", f"--git-dir={name}", "archive", "--format=tar", commit])

    async def _done(self, line: Sequence[str]) -> bytes:
        done = await anyio.run_process(line, check=False, stderr=subprocess.PIPE)
        if done.returncode != 0:
            raise ConfigError(f"GitCommit: got {self!r}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout


@attrs.frozen
class Tarball:
    """A tar archive on this machine whose root is the repository; compressed or not."""

    path: str

    async def tree(self) -> bytes:
        """The bytes of the archive."""
        try:
            return await anyio.Path(self.path).read_bytes()
        except OSError as error:
            raise ConfigError.of("Tarball.path", self.path, f"a file that can be read ({error.strerror})") from None


@attrs.frozen
class InImage:
    """A folder of the sandbox's image, which is copied to the workspace without its ``.git``.

    A repository that is installed from its folder, as by ``pip install -e``, is imported from there, and not from the
    workspace: its tests would test the untouched code. With ``in_place`` the folder itself becomes the workspace: a
    link to it stands in its place.
    """

    path: str
    in_place: bool = False


Source: TypeAlias = Files | GitCommit | Tarball | InImage


def _check_names(instance: RepositoryTask, field: Any, value: Any) -> None:
    if (not value and field.name == "fail_to_pass") or any(
        not isinstance(name, str) or name.startswith("-") for name in value
    ):
        raise ConfigError.of(f"RepositoryTask.{field.name}", value, "names of tests, none of which begins with '-'")


def _check_paths(instance: RepositoryTask, field: Any, value: Mapping[str, bytes]) -> None:
    for path in value:
        if path.startswith(("/", "~")) or ".." in path.split("/"):
            raise ConfigError.of("RepositoryTask.test_files", path, "paths inside the repository")


@attrs.frozen
class RepositoryTask:
    """One task: a repository, what is wrong with it, and the tests that show it."""

    name: str
    problem: str
    source: Source
    test_files: Mapping[str, bytes] = attrs.field(repr=False, validator=_check_paths)
    """By path; written over what the diff made of them."""
    fail_to_pass: Sequence[str] = attrs.field(converter=as_texts, validator=_check_names)
    """Names of tests that fail without a solution."""
    pass_to_pass: Sequence[str] = attrs.field(default=(), converter=as_texts, validator=_check_names)
    """Names of tests that pass, and must still pass."""
    setup: Sequence[Sequence[str]] = ()
    """Commands run in the workspace before the base commit, in A and in B."""
    test_command: Sequence[str] | None = None
    """Run once for each test, with its name as the last argument; exit code 0 is a pass. By default ``unittest``."""
    reference: bytes | None = attrs.field(default=None, repr=False)
    """A diff that solves the task, for checks of it; no sandbox of a program contains it."""
    python: str = "python3"
    """The interpreter that runs ``unittest``."""
    setup_seconds: float = attrs.field(default=300.0, validator=number(above=0))
    test_seconds: float = attrs.field(default=60.0, validator=number(above=0))
    """Deadline of all tests together."""


@attrs.frozen
class Prepared:
    """The repository of a task in one place."""

    base: str
    """Hash of the base commit."""
    git: bytes = attrs.field(repr=False)
    """Its git folder as a tar archive, kept outside of the place."""


@attrs.frozen
class Verdict:
    """The result of the tests for one diff."""

    outcome: Outcome
    diff: bytes = attrs.field(default=b"", repr=False)
    results: Mapping[str, bool] = attrs.field(factory=dict)
    """Whether each test passed."""
    restored: Sequence[str] = ()
    """Files of the diff that were put back before the tests."""
    output: str = attrs.field(default="", repr=False)
    """The end of what git or the tests wrote."""

    @property
    def resolved(self) -> bool:
        """Every named test passed."""
        return self.outcome == "resolved"

    def metadata(self) -> dict[str, Any]:
        """The verdict for ``Sample.metadata``, as JSON values."""
        values = attrs.asdict(self)
        return values | {
            "diff": self.diff.decode(errors="replace"),
            "restored": list(self.restored),
            "resolved": self.resolved,
        }


async def prepare(task: RepositoryTask, place: RunningSandbox) -> Prepared:
    """Put the repository of a task into an empty workspace, run its set-up, and commit.

    Raises:
        SandboxError: a command of the set-up failed.
    """
    if isinstance(task.source, InImage):
        copy = 'cp -Rp "$1/." . && rm -rf .git'
        await _must(task, place, ["sh", "-c", copy, "sh", task.source.path], task.setup_seconds)
        if task.source.in_place:
            await _link(task, place, task.source.path)
    else:
        await place.write("~/tree.tar", await task.source.tree())
        await _must(task, place, ["tar", "-xf", f"{place.home}/tree.tar"], task.setup_seconds)
        await _must(task, place, ["rm", "-rf", f"{place.home}/tree.tar", ".git"], task.setup_seconds)
    for command in task.setup:
        await _must(task, place, command, task.setup_seconds)
    await _must(task, place, [*_GIT, "init", "-q", "-b", "main"])
    aside = f".git-{secrets.token_hex(8)}"
    await _must(task, place, [*_GIT[:-1], "sh", "-c", _ADD_BASE, "sh", aside], task.setup_seconds)
    await _must(task, place, [*_GIT, "commit", "-q", "--allow-empty", "-m", "base"])
    base = (await _must(task, place, [*_GIT, "rev-parse", "HEAD"])).stdout.strip()
    await _must(task, place, ["tar", "-cf", f"{place.home}/git.tar", ".git"])
    git = await place.read("~/git.tar")
    await _must(task, place, ["rm", f"{place.home}/git.tar"])
    return Prepared(base, git or b"")


async def _link(task: RepositoryTask, place: RunningSandbox, folder: str) -> None:
    """Replace a folder of the image by a link to the workspace.

    Raises:
        ConfigError: the sandbox has the file system of this machine, whose folder would be gone.
        SandboxError: the program's user may not replace it.
    """
    mark = f"{folder.rstrip('/')}.{secrets.token_hex(8)}"
    await _must(task, place, ["touch", mark])
    shared = await anyio.Path(mark).exists()
    await _must(task, place, ["rm", mark])
    if shared:
        expected = "False in a sandbox that has the file system of this machine"
        raise ConfigError.of(f"task {task.name!r}: InImage.in_place", True, expected)
    swap = 'mv "$1" "$2" && ln -s "$PWD" "$1" && rm -rf "$2"'
    await _must(task, place, ["sh", "-c", swap, "sh", folder.rstrip("/"), mark], task.setup_seconds)


async def take_diff(prepared: Prepared, place: RunningSandbox) -> bytes | str:
    """Take the difference of a workspace to its base; text that says why if it cannot be taken.

    The program's own git folder is not used: the base is compared from a copy that the program has not seen.
    """
    folder = f"{place.home}/diff-{secrets.token_hex(8)}"
    git = [*_GIT, f"--git-dir={folder}/.git", f"--work-tree={place.workspace}"]
    for data, command in (
        (prepared.git, ["sh", "-c", 'mkdir -p "$1" && tar -xf - -C "$1"', "sh", folder]),
        (b"", ["sh", "-c", _OPEN_UP]),
        (b"", [*git, "add", "-A"]),
        (b"", [*git, *_DIFF, f"--output={folder}/diff", prepared.base]),
    ):
        end = await place.exec(command, stdin=data, seconds=120.0, cwd=place.workspace)
        if end.code != 0:
            return f"{' '.join(command[-6:])} ended with {end.code}: {end.stderr[-_TAIL:]}"
    try:
        diff = await place.read(f"{folder}/diff")
    except SandboxError as error:
        return str(error)
    return "the diff is missing" if diff is None else diff


async def evaluate(task: RepositoryTask, sandbox: Sandbox, diff: bytes | str) -> Verdict:
    """Score a diff in a fresh place.

    Args:
        sandbox: the kind of the place B, which is opened and closed here.
        diff: what :func:`take_diff` returned.
    """
    if isinstance(diff, str):
        return Verdict("diff_not_taken", output=diff)
    return await score(task, sandbox, diff) if diff else Verdict("no_change")


async def score(task: RepositoryTask, sandbox: Sandbox, diff: bytes) -> Verdict:
    """Run the tests in a fresh place, with a diff, or at the base if it is empty."""
    async with opened(sandbox, log_close_failure) as place:
        prepared = await prepare(task, place)
        if diff:
            apply = [*_GIT, "apply", "--index", "--binary", "--whitespace=nowarn", "-"]
            applied = await place.exec(apply, stdin=diff, seconds=120.0)
            if applied.code != 0:
                return Verdict("diff_not_applied", diff, output=applied.stderr[-_TAIL:])
        restored = await _restore(task, prepared, place)
        if restored is None:
            return Verdict("diff_not_applied", diff, output="the names of its files are too long to check")
        results, end = await _test(task, place)
    outcome: Outcome = "tests_timed_out" if end.timed_out else "resolved" if all(results.values()) else "tests_failed"
    return Verdict(outcome, diff, results, restored, (end.stdout[-_TAIL:] + end.stderr[-_TAIL:]).strip())


async def _restore(task: RepositoryTask, prepared: Prepared, place: RunningSandbox) -> list[str] | None:
    """Put back protected files as at the base, then the test files as in the task; return what the diff had changed.

    ``None`` if the diff changes more files than can be listed.
    """
    names = await _must(task, place, [*_GIT, "diff", "--cached", "--name-only", "--no-renames", "-z", prepared.base])
    if names.truncated:
        return None
    changed = [path for path in names.stdout.split("\0") if path]
    protected = [path for path in changed if _is_protected(path, task.test_files)]
    for path in protected:
        back = await place.exec([*_GIT, "checkout", "-q", prepared.base, "--", f":(literal){path}"])
        if back.code != 0:  # it is not in the base
            await _must(task, place, ["rm", "-rf", "--", f"./{path}"])
    for path, data in task.test_files.items():
        # A folder above may have become a link or a file, and the file a folder.
        above = [parent.as_posix() for parent in reversed(PurePosixPath(path).parents)][1:]
        clear = 'last="$1"; shift; for p; do [ -d "$p" ] && [ ! -L "$p" ] || rm -f -- "$p"; done; rm -rf -- "$last"'
        await _must(task, place, ["sh", "-c", clear, "sh", path, *above])
        await place.write(path, data)
    return sorted({*protected, *(path for path in changed if path in task.test_files)})


def _is_protected(path: str, test_files: Collection[str]) -> bool:
    """Whether a file changes how tests run, or would be imported in the place of a test file."""
    folder, name = posixpath.split(path)
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in PROTECTED):
        return True
    if path in test_files:
        return False  # it is put back as a test file
    module = posixpath.join(folder, name.partition(".")[0])
    for test in map(PurePosixPath, test_files):
        own = test.with_suffix("").as_posix()
        packages = {parent.as_posix() for parent in test.parents} - {"."}
        if path.startswith(f"{own}/") or module in packages | {own}:
            return True
        if name.startswith("__init__.") and folder in packages:
            return True
    return False


async def _test(task: RepositoryTask, place: RunningSandbox) -> tuple[dict[str, bool], Exit]:
    names = list(dict.fromkeys([*task.fail_to_pass, *task.pass_to_pass]))
    if task.test_command is not None:
        results: dict[str, bool] = {}
        left, out, errors, late = task.test_seconds, "", "", False
        for name in names:
            end = await place.exec([*task.test_command, name], seconds=max(left, 0.001))
            left -= end.seconds
            results[name] = end.code == 0 and not end.timed_out
            out, errors, late = out + end.stdout, errors + end.stderr, late or end.timed_out
        return results, Exit(0, out, errors, task.test_seconds - left, late)
    word, report = secrets.token_hex(16), f"{place.home}/report"
    await place.write("~/run_tests.py", RUNNER.encode())
    line = [task.python, "-I", "-B", f"{place.home}/run_tests.py", report, *names]
    end = await place.exec(line, stdin=f"{word}\n".encode(), seconds=task.test_seconds)
    try:
        said = (await place.read(report) or b"").decode(errors="replace").splitlines()
    except SandboxError:  # larger than a report is
        said = []
    return {name: f"{word} 1 {name}" in said for name in names}, end


async def _must(task: RepositoryTask, place: RunningSandbox, command: Sequence[str], seconds: float = 120.0) -> Exit:
    end = await place.exec(command, seconds=seconds)
    if end.code != 0:
        what = json.dumps(list(command))
        raise SandboxError(
            f"task {task.name!r}: {what} ended with {end.code}: {end.stderr[-_TAIL:].strip()}; expected 0"
        )
    return end


def _archive(files: Mapping[str, bytes], executable: Collection[str] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o755 if path in executable else 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
