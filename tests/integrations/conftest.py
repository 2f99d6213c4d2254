"""The table of the comparisons with trainers: trainer, direction, what was compared, the worst difference.

And the list of the cases that were played with the code of slime or miles, too: a test with the marker ``parity`` names
its outcome (``equal``, ``refused by name``, ``slime crashes``), shows it, and is in the list at the end of the tests. A
test that fails is in the list as ``DIFFERENT``.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("equal", "refused by name", "slime crashes", "DIFFERENT")


@pytest.fixture
def compared() -> Callable[..., None]:
    """Assert that a difference is within a tolerance, and add it to the table of ``scripts/test --trainers``."""

    def record(trainer: str, direction: str, what: str, worst: float, *, within: float = 0.0, note: str = "") -> None:
        assert worst <= within, f"{trainer}, {direction}, {what}: {worst}"
        if table := os.environ.get("ROLLOUTS_TRAINER_TABLE"):
            line = json.dumps([trainer, direction, what, worst, note])
            with Path(table).open("a") as file:
                file.write(line + "\n")

    return record


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the outcome of a case to its report, also to that of another process."""
    marker = item.get_closest_marker("parity")
    if marker is not None:
        (outcome,) = marker.args
        assert outcome in OUTCOMES[:-1], outcome
        item.user_properties.append(("parity", outcome))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the cases that were played, if any."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, ())]
    if lines := parity_lines(reports):
        terminalreporter.write_sep("=", "cases played with the code of slime or miles, too")
        for line in lines:
            terminalreporter.write_line(line)


def parity_lines(reports: Iterable[Any]) -> list[str]:
    """For each outcome and test the number and the names of its cases; the numbers of all at the end."""
    found: dict[str, str] = {}
    for report in reports:
        outcome = dict(report.user_properties).get("parity")
        if outcome is not None and (report.when == "call" or report.failed):
            found[report.nodeid] = "DIFFERENT" if report.failed else outcome
    cases: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, outcome in found.items():
        test, _, case = name.rpartition("::")[2].partition("[")
        cases[outcome, test.removeprefix("test_").replace("_", " ")].append(case.removesuffix("]"))
    rows = sorted(cases.items(), key=lambda row: (OUTCOMES.index(row[0][0]), row[0][1]))
    lines = [f"{kind:15} {len(names):3}  {test}: {'; '.join(names)}".rstrip(" :;") for (kind, test), names in rows]
    numbers = Counter(found.values())
    total = ", ".join(f"{numbers[outcome]} {outcome}" for outcome in OUTCOMES)
    return [*lines, f"{len(found)} cases: {total}"] if lines else []
