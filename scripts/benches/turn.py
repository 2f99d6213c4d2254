"""Time of one turn, by the length of the history."""

from __future__ import annotations

import argparse

from rollouts.engine import DEMO_MODEL
from rollouts.renderer import renderer_for
from scripts.benches.growth import history_rows

__all__ = ["bench_turn", "turn_options"]

Row = dict[str, float | int | str]


def bench_turn(options: argparse.Namespace) -> list[Row]:
    """CPU time of one turn of the loop without the server (parse, step, render, store, write the request)."""
    return history_rows(renderer_for(options.tokenizer), options.history, options.episodes)


def turn_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", default=str(DEMO_MODEL), help="folder or name (default: the demo model)")
    parser.add_argument("--history", type=int, nargs="+", default=[2000, 16000, 64000], help="(default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=5, help="(default: %(default)s)")
