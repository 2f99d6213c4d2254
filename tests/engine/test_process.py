"""The embedded engine as a child process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import anyio
import pytest

from rollouts.engine.process import server_process


async def test_a_server_that_still_starts_ends_at_once_with_its_context(tmp_path: Path) -> None:
    """Ctrl-C while a server starts does not wait for it: it does not read its standard input yet."""
    began = time.monotonic()
    with anyio.move_on_after(0.5) as start:
        async with server_process(
            [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", "the server"
        ):
            pytest.fail("the server is never ready")
    assert start.cancelled_caught
    assert time.monotonic() - began < 8.0
