"""The memory of a process, and the longest time that its loop was not free, in CPU time of its thread."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import anyio

__all__ = ["LongestTurn", "resident_mb"]


def resident_mb() -> float:
    """Resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


class LongestTurn:
    """The most CPU seconds of this thread between two looks at the clock, which other processes do not lengthen."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began = time.thread_time()
            await anyio.sleep(0.01)
            self.seconds = max(self.seconds, time.thread_time() - began)
