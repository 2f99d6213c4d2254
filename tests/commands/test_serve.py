"""The end of a command that serves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

SLOW = """
import sys
import anyio
from rollouts.commands.arguments import in_loop
from rollouts.commands.serve import serve_until_stopped

async def serve(ready):
    ready("here")
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            print("stops", flush=True)
            await anyio.sleep(60)

sys.exit(in_loop(serve_until_stopped, serve, False))
"""


def test_the_second_ctrl_c_ends_a_server_at_once() -> None:
    """It does not interrupt the clean stop that the first one began at any line: what that writes would be wrong."""
    line = [sys.executable, "-c", SLOW]
    root = Path(__file__).parents[2]
    with subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for said in ("rollouts: serving at here\n", "stops\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == ""
