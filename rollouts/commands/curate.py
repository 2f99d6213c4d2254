"""``rollouts curate``: make a training set of stored runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import attrs

from rollouts.base.terminal import say
from rollouts.commands.arguments import add_repeatable, add_verb, at_least_0, check_run, positive

__all__ = ["add"]

_TARGETS = ("tokens", "chat", "pairs", "kto")


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs,
        "curate",
        _curate,
        "make a data set for SFT or preference training of stored runs",
        'curate runs/a runs/b --to tokens --out data/sft --where "pass_rate in 0.1..0.9"',
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs; tasks are pooled over them")
    parser.add_argument(
        "--to",
        required=True,
        choices=_TARGETS,
        help="tokens: input_ids and labels, the exact ids and mask; chat: messages and tools; pairs: prompt, chosen, "
        "rejected; kto: prompt, completion, label",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the data set; not with --dry-run")
    parser.add_argument(
        "--where", metavar="EXPR", help='condition on a rollout, e.g. "pass_rate in 0.1..0.9 and turns <= 20"'
    )
    parser.add_argument(
        "--select",
        metavar="WHICH",
        help="correct, best[:N], shortest[:N] (of the correct ones) or all (default: correct; pairs and kto: all)",
    )
    parser.add_argument(
        "--passing",
        type=float,
        default=1.0,
        metavar="R",
        help="a rollout passes with at least this reward (default: 1)",
    )
    parser.add_argument("--per-task", type=positive, metavar="N", help="the most rollouts, or pairs, of a task")
    parser.add_argument("--seed", type=at_least_0, default=0, metavar="N", help="decides between equals (default: 0)")
    parser.add_argument(
        "--near", type=float, metavar="S", help="remove near duplicates of this similarity, e.g. 0.8 (extra curate)"
    )
    does = "held-out prompts, or a run: rollouts that share 13 words in a row with one are refused; may be repeated"
    add_repeatable(parser, "--not-in", "FILE_OR_RUN", does)
    parser.add_argument(
        "--tools", type=Path, metavar="FILE", help="JSON file with the tools of runs that did not store them"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME_OR_DIR",
        help="of the student: encode text of a chat API (rollouts run --text) to token rows, marked encoded=text",
    )
    parser.add_argument(
        "--format", default="auto", choices=("auto", "parquet", "jsonl"), help="format of the rows (default: auto)"
    )
    parser.add_argument(
        "--without-source", action="store_true", help="leave out the column source, for trainers that refuse it"
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing, print what would be written")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set at DIR")


def _curate(args: argparse.Namespace) -> int:
    from rollouts.curation import Selection, curate, write_folder  # a wing: no other verb loads it
    from rollouts.curation.card import account_table, reweighted
    from rollouts.curation.writing import check_out
    from rollouts.errors import ConfigError

    for run in args.runs:
        check_run(run)
    if args.dry_run == (args.out is not None):
        got = str(args.out) if args.dry_run else "nothing"
        raise ConfigError.of("--out", got, "no folder with --dry-run" if args.dry_run else "a folder, or --dry-run")
    if args.out is not None:
        check_out(args.out, args.format, overwrite=args.overwrite)
    options = {field.name: getattr(args, field.name) for field in attrs.fields(Selection)}
    selection = Selection(**{**options, "not_in": tuple(args.not_in)})
    curation = curate(args.runs, args.to, selection, tokenizer=args.tokenizer)
    if args.dry_run:
        for _ in curation:
            pass
    else:
        write_folder(
            curation, args.out, format=args.format, overwrite=args.overwrite, without_source=args.without_source
        )
    account = curation.account
    for name, count in account_table(account):
        say(f"{count:>9} {name}")
    trained = f", {account.trained} of {account.tokens} tokens trained" if args.to == "tokens" else ""
    say(f"{account.rows} rows of {account.tasks_written} tasks{trained}")
    if note := reweighted(account):
        say(note)
    if args.out is not None:
        say(f"files: {args.out}")
    return 0
