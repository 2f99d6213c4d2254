"""The wire format of the Open Reward Standard, as typed values.

Invariant: any bytes from a server become one of these values, or an :class:`ORSError` that names the problem. This
module does no I/O.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import msgspec

from rollouts.dtypes import Content, Image, Message, Tool, chat_text
from rollouts.errors import ConfigError

__all__ = [
    "Block",
    "CallAnswer",
    "Events",
    "Listing",
    "ORSError",
    "Output",
    "ScoreAnswer",
    "Secret",
    "blocks_of",
    "content_of",
    "read",
    "secrets_header",
    "tools_of",
]


class ORSError(Exception):
    """A request to an ORS server failed: it is unreachable, it refused the request, or its environment raised."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; ``None`` without a response."""


class Block(msgspec.Struct):
    """A part of a prompt or of a tool's output."""

    type: str
    text: str = ""
    mimeType: str = ""  # noqa: N815 - the name on the wire
    data: str = ""
    """Of an image: its bytes in base64."""


class WireMessage(msgspec.Struct):
    """One message of a prompt."""

    role: str
    blocks: list[dict[str, Any]]


class Output(msgspec.Struct):
    """The output of a tool."""

    blocks: list[Block]
    reward: float | None = None
    finished: bool = False
    metadata: Any = None


class CallAnswer(msgspec.Struct):
    """The result of a tool call: its output, or why the server refused it."""

    ok: bool
    output: Output | None = None
    error: str = ""
    reason: str | None = None


class _Terminal(msgspec.Struct):
    name: str
    arg: str | None = None


class Listing(msgspec.Struct):
    """The tools of an environment."""

    tools: list[dict[str, Any]]
    terminal_tool: _Terminal | None = None
    """The tool that receives a reply without calls and ends the episode; the model does not see it."""
    supports_score_group: bool | None = None
    message_block_types: list[str] | None = None
    """Types of blocks in messages; ``None`` if the server has a prompt but no messages."""


class _Score(msgspec.Struct):
    reward: float


class ScoreAnswer(msgspec.Struct):
    """Rewards of a group, in the order of its candidates."""

    scores: list[_Score]


Read = TypeVar("Read")


def read(kind: type[Read], payload: bytes | str, what: str) -> Read:
    """Decode JSON into a type.

    Raises:
        ORSError: the payload does not have this type.
    """
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ORSError(f"{what}: the response does not follow the standard ({error})") from None


def content_of(blocks: Sequence[Block], *, images: bool) -> tuple[Content, int]:
    """The content of blocks, and the number of blocks that the model does not see, which text describes.

    Args:
        blocks: text and images.
        images: whether the model sees images.
    """
    parts: list[str | Image] = []
    hidden = 0
    for block in blocks:
        image = _image(block) if images and block.type == "image" else None
        if image is None and block.type != "text":
            hidden += 1
            parts.append(f"({block.type} that cannot be shown here: {block.mimeType or '?'})")
        else:
            parts.append(block.text if image is None else image)
    return Message("user", tuple(parts)).content, hidden


def _image(block: Block) -> Image | None:
    try:
        return Image.of(f"data:{block.mimeType};base64,{block.data}")
    except ConfigError:
        return None


def blocks_of(messages: Iterable[Mapping[str, Any]], allowed: Sequence[str]) -> list[dict[str, Any]]:
    """Chat dicts as messages of the standard; tool results become user messages. Drops types that are not allowed.

    Where images are not allowed, text stands for each.
    """
    converted: list[dict[str, Any]] = []
    for chat in messages:
        content = _content_blocks(chat.get("content"), images="image" in allowed)
        blocks: list[dict[str, Any]] = []
        role = chat["role"]
        if chat.get("reasoning_content"):
            blocks.append({"type": "reasoning", "text": chat["reasoning_content"]})
        if role == "tool":
            role, inner = "user", content or [{"type": "text", "text": ""}]
            blocks.append({"type": "tool_result", "tool_call_id": chat.get("tool_call_id") or "", "blocks": inner})
        else:
            blocks += content
        for call in chat.get("tool_calls") or ():
            function = call["function"]
            arguments = dict(function["arguments"])
            blocks.append(
                {"type": "tool_call", "id": call.get("id") or "", "name": function["name"], "input": arguments}
            )
        blocks = [block for block in blocks if block["type"] in allowed]
        if blocks:
            converted.append({"role": role, "blocks": blocks})
    return converted


def _content_blocks(content: Any, *, images: bool) -> list[dict[str, Any]]:
    """The content of a chat dict as blocks of text and images."""
    parts = content if images and isinstance(content, list | tuple) else [chat_text(content)]
    blocks: list[dict[str, Any]] = []
    for part in parts:
        image = part.get("image") if isinstance(part, Mapping) else None
        if isinstance(image, Image):
            data = base64.b64encode(image.data).decode()
            blocks.append({"type": "image", "data": data, "mimeType": "image/png"})
        elif text := chat_text([part]):
            blocks.append({"type": "text", "text": text})
    return blocks


def messages_of(payload: bytes, what: str, *, images: bool) -> tuple[list[Message], int]:
    """The messages of a prompt, and the number of blocks that the model does not see; see :func:`content_of`.

    Tool results become separate messages.

    Raises:
        ORSError: the payload is not a list of messages.
    """
    messages: list[Message] = []
    hidden = 0
    for entry in read(list[WireMessage], payload, what):
        texts: list[Block] = []
        calls: list[dict[str, Any]] = []
        reasoning: list[str] = []
        for block in entry.blocks:
            kind = block.get("type")
            if kind == "tool_call":
                function = {"name": block.get("name", ""), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "function": function})
            elif kind == "reasoning":
                reasoning.append(str(block.get("text", "")))
            elif kind == "tool_result":
                inner = _blocks(block.get("blocks"), what)
                content, missing = content_of(inner, images=images)
                hidden += missing
                messages.append(Message("tool", content, tool_call_id=block.get("tool_call_id")))
            else:
                texts += _blocks([block], what)
        content, missing = content_of(texts, images=images)
        hidden += missing
        if content or calls or reasoning:
            chat = {"role": entry.role, "tool_calls": calls, "reasoning_content": "".join(reasoning) or None}
            messages.append(attrs.evolve(Message.from_chat(chat), content=content))
    return messages, hidden


def _blocks(value: Any, what: str) -> list[Block]:
    try:
        return msgspec.convert(value, list[Block])
    except msgspec.ValidationError as error:
        raise ORSError(f"{what}: the response does not follow the standard ({error})") from None


def tools_of(listing: Listing) -> tuple[Tool, ...]:
    """The tools shown to the model.

    Raises:
        ORSError: a tool's input schema is not a JSON schema of an object; the message names the tool.
    """
    return tuple(_tool(entry) for entry in listing.tools)


def _tool(entry: Mapping[str, Any]) -> Tool:
    name, schema = entry.get("name"), entry.get("input_schema")
    if not isinstance(name, str) or not name:
        raise ORSError(f"tools: got a tool named {name!r}; expected a name")
    if schema is None:  # a tool without arguments
        return Tool(name, str(entry.get("description") or ""))
    problem = _problem(schema)
    if problem:
        raise ORSError(f"tool {name!r}: input_schema {problem}; expected a JSON schema of an object")
    parameters = {key: value for key, value in schema.items() if key != "title"}
    return Tool(name, str(entry.get("description") or ""), {"type": "object", "properties": {}, **parameters})


def _problem(schema: Any) -> str | None:
    """Describe what is wrong with an object schema; checks only what templates and parsers read."""
    if not isinstance(schema, Mapping):
        return f"is {schema!r}"
    if schema.get("type", "object") != "object":
        return f"has type {schema['type']!r}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return f"has properties {properties!r}"
    wrong = [name for name, value in properties.items() if not isinstance(value, Mapping | bool)]
    if wrong:
        return f"has a property {wrong[0]!r} that is {properties[wrong[0]]!r}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"has required {required!r}"
    return None


class Events:
    """Incremental parser of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []

    def feed(self, more: bytes) -> list[tuple[str, str]]:
        """Feed bytes; return the events that are now complete, as (name, data)."""
        *lines, self._rest = (self._rest + more).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._event:
                    events.append((self._event, "\n".join(self._data)))
                self._event, self._data = "", []
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")  # one space is format, further ones are data
            if name == b"event":
                self._event = value.decode(errors="replace")
            elif name == b"data":
                self._data.append(value.decode(errors="replace"))
        return events


Secret = str | tuple[str, Sequence[str]]
"""A value, or a value and its allowed hosts."""

_HOSTS: Mapping[str, tuple[str, ...]] = {
    "openai_api_key": ("api.openai.com",),
    "anthropic_api_key": ("api.anthropic.com",),
    "gemini_api_key": ("generativelanguage.googleapis.com",),
    "google_api_key": ("generativelanguage.googleapis.com",),
    "tavily_api_key": ("api.tavily.com",),
    "hf_token": ("huggingface.co", "api-inference.huggingface.co"),
}
"""Allowed hosts of the keys of well-known services; clouds require them."""


def secrets_header(secrets: Mapping[str, Secret]) -> str:
    """The value of the header ``X-Secrets``: base64 of JSON."""
    payload = {}
    for name, secret in secrets.items():
        value, hosts = (secret, _HOSTS.get(name.lower(), ())) if isinstance(secret, str) else secret
        payload[name] = {"value": value, "allowed_domains": list(hosts)}
    return base64.b64encode(msgspec.json.encode(payload)).decode()
