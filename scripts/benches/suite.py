"""The benchmarks with targets, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from rollouts.renderer import Renderer, renderer_for
from scripts.benches import growth, journal, memory, ratios, stops
from scripts.benches.lines import Line

__all__ = ["BENCHES", "run"]

Bench = Callable[[Renderer, int], Iterator[Line]]

BENCHES: dict[str, Bench] = {
    **{
        name: functools.partial(lambda name, renderer, rounds: ratios.against_the_floor(renderer, name, rounds), name)
        for name in ratios.JOBS
    },
    "single": lambda renderer, rounds: single(renderer, rounds),
    "G": lambda renderer, rounds: ratios.groups(renderer, max(3, rounds // 2)),
    "naive": lambda renderer, rounds: ratios.against_naive(renderer, max(3, rounds // 2)),
    "connections": lambda renderer, rounds: growth.concurrency(renderer, max(1, rounds // 3)),
    "history": growth.history,
    "samples": lambda renderer, rounds: growth.samples(1),
    "memory": lambda renderer, rounds: memory.memory(renderer),
    "loop": lambda renderer, rounds: stops.stops(renderer, max(3, rounds // 2)),
    "journal": lambda renderer, rounds: journal.journal(rounds),
}


def single(renderer: Renderer, rounds: int) -> Iterator[Line]:
    """The ratios with another prompt for each sample."""
    for name in ratios.JOBS:
        yield from ratios.against_the_floor(renderer, name, rounds, n=1)


def run(names: list[str], tokenizer: str | Path, rounds: int) -> Iterator[Line]:
    """The lines of these benchmarks, as they are measured."""
    renderer = renderer_for(tokenizer)
    assert renderer.encoder  # loads the fast encoder, as a long run does
    for name in names:
        yield from BENCHES[name](renderer, rounds)
