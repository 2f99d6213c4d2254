"""Time to fill a batch, and prompts started for it."""

from __future__ import annotations

import argparse
import statistics

from scripts.benches.fill_simulation import World, run_ours, run_slime

__all__ = ["bench_fill", "fill_options"]

Row = dict[str, float | int | str]


def bench_fill(options: argparse.Namespace) -> list[Row]:
    """Ten batches at 30 % prompts without spread, on a virtual clock: our manager and slime's algorithm."""
    rows: list[Row] = []
    for sigma in options.sigma:
        for slots in options.slots:
            worlds = [
                World(batch_size=options.batch_size, n=options.n, sigma=sigma, slots=slots or None, seed=seed)
                for seed in options.seeds
            ]
            pairs = [(run_ours(world, options.factor), run_slime(world)) for world in worlds]
            ratios = [ours.seconds / theirs.seconds for ours, theirs in pairs]
            rows.append(
                {
                    "sigma": f"{sigma:g}",
                    "slots": str(slots or "no limit"),
                    "slime, s a batch": statistics.fmean(theirs.seconds for _, theirs in pairs) / 10,
                    "ours, s a batch": statistics.fmean(ours.seconds for ours, _ in pairs) / 10,
                    "ratio (worst seed)": f"{statistics.fmean(ratios):.3f} ({max(ratios):.3f})",
                    "slime, started per kept": f"{statistics.fmean(t.started_per_kept for _, t in pairs):.3f}",
                    "ours (worst seed)": f"{statistics.fmean(o.started_per_kept for o, _ in pairs):.3f} "
                    f"({max(o.started_per_kept for o, _ in pairs):.3f})",
                }
            )
    return rows


def fill_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=32, help="groups (default: %(default)s)")
    parser.add_argument("--n", type=int, default=8, help="rollouts in a group (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=2.0, help="over_sampling_factor (default: %(default)s)")
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0], help="lognormal (default: %(default)s)")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[0, 256, 128], help="0: no limit (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="(default: %(default)s)")
