"""The embedded engine as a child process."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from rollouts.engine.process import EngineProcess, server_process


async def test_a_server_that_still_starts_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a server starts does not wait for it: it does not read its standard input yet."""
    killed, kill = [], EngineProcess.kill

    def seen(engine: EngineProcess) -> None:
        killed.append(engine.name)
        kill(engine)

    monkeypatch.setattr(EngineProcess, "kill", seen)
    with anyio.move_on_after(0.5) as start:
        async with server_process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", "it"):
            pytest.fail("the server is never ready")
    assert start.cancelled_caught
    assert killed == ["it"]
