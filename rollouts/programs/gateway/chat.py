"""The chat completions API of OpenAI.

Invariant: ``read`` refuses a field that it cannot read by its path; fields that are not honoured are in ``counts``.
A stream has each tool call as a whole. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.dtypes import Content, Message, Tool, ToolCall
from rollouts.programs.gateway import wire
from rollouts.programs.gateway.constraints import constraint_of_format, constraint_of_servers, only_constraint
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, Constraint, ErrorKind

__all__ = ["FIELDS", "HISTORY", "NO_EFFECT", "PING", "answer", "error", "error_event", "events", "read"]

PING = b": ping\n\n"
HISTORY = "messages"

_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MEDIA = {"input_audio": "audio", "file": "file", "video_url": "video"}
_NOT_ENFORCED: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "enable_thinking": (),
    "guided_choice": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "think": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "verbosity": (),
}
"""Fields of the API, and of SGLang's, vLLM's and Ollama's servers beyond it, which would change the prompt or the
replies; with the values that change nothing."""
_READ: tuple[str, ...] = (
    *wire.SAMPLING, "add_generation_prompt", "audio", "continue_final_message", "ebnf", "function_call", "functions",
    "guided_grammar", "guided_json", "guided_regex", "logprobs", "max_completion_tokens", "max_tokens", "model", "n",
    "parallel_tool_calls", "regex", "response_format", "return_token_ids", "stop", "stream", "stream_options",
    "structured_outputs", "tool_choice", "web_search_options",
)  # fmt: skip
FIELDS: tuple[str, ...] = (*_READ, *_NOT_ENFORCED)
NO_EFFECT: tuple[str, ...] = (
    "cache_control", "cache_salt", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning", "reasoning_effort", "request_id", "rid", "safety_identifier", "service_tier", "store", "thinking",
    "user",
)  # fmt: skip
MAX_REPLIES = 128
"""The most replies of one request, as in the API."""


def read(body: Any, reply_of: wire.ReplyOf = wire.no_reply, entries: wire.Entries | None = None) -> CallRequest:
    """Read a request; see :meth:`rollouts.programs.gateway.wire.Wire.read`."""
    entries, counts = entries or wire.Entries(), wire.Counts()
    fields = wire.Fields.of(body, no_images=entries.no_images)
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice"), ("audio", "text")):
        if fields.value.get(name) is not None:
            raise fields.wrong(name, f"no such field; this server takes {instead} only")
    messages = entries.into(wire.Joined(), fields, HISTORY, _messages, counts).parts
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    n = fields.positive("n") or 1
    if n > MAX_REPLIES:
        raise fields.wrong("n", f"an integer of at most {MAX_REPLIES}")
    limits = [fields.positive(name) for name in ("max_completion_tokens", "max_tokens")]
    options = fields.object("stream_options")
    _count_not_enforced(fields, counts)
    tools = entries.into(wire.Joined(), fields, "tools", _tools, counts).parts
    return CallRequest(
        messages=tuple(messages),
        tools=wire.offered(fields, tools, counts),
        strict=wire.strict_names(tools),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=wire.stops(fields, "stop"),
        stream=fields.flag("stream"),
        n=n,
        sampling=wire.sampling_of(fields),
        counts=counts,
        model=fields.text("model") or "",
        include_usage=options is not None and options.flag("include_usage"),
        call_prefix="call_",
        constraint=_constraint(fields, counts),
        logprobs=fields.flag("logprobs"),
        token_ids=fields.flag("return_token_ids"),
        continues=_continues(fields, messages[-1], counts),
    )


def _constraint(fields: wire.Fields, counts: wire.Counts) -> Constraint | None:
    form = constraint_of_format(fields.object("response_format"), "response_format", counts)
    return only_constraint([form, *constraint_of_servers(fields, counts)])


def _continues(fields: wire.Fields, last: Message, counts: wire.Counts) -> bool:
    """Whether the reply continues a last assistant message. It opens a new turn unless the request asks otherwise.

    As in vLLM and SGLang; vLLM refuses both fields at once, too.
    """
    continues = fields.flag("continue_final_message")
    if continues and fields.flag("add_generation_prompt"):
        raise fields.wrong("continue_final_message", "false where add_generation_prompt is true")
    if continues and last.role != "assistant":
        raise fields.wrong("continue_final_message", "an assistant message at the end of messages")
    if not continues and fields.value.get("add_generation_prompt") is False:
        counts["not_enforced/add_generation_prompt"] += 1
    return continues


def _tools(tool: wire.Fields, counts: wire.Counts) -> list[tuple[Tool, bool]]:
    kind = tool.text("type") or "function"
    if kind == "function":
        return [
            wire.tool_of(tool.object("function") or tool, "parameters", counts)
        ]  # some clients leave the object out
    counts[f"server_tool/{kind[:64]}"] += 1
    return []


def _count_not_enforced(fields: wire.Fields, counts: wire.Counts) -> None:
    if fields.value.get("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls"):
        counts["not_enforced/parallel_tool_calls"] += 1
    read = (HISTORY, "tools", *_READ)
    wire.count_others(fields, counts, read=read, not_enforced=_NOT_ENFORCED, no_effect=NO_EFFECT)
    if fields.value.get("web_search_options") is not None:
        counts["server_tool/web_search"] += 1


def _messages(fields: wire.Fields, counts: wire.Counts) -> list[Message]:
    return [_message(fields, counts)]


def _message(fields: wire.Fields, counts: wire.Counts) -> Message:
    role = fields.text("role")
    if role in ("user", "tool"):
        content = wire.content_of(fields, "content", lambda part: _part(part, counts))
        if role == "user":
            return Message("user", content)
        return Message("tool", content, tool_call_id=fields.required("tool_call_id"), name=fields.text("name"))
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {_ROLES}")
    text = wire.text_of(fields, "content", lambda part: _part(part, counts))
    if role != "assistant":
        return Message("system", text)
    if fields.value.get("function_call") is not None:
        raise fields.wrong("function_call", "no such field; this server takes tool_calls only")
    return Message(
        "assistant",
        text or fields.text("refusal") or "",
        tuple(map(_call, fields.objects("tool_calls"))),
        reasoning=_reasoning(fields),
    )


def _reasoning(fields: wire.Fields) -> str | None:
    """Clients do not agree on the name of the field; some of them have objects under one of the names."""
    own = fields.value.get("provider_specific_fields")  # what LiteLLM adds
    for value in (fields.value, own if isinstance(own, dict) else {}):
        for name in _REASONING:
            if isinstance(value.get(name), str):
                return str(value[name])
    return None


def _call(fields: wire.Fields) -> ToolCall:
    call_id = fields.text("id") or ""
    custom = fields.object("custom")
    if custom is not None:
        return ToolCall(custom.required("name"), {"input": custom.text("input") or ""}, call_id)
    function = fields.object("function")
    if function is None:
        raise fields.wrong("function", "an object with the name and arguments of the call")
    return wire.call_of(function.required("name"), function.value.get("arguments"), call_id)


def _part(fields: wire.Fields, counts: wire.Counts) -> Content:
    kind = fields.text("type")
    if kind == "image_url":
        image = fields.object("image_url")
        if image is None:
            raise fields.wrong("image_url", "an object with a url")
        if image.text("detail") == "low":
            counts["not_enforced/image_detail"] += 1
        return (wire.image_of(image, "url", image.required("url")),)
    return wire.shown_part(fields, counts, texts=("text",), image="image_url", media=_MEDIA)


# -- answers ----------------------------------------------------------------------------------------------------------


def answer(request: CallRequest, replies: Sequence[CallReply]) -> dict[str, Any]:
    """The JSON of an answer; one choice for each reply."""
    choices = [
        {
            "index": index,
            "message": _answered(reply.message),
            "finish_reason": reply.finish_reason,
            **_ids(request, reply),
        }
        for index, reply in enumerate(replies)
    ]
    head = _head(request, replies, "chat.completion")
    return {**head, **_prompt(request, replies), "choices": choices, "usage": _usage(replies)}


def _ids(request: CallRequest, reply: CallReply) -> dict[str, Any]:
    """The logprobs of a choice, and its ids as in vLLM."""
    sampled = reply.sampled
    if sampled is None:
        return {"logprobs": None}
    logprobs = {"content": wire.logprobs_of(sampled), "refusal": None} if request.logprobs else None
    return {"logprobs": logprobs, **({"token_ids": sampled.ids} if request.token_ids else {})}


def _prompt(request: CallRequest, replies: Sequence[CallReply]) -> dict[str, Any]:
    sampled = replies[0].sampled
    return {"prompt_token_ids": sampled.prompt} if request.token_ids and sampled is not None else {}


def events(request: CallRequest, replies: Sequence[CallReply]) -> list[bytes]:
    """The stream of an answer."""
    head = _head(request, replies, "chat.completion.chunk")
    chunks = [
        {**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish, **ids}]}
        for index, reply in enumerate(replies)
        for delta, finish, ids in _deltas(request, reply)
    ]
    chunks[0] |= _prompt(request, replies)
    if request.include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**head, "choices": [], "usage": _usage(replies)})
    return [*map(wire.event, chunks), b"data: [DONE]\n\n"]


def _deltas(request: CallRequest, reply: CallReply) -> list[tuple[dict[str, Any], str | None, dict[str, Any]]]:
    """The pieces of a reply, the second one with its ids, the last one with its reason to finish.

    A call is one piece: some clients join the fragments of parallel calls wrongly.
    """
    message = reply.message
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    if message.reasoning is not None:
        deltas.append({"reasoning_content": message.reasoning})
    if message.text:
        deltas.append({"content": message.text})
    deltas += [{"tool_calls": [{"index": k, **_answered_call(call)}]} for k, call in enumerate(message.tool_calls)]
    reasons = [*[None] * len(deltas), reply.finish_reason]
    ids = [{"logprobs": None}, _ids(request, reply), *[{"logprobs": None}] * (len(deltas) - 1)]
    return list(zip([*deltas, {}], reasons, ids, strict=True))


def _head(request: CallRequest, replies: Sequence[CallReply], kind: str) -> dict[str, Any]:
    first = replies[0]
    return {"id": f"chatcmpl-{first.id}", "object": kind, "created": first.created, "model": request.model}


def _answered(message: Message) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": "assistant", "content": message.text or (None if message.tool_calls else "")}
    if message.reasoning is not None:
        chat["reasoning_content"] = message.reasoning
    if message.tool_calls:
        chat["tool_calls"] = [*map(_answered_call, message.tool_calls)]
    return chat


def _answered_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": wire.arguments_text(call)}}


def _usage(replies: Sequence[CallReply]) -> dict[str, Any]:
    first, completion = replies[0].usage, sum(reply.usage.completion_tokens for reply in replies)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(reply.usage.reasoning_tokens for reply in replies)},
    }


_CODES: Mapping[ErrorKind, str] = {
    "overflow": "context_length_exceeded",
    "authentication": "invalid_api_key",
    "rate_limit": "rate_limit_exceeded",
}
_TYPES: Mapping[ErrorKind, str] = {"rate_limit": "rate_limit_error", "server": "server_error"}


def error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and JSON of an error."""
    kind = error.error_kind
    body = {
        "message": _error_text(error),
        "type": _TYPES.get(kind, "invalid_request_error"),
        "param": None,
        "code": _CODES.get(kind),
    }
    return wire.STATUS[kind], {"error": body}


def error_event(request: CallRequest, failed: ApiError) -> bytes:
    """The event of an error in a stream."""
    return wire.event(error(failed)[1])


def _error_text(error: ApiError) -> str:
    if error.error_kind != "overflow":
        return str(error)
    return (
        f"This model's maximum context length is {error.max_context} tokens. However, your messages resulted in "
        f"{error.tokens} tokens. Please reduce the length of the messages."
    )
