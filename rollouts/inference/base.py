"""Protocol of a policy: prompt tokens in, sampled tokens out.

A policy does not know messages, environments or samples. It raises an ``EndpointError`` if it cannot serve.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import anyio
import attrs

from rollouts.dtypes import Completion, ImageSpan, SamplingParams, TokenColumn
from rollouts.errors import ConfigError, EndpointAway, EndpointUnavailable

__all__ = [
    "CompletionRequest",
    "ExtrasRequest",
    "Policy",
    "PolicyWrapper",
    "PriorityOrder",
    "ServerInfo",
    "check_takes_images",
    "describe_as",
    "describe_once",
    "wait_for_servers",
]


PriorityOrder: TypeAlias = Literal["higher first", "lower first"]
"""How a server schedules requests by their priorities."""


@attrs.frozen
class ServerInfo:
    """Description that a server reports; ``None`` for a field that it does not report."""

    version: str | None = None
    model: str | None = None
    weight_version: str | None = None
    max_context: int | None = None
    """Maximum length of prompt and reply together, in tokens, as far as context and KV pool allow."""
    http_workers: int | None = None
    """Processes of one server that take requests: each stores a separate weight version (SGLang)."""
    has_tokenizer: bool | None = None
    """Whether the server has a tokenizer, which stop strings, ``min_new_tokens`` and grammars need."""
    has_grammars: bool | None = None
    """Whether the server can constrain replies to a grammar, and reports their logprobs under it."""
    has_structural_tags: bool | None = None
    """Whether it can hold a part of a reply to a grammar, and leave the rest free."""
    honours_seeds: bool | None = None
    """Whether a seeded request gets the same reply again."""


@attrs.frozen
class ExtrasRequest:
    """The :class:`~rollouts.dtypes.Extras` that a completion needs."""

    experts_width: int | None = None
    """Numbers of routed experts for each position, layers times top-k; ``None`` if they are not needed."""
    experts_start: int = 0
    """The first position whose routed experts are needed; at most the number of prompt ids."""
    top_p_sets: bool = False
    """Whether the ids that ``top_p`` kept are needed."""


@attrs.frozen(eq=False)
class CompletionRequest:
    """Request for one continuation of ``tokens``."""

    tokens: TokenColumn
    """Prompt ids, shape ``(n,)``, n >= 1; sent unchanged."""
    sampling: SamplingParams
    """Sampling parameters; ``max_new_tokens`` limits this reply."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the reply, in addition to the model's."""
    session: str = ""
    """Name of the sequence; each request of a session extends its tokens."""
    route: str = ""
    """Name of sequences that share a beginning; their requests go to one worker. By default the session."""
    extras: ExtrasRequest | None = None
    """Columns that the completion needs beyond tokens and logprobs; a reply without them is refused."""
    images: Sequence[ImageSpan] = ()
    """All images of ``tokens``, in order; only for a policy with ``takes_images = True``."""
    version: str = ""
    """Policy version of the last sampled token in ``tokens``; empty if there is none."""
    priority: int | None = None
    """In the order of the servers; ``None``: not sent."""
    adapter: str = ""
    """LoRA adapter of the reply; by default the newest one of ``Endpoint.lora``."""


class Policy(Protocol):
    """Samples continuations of token sequences.

    A policy whose requests may have images has the attribute ``takes_images = True``.
    """

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one continuation.

        Raises:
            EndpointUnavailable: no valid response after all retries.
            EndpointRefused: the server refuses this request.
            ContextOverflow: prompt and ``max_new_tokens`` exceed the model's context.
        """
        ...

    async def describe(self) -> ServerInfo:
        """Query the description of the server.

        Raises:
            EndpointUnavailable: no server answers there.
            EndpointRefused: the server does not implement the protocol.
        """
        ...

    async def aclose(self) -> None:
        """Close connections; no completion may be in flight."""
        ...


def check_takes_images(policy: Policy) -> None:
    """Refuse images for a policy that does not accept them.

    Raises:
        ConfigError: it does not.
    """
    if not getattr(policy, "takes_images", False):
        raise ConfigError.of("images", policy, "none: requests of this policy have no images")


class PolicyWrapper:
    """A policy that samples through ``inner``; a subclass defines :meth:`complete`."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images."""
        return bool(getattr(self.inner, "takes_images", False))

    @property
    def minimum_delays_stops(self) -> bool:
        """Whether no stop string ends a reply within its ``min_new_tokens``."""
        return bool(getattr(self.inner, "minimum_delays_stops", False))

    async def describe(self) -> ServerInfo:
        return await self.inner.describe()

    async def wait_for_servers(self, error: EndpointUnavailable) -> None:
        await wait_for_servers(self.inner, error)

    async def aclose(self) -> None:
        await self.inner.aclose()


async def wait_for_servers(policy: Policy, error: EndpointUnavailable) -> None:
    """Wait until a server of a policy answers again; raise ``error`` if the policy cannot wait.

    Raises:
        EndpointAway: no server answered for ``outage_seconds``.
        EndpointRefused: the server that answers does not implement the endpoint's protocol.
    """
    wait = getattr(policy, "wait_for_servers", None)
    if wait is None or isinstance(error, EndpointAway):
        raise error
    await wait(error)


@attrs.define(eq=False)
class _Described:
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    info: ServerInfo | None = None
    requests: int = 0
    unavailable: EndpointUnavailable | None = None
    """The error of the last request, if no server was there."""

    async def request(self, policy: Policy) -> None:
        """Request the description, unless a concurrent call does so first."""
        before = self.requests
        async with self.lock:
            if self.requests != before:
                return
            self.requests += 1
            self.unavailable = None
            try:
                self.info = await policy.describe()
            except EndpointUnavailable as error:
                self.unavailable = error


_DESCRIBED: weakref.WeakKeyDictionary[Policy, _Described] = weakref.WeakKeyDictionary()


def describe_as(policy: Policy, inner: Policy) -> None:
    """Let a policy that passes its calls on to ``inner`` have the description of ``inner``, without a request."""
    _DESCRIBED[policy] = _DESCRIBED.setdefault(inner, _Described())


async def describe_once(policy: Policy) -> ServerInfo:
    """Request the description of a policy's server once, also when many rollouts start at the same time.

    A policy of servers waits while no server answers, as for the requests of a rollout.

    Raises:
        EndpointError: as :meth:`Policy.describe` and :func:`wait_for_servers`.
    """
    described = _DESCRIBED.get(policy)
    if described is None:
        described = _DESCRIBED[policy] = _Described()
    while described.info is None:
        await described.request(policy)
        if described.unavailable is not None:
            await wait_for_servers(policy, described.unavailable)
    return described.info
