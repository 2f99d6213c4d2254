"""The table of one rollout: its seats, their conversations, and the first failure.

Invariant: a failure of a seat costs the rollout, also where the play catches the exception; it is never a reward. A
conversation has a number among those of its seat, in the order in which they are begun. This module samples nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from rollouts.dtypes import Endpoint, OnRewrite, Prompt, SamplingParams, as_messages
from rollouts.errors import ConfigError, EndpointAway, Failure, GenerateFailure, TokenMismatchError
from rollouts.inference.base import Policy, describe_as, describe_once
from rollouts.inference.shared import shared_policy
from rollouts.renderer import Renderer, RendererOptions, with_prompt_options
from rollouts.seats.play_log import Diverged, PlayLog
from rollouts.seats.seat import Seat, SeatVersions, seeded
from rollouts.training.agent_integration import loaded_renderer, resuming
from rollouts.training.types import Sample

__all__ = ["Conversation", "Player", "SeatFailed", "SeatOptions", "Table", "as_sent"]


_UNSET = SamplingParams()


class SeatFailed(GenerateFailure):
    """A seat failed. The rollout fails with the seat's own failure, whatever the play does with this error."""


@attrs.frozen(kw_only=True)
class SeatOptions:
    """The values of a seat whose own fields are ``None``."""

    endpoint: Endpoint
    tokenizer: Any
    sampling: SamplingParams | None = None
    policy: Policy | None = None
    history: OnRewrite = "append"
    renderer: RendererOptions = attrs.field(factory=RendererOptions)


@attrs.frozen
class Player:
    """The model of a seat, ready to sample one conversation."""

    policy: Policy
    renderer: Renderer
    sampling: SamplingParams
    endpoint: Endpoint
    max_context: int | None


class Conversation(Protocol):
    """A chat or a run of a seat."""

    seat: str
    number: int
    asking: bool

    async def finish(self) -> None:
        """End it, and close its environment."""

    def samples(self) -> list[Sample]:
        """Its branches; none without a reply."""
        ...

    @property
    def kept(self) -> bool:
        """Whether logged turns are left that the play did not ask for."""
        ...


class Table:
    """The conversations of one rollout.

    Args:
        seats: by name, checked.
        prompt: of the rollout, without its log.
        options: of the rollout.
        log: of its turns.
    """

    def __init__(self, seats: Mapping[str, Seat], prompt: Prompt, options: SeatOptions, log: PlayLog) -> None:
        self.seats = seats
        self.prompt = prompt
        self.options = options
        self.log = log
        self.conversations: dict[str, list[Conversation]] = {name: [] for name in seats}
        self.failure: Failure | None = None
        self.raised: Exception | None = None
        """A ConfigError, an outage or a broken law, which costs more than the rollout."""
        self.diverged = False
        self.over = False
        """Whether the play has returned."""

    def begin(self, conversation: Conversation) -> int:
        """Number a new conversation among those of its seat."""
        of_seat = self.conversations[conversation.seat]
        of_seat.append(conversation)
        return len(of_seat) - 1

    def all(self) -> list[Conversation]:
        """The conversations of all seats."""
        return [one for conversations in self.conversations.values() for one in conversations]

    def check(self, conversation: Conversation) -> None:
        """Raise if the rollout has failed, or is over."""
        if self.diverged:
            raise Diverged("the rollout begins again")
        if self.failure is not None:
            raise SeatFailed(self.failure.message)
        if self.over:
            text = "asked after the play returned; expected every ask to be awaited in it"
            raise self.fail(conversation, GenerateFailure(text))

    def fail(self, conversation: Conversation, error: Exception | Failure) -> SeatFailed:
        """Note the failure of a seat, and return the error to raise."""
        failure = error if isinstance(error, Failure) else Failure.of(error)
        message = f"seat {conversation.seat}, conversation {conversation.number}: {failure.message}"
        if self.failure is None:
            self.failure = attrs.evolve(failure, message=message)
        return SeatFailed(message)

    def note(self, error: Exception) -> None:
        """Note an error that is not the rollout's: a play may wrap it in an exception group, or suppress it.

        After the play has returned, nothing: an ask that it left behind meets a sealed conversation.
        """
        if not self.over and isinstance(error, ConfigError | EndpointAway | TokenMismatchError):
            self.raised = self.raised or error

    @contextlib.contextmanager
    def failing(self, conversation: Conversation) -> Iterator[None]:
        """An error inside is the failure of a seat, unless it costs more than the rollout, or was noted already.

        Raises:
            SeatFailed: in the place of any other exception.
        """
        try:
            yield
        except (ConfigError, EndpointAway, TokenMismatchError) as error:
            self.note(error)
            raise
        except (Diverged, SeatFailed):
            raise
        except Exception as error:
            raise self.fail(conversation, error) from error

    def diverge(self, why: str) -> Diverged:
        """Note that the play does not fit the logged turns, and return the error to raise."""
        self.diverged = True
        return Diverged(why)

    async def player(self, name: str, number: int) -> Player:
        """The model of a conversation."""
        seat, options = self.seats[name], self.options
        endpoint = seat.endpoint or options.endpoint
        given = with_prompt_options(options.renderer, self.prompt.metadata)
        renderer = await loaded_renderer(options.tokenizer if seat.tokenizer is None else seat.tokenizer, given)
        client = seat.policy or (options.policy if seat.endpoint is None else None)
        client = shared_policy(endpoint, renderer.vocab_size) if client is None else client
        policy = resuming(client, renderer.decode)
        if self.policy_name(name):
            policy = SeatVersions(policy, name)
        if policy is not client:
            describe_as(policy, client)  # a program's session asks for it
        own = endpoint.sampling if endpoint.sampling != _UNSET else None
        own = seat.sampling or (own if seat.endpoint is not None else options.sampling)
        sampling = seeded(own or options.sampling or options.endpoint.sampling, name, number)
        return Player(policy, renderer, sampling, endpoint, (await describe_once(client)).max_context)

    def policy_name(self, name: str) -> str:
        """With what the versions of a seat begin: its name if other servers or another policy sample its replies."""
        seat = self.seats[name]
        if seat.policy is None and seat.endpoint is None:
            return ""
        if seat.policy is not None or seat.endpoint is None:
            return name
        ours = attrs.evolve(self.options.endpoint, sampling=seat.endpoint.sampling)
        return "" if seat.endpoint == ours and self.options.policy is None else name


def as_sent(said: Any) -> Sequence[Any]:
    """The messages of an ask.

    Raises:
        GenerateFailure: there are none.
    """
    try:
        messages = as_messages(said)
    except ConfigError as error:
        raise GenerateFailure(f"ask: {error}") from error
    if not messages:
        raise GenerateFailure("ask: got no message; expected text, or at least one message")
    return messages
