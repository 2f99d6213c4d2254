"""strands-sglang's API, of all its versions, around a real Strands agent: exact tokens under every name."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.testing.server import StubServer

strands = pytest.importorskip("strands")

from strands.agent.conversation_manager import NullConversationManager  # noqa: E402
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException  # noqa: E402

from rollouts.integrations.compat import strands_sglang  # noqa: E402 - after the check that it can be imported
from rollouts.integrations.compat.strands_sglang import (  # noqa: E402
    LoopLimiter,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    SGLangClient,
    SGLangClientError,
    SGLangConnectionError,
    SGLangModel,
    ToolIterationLimiter,
    ToolLimiter,
    get_client,
    get_client_from_slime_args,
    get_tool_parser,
)

pytestmark = pytest.mark.extra

RAN: list[int] = []


@strands.tool
def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    RAN.append(a)
    return str(a + b)


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    RAN.clear()


def model_of(server: StubServer, tokenizer: Any, **config: Any) -> SGLangModel:
    return SGLangModel(client=SGLangClient(server.url, max_retries=0), tokenizer=tokenizer, **config)


def agent_of(model: SGLangModel, *hooks: Any) -> Any:
    return strands.Agent(
        model=model,
        tools=[add],
        hooks=list(hooks),
        callback_handler=None,
        conversation_manager=NullConversationManager(),
    )


def causes(error: BaseException | None) -> list[type[BaseException]]:
    found = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__
    return found


async def test_the_tokens_are_those_of_the_requests_and_the_replies(server: StubServer, demo_tokenizer: Any) -> None:
    """Under the old name and the new one; the mask marks sampled tokens, and context tokens have logprob 0."""
    model = model_of(server, demo_tokenizer, sampling_params={"max_new_tokens": 200, "skip_special_tokens": False})
    await agent_of(model).invoke_async("What is 5 + 3?")
    rollout = model.rollout
    assert model.token_manager.token_ids == rollout.token_ids
    assert len(server.requests) == 3
    for request in server.requests:
        assert rollout.token_ids[: len(request.input_ids)] == request.input_ids
    sampled = [length for is_output, length in rollout.segment_info if is_output]
    assert len(sampled) == 3
    assert sum(rollout.loss_mask) == sum(sampled)
    assert rollout.loss_mask[: rollout.initial_prompt_length] == [0] * rollout.initial_prompt_length
    assert all(
        bool(weight) == (logprob < 0) for weight, logprob in zip(rollout.loss_mask, rollout.logprobs, strict=True)
    )
    assert (
        demo_tokenizer.encode(demo_tokenizer.decode(rollout.token_ids), add_special_tokens=False) != rollout.token_ids
    )
    assert [token.token_id for segment in rollout.segments for token in segment] == rollout.token_ids
    assert len(rollout.initial_prompt) == rollout.initial_prompt_length
    assert server.requests[0].sampling_params["max_new_tokens"] == 200


async def test_a_call_that_cannot_be_read_is_answered_and_no_tool_runs(demo_tokenizer: Any) -> None:
    """Nothing is repaired: the model gets an error message."""
    said = ['<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>', "Done."]

    def reply(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        return list(demo_tokenizer.encode(said.pop(0) + "<|im_end|>", add_special_tokens=False))

    async with StubServer(reply=reply) as server:
        model = model_of(server, demo_tokenizer)
        await agent_of(model).invoke_async("Well?")
        text = demo_tokenizer.decode(model.rollout.token_ids)
        assert "<tool_response>\nError: " in text
        assert sum(model.tool_parse_errors.values()) == 1
        assert RAN == []


@pytest.mark.parametrize(
    ("limiter", "error", "ran"),
    [
        (ToolLimiter(max_tool_iters=2), MaxToolIterationsReachedError, 1),
        (ToolIterationLimiter(1), MaxToolIterationsReachedError, 0),
        (LoopLimiter(max_tool_calls=1), MaxToolCallsReachedError, 0),
        (LoopLimiter(max_messages=3), MaxMessagesReachedError, 1),
    ],
    ids=["ToolLimiter", "ToolIterationLimiter", "LoopLimiter", "max_messages"],
)
async def test_limits_end_the_loop_before_a_tool_runs_for_nothing(
    server: StubServer, demo_tokenizer: Any, limiter: Any, error: type[Exception], ran: int
) -> None:
    """The limiter of every generation; the tokens end with the reply."""
    limiter.reset()
    model = model_of(server, demo_tokenizer)
    with pytest.raises(Exception, match=r"limit|reached") as raised:
        await agent_of(model, limiter).invoke_async("What is 5 + 3?")
    assert error in causes(raised.value)
    assert len(RAN) == ran
    assert model.rollout.loss_mask[-1] == 1


async def test_calls_beyond_the_parallel_limit_are_answered(demo_tokenizer: Any) -> None:
    """The first runs; the result of the second is an error."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    said = [call + call, "Done."]

    def reply(input_ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        return list(demo_tokenizer.encode(said.pop(0) + "<|im_end|>", add_special_tokens=False))

    async with StubServer(reply=reply) as server:
        limiter = LoopLimiter(max_parallel_tool_calls=1)
        await agent_of(model_of(server, demo_tokenizer), limiter).invoke_async("Well?")
    assert (limiter.cancelled_tool_call_count, RAN) == (1, [1])


async def test_errors_of_the_server_have_their_old_names(demo_tokenizer: Any) -> None:
    """An abort is an error, an overflow and a cut are Strands' own errors, no server is a connection error."""
    for fault, kind in (("abort", SGLangClientError), ("error_context", ContextWindowOverflowException)):
        async with StubServer(faults=[fault]) as server:
            with pytest.raises(Exception, match=r".") as raised:
                await agent_of(model_of(server, demo_tokenizer)).invoke_async("Well?")
            assert kind in causes(raised.value)
    async with StubServer() as server:
        model = model_of(server, demo_tokenizer, sampling_params={"max_new_tokens": 1})
        with pytest.raises(MaxTokensReachedException):
            await agent_of(model).invoke_async("Well?")
        assert sum(model.rollout.loss_mask) == 1
    with pytest.raises(SGLangConnectionError):
        await agent_of(model_of(server, demo_tokenizer)).invoke_async("Well?")


@pytest.mark.parametrize("before", [0, 1])
async def test_the_messages_of_a_request_that_failed_reach_the_model_once(before: int, demo_tokenizer: Any) -> None:
    """The next request has the same ids; before, it had the last message twice, or the first turn was refused."""
    asked, said = {"role": "user", "content": [{"text": "Well?"}]}, {"role": "assistant", "content": [{"text": "-"}]}
    messages = [*[asked, said] * before, asked]
    async with StubServer(faults=[*["none"] * before, "error_context"]) as server:
        model = model_of(server, demo_tokenizer)
        for shown in [messages[:1]] * before:
            assert [event async for event in model.stream(shown)]
        with pytest.raises(ContextWindowOverflowException):
            _ = [event async for event in model.stream(messages)]
        assert [event async for event in model.stream(messages)]
    *_, failed, again = [request.input_ids for request in server.requests]
    assert again == failed


async def test_a_conversation_that_was_changed_is_refused(server: StubServer, demo_tokenizer: Any) -> None:
    """After ``reset`` another one starts."""
    model = model_of(server, demo_tokenizer)
    await agent_of(model).invoke_async("What is 5 + 3?")
    with pytest.raises(ConfigError, match="the earlier conversation was changed"):
        await agent_of(model).invoke_async("Something else.")
    model.reset()
    assert len(model.rollout) == 0
    await agent_of(model).invoke_async("Something else.")
    assert len(model.rollout) > 0


def test_clients_are_shared() -> None:
    """By URL, also from slime's arguments."""
    args = Namespace(sglang_router_ip="127.0.0.1", sglang_router_port=9)
    assert get_client_from_slime_args(args) is get_client("http://127.0.0.1:9")
    assert SGLangClient.from_slime_args(args).base_url == "http://127.0.0.1:9"


def test_unknown_options_are_refused(demo_tokenizer: Any) -> None:
    """Parsers, sampling parameters and unsupported options; the error names them."""
    with pytest.raises(ConfigError, match="tool_parser"):
        get_tool_parser("llama")
    with pytest.raises(ConfigError, match="repetition"):
        strands_sglang.SGLangModel(
            client=SGLangClient("http://h"), tokenizer=demo_tokenizer, sampling_params={"repetition": 1.0}
        )
    with pytest.raises(ConfigError, match="routed_experts"):
        SGLangModel(client=SGLangClient("http://h"), tokenizer=demo_tokenizer, return_routed_experts=True)


def test_every_name_is_there() -> None:
    """Those of the first version, the second and the last."""
    for name in strands_sglang.__all__:
        assert getattr(strands_sglang, name) is not None
    parsers = [getattr(strands_sglang, name)().name for name in ("HermesToolParser", "QwenXMLToolParser")]
    assert parsers == ["hermes", "qwen3_coder"]
