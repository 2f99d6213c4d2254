"""Processes, runs and verdicts that the tests with faults share.

A fault is held if it costs at most its rollout or group and nothing false is stored: the run finishes, ``verify``
finds no violation, and no invalid reply and no group of a failed function is in a batch. Invalid replies contain
``MARK``, an id that sound replies never contain.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import READY
from rollouts.recipe import Recipe
from rollouts.renderer import renderer_for
from rollouts.runs.run import RunResult, run
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter

__all__ = [
    "CALL",
    "MARK",
    "ROOT",
    "SOUND",
    "Engine",
    "Outcome",
    "endpoint_at",
    "in_process",
    "judged",
    "sound_reply",
    "stored",
]

ROOT = Path(__file__).resolve().parents[2]
os.environ["TOKENIZERS_PARALLELISM"] = (
    "false"  # its threads would not survive a fork, and would compete with the engine
)

Outcome: TypeAlias = Literal["held", "silent", "ended"]
"""``ended``: the run ended early, or raised."""

RENDERER = renderer_for(str(DEMO_MODEL))
SOUND = tuple(map(int, RENDERER.encode("The answer is 3.<|im_end|>")))
CALL = tuple(
    int(token)
    for token in RENDERER.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>')
)
MARK = int(RENDERER.encode("Z")[0])
assert MARK not in SOUND + CALL


class Engine:
    """The embedded engine on one port, which can be killed and restarted; it ends with the process that started it."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "rollouts", "serve", "--port", str(self.port), "--slots", "64"]
        with self._log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, "--stop-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        if not any(line.startswith(READY) for line in self.process.stdout):
            raise SystemExit(f"the engine did not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def in_process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run ``target(*arguments, pipe)`` in a process until the end of the context; yields the other end of the pipe."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def endpoint_at(url: str) -> Endpoint:
    """The demo model at a stub that answers at once or never."""
    return Endpoint(base_url=url, model=str(DEMO_MODEL), request_seconds=5.0, max_retries=3)


def sound_reply(rng: random.Random) -> Callable[[list[int], dict[str, Any]], Sequence[int]]:
    """A script of calls and answers."""
    return lambda ids, sampling: CALL if rng.random() < 0.3 else SOUND


async def stored(recipe: Recipe, folder: Path, **options: Any) -> RunResult:
    """Run a recipe with a journal in a folder."""
    writer = RunWriter(folder, recipe.describe(), format="jsonl")
    run_journal = begin(folder, recipe.describe(), recipe.data_buffer)
    with run_journal.journal:
        result = await run(recipe, writer, run_journal=run_journal, **options)
    result.accounting.check()
    return result


async def judged(recipe: Recipe, folder: Path, wrong: Callable[[], str]) -> tuple[Outcome, str]:
    """Run a recipe; ``wrong`` names the error of a run that finished without a violation, or returns ``""``."""
    try:
        with anyio.fail_after(60):
            result = await stored(recipe, folder)
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - the finding
        return "ended", repr(error)[:300]
    if result.status != "finished":
        return "ended", str(result.error)[:300]
    report = verify_run(folder)
    found = wrong() if report.ok else str(report.violations[0])[:300]
    return ("silent", found) if found else ("held", "")
