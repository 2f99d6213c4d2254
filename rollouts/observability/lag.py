"""Measurement of event-loop lag, the delay that blocking code causes to every task.

Invariant: it costs one wake-up an interval. This module does not know the loop's other tasks.
"""

from __future__ import annotations

from collections import deque

import anyio

__all__ = ["LoopLag"]


class LoopLag:
    """Delays of a periodic wake-up, measured while :meth:`run` runs.

    Args:
        interval: seconds between two wake-ups.
        kept: number of the latest delays that the quantiles use.
    """

    def __init__(self, interval: float = 0.05, kept: int = 1200) -> None:
        self._interval = interval
        self._late: deque[float] = deque(maxlen=kept)
        self.longest = 0.0
        """Longest delay so far, in seconds."""

    def __repr__(self) -> str:
        return f"<LoopLag: p99 {1000 * self.quantile(0.99):.1f} ms, longest {1000 * self.longest:.1f} ms>"

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = anyio.current_time() + self._interval
            await anyio.sleep(self._interval)
            self.add(max(0.0, anyio.current_time() - due))

    def add(self, late: float) -> None:
        self._late.append(late)
        self.longest = max(self.longest, late)

    def quantile(self, share: float) -> float:
        """Quantile of the latest delays, in seconds; ``share`` is from 0 to 1."""
        late = sorted(self._late)
        return late[min(len(late) - 1, int(share * len(late)))] if late else 0.0
