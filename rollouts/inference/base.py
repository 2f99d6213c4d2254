"""Protocol of a policy: prompt tokens in, sampled tokens out.

A policy does not know messages, environments or samples. It raises an ``EndpointError`` if it cannot serve.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
import attrs

from rollouts.dtypes import Completion, ImageSpan, SamplingParams, TokenColumn
from rollouts.errors import ConfigError, EndpointAway, EndpointUnavailable

__all__ = [
    "ExtrasRequest",
    "Policy",
    "ServerInfo",
    "check_takes_images",
    "describe_as",
    "describe_once",
    "images_option",
    "route_option",
    "takes_images",
    "wait_for_servers",
]


@attrs.frozen
class ServerInfo:
    """Description that a server reports; ``None`` for a field that it does not report."""

    version: str | None = None
    model: str | None = None
    weight_version: str | None = None
    max_context: int | None = None
    """Maximum length of prompt and reply together, in tokens, as far as context and KV pool allow."""


@attrs.frozen
class ExtrasRequest:
    """The :class:`~rollouts.dtypes.Extras` that a completion needs. Numbers of the request come with any."""

    experts_width: int | None = None
    """Numbers of routed experts for each position, layers times top-k; ``None`` for none."""
    experts_start: int = 0
    """The first position whose routed experts are needed; at most the number of prompt ids."""
    top_p_sets: bool = False
    """Whether the ids that ``top_p`` kept are needed."""


class Policy(Protocol):
    """Samples continuations of token sequences.

    A policy with ``takes_images = True`` has one more argument of :meth:`complete`, ``images``, a sequence of
    :class:`~rollouts.dtypes.ImageSpan`: all images of ``tokens``, in order. For any other policy, images are refused.
    """

    async def complete(
        self,
        tokens: TokenColumn,
        sampling: SamplingParams,
        *,
        stop_token_ids: tuple[int, ...] = (),
        session: str = "",
        route: str = "",
    ) -> Completion:
        """Sample one continuation of ``tokens``.

        Args:
            tokens: prompt ids, shape ``(n,)``, n >= 1; sent unchanged.
            sampling: sampling parameters; ``max_new_tokens`` limits this reply.
            stop_token_ids: ids that end the reply, in addition to the model's own.
            session: name of the sequence; each call of a session extends its tokens.
            route: name of sequences that share a beginning; their calls go to one worker. By default the session.

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


def takes_images(policy: Policy) -> bool:
    """Whether a policy accepts ``images``."""
    return bool(getattr(policy, "takes_images", False))


def check_takes_images(policy: Policy) -> None:
    """Refuse images for a policy that does not accept them.

    Raises:
        ConfigError: it does not.
    """
    if not takes_images(policy):
        raise ConfigError.of("images", policy, "none: requests of this policy have no images")


def images_option(images: Sequence[ImageSpan]) -> dict[str, Any]:
    """The argument ``images`` for a policy that may not know it: only sequences with images have one."""
    return {"images": images} if images else {}


def route_option(route: str) -> dict[str, str]:
    """The argument ``route`` for a policy that may not know it: only sequences that share a beginning have one."""
    return {"route": route} if route else {}


async def wait_for_servers(policy: Policy, error: EndpointUnavailable) -> None:
    """Wait until a server of a policy answers again; raise ``error`` if the policy has no such wait.

    Raises:
        EndpointAway: no server answered for ``outage_seconds``.
        EndpointRefused: the server that answers is not of the endpoint's protocol.
    """
    wait = getattr(policy, "wait_for_servers", None)
    if wait is None or isinstance(error, EndpointAway):
        raise error
    await wait(error)


@attrs.define(eq=False)
class _Described:
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    info: ServerInfo | None = None
    asked: int = 0
    """Number of requests."""
    unavailable: EndpointUnavailable | None = None
    """The error of the last one, if no server was there."""

    async def ask(self, policy: Policy) -> None:
        """Request the description, unless a concurrent call does so first."""
        asked = self.asked
        async with self.lock:
            if self.asked != asked:
                return
            self.asked += 1
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

    A policy of servers waits while none is there, as for the requests of a rollout.

    Raises:
        EndpointError: as :meth:`Policy.describe` and :func:`wait_for_servers`.
    """
    described = _DESCRIBED.get(policy)
    if described is None:
        described = _DESCRIBED[policy] = _Described()
    while described.info is None:
        await described.ask(policy)
        if described.unavailable is not None:
            await wait_for_servers(policy, described.unavailable)
    return described.info
