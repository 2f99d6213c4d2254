"""What goes over the wire of the Open Reward Standard, as typed values.

Invariant: whatever bytes a server sends become one of these values or an :class:`ORSError` that says what was wrong
with them. This module does no I/O.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rollouts.dtypes import Message, Tool

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
    "read",
    "secrets_header",
    "text_of",
    "tools_of",
]


class ORSError(Exception):
    """An ORS server did not do what was asked: not there, refused, or its environment broke."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status, where there was an answer."""


class Block(msgspec.Struct):
    """A piece of a prompt or of a tool's output."""

    type: str
    text: str = ""
    mimeType: str = ""  # noqa: N815 - the name on the wire


class WireMessage(msgspec.Struct):
    """A turn of a prompt."""

    role: str
    blocks: list[dict[str, Any]]


class Output(msgspec.Struct):
    """What a tool gave back."""

    blocks: list[Block]
    reward: float | None = None
    finished: bool = False
    metadata: Any = None


class CallAnswer(msgspec.Struct):
    """The end of a tool call: its output, or why it was not run."""

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
    """Ends the episode with the text of a reply without calls; the model does not see it."""
    supports_score_group: bool | None = None
    message_block_types: list[str] | None = None
    """Kinds of blocks in messages; absent where there are no messages but only a prompt."""


class _Score(msgspec.Struct):
    reward: float


class ScoreAnswer(msgspec.Struct):
    """Rewards of a group, in the order of its candidates."""

    scores: list[_Score]


Read = TypeVar("Read")


def read(kind: type[Read], payload: bytes | str, what: str) -> Read:
    """Decode JSON into a type.

    Raises:
        ORSError: it is something else.
    """
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ORSError(f"{what}: the answer is not what the standard says ({error})") from None


def text_of(blocks: Sequence[Block]) -> tuple[str, int]:
    """The text of blocks, and how many were none: the model is told of those in words."""
    texts = [
        block.text if block.type == "text" else f"({block.type} that cannot be shown here: {block.mimeType or '?'})"
        for block in blocks
    ]
    return "".join(texts), sum(block.type != "text" for block in blocks)


def blocks_of(messages: Iterable[Mapping[str, Any]], allowed: Sequence[str]) -> list[dict[str, Any]]:
    """Chat dicts as messages of the standard, where results of tools are a user's; without what is not allowed."""
    made: list[dict[str, Any]] = []
    for chat in messages:
        text = chat.get("content") or ""
        blocks: list[dict[str, Any]] = []
        role = chat["role"]
        if chat.get("reasoning_content"):
            blocks.append({"type": "reasoning", "text": chat["reasoning_content"]})
        if role == "tool":
            role, inner = "user", [{"type": "text", "text": text}]
            blocks.append({"type": "tool_result", "tool_call_id": chat.get("tool_call_id") or "", "blocks": inner})
        elif text:
            blocks.append({"type": "text", "text": text})
        for call in chat.get("tool_calls") or ():
            function = call["function"]
            arguments = dict(function["arguments"])
            blocks.append(
                {"type": "tool_call", "id": call.get("id") or "", "name": function["name"], "input": arguments}
            )
        blocks = [block for block in blocks if block["type"] in allowed]
        if blocks:
            made.append({"role": role, "blocks": blocks})
    return made


def messages_of(payload: bytes, what: str) -> tuple[list[Message], int]:
    """The messages of a prompt, and how many blocks could not be shown. Results of tools become messages of their own.

    Raises:
        ORSError: they are no messages.
    """
    made: list[Message] = []
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
                text, missing = text_of(inner)
                hidden += missing
                made.append(Message("tool", text, tool_call_id=block.get("tool_call_id")))
            else:
                texts += _blocks([block], what)
        text, missing = text_of(texts)
        hidden += missing
        if text or calls or reasoning:
            chat = {"role": entry.role, "content": text, "tool_calls": calls}
            made.append(Message.from_chat({**chat, "reasoning_content": "".join(reasoning) or None}))
    return made, hidden


def _blocks(value: Any, what: str) -> list[Block]:
    try:
        return msgspec.convert(value, list[Block])
    except msgspec.ValidationError as error:
        raise ORSError(f"{what}: the answer is not what the standard says ({error})") from None


def tools_of(listing: Listing) -> tuple[Tool, ...]:
    """The tools that the model is told of.

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
    """What is wrong with an object schema, as far as a template or a parser looks at it."""
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
    """Reads server-sent events from bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []

    def feed(self, more: bytes) -> list[tuple[str, str]]:
        """The events that are complete now, as name and data."""
        *lines, self._rest = (self._rest + more).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._event:
                    found.append((self._event, "\n".join(self._data)))
                self._event, self._data = "", []
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")  # one space belongs to the format, further ones to the data
            if name == b"event":
                self._event = value.decode(errors="replace")
            elif name == b"data":
                self._data.append(value.decode(errors="replace"))
        return found


Secret = str | tuple[str, Sequence[str]]
"""A value, or a value and the hosts that it may be sent to."""

_HOSTS: Mapping[str, tuple[str, ...]] = {
    "openai_api_key": ("api.openai.com",),
    "anthropic_api_key": ("api.anthropic.com",),
    "gemini_api_key": ("generativelanguage.googleapis.com",),
    "google_api_key": ("generativelanguage.googleapis.com",),
    "tavily_api_key": ("api.tavily.com",),
    "hf_token": ("huggingface.co", "api-inference.huggingface.co"),
}
"""Where the keys of well-known services may go; a cloud that holds environments asks for it."""


def secrets_header(secrets: Mapping[str, Secret]) -> str:
    """The header that carries secrets."""
    payload = {}
    for name, secret in secrets.items():
        value, hosts = (secret, _HOSTS.get(name.lower(), ())) if isinstance(secret, str) else secret
        payload[name] = {"value": value, "allowed_domains": list(hosts)}
    return base64.b64encode(msgspec.json.encode(payload)).decode()
