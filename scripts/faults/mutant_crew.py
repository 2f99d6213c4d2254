"""Forked processes, each of which works in its own copy of the working tree: no import is paid twice.

Invariant: the working tree is never changed, and no process outlives the crew, also if SIGTERM ends it. The output of
each goes to a log next to its copy. This module knows no mutant and no test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Self

import attrs

__all__ = ["ROOT", "Crew", "nothing"]

ROOT = Path(__file__).parents[2]

Work = Callable[[Path], object]
"""Runs in a process, in the given copy; its result is written as JSON."""
Done = Callable[[Path, str], None]
"""Gets the copy and the result, or "" if the process died or was late."""


def nothing(tree: Path) -> None:
    """Prepare nothing."""


@attrs.frozen
class _Running:
    tree: Path
    end: float
    done: Done


class Crew:
    """As many processes at a time as there are copies. This process must not have imported the project's modules.

    Args:
        jobs: number of copies.
        root: the working tree.
    """

    def __init__(self, jobs: int, root: Path = ROOT) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rollouts-crew-")).resolve()
        self._free = [self._folder / str(number) for number in range(jobs)]
        self._busy: dict[int, _Running] = {}
        for tree in self._free:
            _copy_tree(root, tree)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt this
        for process in self._busy:
            self._kill(process)
        shutil.rmtree(self._folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def start(self, work: Work, done: Done, *, prepare: Callable[[Path], None] = nothing, seconds: float) -> None:
        """Run ``work`` in a process as soon as a copy is free, and ``done`` in this one when it has ended."""
        while not self._free:
            self._wait()
        tree = self._free.pop()
        prepare(tree)
        _result(tree).unlink(missing_ok=True)
        sys.stdout.flush()
        process = os.fork()
        if not process:
            _run(tree, work)
        self._busy[process] = _Running(tree, time.monotonic() + seconds, done)

    def finish(self) -> None:
        """Wait for all processes."""
        while self._busy:
            self._wait()

    def _wait(self) -> None:
        """Wait until one process has ended, or kill it at its deadline."""
        while True:
            for process, running in self._busy.items():
                ended, late = os.waitpid(process, os.WNOHANG)[0], time.monotonic() > running.end
                if ended or late:
                    self._kill(process, ended=bool(ended))
                    del self._busy[process]
                    self._free.append(running.tree)
                    result = _result(running.tree)
                    running.done(running.tree, result.read_text() if result.exists() else "")
                    return
            time.sleep(0.02)

    @staticmethod
    def _kill(process: int, *, ended: bool = False) -> None:
        """End a process, if it has not ended, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if not ended:
            os.kill(process, signal.SIGKILL)  # it may not have its group yet
            os.waitpid(process, 0)


def _leave(number: int, frame: object) -> NoReturn:
    """End this process with the exit status of a shell, after all ``with`` blocks."""
    raise SystemExit(128 + number)


def _result(tree: Path) -> Path:
    return tree.with_suffix(".json")


def _run(tree: Path, work: Work) -> NoReturn:
    """The life of a forked process."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        log = os.open(tree.with_suffix(".log"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), log, log]):
            os.dup2(file, number)
        os.chdir(tree)
        for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(tree)
        result = json.dumps(work(tree))
        _result(tree).write_text(result)
    except BaseException:  # noqa: BLE001 - the log is all that is left of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _copy_tree(root: Path, target: Path) -> None:
    """Copy the files that git does not ignore."""
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(line, cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file() or (root / name).is_symlink():  # to a folder of the tree
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
