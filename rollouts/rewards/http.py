"""JSON over HTTP for rewards that a server computes, with retries and a deadline.

Invariant: a call ends in a decoded response or in a :class:`RewardFailure` with the error of the last attempt. Only
transient errors are retried: no connection, a lost connection, status 408, 425, 429 and 5xx. A request may be sent more
than once, so the server must tolerate repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
from anyio.lowlevel import RunVar

from rollouts.base.validators import is_int
from rollouts.concurrency.boundary import boundary
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable, RewardFailure, without_password
from rollouts.http.answers import RETRIED_STATUSES, UNREADABLE, message_of
from rollouts.http.client import HttpClient

__all__ = ["Poster"]


class Poster:
    """A client of one URL that answers with JSON.

    Args:
        url: starts with ``http://`` or ``https://``.
        api_key: sent as a bearer token; never printed.
        attempts: maximum attempts of one call.
        backoff_seconds: pause after the first failed attempt; doubles after each further one.
        seconds: deadline of one call, including retries and the wait for a free slot.
        at_once: maximum number of concurrent requests.

    Raises:
        ConfigError: an invalid argument.
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
        for name, value in (("attempts", attempts), ("at_once", at_once)):
            if not is_int(value, 1):
                raise ConfigError.of(name, value, "an integer >= 1")
        if not seconds > 0 or not backoff_seconds >= 0:
            raise ConfigError.of("seconds, backoff_seconds", (seconds, backoff_seconds), "numbers > 0 and >= 0")
        self.place = without_password(url)
        """The URL without its password, for messages."""
        self.requests = 0
        """Number of requests sent, including retries."""
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._attempts, self._backoff, self._seconds = attempts, backoff_seconds, seconds
        self._limiter = anyio.CapacityLimiter(at_once)

    def __repr__(self) -> str:
        return f"<Poster {self.place}: {self.requests} requests>"

    async def __call__(self, body: Mapping[str, Any], what: str) -> Any:
        """Post ``body`` and return the decoded response; ``what`` names the call in messages.

        Raises:
            RewardFailure: the deadline passed, the attempts are used up, the server refused, or the body is not JSON.
        """
        payload = msgspec.json.encode(body)
        with boundary(RewardFailure, f"{what} at {self.place}", seconds=self._seconds):
            async with self._limiter:
                return await self._post_with_retries(payload, what)

    async def _post_with_retries(self, payload: bytes, what: str) -> Any:
        last: EndpointUnavailable | None = None
        for attempt in range(self._attempts):
            if attempt:
                await anyio.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                return await self._post(payload)
            except EndpointUnavailable as error:
                last = error
            except EndpointRefused as error:
                raise RewardFailure(f"{what} at {self.place}: {error}") from error
        times = f"{self._attempts} attempts" if self._attempts > 1 else "1 attempt"
        raise RewardFailure(f"{what} at {self.place} gave no answer in {times}; the last: {last}") from last

    async def _post(self, payload: bytes) -> Any:
        self.requests += 1
        status, content = await _transport().post(self._url, payload, self._headers)
        if status >= 500 or status in RETRIED_STATUSES:
            raise EndpointUnavailable(f"status {status}: {message_of(content)}")
        if status != 200:
            raise EndpointRefused(f"status {status}: {message_of(content)}")
        try:
            return msgspec.json.decode(content)
        except UNREADABLE:
            raise EndpointRefused(f"status 200, but the body is not JSON: {message_of(content)}") from None


_TRANSPORT: RunVar[HttpClient] = RunVar("rollouts_reward_transport")


def _transport() -> HttpClient:
    """Return the HTTP client that all posters of this event loop share; it is closed with the loop."""
    transport = _TRANSPORT.get(None)
    if transport is None:
        transport = HttpClient(connect_seconds=5.0)
        _TRANSPORT.set(transport)
    return transport
