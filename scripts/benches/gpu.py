"""A step of GRPO on a GPU."""

from __future__ import annotations

import argparse

from scripts.benches.gpu_step import run_gpu

__all__ = ["bench_gpu", "gpu_options"]

Row = dict[str, float | int | str]


def bench_gpu(options: argparse.Namespace) -> list[Row]:
    """A GRPO step on a random Qwen3: tokens a second and memory, padded and packed; and agreement with the CPU."""
    rows = run_gpu(options.size, groups=options.groups, n=options.n, longest=options.longest, steps=options.steps)
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "") for name in columns} for row in rows]


def gpu_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=("tiny", "0.6b"), default="0.6b", help="of the model (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--n", type=int, default=8, help="rollouts in a group (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed (default: %(default)s)")
