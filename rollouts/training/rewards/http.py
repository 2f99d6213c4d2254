"""JSON to a URL and JSON back, for rewards that are computed elsewhere: retried, and never later than its deadline.

Invariant: a call ends in a decoded answer or in a :class:`RewardFailure` that says what the last attempt met. Only what
another attempt may mend is tried again: no connection, a broken one, 408, 425, 429 and 5xx. A reward is asked for as
often as it takes; asking twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
from anyio.lowlevel import RunVar

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import without_password
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable, RewardFailure
from rollouts.http.client import HttpClient
from rollouts.inference.wire_errors import RETRIED_STATUSES, UNREADABLE, message_of

__all__ = ["Poster"]


class Poster:
    """One URL that answers JSON.

    Args:
        url: where to.
        api_key: sent as a bearer token; never printed.
        attempts: how often a call is tried.
        backoff_seconds: pause after the first attempt that failed, doubled after each further one.
        seconds: deadline of one call, all attempts together.
        at_once: requests in flight; others stand in line, which counts.

    Raises:
        ConfigError: a field that cannot be.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        attempts: int = 3,
        backoff_seconds: float = 0.5,
        seconds: float = 120.0,
        at_once: int = 64,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError.of("url", without_password(str(url)), "a URL that starts with http:// or https://")
        for name, value, least in (("attempts", attempts, 1), ("at_once", at_once, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError.of(name, value, f"an integer >= {least}")
        if not seconds > 0 or not backoff_seconds >= 0:
            raise ConfigError.of("seconds, backoff_seconds", (seconds, backoff_seconds), "numbers > 0 and >= 0")
        self.place = without_password(url)
        """The URL as it may be printed."""
        self.requests = 0
        """How many were sent, further attempts included."""
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._attempts, self._backoff, self._seconds = attempts, backoff_seconds, seconds
        self._gate = anyio.CapacityLimiter(at_once)

    def __repr__(self) -> str:
        return f"<Poster {self.place}: {self.requests} requests>"

    async def __call__(self, body: Mapping[str, Any], what: str) -> Any:
        """Post ``body``; gives the answer, decoded.

        Raises:
            RewardFailure: as the module says.
        """
        payload = msgspec.json.encode(body)
        with boundary(RewardFailure, f"{what} at {self.place}", seconds=self._seconds):
            async with self._gate:
                return await self._until_answered(payload, what)

    async def _until_answered(self, payload: bytes, what: str) -> Any:
        last: EndpointUnavailable | None = None
        for attempt in range(self._attempts):
            if attempt:
                await anyio.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                return await self._once(payload)
            except EndpointUnavailable as error:
                last = error
            except EndpointRefused as error:
                raise RewardFailure(f"{what} at {self.place}: {error}") from error
        times = f"{self._attempts} attempts" if self._attempts > 1 else "1 attempt"
        raise RewardFailure(f"{what} at {self.place} gave no answer in {times}; the last: {last}") from last

    async def _once(self, payload: bytes) -> Any:
        self.requests += 1
        status, answer = await _transport().post(self._url, payload, self._headers)
        if status >= 500 or status in RETRIED_STATUSES:
            raise EndpointUnavailable(f"status {status}: {message_of(answer)}")
        if status != 200:
            raise EndpointRefused(f"status {status}: {message_of(answer)}")
        try:
            return msgspec.json.decode(answer)
        except UNREADABLE:
            raise EndpointRefused(f"status 200, but the body is not JSON: {message_of(answer)}") from None


_TRANSPORT: RunVar[HttpClient] = RunVar("rollouts_reward_transport")


def _transport() -> HttpClient:
    """The connections of this event loop, shared by all that ask from it, and closed with it."""
    transport = _TRANSPORT.get(None)
    if transport is None:
        transport = HttpClient(connect_seconds=5.0)
        _TRANSPORT.set(transport)
    return transport
