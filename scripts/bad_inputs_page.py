"""Writes docs/bad_inputs.md: bad inputs and faults with their messages, from the rows that the tests provoke."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bad_inputs import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "bad_inputs.md"


def main() -> None:
    argparse.ArgumentParser(prog="scripts/bad_inputs", description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
