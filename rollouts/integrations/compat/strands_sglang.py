"""strands-sglang's API: a model of a Strands agent that sends token ids to SGLang, and stores them.

Invariant: the ids of each request are a prefix of the stored ids; if the agent edited the earlier conversation, the
model raises an error and never renders it again. An aborted generation is an error, not a reply.

Not supported: images, routed experts and structured output.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

import attrs
from strands.models.model import Model
from strands.types.exceptions import ContextWindowOverflowException

from rollouts.agent.budget import Budget
from rollouts.agent.episode import Episode
from rollouts.dtypes import Endpoint, Limits, Message, Prompt, SamplingParams, StopReason, ToolCall
from rollouts.errors import ConfigError, ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.http.address import url_of
from rollouts.inference.base import Policy
from rollouts.inference.shared import shared_policy
from rollouts.integrations.compat.strands_limiter import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    ToolIterationLimiter,
    ToolLimiter,
)
from rollouts.integrations.compat.strands_rollout import Rollout, Token, TokenManager
from rollouts.integrations.slime.settings import sampling_of
from rollouts.integrations.strands.messages import from_strands, opening_of, reply_events, tools_of
from rollouts.renderer import load_tokenizer, renderer_for
from rollouts.renderer.dialects import Dialect, get_dialect

__all__ = [
    "UNKNOWN_TOOL_NAME",
    "GLMToolParser",
    "HermesToolCallParser",
    "HermesToolParser",
    "KimiK2ToolParser",
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "QwenXMLToolParser",
    "Rollout",
    "SGLangClient",
    "SGLangClientError",
    "SGLangConnectionError",
    "SGLangContextLengthError",
    "SGLangDecodingError",
    "SGLangHTTPError",
    "SGLangModel",
    "SGLangThrottledError",
    "Token",
    "TokenManager",
    "ToolIterationLimiter",
    "ToolLimiter",
    "get_client",
    "get_client_from_slime_args",
    "get_tokenizer",
    "get_tool_parser",
]

UNKNOWN_TOOL_NAME = "unknown_tool"
_ENDLESS = 10**9
_A_DAY = 86400.0


class SGLangClientError(Exception):
    """The server returned no usable reply."""


class SGLangHTTPError(SGLangClientError):
    """The server refused the request."""

    def __init__(self, message: str, *, status: int, body: str = "") -> None:
        super().__init__(message)
        self.status, self.body = status, body


class SGLangContextLengthError(SGLangHTTPError):
    """Prompt and token budget do not fit the context."""


class SGLangThrottledError(SGLangHTTPError):
    """Too many requests. Never raised here: such requests are retried."""


class SGLangConnectionError(SGLangClientError):
    """The server is unreachable after all retries."""


class SGLangDecodingError(SGLangClientError):
    """The response cannot be decoded. Never raised here: see :class:`SGLangHTTPError`."""


# -- the client -------------------------------------------------------------------------------------------------------


class SGLangClient:
    """A client of one server, over its shared policy; ``max_connections`` and ``retry_delay`` are ignored."""

    def __init__(
        self,
        base_url: str,
        *,
        max_connections: int = 1000,
        timeout: float | None = 900.0,
        connect_timeout: float = 5.0,
        max_retries: int = 60,
        retry_delay: float = 1.0,
    ) -> None:
        self.endpoint = Endpoint(
            base_url=base_url,
            connect_seconds=connect_timeout,
            request_seconds=_A_DAY if timeout is None else timeout,
            max_retries=max_retries,
            outage_seconds=0,  # a server that is gone is a connection error of this class, after its retries
        )

    @classmethod
    def from_slime_args(cls, args: Any, **options: Any) -> SGLangClient:
        return cls(url_of(args.sglang_router_ip, args.sglang_router_port), **options)

    @property
    def base_url(self) -> str:
        return self.endpoint.base_url[0]

    @property
    def policy(self) -> Policy:
        """The policy of this server in the running event loop."""
        return shared_policy(self.endpoint)

    async def health(self) -> bool:
        try:
            await self.policy.describe()
        except EndpointError:
            return False
        return True

    async def model_info(self) -> dict[str, Any] | None:
        """The server's description of itself; ``None`` if it does not answer."""
        try:
            return attrs.asdict(await self.policy.describe())
        except EndpointError:
            return None

    get_model_info = model_info

    async def is_multimodal(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing: connections are shared, and close with the event loop."""

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


get_client = functools.cache(SGLangClient)


def get_client_from_slime_args(args: Any, **options: Any) -> SGLangClient:
    """The shared client of slime's router."""
    return get_client(url_of(args.sglang_router_ip, args.sglang_router_port), **options)


get_tokenizer = functools.cache(load_tokenizer)

# -- tool parsers -----------------------------------------------------------------------------------------------------

_PARSERS = {"hermes": "hermes", "qwen_xml": "qwen3_coder", "glm": "glm", "kimi_k2": "kimi_k2"}


def get_tool_parser(name: str) -> Dialect:
    """The dialect with strands-sglang's name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in _PARSERS:
        raise ConfigError.of("tool_parser", name, f"one of {', '.join(_PARSERS)}")
    return get_dialect(_PARSERS[name])


HermesToolParser = HermesToolCallParser = functools.partial(get_tool_parser, "hermes")
QwenXMLToolParser = functools.partial(get_tool_parser, "qwen_xml")
GLMToolParser = functools.partial(get_tool_parser, "glm")
KimiK2ToolParser = functools.partial(get_tool_parser, "kimi_k2")

# -- the model --------------------------------------------------------------------------------------------------------


class SGLangModel(Model):  # type: ignore[misc]  # typed by Strands where it is installed
    """A model for one conversation of a Strands agent.

    Args:
        client: the server.
        tokenizer: a transformers tokenizer, or the name or folder to load one from.
        tool_parser: the dialect of tool calls: a name, or a value of :func:`get_tool_parser`; by default that of the
            tokenizer's chat template.
        **config: ``sampling_params``, ``enable_thinking``; in the first API version ``params`` and ``model_id``.
    """

    def __init__(self, *, client: SGLangClient, tokenizer: Any, tool_parser: Any = None, **config: Any) -> None:
        if config.get("return_routed_experts"):
            raise ConfigError.of("SGLangModel.return_routed_experts", True, "False: they are not stored")
        self.client = client
        self.tokenizer = tokenizer
        self.config = dict(config)
        options: dict[str, Any] = {}
        if tool_parser is not None:
            options["dialect"] = tool_parser if isinstance(tool_parser, str) else tool_parser.name
        if config.get("enable_thinking") is not None:
            options["template_kwargs"] = {"enable_thinking": config["enable_thinking"]}
        self._renderer = renderer_for(tokenizer, **options)
        self._sampling()  # raises early for unknown parameters
        self.reset()

    def _sampling(self) -> SamplingParams:
        return sampling_of(self.config.get("sampling_params") or self.config.get("params") or {})

    def reset(self) -> None:
        """Start another conversation."""
        self._episode: Episode | None = None
        self._seen: list[Any] = []
        """The messages whose ids the model has."""
        self._answered = False
        """Whether a reply follows them; none does after a request that failed."""
        self._broken_calls: dict[str, ToolCall] = {}
        self.processed_messages = 0
        self.tool_parse_errors: dict[str, int] = {}

    @property
    def rollout(self) -> Rollout:
        """The tokens so far."""
        return Rollout() if self._episode is None else Rollout(self._episode.trajectory)

    @property
    def token_manager(self) -> Rollout:
        """The older name of ``rollout``; an assignment calls :meth:`reset`."""
        return self.rollout

    @token_manager.setter
    def token_manager(self, _: Rollout) -> None:
        self.reset()

    def update_config(self, **model_config: Any) -> None:
        self.config.update(model_config)

    def get_config(self) -> dict[str, Any]:
        return self.config

    def structured_output(self, *arguments: Any, **options: Any) -> Any:
        raise ConfigError("structured_output: not supported, since it would not be part of the rollout")

    async def stream(
        self, messages: Any, tool_specs: Any = None, system_prompt: str | None = None, **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        yield {"messageStart": {"role": "assistant"}}
        tools = tools_of(tool_specs)
        try:
            if self._episode is None:
                self._renderer.self_test(tools).raise_if_refused()
                episode = self._new_episode()
                await episode.open_conversation(opening_of(messages, system_prompt), tools)
                self._episode = episode
            elif new := self._new_messages(messages):
                await self._episode.append_messages(new, tools)
            self._seen, self._answered = list(messages), False
            reply, reason = await self._episode.request_reply(0, tools)
            self._answered = True
        except ContextOverflow as error:
            raise ContextWindowOverflowException(str(error)) from error
        except EndpointRefused as error:
            raise SGLangHTTPError(str(error), status=400, body=str(error)) from error
        except EndpointUnavailable as error:
            raise SGLangConnectionError(str(error)) from error
        if reason is StopReason.ABORTED or reply is None:
            raise SGLangClientError(f"the reply was not finished: {reason}")
        self.processed_messages = len(messages) + 1
        call = self._episode.trajectory.completions[-1]
        for event in reply_events(
            self._with_valid_names(reply), (call.start, call.stop - call.start), cut=reason is not None
        ):
            yield event

    def _new_episode(self) -> Episode:
        return Episode(
            Prompt(""),
            self.client.policy,
            self._renderer,
            Budget(Limits(max_turns=_ENDLESS), self._sampling()),
        )

    def _new_messages(self, messages: list[Any]) -> list[Message]:
        """The messages that the model does not have; the result of an unreadable tool call becomes its parse error."""
        assert self._episode is not None
        seen, answered = len(self._seen), self._answered
        without_reply = answered and (len(messages) < seen + 2 or messages[seen]["role"] != "assistant")
        if list(messages[:seen]) != self._seen or without_reply:
            raise ConfigError(
                "SGLangModel: the earlier conversation was changed; expected the messages of the last request, the "
                "reply, and new messages (NullConversationManager, and reset() before another conversation)"
            )
        new = []
        for entry in messages[seen + answered :]:
            for message in from_strands(entry, self._episode.trajectory.messages):
                call = self._broken_calls.get(message.tool_call_id or "")
                new.append(message if call is None else attrs.evolve(message, content=f"Error: {call.error}"))
        return new

    def _with_valid_names(self, reply: Message) -> Message:
        """The reply with each unreadable call renamed to ``unknown_tool``, so that no tool runs for it."""
        calls = []
        for call in reply.tool_calls:
            if call.error is not None:
                self._broken_calls[call.id] = call
                name = call.name or UNKNOWN_TOOL_NAME
                self.tool_parse_errors[name] = self.tool_parse_errors.get(name, 0) + 1
                call = attrs.evolve(call, name=UNKNOWN_TOOL_NAME, arguments={})
            calls.append(call)
        return attrs.evolve(reply, tool_calls=calls)
