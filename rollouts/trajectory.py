"""One linear sequence of tokens: the context that the policy was shown, and the tokens that it sampled.

Laws of this module:

1. Tokens: the ids of every request are a prefix of the stored ids. Each completion carries the checksum of the ids that
   were sent; it must equal the checksum of the stored ids, or :class:`TokenMismatchError` is raised.
2. Mask: a token is trainable if and only if a completion sampled it, and then it has a logprob and a version. Only
   :meth:`Trajectory.add_reply` adds sampled tokens, with logprobs and versions; the mask is true exactly there.
3. Once: a sequence is only appended to, and sealed once.

This module does not know text, tokenizers or environments.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs

from rollouts.concurrency.times import Timeline
from rollouts.dtypes import (
    Completion,
    Extras,
    FinishReason,
    ImageSpan,
    LogprobColumn,
    LogprobsOf,
    Message,
    OnRewrite,
    StopReason,
    TokenColumn,
    VersionSpan,
    digest,
    frozen,
)
from rollouts.dtypes.lazy_numpy import np, npt
from rollouts.errors import Failure, TokenMismatchError

__all__ = ["CompletionRecord", "Segment", "Trajectory", "digest"]


@attrs.frozen
class Segment:
    """Adjacent tokens of one origin: positions ``start`` to ``stop`` (half open) of the trajectory."""

    start: int
    stop: int
    version: str | None
    """The policy version that sampled the tokens; ``None`` for context, which is never trained."""


@attrs.frozen
class CompletionRecord:
    """The record of one completion: the request was ``tokens[:start]``, the sampled tokens ``tokens[start:stop]``."""

    request_id: str
    start: int
    stop: int
    finish_reason: FinishReason
    prompt_digest: int
    """CRC-32 of the ids that the client sent; :func:`digest` of the stored ``tokens[:start]`` must equal it."""
    cached_tokens: int
    seconds: float
    continues: bool = attrs.field(default=False, converter=bool)
    """Whether the reply continues the turn of the completion before it, after text of the environment."""
    temperature: float | None = None
    """The sampling temperature, 0 if greedy; ``None`` in runs of earlier versions."""
    logprobs_of: LogprobsOf | None = None
    """The distribution of its logprobs; ``None`` if the policy does not say."""
    extras: Extras | None = attrs.field(default=None, eq=False, repr=False)
    """Further columns and numbers of the completion; in memory only."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as they are stored: without ``extras``, and without fields that are false or unknown."""
        fields = dict(zip(_RECORD_FIELDS, _record_values(self), strict=True))
        if not self.continues:
            del fields["continues"]
        for name in ("temperature", "logprobs_of"):
            if fields[name] is None:
                del fields[name]
        return fields


_RECORD_FIELDS = tuple(field.name for field in attrs.fields(CompletionRecord) if field.name != "extras")
_record_values = operator.attrgetter(*_RECORD_FIELDS)


class Trajectory:
    """One token sequence of a rollout. Context and replies are appended until it is sealed.

    A rollout whose history is rewritten has several; tokens sampled in one are context in the later ones.

    Attributes:
        history: the policy for a history that the template rewrites.
        messages: the conversation as text; a view, never the record.
        tools: the tools that the policy was shown, as the JSON of their schemas; ``None`` if unknown.
        images: the images of the tokens, in order, with the positions of their placeholder ids.
        segments: adjacent tokens of equal origin, covering all tokens.
        completions: records of the completions, in order.
        step_rewards: rewards of the environment's steps.
        step_completions: for each of these rewards the number of the completion that it answers, -1 where unknown.
        metrics: numbers added up over the episode.
        times: the timeline of the rollout.
        stop_reason: why the trajectory ended; ``None`` until it is sealed.
        failure: the failure that ended it, if ``stop_reason`` is ``FAILED``.
    """

    def __init__(self, history: OnRewrite = "append") -> None:
        self.history: OnRewrite = history
        self.messages: list[Message] = []
        self.tools: str | None = None
        self.images: list[ImageSpan] = []
        self.segments: list[Segment] = []
        self.completions: list[CompletionRecord] = []
        self.step_rewards: list[float] = []
        self.step_completions: list[int] = []
        self.metrics: dict[str, float] = {}
        self.times = Timeline()
        self.stop_reason: StopReason | None = None
        self.failure: Failure | None = None
        self._tokens: TokenColumn = np.empty(0, np.int32)
        """Buffer with spare capacity after the first ``_length`` tokens."""
        self._readable = frozen(self._tokens.view())
        self._replies: list[tuple[int, LogprobColumn]] = []
        """Start position and logprobs of each reply; empty once sealed."""
        self._sealed: tuple[npt.NDArray[np.bool_], LogprobColumn] | None = None
        self._length = 0
        self._digest = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        trained = int(self.mask.sum())
        state = self.stop_reason or "growing"
        return f"<Trajectory {len(self)} tokens, {trained} sampled in {len(self.completions)} calls, {state}>"

    @property
    def tokens(self) -> TokenColumn:
        """All ids so far, shape ``(n,)``, read-only. The view stays valid while the trajectory grows."""
        return self._readable[: self._length]

    @property
    def logprobs(self) -> LogprobColumn:
        """Logprob of each sampled id, 0 where the mask is false, shape ``(n,)``, read-only."""
        return self.sampled(0)[1]

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """True where the policy sampled the token, shape ``(n,)``, read-only."""
        return self.sampled(0)[0]

    def sampled(self, start: int) -> tuple[npt.NDArray[np.bool_], LogprobColumn]:
        """Mask and logprobs from position ``start`` on, read-only. Tokens before ``start`` cost nothing."""
        if self._sealed is not None:
            mask, logprobs = self._sealed
            return mask[start:], logprobs[start:]
        mask = np.zeros(self._length - start, np.bool_)
        logprobs = np.zeros(self._length - start, np.float32)
        for first, column in reversed(self._replies):
            stop = first + len(column) - start
            if stop <= 0:
                break
            begin = max(first - start, 0)
            mask[begin:stop] = True
            logprobs[begin:stop] = column[begin - stop :]
        return frozen(mask), frozen(logprobs)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The version of each range of sampled tokens; together they cover exactly the mask."""
        return tuple(
            VersionSpan(segment.version, segment.start, segment.stop)
            for segment in self.segments
            if segment.version is not None
        )

    def add_context(
        self, tokens: TokenColumn, messages: Sequence[Message] = (), images: Sequence[ImageSpan] = ()
    ) -> None:
        """Append tokens that are shown to the policy and never trained: an opening or a bridge.

        ``images`` belong to ``tokens``, with positions in them.
        """
        self._append(tokens)
        self.images += [span.shifted(self._length - len(tokens)) for span in images]
        self._extend_segments(len(tokens), None)
        self.messages.extend(messages)

    def add_rewards(self, rewards: Sequence[float]) -> None:
        """Append rewards of the environment's step that answered the last completion."""
        self.step_rewards += rewards
        self.step_completions += [len(self.completions) - 1] * len(rewards)

    def add_reply(
        self, completion: Completion, message: Message, *, continues: bool = False, temperature: float | None = None
    ) -> None:
        """Append sampled tokens, after checking that they were sampled from exactly the stored tokens.

        ``continues``: they continue the turn of the last reply. ``temperature``: the temperature of their request.

        Raises:
            TokenMismatchError: the request contained other ids than this trajectory.
        """
        if completion.prompt_tokens != self._length or completion.prompt_digest != self._digest:
            raise TokenMismatchError(
                f"completion {completion.request_id} was sampled from {completion.prompt_tokens} tokens "
                f"(digest {completion.prompt_digest:#010x}); the trajectory has {len(self)} ({self._digest:#010x})"
            )
        start = self._length
        self._append(completion.tokens)
        self._replies.append((start, completion.logprobs))
        for span in completion.versions:
            self._extend_segments(span.stop - span.start, span.version)
        self.messages.append(message)
        self.completions.append(
            CompletionRecord(
                request_id=completion.request_id,
                start=start,
                stop=self._length,
                finish_reason=completion.finish_reason,
                prompt_digest=completion.prompt_digest,
                cached_tokens=completion.cached_tokens,
                seconds=completion.seconds,
                continues=continues,
                temperature=temperature,
                logprobs_of=completion.logprobs_of,
                extras=completion.extras,
            )
        )

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one of the episode's metrics."""
        self.metrics[name] = self.metrics[name] + amount if name in self.metrics else amount  # `get` would be a call

    def seal(self, stop_reason: StopReason, failure: Failure | None = None) -> Trajectory:
        """End the trajectory: its tokens become immutable, and the columns shrink to their exact size."""
        self._check_not_sealed()
        self._tokens = frozen(self.tokens.copy())
        self._readable = self._tokens
        self._sealed = self.sampled(0)
        self._replies.clear()
        self.stop_reason, self.failure = stop_reason, failure
        return self

    def _check_not_sealed(self) -> None:
        if self.stop_reason is not None:
            raise TokenMismatchError(f"a sealed trajectory cannot change: {self!r}")

    def _append(self, tokens: TokenColumn) -> None:
        self._check_not_sealed()
        start, stop = self._length, self._length + len(tokens)
        if stop > len(self._tokens):
            grown = np.empty(stop + stop // 2, np.int32)
            grown[:start] = self._tokens[:start]
            self._tokens, self._readable = grown, frozen(grown.view())
        self._tokens[start:stop] = tokens
        self._length = stop
        self._digest = digest(tokens, self._digest)

    def _extend_segments(self, length: int, version: str | None) -> None:
        """Count the next tokens in the last segment, if it is of the same version, or in a new one."""
        last = self.segments[-1] if self.segments else None
        start = stop = last.stop if last is not None else 0
        stop += length
        if last is not None and last.version == version:
            start = self.segments.pop().start
        if stop > start:
            self.segments.append(Segment(start, stop, version))
