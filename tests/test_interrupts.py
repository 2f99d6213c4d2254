"""Ctrl-C: one signal at any moment ends a command with status 130, and the second one at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60
LOST = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:  # as the import system, a weak reference's callback or foreign code may do
    pass
"""


def test_ctrl_c_works_while_the_packages_are_imported(tmp_path: Path) -> None:
    """Hardening 17: the first signal during the start ends the command, without a traceback, and cannot be lost."""
    (tmp_path / "rich.py").write_text(LOST)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    line = [sys.executable, "-m", "rollouts", "--version"]
    done = subprocess.run(line, env=environment, text=True, capture_output=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


BLOCKED = "while True: pass"
SWALLOWS = """
    while True:
        try: await anyio.sleep_forever()
        except BaseException: pass
"""
IN_A_THREAD = "await anyio.to_thread.run_sync(threading.Event().wait)"
WAITS = "await anyio.sleep_forever()"


@pytest.mark.parametrize(("body", "signals"), [(WAITS, 1), (BLOCKED, 2), (SWALLOWS, 2), (IN_A_THREAD, 2)])
def test_ctrl_c_ends_a_command_in_its_event_loop(body: str, signals: int) -> None:
    """Hardening 15: the first cancels; the second ends the process, also with a blocked loop or a stuck thread."""
    script = f"""
import anyio, anyio.to_thread, sys, threading
from rollouts.commands.arguments import in_loop
from rollouts.interrupts import INTERRUPTED
async def main():
    print("ready", flush=True)
    {body}
try:
    in_loop(main)
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        while signals == 2 and process.poll() is None:  # two signals at once would count as one
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert errors == ""
    # A shell shows 130 for both; a further signal may reach a process that is already exiting.
    assert process.returncode in ((130, -signal.SIGINT) if signals == 2 else (130,))
