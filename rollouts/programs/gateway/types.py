"""Requests and replies in the terms of no wire format.

The wire modules convert bodies to these types and back; the tree and the session know only these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs

from rollouts.base.validators import integer, seconds
from rollouts.dtypes import Message, Tool
from rollouts.errors import RolloutsError

__all__ = [
    "ApiError",
    "CallReply",
    "CallRequest",
    "Constraint",
    "ErrorKind",
    "Sampled",
    "Session",
    "SessionLimits",
    "Usage",
]

ErrorKind: TypeAlias = Literal[
    "invalid_request",
    "authentication",
    "not_found",
    "conflict",
    "too_large",
    "media_type",
    "timeout",
    "overflow",
    "upgrade",
    "rate_limit",
    "server",
]
"""The kinds of error that every API has a form for. ``overflow`` is a prompt that does not fit the context, ``upgrade``
a request for a protocol that the server does not speak, ``media_type`` a compressed body, ``timeout`` a body that does
not arrive."""


class ApiError(RolloutsError):
    """A request that is answered with an error in the form of its API."""

    def __init__(
        self, kind: ErrorKind, message: str, *, tokens: int = 0, max_context: int = 0, counted: str = ""
    ) -> None:
        super().__init__(message)
        self.error_kind: ErrorKind = kind
        self.counted = counted or kind
        """Its name in the counts, behind ``refused/``."""
        self.tokens = tokens
        """Of an ``overflow``: the ids of the prompt."""
        self.max_context = max_context
        """Of an ``overflow``: the ids that fit."""


@attrs.frozen
class Constraint:
    """The form that a request wants its reply to have."""

    field: str
    """Of the request, for counts."""
    parameter: str
    """Of :class:`~rollouts.dtypes.SamplingParams`: one of its ``CONSTRAINTS``."""
    value: str


@attrs.frozen
class CallRequest:
    """One request for a reply of the model."""

    messages: tuple[Message, ...]
    """The conversation in chat form. ``developer`` is ``system``. A tool message has the id of its call. Reasoning that
    the program sent back is kept; it is never compared."""
    tools: tuple[Tool, ...] = ()
    """The tools offered to the model; none if ``tool_choice`` is ``none``."""
    strict: frozenset[str] = frozenset()
    """The names of the tools whose calls must fit their schemas; counted where that is not enforced."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    n: int = 1
    previous_response_id: str | None = None
    """Of the Responses API: the id of the reply that the messages follow."""
    instructions: str | None = None
    """Of the Responses API: the text of the first message, a system message. It replaces the instructions of
    the reply that ``previous_response_id`` names."""
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    """The sampling parameters of the request by the names of their fields; the parameters of the run replace them."""
    counts: Mapping[str, float] = attrs.field(factory=dict)
    """Numbers of things that the gateway does not honour, by name, such as ``file`` or ``not_enforced/tool_choice``."""
    model: str = ""
    """The name of the request, which the answer repeats."""
    include_usage: bool = False
    """Of a chat stream: whether a last chunk has the usage."""
    call_prefix: str = ""
    """The beginning of the ids of the tool calls in its replies."""
    constraint: Constraint | None = None
    """The form of the reply; counted where it is not enforced."""
    logprobs: bool = False
    """Whether the answer has the sampled ids' texts and logprobs."""
    token_ids: bool = False
    """Whether the answer has the ids of the prompt and of the replies."""
    continues: bool = True
    """Whether the reply continues an assistant message that is the last message; else it opens a new turn."""


@attrs.frozen
class Usage:
    """Numbers of tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@attrs.frozen(eq=False)
class Sampled:
    """The ids of one reply, for requests that ask for them."""

    prompt: list[int]
    """Empty unless the request has ``token_ids``."""
    ids: list[int]
    """All sampled ids: also of thoughts, calls, and the end of the turn."""
    logprobs: list[float]
    texts: list[str]
    """Of each id alone: an id with a part of a character is U+FFFD."""


@attrs.frozen
class CallReply:
    """One reply of the model, as the program gets it."""

    id: str
    """Name of the reply, unique in the session; the wire formats put their prefix in front."""
    message: Message
    """Content (ending before a stop string), reasoning and tool calls, whose ids are unique in the session. A malformed
    call has ``error`` set and its text in ``raw``."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stop_text: str | None = None
    """The stop string of the request that ended the reply."""
    created: int = 0
    """Unix time in seconds."""
    sampled: Sampled | None = attrs.field(default=None, repr=False)
    """``None`` unless the request has ``logprobs`` or ``token_ids``."""


@attrs.frozen
class SessionLimits:
    """When a session ends, and how much it does at a time."""

    max_calls: int | None = attrs.field(default=1000, validator=integer(1, optional=True))
    """Calls that are sampled."""
    max_roots: int | None = attrs.field(default=256, validator=integer(1, optional=True))
    """Conversations that continue no earlier one. One more fails the session: the program starts agents without end, or
    it rewrites its history at every turn."""
    max_sampled_tokens: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Sampled tokens of all calls together."""
    max_tokens_in_flight: int | None = attrs.field(default=None, validator=integer(1, optional=True))
    """Tokens of the prompts and budgets that are at the policy at the same time; further calls wait. A single call that
    has more is sent alone."""
    max_seconds: float = attrs.field(default=3600.0, validator=seconds(above=0))
    """Wall time of the session."""


class Session(Protocol):
    """One rollout, as the server sees it."""

    @property
    def key(self) -> str:
        """The secret that the program sends with each request, at least 128 random bits."""

    @property
    def ended(self) -> bool:
        """Whether the session takes no more calls."""

    @property
    def max_body(self) -> int:
        """The most bytes of a request."""

    @property
    def no_images(self) -> str:
        """Why the model takes no images; empty if it does."""

    async def call(self, request: CallRequest, *, lineage: Mapping[str, str], attempt: int = 0) -> Sequence[CallReply]:
        """``request.n`` replies of the model. A cancelled call says that its client has gone.

        Args:
            lineage: the headers in which a program names its agent or conversation, by lower-case name.
            attempt: how often the client has sent this request before, as its header says.

        Raises:
            ApiError: the answer is an error.
        """

    def delivered(self, replies: Sequence[CallReply]) -> None:
        """Called when the whole answer with these replies was written to the client's connection."""

    def undelivered(self, replies: Sequence[CallReply]) -> None:
        """Called when the client went away before the whole answer with these replies was written."""

    def reply(self, reply_id: str) -> CallReply | None:
        """An earlier reply by its id, for items that a program sends back by reference."""

    async def count_tokens(self, request: CallRequest) -> int:
        """Length in ids of an opening with these messages and tools. It is not a call of the session."""

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a count of the session."""

    def fail(self, error: Exception) -> None:
        """Called with an error of ``call`` or ``count_tokens`` other than :class:`ApiError`: the rollout fails with it.

        The program is answered with an error of the server.
        """
