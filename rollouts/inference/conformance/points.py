"""Points of a server's behaviour, their results, and tables of several servers.

Invariant: a point that a feature relies on fails the report unless the server behaves as expected; any other point is
reported as it is. A check that raises on a response is a point that fails, with the error.

This module does not know protocols and sends nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Literal, TypeVar

import anyio
import attrs
import msgspec

from rollouts.errors import ConfigError, RolloutsError

__all__ = ["Finding", "Point", "Report", "Result", "Skipped", "ask_all", "read_report", "table"]

P = TypeVar("P")

POINT_SECONDS = 120.0
"""Deadline of one point."""
MAX_ERROR_CHARACTERS = 160
"""Characters of an error that a report shows."""

Verdict = Literal["yes", "no", "FAIL", "not asked"]
"""``FAIL`` is a ``no`` on which a feature relies."""


@attrs.frozen
class Finding:
    """Whether a server behaves as expected, and what it answered."""

    ok: bool
    came: str


class Skipped(Exception):
    """The point cannot be asked of this server; the message is the reason."""


@attrs.frozen
class Point(Generic[P]):
    """One behaviour of a server."""

    name: str
    asked: str
    """The request, and the expected response."""
    feature: str
    """The feature that relies on it."""
    check: Callable[[P], Awaitable[Finding]]
    relied: bool = True
    """Whether the feature is wrong without it; otherwise the point only informs."""
    unsafe: bool = False
    """Whether asking may end the server."""


class Result(msgspec.Struct, frozen=True):
    """The answer to one point."""

    name: str
    asked: str
    feature: str
    relied: bool
    verdict: Verdict
    came: str

    def __str__(self) -> str:
        return f"{self.verdict:<9}  {self.name}: {' '.join(self.came.split())}"


class Report(msgspec.Struct, frozen=True):
    """All answers of one server."""

    server: str
    results: list[Result]
    differences: list[str] = []
    """The differences from the server that it implements, as the server reports them."""

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.verdict == "FAIL"]

    def __str__(self) -> str:
        lines = [self.server, *map(str, self.results)]
        lines += [f"differs    {text}" for text in self.differences]
        for result in self.failed:
            lines += ["", f"FAIL {result.name}", f"  asked:     {result.asked}", f"  came:      {result.came}"]
            lines += [f"  leans on it: {result.feature}"]
        return "\n".join(lines)


async def ask_all(points: Sequence[Point[P]], probe: P, *, unsafe: bool = False) -> list[Result]:
    """Ask every point, in order; points that may end the server only with ``unsafe``."""
    return [await _ask(point, probe, unsafe=unsafe) for point in points]


async def _ask(point: Point[P], probe: P, *, unsafe: bool) -> Result:
    def result(verdict: Verdict, came: str) -> Result:
        return Result(point.name, point.asked, point.feature, point.relied, verdict, came)

    if point.unsafe and not unsafe:
        return result("not asked", "may end the server: --unsafe")
    try:
        with anyio.fail_after(POINT_SECONDS):
            finding = await point.check(probe)
    except Skipped as error:
        return result("not asked", str(error))
    except TimeoutError:
        finding = Finding(False, f"no answer within {POINT_SECONDS:g} s")
    except _OF_RESPONSES as error:
        text = f"{type(error).__name__}: {error}"
        finding = Finding(False, text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}...")
    return result("yes" if finding.ok else "FAIL" if point.relied else "no", finding.came)


_OF_RESPONSES = (RolloutsError, LookupError, TypeError, ValueError, AttributeError)
"""Exceptions of a check on an error, or on a response of another form."""


def read_report(data: bytes, place: str) -> Report:
    """Decode a report that ``rollouts check-server --json`` printed.

    Raises:
        ConfigError: the data are not a report; the message names ``place``.
    """
    try:
        return msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--table: got {place}; expected the output of rollouts check-server --json; {error}"
        ) from None


def table(reports: Sequence[Report]) -> str:
    """A Markdown table: a row for each point, a column for each server."""
    rows = dict.fromkeys(result.name for report in reports for result in report.results)
    first = {result.name: result for report in reversed(reports) for result in report.results}
    lines = [
        "| point | what leans on it | " + " | ".join(_cell(report.server) for report in reports) + " |",
        "|---|---|" + "---|" * len(reports),
    ]
    for name in rows:
        found = [next((result for result in report.results if result.name == name), None) for report in reports]
        cells = ["not asked" if one is None else _cell(f"{one.verdict}: {one.came}") for one in found]
        lines.append(f"| {_cell(name)} | {_cell(first[name].feature)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
