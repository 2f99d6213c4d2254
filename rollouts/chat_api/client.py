"""The client of a chat API: one request at a time for each rollout, retried by rule.

Invariant: a request ends in a reply, or in a typed error; it is sent at most ``1 + max_retries`` times, not counting
the times that the rate limit refuses it. There are five cases of a response:

1. Status 200 with a reply, or with a withheld one: the end.
2. 408, 409, 5xx, a lost connection, a body that is cut off or not a chat completion: again after a pause that doubles.
3. 429: again when ``Retry-After`` says, and the client halves its requests in flight; all of its requests wait.
4. 401, 403, 404, a redirect: every request would fail, so the run ends. 402 or a quota that is used up: the run ends,
   too, and can be resumed.
5. Any other status: the request is refused, and its rollout fails.

An error with status 200 ends as the status that it names. The key is in a header of each request and nowhere else; an
error that quotes it is printed without it, and a reply is never changed. A request that the API may bill without a
readable usage counts for the budget as the most that it can cost. This module does not know messages.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import anyio
import attrs
import msgspec

from rollouts.chat_api.account import Account
from rollouts.chat_api.endpoint import ChatEndpoint
from rollouts.chat_api.wire import (
    Answer,
    ReplyWithheld,
    Usage,
    answer_of,
    error_of,
    most_tokens,
    status_inside,
    usage_of_error,
)
from rollouts.concurrency.deadlines import paused_deadlines
from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError, EndpointAway, EndpointUnavailable, without_password
from rollouts.http.answers import message_of
from rollouts.http.client import ConnectFailed, HttpClient
from rollouts.http.keys import hiding
from rollouts.http.pacing import RATE_LIMIT, Failed, Pacing, is_used_up, seconds_of

__all__ = ["ChatClient", "client_of"]

_END = (401, 403, 404)


_Error = TypeVar("_Error", bound=Exception)


class ChatClient:
    """The client of one endpoint in one event loop; rollouts share its connections, its limit and its pauses."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint
        self._http = HttpClient(connect_seconds=endpoint.connect_seconds)
        self._pacing = Pacing(endpoint.at_once, retries=endpoint.max_retries, wait_seconds=endpoint.outage_seconds)
        self._hide = hiding(endpoint.api_key)
        self._headers = {"Content-Type": "application/json"}
        if endpoint.api_key:
            self._headers["Authorization"] = f"Bearer {endpoint.api_key}"

    def __repr__(self) -> str:
        return f"<ChatClient {without_password(self._endpoint.url)}: {self._pacing}>"

    async def ask(self, body: Mapping[str, Any], account: Account) -> tuple[Answer, float | None]:
        """Send a request until it is answered.

        Returns:
            The reply, and its price in dollars, ``None`` if that is not known.

        Raises:
            ConfigError: the API refuses the key or the model, or reports no usage although there is a budget.
            EndpointAway: the quota or the budget is spent, or the rate limit refuses the request for too long.
            EndpointError: the API gave no reply to this request.
        """
        payload = msgspec.json.encode(body)
        # No tokenizer makes more tokens of a prompt than it has bytes.
        most = 0.0 if account.prices is None else account.prices.dollars(len(payload), most_tokens(body) or 0)
        faults, limited = 0, 0.0
        while True:
            with paused_deadlines():  # an episode does not end because the API makes it wait
                await account.admit()
                await self._pacing.pause()
                await self._pacing.acquire()
            try:
                if account.refused is not None:
                    raise account.refused
                if account.exhausted or self._pacing.paused:
                    continue  # so since this request began to wait
                with account.request():
                    outcome = await self._sent(payload, account, most)
            finally:
                self._pacing.release()
            if not isinstance(outcome, Failed):
                self._pacing.recover()
                return outcome
            if outcome.status == RATE_LIMIT:
                limited += self._pacing.slow_down(outcome, limited)
            else:
                faults += 1
                if isinstance(outcome.error, ReplyWithheld) or not isinstance(outcome.error, EndpointUnavailable):
                    raise outcome.error
                with paused_deadlines():
                    await self._pacing.after_fault(outcome, faults)
            account.retries += 1

    async def _sent(self, payload: bytes, account: Account, most: float) -> tuple[Answer, float | None] | Failed:
        """Send a request once, and charge its cost, at most ``most`` dollars."""
        endpoint = self._endpoint
        try:
            with anyio.fail_after(endpoint.request_seconds):
                async with self._http.open("POST", endpoint.url, self._headers, payload) as response:
                    content, status = await response.read(), response.status
                    retry_after = seconds_of(response.headers.get("Retry-After"))
        except TimeoutError:
            account.charge(None, most)
            return Failed(EndpointUnavailable(f"no reply within {endpoint.request_seconds:g} seconds"))
        except EndpointUnavailable as error:
            account.charge(None, 0.0 if isinstance(error, ConnectFailed) else most)
            return Failed(error)
        except anyio.get_cancelled_exc_class():  # the deadline of an episode, or the end of the run
            account.charge(None, most)
            raise
        if status != 200:
            account.charge(_dollars(usage_of_error(content), account))
            self._end_if_refused(status, content, account)
            return Failed(self._without_key(error_of(status, content)), status, retry_after)
        answer, usage = answer_of(content)
        dollars, inside = _dollars(usage, account), 200 if isinstance(answer, Answer) else status_inside(content)
        account.charge(dollars, 0.0 if inside == RATE_LIMIT else most)
        if not isinstance(answer, Answer):
            self._end_if_refused(inside, content, account)
            return Failed(self._without_key(answer), inside, retry_after)
        if dollars is None and account.budget is not None:
            got = None if usage is None else f"{usage.prompt} prompt tokens"
            raise ConfigError.of("usage of a reply", got, "the numbers of its tokens, which --budget counts")
        return answer, dollars

    def _end_if_refused(self, status: int, content: bytes, account: Account) -> None:
        """Raise the error that ends the run, if this is one."""
        if (refusal := self._refusal(status, content)) is not None:
            account.refused = self._without_key(refusal)
            raise account.refused

    def _refusal(self, status: int, content: bytes) -> ConfigError | EndpointAway | None:
        """The error that ends the run; ``None`` if another request may be answered."""
        url, text = without_password(self._endpoint.url), f"status {status}: {message_of(content)}"
        if is_used_up(status, content):
            return EndpointAway(f"{url}: {text} (a resumed run continues)")
        if status in _END:
            expected = "a --base-url and a --model that the API has" if status == 404 else self._about_key()
            return ConfigError(f"{url}: {text}; expected {expected}")
        if 300 <= status < 400:
            return ConfigError(f"{url}: {text}; expected the URL that it redirects to: redirects are not followed")
        return None

    def _about_key(self) -> str:
        variable = self._endpoint.key_variable
        if self._endpoint.api_key is None:
            return f"a key: {variable or 'api_key'} is not set, and the API needs one"
        return f"a key in {variable or 'api_key'} that the API accepts"

    def _without_key(self, error: _Error) -> _Error:
        """The error, which quotes the key of no request."""
        error.args = (self._hide(str(error)),)
        return error


def _dollars(usage: Usage | None, account: Account) -> float | None:
    """The price of a reply: that of the API, else by the prices; ``None`` if neither tells it."""
    if usage is None or (usage.cost is None and usage.prompt == 0):  # no prompt has 0 tokens
        return None
    if usage.cost is not None:
        return usage.cost
    return None if account.prices is None else account.prices.dollars(usage.prompt, usage.completion)


_CLIENTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ChatEndpoint, ChatClient]] = (
    weakref.WeakKeyDictionary()
)
_ANY_SAMPLING = SamplingParams()


def client_of(endpoint: ChatEndpoint) -> ChatClient:
    """The client of an endpoint in the running event loop; endpoints that differ only in sampling share one."""
    clients = _CLIENTS.setdefault(asyncio.get_running_loop(), {})
    key = attrs.evolve(endpoint, sampling=_ANY_SAMPLING)
    if key not in clients:
        clients[key] = ChatClient(key)
    return clients[key]
