"""The plain value types that all other modules use: messages, prompts, sampling parameters, completions, limits.

Invariant: every value is immutable (attrs.frozen, sequences as tuples, token columns as read-only arrays) and validated
when it is created, so no other module validates it again. This module knows no tokenizer, no network and no task.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import io
import operator
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from rollouts.errors import ConfigError
from rollouts.extras import install_command
from rollouts.validators import are_texts, as_texts, check, integer, is_int, is_number, number, seconds

__all__ = [
    "LOGPROB_TOLERANCE",
    "ChatDict",
    "Completion",
    "Content",
    "Endpoint",
    "Extras",
    "Fault",
    "FinishReason",
    "Image",
    "ImageSpan",
    "Limits",
    "LoadImage",
    "LogprobsOf",
    "Message",
    "OnRewrite",
    "Prompt",
    "Role",
    "SamplingParams",
    "StopReason",
    "Tool",
    "ToolCall",
    "VersionSpan",
    "are_logprobs",
    "as_messages",
    "as_record",
    "chat_text",
    "frozen",
    "hashes_in",
    "images_in",
    "is_frozen",
    "json_object",
    "packed_logprobs",
    "packed_tokens",
    "with_images",
    "without_password",
]

ChatDict: TypeAlias = dict[str, Any]
"""A message in the chat format of the OpenAI API and of chat templates."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
TokenColumn: TypeAlias = npt.NDArray[np.int32]
LogprobColumn: TypeAlias = npt.NDArray[np.float32]


# -- columns ----------------------------------------------------------------------------------------------------------


def packed_tokens(values: Iterable[int] | TokenColumn) -> TokenColumn:
    """Pack token ids into a read-only int32 column, shape ``(n,)``."""
    return _packed(values, np.int32)


def packed_logprobs(values: Iterable[float] | LogprobColumn) -> LogprobColumn:
    """Pack logprobs (natural logarithm) into a read-only float32 column, shape ``(n,)``."""
    return _packed(values, np.float32)


LOGPROB_TOLERANCE = 1e-4
"""How far above 0 a logprob may lie because of rounding; a greater one is refused. A logprob within the tolerance is
stored as the server sent it, not clipped to 0, so that the stored value equals the response bit by bit."""


def are_logprobs(values: LogprobColumn) -> npt.NDArray[np.bool_]:
    """Mask of the valid logprobs: finite numbers of at most :data:`LOGPROB_TOLERANCE`."""
    return np.isfinite(values) & (values <= LOGPROB_TOLERANCE)


def _packed(values: Any, dtype: Any) -> npt.NDArray[Any]:
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1:
        own = values.flags.owndata or isinstance(values.base, bytes)
        return values if own and not values.flags.writeable else frozen(values.copy())
    given = np.asarray(values if isinstance(values, Sequence | np.ndarray) else list(values))
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if given.size and given.dtype.kind not in kinds:
        raise ValueError(f"a column of {np.dtype(dtype)} accepts numbers of that kind only, got {given.dtype}")
    column = given.astype(dtype)
    if column.ndim != 1:
        raise ValueError(f"a column has one dimension, got shape {column.shape}")
    if kinds == "iu" and given.size and given.dtype != dtype and not np.array_equal(column, given):
        raise ValueError(f"a token id fits {np.dtype(dtype)}, got {given.min()} to {given.max()}")
    return frozen(column)


Scalar = TypeVar("Scalar", bound=np.generic)


def is_frozen(column: npt.NDArray[Any]) -> bool:
    """Whether a column is immutable: neither it nor the array that it is a view of is writeable."""
    base = column.base
    base_frozen = isinstance(base, bytes | None) or (isinstance(base, np.ndarray) and not base.flags.writeable)
    return base_frozen and not column.flags.writeable


def frozen(column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Make a column read-only, in place, and return it."""
    column.flags.writeable = False
    return column


# -- conversation -----------------------------------------------------------------------------------------------------

_PNG = b"\x89PNG\r\n\x1a\n"
_DATA_URL = "data:image/png;base64,"
_EXIF_ORIENTATION = 0x0112
_MOST_PIXELS = 1 << 26
"""A few bytes can hold an image of any size."""


@attrs.frozen(repr=False)
class Image:
    """An image of a conversation: the bytes of a PNG in RGB with 8 bits a channel.

    There is one form, without loss, so that the processor here and the server decode the same pixels. Images are equal
    if their bytes are. :meth:`of` converts other forms.

    Raises:
        ConfigError: the bytes are no such PNG.
    """

    data: bytes = attrs.field(eq=False)
    sha256: str = attrs.field(init=False)
    """The SHA-256 of the bytes, in hexadecimal digits."""

    def __attrs_post_init__(self) -> None:
        data: Any = self.data
        if not isinstance(data, bytes) or data[:8] != _PNG or data[24:26] != b"\x08\x02":
            raise ConfigError.of(
                "Image.data",
                data[:40] if isinstance(data, bytes) else data,
                "a PNG in RGB with 8 bits a channel; use Image.of",
            )
        object.__setattr__(self, "sha256", hashlib.sha256(data).hexdigest())

    @classmethod
    def of(cls, value: Any) -> Image:
        """Convert an image: bytes of a file, a path, a PIL image, a ``data:`` URL, or an :class:`Image`.

        Bytes of an RGB PNG stay as they are. A file with an EXIF orientation is turned upright, as transformers does
        when it loads one; the pixels of a PIL image stay where they are. Transparency is dropped.

        Raises:
            ConfigError: it is none of these, it cannot be decoded, or Pillow is not installed.
        """
        if isinstance(value, Image):
            return value
        if isinstance(value, str) and value.startswith("data:"):
            return cls.of(_bytes_of_url(value))
        if isinstance(value, str) and "://" in value:
            raise ConfigError.of("image", value[:80], "a data: URL, a path or bytes: no image is downloaded")
        if isinstance(value, str | Path):
            try:
                return cls.of(Path(value).read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError.of("image", str(value)[:200], f"a file with an image ({error})") from error
        return cls(_png_of(value))

    @property
    def width(self) -> int:
        """Pixels in a row."""
        return int(struct.unpack(">I", self.data[16:20])[0])

    @property
    def height(self) -> int:
        """Pixels in a column."""
        return int(struct.unpack(">I", self.data[20:24])[0])

    @property
    def label(self) -> str:
        """The image for people: ``[image 97x61 ab12cd34]``, its size and the start of its hash."""
        return _label(self.width, self.height, self.sha256)

    @property
    def url(self) -> str:
        """The image as a ``data:`` URL."""
        return _DATA_URL + base64.b64encode(self.data).decode()

    def to_pil(self) -> Any:
        """The image as a PIL image in RGB.

        Raises:
            ConfigError: the bytes cannot be decoded, or Pillow is not installed.
        """
        return _decoded(self.data)

    def __repr__(self) -> str:
        return f"<Image {self.width}x{self.height} {self.sha256}>"


def _label(width: Any, height: Any, sha256: str) -> str:
    return f"[image {width}x{height} {sha256[:8]}]"


def _bytes_of_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ConfigError.of("image", url[:80], "a data: URL of an image in base64")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError.of("image", url[:80], f"a data: URL of an image in base64 ({error})") from None


def _pillow() -> Any:
    try:
        import PIL.Image  # slow, and needed only where there are images
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(f"image: Pillow is not installed; {install_command('images')}") from error
    return PIL


def _decoded(data: bytes) -> Any:
    """Decode all pixels; a file that is cut off is refused."""
    pillow = _pillow()
    try:
        image = pillow.Image.open(io.BytesIO(data))
        pixels = image.width * image.height
        if pixels <= _MOST_PIXELS:
            image.load()
    except Exception as error:  # noqa: BLE001 - a decoder of foreign bytes may raise anything
        why = str(error).partition(" <_io.")[0]  # without the address of the buffer
        raise ConfigError.of("image", data[:40], f"an image that Pillow decodes ({why})") from None
    if pixels > _MOST_PIXELS:
        raise ConfigError.of("image", f"{image.width}x{image.height} pixels", f"at most {_MOST_PIXELS:,} pixels")
    return image


def _png_of(value: Any) -> bytes:
    """The bytes of an RGB PNG with the pixels of an image file or a PIL image."""
    pillow = _pillow()
    image = value
    if isinstance(value, bytes | bytearray):
        image = _decoded(bytes(value))
        upright = image.getexif().get(_EXIF_ORIENTATION, 1) == 1
        if image.format == "PNG" and image.mode == "RGB" and upright and "transparency" not in image.info:
            return bytes(value)
        image = image if upright else pillow.ImageOps.exif_transpose(image)
    elif not isinstance(value, pillow.Image.Image):
        raise ConfigError.of("image", value, "bytes of an image file, a path, a PIL image or a data: URL")
    out = io.BytesIO()
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # the same colours; Pillow warns of the direct way
    (image if image.mode == "RGB" else image.convert("RGB")).save(out, format="PNG")
    return out.getvalue()


@attrs.frozen
class ImageSpan:
    """An image of a token sequence: its placeholder ids are positions ``start`` to ``stop`` (half open)."""

    image: Image
    start: int
    stop: int

    def shifted(self, by: int) -> ImageSpan:
        """The span in a sequence with ``by`` more ids before it."""
        return ImageSpan(self.image, self.start + by, self.stop + by)


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

    ``arguments`` are those of the text, never repaired. A malformed call has ``error`` set and its text in ``raw``; it
    is answered with an error message to the model instead of being executed.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    id: str = ""
    """Unique within one rollout; assigned by the agent loop if the dialect has no ids."""
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
    if not isinstance(value, Mapping):
        return False
    return value.get("type", "object") == "object" and isinstance(value.get("properties", {}), Mapping)


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
            ConfigError: it has no name, or the parameters are no JSON schema of an object.
        """
        function = chat.get("function", chat) if isinstance(chat, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError.of("tool", chat, "an object with a function that has a name")
        given = {name: function[name] for name in ("description", "parameters") if function.get(name) is not None}
        whole = chat if "function" in chat else {"type": "function", "function": dict(function)}
        return cls(function.get("name", ""), **given, chat=dict(whole))


def _calls(calls: Iterable[ToolCall]) -> Sequence[ToolCall]:
    return tuple(calls)


_ROLES = get_args(Role)
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields in which servers and data sets have the text of the thinking block."""


def _content(value: str | Sequence[str | Image]) -> Content:
    """Content in its one form: a sequence without images is joined, and empty texts are dropped."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        return value  # type: ignore[return-value]  # refused when the message is created
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
        if not isinstance(self.content, str) and not _are_parts(self.content):
            raise ConfigError.of("Message.content", self.content, "a string, or a sequence of strings and Images")
        for name in ("tool_call_id", "name", "reasoning"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ConfigError.of(f"Message.{name}", text, "a string")

    @property
    def text(self) -> str:
        """The text of the content, without its images."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the content, in their order."""
        if isinstance(self.content, str):
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
        """The message with each of its texts changed; itself if no text changes."""
        if isinstance(self.content, str):
            text = change(self.content)
            return self if text is self.content else attrs.evolve(self, content=text)
        parts = tuple(change(part) if isinstance(part, str) else part for part in self.content)
        return self if all(map(operator.is_, parts, self.content)) else attrs.evolve(self, content=parts)

    def to_chat(self) -> ChatDict:
        """The message in chat format, images as ``image_url`` parts with ``data:`` URLs; absent fields are left out."""
        content = self.content if isinstance(self.content, str) else [_part_to_chat(part) for part in self.content]
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
        if not self.images:
            return self.to_chat()
        return {**attrs.evolve(self, content="").to_chat(), "content": [_part_to_record(part) for part in self.content]}

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any]) -> Message:
        """Read a chat dict. Content is a string or a list of parts; arguments are an object or its JSON text.

        A part is a text, or an image in the form of the OpenAI API (``image_url``, ``input_image``) or of transformers
        (``{"type": "image", "image": ...}``). A string that stands for an image must be a ``data:`` URL: a path in the
        data of others would read files of this machine. ``Image.of(path)`` reads one.

        The role ``developer`` is read as ``system``: most templates leave out or refuse the other name.

        Raises:
            ConfigError: an unknown role, content of another kind, or arguments that are no object.
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
    """The images of a message or of a chat dict, without those that are named by their hashes."""
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


_IMAGE_PARTS: dict[Any, str] = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
"""The kinds of image parts, and the key of each that has the image."""


def _part_from_chat(part: Any) -> str | Image:
    if isinstance(part, Image):
        return part
    if isinstance(part, Mapping):
        key = _IMAGE_PARTS.get(part.get("type"), "")
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
    if not _is_record(part):
        return "[image]"
    return _label(part.get("width"), part.get("height"), part["sha256"])


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
    """How many rollouts of this index were lost before; part of the seed, so that each retry samples other tokens."""
    turn_log: Any = attrs.field(default=None, eq=False, repr=False)
    """Where the episode of this rollout logs its turns, a :class:`rollouts.agent.turn_log.TurnLog`. The manager sets it
    for each attempt. The environment does not receive it, and a pickled or deep-copied prompt has none."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages; text is one user message."""
        return as_messages(self.prompt)


# -- inference --------------------------------------------------------------------------------------------------------


class StopReason(enum.StrEnum):
    """Why a rollout ended."""

    TASK_COMPLETED = "task_completed"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """The episode used all turns that the limits allow."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """A reply has more tool calls than the limits of a reply or an episode allow; those calls did not run."""
    MAX_TOKENS = "max_tokens"
    """A reply, the sequence or the episode reached its token budget."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The sequence no longer fits the model's context."""
    DEADLINE = "deadline"
    """The episode reached its wall-time limit."""
    FORKED = "forked"
    """The template rewrites this history for the next turn; the episode continues in the next branch."""
    ABORTED = "aborted"
    """The server or the caller aborted a reply; the partial tokens are stored."""
    FAILED = "failed"
    """The environment or the endpoint failed; the failure is stored with the tokens."""


FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why one completion ended: the model stopped, it reached its token budget, or the request was aborted."""

_FINISH_REASONS = get_args(FinishReason)

LogprobsOf: TypeAlias = Literal["raw", "tempered", "processed"]
"""The distribution that a logprob is of. ``raw``: that of the weights. ``tempered``: after temperature and penalties,
before top-k, top-p and min-p; a greedy token has that of temperature 1. ``processed``: after all of them, the one that
the token was drawn from."""
_LOGPROBS_OF = get_args(LogprobsOf)

OnRewrite: TypeAlias = Literal["append", "fork", "error"]
"""The policy for a chat template that rewrites the history, i.e. renders it otherwise than the model has seen it
(thoughts stripped, tools moved): ``append`` keeps the ids; ``fork`` opens a new branch with the rewritten history;
``error`` fails the rollout. ``fork`` and ``error`` render the whole conversation after each turn to detect this."""

Concurrency: TypeAlias = int | Literal["adaptive"] | None
"""Number of concurrent requests a server: see :class:`Endpoint`."""


@attrs.frozen
class VersionSpan:
    """The policy version that sampled the tokens ``start`` to ``stop`` (half open)."""

    version: str
    start: int
    stop: int


@attrs.frozen
class SamplingParams:
    """Sampling parameters. The defaults sample from the full distribution, so that logprobs are the policy's own.

    With ``top_p`` below 1 or ``top_k`` set, SGLang reports the logprob of the untruncated distribution, as vLLM
    does in its raw mode. For a vLLM server whose logprobs would be of another distribution they are refused.
    """

    temperature: float = attrs.field(default=1.0, validator=number(least=0))
    top_p: float = attrs.field(
        default=1.0, validator=check("a number in (0, 1]", lambda v: is_number(v) and 0 < v <= 1)
    )
    top_k: int = attrs.field(
        default=-1, validator=check("-1 or an integer >= 1", lambda v: is_int(v) and (v == -1 or v >= 1))
    )
    min_p: float = attrs.field(
        default=0.0, validator=check("a number in [0, 1]", lambda v: is_number(v) and 0 <= v <= 1)
    )
    max_new_tokens: int = attrs.field(default=1024, validator=integer(1))
    """Budget of one reply, in tokens."""
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=as_texts,
        validator=check("a string or several, at most 32", lambda v: are_texts(v) and len(v) <= 32),
    )
    """Stop strings; their tokens stay in the reply. Servers accept 32."""
    seed: int | None = attrs.field(default=None, validator=check("an integer", is_int, optional=True))
    min_new_tokens: int = attrs.field(default=0, validator=integer(0))
    repetition_penalty: float = attrs.field(
        default=1.0, validator=check("a number in (0, 2]", lambda v: is_number(v) and 0 < v <= 2)
    )
    """Logprobs are those of the penalised distribution."""


def without_password(text: str) -> str:
    """A text for printing: user names and passwords in its URLs are removed."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _printed_urls(urls: Any) -> str:
    return without_password(repr(urls))


def _check_urls(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not (are_texts(value) and value and all(url.startswith(("http://", "https://")) for url in value)):
        shown = tuple(map(without_password, value)) if are_texts(value) else value
        raise ConfigError.of("Endpoint.base_url", shown, "one or more URLs that start with http:// or https://")


def _urls(value: Any) -> Any:
    urls = as_texts(value)
    return tuple(url.rstrip("/") for url in urls) if are_texts(urls) else urls


@attrs.frozen
class Endpoint:
    """An inference endpoint: its address, its sampling parameters, its timeouts.

    Args:
        provider: the server's protocol: ``"sglang"`` or ``"vllm"``.
        model: name or folder of the model; also the default source of the tokenizer.
        base_url: one URL, or the URLs of several servers of the same model.
        api_key: sent as a bearer token; never printed.
        admin_key: sent instead with aborts and weight updates, to servers with ``--admin-api-key``; never printed.
    """

    provider: str = attrs.field(
        default="sglang", validator=check('"sglang" or "vllm"', lambda v: v in ("sglang", "vllm"))
    )
    model: str = attrs.field(
        default="default", validator=check("a non-empty string", lambda v: isinstance(v, str) and bool(v))
    )
    base_url: tuple[str, ...] = attrs.field(
        default="http://127.0.0.1:30000",
        converter=_urls,
        validator=_check_urls,
        repr=_printed_urls,
    )
    api_key: str | None = attrs.field(default=None, repr=False)
    admin_key: str | None = attrs.field(default=None, repr=False)
    sampling: SamplingParams = attrs.field(
        factory=SamplingParams, validator=attrs.validators.instance_of(SamplingParams)
    )
    connect_seconds: float = attrs.field(default=5.0, validator=seconds(above=0))
    request_seconds: float = attrs.field(default=600.0, validator=seconds(above=0))
    """Deadline of one completion, from sending the request to the last byte of the response."""
    max_retries: int = attrs.field(default=5, validator=integer(0))
    """Retries of a request that failed at a running server (lost connection, 5xx except 503)."""
    outage_seconds: float = attrs.field(default=1800.0, validator=seconds(least=0))
    """How long requests wait for servers that are down, restarting or overloaded, before the run ends and returns its
    prompts. Deadlines stand still meanwhile. The default is enough to load a model of 70 billion parameters, 140 GB, at
    80 MB/s. A server that has never answered is not waited for."""
    concurrency: Concurrency = attrs.field(
        default=None,
        validator=check('an integer >= 1, "adaptive" or None', lambda v: v in (None, "adaptive") or is_int(v, 1)),
    )
    """Concurrent requests for each server; further ones wait in the client. ``"adaptive"``: as many as the server runs
    without queueing or running out of KV cache, as its load report says. ``None``: no limit."""

    def __attrs_post_init__(self) -> None:
        for name, key in (("api_key", self.api_key), ("admin_key", self.admin_key)):
            if key and any(url != without_password(url) for url in self.base_url):
                expected = "none where a URL has a user name or a password: a request carries one of them"
                raise ConfigError.of(f"Endpoint.{name}", "(not shown)", expected)


@attrs.frozen(eq=False)
class Extras:
    """What a server reports about a completion beyond its tokens and logprobs, where the caller asks for it.

    It stays in memory with the completion; no run folder contains it.

    Raises:
        ValueError: the sets of ``top_p_ids`` do not add up.
    """

    requests: tuple[Mapping[str, float], ...] = ()
    """For each request: ``ended`` (Unix time), ``seconds``, counts of tokens, and the numbers of the server."""
    experts: TokenColumn | None = None
    """Routed experts of consecutive positions, shape ``(n, layers * top_k)``. The last sampled token has none: it has
    not been routed yet."""
    experts_start: int = 0
    """Position of the first row of ``experts``."""
    top_p_ids: TokenColumn | None = None
    """The ids that ``top_p`` kept, token after token, in one column."""
    top_p_counts: TokenColumn | None = None
    """How many of them each sampled token has, as long as the completion."""

    def __attrs_post_init__(self) -> None:
        ids = 0 if self.top_p_ids is None else len(self.top_p_ids)
        counts = np.empty(0, np.int32) if self.top_p_counts is None else self.top_p_counts
        if int(counts.sum()) != ids or (counts < 0).any():
            raise ValueError(f"the sets of top_p have {ids} ids; expected {int(counts.sum())}, the sum of their sizes")

    @classmethod
    def joined(cls, parts: Sequence[Extras]) -> Extras:
        """The extras of consecutive completions of one sequence.

        The rows of a position are those of the part that had it first: a later part computed them again, perhaps with
        other weights.

        Raises:
            ValueError: the rows of a part begin after the last ones.
        """
        start: int | None = None
        rows: list[TokenColumn] = []
        held = 0
        for part in parts:
            if part.experts is None:
                continue
            if start is None:
                start = held = part.experts_start
            if part.experts_start > held:
                raise ValueError(f"routed experts from position {part.experts_start} on; expected {held} or less")
            new = part.experts[held - part.experts_start :]
            rows.append(new)
            held += len(new)
        ids = [part.top_p_ids for part in parts if part.top_p_ids is not None]
        counts = [part.top_p_counts for part in parts if part.top_p_counts is not None]
        return cls(
            requests=tuple(request for part in parts for request in part.requests),
            experts=None if start is None else np.concatenate(rows),
            experts_start=start or 0,
            top_p_ids=np.concatenate(ids) if ids else None,
            top_p_counts=np.concatenate(counts) if counts else None,
        )


@attrs.frozen
class Completion:
    """The result of one request to the policy: exactly the tokens that it sampled.

    Raises:
        ValueError: the columns differ in length, a logprob is not finite or is above 0, or the versions do not cover
            the tokens.
    """

    tokens: TokenColumn = attrs.field(converter=packed_tokens, eq=attrs.cmp_using(eq=np.array_equal))
    """Sampled ids, shape ``(n,)``, including the stop id if one was sampled."""
    logprobs: LogprobColumn = attrs.field(converter=packed_logprobs, eq=attrs.cmp_using(eq=np.array_equal))
    """Natural-log probability of each sampled id, shape ``(n,)``."""
    finish_reason: FinishReason = attrs.field(
        validator=check(f"one of {_FINISH_REASONS}", lambda v: v in _FINISH_REASONS)
    )
    versions: Sequence[VersionSpan]
    """The policy versions of the tokens; they cover ``0..n`` without gap or overlap."""
    prompt_tokens: int
    """Number of prompt ids that the server reports."""
    prompt_digest: int
    """CRC-32 of the ids that were sent, as little-endian int32; it links a stored sequence to the real request."""
    request_id: str
    cached_tokens: int = 0
    """Number of prompt ids that the server read from its prefix cache."""
    seconds: float = 0.0
    """Wall time of the request, retries included."""
    waited: float = 0.0
    """Seconds of it before the request that was answered was sent: no free slot, earlier attempts, an outage."""
    server: str = ""
    """URL of the server that answered."""
    extras: Extras | None = attrs.field(default=None, eq=False, repr=False)
    """Further columns and numbers; ``None`` unless the caller asked for them."""
    logprobs_of: LogprobsOf | None = attrs.field(
        default=None, validator=check(f"one of {_LOGPROBS_OF}", lambda v: v in _LOGPROBS_OF, optional=True)
    )
    """The distribution of the logprobs; ``None`` if the policy does not say."""

    def __attrs_post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} sampled tokens came with {len(self.logprobs)} logprobs")
        if np.count_nonzero(are_logprobs(self.logprobs)) < len(self.logprobs):
            raise ValueError("a sampled token came without a finite logprob <= 0")
        position = 0
        for span in self.versions:
            if span.start != position or span.stop <= span.start:
                raise ValueError(f"version spans must follow each other from 0, got {self.versions}")
            position = span.stop
        if position != len(self.tokens):
            raise ValueError(f"version spans cover {position} of {len(self.tokens)} sampled tokens")


MAX_MESSAGE_BYTES = 64 * 1024
"""Default of ``Limits.max_message_bytes``."""


@attrs.frozen
class Limits:
    """When an episode ends. Counts end it before useless work; seconds are deadlines in wall time."""

    max_turns: int = attrs.field(default=10, validator=integer(1))
    """Replies of one episode."""
    max_tokens: int | None = attrs.field(default=None, validator=integer(2, optional=True))
    """Tokens of one sequence, prompt included. The context length that the server reports applies as well."""
    max_sampled_tokens: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Sampled tokens of one episode, all turns and branches together; the limit of a turn is ``max_new_tokens``."""
    max_tool_calls: int | None = attrs.field(default=None, validator=integer(0, optional=True))
    """Tool calls of one episode. A reply that exceeds it is stored, and none of its calls runs."""
    max_parallel_calls: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Tool calls of one reply. A reply with more is stored, and none of its calls runs. If the chat template has one
    call a turn, the limit is 1."""
    on_cut: Literal["stop", "continue"] = attrs.field(
        default="stop", validator=check('"stop" or "continue"', lambda v: v in ("stop", "continue"))
    )
    """After a reply cut by ``max_new_tokens``: end the episode, or pass the cut reply to the environment."""
    last_calls: Literal["skip", "run"] = attrs.field(
        default="skip", validator=check('"skip" or "run"', lambda v: v in ("skip", "run"))
    )
    """The tool calls of the last turn: skip them, or run them for their reward; no reply can use their results."""
    step_seconds: float = attrs.field(default=120.0, validator=seconds(above=0))
    """Deadline of each start, step, snapshot and restore of the environment."""
    max_message_bytes: int = attrs.field(default=MAX_MESSAGE_BYTES, validator=integer(1))
    """UTF-8 bytes of one message of a step. A longer one is cut, ends with a note that says so to the model, and is
    counted in ``metrics["truncated_messages"]``."""
    close_seconds: float = attrs.field(default=30.0, validator=seconds(above=0))
    episode_seconds: float = attrs.field(default=3600.0, validator=seconds(above=0))
