"""Requests and replies of OpenAI's chat completions API, from the client's side.

Invariant: a reply that is not whole is never read as one. There are four cases of a body with status 200:

1. A reply, with its finish reason.
2. A reply that the model refused, or that the provider's filter cut: also a reply, marked as withheld. Its text is that
   of the refusal, or what the filter left, and none of its calls runs.
3. An error in the form of the API, which a proxy passes on.
4. Anything else: :class:`Unreadable`.

The reader of a message is that of the gateway. This module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
import msgspec

from rollouts.base.validators import is_int, is_number
from rollouts.dtypes import Message, SamplingParams, Tool, ToolCall
from rollouts.errors import ConfigError, ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable, shortened
from rollouts.http.answers import UNREADABLE, loads, message_of
from rollouts.http.pacing import code_of, is_repeated
from rollouts.inference.wire_errors import status_of
from rollouts.programs.gateway import chat
from rollouts.programs.gateway.types import ApiError
from rollouts.programs.gateway.wire import arguments_text

__all__ = [
    "Answer",
    "ReplyWithheld",
    "RoomExceeded",
    "Unreadable",
    "Usage",
    "answer_of",
    "body_of",
    "check_fields",
    "check_sampling",
    "error_of",
    "most_tokens",
    "status_inside",
    "usage_of_error",
]

MOST_STOPS = 4
"""Stop strings of one request (OpenAI's reference of the API, ``stop``)."""
_LIMITS = ("max_completion_tokens", "max_tokens")
_UNSENT: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
}
"""Sampling parameters that the API has no field for, with the values that change nothing."""
_OVERFLOW = re.compile(r"maximum context length|context[ _]length|context window|prompt is too long", re.IGNORECASE)
_OF_REPLY = re.compile(r"max_tokens|max_completion_tokens|completion|output tokens", re.IGNORECASE)
"""In the error of an API that adds the limit of the reply to the prompt (vLLM, and OpenAI's older models)."""
_OF_EPISODE = ("model", "messages", "tools", "stream", "n")
_WITHHELD_CODES = ("content_filter", "content_policy_violation")


class ReplyWithheld(EndpointError):
    """The provider's filter refused the request with an error: there is no reply to score."""


class RoomExceeded(ContextOverflow):
    """The prompt and the tokens that the request allows its reply are too many together."""


class Unreadable(EndpointUnavailable):
    """A response with status 200 that is not a chat completion, or not a whole one."""


@attrs.frozen
class Usage:
    """The tokens of one reply, as the API counts them."""

    prompt: int
    completion: int
    """Reasoning tokens included."""
    cached: int = 0
    reasoning: int = 0
    cost: float | None = None
    """Dollars, if the API says (``usage.cost`` of OpenRouter)."""


@attrs.frozen
class Answer:
    """One reply."""

    message: Message
    finish_reason: Literal["stop", "length"]
    usage: Usage | None
    withheld: bool = False
    """Whether the model refused, or the provider's filter cut the reply."""
    id: str = ""
    """The name that the API gives the reply."""
    served: str = ""
    """The model that the API names, which may be more precise than the requested name."""
    fingerprint: str = ""
    """``system_fingerprint``: the configuration of the API's backend."""


# -- requests ---------------------------------------------------------------------------------------------------------


def check_sampling(sampling: SamplingParams) -> None:
    """Check that a request can have these sampling parameters.

    Raises:
        ConfigError: the API has no field for one of them.
    """
    for name, neutral in _UNSENT.items():
        if (value := getattr(sampling, name)) != neutral:
            expected = f"{neutral}: chat completions have no field for it (--body NAME=JSON sends a field of your API)"
            raise ConfigError.of(f"SamplingParams.{name}", value, expected)
    if len(sampling.stop) > MOST_STOPS:
        raise ConfigError.of("SamplingParams.stop", sampling.stop, f"at most {MOST_STOPS} strings")


def check_fields(names: Iterable[str]) -> None:
    """Check that these fields may be added to a request.

    Raises:
        ConfigError: the episode sets one of them, or reads no reply to it.
    """
    for name in names:
        if not name or name in _OF_EPISODE:
            raise ConfigError.of("--body", name, f"NAME=JSON, and not {', '.join(_OF_EPISODE)}")


def body_of(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    sampling: SamplingParams,
    extra: Mapping[str, Any],
    *,
    send_reasoning: bool = False,
) -> dict[str, Any]:
    """The body of a request. A field of ``extra`` replaces ours, and ``None`` leaves it out.

    Only a limit of the reply is never above that of ``sampling``, which the limits of the episode give.
    """
    limits = {name: min(extra[name], sampling.max_new_tokens) for name in _LIMITS if is_int(extra.get(name))}
    body: dict[str, Any] = {
        "model": model,
        "messages": [_sent(message, send_reasoning=send_reasoning) for message in messages],
        "max_completion_tokens": sampling.max_new_tokens,
        "temperature": sampling.sent_temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "tools": [tool.to_chat() for tool in tools] or None,
        **extra,
        **limits,
    }
    return {name: value for name, value in body.items() if value is not None}


def most_tokens(body: Mapping[str, Any]) -> int | None:
    """The most tokens that a request allows its reply; ``None`` if it leaves that to the API."""
    limits = [limit for name in _LIMITS if is_int(limit := body.get(name), 0)]
    return min(limits, default=None)


def _sent(message: Message, *, send_reasoning: bool) -> dict[str, Any]:
    """A message with the fields that the API's schema has for its role."""
    sent: dict[str, Any] = {"role": message.role, "content": message.to_chat()["content"]}
    if message.role == "tool":
        sent["tool_call_id"] = message.tool_call_id or ""
    if message.role == "assistant":
        if message.tool_calls:
            sent["tool_calls"] = [*map(_sent_call, message.tool_calls)]
            sent["content"] = sent["content"] or None
        if send_reasoning and message.reasoning is not None:
            sent["reasoning_content"] = message.reasoning
    return sent


def _sent_call(call: ToolCall) -> dict[str, Any]:
    """A call as the model wrote it: malformed arguments go back as they came."""
    arguments = call.raw if call.error is not None and call.raw else arguments_text(attrs.evolve(call, error=None))
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# -- replies ----------------------------------------------------------------------------------------------------------


def answer_of(payload: bytes) -> tuple[Answer | EndpointError, Usage | None]:
    """The reply in a body of status 200, or the error that it is; and its usage, which an error may have, too."""
    try:
        value = msgspec.json.decode(payload)
    except UNREADABLE:
        return Unreadable(f"status 200, but the body is not JSON: {message_of(payload)}"), None
    if not isinstance(value, dict):
        return _unreadable("body", value, "an object"), None
    usage = _usage_of(value.get("usage"))
    error = value.get("error")
    if error:
        return _error_inside(error, payload), usage
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return _unreadable("choices", choices, "a list of one choice"), usage
    choice = choices[0]
    if choice.get("error"):
        return _error_inside(choice["error"], msgspec.json.encode(choice)), usage
    return _answer(value, choice, usage), usage


def _answer(value: Mapping[str, Any], choice: Mapping[str, Any], usage: Usage | None) -> Answer | EndpointError:
    message, reason = choice.get("message"), choice.get("finish_reason")
    if message is None and reason in _WITHHELD_CODES:
        message = {}  # the filter left nothing
    if not isinstance(message, dict):
        return _unreadable("choices[0].message", message, "an object")
    refusal = message.get("refusal") or _refusal_in(message.get("content"))
    withheld = refusal is not None or reason in _WITHHELD_CODES
    if withheld:
        text = message.get("content") if refusal is None else refusal
        message = {**message, "content": text or "", "tool_calls": None}
        reason = "stop"
    if reason not in ("stop", "tool_calls", "length"):
        return _unreadable("choices[0].finish_reason", reason, '"stop", "tool_calls", "length" or "content_filter"')
    if message.get("role", "assistant") != "assistant":
        return _unreadable("choices[0].message.role", message["role"], '"assistant"')
    if not {"content", "tool_calls"} & message.keys():
        return _unreadable("choices[0].message", message, "content or tool_calls")
    try:
        (read,) = chat.read({"messages": [{**message, "role": "assistant"}]}).messages
    except (ApiError, ConfigError) as error:
        return Unreadable(f"status 200, but not a chat completion: choices[0].{error}")
    if reason == "tool_calls" and not read.tool_calls:
        return _unreadable("choices[0].message.tool_calls", message.get("tool_calls"), "a call: so says finish_reason")
    return Answer(
        message=read,
        finish_reason="length" if reason == "length" else "stop",
        usage=usage,
        withheld=withheld,
        id=_text(value.get("id")),
        served=_text(value.get("model")),
        fingerprint=_text(value.get("system_fingerprint")),
    )


def _refusal_in(content: Any) -> Any:
    """The first refusal among the parts of a message; ``None`` without one."""
    parts = content if isinstance(content, list) else ()
    return next(
        (part.get("refusal") for part in parts if isinstance(part, dict) and part.get("type") == "refusal"), None
    )


def _usage_of(value: Any) -> Usage | None:
    """The usage of a reply; ``None`` without readable numbers."""
    if not isinstance(value, dict):
        return None
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    if not is_int(prompt, 0) or not is_int(completion, 0):
        return None
    inside = value.get("prompt_tokens_details"), value.get("completion_tokens_details")
    cached, reasoning = (
        found if isinstance(details, dict) and is_int(found := details.get(name), 0) else 0
        for details, name in zip(inside, ("cached_tokens", "reasoning_tokens"), strict=True)
    )
    cost = value.get("cost")
    return Usage(prompt, completion, cached, reasoning, float(cost) if is_number(cost) and cost >= 0 else None)


def usage_of_error(payload: bytes) -> Usage | None:
    """The usage of a body that is an error, or of the error in it; ``None`` if it has none."""
    value = loads(payload)
    error = value.get("error") if isinstance(value, dict) else None
    found = [_usage_of(one.get("usage")) for one in (value, error) if isinstance(one, dict)]
    return next((usage for usage in found if usage is not None), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _unreadable(name: str, got: Any, expected: str) -> Unreadable:
    return Unreadable(f"status 200, but not a chat completion: {name}: got {shortened(got)}; expected {expected}")


def _error_inside(error: Any, payload: bytes) -> EndpointError:
    """An error with status 200, as proxies send it."""
    return error_of(_status_of_error(error), payload)


def _status_of_error(error: Any) -> int:
    status = status_of(error.get("code")) if isinstance(error, dict) else None
    return status if status is not None and status >= 400 else 500


def status_inside(payload: bytes) -> int:
    """The status of a body of status 200: that of the error that it is, or that its choice is, else 200."""
    value = loads(payload)
    choices = value.get("choices") if isinstance(value, dict) else None
    parts = [value, *(choices if isinstance(choices, list) else ())]
    errors = (part.get("error") for part in parts if isinstance(part, dict))
    return next((_status_of_error(error) for error in errors if error), 200)


# -- errors -----------------------------------------------------------------------------------------------------------


def error_of(status: int, payload: bytes) -> EndpointError:
    """The error of a status and a body, if it fails the request only; the client knows which end the run."""
    text, code = f"status {status}: {message_of(payload)}", code_of(payload)
    if code in _WITHHELD_CODES:
        return ReplyWithheld(text)
    if status in (400, 413, 422) and (code == "context_length_exceeded" or _OVERFLOW.search(text)):
        return RoomExceeded(text) if _OF_REPLY.search(text) else ContextOverflow(text)
    if is_repeated(status):
        return EndpointUnavailable(text)
    refused = EndpointRefused(text)
    refused.of_content = status in (400, 413, 422)
    return refused
