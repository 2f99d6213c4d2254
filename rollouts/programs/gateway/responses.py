"""The Responses API of OpenAI.

Invariant: ``read`` refuses a field that it cannot read by its path; fields that are not honoured are in ``counts``.
The id of an item contains the id of its reply, so that a reference to the item can be resolved. This module does no
I/O.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rollouts.dtypes import Content, Message, Tool, ToolCall
from rollouts.programs.gateway import wire
from rollouts.programs.gateway.chat import PING, error
from rollouts.programs.gateway.constraints import constraint_of_format
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, Constraint

__all__ = ["FIELDS", "HISTORY", "NO_EFFECT", "PING", "answer", "error", "error_event", "events", "read"]

HISTORY = "input"
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MEDIA = {"input_audio": "audio", "input_file": "file"}
_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_ITEMS = ("message", "reasoning", "item_reference", *_CALLS, *_RESULTS)
_NOT_HERE = ("conversation", "prompt", "background")
"""Fields that refer to stored objects; this server stores the session only."""
_NOT_ENFORCED: Mapping[str, Sequence[Any]] = {
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that would change the prompt or the replies, with the values that change nothing."""
_READ: tuple[str, ...] = (
    *wire.SAMPLING, *_NOT_HERE, "include", "instructions", "max_output_tokens", "model", "parallel_tool_calls",
    "previous_response_id", "stream", "text", "tool_choice",
)  # fmt: skip
FIELDS: tuple[str, ...] = (*_READ, *_NOT_ENFORCED)
NO_EFFECT: tuple[str, ...] = (
    "access_programs", "background_options", "client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store", "stream_options", "user",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")


def read(body: Any, reply_of: wire.ReplyOf = wire.no_reply, entries: wire.Entries | None = None) -> CallRequest:
    """Read a request; see :meth:`rollouts.programs.gateway.wire.Wire.read`."""
    entries, counts = entries or wire.Entries(), wire.Counts()
    fields = wire.Fields.of(body, no_images=entries.no_images)
    for name in _NOT_HERE:
        if fields.value.get(name) not in (None, False):
            raise fields.wrong(name, "no such field; this server has no such objects")
    previous = fields.text("previous_response_id")
    if previous is not None and not previous.startswith("resp_"):
        raise fields.wrong("previous_response_id", "the id of a response of this session")
    instructions = fields.text("instructions")
    conversation = _Conversation(reply_of)
    system = [] if instructions is None else [entries.system(instructions)]
    given = fields.value.get(HISTORY)
    if isinstance(given, str):
        conversation.add(Message("user", given))
    else:
        conversation = entries.into(conversation, fields, HISTORY, _item, counts)
    conversation.close()
    messages = (*system, *conversation.messages)
    if not messages and previous is None:
        raise fields.wrong("input", "a string, or a list of at least one item")
    _count_not_enforced(fields, counts)
    included = _included(fields, counts)
    tools = entries.into(wire.Joined(), fields, "tools", _tools, counts).parts
    return CallRequest(
        messages=messages,
        tools=wire.offered(fields, tools, counts),
        strict=wire.strict_names(tools),
        max_tokens=fields.positive("max_output_tokens"),
        stream=fields.flag("stream"),
        previous_response_id=None if previous is None else previous.removeprefix("resp_"),
        instructions=instructions,
        sampling=wire.sampling_of(fields),
        counts=counts,
        model=fields.text("model") or "",
        call_prefix="call_",
        constraint=_constraint(fields, counts),
        logprobs=_LOGPROBS in included,
        continues=False,
    )


def _tools(tool: wire.Fields, counts: wire.Counts) -> list[tuple[Tool, bool]]:
    kind = tool.required("type")
    if kind == "function":
        return [wire.tool_of(tool, "parameters", counts)]
    counts[f"server_tool/{kind[:64]}"] += 1
    return []


def _count_not_enforced(fields: wire.Fields, counts: wire.Counts) -> None:
    if fields.value.get("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls"):
        counts["not_enforced/parallel_tool_calls"] += 1
    fields.text("truncation")
    read = (HISTORY, "tools", *_READ)
    wire.count_others(fields, counts, read=read, not_enforced=_NOT_ENFORCED, no_effect=NO_EFFECT)


def _constraint(fields: wire.Fields, counts: wire.Counts) -> Constraint | None:
    text = fields.object("text")
    return constraint_of_format(None if text is None else text.object("format"), "text.format", counts)


def _included(fields: wire.Fields, counts: wire.Counts) -> list[str]:
    names = fields.value.get("include") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong("include", "a list of strings")
    for name in names:
        if name not in _INCLUDED:
            counts[f"not_enforced/include/{name[:64]}"] += 1
    return names


@attrs.frozen
class _Reasoning:
    text: str


@attrs.frozen
class _Reference:
    id: str


@attrs.define
class _Conversation:
    """The messages of the items read so far. The items of one reply are joined into one assistant message."""

    reply_of: wire.ReplyOf
    messages: list[Message] = attrs.field(factory=list)
    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = attrs.field(factory=list)

    def copy(self) -> _Conversation:
        """See :class:`~rollouts.programs.gateway.wire.Reading`."""
        return attrs.evolve(self, messages=[*self.messages], calls=[*self.calls])

    def add(self, message: Message) -> None:
        """Add a message that is not a reply."""
        self.close()
        self.messages.append(message)

    def close(self) -> None:
        """End the assistant message under way."""
        if self.reasoning is not None or self.content is not None or self.calls:
            message = Message("assistant", self.content or "", tuple(self.calls), reasoning=self.reasoning)
            self.messages.append(message)
        self.reasoning, self.content, self.calls = None, None, []

    def take(self, item: Message | ToolCall | _Reasoning | _Reference, path: str) -> None:
        """Add one item, which has this path in the body."""
        if isinstance(item, ToolCall):
            self.calls.append(item)
        elif isinstance(item, _Reasoning):
            self._open(reasoning=item.text)
        elif isinstance(item, _Reference):
            self._reference(item, path)
        elif item.role == "assistant":
            self._open(content=item.text)
        else:
            self.add(item)

    def _open(self, *, reasoning: str | None = None, content: str | None = None) -> None:
        """Reasoning and text stand before the calls of a reply, so items behind the calls belong to another reply."""
        if self.calls or self.content is not None or (reasoning is not None and self.reasoning is not None):
            self.close()
        if content is None:
            self.reasoning = reasoning
        else:
            self.content = content

    def _reference(self, item: _Reference, path: str) -> None:
        prefix, _, rest = item.id.partition("_")
        reply_id, _, place = rest.rpartition("_") if prefix == "fc" else (rest, "", "")
        reply = self.reply_of(reply_id)
        message = None if reply is None else reply.message
        if message is not None and prefix == "rs" and message.reasoning is not None:
            self._open(reasoning=message.reasoning)
        elif message is not None and prefix == "msg":
            self._open(content=message.text)
        elif message is not None and place in map(str, range(len(message.tool_calls))):
            call = message.tool_calls[int(place)]
            self.calls.append(wire.call_of(call.name, wire.arguments_text(call), call.id))
        else:
            raise ApiError("not_found", f"{path}.id: got {item.id!r}; expected the id of an item of this session")


def _item(item: wire.Fields, counts: wire.Counts) -> Message | ToolCall | _Reasoning | _Reference:
    kind = item.text("type") or "message"
    if kind == "message":
        return _message(item, counts)
    if kind == "reasoning":
        texts = item.objects("content") or item.objects("summary")
        return _Reasoning("\n".join(text.required("text") for text in texts))
    if kind in _CALLS:
        return _call(item, kind)
    if kind in _RESULTS:
        call_id = item.text("call_id") or item.required("id")  # local_shell_call_output has its id here
        content = wire.content_of(item, "output", lambda part: _part(part, counts))
        return Message("tool", content, tool_call_id=call_id)
    if kind == "item_reference":
        return _Reference(item.required("id"))
    raise item.wrong("type", f"one of {_ITEMS}")


def _message(item: wire.Fields, counts: wire.Counts) -> Message:
    def part(fields: wire.Fields) -> Content:
        return _part(fields, counts)

    role = item.text("role")
    if role == "assistant":
        return Message("assistant", wire.text_of(item, "content", part))
    if role in ("system", "developer"):
        return Message("system", wire.text_of(item, "content", part))
    if role == "user":
        return Message("user", wire.content_of(item, "content", part))
    raise item.wrong("role", f"one of {_ROLES}")


def _part(fields: wire.Fields, counts: wire.Counts) -> Content:
    kind = fields.text("type")
    if kind == "input_image":
        if fields.text("detail") == "low":
            counts["not_enforced/image_detail"] += 1
        if fields.value.get("file_id") is not None:
            raise fields.wrong("file_id", "an image_url; this server keeps no files")
        return (wire.image_of(fields, "image_url", fields.required("image_url")),)
    return wire.shown_part(fields, counts, texts=_TEXTS, image="input_image", media=_MEDIA)


def _call(item: wire.Fields, kind: str) -> ToolCall:
    call_id = item.text("call_id") or item.text("id") or ""
    if kind == "local_shell_call":
        return wire.call_of("local_shell", item.value.get("action"), call_id)
    if kind == "custom_tool_call":
        return ToolCall(item.required("name"), {"input": item.text("input") or ""}, call_id)
    return wire.call_of(item.required("name"), item.value.get("arguments"), call_id)


# -- answers ----------------------------------------------------------------------------------------------------------


def answer(request: CallRequest, replies: Sequence[CallReply]) -> dict[str, Any]:
    """The JSON of an answer: the one reply."""
    reply = replies[0]
    cut = reply.finish_reason == "length"
    response = _response(request, reply.id, reply.created, "incomplete" if cut else "completed")
    usage = reply.usage
    response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    response["output"] = _items(request, reply)
    response["usage"] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return response


def events(request: CallRequest, replies: Sequence[CallReply]) -> list[bytes]:
    """The stream of an answer."""
    reply = replies[0]
    started = _response(request, reply.id, reply.created, "in_progress")
    whole = answer(request, replies)
    sent: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        sent.append({"type": "response.output_item.added", "output_index": index, "item": _shell(item)})
        sent += [{**piece, **place} for piece in _pieces(item)]
        sent.append({"type": "response.output_item.done", "output_index": index, "item": item})
    sent.append({"type": f"response.{whole['status']}", "response": whole})
    return _numbered(sent)


def error_event(request: CallRequest, failed: ApiError) -> bytes:
    """The events of an error in a stream of which only the head was sent."""
    body = error(failed)[1]["error"]
    response = _response(request, "failed", 0, "failed")
    response["error"] = {"code": body["code"] or "server_error", "message": body["message"]}
    started = {**response, "status": "in_progress", "error": None}
    return b"".join(
        _numbered(
            [{"type": "response.created", "response": started}, {"type": "response.failed", "response": response}]
        )
    )


def _numbered(sent: Sequence[dict[str, Any]]) -> list[bytes]:
    return [wire.event({**each, "sequence_number": number}, each["type"]) for number, each in enumerate(sent)]


def _response(request: CallRequest, reply_id: str, created: int, status: str) -> dict[str, Any]:
    previous = request.previous_response_id
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "usage": None,
        "instructions": request.instructions,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "reasoning": {},
        "store": False,
        "previous_response_id": None if previous is None else f"resp_{previous}",
    }


def _items(request: CallRequest, reply: CallReply) -> list[dict[str, Any]]:
    message = reply.message
    items: list[dict[str, Any]] = []
    if message.reasoning is not None:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{reply.id}",
                "summary": [{"type": "summary_text", "text": message.reasoning}],
                "content": [{"type": "reasoning_text", "text": message.reasoning}],
                "encrypted_content": reply.id,
                "status": "completed",
            }
        )
    if message.text or not message.tool_calls:
        content = [{"type": "output_text", "text": message.text, "annotations": [], **_logprobs(request, reply)}]
        items.append(
            {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed", "content": content}
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{reply.id}_{place}",
            "call_id": call.id,
            "name": call.name,
            "arguments": wire.arguments_text(call),
            "status": "completed",
        }
        for place, call in enumerate(message.tool_calls)
    ]
    if reply.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def _logprobs(request: CallRequest, reply: CallReply) -> dict[str, Any]:
    """The logprobs of the ids of the text; of all ids where the texts of the ids are not the text of the reply."""
    sampled = reply.sampled
    if sampled is None or not request.logprobs:
        return {}
    ends = list(itertools.accumulate(map(len, sampled.texts)))
    whole, thought = "".join(sampled.texts), reply.message.reasoning or ""
    start = whole.find(reply.message.text, whole.find(thought) + len(thought))
    if start < 0:
        return {"logprobs": wire.logprobs_of(sampled)}
    stop = start + len(reply.message.text)
    return {
        "logprobs": wire.logprobs_of(sampled, slice(bisect.bisect(ends, start), bisect.bisect_left(ends, stop) + 1))
    }


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"summary": [], "content": [], "encrypted_content": None},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}


def _shell(item: dict[str, Any]) -> dict[str, Any]:
    """An item before its pieces."""
    return {**item, **_EMPTY[item["type"]], "status": "in_progress"}


def _pieces(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The events between the start and the end of an item, without its place."""
    if item["type"] == "function_call":
        text = item["arguments"]
        delta = {"type": "response.function_call_arguments.delta", "delta": text}
        return [delta, {"type": "response.function_call_arguments.done", "arguments": text, "name": item["name"]}]
    if item["type"] == "message":
        part, place = item["content"][0], {"content_index": 0}
        texts = _text_pieces("response.output_text", part["text"], {**place, "logprobs": part.get("logprobs", [])})
        return _part_pieces("response.content_part", part, place, texts)
    summary, content, place = item["summary"][0], item["content"][0], {"summary_index": 0}
    texts = _text_pieces("response.reasoning_summary_text", summary["text"], place)
    return [
        *_part_pieces("response.reasoning_summary_part", summary, place, texts),
        *_text_pieces("response.reasoning_text", content["text"], {"content_index": 0}),
    ]


def _part_pieces(
    name: str, part: dict[str, Any], place: dict[str, Any], texts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    added = {"type": f"{name}.added", "part": {**part, "text": ""}, **place}
    return [added, *texts, {"type": f"{name}.done", "part": part, **place}]


def _text_pieces(name: str, text: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    deltas = [{"type": f"{name}.delta", "delta": text, **fields}] if text else []
    return [*deltas, {"type": f"{name}.done", "text": text, **fields}]
