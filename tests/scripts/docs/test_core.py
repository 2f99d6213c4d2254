"""docs/core.md and the picture of core and wings in README.md are those of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs.core import CORE, README, ROOT, STEPS, core_rooms, pages
from tests.test_architecture import FLOORS

NUMBER = re.compile(r" *\b\d[\d,]*\b")


@pytest.mark.parametrize("path", [CORE, README], ids=lambda path: path.name)
def test_a_page_is_that_of_the_imports(path: Path) -> None:
    """Files, packages and arrows are the same, and lines differ by less than a quarter; write it again otherwise."""
    found, text = path.read_text(encoding="utf-8"), pages()[path]
    assert NUMBER.sub("", found) == NUMBER.sub("", text), "out of date: scripts/docs/write core"
    for here, there in zip(NUMBER.findall(found), NUMBER.findall(text), strict=True):
        shown, counted = (int(number.replace(",", "")) for number in (here, there))
        assert 0.75 * counted <= shown <= 1.25 * counted, "out of date: scripts/docs/write core"


def test_each_step_has_files_and_a_paragraph() -> None:
    """In the order of the table."""
    assert [name for _, names in STEPS for name in names if not (ROOT / "rollouts" / name).is_file()] == []
    headings = re.findall(r"^## (\d+)\. (.*)$", CORE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == [(str(number), role) for number, (role, _) in enumerate(STEPS, 1)]


def test_the_core_imports_no_wing() -> None:
    """Programs, sandboxes, trainers, the engine and the command line are loaded by no file of the core."""
    wings = FLOORS.keys() - core_rooms()
    assert {"rollouts.programs", "rollouts.sandboxes", "rollouts.engine", "rollouts.integrations"} <= wings
    assert len(core_rooms()) <= 12
