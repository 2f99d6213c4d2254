"""An episode by part: the job of ``scripts/bench peers``, in function calls or in CPU time.

No other load changes the number of calls; the CPU time says which of them matter.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import operator
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import rollouts
from rollouts.testing.canned import canned_server
from scripts.benches import peers
from scripts.benches.peers_job import EPISODES, Job
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_calls", "calls_options", "sampled"]

K = TypeVar("K")
Row = dict[str, float | int | str]
_PACKAGE = Path(rollouts.__file__).parent
_SAMPLE_SECONDS = 0.001
_FILE: Callable[[CodeType], str] = operator.attrgetter("co_filename")
_LIBRARIES = ("jinja2", "anyio", "asyncio", "numpy", "msgspec", "attr")


def bench_calls(options: argparse.Namespace) -> list[Row]:
    """Calls of functions, or microseconds of CPU, for an episode of 3 turns of 256 tokens with a calculator."""
    job = Job.of(str(options.tokenizer or default_tokenizer()))
    found: collections.Counter[str] = collections.Counter()
    rounds = options.rounds if options.cpu else 1
    with canned_server(job.canned) as url:
        peers.ours(job, url, 0)  # to warm up
        with sampled(found, _FILE) if options.cpu else _counted(found):
            seconds = [peers.ours(job, url, number).cpu for number in range(1, rounds + 1)]
    unit, total = "calls an episode", found.total() / EPISODES
    if options.cpu:
        unit, total = "us an episode", 1e6 * sum(seconds) / rounds / EPISODES
    parts: collections.Counter[str] = collections.Counter()
    for file, number in found.items():
        parts[_part_of(Path(file))] += number
    rows: list[Row] = [
        {"part": part, unit: total * number / parts.total(), "share": f"{number / parts.total():.0%}"}
        for part, number in parts.most_common()
    ]
    return [*rows, {"part": "together", unit: total, "share": ""}]


@contextlib.contextmanager
def _counted(found: collections.Counter[str]) -> Iterator[None]:
    """Count the function calls inside by file; a function written in C counts for its caller."""

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def sampled(found: collections.Counter[K], key: Callable[[CodeType], K]) -> Iterator[None]:
    """Count by key which function runs at each millisecond of CPU time; one written in C counts for its caller."""

    def sample(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            found[key(frame.f_code)] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLE_SECONDS, _SAMPLE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _part_of(file: Path) -> str:
    """The folder or module of the package, or the library."""
    if file.is_relative_to(_PACKAGE):
        return file.relative_to(_PACKAGE).parts[0].removesuffix(".py")
    names = {*file.parts, *str(file).strip("<>").split(".")}
    return next(
        (library for library in _LIBRARIES if library in names), "jinja2" if file.name == "<template>" else "other"
    )


def calls_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
    parser.add_argument("--cpu", action="store_true", help="sample CPU time in place of counting calls")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 256 episodes to sample (default: 20)")
