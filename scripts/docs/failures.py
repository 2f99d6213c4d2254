"""All kinds of faults by area: how many were tried, held, silent, or ended their run; written into docs/failures.md.

Faults of replies, of user code and of programs are played here, each in a separate run. Faults of the other areas are
the cases of existing tests; a case that fails counts as silent.
"""

from __future__ import annotations

import concurrent.futures
import logging
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import anyio
import attrs

from scripts.faults.guests import GUESTS, GuestFault, play_guest
from scripts.faults.harness import ROOT, Outcome
from scripts.faults.replies import REPLIES, ReplyFault, play_reply
from scripts.faults.user_code import CODE, CodeFault, play_code

__all__ = ["BEGIN", "END", "Area", "play_all", "table"]

PAGE = ROOT / "docs" / "failures.md"
BEGIN, END = "<!-- scripts/docs/write failures -->", "<!-- end -->"

TESTS: dict[str, tuple[str, ...]] = {
    "disk and run folder": (
        "tests/runs/test_damage.py",
        "tests/runs/test_verify.py",
        "tests/runs/test_run.py::test_a_disk_that_is_full_stops_the_run_and_what_is_finished_stays",
        "tests/runs/test_run.py::test_a_batch_that_cannot_be_written_is_not_lost",
        "tests/runs/test_settings.py::test_6_another_setting_is_refused",
        "tests/runs/test_settings.py::test_25_an_output_that_takes_nothing_changes_no_run",
        "tests/commands/test_run.py::test_a_live_run_is_left_alone",
        "tests/integration/test_restored.py",
    ),
    "folders that a stranger made": ("tests/integration/test_hostile_folders.py",),
    "signals and processes": (
        "tests/concurrency/test_interrupts.py",
        "tests/runs/test_settings.py::test_26_a_closed_terminal_stops_a_run",
        "tests/distributed/test_processes.py::test_a_killed_process_is_replaced",
        "tests/distributed/test_processes.py::test_a_stopped_process_costs_its_own_groups_only",
        "tests/commands/test_init.py::test_ctrl_c_keeps_what_is_finished",
        "tests/commands/test_init.py::test_an_engine_that_dies_ends_the_run_and_costs_nothing",
        "tests/commands/test_init.py::test_a_killed_run_leaves_no_engine",
    ),
    "terminal": (
        "tests/base/test_terminal.py",
        "tests/views/terminal/test_transcript.py",
        "tests/commands/test_show.py::test_a_run_of_prompts_with_tags_is_shown",
        "tests/commands/test_init.py::test_the_text_of_a_server_does_not_control_the_terminal",
    ),
    "requests that are not HTTP": ("tests/http/test_server_log.py",),
    "sandbox": (
        "tests/sandboxes/test_leftovers.py",
        "tests/environments/test_python_tool.py::test_no_way_out",
        "tests/sandboxes/test_seccomp.py",
        "tests/rewards/test_code.py::test_a_program_cannot_forge_its_tests",
    ),
    "templates": ("tests/renderer/test_template_sandbox.py", "tests/renderer/test_template.py"),
}


@attrs.define
class Area:
    """The outcomes of the kinds of one area."""

    name: str
    tried: int = 0
    held: int = 0
    silent: list[str] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    """Kinds that ended their run and ought not to."""
    ought: list[tuple[str, str]] = attrs.field(factory=list)
    """Kinds that ended their run and ought to, with the reason."""

    def add(self, what: str, outcome: Outcome, ends: str = "") -> None:
        """Count one kind; ``ends`` is why it ought to end the run."""
        self.tried += 1
        if outcome == "ended" and ends:
            self.ought.append((what, ends))
        elif outcome == "held" and not ends:
            self.held += 1
        else:
            (self.ended if outcome == "ended" else self.silent).append(what)


_Fault: TypeAlias = ReplyFault | CodeFault | GuestFault


def _played(fault: _Fault, folder: Path) -> tuple[Outcome, str]:
    try:
        if isinstance(fault, GuestFault):
            return anyio.run(play_guest, fault, folder)
        if isinstance(fault, ReplyFault):
            return anyio.run(play_reply, fault, folder)
        return anyio.run(play_code, fault, folder)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # the fault; asyncio passes it on with the result
        return "ended", repr(error)[:300]


def _tested(area: Area, folder: Path) -> None:
    """Run the tests of an area, and count their cases; cases that this machine cannot play are left out."""
    tests, result = TESTS[area.name], folder / f"{area.name}.xml"
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", f"--junitxml={result}", *tests]
    subprocess.run(line, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    for case in ElementTree.parse(result).iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            area.add(f"{case.get('classname')}.{case.get('name')}", "silent" if failed else "held")


def play_all() -> list[Area]:
    """Play every kind."""
    logging.getLogger("asyncio").disabled = True  # it repeats the errors that are provoked
    played: dict[type[_Fault], Area] = {
        ReplyFault: Area("replies of servers"),
        CodeFault: Area("user code"),
        GuestFault: Area("guests: programs"),
    }
    of_tests = [*map(Area, TESTS)]
    with (
        tempfile.TemporaryDirectory(prefix="faults_") as folder,
        concurrent.futures.ThreadPoolExecutor(1) as pool,  # the tests are separate processes
    ):
        tested = [pool.submit(_tested, area, Path(folder)) for area in of_tests]
        faults: list[_Fault] = [*REPLIES, *CODE, *GUESTS]
        for number, fault in enumerate(faults):
            outcome, why = _played(fault, Path(folder) / str(number))
            what = f"{fault.place} {fault.name}" if isinstance(fault, CodeFault) else fault.name
            played[type(fault)].add(what, outcome, fault.ends if isinstance(fault, CodeFault) else "")
            if outcome != "held":
                print(f"{what}: {outcome}: {why}", flush=True)
        for area, done in zip(of_tests, tested, strict=True):
            done.result()
            print(f"{area.name}: {area.held} of {area.tried}", *area.silent, flush=True)
    return [*played.values(), *of_tests]


def table(areas: Sequence[Area]) -> str:
    """The areas as Markdown, and the kinds that end a run."""
    lines = ["| area | kinds tried | held | silent | ended a run | ought to end it |", "|---|---|---|---|---|---|"]
    for area in areas:
        numbers = (area.tried, area.held, len(area.silent), len(area.ended), len(area.ought))
        lines.append(f"| {area.name} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "These end a run, and ought to:", ""]
    lines += [f"- {what}: {why}." for area in areas for what, why in area.ought]
    return "\n".join(lines)


def write_page(areas: Sequence[Area]) -> None:
    """Replace the section between the marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(areas)}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


def all_faults() -> int:
    """Play, print and write the table; returns the exit code."""
    areas = play_all()
    print(table(areas))
    write_page(areas)
    return 1 if any(area.silent or area.ended for area in areas) else 0
