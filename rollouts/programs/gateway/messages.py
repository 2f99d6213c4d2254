"""The Messages API of Anthropic.

Invariant: ``read`` refuses a field that it cannot read by its path; fields that are not honoured are in ``counts``.
The results of a user message stand before its text. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.dtypes import Content, Image, Message, Tool, ToolCall
from rollouts.programs.gateway import wire
from rollouts.programs.gateway.constraints import constraint_of_format, only_constraint
from rollouts.programs.gateway.normal import joined
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, Constraint, ErrorKind

__all__ = ["FIELDS", "HISTORY", "NO_EFFECT", "PING", "answer", "error", "error_event", "events", "read"]

PING = wire.event({"type": "ping"}, "ping")
HISTORY = "messages"

_ROLES = ("user", "assistant", "system")
_BILLING = "x-anthropic-billing-header:"
"""How Claude Code's first system block begins; it has a number that differs between requests."""
_PARTS = ("text", "image", "document", "search_result")
_KEPT = "clear_thinking_20251015"
_NOT_ENFORCED: Mapping[str, Sequence[Any]] = {"compaction": (), "container": (), "thread": ()}
"""Fields that would change the prompt or the replies, with the values that change nothing."""
_READ: tuple[str, ...] = (
    *wire.SAMPLING, "context_management", "max_tokens", "mcp_servers", "model", "output_config", "output_format",
    "stop_sequences", "stream", "system", "tool_choice",
)  # fmt: skip
FIELDS: tuple[str, ...] = (*_READ, *_NOT_ENFORCED)
NO_EFFECT: tuple[str, ...] = (
    "betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo",
    "metadata", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
)  # fmt: skip


def read(body: Any, reply_of: wire.ReplyOf = wire.no_reply, entries: wire.Entries | None = None) -> CallRequest:
    """Read a request; see :meth:`rollouts.programs.gateway.wire.Wire.read`."""
    entries, counts = entries or wire.Entries(), wire.Counts()
    fields = wire.Fields.of(body, no_images=entries.no_images)
    system = _system(fields, counts, entries)
    messages = entries.into(wire.Joined(), fields, HISTORY, _messages, counts).parts
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    _count_not_enforced(fields, counts)
    tools = entries.into(wire.Joined(), fields, "tools", _tools, counts).parts
    return CallRequest(
        messages=(*system, *messages),
        tools=_offered(fields, tools, counts),
        strict=wire.strict_names(tools),
        max_tokens=fields.positive("max_tokens"),
        stop=wire.stops(fields, "stop_sequences"),
        stream=fields.flag("stream"),
        sampling=wire.sampling_of(fields),
        counts=counts,
        model=fields.text("model") or "",
        call_prefix="toolu_",
        constraint=_constraint(fields, counts),
    )


def _system(fields: wire.Fields, counts: wire.Counts, entries: wire.Entries) -> list[Message]:
    if not isinstance(fields.value.get("system"), list):
        text = wire.text_of(fields, "system", lambda part: _part(part, counts))
        return [entries.system(text)] if text else []
    texts = [wire.only_text(part, _part(part, counts)) for part in fields.objects("system")]
    if texts and texts[0].startswith(_BILLING):
        del texts[0]
    return [entries.system("\n".join(texts))] if texts else []


def _tools(tool: wire.Fields, counts: wire.Counts) -> list[tuple[Tool, bool]]:
    kind = tool.text("type") or "custom"
    if kind == "custom":
        return [wire.tool_of(tool, "input_schema", counts)]
    counts[f"server_tool/{kind[:64]}"] += 1
    return []


def _offered(fields: wire.Fields, tools: Sequence[tuple[Tool, bool]], counts: wire.Counts) -> tuple[Tool, ...]:
    choice = fields.object("tool_choice")
    kind = "auto" if choice is None else choice.required("type")
    if kind == "none":
        return ()
    if kind != "auto":
        counts["not_enforced/tool_choice"] += 1
    if choice is not None and choice.flag("disable_parallel_tool_use"):
        counts["not_enforced/parallel_tool_calls"] += 1
    return tuple(tool for tool, _ in tools)


def _constraint(fields: wire.Fields, counts: wire.Counts) -> Constraint | None:
    output = fields.object("output_config")
    forms = [
        fields.object("output_format"),
        None if output is None else output.object("format"),
    ]  # the older name first
    return only_constraint([constraint_of_format(form, "output_config.format", counts) for form in forms])


def _count_not_enforced(fields: wire.Fields, counts: wire.Counts) -> None:
    management = fields.object("context_management")
    edits = [] if management is None else management.objects("edits")
    if any(edit.value.get("type") != _KEPT or edit.value.get("keep") != "all" for edit in edits):
        counts["not_enforced/context_management"] += 1
    if servers := fields.objects("mcp_servers"):
        counts["server_tool/mcp"] += len(servers)
    read = (HISTORY, "tools", *_READ)
    wire.count_others(fields, counts, read=read, not_enforced=_NOT_ENFORCED, no_effect=NO_EFFECT)


def _messages(fields: wire.Fields, counts: wire.Counts) -> list[Message]:
    role = fields.text("role")
    if role == "assistant":
        return [_assistant(fields, counts)]
    if role == "system":
        return [Message("system", wire.text_of(fields, "content", lambda part: _part(part, counts)))]
    if role != "user":
        raise fields.wrong("role", f"one of {_ROLES}")
    if not isinstance(fields.value.get("content"), list):
        return [Message("user", wire.content_of(fields, "content", lambda part: _part(part, counts)))]
    results: list[Message] = []
    contents: list[Content] = []
    for block in fields.objects("content"):
        if block.value.get("type") == "tool_result":
            content = wire.content_of(block, "content", lambda part: _part(part, counts))
            if block.value.get("is_error") is True:  # templates have no place for it; programs say it in the text, too
                counts["not_shown/is_error"] += 1
            results.append(Message("tool", content, tool_call_id=block.required("tool_use_id")))
        else:
            contents.append(_part(block, counts))
    return [*results, Message("user", joined(contents))] if contents or not results else results


def _assistant(fields: wire.Fields, counts: wire.Counts) -> Message:
    if not isinstance(fields.value.get("content"), list):
        return Message("assistant", wire.text_of(fields, "content", lambda part: _part(part, counts)))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in fields.objects("content"):
        kind = block.value.get("type")
        if kind == "thinking":
            thoughts.append(block.required("thinking"))
        elif kind == "tool_use":
            calls.append(wire.call_of(block.required("name"), block.value.get("input"), block.required("id")))
        elif kind != "redacted_thinking":
            texts.append(wire.only_text(block, _part(block, counts)))
    return Message("assistant", "\n".join(texts), calls, reasoning="\n".join(thoughts) if thoughts else None)


def _part(fields: wire.Fields, counts: wire.Counts) -> Content:
    kind = fields.text("type")
    if kind == "text":
        return fields.required("text")
    if kind == "image":
        return (_image(fields),)
    if kind == "search_result":
        title = [text for name in ("title", "source") if (text := fields.text(name))]
        return joined([*title, wire.content_of(fields, "content", lambda part: _part(part, counts))])
    if kind == "document":
        return _document(fields, counts)
    raise fields.wrong("type", f"one of {_PARTS} here")


def _image(fields: wire.Fields) -> Image:
    source = fields.object("source")
    if source is None:
        raise fields.wrong("source", "an object with type, media_type and data")
    if source.text("type") != "base64":
        raise source.wrong("type", "base64; this server fetches no image and keeps no files")
    media_type = source.required("media_type")
    return wire.image_of(source, "data", f"data:{media_type};base64,{source.required('data')}")


def _document(fields: wire.Fields, counts: wire.Counts) -> Content:
    source = fields.object("source")
    if source is not None and source.value.get("type") == "text":
        return source.required("data")
    if source is not None and source.value.get("type") == "content":
        return wire.content_of(source, "content", lambda part: _part(part, counts))
    counts["file"] += 1
    return "[file]"


# -- answers ----------------------------------------------------------------------------------------------------------


def answer(request: CallRequest, replies: Sequence[CallReply]) -> dict[str, Any]:
    """The JSON of an answer: the one reply.

    A tool call needs an object as its input here, so a malformed call becomes a text block with its raw text.
    """
    reply = replies[0]
    blocks = [_as_text(call) if call.error is not None else _tool_use(call) for call in reply.message.tool_calls]
    content = [*_texts(reply), *blocks] or [_text("")]
    return _message(request, reply, content, any(block["type"] == "tool_use" for block in blocks))


def events(request: CallRequest, replies: Sequence[CallReply]) -> list[bytes]:
    """The stream of an answer. The input of a malformed call is its raw text, which clients report to the model."""
    reply = replies[0]
    calls = reply.message.tool_calls
    whole = _message(request, reply, [], bool(calls))
    started = {**whole, "stop_reason": None, "stop_sequence": None, "usage": {**whole["usage"], "output_tokens": 0}}
    sent: list[dict[str, Any]] = [{"type": "message_start", "message": started}]
    streamed = [*map(_streamed, _texts(reply)), *map(_streamed_call, calls)] or [_streamed(_text(""))]
    for index, (shell, deltas) in enumerate(streamed):
        sent.append({"type": "content_block_start", "index": index, "content_block": shell})
        sent += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        sent.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    sent += [{"type": "message_delta", "delta": end, "usage": whole["usage"]}, {"type": "message_stop"}]
    return [wire.event(each, each["type"]) for each in sent]


def _message(request: CallRequest, reply: CallReply, content: list[dict[str, Any]], calls: bool) -> dict[str, Any]:
    usage = reply.usage
    ended = "end_turn" if reply.stop_text is None else "stop_sequence"
    reason = "max_tokens" if reply.finish_reason == "length" else "tool_use" if calls else ended
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": reply.stop_text if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,  # clients add the cached ones
            "output_tokens": usage.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
        },
    }


def _texts(reply: CallReply) -> list[dict[str, Any]]:
    message = reply.message
    blocks = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": reply.id})
    if message.text:
        blocks.append(_text(message.text))
    return blocks


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _as_text(call: ToolCall) -> dict[str, Any]:
    return _text(call.raw)


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The empty shell of a text or thinking block, and its deltas."""
    if block["type"] == "text":
        return _text(""), [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
    deltas = [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]
    return {"type": "thinking", "thinking": "", "signature": ""}, deltas


def _streamed_call(call: ToolCall) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    shell = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    return shell, [{"type": "input_json_delta", "partial_json": wire.arguments_text(call)}]


_TYPES: Mapping[ErrorKind, str] = {
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "server": "api_error",
}


def error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and JSON of an error."""
    kind, text = error.error_kind, str(error)
    if kind == "overflow":  # Claude Code compacts its history at this text
        text = f"prompt is too long: {error.tokens} tokens > {error.max_context} maximum"
    body = {"type": _TYPES.get(kind, "invalid_request_error"), "message": text}
    return wire.STATUS[kind], {"type": "error", "error": body}


def error_event(request: CallRequest, failed: ApiError) -> bytes:
    """The event of an error in a stream."""
    return wire.event(error(failed)[1], "error")
