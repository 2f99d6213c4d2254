"""Ratios of CPU time: ours / lean, and naive / ours."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rollouts.renderer import Renderer
from rollouts.testing.canned import Canned, canned_server
from rollouts.training import Sample
from scripts.benches import loops
from scripts.benches.lines import Line
from scripts.benches.workloads import WORKLOADS, Play

__all__ = ["against_naive", "against_the_floor", "groups"]

JOBS = ("S", "L", "A", "H")
"""The jobs that are compared with the lean loop, which has no checks: for information, without a target."""
N = 8
"""Samples of a group, as in use."""


def played(play: Play, url: str, **options: Any) -> loops.Round:
    """One round of ours, with its journal in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="rollouts-bench-"))
    play.renderer.forget()  # no cached texts, as in every other loop
    try:
        return loops.ours(play, url, folder / "journal", **options)
    finally:
        shutil.rmtree(folder)


def check(play: Play, samples: list[Any]) -> None:
    """Exit unless the loops did the same work: the same ids in every sample."""
    for number, sample in enumerate(samples):
        index = number if not isinstance(sample, Sample) else sample.index
        assert index is not None
        tokens = sample.token_column if isinstance(sample, Sample) else np.asarray(sample.tokens)
        if not np.array_equal(tokens, play.expected(index)):
            raise SystemExit(f"sample {index} has other tokens than the loop that it is compared with")


def against_the_floor(renderer: Renderer, name: str, rounds: int, n: int = N) -> Iterator[Line]:
    """CPU time of ours over that of the lean loop with the same encoder; in the details, with ``tokenizers``."""
    play = Play.of(WORKLOADS[name], renderer, n)
    turns = play.workload.samples * play.workload.turns
    with canned_server(Canned([play.reply])) as url:
        check(play, loops.lean(play, url).samples)
        check(play, played(play, url).samples)
        found = [
            (played(play, url).cpu, loops.lean(play, url).cpu, loops.lean(play, url, encoder="tokenizers").cpu)
            for _ in range(rounds)
        ]
    details = {
        "ours ms/turn": _best(found, 0, turns),
        "lean ms/turn": _best(found, 1, turns),
        "ours / lean with tokenizers": statistics.median(ours / slow for ours, _, slow in found),
    }
    label = name if n == N else f"single {name}"
    yield Line.of(label, "ours / lean", [ours / lean for ours, lean, _ in found], None, details=details)


def against_naive(renderer: Renderer, rounds: int) -> Iterator[Line]:
    """CPU time of the naive loop over ours, 64 connections."""
    play = Play.of(attrs.evolve(WORKLOADS["S"], samples=128, in_flight=64), renderer)
    turns = play.workload.samples * play.workload.turns
    with canned_server(Canned([play.reply])) as url:
        check(play, loops.naive(play, url).samples)
        pairs = [(loops.naive(play, url).cpu, played(play, url).cpu) for _ in range(rounds)]
    details = {"naive ms/turn": _best(pairs, 0, turns), "ours ms/turn": _best(pairs, 1, turns)}
    values = [a / b for a, b in pairs]
    yield Line.of("naive", "naive / ours, 64 connections", values, 5.0, sense="at least", details=details)


def groups(renderer: Renderer, rounds: int) -> Iterator[Line]:
    """The same groups with a reward and a filter, over those without."""
    play = Play.of(WORKLOADS["S"], renderer, N)
    turns = play.workload.samples * play.workload.turns
    with canned_server(Canned([play.reply])) as url:
        played(play, url, reward_fn=_reward, filter_fn=_spread)
        pairs = [
            (played(play, url, reward_fn=_reward, filter_fn=_spread).cpu, played(play, url).cpu) for _ in range(rounds)
        ]
    details = {"with ms/turn": _best(pairs, 0, turns), "without ms/turn": _best(pairs, 1, turns)}
    yield Line.of("G", "S with reward and filter / S", [a / b for a, b in pairs], details=details)


def _reward(sample: Sample) -> float:
    return float((sample.index or 0) % 2)


def _spread(samples: list[Sample]) -> bool:
    return len({sample.reward for sample in samples}) > 1


def _best(pairs: Sequence[tuple[float, ...]], side: int, turns: int) -> float:
    return 1000 * min(pair[side] for pair in pairs) / turns
