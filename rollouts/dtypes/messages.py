"""Messages, tools, tool calls and prompts, and their forms: chat dicts, and records that name images by their hashes.

Invariant: a message shows its content in one form: text, or texts and images in their order. Data of others are read
completely, or refused with the name of the field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import msgspec

from rollouts.base.validators import check
from rollouts.dtypes.images import Image, image_label
from rollouts.errors import ConfigError

__all__ = [
    "ENVIRONMENT",
    "REPLIES",
    "ChatDict",
    "Content",
    "Fault",
    "LoadImage",
    "Message",
    "Prompt",
    "Role",
    "Tool",
    "ToolCall",
    "as_messages",
    "as_record",
    "chat_text",
    "hashes_in",
    "images_in",
    "json_object",
    "with_images",
]

ChatDict: TypeAlias = dict[str, Any]
"""A message in the chat format of the OpenAI API and of chat templates."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

ENVIRONMENT = "environment"
"""Metadata key of a prompt that names its environment, in a run with several."""
REPLIES = "replies"
"""Metric of a sample without token ids: its number of replies. Replies with ids are counted by their completions."""

Content: TypeAlias = str | tuple[str | Image, ...]
"""The content of a message: text, or texts and images in their order. Content without an image is text."""

Fault: TypeAlias = Literal[
    "not_json", "unclosed", "no_name", "no_arguments", "string_arguments", "bad_arguments", "bad_form"
]
"""Why a tool call is malformed: invalid JSON; no closing mark; no name; no arguments; arguments as a string; arguments
that do not fit the schema; any other error of form."""


@attrs.frozen
class ToolCall:
    """One tool call of a reply.

    ``arguments`` are read from the text, never repaired. A malformed call has ``error`` set and its text in ``raw``; it
    is answered with an error message to the model instead of being executed.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    id: str = ""
    """Unique in its reply; assigned by the agent loop if the dialect has no ids or the model repeats one."""
    raw: str = ""
    """The exact text of the call."""
    error: str | None = None
    """Why the call is malformed, written for the model; ``None`` for a valid call."""
    fault: Fault | None = None
    """The kind of the error, for metrics."""

    def to_chat(self) -> ChatDict:
        """The call in chat format, with arguments as a mapping, not as a JSON string."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


def _is_object_schema(value: Any) -> bool:
    is_object = isinstance(value, Mapping) and value.get("type", "object") == "object"
    return is_object and isinstance(value.get("properties", {}), Mapping)


@attrs.frozen
class Tool:
    """A tool's name, description and the JSON schema of its arguments: an object schema, with or without ``type``."""

    name: str = attrs.field(validator=check("a non-empty string", lambda v: isinstance(v, str) and bool(v)))
    description: str = ""
    parameters: Mapping[str, Any] = attrs.field(
        factory=lambda: {"type": "object", "properties": {}},
        validator=check("a JSON schema of an object", _is_object_schema),
    )
    chat: Mapping[str, Any] | None = None
    """The tool as a data set has it, with keys such as ``strict``: what :meth:`to_chat` returns if it is set."""

    def to_chat(self) -> ChatDict:
        """The tool in chat format."""
        if self.chat is not None:
            return dict(self.chat)
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any]) -> Tool:
        """Read a tool of the chat format: ``{"type": "function", "function": {...}}``, or only the function.

        Templates get the function as it is: other keys and the order of the keys stay, and what is absent stays absent.

        Raises:
            ConfigError: it has no name, or the parameters are not a JSON schema of an object.
        """
        function = chat.get("function", chat) if isinstance(chat, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError.of("tool", chat, "an object with a function that has a name")
        fields = {name: function[name] for name in ("description", "parameters") if function.get(name) is not None}
        whole = chat if "function" in chat else {"type": "function", "function": dict(function)}
        return cls(function.get("name", ""), **fields, chat=dict(whole))


def _calls(calls: Iterable[ToolCall]) -> Sequence[ToolCall]:
    return tuple(calls)


_ROLES = get_args(Role)
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields in which servers and data sets have the text of the thinking block."""


def _content(value: str | Sequence[str | Image]) -> Content:
    """Content in its one form: plain ``str``; a sequence without images is joined, and empty texts are dropped."""
    if type(value) is str:
        return value
    if not isinstance(value, list | tuple):  # a subclass, e.g. of NumPy; others are refused when the message is created
        return str.__str__(value) if isinstance(value, str) else value  # type: ignore[return-value]
    parts = tuple(part for part in value if part != "")
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else parts


@attrs.frozen
class Message:
    """One message of a conversation. The tokens are the record; a message is only a view of them."""

    role: Role
    content: Content = attrs.field(default="", converter=_content)
    """Text, or a sequence of texts and images; :attr:`text` is the text alone."""
    tool_calls: Sequence[ToolCall] = attrs.field(default=(), converter=_calls)
    tool_call_id: str | None = None
    """On a tool message: the id of the call that it answers."""
    name: str | None = None
    """On a tool message: the name of the tool."""
    reasoning: str | None = None
    """On an assistant message: the text of its thinking block; ``None`` if there is none."""

    def __attrs_post_init__(self) -> None:  # one call for all fields: messages are created several times a turn
        if self.role not in _ROLES:
            raise ConfigError.of("Message.role", self.role, f"one of {_ROLES}")
        if type(self.content) is not str and not _are_parts(self.content):
            raise ConfigError.of("Message.content", self.content, "a string, or a sequence of strings and Images")
        for text in (self.tool_call_id, self.name, self.reasoning):
            if text is not None and type(text) is not str:
                self._check_texts()

    def _check_texts(self) -> None:
        for name in ("tool_call_id", "name", "reasoning"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ConfigError.of(f"Message.{name}", text, "a string")

    @property
    def text(self) -> str:
        """The text of the content, without its images."""
        content = self.content
        if type(content) is str:
            return content
        return "".join(part for part in content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the content, in their order."""
        if type(self.content) is str:
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))

    def only_text(self, reader: str) -> str:
        """The text, for a reader that cannot show images.

        Raises:
            ConfigError: the message has an image; it names ``reader``.
        """
        if self.images:
            raise ConfigError.of(f"content of a {self.role} message", self.images[0], f"text: {reader} has no images")
        return self.text

    def with_texts(self, change: Callable[[str], str]) -> Message:
        """The message with each text changed; itself if no text changes."""
        if isinstance(self.content, str):
            text = change(self.content)
            return self if text is self.content else attrs.evolve(self, content=text)
        parts = tuple(change(part) if isinstance(part, str) else part for part in self.content)
        return self if all(map(operator.is_, parts, self.content)) else attrs.evolve(self, content=parts)

    def to_chat(self) -> ChatDict:
        """The message in chat format, images as ``image_url`` parts with ``data:`` URLs; absent fields are left out."""
        content = self.content if type(self.content) is str else [_part_to_chat(part) for part in self.content]
        chat: ChatDict = {"role": self.role, "content": content}
        if self.reasoning is not None:
            chat["reasoning_content"] = self.reasoning
        if self.tool_calls:
            chat["tool_calls"] = [call.to_chat() for call in self.tool_calls]
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            chat["name"] = self.name
        return chat

    def to_record(self) -> ChatDict:
        """As :meth:`to_chat`, with hash and size in the place of each image; :func:`with_images` restores them."""
        if type(self.content) is str:
            return self.to_chat()
        return {**attrs.evolve(self, content="").to_chat(), "content": [_part_to_record(part) for part in self.content]}

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any]) -> Message:
        """Read a chat dict. Content is a string or a list of parts; arguments are an object or its JSON text.

        A part is text, or an image in the form of the OpenAI API (``image_url``, ``input_image``) or of transformers
        (``{"type": "image", "image": ...}``). A string that stands for an image must be a ``data:`` URL: a path in the
        data of others would read files of this machine. ``Image.of(path)`` reads one.

        The role ``developer`` is read as ``system``: most templates leave out or refuse the other name.

        Raises:
            ConfigError: an unknown role, content of another kind, or arguments that are not an object.
        """
        content = chat.get("content")
        if isinstance(content, list | tuple):
            content = tuple(_part_from_chat(part) for part in content)
        calls = chat.get("tool_calls") or ()
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ConfigError.of("message.tool_calls", calls, "a list of calls")
        if chat.get("function_call"):
            expected = "none: tool_calls replaces this field of the OpenAI API"
            raise ConfigError.of("message.function_call", chat["function_call"], expected)
        role = chat.get("role")
        return cls(
            role="system" if role == "developer" else role,  # type: ignore[arg-type]  # the validator refuses others
            content="" if content is None else content,
            tool_calls=[_call_from_chat(call) for call in calls],
            tool_call_id=chat.get("tool_call_id"),
            name=chat.get("name"),
            reasoning=next((chat[name] for name in _REASONING if chat.get(name) is not None), None),
        )


def _are_parts(content: Any) -> bool:
    return isinstance(content, tuple) and all(isinstance(part, str | Image) for part in content)


def _part_to_chat(part: str | Image) -> ChatDict:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part.url}}


LoadImage: TypeAlias = Callable[[str], Image]
"""Returns the image with this SHA-256."""


def _part_to_record(part: Any) -> Any:
    if isinstance(part, str):
        return _part_to_chat(part)
    if not isinstance(part, Image):
        return part
    return {"type": "image", "sha256": part.sha256, "width": part.width, "height": part.height}


def _is_record(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("sha256"), str)


def as_record(entry: Message | ChatDict) -> ChatDict:
    """A message or a chat dict with hashes in the place of its images."""
    if isinstance(entry, Message):
        return entry.to_record()
    if not images_in(entry):
        return dict(entry)
    parts = [_part_from_chat(part) if _has_image(part) else part for part in entry["content"]]
    return {**entry, "content": [_part_to_record(part) for part in parts]}


def images_in(entry: Message | ChatDict) -> Sequence[Image]:
    """The images of a message or of a chat dict, except images that are named by their hashes."""
    if isinstance(entry, Message):
        return entry.images
    content = entry.get("content") if isinstance(entry, Mapping) else None
    parts = content if isinstance(content, list | tuple) else ()
    found = [_part_from_chat(part) for part in parts if _has_image(part)]
    return [part for part in found if isinstance(part, Image)]


def _has_image(part: Any) -> bool:
    if isinstance(part, Mapping):
        return part.get("type") in _IMAGE_PARTS and not _is_record(part)
    return isinstance(part, Image)


def hashes_in(chats: Iterable[Any]) -> list[str]:
    """The SHA-256 of each image of records, in order."""
    contents = [chat.get("content") for chat in chats if isinstance(chat, Mapping)]
    return [part["sha256"] for content in contents if isinstance(content, list) for part in content if _is_record(part)]


def with_images(chats: Iterable[ChatDict], load_image: LoadImage) -> list[ChatDict]:
    """Chat dicts with images in the place of their hashes."""

    def restored(part: Any) -> Any:
        return {"type": "image", "image": load_image(part["sha256"])} if _is_record(part) else part

    return [
        {**chat, "content": [restored(part) for part in chat["content"]]} if hashes_in([chat]) else chat
        for chat in chats
    ]


_IMAGE_PARTS: dict[str, str] = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
"""The kinds of image parts, and the key of each that has the image."""


def _part_from_chat(part: Any) -> str | Image:
    if isinstance(part, Image):
        return part
    if isinstance(part, Mapping):
        key = _IMAGE_PARTS.get(str(part.get("type")), "")  # of a list, too
        if isinstance(part.get("text"), str) and not key:
            return str(part["text"])
        image = part.get(key)
        others = part.keys() - {"type", key}
        if isinstance(image, Mapping) and key == "image_url":
            others |= image.keys() - {"url"}
            image = image.get("url")
        if others - {"detail"}:
            raise ConfigError.of("message.content", sorted(others), f"an image part with type and {key} alone")
        if image is not None and (not isinstance(image, str) or image.startswith("data:")):
            return Image.of(image)
    expected = "a string, or a list of text parts and image parts; an image is a data: URL, bytes, a PIL image or Image"
    raise ConfigError.of("message.content", part, expected)


def chat_text(content: Any) -> str:
    """The content of a chat dict as text for people, with ``[image]`` in the place of each image.

    An image of a record has its :attr:`Image.label`.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return "" if content is None else str(content)
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(
        text if isinstance(text, str) else _image_text(part) for text, part in zip(texts, content, strict=True)
    )


def _image_text(part: Any) -> str:
    return image_label(part.get("width"), part.get("height"), part["sha256"]) if _is_record(part) else "[image]"


def _call_from_chat(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError.of("message.tool_calls", call, "an object with a function that has name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    if not isinstance(arguments, Mapping):
        expected = "an object, or an object as JSON text"
        raise ConfigError.of("message.tool_calls.arguments", function["arguments"], expected)
    name, call_id = function.get("name", ""), call.get("id") or ""
    for field, value in (("name", name), ("id", call_id)):
        if not isinstance(value, str):
            raise ConfigError.of(f"message.tool_calls.{field}", value, "a string")
    return ToolCall(name=name, arguments=arguments, id=call_id)


def as_messages(prompt: str | Iterable[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert a prompt to messages: text (one user message), messages, or chat dicts.

    Raises:
        ConfigError: an entry is neither a message nor a chat dict.
    """
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    messages = []
    for entry in prompt:
        if isinstance(entry, Message):
            messages.append(entry)
        elif isinstance(entry, Mapping):
            messages.append(Message.from_chat(entry))
        else:
            raise ConfigError.of("prompt", entry, "a message or a chat dict with role and content")
    return tuple(messages)


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text has; ``None`` if it has none."""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else None


def _metadata(value: Any) -> Any:
    """Metadata as a mapping; some data sets store it as JSON text."""
    if not isinstance(value, str):
        return value
    decoded = json_object(value)
    if decoded is None:
        raise ConfigError.of("Prompt.metadata", value, "a mapping, or an object as JSON text")
    return decoded


def _prompt_value(value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return as_messages(value)
    raise ConfigError.of("Prompt.prompt", value, "a string or a list of messages")


@attrs.frozen
class Prompt:
    """One task: the messages that start an episode, a label and metadata.

    The data buffer sets ``group_index`` when the prompt is taken; the manager sets ``index`` for each rollout.
    """

    prompt: str | tuple[Message, ...] = attrs.field(converter=_prompt_value)
    label: Any = None
    """The reference answer, passed to the reward function; the model never sees it."""
    metadata: Mapping[str, Any] = attrs.field(factory=dict, converter=_metadata)
    """A mapping, or a JSON object as text."""
    group_index: int | None = None
    index: int | None = None
    replacement: int = 0
    """Number of lost rollouts of this index; part of the seed, so that each retry samples other tokens."""
    turn_log: Any = attrs.field(default=None, eq=False, repr=False)
    """The log of the turns of this rollout's episode, a :class:`rollouts.agent.turn_log.TurnLog`. The manager sets it
    for each attempt. The environment does not receive it, and a pickled or deep-copied prompt has none."""
    urgency: Any = attrs.field(default=None, eq=False, repr=False)
    """Returns how many rollouts of the group have finished, -1 for an evaluation. The environment does not receive it,
    and a pickled or deep-copied prompt has the number of that moment."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages; text is one user message."""
        return as_messages(self.prompt)

    @property
    def has_opening(self) -> bool:
        """Whether a message has content; else an environment writes the opening from the metadata."""
        return any(message.text.strip() or message.images or message.tool_calls for message in self.messages)
