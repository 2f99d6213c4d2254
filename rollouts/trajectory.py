"""One linear sequence of tokens: what the policy saw and what it sampled, and which is which.

Laws kept here:

1. Tokens: the ids of every request are a prefix of the ids stored. Each completion brings the checksum of the ids that
   were really sent; it must equal the checksum of the ids held, or :class:`TokenMismatchError` is raised.
2. Mask: a token is trainable if and only if a completion sampled it, and then it has a logprob and a version. One
   method takes the three in together; the mask is true where it took something in.
3. Once: a sequence is only ever appended to, and sealed once.

This module knows no text, no tokenizer and no environment.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from rollouts.dtypes import (
    Completion,
    FinishReason,
    LogprobColumn,
    Message,
    OnRewrite,
    StopReason,
    TokenColumn,
    VersionSpan,
    frozen,
)
from rollouts.errors import Failure, TokenMismatchError

__all__ = ["CompletionRecord", "Segment", "Trajectory", "digest"]


def digest(tokens: TokenColumn, start: int = 0) -> int:
    """CRC-32 of token ids as little-endian int32, continuing from the digest ``start`` of the ids before them."""
    return zlib.crc32(np.ascontiguousarray(tokens, _ON_THE_WIRE).data, start)


_ON_THE_WIRE = np.dtype("<i4")


@attrs.frozen
class Segment:
    """One run of tokens of one origin: positions ``start`` to ``stop`` (half open) of its trajectory."""

    start: int
    stop: int
    version: str | None
    """The policy version that sampled it; ``None`` for context, which is never trained."""

    @property
    def trainable(self) -> bool:
        return self.version is not None


@attrs.frozen
class CompletionRecord:
    """One completion: the request was the first ``start`` tokens, the reply the tokens up to ``stop``."""

    request_id: str
    start: int
    stop: int
    finish_reason: FinishReason
    prompt_digest: int
    """CRC-32 of the ids that the client sent; :func:`digest` of the stored ``tokens[:start]`` must equal it."""
    cached_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Its fields by name."""
        return dict(zip(_CALL_FIELDS, _CALL_VALUES(self), strict=True))


_CALL_FIELDS = tuple(field.name for field in attrs.fields(CompletionRecord))
_CALL_VALUES = operator.attrgetter(*_CALL_FIELDS)


class Trajectory:
    """Grows by contexts and replies until it is sealed.

    A rollout whose history is rewritten has several: what one of them sampled is context in those after it.

    Attributes:
        history: what was to be done where the template rewrites the history.
        messages: the conversation as text; a view, never the record.
        segments: adjacent runs of equal origin, covering all tokens.
        calls: the completions, in order.
        step_rewards: rewards of the environment's steps.
        metrics: numbers added up over the episode.
        stop_reason: why it ended; ``None`` while it grows.
        failure: what ended it when ``stop_reason`` is ``FAILED``.
    """

    def __init__(self, history: OnRewrite = "append") -> None:
        self.history: OnRewrite = history
        self.messages: list[Message] = []
        self.segments: list[Segment] = []
        self.completions: list[CompletionRecord] = []
        self.step_rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.stop_reason: StopReason | None = None
        self.failure: Failure | None = None
        self._tokens: TokenColumn = np.empty(0, np.int32)
        """With room behind those that there are."""
        self._readable = frozen(self._tokens.view())
        self._replies: list[tuple[int, LogprobColumn]] = []
        """Where each reply begins, and its logprobs; while it grows."""
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
        """All ids so far, shape ``(n,)``, read-only; stays valid while the trajectory grows."""
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
        """Mask and logprobs from position ``start`` on; costs what stands behind it, not what stands before."""
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
        """Which version sampled which positions; covers exactly the mask."""
        return tuple(
            VersionSpan(segment.version, segment.start, segment.stop)
            for segment in self.segments
            if segment.version is not None
        )

    def add_context(self, tokens: TokenColumn, messages: Sequence[Message] = ()) -> None:
        """Append tokens that the policy is shown: a prompt, a bridge. They are never trained."""
        self._append(tokens)
        self._close_segment(len(tokens), None)
        self.messages.extend(messages)

    def add_reply(self, completion: Completion, message: Message) -> None:
        """Append what the policy sampled, after checking that it was sampled from exactly these tokens.

        Raises:
            TokenMismatchError: the request held other ids than this trajectory.
        """
        if completion.prompt_tokens != self._length or completion.prompt_digest != self._digest:
            raise TokenMismatchError(
                f"completion {completion.request_id} was sampled from {completion.prompt_tokens} tokens "
                f"(digest {completion.prompt_digest:#010x}); the trajectory holds {len(self)} ({self._digest:#010x})"
            )
        start = self._length
        self._append(completion.tokens)
        self._replies.append((start, completion.logprobs))
        for span in completion.versions:
            self._close_segment(span.stop - span.start, span.version)
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
            )
        )

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one of the episode's metrics."""
        self.metrics[name] = self.metrics.get(name, 0) + amount

    def seal(self, stop_reason: StopReason, failure: Failure | None = None) -> Trajectory:
        """End it: no token can be added any more, and the columns take exactly the room they need."""
        self._growing()
        self._tokens = frozen(self.tokens.copy())
        self._readable = self._tokens
        self._sealed = self.sampled(0)
        self._replies.clear()
        self.stop_reason = stop_reason
        self.failure = failure
        return self

    def _growing(self) -> None:
        if self.stop_reason is not None:
            raise TokenMismatchError(f"a sealed trajectory cannot change: {self!r}")

    def _append(self, tokens: TokenColumn) -> None:
        self._growing()
        start, stop = self._length, self._length + len(tokens)
        if stop > len(self._tokens):
            grown = np.empty(stop + stop // 4, np.int32)
            grown[:start] = self._tokens[:start]
            self._tokens, self._readable = grown, frozen(grown.view())
        self._tokens[start:stop] = tokens
        self._length = stop
        self._digest = digest(tokens, self._digest)

    def _close_segment(self, length: int, version: str | None) -> None:
        last = self.segments[-1] if self.segments else None
        start = stop = last.stop if last is not None else 0
        stop += length
        if last is not None and last.version == version:
            start = self.segments.pop().start
        if stop > start:
            self.segments.append(Segment(start, stop, version))
