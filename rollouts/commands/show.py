"""``rollouts show``: print a stored run: its groups, the samples of a group, its failures, or one transcript.

Invariant: it changes nothing on disk; a transcript is decoded from stored tokens wherever the tokenizer loads.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rollouts.commands.arguments import add_verb, check_run, positive
from rollouts.errors import ConfigError
from rollouts.renderer.tokenizer import local_decoder
from rollouts.runs.folder import Row, read_rows
from rollouts.runs.info import note_of_calls, read_info
from rollouts.runs.layout import Which
from rollouts.runs.reading import reading
from rollouts.training.types import Sample
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.tables import failure_kinds, failures_table, first_failed, groups_table, samples_table
from rollouts.views.terminal.transcript import transcript, visible

__all__ = ["add", "show_run"]


def show_run(
    path: Path,
    console: Console,
    *,
    group: int | None = None,
    number: int | None = None,
    outcome: Which = "all",
    limit: int = 60,
    tokenizer: str | None = None,
    failures: bool = False,
) -> None:
    """Print a table of groups, of one group's samples, of the failures, or one transcript.

    Args:
        path: the run's folder.
        console: the output.
        group: only this group.
        number: print the transcript of one sample: its position in ``group`` from 0, or its ``index`` in the run.
        outcome: the outcome of the groups to show.
        limit: most groups in the table.
        tokenizer: replaces the tokenizer that the run names.
        failures: print the kinds of failures, and the traceback of the most frequent.

    Raises:
        ConfigError: the run, group or sample does not exist, or cannot be read.
    """
    for part in _parts(path, group, number, outcome, limit, tokenizer, failures=failures):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(
    path: Path,
    group: int | None,
    number: int | None,
    outcome: Which,
    limit: int,
    tokenizer: str | None,
    *,
    failures: bool,
) -> Iterator[RenderableType]:
    """Yield the parts to print, so that an error of the output is not taken for one of the run."""
    with reading(path):
        info = read_info(path)
        if (note := note_of_calls(info)) is not None:
            yield Text(visible(note), "yellow")
        groups = _groups(path, group, outcome)
        if failures:
            yield from _failures(path, groups)
        elif number is not None:
            yield from _transcript(path, groups, group, number, tokenizer or info.get("tokenizer"))
        else:
            yield from _tables(path, groups, group, outcome, limit)


def _groups(path: Path, group: int | None, outcome: Which) -> Iterator[list[Row]]:
    groups: Iterator[list[Row]] = (
        list(rows) for _, rows in itertools.groupby(read_rows(path, outcome), lambda row: row.data.get("group_index"))
    )
    if group is not None:
        groups = (rows for rows in groups if rows[0].data.get("group_index") == group)
        members = next(groups, None)
        if members is None:
            raise ConfigError.of("--group", group, f"a group of {path} (rollouts show {quote(str(path))} lists them)")
        groups = iter([members])
    return groups


def _transcript(
    path: Path, groups: Iterator[list[Row]], group: int | None, number: int, tokenizer: Any
) -> Iterator[RenderableType]:
    sample, position = _sample(groups, group, number)
    decode: Callable[[Any], str] | None = None
    try:
        decode = local_decoder(tokenizer)
    except ConfigError as error:
        yield Text(visible(f"messages instead of tokens: {error}"), "yellow")
    yield transcript(sample, decode)
    yield _dim(
        f"rollouts view {quote(str(path))} shows it at {path.name}.html#group={sample.group_index}&sample={position}"
    )


def _tables(
    path: Path, groups: Iterator[list[Row]], group: int | None, outcome: Which, limit: int
) -> Iterator[RenderableType]:
    listed = list(itertools.islice(groups, limit))
    if group is not None:
        yield samples_table(listed[0])
        yield _next(path, listed[0])
        return
    if not listed:
        yield Text(visible(f"{path} contains no groups of outcome {outcome}"))
        return
    yield groups_table(listed)
    more = sum(1 for _ in groups)
    if more:
        yield _dim(f"... and {more} more: --limit")
    failed = next((rows for rows in listed if any(row.data.get("failure") for row in rows)), None)
    if failed is not None:
        yield _dim(f"next: rollouts show {quote(str(path))} --failures")
    yield _next(path, failed or listed[0])


def _failures(path: Path, groups: Iterator[list[Row]]) -> Iterator[RenderableType]:
    """The kinds of failures with their number, and the traceback of the first sample of the most frequent."""
    kinds = failure_kinds(groups)
    if not kinds:
        yield Text(visible(f"{path} contains no failure"))
        return
    yield failures_table(kinds)
    first = kinds[0]
    place = f"group {first.group}, sample {first.sample}"
    yield Text(visible(f"\n{place}:\n{first.failure.traceback.rstrip()}"), "red")
    for kind in kinds:
        yield _dim(f"next: rollouts show {quote(str(path))} --group {kind.group} --sample {kind.sample}")


def _next(path: Path, rows: Sequence[Row]) -> Text:
    """The command that shows the first failed sample of a group, else the first."""
    group = rows[0].data.get("group_index")
    return _dim(f"next: rollouts show {quote(str(path))} --group {group} --sample {first_failed(rows)}")


def _dim(text: str) -> Text:
    return Text(visible(text), "dim")


def _sample(groups: Iterator[list[Row]], group: int | None, number: int) -> tuple[Sample, int]:
    """A sample, and its position in its group."""
    if group is None:
        indices = []
        for rows in groups:
            for position, row in enumerate(rows):
                indices.append(row.data.get("index"))
                if indices[-1] == number:
                    return row.sample(), position
        known = [index for index in indices if isinstance(index, int)]
        within = f", from {min(known)} to {max(known)}" if known else "; it has none"
        raise ConfigError.of("--sample", number, f"the index of a sample of the run{within}")
    (members,) = groups
    if not 0 <= number < len(members):
        raise ConfigError.of("--sample", number, f"0 to {len(members) - 1}, in group {group}")
    return members[number].sample(), number


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "show", _show, "print a stored run: groups, samples, transcripts", "show runs/a --group 3 --sample 0"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--group", type=int, metavar="N", help="print the samples of this group_index")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="transcript of a sample: its position in --group or index in the run"
    )
    parser.add_argument(
        "--outcome",
        default="all",
        choices=("kept", "dropped", "failed", "unbatched", "all"),
        help="shown groups (default: all)",
    )
    parser.add_argument(
        "--failures", action="store_true", help="kinds of failures, with a traceback (of --group, if it is given)"
    )
    parser.add_argument("--limit", type=positive, default=60, metavar="N", help="groups in the table (default: 60)")
    parser.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="tokenizer (default: the run's)")


def _show(args: argparse.Namespace) -> int:
    check_run(args.run)
    show_run(
        args.run,
        SafeConsole(),
        group=args.group,
        number=args.sample,
        outcome=args.outcome,
        limit=args.limit,
        tokenizer=args.tokenizer,
        failures=args.failures,
    )
    return 0
