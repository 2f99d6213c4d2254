"""The words of the house: plain values that every other module speaks in.

Invariant: every value here is immutable (attrs.frozen, sequences as tuples, token columns as read-only arrays) and is
checked when it is made, so nothing further up checks it again. This module knows no tokenizer, no network and no task.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from rollouts.errors import ConfigError

__all__ = [
    "LOGPROB_TOLERANCE",
    "ChatDict",
    "Completion",
    "Endpoint",
    "Fault",
    "FinishReason",
    "Limits",
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
    "finite",
    "frozen",
    "is_frozen",
    "packed_logprobs",
    "packed_tokens",
    "without_password",
]

ChatDict: TypeAlias = dict[str, Any]
"""A message in the chat format of the OpenAI API and of chat templates."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
TokenColumn: TypeAlias = npt.NDArray[np.int32]
LogprobColumn: TypeAlias = npt.NDArray[np.float32]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


# -- columns ----------------------------------------------------------------------------------------------------------


def packed_tokens(values: Iterable[int] | TokenColumn) -> TokenColumn:
    """Pack token ids into a read-only int32 column, shape ``(n,)``."""
    return _packed(values, np.int32)


def packed_logprobs(values: Iterable[float] | LogprobColumn) -> LogprobColumn:
    """Pack logprobs (natural logarithm) into a read-only float32 column, shape ``(n,)``."""
    return _packed(values, np.float32)


LOGPROB_TOLERANCE = 1e-4
"""By how much rounding may lift a logprob above 0; what lies further above is refused. A logprob within the tolerance
is stored as the server gave it and not cut to 0, so that a record differs in no bit from the reply."""


def are_logprobs(values: LogprobColumn) -> npt.NDArray[np.bool_]:
    """Where a column holds logprobs: finite numbers that are not above 0, but for :data:`LOGPROB_TOLERANCE`."""
    return np.isfinite(values) & (values <= LOGPROB_TOLERANCE)


def _packed(values: Any, dtype: Any) -> npt.NDArray[Any]:
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1:
        own = values.flags.owndata or isinstance(values.base, bytes)
        return values if own and not values.flags.writeable else frozen(values.copy())
    given = np.asarray(values if isinstance(values, Sequence | np.ndarray) else list(values))
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if given.size and given.dtype.kind not in kinds:
        raise ValueError(f"a column of {np.dtype(dtype)} takes numbers of that kind only, got {given.dtype}")
    column = given.astype(dtype)
    if column.ndim != 1:
        raise ValueError(f"a column has one dimension, got shape {column.shape}")
    if kinds == "iu" and given.size and given.dtype != dtype and not np.array_equal(column, given):
        raise ValueError(f"a token id fits {np.dtype(dtype)}, got {given.min()} to {given.max()}")
    return frozen(column)


Scalar = TypeVar("Scalar", bound=np.generic)


def is_frozen(column: npt.NDArray[Any]) -> bool:
    """Whether nobody can change a column: neither through it nor through the one that it is a view of."""
    base = column.base
    held = isinstance(base, bytes | None) or (isinstance(base, np.ndarray) and not base.flags.writeable)
    return held and not column.flags.writeable


def frozen(column: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A column, read-only from here on."""
    column.flags.writeable = False
    return column


# -- checks -----------------------------------------------------------------------------------------------------------


def _check(
    expected: str, good: Callable[[Any], bool], *, optional: bool = False
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """An attrs validator that names the class, the field, the value and what was expected."""

    def validate(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if not good(value):
            raise ConfigError.of(f"{type(instance).__name__}.{field.name}", value, expected)

    return validate


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite(value: Any) -> float | None:
    """What foreign code gave for a number, as a float; ``None`` where it is none, or NaN, or infinite.

    Whatever converts is a number, NumPy's and torch's scalars too, but no text.
    """
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:  # noqa: BLE001 - __float__ is foreign code: a tensor of two elements raises RuntimeError
        return None
    return number if math.isfinite(number) else None


def _seconds(value: Any) -> bool:
    return _is_number(value) and value > 0


def _texts(value: Any) -> Any:
    """One text or several as a tuple; anything else as it is, for the validator to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


# -- conversation -----------------------------------------------------------------------------------------------------

Fault: TypeAlias = Literal[
    "not_json", "unclosed", "no_name", "no_arguments", "string_arguments", "bad_arguments", "bad_form"
]
"""What is wrong with a call that cannot be read: its JSON; no closing mark; no name, no arguments; arguments in quotes,
or of another kind than the schema has; anything else about its form."""


@attrs.frozen
class ToolCall:
    """One call that a model asked for.

    ``arguments`` is what its text said, never repaired. A call that could not be read has ``error`` set, its text in
    ``raw``, and is answered with a message to the model instead of being executed.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    id: str = ""
    """Unique within one rollout; the agent loop assigns it where the dialect has none."""
    raw: str = ""
    """The exact text that was parsed."""
    error: str | None = None
    """Why the text is not a call, in words that the model can act on; ``None`` for a sound call."""
    fault: Fault | None = None
    """What kind of error that is, to be counted."""

    def to_chat(self) -> ChatDict:
        """The call as chat templates take it: arguments as a mapping, not as a JSON string."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


@attrs.frozen
class Tool:
    """A tool's name, description and the JSON schema of its arguments (an object schema)."""

    name: str = attrs.field(validator=_check("a non-empty string", lambda v: isinstance(v, str) and bool(v)))
    description: str = ""
    parameters: Mapping[str, Any] = attrs.field(
        factory=lambda: {"type": "object", "properties": {}},
        validator=_check(
            'a JSON schema with "type": "object"', lambda v: isinstance(v, Mapping) and v.get("type") == "object"
        ),
    )

    def to_chat(self) -> ChatDict:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def _calls(calls: Iterable[ToolCall]) -> Sequence[ToolCall]:
    return tuple(calls)


_ROLES = get_args(Role)


@attrs.frozen
class Message:
    """One turn of a conversation, as text. Tokens are kept elsewhere: a message is a view, never the record."""

    role: Role
    content: str = ""
    tool_calls: Sequence[ToolCall] = attrs.field(default=(), converter=_calls)
    tool_call_id: str | None = None
    """On a tool message: the id of the call that it answers."""
    name: str | None = None
    """On a tool message: the name of the tool that answered."""
    reasoning: str | None = None
    """On an assistant message: what stood in its thinking block, when there was one."""

    def __attrs_post_init__(self) -> None:  # one call for all of them: messages are made several times a turn
        if self.role not in _ROLES:
            raise ConfigError.of("Message.role", self.role, f"one of {_ROLES}")
        if not isinstance(self.content, str):
            raise ConfigError.of("Message.content", self.content, "a string")
        for name in ("tool_call_id", "name", "reasoning"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ConfigError.of(f"Message.{name}", text, "a string")

    def to_chat(self) -> ChatDict:
        """The message as chat templates take it; absent fields are left out."""
        chat: ChatDict = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            chat["reasoning_content"] = self.reasoning
        if self.tool_calls:
            chat["tool_calls"] = [call.to_chat() for call in self.tool_calls]
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            chat["name"] = self.name
        return chat

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any]) -> Message:
        """Read a chat dict. Content is a string or a list of text parts.

        Raises:
            ConfigError: an unknown role, or content that is not text.
        """
        content = chat.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            if not all(isinstance(text, str) for text in texts):
                raise ConfigError.of("message.content", content, "a string or a list of text parts")
            content = "".join(text for text in texts if text is not None)
        asked = chat.get("tool_calls") or ()
        if not isinstance(asked, Sequence) or isinstance(asked, str):
            raise ConfigError.of("message.tool_calls", asked, "a list of calls")
        calls = [_call_from_chat(call) for call in asked]
        return cls(
            role=chat.get("role"),  # type: ignore[arg-type]  # the validator answers a wrong one
            content="" if content is None else content,
            tool_calls=calls,
            tool_call_id=chat.get("tool_call_id"),
            name=chat.get("name"),
            reasoning=chat.get("reasoning_content"),
        )


def _call_from_chat(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError.of("message.tool_calls", call, "an object with a function that has name and arguments")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise ConfigError.of("message.tool_calls.arguments", arguments, "a mapping")
    name, number = function.get("name", ""), call.get("id") or ""
    for field, value in (("name", name), ("id", number)):
        if not isinstance(value, str):
            raise ConfigError.of(f"message.tool_calls.{field}", value, "a string")
    return ToolCall(name=name, arguments=arguments, id=number)


def as_messages(prompt: str | Iterable[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Read a prompt in any of its shapes: text (one user message), messages, or chat dicts.

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


def _metadata(value: Any) -> Any:
    """What is known of a task; as JSON text too, in which some data sets keep it."""
    if not isinstance(value, str):
        return value
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError.of("Prompt.metadata", value, "a mapping, or an object as JSON text")
    return found


def _prompt_value(value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return as_messages(value)
    raise ConfigError.of("Prompt.prompt", value, "a string or a list of messages")


@attrs.frozen
class Prompt:
    """One task: what starts an episode, and what is known about it.

    The data buffer sets ``group_index`` when the prompt is taken; the manager sets ``index`` for each of its rollouts.
    """

    prompt: str | tuple[Message, ...] = attrs.field(converter=_prompt_value)
    label: Any = None
    """The reference answer, handed to the reward; the model never sees it."""
    metadata: Mapping[str, Any] = attrs.field(factory=dict, converter=_metadata)
    """An object as JSON text is read."""
    group_index: int | None = None
    index: int | None = None
    replacement: int = 0
    """How many rollouts of this index were lost for good before; each is sampled anew."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages; text is one user message."""
        return as_messages(self.prompt)


# -- inference --------------------------------------------------------------------------------------------------------


class StopReason(enum.StrEnum):
    """Why a rollout ended."""

    TASK_COMPLETED = "task_completed"
    """The environment said that the episode is over."""
    MAX_TURNS = "max_turns"
    """The model had all the turns that the limits allow."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """A reply asked for more tool calls than the limits of a reply or an episode allow; those calls did not run."""
    MAX_TOKENS = "max_tokens"
    """A reply was cut by its token budget, or the sequence or the whole episode reached its own."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The sequence no longer fits the model's context."""
    DEADLINE = "deadline"
    """The episode ran out of wall time."""
    FORKED = "forked"
    """The template rewrites this history for the next turn, which goes on in the rollout's next branch."""
    ABORTED = "aborted"
    """The server or the caller stopped a reply half way; the partial tokens are kept."""
    FAILED = "failed"
    """The environment or the endpoint failed; the failure is kept beside the tokens."""


FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why one completion ended: the model stopped, its budget ran out, or the server was told to stop."""

_FINISH_REASONS = get_args(FinishReason)

OnRewrite: TypeAlias = Literal["append", "fork", "error"]
"""What to do where a chat template writes the conversation so far otherwise than the model has seen it (thoughts
stripped, tools moved): ``append`` keeps the ids and goes on; ``fork`` opens a new branch with the rewritten history;
``error`` fails the rollout. With ``fork`` and ``error`` each step renders the whole conversation to find out."""


Concurrency: TypeAlias = int | Literal["adaptive"] | None
"""How many requests a server is sent at once: see :class:`Endpoint`."""


@attrs.frozen
class VersionSpan:
    """Policy version ``version`` sampled the tokens ``start`` to ``stop`` (half open)."""

    version: str
    start: int
    stop: int


@attrs.frozen
class SamplingParams:
    """How the policy samples. The defaults leave the distribution whole, so that logprobs are the policy's own.

    With ``top_p`` below 1 or ``top_k`` set, SGLang's reported logprob is that of the untruncated distribution.
    """

    temperature: float = attrs.field(default=1.0, validator=_check("a number >= 0", lambda v: _is_number(v) and v >= 0))
    top_p: float = attrs.field(
        default=1.0, validator=_check("a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1)
    )
    top_k: int = attrs.field(
        default=-1, validator=_check("-1 or an integer >= 1", lambda v: _is_int(v) and (v == -1 or v >= 1))
    )
    min_p: float = attrs.field(
        default=0.0, validator=_check("a number in [0, 1]", lambda v: _is_number(v) and 0 <= v <= 1)
    )
    max_new_tokens: int = attrs.field(
        default=1024, validator=_check("an integer >= 1", lambda v: _is_int(v) and v >= 1)
    )
    """Budget of one reply, in tokens."""
    stop: tuple[str, ...] = attrs.field(
        default=(), converter=_texts, validator=_check("a string or several", _are_texts)
    )
    """Stop strings; their tokens stay in the reply."""
    seed: int | None = attrs.field(default=None, validator=_check("an integer", _is_int, optional=True))


def without_password(text: str) -> str:
    """A URL, or a text with URLs in it, as it may be printed: without user names and passwords."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _printed_urls(urls: Any) -> str:
    return without_password(repr(urls))


def _check_urls(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not (_are_texts(value) and value and all(url.startswith(("http://", "https://")) for url in value)):
        told = tuple(map(without_password, value)) if _are_texts(value) else value
        raise ConfigError.of("Endpoint.base_url", told, "one or more URLs that start with http:// or https://")


def _urls(value: Any) -> Any:
    urls = _texts(value)
    return tuple(url.rstrip("/") for url in urls) if _are_texts(urls) else urls


@attrs.frozen
class Endpoint:
    """Where the model answers, and how it is asked.

    Args:
        provider: the protocol that the server speaks; ``"sglang"``.
        model: its name or folder; also where the tokenizer is looked for when none is given.
        base_url: one URL, or several workers of the same model.
        api_key: sent as a bearer token; never printed.
    """

    provider: str = attrs.field(default="sglang", validator=_check('"sglang"', lambda v: v == "sglang"))
    model: str = attrs.field(
        default="default", validator=_check("a non-empty string", lambda v: isinstance(v, str) and bool(v))
    )
    base_url: tuple[str, ...] = attrs.field(
        default="http://127.0.0.1:30000",
        converter=_urls,
        validator=_check_urls,
        repr=_printed_urls,
    )
    api_key: str | None = attrs.field(default=None, repr=False)
    sampling: SamplingParams = attrs.field(
        factory=SamplingParams, validator=attrs.validators.instance_of(SamplingParams)
    )
    connect_seconds: float = attrs.field(default=5.0, validator=_check("a number of seconds > 0", _seconds))
    request_seconds: float = attrs.field(default=600.0, validator=_check("a number of seconds > 0", _seconds))
    """Deadline of one completion, from sending it to its last byte."""
    max_retries: int = attrs.field(default=5, validator=_check("an integer >= 0", lambda v: _is_int(v) and v >= 0))
    """Further attempts after one that cannot have been generated twice (refused connection, 5xx, overload)."""
    concurrency: Concurrency = attrs.field(
        default=None,
        validator=_check(
            'an integer >= 1, "adaptive" or None', lambda v: v in (None, "adaptive") or (_is_int(v) and v >= 1)
        ),
    )
    """Requests that each server is sent at once; the others wait here. ``"adaptive"``: as many as it takes without
    queueing or running out of KV cache, by its own word (``/v1/loads``). ``None``: all."""

    def __attrs_post_init__(self) -> None:
        if self.api_key and any(url != without_password(url) for url in self.base_url):
            expected = "none where a URL has a user name or a password: a request carries one of them"
            raise ConfigError.of("Endpoint.api_key", "(not shown)", expected)


@attrs.frozen
class Completion:
    """What one call of the policy gave back: exactly the tokens it sampled.

    Raises:
        ValueError: the columns differ in length, a logprob is not finite or lies above 0, or the versions do not cover
            the tokens.
    """

    tokens: TokenColumn = attrs.field(converter=packed_tokens, eq=attrs.cmp_using(eq=np.array_equal))
    """Sampled ids, shape ``(n,)``, the stop id included when one was sampled."""
    logprobs: LogprobColumn = attrs.field(converter=packed_logprobs, eq=attrs.cmp_using(eq=np.array_equal))
    """Natural-log probability of each sampled id, shape ``(n,)``."""
    finish_reason: FinishReason = attrs.field(
        validator=_check(f"one of {_FINISH_REASONS}", lambda v: v in _FINISH_REASONS)
    )
    versions: Sequence[VersionSpan]
    """Which weights sampled which tokens; covers ``0..n`` without gap or overlap."""
    prompt_tokens: int
    """How many ids the server says it was given."""
    prompt_digest: int
    """CRC-32 of the ids that were sent, as little-endian int32: what ties a stored sequence to the real request."""
    request_id: str
    cached_tokens: int = 0
    """Prompt ids that the server took from its prefix cache."""
    seconds: float = 0.0
    """Wall time of the call, retries included."""

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


@attrs.frozen
class Limits:
    """When an episode stops. Counts stop before the useless work; seconds are wall time, and each wait has one."""

    max_turns: int = attrs.field(default=10, validator=_check("an integer >= 1", lambda v: _is_int(v) and v >= 1))
    """Replies of the model."""
    max_tokens: int | None = attrs.field(
        default=None, validator=_check("an integer >= 2", lambda v: _is_int(v) and v >= 2, optional=True)
    )
    """One whole sequence, prompt included; the model's context length where the server tells it."""
    max_sampled_tokens: int | None = attrs.field(
        default=None, validator=_check("an integer >= 1", lambda v: _is_int(v) and v >= 1, optional=True)
    )
    """What the model samples in one episode, all turns and branches together; of a turn: ``max_new_tokens``."""
    max_tool_calls: int | None = attrs.field(
        default=None, validator=_check("an integer >= 0", lambda v: _is_int(v) and v >= 0, optional=True)
    )
    """Tool calls of one episode; a reply that would pass it is kept and its calls do not run."""
    max_parallel_calls: int | None = attrs.field(
        default=None, validator=_check("an integer >= 1", lambda v: _is_int(v) and v >= 1, optional=True)
    )
    """Tool calls of one reply; one that asks for more is kept, and none of its calls runs."""
    on_cut: Literal["stop", "continue"] = attrs.field(
        default="stop", validator=_check('"stop" or "continue"', lambda v: v in ("stop", "continue"))
    )
    """A reply cut by ``max_new_tokens``: end the episode, or hand what there is to the environment."""
    last_calls: Literal["skip", "run"] = attrs.field(
        default="skip", validator=_check('"skip" or "run"', lambda v: v in ("skip", "run"))
    )
    """The calls of the last turn, whose results no reply can answer: not run, or run for the reward that they earn."""
    step_seconds: float = attrs.field(default=120.0, validator=_check("a number of seconds > 0", _seconds))
    """Deadline of each start and each step of the environment."""
    close_seconds: float = attrs.field(default=30.0, validator=_check("a number of seconds > 0", _seconds))
    episode_seconds: float = attrs.field(default=3600.0, validator=_check("a number of seconds > 0", _seconds))
