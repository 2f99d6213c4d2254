"""``rollouts export``: write a stored run in another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollouts.base.terminal import say
from rollouts.commands.arguments import above_0, add_verb, at_least_0, check_run
from rollouts.errors import ConfigError
from rollouts.integrations.exports import EXPORTERS, export_batches, exporters
from rollouts.integrations.slime.debug_data import export_run
from rollouts.runs.export import export_rows

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "export", _export, "convert a stored run to a file format", "export runs/a --to hf data/a")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--to",
        required=True,
        choices=("jsonl", "parquet", "hf", "slime", *exporters()),
        help="jsonl: one file, a line per sample; parquet: one file; hf: a folder for datasets.load_dataset; slime: "
        "files for slime's --load-debug-rollout-data; a folder with a file for each batch: "
        + "; ".join(f"{name} ({exporter.meaning})" for name, exporter in EXPORTERS.items()),
    )
    parser.add_argument("out", metavar="OUT", help="file or folder; for slime with {rollout_id}: a file per batch")
    parser.add_argument(
        "--outcome",
        default="kept",
        choices=("kept", "dropped", "failed", "unbatched", "all"),
        help="groups (default: kept)",
    )
    having = ", ".join(name for name, exporter in EXPORTERS.items() if exporter.numbers_versions)
    parser.add_argument(
        "--version",
        type=at_least_0,
        metavar="N",
        help=f"number of the policy version, where the server's is none ({having})",
    )
    parser.add_argument(
        "--temperature",
        type=above_0,
        metavar="T",
        help="temperature by which the trainer divides logits (1); a run that was sampled at another is refused",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file, or the exported folder, at OUT")


def _export(args: argparse.Namespace) -> int:
    check_run(args.run)
    of_rows = args.to in ("jsonl", "parquet", "hf")
    if args.version is not None and (of_rows or args.to == "slime"):
        raise ConfigError.of("version", args.version, f"none with --to {args.to}: it stores versions as text")
    if args.temperature is not None and of_rows:
        expected = f"none with --to {args.to}: it stores the temperature of each completion"
        raise ConfigError.of("temperature", args.temperature, expected)
    if not of_rows:
        if args.outcome != "kept":
            expected = f'"kept" with --to {args.to}: a trainer takes whole batches'
            raise ConfigError.of("--outcome", args.outcome, expected)
        if args.to == "slime":
            paths = export_run(args.run, args.out, overwrite=args.overwrite, temperature=args.temperature)
        else:
            named = {"version": args.version, "temperature": args.temperature}
            paths = export_batches(args.run, args.out, args.to, overwrite=args.overwrite, **named)
    else:
        paths = export_rows(args.run, args.out, args.to, args.outcome, overwrite=args.overwrite)
    for path in paths:
        say(path)
    return 0
