"""docs/harbor.md: the table of the fields of ``task.toml``, from the classes that read them."""

from __future__ import annotations

from pathlib import Path

from rollouts.harbor.schema import field_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "harbor.md"
BEGIN, END = "<!-- scripts/docs/write harbor -->\n", "<!-- end -->"


def pages() -> dict[Path, str]:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return {PAGE: f"{before}{BEGIN}\n{field_table()}\n{END}{rest.partition(END)[2]}"}
