"""The rules of retries, and the errors that end a run."""

from __future__ import annotations

import email.utils
import time
from typing import Any

import anyio
import pytest

from rollouts.chat_api import Account, BudgetSpent, ChatEndpoint, Prices
from rollouts.chat_api.client import ChatClient, client_of
from rollouts.chat_api.wire import Answer
from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError, EndpointAway, EndpointRefused, EndpointUnavailable
from rollouts.testing.chat_server import ChatServer
from rollouts.testing.json_server import JsonServer
from tests.chat_api.sums import KEY, solve

BODY = {"model": "stub", "messages": [{"role": "user", "content": "What is 1 + 1000?"}]}


async def ask(url: str, account: Account | None = None, **options: Any) -> Answer:
    endpoint = ChatEndpoint(model="stub", base_url=url, **{"api_key": KEY, "max_retries": 2, **options})
    answer, _ = await ChatClient(endpoint).ask(BODY, account or Account())
    return answer


def plain(messages: Any, tools: Any) -> dict[str, Any]:
    return {"content": "1001"}


@pytest.mark.parametrize(
    "fault", ["server_error", "overloaded", "cut", "hang_up", "wrong_json", "wrong_shape", "no_choices", "error_in_200"]
)
async def test_a_fault_is_retried_and_then_an_error(fault: Any) -> None:
    """At most ``max_retries`` times; the error has the last cause."""
    account = Account()
    async with ChatServer(plain, fault=lambda number: fault if number < 1 else None) as server:
        assert (await ask(server.url, account)).message.text == "1001"
        assert (account.requests, account.retries) == (2, 1)
    async with ChatServer(plain, fault=lambda number: fault) as server:
        with pytest.raises(EndpointUnavailable, match="no reply in 2 attempts; the last: "):
            await ask(server.url, max_retries=1)
        assert len(server.asked) == 2


@pytest.mark.parametrize("form", ["seconds", "date", "absent"])
async def test_a_rate_limit_is_waited_for(form: str) -> None:
    """As long as ``Retry-After`` says, in seconds or as a date; half a second and more without it. It is not a fault:
    more refusals than ``max_retries`` are waited for."""
    wait: Any = {"seconds": 0.4, "date": email.utils.formatdate(time.time() + 2, usegmt=True), "absent": None}[form]
    refusals = 3 if form == "seconds" else 1
    began = time.monotonic()
    async with ChatServer(
        plain, fault=lambda number: "rate_limit" if number < refusals else None, retry_after=wait
    ) as server:
        assert (await ask(server.url, max_retries=0)).message.text == "1001"
    assert time.monotonic() - began >= (1.2 if form == "seconds" else 0.5)
    assert len(server.asked) == refusals + 1


async def test_a_rate_limit_that_lasts_too_long_ends_the_run() -> None:
    """At once, if ``Retry-After`` is over the longest wait: the run returns its prompts and can be resumed."""
    async with ChatServer(plain, fault=lambda number: "rate_limit", retry_after=90) as server:
        with pytest.raises(EndpointAway, match="over 60 seconds, the longest wait"):
            await ask(server.url, outage_seconds=60.0)
        assert len(server.asked) == 1


async def test_a_rate_limit_pauses_and_halves_the_requests_of_all() -> None:
    """Requests that wait for their turn wait for the end of the pause, too."""
    async with ChatServer(plain, fault=lambda number: "rate_limit" if number < 8 else None, retry_after=0.3) as server:
        endpoint = ChatEndpoint(model="stub", base_url=server.url, api_key=KEY, concurrency=8)
        client, account = ChatClient(endpoint), Account()
        async with anyio.create_task_group() as tasks:
            for _ in range(24):
                tasks.start_soon(client.ask, BODY, account)
            await anyio.sleep(0.2)
            assert len(server.asked) == 8, "the others pause"
            assert "1 requests at once" in repr(client)
    assert account.requests == 24 + 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": "sk-wrong-key"}, "status 401: .*; expected a key in MY_KEY that the API accepts"),
        ({"api_key": None}, "MY_KEY is not set, and the API needs one"),
        (
            {"model": "other", "api_key": KEY},
            "status 404: The model `other` does not exist.*expected a --base-url and a --model",
        ),
    ],
)
async def test_a_wrong_key_or_model_ends_the_run_in_its_first_request(options: dict[str, Any], words: str) -> None:
    """By name; the key itself is in no message, although the API quotes it."""
    async with ChatServer(solve) as server:
        endpoint = ChatEndpoint(**{"model": "stub", "base_url": server.url, "key_variable": "MY_KEY", **options})
        with pytest.raises(ConfigError, match=words) as raised:
            await ChatClient(endpoint).ask({**BODY, "model": endpoint.model}, Account())
        assert len(server.asked) == 1
    assert "sk-wrong-key" not in str(raised.value)
    assert "sk-wrong-key" not in repr(endpoint)


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (403, None, ConfigError, "status 403"),
        (429, "insufficient_quota", EndpointAway, "status 429: the reason .a resumed run continues"),
        (402, None, EndpointAway, "status 402"),
        (400, None, EndpointRefused, "status 400: the reason"),
        (301, None, ConfigError, "redirects are not followed"),
    ],
)
async def test_an_error_that_no_retry_mends_is_raised_at_once(status: int, code: Any, error: Any, words: str) -> None:
    """A used quota has the status of a rate limit, and is not waited for."""
    refusal = {"error": {"message": "the reason", "type": "t", "param": None, "code": code}}
    async with JsonServer(lambda asked: (status, refusal)) as server:
        with pytest.raises(error, match=words):
            await ask(server.url)
        assert len(server.asked) == 1


async def test_a_budget_needs_a_usage() -> None:
    """A reply without one cannot be counted, so it ends the run by name."""
    message = {"role": "assistant", "content": "1001"}
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    async with JsonServer(lambda asked: reply) as server:
        assert (await ask(server.url)).message.text == "1001"
        with pytest.raises(ConfigError, match="which --budget counts"):
            await ask(server.url, Account(Prices(1, 1), 1.0))
    nothing = {**reply, "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}
    async with JsonServer(lambda asked: nothing) as server:
        with pytest.raises(ConfigError, match=r"0 prompt tokens.*which --budget counts"):
            await ask(server.url, Account(Prices(1, 1), 1.0))
    with pytest.raises(ConfigError, match="--price-in and --price-out"):
        Account(budget=1.0)


@pytest.mark.parametrize("place", ["body", "error"])
async def test_an_error_that_costs_money_counts_for_the_budget(place: str) -> None:
    """Where its body has a usage, or the error in it; else its cost is unknown, and counted as such."""
    usage = {"prompt_tokens": 100_000, "completion_tokens": 200_000}
    error: dict[str, Any] = {"message": "the filter refused the reply", "type": "t", "param": None, "code": None}
    body = {"error": error, "usage": usage} if place == "body" else {"error": {**error, "usage": usage}}
    account = Account(Prices(1, 2), 0.4)
    async with JsonServer(lambda asked: (400, body)) as server:
        with pytest.raises(EndpointRefused):
            await ask(server.url, account)
        assert account.spent == pytest.approx(0.5)
        assert account.unpriced == 0
        with pytest.raises(BudgetSpent):
            await ask(server.url, account)
        assert len(server.asked) == 1
    async with JsonServer(lambda asked: (400, {"error": error})) as server:
        with pytest.raises(EndpointRefused):
            await ask(server.url, account := Account(Prices(1, 2), 0.4))
        assert (account.spent, account.unpriced) == (0.0, 1)


@pytest.mark.parametrize(("key", "content"), [("EMPTY", "The list is EMPTY."), ("x", "x is 3"), ("1", "11 of 21")])
async def test_a_reply_is_read_as_it_came_whatever_the_key_is(key: str, content: str) -> None:
    """Local servers take keys such as EMPTY: a reply that has these letters keeps them."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    async with JsonServer(lambda asked: {"choices": [choice]}) as server:
        assert (await ask(server.url, api_key=key)).message.text == content


@pytest.mark.parametrize("status", [200, 400, 401, 500])
@pytest.mark.parametrize("before", [0, 110, 190, 995])
async def test_an_error_that_quotes_the_key_is_printed_without_it(status: int, before: int) -> None:
    """Also where its text is cut off in the middle of the key."""
    key = "sk-live-9f8e7d6c5b4a39281706f5e4d3c2b1a0"
    error = {"error": {"message": f"{'m' * before} bad key {key}", "code": status}}
    async with JsonServer(lambda asked: (status, error)) as server:
        with pytest.raises((ConfigError, EndpointRefused, EndpointUnavailable)) as raised:
            await ask(server.url, api_key=key, max_retries=0)
    assert key[8:14] not in str(raised.value)


@pytest.mark.parametrize(("code", "error"), [(401, ConfigError), (402, EndpointAway), (404, ConfigError)])
async def test_an_error_inside_a_reply_ends_the_run_as_its_status_does(code: int, error: Any) -> None:
    """Proxies send status 200 with it; each rollout of the run would fail alike."""
    async with JsonServer(lambda asked: {"error": {"message": "the reason", "code": code}}) as server:
        with pytest.raises(error, match=f"status {code}: the reason"):
            await ask(server.url)
        assert len(server.asked) == 1


async def test_a_rate_limit_inside_a_reply_is_one() -> None:
    """Proxies send status 200 with it, in a body or in a choice: it is waited for, and counts as no fault."""
    limited = {"error": {"message": "slow down", "code": 429}}
    answers = iter([limited, {"choices": [limited]}])
    async with JsonServer(lambda asked: next(answers, (500, {}))) as server:
        account = Account()
        with pytest.raises(EndpointUnavailable, match="no reply in 1 attempt; the last: status 500"):
            await ask(server.url, account, max_retries=0)
        assert (len(server.asked), account.retries) == (3, 2)


async def test_the_error_that_ends_a_run_stays_when_other_requests_fail_later() -> None:
    """Those that were in flight: no request begins after the refusal of the key, whatever they got."""
    answers = iter([(401, {"error": {"message": "bad key"}}), *[(500, {"error": {"message": "down"}})] * 9])
    account = Account()
    errors: list[Exception] = []

    async def one(client: ChatClient) -> None:
        try:
            await client.ask(BODY, account)
        except (ConfigError, EndpointUnavailable) as error:
            errors.append(error)

    async with JsonServer(lambda asked: next(answers)) as server:
        client = ChatClient(ChatEndpoint(model="stub", base_url=server.url, api_key=KEY, max_retries=1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, client)
            tasks.start_soon(one, client)
        assert len(server.asked) == 2
    assert [type(error) for error in errors] == [ConfigError, ConfigError]


@pytest.mark.parametrize("fault", ["cut", "hang_up", "wrong_json"])
async def test_a_reply_that_is_lost_counts_for_the_budget(fault: Any) -> None:
    """The API bills it: the request counts as the most that it can cost, so that lost replies end the run, too."""
    prices, body = Prices(2.0, 8.0), {**BODY, "max_completion_tokens": 20}
    account = Account(prices, 0.0005, settle_seconds=0.0)
    async with ChatServer(plain, fault=lambda number: fault) as server:
        endpoint = ChatEndpoint(model="stub", base_url=server.url, api_key=KEY, max_retries=1000)
        with anyio.fail_after(20), pytest.raises(BudgetSpent, match=r"of unknown cost .at most"):
            await ChatClient(endpoint).ask(body, account)
    billed = [prices.dollars(one.prompt_tokens, one.completion_tokens) for one in server.asked]
    assert sum(billed) <= account.budget + max(billed)
    assert account.spent + account.most_unpriced >= sum(billed)


async def test_a_request_that_is_cancelled_counts_for_the_budget() -> None:
    """By the deadline of an episode, say: the API may continue the reply and bill it."""
    account, arrived = Account(Prices(1.0, 1.0), 1.0), anyio.Event()

    async def never() -> None:
        arrived.set()
        await anyio.sleep_forever()

    async with ChatServer(plain, before=never) as server, anyio.create_task_group() as tasks:
        endpoint = ChatEndpoint(model="stub", base_url=server.url, api_key=KEY)
        tasks.start_soon(ChatClient(endpoint).ask, BODY, account)
        await arrived.wait()
        tasks.cancel_scope.cancel()
    assert (account.unpriced, account.in_flight) == (1, 0)
    assert account.most_unpriced > 0


async def test_a_request_that_was_never_received_costs_nothing() -> None:
    account = Account(Prices(1.0, 1.0), 1.0)
    with pytest.raises(EndpointUnavailable):
        await ask("http://127.0.0.1:1/v1", account, max_retries=0)
    assert (account.unpriced, account.most_unpriced) == (1, 0.0)


async def test_the_price_of_the_api_wins() -> None:
    """``usage.cost``, which some APIs send, is what the account counts."""
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    account = Account(Prices(1, 1))
    async with JsonServer(lambda asked: {"choices": [choice], "usage": usage}) as server:
        await ask(server.url, account)
    assert account.spent == 0.25


async def test_endpoints_that_differ_in_sampling_share_a_client() -> None:
    """So the greedy and the sampled part of an evaluation have one limit and one pause."""
    one = ChatEndpoint(model="stub")
    other = ChatEndpoint(model="stub", sampling=SamplingParams(temperature=0.0))
    assert client_of(one) is client_of(other)
    assert client_of(one) is not client_of(ChatEndpoint(model="other"))
