"""The list of cases that a trainer's own code played, too."""

from __future__ import annotations

from types import SimpleNamespace

from tests.integrations.conftest import parity_lines


def report(name: str, outcome: str | None, *, failed: bool = False, when: str = "call") -> SimpleNamespace:
    properties = [] if outcome is None else [("parity", outcome)]
    return SimpleNamespace(nodeid=f"tests/test_x.py::{name}", user_properties=properties, failed=failed, when=when)


def test_each_case_is_listed_once_with_its_outcome() -> None:
    """A case that fails is different, whatever it ought to show; a test without an outcome is in no line."""
    assert parity_lines([report("test_other", None)]) == []
    reports = [
        report("test_a_flag[one]", "equal"),
        report("test_a_flag[one]", "equal", when="setup"),
        report("test_a_flag[two]", "equal", failed=True),
        report("test_a_flag[three]", "equal"),
        report("test_a_value", "refused by name"),
        report("test_other", None),
    ]
    assert parity_lines(reports) == [
        "equal             2  a flag: one; three",
        "refused by name   1  a value",
        "DIFFERENT         1  a flag: two",
        "4 cases: 2 equal, 1 refused by name, 0 slime crashes, 1 DIFFERENT",
    ]
