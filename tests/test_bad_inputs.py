"""Whatever is wrong is said in the words of docs/bad_inputs.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bad_inputs import ROWS, Row, page, said_of
from tests.packages import needing


@pytest.mark.parametrize("row", [needing(row.needs, row, row.what) for row in ROWS])
def test_it_is_said_as_the_table_says(row: Row, tmp_path: Path) -> None:
    """From its first word; where the table has dots, anything may stand."""
    said = said_of(row, tmp_path)
    assert re.match("(?s:.*)".join(map(re.escape, row.message.split("…"))), said), said
    assert len(row.message.replace("…", "")) > 4


def test_the_page_is_the_table() -> None:
    """docs/bad_inputs.md is what scripts/bad_inputs writes now."""
    assert (Path(__file__).parents[1] / "docs" / "bad_inputs.md").read_text(encoding="utf-8") == page()
