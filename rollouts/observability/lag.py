"""How late the event loop is: what blocks it, everything waits for.

Invariant: it costs one wake-up an interval, whatever else the loop does. This module knows nothing of what runs there.
"""

from __future__ import annotations

from collections import deque

import anyio

__all__ = ["LoopLag"]


class LoopLag:
    """Measures, while :meth:`run` runs, how much later than asked it is woken.

    Args:
        interval: seconds between two wake-ups.
        kept: how many of the last ones the quantiles are of.
    """

    def __init__(self, interval: float = 0.05, kept: int = 1200) -> None:
        self._interval = interval
        self._late: deque[float] = deque(maxlen=kept)
        self.longest = 0.0
        """Seconds, since it began."""

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
        """Seconds that this share of the last wake-ups was at most late."""
        late = sorted(self._late)
        return late[min(len(late) - 1, int(share * len(late)))] if late else 0.0
