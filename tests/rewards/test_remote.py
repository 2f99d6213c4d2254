"""Rewards over HTTP: batches, retries, deadlines, and invalid responses."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from rollouts.errors import ConfigError, RewardFailure
from rollouts.rewards import RemoteReward
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.training import Sample


def lengths(asked: Asked) -> Any:
    return {"rewards": [len(sample["response"]) for sample in asked.body["samples"]]}


async def scored(reward: RemoteReward, samples: list[Sample]) -> list[float | str]:
    results: dict[int, float | str] = {}

    async def one(number: int) -> None:
        try:
            results[number] = await reward(samples[number])
        except RewardFailure as error:
            results[number] = str(error)

    async with anyio.create_task_group() as tasks:
        for number in range(len(samples)):
            tasks.start_soon(one, number)
    return [results[number] for number in range(len(samples))]


def some(count: int) -> list[Sample]:
    return [Sample(response="x" * number, label=number, tokens=[1]) for number in range(count)]


async def test_samples_travel_together_and_get_their_own_reward() -> None:
    """Ten samples at four a request are three requests; each sample gets its reward, and no tokens are sent."""
    async with JsonServer(lengths) as server:
        reward = RemoteReward(server.url, batch_size=4, api_key="secret")
        assert await scored(reward, some(10)) == [float(number) for number in range(10)]
        assert [len(asked.body["samples"]) for asked in server.asked] == [4, 4, 2]
        assert set(server.asked[0].body["samples"][0]) == {"prompt", "response", "messages", "label", "metadata"}
        assert server.asked[0].headers["Authorization"] == "Bearer secret"
        assert "secret" not in repr(reward)


async def test_an_error_that_quotes_the_key_is_shown_without_it() -> None:
    """APIs quote the key that they refuse; a message may be shortened in the middle of it."""
    key = "sk-abcdefgh-0123456789"
    for quoted in (key, "x" * 150 + key):
        refusal = {"error": {"message": f"Incorrect API key provided: {quoted}"}}
        for status in (401, 503):
            async with JsonServer(lambda asked, status=status, refusal=refusal: (status, refusal)) as server:
                (text,) = await scored(RemoteReward(server.url, api_key=key, attempts=1, outage_seconds=0), some(1))
            assert f"status {status}: Incorrect API key provided: " in str(text)
            assert key[:8] not in str(text)


async def test_a_group_is_one_request() -> None:
    """For ``group_rm=True``, however small the batches are."""
    async with JsonServer(lengths) as server:
        reward = RemoteReward(server.url, batch_size=2)
        assert await reward.group(some(5)) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [409, 500, 503])
async def test_an_overloaded_server_is_retried(status: int) -> None:
    """Until a response arrives, or the attempts are used up; then the message contains the server's last error."""
    refusals = iter([(status, {"error": "busy"})] * 2)
    async with JsonServer(lambda asked: next(refusals, lengths(asked))) as server:
        assert await RemoteReward(server.url, backoff_seconds=0)(some(2)[1]) == 1.0
        assert len(server.asked) == 3
    async with JsonServer(lambda asked: (status, {"error": "busy"})) as server:
        with pytest.raises(RewardFailure, match=rf"no reply in 2 attempts; the last: status {status}: busy"):
            await RemoteReward(server.url, backoff_seconds=0, attempts=2, outage_seconds=0)(some(1)[0])


async def test_a_server_that_is_down_is_a_failure() -> None:
    """Of the reward, not of the endpoint that samples, if it is not waited for."""
    async with JsonServer(lengths) as server:
        url = server.url
    with pytest.raises(RewardFailure, match=r"no reply in 2 attempts; the last: .*cannot connect"):
        await RemoteReward(url, attempts=2, backoff_seconds=0, outage_seconds=0)(some(1)[0])


async def test_a_server_that_never_answers_is_late() -> None:
    """The deadline holds for all attempts together."""
    async with JsonServer(lambda asked: None) as server:
        with pytest.raises(RewardFailure, match=r"did not answer within 0.1 s") as caught:
            await RemoteReward(server.url, seconds=0.1)(some(1)[0])
        assert str(caught.value).startswith("remote reward at http://127.0.0.1")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"rewards": [1.0]},
        {"rewards": [1.0, "2"]},
        {"rewards": [1.0, None]},
        {"rewards": [True, 1.0]},
        b"<html>",
    ],
    ids=repr,
)
async def test_an_invalid_response_fails_every_sample_of_the_batch(answer: Any) -> None:
    """No sample gets a reward, and there is no retry."""
    async with JsonServer(lambda asked: answer) as server:
        results = await scored(RemoteReward(server.url), some(2))
        assert all(isinstance(text, str) and "remote reward" in text for text in results)
        assert len(server.asked) == 1


async def test_a_sample_that_is_no_json_fails_alone() -> None:
    """Metadata that is not JSON fails its own sample, before it joins a batch."""
    samples = some(4)
    samples[1].metadata["tensor"] = object()
    async with JsonServer(lengths) as server:
        results = await scored(RemoteReward(server.url, batch_size=4), samples)
    assert [results[0], *results[2:]] == [0.0, 2.0, 3.0]
    assert "is not JSON" in str(results[1])


async def test_a_password_in_the_url_is_never_printed() -> None:
    """Neither in a message nor in a repr."""
    reward = RemoteReward("http://ada:secret@127.0.0.1:9/", attempts=1, outage_seconds=0)
    assert "secret" not in repr(reward)
    with pytest.raises(RewardFailure) as caught:
        await reward(some(1)[0])
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        RemoteReward("ftp://ada:secret@127.0.0.1/")
    assert "secret" not in str(refused.value)


async def test_a_refusal_is_not_repeated() -> None:
    """4xx: the request is wrong, and stays so."""
    async with JsonServer(lambda asked: (422, {"detail": "no field label"})) as server:
        with pytest.raises(RewardFailure, match="status 422: no field label"):
            await RemoteReward(server.url)(some(1)[0])
        assert len(server.asked) == 1


async def test_cancelling_one_sample_does_not_affect_its_batch() -> None:
    """The first sample of a batch sends it; when it is cancelled, the others are sent again."""
    came = anyio.Event()

    def answer(asked: Asked) -> Any:
        came.set()
        return None if len(server.asked) == 1 else lengths(asked)

    async with JsonServer(answer) as server:
        reward = RemoteReward(server.url, batch_size=2)
        results: list[float] = []

        async def follow() -> None:
            results.append(await reward(Sample(response="abc")))

        async with anyio.create_task_group() as tasks:
            leader = anyio.CancelScope()

            async def lead() -> None:
                with leader:
                    await reward(Sample(response="abcd"))

            tasks.start_soon(lead)
            tasks.start_soon(follow)
            await came.wait()
            leader.cancel()
        assert results == [3.0]


@pytest.mark.parametrize(
    "options",
    [{"url": "host:80"}, {"batch_size": 0}, {"linger_seconds": -1}, {"attempts": 0}, {"seconds": 0}, {"at_once": 0}],
    ids=repr,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    """By name, before work starts."""
    name = next(iter(options))
    with pytest.raises(ConfigError, match=name):
        RemoteReward(**{"url": "http://127.0.0.1:1", **options})
