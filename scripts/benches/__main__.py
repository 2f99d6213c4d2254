"""Benchmarks. Without a name: all that have a target; the exit code is 1 if a target is missed."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

Row = dict[str, float | int | str]
SUITE = "targets"


def _suite(argv: list[str]) -> None:
    from scripts.benches.calls import bench_calls
    from scripts.benches.lines import COLUMNS, calls_section, machine, page
    from scripts.benches.suite import BENCHES, run
    from scripts.benches.workloads import default_tokenizer

    parser = argparse.ArgumentParser(prog=f"scripts/bench {SUITE}", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of the ratios (default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--page", type=Path, help="write the page of the documentation, too")
    given = parser.parse_args(argv)
    tokenizer = given.tokenizer or default_tokenizer()
    lines = []
    for line in run(given.only, tokenizer, given.rounds):
        lines.append(line)
        print(" · ".join(cell for cell in line.cells() if cell), file=sys.stderr)
    if given.json:
        print(json.dumps({"machine": machine(), "lines": [line.to_dict() for line in lines]}, indent=2))
    else:
        _print([dict(zip(COLUMNS, line.cells(), strict=True)) for line in lines], "Targets")
    if given.page:
        calls, times = (
            bench_calls(argparse.Namespace(tokenizer=tokenizer, cpu=cpu, rounds=20)) for cpu in (False, True)
        )
        given.page.write_text(page(lines, machine(), Path(tokenizer).name, calls_section(calls, times)))
    short = [f"{line.name}: {line.value:.2f}, {line.sense} {line.target:g}" for line in lines if not line.ok]
    if short:
        sys.exit("missed targets: " + "; ".join(short))


OTHERS = (
    "audit",
    "calls",
    "curate",
    "dispatch",
    "fill",
    "gateway",
    "internals",
    "ors",
    "peers",
    "plan",
    "scale",
    "scheduler",
    "service",
    "slime",
    "slots",
    "workers",
)
"""Modules with ``bench_NAME`` and ``NAME_options``; imported on use, since some take seconds."""


def _written(value: float | int | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:,.{1 if abs(value) >= 10 else 3}f}"


def _print(rows: Sequence[Mapping[str, float | int | str]], title: str) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*map(_written, row.values()))
    Console().print(table)


def main() -> None:
    name, *rest = sys.argv[1:] or [SUITE]
    if name not in OTHERS:
        if name in ("-h", "--help"):
            print(f"scripts/bench [{SUITE}] …, or bench {' | '.join(OTHERS)} …; each has --help\n")
        _suite(rest if name == SUITE else sys.argv[1:])
        return
    module = importlib.import_module(f"scripts.benches.{name}")
    run, options = getattr(module, f"bench_{name}"), getattr(module, f"{name}_options")
    parser = argparse.ArgumentParser(prog=f"scripts/bench {name}", description=run.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options(parser)
    given = parser.parse_args(rest)
    rows = run(given)
    if given.json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows, run.__doc__ or name)
    if any("NO" in row.values() for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
