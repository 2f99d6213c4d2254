"""The page has the table of the fields that the code has."""

from __future__ import annotations

import attrs

from rollouts.harbor.schema import MODELS
from scripts.docs.harbor import pages


def test_the_page_has_the_table_of_the_fields() -> None:
    """``scripts/docs/write harbor`` would change nothing."""
    assert [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text] == []


def test_every_field_says_who_honours_it() -> None:
    """Each field of each table has a reader and a use."""
    for cls in MODELS.values():
        for field in attrs.fields(cls):
            assert field.metadata["use"] in ("both", "trial", "stored", "refused"), field
            assert callable(field.metadata["reader"]), field
