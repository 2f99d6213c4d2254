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
    (tmp_path / "argparse.py").write_text(LOST)  # the first import of the command
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
from rollouts.concurrency.interrupts import INTERRUPTED, exit_on_interrupt
exit_on_interrupt()
import anyio, anyio.to_thread, sys, threading
from rollouts.commands.arguments import in_loop
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
    assert (process.returncode, errors) == (130, ""), "also if further signals reach a process that is exiting"


def test_17_the_exit_code_survives_signals_while_the_interpreter_ends() -> None:
    """Hardening 17: the interpreter restores SIGINT's default action at its end, which would kill it with -2."""
    script = """
import atexit, os, signal
from rollouts.concurrency.interrupts import exit_on_interrupt
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
exit_on_interrupt()
import sys
sys.last = Last()  # deleted after the handlers
raise SystemExit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_26_a_closed_terminal_cancels_a_command(number: signal.Signals) -> None:
    """Hardening 26: ``eval``, ``play`` and others clean up on SIGHUP and SIGTERM as on Ctrl-C; the second ends them."""
    script = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
from rollouts.commands.arguments import in_loop
import anyio
async def main():
    print("ready", flush=True)
    try: await anyio.sleep_forever()
    finally: print("cleaned up", flush=True)
try: in_loop(main)
except KeyboardInterrupt: sys.exit(130)
"""
    with subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        said, _ = process.communicate(timeout=SECONDS)
    assert (process.returncode, said) == (130, "cleaned up\n")


def test_a_signal_just_before_the_loop_waits_is_not_lost() -> None:
    """Another thread receives it, so it does not interrupt the wait of the event loop; the loop wakes nevertheless."""
    script = """
import signal, threading, sys
from rollouts.commands.arguments import in_loop
import anyio
def send():
    threading.Event().wait(0.2)  # the loop waits by then
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
async def main():
    threading.Thread(target=send).start()
    await anyio.sleep_forever()
try: in_loop(main)
except KeyboardInterrupt: sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=SECONDS, check=False)
    assert done.returncode == 130
