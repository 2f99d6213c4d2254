"""Points and reports: what fails, what informs, and the table of several servers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollouts.errors import EndpointRefused
from rollouts.inference.conformance.points import Finding, Point, Report, Result, Skipped, ask_all, table
from rollouts.inference.conformance.sglang import POINTS
from rollouts.inference.conformance.vllm import VLLM_POINTS

DOCS = Path(__file__).parents[3] / "docs"


async def no(probe: str) -> Finding:
    return Finding(False, f"{probe} says no")


async def yes(probe: str) -> Finding:
    return Finding(True, f"{probe} says yes")


async def refuses(probe: str) -> Finding:
    raise EndpointRefused("status 400: no")


async def lacks_a_field(probe: str) -> Finding:
    return Finding(True, {}["meta_info"])


async def skips(probe: str) -> Finding:
    raise Skipped("no text")


@pytest.mark.parametrize(
    ("check", "relied", "unsafe", "verdict", "came"),
    [
        (yes, True, False, "yes", "it says yes"),
        (no, True, False, "FAIL", "it says no"),
        (no, False, False, "no", "it says no"),
        (refuses, True, False, "FAIL", "EndpointRefused: status 400: no"),
        (lacks_a_field, True, False, "FAIL", "KeyError: meta_info"),
        (skips, True, False, "not asked", "no text"),
        (yes, True, True, "not asked", "may end the server: --unsafe"),
    ],
)
async def test_a_point_fails_only_if_a_feature_relies_on_it(
    check: Callable[[str], Awaitable[Finding]], relied: bool, unsafe: bool, verdict: str, came: str
) -> None:
    """A response of another form is a failed point, not a crash; what may end the server is asked on request only."""
    point = Point("a point", "GET /", "a feature", check, relied, unsafe)
    (result,) = await ask_all([point], "it")
    assert (result.verdict, result.came.replace("'", "")) == (verdict, came)
    report = Report("server", [result], ["a difference"])
    assert [one.name for one in report.failed] == (["a point"] if verdict == "FAIL" else [])
    assert ("leans on it: a feature" in str(report)) == (verdict == "FAIL")
    assert "differs    a difference" in str(report)


def test_a_result_is_one_line() -> None:
    """A server's message of several lines is shown in one."""
    result = Result("bad requests", "", "", True, "yes", "status 400: 1 validation error:\n  {'type': 'x'}")
    assert str(result) == "yes        bad requests: status 400: 1 validation error: {'type': 'x'}"


async def test_a_table_has_a_column_for_each_server() -> None:
    """A point that one report lacks is not asked there; a bar in a message does not end its cell."""
    one = Report("one", await ask_all([Point("p|q", "GET /", "f", no), Point("r", "GET /", "f", yes)], "it"))
    other = Report("other", await ask_all([Point("r", "GET /", "f", yes)], "it"))
    assert table([one, other]).splitlines() == [
        "| point | what leans on it | one | other |",
        "|---|---|---|---|",
        "| p\\|q | f | FAIL: it says no | not asked |",
        "| r | f | yes: it says yes | yes: it says yes |",
    ]


def test_the_documented_table_has_every_point() -> None:
    """docs/conformance.md has a row for each point, in order; points that only vLLM has are last."""
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "conformance.md").read_text(), re.MULTILINE)
    names = dict.fromkeys(point.name for point in (*POINTS, *VLLM_POINTS))
    assert rows[rows.index("describes itself") :] == [*names]
