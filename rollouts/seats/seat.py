"""A seat: which model samples an agent's replies, with which limits and tools, and whether its tokens are trained.

Invariant: a seat is a value that all rollouts share; a rollout's conversations are those of its table. This module
plays nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rollouts.base.validators import check
from rollouts.dtypes import Completion, Endpoint, Limits, SamplingParams, VersionSpan
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError
from rollouts.inference.base import CompletionRequest, Policy, PolicyWrapper

if TYPE_CHECKING:
    from rollouts.programs.gateway.session import SessionLimits
    from rollouts.programs.launchers.base import Program
    from rollouts.sandboxes.base import Sandbox

__all__ = ["Seat", "SeatVersions", "check_seats", "seeded"]


@attrs.frozen(kw_only=True)
class Seat:
    """One agent of a rollout. A field that is ``None`` is that of the rollout.

    Raises:
        ConfigError: a field has the wrong type, or fields exclude each other; the message names them.
    """

    endpoint: Endpoint | None = attrs.field(
        default=None, validator=check("an Endpoint", lambda v: v is None or isinstance(v, Endpoint))
    )
    """Where its model answers, e.g. older weights; the versions of its tokens then begin with the name of the seat."""
    tokenizer: Any = None
    """Of the model of ``endpoint`` or ``policy``, if it is another than that of the rollout."""
    policy: Policy | None = attrs.field(default=None, repr=False)
    """Replaces the client of the endpoint."""
    sampling: SamplingParams | None = None
    """By default that of ``endpoint`` if it sets any, else that of the rollout. The seed is mixed with the name of the
    seat and the number of the conversation."""
    limits: Limits | SessionLimits | None = None
    """Of each conversation. By default a chat has at most 100 replies, a cut reply is passed on, and a run has the
    limits of an episode. Seconds count only while the seat is asked."""
    environment_cls: EnvironmentFactory | None = None
    """Its tools: in a chat the environment answers the replies with tool calls, in a run all."""
    program: Program | None = None
    """The agent is a program, started for each run in a fresh sandbox."""
    sandbox: Sandbox | None = None
    trained: bool = attrs.field(default=True, validator=check("a bool", lambda v: isinstance(v, bool)))
    """Whether its conversations are samples; else its text is context of the others only."""

    def __attrs_post_init__(self) -> None:
        if (self.program is None) != (self.sandbox is None):
            raise ConfigError.of("Seat.sandbox", self.sandbox, "one with a program, none without")
        if self.trained and self.tokenizer is not None:
            raise ConfigError.of("Seat.tokenizer", self.tokenizer, "None, or trained=False: it has other ids")
        if self.tokenizer is not None and self.endpoint is None and self.policy is None:
            expected = "None without endpoint or policy: the model of the rollout has other ids"
            raise ConfigError.of("Seat.tokenizer", self.tokenizer, expected)
        if self.program is not None and self.environment_cls is not None:
            raise ConfigError.of("Seat.environment_cls", self.environment_cls, "None with a program")
        if self.limits is not None and isinstance(self.limits, Limits) != (self.program is None):
            raise ConfigError.of("Seat.limits", self.limits, "Limits, or SessionLimits for a program, or None")


def check_seats(seats: Any) -> Mapping[str, Seat]:
    """Check the seats of a play by name.

    Raises:
        ConfigError: there is none that is trained, a name cannot be an attribute, or a value is not a seat.
    """
    if not isinstance(seats, Mapping) or not seats:
        raise ConfigError.of("seats", seats, "a Seat for each name")
    for name, seat in seats.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ConfigError.of("seats", name, "names that are identifiers: seats.NAME")
        if not isinstance(seat, Seat):
            raise ConfigError.of(f"seats[{name!r}]", seat, "a Seat")
    if not any(seat.trained for seat in seats.values()):
        raise ConfigError.of("seats", sorted(seats), "at least one seat with trained=True")
    return seats


def seeded(sampling: SamplingParams, seat: str, conversation: int) -> SamplingParams:
    """The sampling parameters with a seed of one conversation: equal seeds would correlate the play of two seats."""
    if sampling.seed is None:
        return sampling
    seed = zlib.crc32(f"{sampling.seed}/{seat}/{conversation}".encode()) & 0x7FFFFFFF
    return attrs.evolve(sampling, seed=seed)


class SeatVersions(PolicyWrapper):
    """A policy of other weights than the rollout's: its versions are ``SEAT/VERSION``.

    Two servers may give different weights one version name.
    """

    def __init__(self, inner: Policy, seat: str) -> None:
        super().__init__(inner)
        self.prefix = f"{seat}/"

    def __repr__(self) -> str:
        return f"<{self.prefix}… of {self.inner!r}>"

    async def complete(self, request: CompletionRequest) -> Completion:
        inner = attrs.evolve(request, version=request.version.removeprefix(self.prefix))
        reply = await self.inner.complete(inner)
        spans = [VersionSpan(self.prefix + span.version, span.start, span.stop) for span in reply.versions]
        return attrs.evolve(reply, versions=spans)
