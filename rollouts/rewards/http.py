"""JSON over HTTP for rewards that a server computes, with retries and a deadline.

Invariant: a call ends in a decoded response or in a :class:`RewardFailure` with the error of the last attempt. Only
transient errors are retried, at the pace of :mod:`rollouts.http.pacing`: no connection, a lost connection, status 408,
409, 425, 5xx, and 429, for which all calls wait while deadlines stand still. A server that cannot be reached after the
last attempt is waited for (:mod:`rollouts.rewards.outage`). A request may be sent more than once, so the server must
tolerate repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec
from anyio.lowlevel import RunVar

from rollouts.base.validators import is_int, is_number
from rollouts.concurrency.boundary import boundary
from rollouts.concurrency.deadlines import Clocks
from rollouts.errors import (
    ConfigError,
    EndpointRefused,
    EndpointUnavailable,
    RewardFailure,
    without_password,
)
from rollouts.http.answers import UNREADABLE, message_of
from rollouts.http.client import HttpClient
from rollouts.http.keys import hiding
from rollouts.http.pacing import RATE_LIMIT, Failed, Pacing, is_repeated, is_used_up, seconds_of
from rollouts.rewards.outage import MOST_RETURNS, RequestLosses, ServerAway, ServerWait, clocks_paused

__all__ = ["Poster"]


@attrs.frozen
class _Answer:
    """A decoded response."""

    value: Any


class Poster:
    """A client of one URL that answers with JSON.

    Args:
        url: starts with ``http://`` or ``https://``.
        api_key: sent as a bearer token; never printed, nor quoted from an answer.
        attempts: maximum attempts of one call.
        backoff_seconds: pause after the first failed attempt; doubles after each further one. ``Retry-After`` of the
            server makes it longer.
        rate_limit_seconds: the longest wait of one call for rate limits (429) in all; they do not count as attempts.
        seconds: deadline of one call, including retries and the wait for a free slot.
        at_once: maximum number of concurrent requests; a rate limit lowers it for a while.
        outage_seconds: how long calls wait for a server that cannot be reached, once their attempts are used up; 0 for
            no wait.
        repeats_unreadable: also send a request again whose answer is not JSON.

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
        rate_limit_seconds: float = 1800.0,
        outage_seconds: float = 1800.0,
        repeats_unreadable: bool = False,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError.of("url", without_password(str(url)), "a URL that starts with http:// or https://")
        for name, value in (("attempts", attempts), ("at_once", at_once)):
            if not is_int(value, 1):
                raise ConfigError.of(name, value, "an integer >= 1")
        if not seconds > 0 or not backoff_seconds >= 0 or not rate_limit_seconds >= 0:
            names, got = "seconds, backoff_seconds, rate_limit_seconds", (seconds, backoff_seconds, rate_limit_seconds)
            raise ConfigError.of(names, got, "numbers > 0, >= 0 and >= 0")
        if not is_number(outage_seconds) or outage_seconds < 0:
            raise ConfigError.of("outage_seconds", outage_seconds, "a number of seconds >= 0")
        self.place = without_password(url)
        """The URL without its password, for messages."""
        self.requests = 0
        """Number of requests sent, including retries."""
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._url, self._hide = url, hiding(api_key)
        self._seconds, self._repeats_unreadable = seconds, repeats_unreadable
        self._pacing = Pacing(
            at_once, retries=attempts - 1, wait_seconds=rate_limit_seconds, first_pause=backoff_seconds
        )
        self._retries, self._wait = attempts - 1, ServerWait(self.place, outage_seconds)
        self._most_waits = MOST_RETURNS if outage_seconds else 0

    def __repr__(self) -> str:
        return f"<Poster {self.place}: {self.requests} requests>"

    async def __call__(self, body: Mapping[str, Any], what: str, others: Sequence[Clocks] = ()) -> Any:
        """Post ``body`` and return the decoded response.

        Args:
            body: JSON.
            what: names the call in messages.
            others: the deadlines of other tasks that wait for the response.

        Raises:
            RewardFailure: the deadline passed, the attempts are used up, the server refused, or the body is not JSON.
            ServerAway: the server could not be reached for ``outage_seconds``.
        """
        payload = msgspec.json.encode(body)
        with boundary(RewardFailure, f"{what} at {self.place}", seconds=self._seconds):
            try:
                return await self._post_with_retries(payload, others)
            except ServerAway:
                raise
            except (EndpointUnavailable, EndpointRefused) as error:
                raise RewardFailure(f"{what} at {self.place}: {error}") from error

    async def _post_with_retries(self, payload: bytes, others: Sequence[Clocks]) -> Any:
        faults, waits, limited, held = 0, 0, 0.0, 0.0
        pacing, losses = self._pacing, RequestLosses()
        send = functools.partial(self._post_once, payload)
        while True:
            with clocks_paused(others):  # the server asks for the wait
                held += await pacing.pause(held)
            if self._wait.is_on:
                unreachable, answer = False, await self._wait.answer(send, losses, others)
            else:
                answer = await send()
                unreachable = losses.is_unreachable(answer)
            if answer is None:
                continue
            if not isinstance(answer, Failed):
                pacing.recover()
                return answer.value
            if answer.status == RATE_LIMIT:
                limited += pacing.slow_down(answer, limited)
            elif unreachable and waits < self._most_waits and (faults >= self._retries or self._wait.is_on):
                waits += 1
                self._wait.begin(answer)
            else:
                faults += 1
                await pacing.after_fault(answer, faults)

    async def _post_once(self, payload: bytes) -> _Answer | Failed | None:
        """Send a request when there is a slot; ``None`` if a rate limit began meanwhile."""
        await self._pacing.acquire()
        try:
            return None if self._pacing.paused else await self._post(payload)
        finally:
            self._pacing.release()

    async def _post(self, payload: bytes) -> _Answer | Failed:
        """Send a request once.

        Raises:
            EndpointRefused: an error that no repetition mends.
        """
        self.requests += 1
        status = 0
        try:
            async with _transport().open("POST", self._url, self._headers, payload) as response:
                status = response.status
                if status not in (502, 503, 504):
                    self._wait.answered()
                content = await response.read()
                retry_after = seconds_of(response.headers.get("Retry-After"))
        except EndpointUnavailable as error:
            return Failed(error, status)
        problem, repeats = "", is_repeated(status) and not is_used_up(status, content)
        if status == 200:
            try:
                return _Answer(msgspec.json.decode(content))
            except UNREADABLE:
                problem, repeats = ", but the body is not JSON", self._repeats_unreadable
        text = f"status {status}{problem}: {self._hide(message_of(content))}"
        if repeats:
            return Failed(EndpointUnavailable(text), status, retry_after)
        raise EndpointRefused(text)


_TRANSPORT: RunVar[HttpClient] = RunVar("rollouts_reward_transport")


def _transport() -> HttpClient:
    """Return the HTTP client that all posters of this event loop share; it is closed with the loop."""
    transport = _TRANSPORT.get(None)
    if transport is None:
        transport = HttpClient(connect_seconds=5.0)
        _TRANSPORT.set(transport)
    return transport
