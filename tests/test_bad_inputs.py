"""Each fault has the message of docs/bad_inputs.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bad_inputs import ROWS, Row, message_of, page
from tests.packages import needing


@pytest.mark.parametrize("row", [needing(row.needs, row, row.what) for row in ROWS])
def test_the_message_is_the_one_of_the_table(row: Row, tmp_path: Path) -> None:
    """From its first word; ``…`` in the table matches anything."""
    message = message_of(row, tmp_path)
    assert re.match("(?s:.*)".join(map(re.escape, row.message.split("…"))), message), message
    assert len(row.message.replace("…", "")) > 4


def test_the_page_is_the_table() -> None:
    """docs/bad_inputs.md is up to date with scripts/docs/write bad_inputs."""
    assert (Path(__file__).parents[1] / "docs" / "bad_inputs.md").read_text(encoding="utf-8") == page()
