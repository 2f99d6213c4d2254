"""The pace of requests to one API: which failures are repeated, when, and how many requests run at once.

Invariant: a rate limit (429) is waited for as long as ``Retry-After`` says, by all requests to the API, and halves how
many run at once. It counts as no failure of the request, and ends it when no request was answered for ``wait_seconds``.
Any other transient failure is repeated after a pause that doubles, at least as long as ``Retry-After`` says, a limited
number of times. This module sends nothing.
"""

from __future__ import annotations

import email.utils
import math
import random
import time

import anyio
import attrs
import msgspec

from rollouts.errors import EndpointAway, EndpointError, EndpointUnavailable
from rollouts.http.answers import UNREADABLE

__all__ = ["RATE_LIMIT", "Failed", "Pacing", "code_of", "is_repeated", "is_used_up", "seconds_of"]

RATE_LIMIT = 429
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_SHORTEST_PAUSE, _FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5, 60.0


def is_repeated(status: int) -> bool:
    """Whether a request with this status may be answered when it is sent again."""
    return status >= 500 or status in (408, 409, 425, RATE_LIMIT)


def is_used_up(status: int, payload: bytes) -> bool:
    """Whether an error says that the account has no credit, which no wait mends: 402, or a 429 with such a code."""
    return status == 402 or code_of(payload) in _NO_CREDIT


def code_of(payload: bytes) -> str:
    """The code of an error body, or its type if it has no code; empty without either."""
    try:
        value = msgspec.json.decode(payload)
    except UNREADABLE:
        return ""
    error = value.get("error") if isinstance(value, dict) else None
    found = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return next((one for one in found if isinstance(one, str) and one), "")


def seconds_of(header: str | None) -> float | None:
    """The seconds of ``Retry-After``, which has seconds or a date (RFC 9110, 10.2.3); ``None`` for any other value."""
    if header is None:
        return None
    try:
        return max(0.0, float(header)) if header.replace(".", "", 1).isdigit() else _until(header)
    except (TypeError, ValueError, OverflowError):
        return None


def _until(date: str) -> float:
    return max(0.0, email.utils.parsedate_to_datetime(date).timestamp() - time.time())


@attrs.frozen
class Failed:
    """An attempt without a result: an error response, or no response."""

    error: EndpointError
    status: int = 0
    retry_after: float | None = None
    """Seconds."""


class Pacing:
    """The pace of one API in one event loop.

    Args:
        at_once: the most requests in flight.
        retries: of a request that fails, not counting rate limits.
        wait_seconds: the longest wait of one request for its rate limits in all, and of all without an answer to any.
        first_pause: seconds after the first failure.
    """

    def __init__(self, at_once: int, *, retries: int, wait_seconds: float, first_pause: float = _FIRST_PAUSE) -> None:
        self._at_once, self._retries, self._wait_seconds = at_once, retries, wait_seconds
        self._first_pause = first_pause
        self._limit = anyio.CapacityLimiter(at_once)
        self._not_before = self._limited_since = -math.inf
        self._limited = ""
        self._random = random.Random()

    def __str__(self) -> str:
        return f"{self._limit.total_tokens:g} requests at once"

    @property
    def paused(self) -> bool:
        """Whether a rate limit holds requests back."""
        return anyio.current_time() < self._not_before

    async def pause(self, held: float = 0.0) -> float:
        """Wait for the end of a rate limit; returns the seconds.

        ``held``: how long rate limits have held this request back so far, if the sum is bounded.

        Raises:
            EndpointAway: this request would wait too long in all.
        """
        seconds = max(0.0, self._not_before - anyio.current_time())
        if held and seconds:
            self._check_wait(held + seconds)
        await anyio.sleep(seconds)
        return seconds

    async def acquire(self) -> None:
        """Wait until a request may begin; :meth:`release` ends it."""
        await self._limit.acquire()

    def release(self) -> None:
        self._limit.release()

    def recover(self) -> None:
        """Allow more requests at once after a reply, up to the limit."""
        self._limited_since = anyio.current_time()
        if self._limit.total_tokens < self._at_once:
            self._limit.total_tokens += 1

    async def after_fault(self, failed: Failed, faults: int) -> None:
        """Wait before the next attempt, at least as long as ``Retry-After`` says.

        Raises:
            EndpointUnavailable: there is none.
        """
        least = failed.retry_after or 0.0
        if faults > self._retries or least > self._wait_seconds:
            times = f"{faults} attempts" if faults > 1 else "1 attempt"
            raise EndpointUnavailable(f"no reply in {times}; the last: {failed.error}") from failed.error
        longest = min(_LONGEST_PAUSE, self._first_pause * 2 ** (faults - 1))
        await anyio.sleep(max(least, self._random.uniform(longest / 2, longest)))

    def slow_down(self, failed: Failed, limited: float) -> float:
        """Pause all requests after a 429; returns the seconds.

        ``limited``: how long the rate limit has held this request back so far.

        Raises:
            EndpointAway: this request would wait too long in all.
        """
        now, self._limited = anyio.current_time(), str(failed.error)
        if now - self._not_before > _LONGEST_PAUSE:
            self._limited_since = now  # the first for a while
        seconds = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, limited)) if failed.retry_after is None else failed.retry_after
        self._check_wait(max(limited, now - self._limited_since) + seconds)
        seconds = max(seconds, _SHORTEST_PAUSE) * self._random.uniform(1.0, 1.1)
        self._not_before = max(self._not_before, now + seconds)
        self._limit.total_tokens = max(1, int(self._limit.total_tokens / 2))
        return max(seconds, _FIRST_PAUSE)

    def _check_wait(self, seconds: float) -> None:
        if seconds > self._wait_seconds:
            longest = f"{self._wait_seconds:g} seconds, the longest wait for a rate limit"
            raise EndpointAway(f"{self._limited}; its wait of {seconds:.4g} seconds is over {longest}")
