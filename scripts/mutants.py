"""Mutation test: small changes of the central modules, each of which their nearest test files must notice.

``scripts/test --mutants [N] [--only GLOB] [--seed S] [--jobs J]`` draws N mutants (200) of the modules of
:data:`NEAREST`, by a fixed seed, and runs the test files of each until one fails. A survivor is a missing test, or a
change without effect. Mutants run in copies of the working tree, which itself is never changed.

Before, the tests run without a mutant, to learn which lines each of them runs: a mutant is given only to those that run
its statement, the fastest first. ``scripts/mutations.py`` has the changes, ``scripts/mutant_crew.py`` the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from scripts.mutant_crew import ROOT, Crew
from scripts.mutations import Mutant, mutants_of

NEAREST: dict[str, tuple[str, ...]] = {
    "rollouts/trajectory.py": (
        "tests/test_trajectory.py",
        "tests/agent/test_turn_log.py",
        "tests/test_token_exactness.py",
    ),
    "rollouts/agent/episode.py": (
        "tests/agent/test_episode.py",
        "tests/agent/test_loop.py",
        "tests/agent/test_raw_continuation.py",
        "tests/agent/test_turn_log.py",
        "tests/agent/test_images.py",
    ),
    "rollouts/renderer/bridge.py": ("tests/renderer/test_bridge.py",),
    "rollouts/runs/run_journal.py": (
        "tests/runs/test_run_journal_laws.py",
        "tests/runs/test_run_journal.py",
    ),
    "rollouts/runs/journal.py": ("tests/runs/test_journal.py", "tests/runs/test_damage.py"),
    "rollouts/training/manager.py": (
        "tests/training/test_fail_fast.py",
        "tests/training/test_manager.py",
        "tests/training/test_staleness.py",
        "tests/test_manager_semantics.py",
    ),
    "rollouts/training/group_runner.py": (
        "tests/training/test_failures.py",
        "tests/training/test_filters.py",
        "tests/test_manager_semantics.py",
    ),
    "rollouts/training/rollout_attempt.py": (
        "tests/training/test_rollout_attempt.py",
        "tests/training/test_failures.py",
        "tests/test_manager_semantics.py",
    ),
    "rollouts/training/staleness.py": ("tests/training/test_staleness.py",),
    "rollouts/training/data_buffer.py": ("tests/training/test_data_buffer.py", "tests/test_manager_semantics.py"),
}
"""Test files of each module, or of the modules of a glob, the fastest first."""

PRELOADED = (
    "anyio._backends._asyncio",
    "hypothesis",
    "jinja2",
    "msgspec",
    "numpy",
    "PIL.Image",
    "pytest_asyncio",
    "transformers",
)
"""What most test files import, apart from the project's modules."""

HANG_SECONDS = 60
"""Least deadline of one test, which ends a wait that nothing wakes; a slow test has ten times what it takes alone."""

Table = Mapping[str, Sequence[str]]


def drawn(
    count: int, seed: int, *, only: str = "*", table: Table = NEAREST, root: Path = ROOT
) -> list[tuple[Mutant, Sequence[str]]]:
    """``count`` mutants of the table's modules, with the test files of each; the same ones for the same seed."""
    mutants: list[tuple[Mutant, Sequence[str]]] = []
    for pattern, tests in table.items():
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            if fnmatch.fnmatch(name, only):
                mutants += [(mutant, tests) for mutant in mutants_of(name, path.read_text(encoding="utf-8"))]
    chosen = sorted(random.Random(seed).sample(range(len(mutants)), min(count, len(mutants))))
    return [mutants[number] for number in chosen]


# -- running them ------------------------------------------------------------------------------------------------------


class Lines:
    """A plugin of pytest: which lines of some modules each test runs, and how long it takes."""

    def __init__(self, tree: Path, modules: Iterable[str]) -> None:
        self.found: dict[str, Any] = {}
        self._names = {str(tree / module): module for module in modules}
        self._running: set[tuple[str, int]] = set()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._names else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._running.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = set()
        began = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines = sorted([self._names[name], line] for name, line in self._running)
            self.found[item.nodeid] = [time.monotonic() - began, lines]


class Chosen:
    """A plugin of pytest: runs some tests in their order, and keeps the name of the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.failed = ""
        self._places = {name: place for place, name in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _pytest(files: Iterable[str], plugin: object, *options: str) -> int:
    options += ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    options += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of what is imported already
    return int(pytest.main([*options, *files], plugins=[plugin]))


def lines_of(crew: Crew, files: Iterable[str], modules: Sequence[str]) -> dict[str, Any]:
    """Seconds of each test, and the lines of the modules that it runs; all tests must pass."""
    found: dict[str, Any] = {}
    for file in files:

        def work(tree: Path, file: str = file) -> object:
            lines = Lines(tree, modules)
            return [_pytest([file], lines), lines.found]

        def done(tree: Path, result: str, file: str = file) -> None:
            code, lines = json.loads(result or "[1, {}]")
            if code:
                print(tree.with_suffix(".log").read_text(errors="replace"))
                raise SystemExit(f"scripts/mutants: {file} fails without a mutant")
            found.update(lines)
            print(f"{file}: {len(lines)} tests", flush=True)

        crew.start(work, done, seconds=3600)
    crew.finish()
    return found


def covering(mutant: Mutant, files: Sequence[str], lines: Mapping[str, Any]) -> list[str]:
    """The tests in some files that run the statement of a mutant, the fastest first."""
    ran = [
        (seconds, name)
        for name, (seconds, executed) in lines.items()
        if name.partition("::")[0] in files
        and (mutant.at_import or any(path == mutant.path and line in mutant.lines for path, line in executed))
    ]
    return [name for _, name in sorted(ran)]


def run(
    crew: Crew, mutants: Sequence[tuple[Mutant, Sequence[str]]], *, seconds: float, hang: float = HANG_SECONDS
) -> dict[Mutant, str]:
    """The first test that fails with each mutant, or "" where it survives; prints each as it ends.

    Args:
        crew: the processes.
        mutants: each with its tests.
        seconds: deadline of all tests of a mutant.
        hang: deadline of one test.
    """
    results: dict[Mutant, str] = {}
    for mutant, tests in mutants:

        def work(tree: Path, tests: Sequence[str] = tests) -> object:
            chosen = Chosen(tests)
            files = dict.fromkeys(name.partition("::")[0] for name in tests)
            code = _pytest(files, chosen, f"--timeout={hang}") if tests else 0
            return chosen.failed or ("" if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else f"exit code {code}")

        def done(tree: Path, result: str, mutant: Mutant = mutant, tests: Sequence[str] = tests) -> None:
            _write(tree / mutant.path, mutant.source)
            results[mutant] = failed = json.loads(result) if result else f"died, or took over {seconds:.0f} s"
            end = failed or f"SURVIVES {len(tests)} tests\n{mutant.diff}"
            print(f"{len(results)}/{len(mutants)} {mutant.path}:{mutant.line} {end}", flush=True)

        def prepare(tree: Path, mutant: Mutant = mutant) -> None:
            _write(tree / mutant.path, mutant.text)

        crew.start(work, done, prepare=prepare, seconds=seconds)
    crew.finish()
    return results


def _write(path: Path, text: str) -> None:
    """Write a module with the checksum as its time: by the time, Python recognises the byte code of another text."""
    path.write_text(text, encoding="utf-8")
    checksum = zlib.crc32(text.encode())
    os.utime(path, (checksum, checksum))


def report(results: Mapping[Mutant, str]) -> str:
    """The survivors, each with its place and its change."""
    survivors = sorted((mutant for mutant, failed in results.items() if not failed), key=lambda m: (m.path, m.start))
    lines = [f"{mutant.path}:{mutant.line}\n{mutant.diff}\n" for mutant in survivors]
    noticed = len(results) - len(survivors)
    return "\n".join([*lines, f"{noticed} of {len(results)} mutants are noticed; {len(survivors)} survive"])


def main(arguments: Sequence[str] | None = None, table: Table = NEAREST, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(prog="scripts/test --mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=200, metavar="N", help="number of mutants (200)")
    parser.add_argument("--only", default="*", metavar="GLOB", help="modules to draw from, by their path")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed draws other mutants (0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="mutants at a time (2)")
    parser.add_argument("--seconds", type=float, default=600, metavar="T", help="deadline of one mutant (600)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("ROLLOUTS_TEST_ASSETS", str(ROOT.parent / "shared" / "assets"))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    drew = drawn(options.count, options.seed, only=options.only, table=table, root=root)
    with Crew(options.jobs, root) as crew:
        files = dict.fromkeys(name for _, names in drew for name in names)
        print(f"{len(drew)} mutants; first {len(files)} test files without one", flush=True)
        lines = lines_of(crew, files, list({mutant.path for mutant, _ in drew}))
        chosen = [(mutant, covering(mutant, names, lines)) for mutant, names in drew]
        hang = max([HANG_SECONDS, *(10 * seconds for seconds, _ in lines.values())])
        print(report(run(crew, chosen, seconds=options.seconds, hang=hang)))


if __name__ == "__main__":
    main()
