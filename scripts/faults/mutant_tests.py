"""The tests of mutants, in one process and its copy: which lines each test runs, and which test notices a mutant.

The process imports everything and collects the tests once. For each mutant it forks, exchanges the code of the changed
functions, and runs only the given tests. The changed module is in the copy meanwhile, for programs that tests start.
This module draws no mutants and reports nothing.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import attrs
import pytest

from scripts.faults.mutations import Mutant

__all__ = ["Lines", "Trial", "lines_run_by", "play"]

Key = tuple[str, int]
"""Qualified name and first line of a function."""


@attrs.frozen
class Trial:
    """A mutant and the tests that may notice it, in the order in which they run."""

    mutant: Mutant
    tests: tuple[str, ...]
    seconds: float
    """Deadline of all of them."""
    hang: float
    """Deadline of each of them."""


Found = Callable[[Trial, str], None]
"""Gets the first test that fails with a mutant, or "" if it survives."""


# -- without a mutant --------------------------------------------------------------------------------------------------


class Lines:
    """A plugin of pytest: seconds of each test, and the lines that it runs of some modules."""

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


def lines_run_by(tree: Path, file: str, modules: Iterable[str]) -> dict[str, Any] | None:
    """Seconds and lines of each test of a file; ``None`` if one fails."""
    lines = Lines(tree, modules)
    return None if _pytest([file], lines) else lines.found


# -- with a mutant -----------------------------------------------------------------------------------------------------


def play(tree: Path, trials: Sequence[Trial], found: Found) -> None:
    """Play mutants one after another. Changes outside of functions come first, each with new imports."""
    for trial in trials:
        if not trial.tests:
            found(trial, "")
        elif not is_code(trial.mutant):
            run = functools.partial(_pytest, _files([trial]), _Chosen(tree, trial))
            _forked(tree, trial, found, run)
    rest = [trial for trial in trials if trial.tests and is_code(trial.mutant)]
    if rest:
        _pytest(_files(rest), _Loop(tree, rest, found))


class _Chosen:
    """A plugin of pytest: only these tests, in this order; the first that fails is the result of the process."""

    def __init__(self, tree: Path, trial: Trial) -> None:
        self._tree = tree
        self._trial = trial

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}  # not all, if a file cannot be imported
        items[:] = [by_name[name] for name in self._trial.tests if name in by_name]
        for item in items:
            item.add_marker(pytest.mark.timeout(self._trial.hang))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            _end(self._tree, report.nodeid)


class _Loop:
    """A plugin of pytest: in the place of its loop over all tests, a loop over mutants."""

    def __init__(self, tree: Path, trials: Sequence[Trial], found: Found) -> None:
        self._tree = tree
        self._trials = trials
        self._found = found

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions = _functions_in(self._tree)

        def run(trial: Trial) -> int:
            _exchange(trial.mutant, self._tree, functions)
            chosen, items = _Chosen(self._tree, trial), list(session.items)
            session.config.pluginmanager.register(chosen)
            chosen.pytest_collection_modifyitems(items)
            for item, following in itertools.zip_longest(items, items[1:]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            return 0

        for trial in self._trials:
            _forked(self._tree, trial, self._found, functools.partial(run, trial))
        return True


def _forked(tree: Path, trial: Trial, found: Found, run: Callable[[], int]) -> None:
    """Run tests in a forked process, with the mutant in the place of its module."""
    result = tree.with_suffix(".result")
    result.write_text("the process died")
    path = tree / trial.mutant.path
    _write(path, trial.mutant.text)
    process = os.fork()
    if not process:
        text = "an exception ended the tests"
        try:
            code = run()
            text = f"exit code {code}" if code else ""
        finally:
            _end(tree, text)
    end = time.monotonic() + trial.seconds
    while not os.waitpid(process, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            result.write_text(f"over {trial.seconds:.0f} s")
            break
        time.sleep(0.01)
    _write(path, trial.mutant.source)
    found(trial, result.read_text())


def _end(tree: Path, text: str) -> None:
    """End this process with a result."""
    tree.with_suffix(".result").write_text(text)
    sys.stdout.flush()
    os._exit(0)


def _pytest(files: Iterable[str], plugin: object) -> int:
    options = ["-x", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    return int(pytest.main([*options, *files], plugins=[plugin]))


def _files(trials: Iterable[Trial]) -> list[str]:
    return list(dict.fromkeys(name.partition("::")[0] for trial in trials for name in trial.tests))


def _write(path: Path, text: str) -> None:
    """Write a module with the checksum as its time: by the time, Python recognises the byte code of another text."""
    path.write_text(text, encoding="utf-8")
    checksum = zlib.crc32(text.encode())
    os.utime(path, (checksum, checksum))


# -- the code of functions ---------------------------------------------------------------------------------------------


def is_code(mutant: Mutant) -> bool:
    """Whether the mutant is the same functions with other code."""
    before, after = _codes(mutant.source, mutant.path), _codes(mutant.text, mutant.path)
    return not mutant.at_import and {key: code.co_freevars for key, code in before.items()} == {
        key: code.co_freevars for key, code in after.items()
    }


def _exchange(mutant: Mutant, tree: Path, functions: Iterable[FunctionType]) -> None:
    path = str(tree / mutant.path)
    codes = _codes(mutant.text, path)
    for function in functions:
        code = function.__code__
        if code.co_filename == path and (code.co_qualname, code.co_firstlineno) in codes:
            function.__code__ = codes[code.co_qualname, code.co_firstlineno]


def _codes(text: str, path: str) -> dict[Key, CodeType]:
    """The code of each function of a module; without two lambdas of one line, which have no names."""
    codes = list(_nested(compile(text, path, "exec", dont_inherit=True)))
    counts = Counter((code.co_qualname, code.co_firstlineno) for code in codes)
    keyed = ((code.co_qualname, code.co_firstlineno) for code in codes)
    return {key: code for key, code in zip(keyed, codes, strict=True) if counts[key] == 1}


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _functions_in(tree: Path) -> list[FunctionType]:
    """The functions of the modules in a folder."""
    gc.unfreeze()
    functions = [value for value in gc.get_objects() if type(value) is FunctionType]
    gc.freeze()
    return [function for function in functions if function.__code__.co_filename.startswith(f"{tree}{os.sep}")]
