"""Function calls of an episode by part: the job of ``scripts/bench peers``, in counts that no other load changes."""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import rollouts
from rollouts.testing.canned import canned_server
from scripts.benches import peers
from scripts.benches.peers_job import EPISODES, Job
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_calls", "calls_options"]

Row = dict[str, float | int | str]
_PACKAGE = Path(rollouts.__file__).parent
_LIBRARIES = ("jinja2", "anyio", "asyncio", "numpy", "msgspec", "attr")


def bench_calls(options: argparse.Namespace) -> list[Row]:
    """Calls of functions, those written in C included, for an episode of 3 turns of 256 tokens with a calculator."""
    job = Job.of(str(options.tokenizer or default_tokenizer()))
    found: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):  # a function written in C counts for its caller
            found[frame.f_code.co_filename] += 1

    with canned_server(job.canned) as url:
        peers.ours(job, url, 0)  # to warm up
        sys.setprofile(count)
        try:
            peers.ours(job, url, 1)
        finally:
            sys.setprofile(None)
    parts: collections.Counter[str] = collections.Counter()
    for file, calls in found.items():
        parts[_part_of(Path(file))] += calls
    total = sum(parts.values())
    rows: list[Row] = [
        {"part": part, "calls an episode": calls / EPISODES, "share": f"{calls / total:.0%}"}
        for part, calls in parts.most_common()
    ]
    return [*rows, {"part": "together", "calls an episode": total / EPISODES, "share": ""}]


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
