"""The SDKs and agent frameworks that programs are made of, unchanged, against a session with scripted replies.

Each plays two turns: the model calls a tool, and after the result it ends. The request of the second turn must have the
first reply as it was served, or what is known to be lost of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.programs.gateway.server import Gateway
from rollouts.programs.gateway.types import ApiError, CallRequest
from tests.programs.gateway.scripted import ScriptedSession

pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("ignore"),  # the packages issue warnings
]

FIRST = Message("assistant", "I look.", [ToolCall("double", {"n": 21}, id="c00000001")], reasoning="Hm.")
LAST = Message("assistant", "It is 42.")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
DELAYED = {"head_seconds": 0.002, "ping_seconds": 0.002}
DOUBLE = {"name": "double", "description": "Double a number.", "parameters": SCHEMA}
TASK = "Double 21."


def needs(*modules: str) -> None:
    """Skip the test if a package is missing."""
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module.partition('.')[0]} is not installed")


async def late(request: CallRequest) -> Message:
    """The first reply, after some pings."""
    await anyio.sleep(0.01)
    return FIRST


@contextlib.asynccontextmanager
async def session_of(*script: Any) -> AsyncIterator[tuple[ScriptedSession, str]]:
    """A session with a script, by default of two turns, and its base URL."""
    session = ScriptedSession(iter(script or (late, LAST)))
    async with Gateway(**DELAYED) as gateway:
        yield session, gateway.open(session)


def check(session: ScriptedSession, stream: bool, *, reasoning: bool = True) -> None:
    """The second request continues the first reply, and both replies were delivered."""
    assert [request.stream for request in session.requests] == [stream] * 2
    first, second = session.requests
    assert [tool.name for tool in first.tools] == ["double"]
    assert first.messages[-1] == Message("user", TASK)
    assert second.messages[: len(first.messages)] == first.messages
    echo, *results = second.messages[len(first.messages) :]
    assert (echo.role, echo.tool_calls) == ("assistant", FIRST.tool_calls)
    assert echo.content == FIRST.content
    assert echo.reasoning == (FIRST.reasoning if reasoning else None)
    assert results == [Message("tool", "42", tool_call_id="c00000001")]
    assert session.received == ["r1", "r2"]
    assert session.failures == []
    assert {name for name in session.counts if name.startswith(("unknown_route", "refused"))} == set()


# -- openai -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def openai_client(session: ScriptedSession, base: str) -> AsyncIterator[Any]:
    needs("openai")
    import openai

    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=session.key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(stream: bool) -> None:
    """Both ways of streaming; the message of the answer is sent back as the SDK gives it."""
    async with session_of() as (session, base), openai_client(session, base) as client:
        tools = [{"type": "function", "function": DOUBLE}]
        history: list[Any] = [{"role": "user", "content": TASK}]

        async def ask() -> Any:
            if not stream:
                return await client.chat.completions.create(model="any", messages=history, tools=tools)
            options = {"stream_options": {"include_usage": True}}
            async with client.chat.completions.stream(model="any", messages=history, tools=tools, **options) as events:
                return await events.get_final_completion()

        first = await ask()
        assert (first.model, first.usage.prompt_tokens, first.choices[0].finish_reason) == ("any", 100, "tool_calls")
        history += [
            first.choices[0].message.to_dict(),
            {"role": "tool", "tool_call_id": first.choices[0].message.tool_calls[0].id, "content": "42"},
        ]
        last = await ask()
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("It is 42.", "stop")
        check(session, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_reference", [False, True])
async def test_openai_responses(stream: bool, by_reference: bool) -> None:
    """Both ways of streaming; the items of the answer are sent back whole, or by their ids."""
    async with session_of() as (session, base), openai_client(session, base) as client:
        tools = [{"type": "function", "strict": False, **DOUBLE}]
        history: list[Any] = [{"role": "user", "content": TASK}]

        async def ask() -> Any:
            if not stream:
                return await client.responses.create(model="any", input=history, tools=tools)
            async with client.responses.stream(model="any", input=history, tools=tools) as events:
                return await events.get_final_response()

        first = await ask()
        assert (first.model, first.usage.input_tokens, first.status) == ("any", 100, "completed")
        echo = [{"type": "item_reference", "id": item.id} if by_reference else item.to_dict() for item in first.output]
        history += [*echo, {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}]
        assert (await ask()).output_text == "It is 42."
        check(session, stream)


async def test_openai_errors() -> None:
    """Each is the exception of the SDK, also in a stream that has begun; unknown keys are refused."""
    needs("openai")
    import openai

    async def fail(request: CallRequest) -> Message:
        await anyio.sleep(0.01)
        raise ApiError("server", "broken")

    overflow = ApiError("overflow", "", tokens=9, max_context=8)
    async with session_of(overflow, fail, fail, RuntimeError()) as (session, base):
        async with openai_client(session, base) as client:
            chat: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**chat)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.APIError, match="broken"):
                async for _ in await client.chat.completions.create(**chat, stream=True):
                    pass
            async with client.responses.stream(model="any", input="hi") as events:
                kinds = [event.type async for event in events]
            assert kinds == ["response.created", "response.failed"]
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="any", input="hi")
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="another-key-000001").chat.completions.create(**chat)
            assert [model.id async for model in client.models.list()] == ["policy"]


# -- anthropic --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def anthropic_client(session: ScriptedSession, base: str) -> AsyncIterator[Any]:
    needs("anthropic")
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=base, api_key=session.key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic(stream: bool) -> None:
    """Both ways of streaming; the content of the answer is sent back as the SDK gives it."""
    async with session_of() as (session, base), anthropic_client(session, base) as client:
        tools = [{"name": "double", "description": "Double a number.", "input_schema": SCHEMA}]
        history: list[Any] = [{"role": "user", "content": TASK}]

        async def ask() -> Any:
            asked: Any = {"model": "any", "max_tokens": 50, "messages": history, "tools": tools}
            if not stream:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                return await events.get_final_message()

        first = await ask()
        assert (first.model, first.usage.input_tokens, first.stop_reason) == ("any", 40, "tool_use")
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "42"}
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = await ask()
        assert (last.content[0].text, last.stop_reason) == ("It is 42.", "end_turn")
        check(session, stream)
        counted = await client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "four"}])
        assert counted.input_tokens == 4
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_anthropic_errors() -> None:
    """Each is the exception of the SDK, also in a stream that has begun; unknown keys are refused."""
    needs("anthropic")
    import anthropic

    async def fail(request: CallRequest) -> Message:
        await anyio.sleep(0.01)
        raise ApiError("server", "broken")

    async with session_of(ApiError("overflow", "", tokens=9, max_context=8), fail) as (session, base):
        async with anthropic_client(session, base) as client:
            asked: Any = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9 tokens > 8 maximum"):
                await client.messages.create(**asked)
            with pytest.raises(anthropic.APIStatusError, match="broken"):
                async for _ in await client.messages.create(**asked, stream=True):
                    pass
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="another-key-000001").messages.create(**asked)


# -- frameworks -------------------------------------------------------------------------------------------------------


def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number.
    """
    return 2 * n


async def drain(context: Any, events: AsyncIterator[Any]) -> None:
    """Read all events; with a handler of events, an agent asks for streams."""
    async for _ in events:
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_pydantic_ai(api: str, stream: bool) -> None:
    """An agent with a tool, in the three APIs and both ways of streaming."""
    needs("pydantic_ai", "openai", "anthropic")
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async with session_of() as (session, base):
        async with openai_client(session, base) as openai, anthropic_client(session, base) as anthropic:
            model: Any = (
                AnthropicModel("any", provider=AnthropicProvider(anthropic_client=anthropic))
                if api == "messages"
                else {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api](
                    "any", provider=OpenAIProvider(openai_client=openai)
                )
            )
            agent: Any = Agent(model, tools=[double])
            handler: Any = {"event_stream_handler": drain} if stream else {}
            output = (await agent.run(TASK, **handler)).output
        assert output == "It is 42."
        check(session, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents(api: str, stream: bool) -> None:
    """An agent with a tool, in both APIs and both ways of streaming; in chat the SDK drops the reasoning."""
    needs("agents", "openai")
    import agents

    agents.set_tracing_disabled(True)
    async with session_of() as (session, base), openai_client(session, base) as client:
        kind: Any = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        agent: Any = agents.Agent("a", model=kind("any", openai_client=client), tools=[agents.function_tool(double)])
        if stream:
            result: Any = agents.Runner.run_streamed(agent, TASK)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, TASK)
        assert result.final_output == "It is 42."
        check(session, stream, reasoning=api == "responses")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_langgraph(api: str, stream: bool) -> None:
    """An agent with a tool, in both APIs and both ways of streaming; in chat LangChain drops the reasoning."""
    needs("langgraph", "langchain_openai")
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    async with session_of() as (session, base):
        responses = {"use_responses_api": True, "output_version": "responses/v1"} if api == "responses" else {}
        options: Any = {"base_url": f"{base}/v1", "api_key": session.key, "model": "any", "max_retries": 0, **responses}
        agent: Any = create_react_agent(ChatOpenAI(**options, streaming=stream), [double])
        result = await agent.ainvoke({"messages": [("user", TASK)]})
        assert result["messages"][-1].text == "It is 42."
        check(session, stream, reasoning=api == "responses")


async def test_smolagents() -> None:
    """An agent with a tool: its calls become text in the next request, and its stop strings are sent."""
    needs("smolagents", "openai")
    import smolagents

    answer = ToolCall("final_answer", {"answer": "It is 42."}, id="c00000002")
    async with session_of(FIRST, Message("assistant", "", [answer])) as (session, base):
        model: Any = smolagents.OpenAIServerModel("any", api_base=f"{base}/v1", api_key=session.key)
        tool: Any = smolagents.tool(double)
        agent: Any = smolagents.ToolCallingAgent([tool], model, verbosity_level=smolagents.LogLevel.OFF)
        output = await anyio.to_thread.run_sync(agent.run, TASK)
        assert output == "It is 42."
        first, second = session.requests
        assert {tool.name for tool in first.tools} == {"double", "final_answer"}
        assert first.stop == ("Observation:", "Calling tools:")
        assert first.counts == {"not_enforced/tool_choice": 1}
        assert not any(message.tool_calls for message in second.messages)
        assert "Calling tools:" in second.messages[-2].content
