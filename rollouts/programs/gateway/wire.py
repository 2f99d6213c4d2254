"""The common part of the three wire formats: their protocol, the checked fields of a request, the bytes of an event.

Invariant: a field of a wrong type is refused by its path and value. Encoded JSON has no character that a client could
take for the end of a line. This module knows none of the formats, and does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar, cast

import attrs
import msgspec

from rollouts.dtypes import Content, Image, Message, Tool, ToolCall, json_object
from rollouts.errors import ConfigError
from rollouts.programs.gateway.normal import joined
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, ErrorKind, Sampled

__all__ = [
    "SAMPLING",
    "STATUS",
    "Counts",
    "Entries",
    "Fields",
    "Joined",
    "Reading",
    "ReplyOf",
    "Wire",
    "arguments_text",
    "call_of",
    "content_of",
    "count_others",
    "decoded_body",
    "encoded",
    "event",
    "image_of",
    "logprobs_of",
    "no_reply",
    "offered",
    "only_text",
    "sampling_of",
    "shown_part",
    "stops",
    "strict_names",
    "text_of",
    "tool_of",
]

Counts: TypeAlias = Counter[str]
ReplyOf: TypeAlias = Callable[[str], CallReply | None]
"""The reply of the session that has an id; ``None`` if it has none."""

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS = ("top_k", "seed")
SAMPLING = (*_NUMBERS, *_INTEGERS, "logit_bias")
"""Fields that choose how to sample; the parameters of the run replace them."""
_MOST_UNKNOWN = 32
"""Unknown fields of one request that are counted by name."""


STATUS: Mapping[ErrorKind, int] = {
    "invalid_request": 400,
    "overflow": 400,
    "authentication": 401,
    "not_found": 404,
    "conflict": 409,
    "timeout": 408,
    "too_large": 413,
    "media_type": 415,
    "upgrade": 426,
    "rate_limit": 429,
    "server": 500,
}
"""The HTTP status of each kind of error."""


def no_reply(reply_id: str) -> CallReply | None:
    """The :data:`ReplyOf` of a session without replies."""
    return None


class Wire(Protocol):
    """One wire format. The modules ``chat``, ``responses`` and ``messages`` are the implementations."""

    PING: bytes
    """Bytes that keep a silent stream open."""
    HISTORY: str
    """The field of a request with the list of its history."""
    FIELDS: tuple[str, ...]
    """All fields of a request whose values are read."""
    NO_EFFECT: tuple[str, ...]
    """Further fields of a request, which change neither the prompt nor the replies."""

    def read(self, body: Any, reply_of: ReplyOf = ..., entries: Entries | None = ..., /) -> CallRequest:
        """Read the decoded JSON of a request.

        Args:
            body: as from :func:`decoded_body` with ``HISTORY`` and ``FIELDS``, or decoded as a whole.
            reply_of: finds earlier replies of the session.
            entries: what was read of earlier requests of the session.

        Raises:
            ApiError: a field is not as the format says; the message names it.
        """

    def answer(self, request: CallRequest, replies: Sequence[CallReply], /) -> dict[str, Any]:
        """The JSON of an answer without stream."""

    def events(self, request: CallRequest, replies: Sequence[CallReply], /) -> list[bytes]:
        """All events of an answer as a stream."""

    def error(self, error: ApiError, /) -> tuple[int, dict[str, Any]]:
        """The status and JSON of an error."""

    def error_event(self, request: CallRequest, error: ApiError, /) -> bytes:
        """The event of an error, after the head of the stream was sent."""


# -- fields -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Fields:
    """A JSON object of a request, and its path in the body."""

    value: Mapping[str, Any]
    path: str = ""
    no_images: str = ""
    """Why an image in it is refused; empty if images are taken."""

    @classmethod
    def of(cls, value: Any, path: str = "", no_images: str = "") -> Fields:
        """Check that a value is an object."""
        if type(value) is not dict and not isinstance(value, Mapping):
            raise ApiError("invalid_request", str(ConfigError.of(path or "body", value, "a JSON object")))
        return cls(value, path, no_images)

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, expected: str) -> ApiError:
        """The error of a field: its path, its value and what was expected."""
        value = self.value.get(name)
        shown = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
        return ApiError("invalid_request", str(ConfigError.of(self.at(name), shown, expected)))

    def text(self, name: str) -> str | None:
        """A string; ``None`` if the field is absent or ``null``."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def required(self, name: str) -> str:
        """A string that must be there."""
        value = self.text(name)
        if value is None:
            raise self.wrong(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; false if the field is absent or ``null``."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def positive(self, name: str) -> int | None:
        """An integer of at least 1; ``None`` if the field is absent or ``null``."""
        value = self.value.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self.wrong(name, "an integer of at least 1")
        return value

    def object(self, name: str) -> Fields | None:
        """An object; ``None`` if the field is absent or ``null``."""
        value = self.value.get(name)
        return None if value is None else Fields.of(value, self.at(name), self.no_images)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty if the field is absent or ``null``."""
        value = self.value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, "a list of objects")
        path = self.at(name)
        return [Fields.of(entry, f"{path}[{index}]", self.no_images) for index, entry in enumerate(value)]


def content_of(fields: Fields, name: str, part: Callable[[Fields], Content]) -> Content:
    """The content of a field that is a string, ``null``, or a list of parts, which are joined."""
    value = fields.value.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fields.wrong(name, "a string or a list of parts")
    return joined(map(part, fields.objects(name)))


def text_of(fields: Fields, name: str, part: Callable[[Fields], Content]) -> str:
    """As :func:`content_of`, of a field that takes text only."""
    content = content_of(fields, name, lambda each: only_text(each, part(each)))
    assert isinstance(content, str), "joined from texts"
    return content


def only_text(fields: Fields, content: Content) -> str:
    """The content of a part that must be text."""
    if not isinstance(content, str):
        raise fields.wrong("type", "text; images belong to messages of the user and to results of tools")
    return content


_IMAGES: weakref.WeakValueDictionary[bytes, Image] = weakref.WeakValueDictionary()
"""Images in use, by the hash of their URL: a request has its whole history, and each image of it is decoded once."""


def image_of(fields: Fields, name: str, url: str) -> Image:
    """The image of a ``data:`` URL, which the field has or stands for.

    Raises:
        ApiError: it is another URL, or cannot be decoded, or the model takes no images: then it is not decoded.
    """
    if fields.no_images:
        raise ApiError("invalid_request", f"{fields.at(name)}: {fields.no_images}", counted="image")
    if not url.startswith("data:"):
        raise fields.wrong(name, "a data: URL of an image in base64; this server fetches no image")
    key = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    image = _IMAGES.get(key)
    if image is None:
        try:
            image = _IMAGES[key] = Image.of(url)
        except ConfigError as error:
            raise ApiError("invalid_request", f"{fields.at(name)}: {error}") from None
    return image


def shown_part(fields: Fields, counts: Counts, *, texts: Collection[str], image: str, media: Mapping[str, str]) -> str:
    """The text of a part of a message that is not an image: its own, or ``[audio]`` for a medium, which is counted.

    Args:
        texts: the types of parts with text.
        image: the type of an image, which the error names.
        media: the types of media that no model here takes, and their names.

    Raises:
        ApiError: the part has another type, or no text.
    """
    kind = fields.text("type")
    if kind in texts:
        return fields.required("text")
    if kind == "refusal":
        return fields.required("refusal")
    if kind is not None and kind in media:
        counts[media[kind]] += 1
        return f"[{media[kind]}]"
    raise fields.wrong("type", f"one of {(*texts, 'refusal', image, *media)}")


def call_of(name: str, arguments: Any, call_id: str) -> ToolCall:
    """A call that a program sends back. Arguments that are not an object are kept as text of a malformed call."""
    if arguments is None or arguments == "":
        return ToolCall(name, {}, call_id)
    if isinstance(arguments, Mapping):
        return ToolCall(name, dict(arguments), call_id)
    text = arguments if isinstance(arguments, str) else encoded(arguments).decode()
    decoded = json_object(text)
    if decoded is not None:
        return ToolCall(name, decoded, call_id)
    return ToolCall(name, {}, call_id, raw=text, error="The arguments are not a JSON object.", fault="not_json")


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as JSON text; the raw text of a call that is malformed or nested too deeply to encode."""
    try:
        return call.raw if call.error is not None else encoded(call.arguments).decode()
    except RecursionError:
        return call.raw


_LONGEST_NAME = 256
"""Characters of a tool's name, of which the test of a set of tools writes many."""


def tool_of(fields: Fields, schema: str, counts: Counts) -> tuple[Tool, bool]:
    """A tool from an object with name, description and a schema in the field of this name, and whether it is strict."""
    if fields.value.get("defer_loading") is True:
        counts["not_enforced/defer_loading"] += 1
    name = fields.required("name")
    if len(name) > _LONGEST_NAME:
        raise fields.wrong("name", f"at most {_LONGEST_NAME} characters")
    parameters = fields.object(schema)
    given = {} if parameters is None else {"parameters": dict(parameters.value)}
    try:
        return Tool(name, fields.text("description") or "", **given), fields.value.get("strict") is True
    except ConfigError as error:
        raise ApiError("invalid_request", f"{fields.path}: {error}") from None


def strict_names(tools: Sequence[tuple[Tool, bool]]) -> frozenset[str]:
    """The names of the strict ones among tools of :func:`tool_of`."""
    return frozenset(tool.name for tool, strict in tools if strict)


def offered(fields: Fields, tools: Sequence[tuple[Tool, bool]], counts: Counts) -> tuple[Tool, ...]:
    """The tools that the model may call: none if ``tool_choice`` says so; a choice that forces a call is counted."""
    choice = fields.value.get("tool_choice")
    if choice == "none":
        return ()
    if choice not in (None, "auto"):
        if not isinstance(choice, str | dict):
            raise fields.wrong("tool_choice", "a string or an object")
        counts["not_enforced/tool_choice"] += 1
    return tuple(tool for tool, _ in tools)


def stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Stop strings: one string or a list."""
    value = fields.value.get(name)
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise fields.wrong(name, "a non-empty string, or a list of them")
    return tuple(texts)


def sampling_of(fields: Fields) -> dict[str, Any]:
    """The sampling parameters of a request, which the parameters of the run replace."""
    if fields.value.keys().isdisjoint(SAMPLING):
        return {}
    given = {name: fields.value[name] for name in SAMPLING if fields.value.get(name) is not None}
    for name, value in given.items():
        if name == "logit_bias":
            fields.object(name)
        elif isinstance(value, bool) or not isinstance(value, int | float if name in _NUMBERS else int):
            raise fields.wrong(name, "a number" if name in _NUMBERS else "an integer")
    return given


def count_others(
    fields: Fields,
    counts: Counts,
    *,
    read: Collection[str],
    not_enforced: Mapping[str, Sequence[Any]],
    no_effect: Collection[str],
) -> None:
    """Count the fields of a request that are not honoured, and the unknown ones.

    Args:
        fields: the body.
        counts: gets ``not_enforced/NAME`` and ``unknown_field/NAME``.
        read: the fields that are read elsewhere.
        not_enforced: fields that would change the prompt or the replies, with the values that change nothing.
        no_effect: fields that would not: of accounts, of prices, of caches.
    """
    unknown = 0
    for name, value in fields.value.items():
        if name in read or name in no_effect or value is None or value == _NULL:
            continue
        if name in not_enforced:
            if value not in not_enforced[name]:
                counts[f"not_enforced/{name}"] += 1
        elif unknown < _MOST_UNKNOWN:
            unknown += 1
            counts[f"unknown_field/{name[:64]}"] += 1


_NULL = msgspec.Raw(b"null")


def logprobs_of(sampled: Sampled, places: slice = slice(None)) -> list[dict[str, Any]]:
    """The logprobs of sampled ids in the form of OpenAI's APIs; no policy says those of other ids."""
    return [
        {
            "token": text,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "logprob": logprob,
            "top_logprobs": [],
        }
        for text, logprob in zip(sampled.texts[places], sampled.logprobs[places], strict=True)
    ]


class Reading(Protocol):
    """The result of the entries of a list, which it takes one after the other."""

    def take(self, entry: Any, path: str, /) -> None:
        """Add an entry, which has this path in the body."""

    def copy(self) -> Self:
        """A separate reading that continues from here."""


ReadingT = TypeVar("ReadingT", bound=Reading)


@attrs.define
class Joined:
    """The reading of entries that are lists of parts: all parts in one list."""

    parts: list[Any] = attrs.field(factory=list)

    def take(self, entry: Sequence[Any], path: str) -> None:
        """Add the parts of an entry."""
        self.parts += entry

    def copy(self) -> Joined:
        """See :class:`Reading`."""
        return Joined([*self.parts])


@attrs.frozen(eq=False)
class _Beginning:
    """The beginning of a list of an earlier request."""

    text: bytes
    """Its JSON, up to the start of an entry."""
    length: int
    """Number of entries before that."""
    reading: Reading
    counts: Counts
    """Both of these entries."""


class Entries:
    """The lists of requests as they were read, so that a request costs only its new entries.

    Programs send their whole history with each request. A list that begins as one of the latest requests is read from
    some entries before its end on: programs change these from one request to the next. In the rest, an entry with
    the JSON of an earlier entry is not read again: it is found by a hash of 64 bits, of this process only. One object
    serves one session and one wire format.

    Args:
        most: the number of entries that are kept; where a session has more, all are read again.
        lists: the number of lists of each name whose beginnings are kept, with their JSON.
        no_images: why images are refused; empty if they are taken.
    """

    def __init__(self, most: int = 1 << 14, lists: int = 4, no_images: str = "") -> None:
        self.no_images = no_images
        self._most, self._lists = most, lists
        self._read: dict[int, tuple[Any, Counts]] = {}
        self._beginnings: dict[str, list[_Beginning]] = {}
        """By the name of the field, the latest one last."""
        self._systems: dict[str, Message] = {}

    def system(self, text: str) -> Message:
        """A system message; the message of an earlier request if that has the same text."""
        if len(self._systems) >= self._most:
            self._systems.clear()
        return self._systems.setdefault(text, Message("system", text))

    def unread(self, body: Any, name: str) -> bytes:
        """The JSON of the list in a field that was not read with an earlier one; empty if the field has no raw list."""
        value = body.get(name) if isinstance(body, Mapping) else None
        if not isinstance(value, msgspec.Raw):
            return b""
        text = bytes(value)
        return text[len(self._beginning_of(name, text).text) :]

    def into(
        self,
        reading: ReadingT,
        fields: Fields,
        name: str,
        read: Callable[[Fields, Counts], Any],
        counts: Counts,
    ) -> ReadingT:
        """Return ``reading``, or a copy of an earlier one, with each object of a list; none if the field is absent.

        Args:
            reading: an empty one.
            fields: the body; a list that is raw JSON is looked up, and decoded where it is new.
            name: the field with the list.
            read: makes an entry of an object; depends on the object alone, and not on its place.
            counts: gets the counts of ``read``, also where it is not called.
        """
        value = fields.value.get(name)
        if isinstance(value, msgspec.Raw):
            return self._into(reading, fields, name, bytes(value), read, counts)
        for entry in fields.objects(name):
            reading.take(read(entry, counts), entry.path)
        return reading

    def _into(
        self,
        reading: ReadingT,
        fields: Fields,
        name: str,
        text: bytes,
        read: Callable[[Fields, Counts], Any],
        counts: Counts,
    ) -> ReadingT:
        known = self._beginning_of(name, text)
        own = known.counts
        if known.length:
            reading = cast(ReadingT, known.reading.copy())
        raws = _LIST.decode(b"[" + text[len(known.text) :])
        last, field = len(raws) - _CHANGED, fields.at(name)
        for place, raw in enumerate(raws):
            if place == last > 0:
                before = _before(text, raws[place:])
                self._keep(name, known, _Beginning(before, known.length + place, reading.copy(), own))
            key, path = hash((name, bytes(raw))), f"{field}[{known.length + place}]"
            entry = self._read.get(key)
            if entry is None:
                found = Counts()
                entry = read(Fields.of(msgspec.json.decode(raw), path, fields.no_images), found), found
                if len(self._read) >= self._most:
                    self._read.clear()
                self._read[key] = entry
            reading.take(entry[0], path)
            if entry[1]:
                own = Counts(own)  # the beginning keeps its counts
                own.update(entry[1])
        if own:
            counts.update(own)
        return reading

    def _beginning_of(self, name: str, text: bytes) -> _Beginning:
        beginnings = self._beginnings.get(name, ())
        return next((one for one in reversed(beginnings) if text.startswith(one.text)), _NOTHING)

    def _keep(self, name: str, known: _Beginning, new: _Beginning) -> None:
        """Keep a beginning in place of the beginning that it extends."""
        others = [one for one in self._beginnings.get(name, ()) if one is not known]
        self._beginnings[name] = [*others, new][-self._lists :]


_CHANGED = 4
"""Entries at the end of a history that the next request may change: programs move the marks of their caches."""
_NOTHING = _Beginning(b"[", 0, Joined(), Counts())


def _before(text: bytes, last: Sequence[msgspec.Raw]) -> bytes:
    """The JSON of a list up to the start of the first of its last entries."""
    stop = len(text)
    for raw in reversed(last):
        stop = text.rindex(bytes(raw), 0, stop)  # behind an entry are only separators
    return text[:stop]


def decoded_body(body: bytes, history: str, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """A body of JSON, in which the lists ``history`` and ``tools`` stay raw, and the fields without ``names`` too.

    Args:
        body: the bytes of a request.
        history: the name of the field with the history.
        names: the other fields whose values are read. The rest is checked to be JSON, and no object is made of it.

    Raises:
        msgspec.DecodeError: it is not JSON.
        ApiError: it is not an object, or has too many values.
    """
    _check_values(body)
    try:
        raws = _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError("invalid_request", f"body: got {len(body)} bytes; expected a JSON object ({error})") from None
    lists = history, "tools"
    return {
        name: _value_of(raw, is_list=name in lists) if name in lists or name in names else raw
        for name, raw in raws.items()
    }


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _value_of(raw: msgspec.Raw, *, is_list: bool) -> Any:
    if is_list and bytes(memoryview(raw)[:1]) == b"[":
        return raw
    return msgspec.json.decode(raw)


_MOST_VALUES = 1 << 18
"""Values of one body. Each is an object here and 3 tokens or more of a prompt; a byte of JSON can be 50 in objects."""


def _check_values(body: bytes) -> None:
    """Refuse a body with too many values, before any of them is decoded.

    A long text has many commas and brackets, so that a body that seems to have too many is counted without its strings.
    """
    if len(body) <= 2 * _MOST_VALUES or _separators(body) <= _MOST_VALUES:
        return
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    many = text.count(b'"') > 2 * _MOST_VALUES
    if many or _separators(b"".join(text.split(b'"')[::2])) > _MOST_VALUES:
        raise ApiError("too_large", f"body: got {len(body)} bytes; expected at most {_MOST_VALUES} values of JSON")


def _separators(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


_LIST = msgspec.json.Decoder(list[msgspec.Raw])


# -- bytes ------------------------------------------------------------------------------------------------------------

_LINE_ENDS = (("\u0085".encode(), b"\\u0085"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))
"""Line ends of Unicode that JSON leaves as they are, and at which some clients split a stream."""


def encoded(value: Any) -> bytes:
    """A value as JSON, in one line also for a client that splits at the line ends of Unicode."""
    try:
        text = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which a model can write as an escape
        text = json.dumps(value).encode()
    if not text.isascii():
        for character, escaped in _LINE_ENDS:
            text = text.replace(character, escaped)
    return text


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event of a stream."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encoded(value) + b"\n\n"
