"""A stub of OpenAI's chat completions API on loopback, with faults.

Invariant: a request is checked field by field against the published schema of the API before it is answered, also the
order of calls and their results; a wrong one gets the API's error with its status, and is recorded. A reply is
determined by the function that the stub is given, and a fault by the number of the request.

Needs the extra ``serve``. This module knows no environment and no client.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import msgspec
from aiohttp import web

from rollouts.testing.loopback import LoopbackServer

__all__ = ["Asked", "ChatServer", "Fault", "problem_of"]

Fault: TypeAlias = Literal[
    "rate_limit", "server_error", "overloaded", "cut", "hang_up", "wrong_json", "wrong_shape", "no_choices",
    "error_in_200", "refusal", "content_filter", "length",
]  # fmt: skip
"""A fault of a response: a status, a body that is cut off or of another form, or a reply that is withheld or cut."""
FAULTS = get_args(Fault)

Reply: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""The message of the assistant for the messages and tools of a request, such as its ``content`` and ``tool_calls``."""


@attrs.frozen
class Asked:
    """One received request, and what the stub did with it."""

    body: Any
    authorization: str
    status: int
    fault: Fault | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Those that are billed: 0 if the model made no reply. A reply that is lost on its way is billed."""


class ChatServer(LoopbackServer):
    """Serves while its context lasts.

    Args:
        reply: the model.
        key: the API key; ``None`` takes any request.
        model: the name of the only model.
        fault: the fault of a request by its number, from 0; ``None`` for none.
        retry_after: of a ``rate_limit``, in seconds.
        max_context: tokens that the model takes, by the stub's count of words.
        before: awaited before each answer.

    Attributes:
        url: the base URL, before ``/chat/completions``.
        asked: every request, in order of its answer.
    """

    BASE = "/v1"

    def __init__(
        self,
        reply: Reply,
        *,
        key: str | None = "sk-stub",
        model: str = "stub",
        fault: Callable[[int], Fault | None] = lambda number: None,
        retry_after: float | str | None = 0.0,
        max_context: int = 100_000,
        before: Callable[[], Any] | None = None,
    ) -> None:
        self._reply, self._key, self._model, self._fault = reply, key, model, fault
        self._retry_after, self._max_context, self._before = retry_after, max_context, before
        self.asked: list[Asked] = []
        self._number = 0

    def __repr__(self) -> str:
        return f"<ChatServer {self.url}: {len(self.asked)} requests>"

    @property
    def faults(self) -> Counter[str]:
        """The number of requests by fault."""
        return Counter(one.fault for one in self.asked if one.fault is not None)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        payload, given = await request.read(), request.headers.get("Authorization", "")
        if request.method != "POST" or request.path != "/v1/chat/completions":
            return self._refused(None, given, 404, _error(f"Invalid URL ({request.method} {request.path})"))
        if self._key is not None and given != f"Bearer {self._key}":
            text = f"Incorrect API key provided: {given.removeprefix('Bearer ')}. You can find your API key at …"
            return self._refused(None, given, 401, _error(text, code="invalid_api_key"))
        try:
            body = msgspec.json.decode(payload)
        except msgspec.DecodeError:
            return self._refused(None, given, 400, _error("We could not parse the JSON body of your request."))
        if (problem := problem_of(body)) is not None:
            return self._refused(body, given, 400, _error(*problem))
        if body["model"] != self._model:
            text = f"The model `{body['model']}` does not exist or you do not have access to it."
            return self._refused(body, given, 404, _error(text, code="model_not_found"))
        if (length := _words(body["messages"], body.get("tools"))) > self._max_context:
            text = f"This model's maximum context length is {self._max_context} tokens. However, your messages "
            text += f"resulted in {length} tokens. Please reduce the length of the messages."
            return self._refused(body, given, 400, _error(text, "messages", "context_length_exceeded"))
        number, self._number = self._number, self._number + 1
        if self._before is not None:
            await self._before()
        return await self._answer(request, body, given, length, self._fault(number))

    async def _answer(
        self, request: web.Request, body: dict[str, Any], given: str, length: int, fault: Fault | None
    ) -> web.StreamResponse:
        if fault == "rate_limit":
            headers = {} if self._retry_after is None else {"Retry-After": str(self._retry_after)}
            text = f"Rate limit reached for {self._model} on requests per min (RPM): Limit 3, Used 3, Requested 1."
            error = _error(text, code="rate_limit_exceeded", kind="requests")
            return self._refused(body, given, 429, error, headers, fault)
        if fault in ("server_error", "overloaded"):
            text = "The server had an error while processing your request. Sorry about that!"
            status = 500 if fault == "server_error" else 503
            return self._refused(body, given, status, _error(text, kind="server_error"), fault=fault)
        message, finish = self._message(body, fault)
        words = _words([message], None)
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if fault == "length" or (limit is not None and words > limit):
            finish, words = "length", min(words, limit or words)
            message = {
                **message,
                "content": " ".join(str(message["content"] or "").split()[:words]),
                "tool_calls": None,
            }
        answer = self._completion(body, message, finish, length, words)
        payload = msgspec.json.encode(answer)
        if fault == "wrong_json":
            payload = payload[:-1] + b",}"
        if fault == "wrong_shape":
            payload = msgspec.json.encode({**answer, "choices": {"0": answer["choices"]}})
        if fault == "no_choices":
            payload = msgspec.json.encode({**answer, "choices": []})
        if fault == "error_in_200":
            payload = msgspec.json.encode(_error("The server had an error.", kind="server_error"))
        billed = (0, 0) if fault == "error_in_200" else (length, words)
        self.asked.append(Asked(body, given, 200, fault, *billed))
        if fault in ("cut", "hang_up"):
            return await _cut(request, payload, nothing=fault == "hang_up")
        return web.Response(body=payload, content_type="application/json")

    def _message(self, body: Mapping[str, Any], fault: Fault | None) -> tuple[dict[str, Any], str]:
        empty: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        if fault == "refusal":
            return {**empty, "refusal": "I'm sorry, but I can't help with that."}, "stop"
        if fault == "content_filter":
            return {**empty, "content": ""}, "content_filter"
        message = {**empty, **self._reply(body["messages"], body.get("tools") or ())}
        return message, "tool_calls" if message.get("tool_calls") else "stop"

    def _completion(
        self, body: Mapping[str, Any], message: Mapping[str, Any], finish: str, length: int, words: int
    ) -> dict[str, Any]:
        details = {"reasoning_tokens": 0, "audio_tokens": 0}
        usage = {
            "prompt_tokens": length,
            "completion_tokens": words,
            "total_tokens": length + words,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                **details,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
        return {
            "id": f"chatcmpl-{self._number:09d}",
            "object": "chat.completion",
            "created": 1_780_000_000 + self._number,
            "model": f"{self._model}-2026-01-01",
            "choices": [
                {
                    "index": 0,
                    "message": {name: value for name, value in message.items() if name != "tool_calls" or value},
                    "logprobs": None,
                    "finish_reason": finish,
                }
            ],
            "usage": usage,
            "service_tier": "default",
            "system_fingerprint": "fp_stub",
        }

    def _refused(
        self,
        body: Any,
        given: str,
        status: int,
        error: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        fault: Fault | None = None,
    ) -> web.Response:
        self.asked.append(Asked(body, given, status, fault))
        payload = msgspec.json.encode(error)
        return web.Response(status=status, body=payload, content_type="application/json", headers=headers)


async def _cut(request: web.Request, payload: bytes, *, nothing: bool) -> web.StreamResponse:
    """Send the head and half of the body, or nothing, and close the connection."""
    response = web.StreamResponse(headers={"Content-Length": str(len(payload)), "Content-Type": "application/json"})
    assert request.transport is not None, "the client waits"
    if not nothing:
        await response.prepare(request)
        await response.write(payload[: len(payload) // 2])
    request.transport.close()
    return response


def _error(
    text: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def _words(messages: Sequence[Any], tools: Any) -> int:
    """The stub's count of tokens: the words of the JSON."""
    return len(re.findall(r"\w+|[^\w\s]", msgspec.json.encode([messages, tools]).decode()))


# -- the schema -------------------------------------------------------------------------------------------------------

Problem: TypeAlias = tuple[str, str | None]
"""The message of an error, and the parameter that it names."""

_NUMBERS = {"temperature": (0, 2), "top_p": (0, 1), "frequency_penalty": (-2, 2), "presence_penalty": (-2, 2)}
_INTEGERS = {
    "max_completion_tokens": (1, 1 << 31),
    "max_tokens": (1, 1 << 31),
    "n": (1, 128),
    "top_logprobs": (0, 20),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
_FLAGS = ("store", "stream", "logprobs", "parallel_tool_calls")
_ENUMS = {
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),
    "service_tier": ("auto", "default", "flex", "scale", "priority"),
    "verbosity": ("low", "medium", "high"),
    "prompt_cache_retention": ("in-memory", "24h"),
}
_TEXTS = ("user", "safety_identifier", "prompt_cache_key")
_OBJECTS = (
    "metadata", "logit_bias", "response_format", "stream_options", "prediction", "audio", "web_search_options",
)  # fmt: skip
_OTHERS = ("model", "messages", "tools", "tool_choice", "stop", "modalities", "functions", "function_call")
_KNOWN = {*_NUMBERS, *_INTEGERS, *_FLAGS, *_ENUMS, *_TEXTS, *_OBJECTS, *_OTHERS}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PARTS = {"user": ("text", "image_url", "input_audio", "file"), "assistant": ("text", "refusal")}
_OF_ROLE: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "system": (("content",), ("name",)),
    "developer": (("content",), ("name",)),
    "user": (("content",), ("name",)),
    "assistant": ((), ("content", "refusal", "name", "audio", "tool_calls", "function_call")),
    "tool": (("content", "tool_call_id"), ()),
}
"""The required and the further fields of a message by its role."""


def problem_of(body: Any) -> Problem | None:
    """The first fault of a request by the published schema; ``None`` for a sound request."""
    if not isinstance(body, dict):
        return "The body must be a JSON object.", None
    for name in body:
        if name not in _KNOWN:
            return f"Unrecognized request argument supplied: {name}", None
    if not isinstance(body.get("model"), str) or not body["model"]:
        return "you must provide a model parameter", "model"
    return _scalar_problem(body) or _tools_problem(body) or _messages_problem(body.get("messages"))


def _scalar_problem(body: Mapping[str, Any]) -> Problem | None:
    for ranges, kinds, word in ((_NUMBERS, (int, float), "a number"), (_INTEGERS, (int,), "an integer")):
        for name, (least, most) in ranges.items():
            value = body.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                return f"Invalid type for '{name}': expected {word}, but got {value!r} instead.", name
            if not least <= value <= most:
                return f"Invalid '{name}': expected a value between {least} and {most}, but got {value}.", name
    for names, kind, word in ((_FLAGS, bool, "a boolean"), (_TEXTS, str, "a string"), (_OBJECTS, dict, "an object")):
        for name in names:
            if body.get(name) is not None and not isinstance(body[name], kind):
                return f"Invalid type for '{name}': expected {word}, but got {body[name]!r} instead.", name
    for name, values in _ENUMS.items():
        if body.get(name) is not None and body[name] not in values:
            return f"Invalid value: {body[name]!r}. Supported values are: {', '.join(values)}.", name
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        return "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.", "max_tokens"
    stop = body.get("stop")
    texts = [stop] if isinstance(stop, str) else stop
    sound = isinstance(texts, list) and 1 <= len(texts) <= 4 and all(isinstance(text, str) for text in texts)
    if stop is not None and not sound:
        return f"Invalid 'stop': expected a string or an array of 1 to 4 strings, but got {stop!r}.", "stop"
    return None


def _tools_problem(body: Mapping[str, Any]) -> Problem | None:
    tools = body.get("tools")
    if tools is None:
        given = [name for name in ("tool_choice", "parallel_tool_calls") if body.get(name) is not None]
        return (f"'{given[0]}' is only allowed when 'tools' are specified.", given[0]) if given else None
    if not isinstance(tools, list) or not 1 <= len(tools) <= 128:
        return "Invalid 'tools': expected an array of 1 to 128 tools.", "tools"
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function" or tool.keys() - {"type", "function"}:
            return f"Invalid '{place}': expected type and function.", place
        if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
            return f"Invalid '{place}.function.name': string does not match pattern.", f"{place}.function.name"
        if extra := sorted(function.keys() - {"name", "description", "parameters", "strict"}):
            return f"Unknown parameter: '{place}.function.{extra[0]}'.", f"{place}.function.{extra[0]}"
        if not isinstance(function.get("description", ""), str):
            return f"Invalid type for '{place}.function.description'.", f"{place}.function.description"
        schema = function.get("parameters", {"type": "object"})
        if not isinstance(schema, dict) or schema.get("type") != "object":
            text = "schema must be a JSON Schema of 'type: \"object\"'"
            return f"Invalid schema for function '{function['name']}': {text}.", f"{place}.function.parameters"
    return None


def _messages_problem(messages: Any) -> Problem | None:
    if not isinstance(messages, list) or not messages:
        return "Invalid 'messages': empty array. Expected an array with minimum length 1.", "messages"
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        place = f"messages.[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _OF_ROLE:
            return f"Invalid value for '{place}.role'.", f"{place}.role"
        role = message["role"]
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                text = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
                return f"Invalid parameter: {text}", f"{place}.role"
            open_calls.remove(message["tool_call_id"])
        elif open_calls:
            break
        if (problem := _message_problem(message, place)) is not None:
            return problem
        if role == "assistant":
            open_calls = [call["id"] for call in message.get("tool_calls") or ()]
    if open_calls:
        text = "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        return f"{text}'tool_call_id'. The following did not have response messages: {open_calls}", "messages"
    return None


def _message_problem(message: Mapping[str, Any], place: str) -> Problem | None:
    role = message["role"]
    required, further = _OF_ROLE[role]
    if extra := sorted(message.keys() - {"role", *required, *further}):
        text = f"Additional properties are not allowed ('{extra[0]}' was unexpected)"
        return f"{text} - '{place}'", f"{place}.{extra[0]}"
    for name in required:
        if message.get(name) is None:
            return f"Missing required parameter: '{place}.{name}'.", f"{place}.{name}"
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        kinds: Sequence[str] = _PARTS.get(role, ("text",))
        parts = content if isinstance(content, list) else ()
        if not parts or not all(_is_part(part, kinds) for part in parts):
            return f"Invalid type for '{place}.content': expected a string or parts of {kinds}.", f"{place}.content"
    if role != "assistant":
        return None
    calls = message.get("tool_calls")
    if calls is None:
        if content is None and message.get("refusal") is None:
            return f"Invalid value for 'content': expected a string, got null. - '{place}'", f"{place}.content"
        return None
    if not isinstance(calls, list) or not calls:
        return f"Invalid '{place}.tool_calls': empty array.", f"{place}.tool_calls"
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        sound = isinstance(function, dict) and call.keys() == {"id", "type", "function"} and call["type"] == "function"
        if not sound or function is None or not isinstance(call["id"], str) or not call["id"]:
            return f"Invalid '{place}.tool_calls[{number}]'.", f"{place}.tool_calls[{number}]"
        if function.keys() != {"name", "arguments"} or not all(isinstance(text, str) for text in function.values()):
            return f"Invalid '{place}.tool_calls[{number}].function'.", f"{place}.tool_calls[{number}].function"
        if not _NAME.fullmatch(function["name"]):
            where = f"{place}.tool_calls[{number}].function.name"
            return f"Invalid '{where}': string does not match pattern.", where
    return None


def _is_part(part: Any, kinds: Sequence[str]) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        return False
    if kind == "image_url":
        image = part.get("image_url")
        return isinstance(image, dict) and isinstance(image.get("url"), str) and not image.keys() - {"url", "detail"}
    return kind not in ("text", "refusal") or isinstance(part.get(kind), str)
