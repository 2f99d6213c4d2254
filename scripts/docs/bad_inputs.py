"""docs/bad_inputs.md: bad inputs and faults with their messages, from the rows that the tests provoke."""

from __future__ import annotations

from pathlib import Path

from tests.bad_inputs import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bad_inputs.md"


def pages() -> dict[Path, str]:
    return {PAGE: page()}
