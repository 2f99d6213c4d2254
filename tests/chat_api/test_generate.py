"""Samples of a chat API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from rollouts.chat_api import Account, ChatEndpoint, Prices, chat_rollout_to_samples
from rollouts.dtypes import Limits, Message, Prompt, StopReason
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import ConfigError
from rollouts.inference.shared import shared_policy
from rollouts.testing.chat_server import ChatServer
from rollouts.testing.json_server import JsonServer
from rollouts.training import Sample
from tests.chat_api.sums import KEY, solve, tasks


async def play(server: ChatServer, prompt: Any = None, **options: Any) -> Sample:
    endpoint = ChatEndpoint(model="stub", base_url=server.url, api_key=KEY)
    given: dict[str, Any] = {"environment_cls": CalculatorEnvironment, "endpoint": endpoint, **options}
    (sample,) = await chat_rollout_to_samples(tasks(1, 4)[0] if prompt is None else prompt, **given)
    return sample


async def test_an_environment_is_played_by_a_chat_api() -> None:
    """Tool calls, results and the final reply are messages; the sample names its models and has no token."""
    account = Account(Prices(1.0, 10.0))
    async with ChatServer(solve) as server:
        sample = await play(server, account=account)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample.messages[3]["content"] == "1004"
    assert sample.messages[4]["content"] == "The answer is 1004."
    assert (len(sample), sample.sampled_tokens, sample.stop_reason) == (0, 0, StopReason.TASK_COMPLETED)
    served = sample.metadata["chat_api"]
    assert (served["model"], served["served"], served["fingerprints"]) == ("stub", ["stub-2026-01-01"], ["fp_stub"])
    billed = [(one.prompt_tokens, one.completion_tokens) for one in server.asked]
    assert sample.metrics["prompt_tokens"] == sum(prompt for prompt, _ in billed)
    assert sample.metrics["dollars"] == pytest.approx(sum(a * 1e-6 + b * 1e-5 for a, b in billed))
    assert account.spent == pytest.approx(sample.metrics["dollars"])
    assert sample.response == "\n1004\nThe answer is 1004."


def says(*messages: Mapping[str, Any]) -> Any:
    """A model that gives these messages in turn."""

    def reply(history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return messages[sum(message["role"] == "assistant" for message in history)]

    return reply


def calls(*named: tuple[str, str, str]) -> dict[str, Any]:
    return {
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in named
        ],
    }


async def test_a_call_that_cannot_run_is_answered_and_the_history_is_sound() -> None:
    """Malformed arguments, an unknown tool and repeated ids: each call has one result under its own id."""
    first = calls(("call_1", "add", '{"a": 1'), ("call_2", "leap", "{}"), ("call_1", "add", '{"a": 1, "b": 2}'))
    again = calls(("call_1", "add", '{"a": 5, "b": 2}'))
    async with ChatServer(says(first, again, {"content": "done"})) as server:
        sample = await play(server)
    assert [one.status for one in server.asked] == [200, 200, 200]
    results = [message for message in sample.messages if message["role"] == "tool"]
    assert [result["content"] for result in results] == [
        "Error: The arguments are not a JSON object.",
        "Error: there is no tool 'leap'; the tools are: add, subtract, multiply, divide",
        "3",
        "7",
    ]
    assert len({result["tool_call_id"] for result in results}) == 4
    sent = server.asked[1].body["messages"][2]["tool_calls"][0]["function"]
    assert sent["arguments"] == '{"a": 1', "as the model wrote it"
    assert sample.metrics["malformed_tool_calls"] == sample.metrics["unknown_tool_calls"] == 1
    assert sample.metrics["duplicate_call_ids"] == 2


@pytest.mark.parametrize(
    ("fault", "text"), [("refusal", "I'm sorry, but I can't help with that."), ("content_filter", "")]
)
async def test_a_withheld_reply_is_scored_and_counted(fault: Any, text: str) -> None:
    """It is a reply of the model, which the environment judges as any other; a second try would hide refusals."""
    async with ChatServer(solve, fault=lambda number: fault) as server:
        sample = await play(server)
    assert sample.failure is None
    assert sample.messages[-1]["content"] == text
    assert (sample.metrics["refusals"], sample.metrics["replies"], len(server.asked)) == (1, 1, 1)
    assert sample.stop_reason == StopReason.TASK_COMPLETED


async def test_a_filter_that_refuses_the_request_is_a_failure() -> None:
    """An error of the API has no reply: it is not asked again, and not scored."""
    error = {"error": {"message": "filtered", "type": None, "param": "prompt", "code": "content_filter"}}
    async with JsonServer(lambda asked: (400, error)) as server:
        (sample,) = await chat_rollout_to_samples(
            "What is 1 + 1000?",
            environment_cls=CalculatorEnvironment,
            endpoint=ChatEndpoint(model="stub", base_url=server.url),
        )
    assert sample.failure is not None
    assert (sample.failure.kind, sample.failure.cause, sample.reward) == ("ReplyWithheld", "endpoint", None)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("limits", "reason", "requests"),
    [
        (Limits(max_turns=1), StopReason.MAX_TURNS, 1),
        (Limits(max_tool_calls=0), StopReason.MAX_TOOL_CALLS, 1),
        (Limits(max_tokens=20), StopReason.MAX_TOKENS, 1),
        (Limits(max_sampled_tokens=5), StopReason.MAX_TOKENS, 1),
    ],
)
async def test_limits_end_an_episode_before_useless_work(limits: Limits, reason: StopReason, requests: int) -> None:
    """As in the agent loop; tokens are as the API counts them."""
    async with ChatServer(solve) as server:
        sample = await play(server, limits=limits)
    assert (sample.stop_reason, len(server.asked)) == (reason, requests)
    assert not any(message["role"] == "tool" for message in sample.messages)


@pytest.mark.parametrize("fault", ["rate_limit", "server_error"])
async def test_a_wait_for_the_api_is_not_the_deadline_of_an_episode(fault: Any) -> None:
    """It would be scored as a truncated rollout: deadlines stand still while a request waits to be sent again."""
    async with ChatServer(solve, fault=lambda number: fault if number < 3 else None, retry_after=1.0) as server:
        sample = await play(server, limits=Limits(episode_seconds=1.5))
    assert (sample.stop_reason, len(server.asked)) == (StopReason.TASK_COMPLETED, 5)


async def test_a_prompt_that_is_too_long_is_a_stop_reason() -> None:
    """The API's error for it fails nothing."""
    async with ChatServer(solve, max_context=10) as server:
        sample = await play(server)
    assert (sample.stop_reason, sample.failure) == (StopReason.CONTEXT_OVERFLOW, None)


@pytest.mark.parametrize(
    "text",
    [
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 4096 "
        "tokens and your request has 25 input tokens",
        "This model's maximum context length is 4097 tokens. However, you requested 4107 tokens (11 in the messages, "
        "4096 in the completion).",
    ],
)
async def test_a_first_request_for_more_than_the_context_is_a_failure(text: str) -> None:
    """The prompt is short, and the settings ask for too long a reply: no task would get a reply, and a reward of 0."""
    error = {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}}
    async with JsonServer(lambda asked: (400, error)) as server:
        endpoint = ChatEndpoint(model="stub", base_url=server.url)
        (sample,) = await chat_rollout_to_samples("q", environment_cls=CalculatorEnvironment, endpoint=endpoint)
    assert sample.failure is not None
    assert "maximum context length" in sample.failure.message


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_of_the_reply_in_the_body_is_what_was_asked_for(name: str) -> None:
    """A reply that it cuts was cut by a limit, not by the context; and it exceeds no limit of the episode."""
    body = {"max_completion_tokens": None, name: 12}
    async with ChatServer(solve) as server:
        cut = await play(server, body=body)
        await play(server, body=body, limits=Limits(max_sampled_tokens=5))
    assert cut.stop_reason == StopReason.MAX_TOKENS
    assert [one.body[name] for one in server.asked] == [12, 5]


@pytest.mark.parametrize("name", ["n", "stream", "messages"])
async def test_a_field_of_the_episode_is_refused_in_python_too(name: str) -> None:
    """``n`` would buy replies that are not read."""
    async with ChatServer(solve) as server:
        with pytest.raises(ConfigError, match=f"--body: got '{name}'"):
            await play(server, body={name: 2})
    assert server.asked == []


async def test_the_password_of_a_url_is_in_no_sample() -> None:
    """Not in the spans of its time either, which a run stores."""
    async with ChatServer(solve, key=None) as server:
        url = server.url.replace("//", "//user:hunter2@")
        endpoint = ChatEndpoint(model="stub", base_url=url)
        (sample,) = await chat_rollout_to_samples(
            tasks(1, 4)[0], environment_cls=CalculatorEnvironment, endpoint=endpoint
        )
    assert sample.failure is None
    assert "hunter2" not in str(sample.to_dict())


async def test_the_id_that_a_call_is_given_is_of_no_other_call() -> None:
    """Models number their calls as we do."""
    first = calls(("call00001", "add", '{"a": 1, "b": 2}'), ("call00001", "add", '{"a": 1, "b": 2}'))
    async with ChatServer(says(first, {"content": "done"})) as server:
        sample = await play(server)
    assert len({message["tool_call_id"] for message in sample.messages if message["role"] == "tool"}) == 2


async def test_reasoning_is_kept_and_sent_back_only_where_asked() -> None:
    """Some APIs refuse the field in a history, as OpenAI's schema does; others need it."""
    thinking = {**calls(("c1", "add", '{"a": 1, "b": 2}')), "reasoning_content": "Add them."}
    async with ChatServer(says(thinking, {"content": "3"})) as server:
        kept = await play(server)
        refused = await play(server, send_reasoning=True)
    assert kept.messages[2]["reasoning_content"] == "Add them."
    assert "reasoning_content" not in server.asked[1].body["messages"][2]
    assert refused.failure is not None
    assert "'reasoning_content' was unexpected" in refused.failure.message


async def test_each_rollout_and_turn_has_its_seed_and_fields_can_be_left_out() -> None:
    """A seed of the run gives no two rollouts the same replies."""
    async with ChatServer(solve) as server:
        endpoint = ChatEndpoint(model="stub", base_url=server.url, api_key=KEY)
        for index in (0, 1):
            prompt = Prompt("What is 4 + 1000?", index=index)
            await play(server, prompt, body={"reasoning_effort": "low", "temperature": None}, sampling=seeded(endpoint))
    bodies = [one.body for one in server.asked]
    assert len({body["seed"] for body in bodies}) == 4
    assert all(body["reasoning_effort"] == "low" and "temperature" not in body for body in bodies)


def seeded(endpoint: ChatEndpoint) -> Any:
    from attrs import evolve

    return evolve(endpoint.sampling, seed=7)


@pytest.mark.parametrize("change", [{"top_k": 5}, {"min_p": 0.1}, {"regex": "a"}, {"stop": tuple("abcde")}])
async def test_a_sampling_parameter_without_a_field_is_refused(change: dict[str, Any]) -> None:
    """By name, before a request."""
    from attrs import evolve

    async with ChatServer(solve) as server:
        endpoint = ChatEndpoint(model="stub", base_url=server.url)
        with pytest.raises(ConfigError, match=f"SamplingParams.{next(iter(change))}"):
            await play(server, sampling=evolve(endpoint.sampling, **change))
    assert server.asked == []


async def test_a_prompt_that_ends_with_an_assistant_message_fails_by_name() -> None:
    """A chat API opens a new turn, so the reply would not continue it."""
    async with ChatServer(solve) as server:
        sample = await play(server, [Message("user", "What is 4 + 1000?"), Message("assistant", "It is")])
    assert sample.failure is not None
    assert "continues no turn of the assistant" in sample.failure.message


async def test_a_client_of_token_ids_refuses_the_endpoint() -> None:
    """The endpoint of a chat API is an Endpoint; a policy of it would send ids to a server without them."""
    with pytest.raises(ConfigError, match="OpenAI's chat API has no token ids"):
        shared_policy(ChatEndpoint(model="stub"))


async def test_the_environment_does_not_get_the_urgency_of_its_group() -> None:
    """It gets the task only."""
    given: list[Prompt] = []

    class Noted(CalculatorEnvironment):
        async def start(self, prompt: Prompt) -> Sequence[Message]:
            given.append(prompt)
            return await super().start(prompt)

    async with ChatServer(solve) as server:
        await play(server, attrs.evolve(tasks(1, 4)[0], urgency=lambda: 0), environment_cls=Noted)
    assert [prompt.urgency for prompt in given] == [None]
