"""The turn log: the record of each turn of an episode, so that another process can resume it.

Invariant: a trajectory that is rebuilt from its turns equals the played one. Each reply is checked against the
tokens that it was sampled from, as when it was first stored, and turns with impossible values are refused. Only one
episode of a rollout is logged; if a rollout plays several, none is, because their turns could not be distinguished.

This module does not know files, environments or groups.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from rollouts.base.storable import stable_json
from rollouts.base.validators import finite
from rollouts.concurrency.times import Timeline
from rollouts.dtypes import (
    ChatDict,
    Completion,
    Image,
    ImageSpan,
    LoadImage,
    LogprobColumn,
    Message,
    Prompt,
    TokenColumn,
    ToolCall,
    VersionSpan,
    with_images,
)
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.trajectory import CompletionRecord, Trajectory

__all__ = [
    "Turn",
    "TurnLog",
    "add_replies",
    "message_from_dict",
    "message_to_dict",
    "prompt_digest",
    "replayed",
]


@attrs.frozen(eq=False)
class Turn:
    """The part of a trajectory that one turn added, and the state of the episode after it."""

    number: int
    """Number of replies so far."""
    tokens: TokenColumn
    mask: npt.NDArray[np.bool_]
    logprobs: LogprobColumn
    fields: Mapping[str, Any]
    """Plain values: the new ``completions``, ``messages`` and ``times``; ``versions``, ``metrics``,
    ``step_rewards`` and ``step_completions`` so far; fields that the loop adds, among them ``open_turn``, the position
    of an assistant turn that continues; the environment's ``snapshot`` if it returned one. Images are named by their
    hashes."""
    images: Mapping[str, Image] = attrs.field(factory=dict)
    """The images that the fields name, by their hashes."""

    @classmethod
    def since(
        cls, trajectory: Trajectory, start: int, completions: int, messages: int, times: int, **fields: Any
    ) -> Turn:
        """The turn that began when the trajectory had these numbers of tokens, completions, messages and times."""
        mask, logprobs = trajectory.sampled(start)
        spans = [span for span in trajectory.images if span.start >= start]
        shown = [image for message in trajectory.messages[messages:] for image in message.images]
        if spans:
            fields["images"] = [[span.image.sha256, span.start, span.stop] for span in spans]
        return cls(
            number=len(trajectory.completions),
            tokens=trajectory.tokens[start:],
            mask=mask,
            logprobs=logprobs,
            fields={
                "completions": [record.to_dict() for record in trajectory.completions[completions:]],
                "versions": [[span.version, span.start, span.stop] for span in trajectory.versions],
                "messages": [message_to_dict(message) for message in trajectory.messages[messages:]],
                "metrics": dict(trajectory.metrics),
                "step_rewards": list(trajectory.step_rewards),
                "step_completions": list(trajectory.step_completions),
                "times": trajectory.times.to_list(times),
                **fields,
            },
            images={image.sha256: image for image in [*shown, *(span.image for span in spans)]},
        )

    @property
    def resumable(self) -> bool:
        """Whether the turn has a snapshot of the environment."""
        return "snapshot" in self.fields


def replayed(turns: Sequence[Turn], vocab_size: int | None = None) -> Trajectory:
    """Rebuild a trajectory from its turns.

    Args:
        turns: all turns so far, from the first.
        vocab_size: upper bound of the token ids, exclusive; ``None`` if unknown.

    Raises:
        TokenMismatchError: a reply was sampled from other tokens than those before it.
        ValueError: an id, a logprob, a version, a reward or a metric is invalid.
    """
    tokens = np.concatenate([turn.tokens for turn in turns])
    logprobs = np.concatenate([turn.logprobs for turn in turns])
    last = turns[-1].fields
    limit = 2**31 if vocab_size is None else vocab_size
    if tokens.min() < 0 or tokens.max() >= limit:
        raise ValueError(f"turns: got ids from {tokens.min()} to {tokens.max()}; expected 0 <= id < {limit}")
    for name, numbers in (("step_rewards", last["step_rewards"]), ("metrics", last["metrics"].values())):
        if any(finite(number) is None for number in numbers):
            raise ValueError(f"turns: got {name} {list(numbers)}; expected finite numbers")
    spans = [VersionSpan(*span) for span in last["versions"]]
    trajectory = Trajectory()
    records = [CompletionRecord(**fields) for turn in turns for fields in turn.fields["completions"]]
    add_replies(trajectory, records, tokens, logprobs, spans)
    if len(trajectory.completions) != turns[-1].number:
        raise ValueError(
            f"turns: got {len(trajectory.completions)} completions; expected {turns[-1].number}, one a turn"
        )
    messages: list[Message] = []
    for turn in turns:
        start = turn.fields.get("open_turn")
        if start is not None and not 0 <= start < len(trajectory):
            raise ValueError(f"turns: got open_turn {start}; expected a position below {len(trajectory)}")
        messages += [message_from_dict(fields, turn.images.__getitem__) for fields in turn.fields["messages"]]
        spans_of_turn = turn.fields.get("images", ())
        trajectory.images += [ImageSpan(turn.images[sha256], first, stop) for sha256, first, stop in spans_of_turn]
        if start is not None and turn is not turns[-1]:
            messages.pop()  # the next turn has the whole message
    trajectory.messages[:] = messages
    trajectory.metrics.update(last["metrics"])
    trajectory.step_rewards.extend(last["step_rewards"])
    trajectory.step_completions.extend(last.get("step_completions") or [-1] * len(trajectory.step_rewards))
    trajectory.times = Timeline(span for turn in turns for span in turn.fields.get("times", ()))
    return trajectory


def add_replies(
    trajectory: Trajectory,
    records: Iterable[CompletionRecord],
    tokens: TokenColumn,
    logprobs: LogprobColumn,
    versions: Sequence[VersionSpan],
) -> None:
    """Add stored tokens to an empty trajectory: each record as a reply without text, the rest as context.

    Raises:
        TokenMismatchError: a reply was sampled from other tokens than those before it.
    """
    for record in records:
        start, stop = record.start, record.stop
        trajectory.add_context(tokens[len(trajectory) : start])
        completion = Completion(
            tokens=tokens[start:stop],
            logprobs=logprobs[start:stop],
            versions=[
                VersionSpan(span.version, max(span.start, start) - start, min(span.stop, stop) - start)
                for span in versions
                if span.start < stop and span.stop > start
            ],
            prompt_tokens=start,
            extras=record.extras,
            **{name: value for name, value in record.to_dict().items() if name not in _OF_RECORD},
        )
        reply, temperature = Message("assistant"), record.temperature
        trajectory.add_reply(completion, reply, continues=record.continues, temperature=temperature)
    trajectory.add_context(tokens[len(trajectory) :])


_OF_RECORD = ("start", "stop", "continues", "temperature")
"""The fields of a record that a completion lacks."""


def prompt_digest(prompt: Prompt) -> int:
    """CRC-32 of a prompt, to recognise the turns of another prompt; of its metadata too, in place of an opening."""
    from rollouts.base.stable_repr import stable_repr  # here: most runs log no turns

    crc = zlib.crc32(stable_repr(prompt.prompt).encode("utf-8", "replace"))
    return crc if prompt.has_opening else zlib.crc32(stable_json(prompt.metadata), crc)


def message_to_dict(message: Message) -> ChatDict:
    """A message as plain data, all fields included; images are named by their hashes."""
    calls = [dict(zip(_CALL_FIELDS, _of_call(call), strict=True)) for call in message.tool_calls]
    fields = {**dict(zip(_MESSAGE_FIELDS, _of_message(message), strict=True)), "tool_calls": calls}
    return {**fields, "content": message.to_record()["content"]} if message.images else fields


_MESSAGE_FIELDS, _CALL_FIELDS = ([field.name for field in attrs.fields(cls)] for cls in (Message, ToolCall))
_of_message, _of_call = operator.attrgetter(*_MESSAGE_FIELDS), operator.attrgetter(*_CALL_FIELDS)


def message_from_dict(fields: ChatDict, load_image: LoadImage) -> Message:
    """The message of a dict from :func:`message_to_dict`."""
    calls = tuple(ToolCall(**call) for call in fields["tool_calls"])
    if not isinstance(fields["content"], str):
        (restored,) = with_images([fields], load_image)
        content = Message.from_chat({"role": "user", "content": restored["content"]}).content
        fields = {**fields, "content": content}
    return Message(**{**fields, "tool_calls": calls})


# -- the log of one rollout --------------------------------------------------------------------------------------------


class TurnLog:
    """The log of the turns of one rollout; :attr:`rollouts.dtypes.Prompt.turn_log` passes it to the episode.

    Args:
        save: stores a turn; ``None`` voids the turns stored so far.
        turns: turns of this rollout that an earlier process stored.
    """

    def __init__(self, save: Callable[[Turn | None], Awaitable[None]], turns: Sequence[Turn] = ()) -> None:
        self._save = save
        self._claims = 0
        self.turns = tuple(turns)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy or pickle of a log is ``None``: only the process that created the log can store turns in it."""
        return type(None), ()

    async def claim(self) -> TurnLog | None:
        """Reserve the log for one episode. A second claim voids the log and returns ``None``."""
        self._claims += 1
        if self._claims == 2:
            await self._save(None)
        return self if self._claims == 1 else None

    async def save(self, turn: Turn) -> None:
        if self._claims == 1:
            await self._save(turn)

    async def void(self) -> None:
        """Drop the turns so far: the rollout begins again."""
        self.turns = ()
        if self._claims == 1:
            await self._save(None)
