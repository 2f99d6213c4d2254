"""The points against the embedded engine, its faults, and a server that only looks like one."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollouts.commands import main
from rollouts.dtypes import Endpoint
from rollouts.inference.conformance.points import Report, ask_all, read_report
from rollouts.inference.conformance.probe import Probe, opened
from rollouts.inference.conformance.sglang import POINTS
from rollouts.testing.server import StubServer

pytest.importorskip("torch")

QUICK = ["--idle-seconds", "0.1"]


@pytest.fixture(scope="module")
def report(engine_url: str) -> Report:
    """All points of the embedded engine. This takes more than 2 s of CPU: no part of the points shows that all hold."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["conformance", "--endpoint", engine_url, "--json", "--unsafe", *QUICK])
    assert code == 0, printed.getvalue()
    return read_report(printed.getvalue().encode(), "stdout")


def test_the_embedded_engine_conforms(report: Report) -> None:
    """Every point holds, and what the engine reports as different from SGLang is part of the report."""
    assert {result.name: result.verdict for result in report.results} == {point.name: "yes" for point in POINTS}
    assert report.server == "rollouts engine, protocol of SGLang 0.5.23"
    assert any("vocabulary" in text for text in report.differences)


def test_reports_become_a_table(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--table`` prints a column for each stored report, and names a file that is not a report."""
    import msgspec

    for name in ("a", "b"):
        (tmp_path / name).write_bytes(msgspec.json.encode(report))
    assert main(["conformance", "--table", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(POINTS)
    (tmp_path / "b").write_text("{}")
    assert main(["conformance", "--table", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert f"--table: got {tmp_path / 'b'}; expected the output of" in capsys.readouterr().err


def test_a_server_that_invents_logprobs_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Replies of the right form without a model behind them: exit code 1, and the points that show it are named."""
    stub = StubServer(lambda ids, params: [7] * params.get("max_new_tokens", 1), max_context=1024)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(stub) as server:
        assert main(["conformance", "--endpoint", server.url, *QUICK]) == 1
    out = capsys.readouterr().out
    assert "yes        version spans: " in out
    assert "no         ready: status 404" in out
    assert "not asked  temperature scales logprobs: " in out
    for name in (
        "own score, cold",
        "stop ids stay",
        "abort",
        "a rid twice",
        "longer than the context",
        "pause",
        "update",
    ):
        assert f"FAIL {name}\n" in out, name
    assert "leans on it: law 8" in out


async def test_a_short_queue_fails_no_point() -> None:
    """A full queue is waited for, and a burst ends before the next point."""
    from rollouts.engine import DEMO_MODEL, running_server

    asked = [point for point in POINTS if point.name in ("64 replies at once", "temperature scales logprobs")]
    async with running_server(DEMO_MODEL, slots=2, max_queued=4) as url:
        async with opened(Probe, Endpoint(base_url=url)) as probe:
            results = await ask_all(asked, probe)
    assert [result.verdict for result in results] == ["yes", "yes"], results


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"stale_cache": True}, "update", "FAIL"),
    ({"shared_prefixes": True}, "extra_key", "FAIL"),
    ({"shared_prefixes": True}, "prefixes after an update in place", "FAIL"),
    ({"unflushed_updates": True}, "update of a busy server", "no"),
    ({"keep_alive_seconds": 0.05}, "an idle connection", "no"),
]


@pytest.mark.parametrize(("fault", "name", "verdict"), FAULTS, ids=[name for _, name, _ in FAULTS])
async def test_a_fault_is_found(fault: dict[str, Any], name: str, verdict: str) -> None:
    """The point that is named for it fails, or informs where the client copes."""
    from rollouts.engine import DEMO_MODEL, running_server

    points = [point for point in POINTS if point.name == name]
    async with running_server(DEMO_MODEL, slots=8, **fault) as url:
        async with opened(Probe, Endpoint(base_url=url), idle_seconds=1.0) as probe:
            (result,) = await ask_all(points, probe)
    assert result.verdict == verdict, result.came


def test_no_server_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the URL, and nothing is reported."""
    assert main(["conformance", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
