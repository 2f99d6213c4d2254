"""Writes the pages in ``docs/`` that are made from the code: ``scripts/docs/write PAGE [--check]``.

A page module has ``pages()``, the path and the text of each file that it writes. ``failures`` plays for minutes, so it
has no check, and prints what it finds.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from rollouts.errors import ConfigError

PAGES = ("bad_inputs", "core", "failures", "families", "harbor", "metrics")
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs/write", description=__doc__)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is out of date")
    args = parser.parse_args()
    if args.page == "failures":
        if args.check:
            parser.error("failures has no --check: it plays each fault")
        from scripts.docs.failures import all_faults

        return all_faults()
    try:
        pages: dict[Path, str] = importlib.import_module(f"scripts.docs.{args.page}").pages()
    except ConfigError as error:
        print(f"scripts/docs/write {args.page}: {error}", file=sys.stderr)
        return 2
    old = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if args.check:
            print(
                f"scripts/docs/write {args.page}: {path.relative_to(ROOT)} is out of date; run it without --check",
                file=sys.stderr,
            )
        else:
            path.write_text(pages[path], encoding="utf-8")
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
