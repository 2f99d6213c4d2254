"""Parts that the responses of all servers share, and the checks of a completion.

Invariant: a completion whose checks pass has one finite logprob per id, ids below the vocabulary size where it is
known, and obeys the budget and the stop ids of its request.

This module does not know the format of a server.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import attrs
import msgspec

from rollouts.dtypes import (
    LOGPROB_TOLERANCE,
    Completion,
    Extras,
    LogprobColumn,
    SamplingParams,
    TokenColumn,
    VersionSpan,
    are_logprobs,
)
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import ExtrasRequest
from rollouts.inference.token_json import EncodedIds

__all__ = [
    "BrokenNumbers",
    "Count",
    "Id",
    "SentRequest",
    "Span",
    "Version",
    "check_ids",
    "check_obeyed",
    "completion_of",
    "max_response_bytes",
    "packed_logprobs",
    "rare_params",
    "version_spans",
]

Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Version = str | Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class BrokenNumbers(EndpointUnavailable):
    """The model computed NaN. Not retried in the same call: sampling until it succeeds would hide a broken model."""


@attrs.frozen
class SentRequest:
    """A request that was answered: its response is checked against it, and the completion records parts of it."""

    rid: str
    ids: EncodedIds
    stop: Sequence[str] = ()
    """Stop strings."""
    seconds: float = 0.0
    """Wall time of the call until the response."""
    waited: float = 0.0
    """Seconds of it before the request was sent."""
    server: str = ""
    """URL of the server, without a password."""
    vocab_size: int | None = None
    """Upper bound of ids; ``None`` if unknown."""
    extras: ExtrasRequest | None = None
    """Columns requested beyond tokens and logprobs."""
    images: int = 0
    """Number of images of the prompt."""
    constrained: bool = False
    """Whether a grammar limited the ids."""
    adapter: str = ""
    """Requested LoRA adapter; empty for the base model."""
    expanded: TokenColumn | None = None
    """If there are images, all ids of the prompt; ``ids`` counts them, but has one placeholder for each image."""


class Span(msgspec.Struct, gc=False):
    """Tokens of one weight version."""

    version: Version | None = None
    start: int = 0
    end: int = 0


_RESPONSE_BYTES, _BYTES_PER_TOKEN, _BYTES_PER_REQUEST_BYTE = 1 << 18, 512, 32
_BYTES_PER_ID, _BYTES_PER_EXPERT, _BYTES_PER_SET = 12, 6, 1 << 16
"""An int32 in decimal; an int32 in base64; the ids that ``top_p`` kept for one token, some 12,000."""


def max_response_bytes(
    request_bytes: int,
    sampling: SamplingParams,
    prompt_tokens: int = 0,
    extras: ExtrasRequest | None = None,
    *,
    has_images: bool = False,
) -> int:
    """Upper bound of a sound response to a request of this size, without the size of its images.

    Each new token is an id, a logprob and at most a short string in two places. A server that ignores
    ``logprob_start_len`` also reports the prompt's logprobs, and an error message may quote the request. With images,
    the response has the ids of the prompt.
    """
    max_bytes = _RESPONSE_BYTES + _BYTES_PER_TOKEN * sampling.max_new_tokens + _BYTES_PER_REQUEST_BYTE * request_bytes
    if has_images:
        max_bytes += _BYTES_PER_ID * prompt_tokens
    if extras is not None:
        rows = prompt_tokens + sampling.max_new_tokens
        max_bytes += _BYTES_PER_EXPERT * rows * (extras.experts_width or 0)
        max_bytes += _BYTES_PER_SET * sampling.max_new_tokens * extras.top_p_sets
    return max_bytes


def check_obeyed(completion: Completion, sampling: SamplingParams, stop_token_ids: Sequence[int]) -> None:
    """Raise if the server ignored max_new_tokens or stop_token_ids (some routers drop unknown fields).

    Raises:
        EndpointRefused: the reply continues after ``max_new_tokens`` or after a stop id.
    """
    tokens = completion.tokens
    hint = "a proxy drops fields of requests. Use the URL of a worker, or update the router"
    if len(tokens) > sampling.max_new_tokens:
        raise EndpointRefused(
            f"max_new_tokens: {sampling.max_new_tokens} ids were requested, {len(tokens)} received: {hint}"
        )
    before_last = tokens[:-1]
    for stop in stop_token_ids:
        if np.logical_or.reduce(before_last == stop):
            raise EndpointRefused(f"stop_token_ids: the reply continues after its stop id {stop}: {hint}")


def check_ids(tokens: TokenColumn, vocab_size: int | None, name: str) -> None:
    """Raise at an id without an embedding row in the column ``name``.

    Raises:
        EndpointRefused: an id is invalid.
    """
    if vocab_size is not None and len(tokens) and np.maximum.reduce(tokens) >= vocab_size:
        at = int((tokens >= vocab_size).argmax())
        raise EndpointRefused(
            f"{name}[{at}]: got id {tokens[at]}; expected 0 <= id < {vocab_size} (vocab_size): does the tokenizer"
            " belong to the server's model?"
        )


def _check_logprobs(logprobs: LogprobColumn, name: str) -> None:
    valid = are_logprobs(logprobs)
    if not np.logical_and.reduce(valid):
        at = int(valid.argmin())
        raise EndpointRefused(
            f"{name}[{at}]: got {logprobs[at]}; expected a logprob <= 0, with a tolerance of"
            f" {LOGPROB_TOLERANCE:g} for rounding"
        )


def packed_logprobs(values: Sequence[float | None], name: str) -> LogprobColumn:
    """Pack logprobs of the column ``name``.

    Raises:
        BrokenNumbers: a logprob is null, which stands for NaN and infinity in JSON, or too large for float32.
    """
    try:
        packed = struct.pack(f"={len(values)}f", *values)
    except (struct.error, OverflowError):
        received = np.array(values, np.float64)
        at = int(np.flatnonzero(~(np.abs(received) <= _LARGEST))[0])
        raise BrokenNumbers(f"{name}[{at}]: got {received[at]}; expected a finite number") from None
    return np.frombuffer(packed, np.float32)


_LARGEST = (2 - 2**-23) * 2.0**127


def version_spans(spans: Sequence[Span], unnamed: str) -> tuple[VersionSpan, ...]:
    """The spans that have tokens; ``unnamed`` is the version of a span without a name."""
    return tuple(
        [
            VersionSpan(unnamed if span.version is None else sys.intern(str(span.version)), span.start, span.end)
            for span in spans
            if span.start != span.end
        ]
    )


def completion_of(
    request: SentRequest,
    tokens: TokenColumn,
    logprobs: LogprobColumn,
    *,
    logprobs_name: str,
    finish_reason: str,
    versions: Sequence[VersionSpan],
    cached_tokens: int,
    extras: Extras | None,
) -> Completion:
    """Build the completion of a response, which checks its logprobs and versions; everything else was checked.

    Raises:
        EndpointRefused: a logprob is above 0 (in the column ``logprobs_name``), or the versions do not cover the
            tokens.
    """
    try:
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=sys.intern(finish_reason),  # type: ignore[arg-type]
            versions=versions,
            prompt_tokens=request.ids.count,
            prompt_digest=request.ids.digest,
            request_id=request.rid,
            cached_tokens=cached_tokens,
            seconds=request.seconds,
            waited=request.waited,
            server=request.server,
            logprobs_of="constrained" if request.constrained else "tempered",
            extras=extras,
        )
    except ValueError as error:
        _check_logprobs(logprobs, logprobs_name)
        raise EndpointRefused(f"weight_versions: {str(error)[:300]}") from None


def rare_params(sampling: SamplingParams, *, minimum: str, seed: str) -> dict[str, Any]:
    """The sampling parameters that most requests lack, under the names of a server.

    Args:
        sampling: the parameters.
        minimum: the server's name of ``min_new_tokens``.
        seed: its name of the seed.

    Raises:
        ConfigError: the seed does not fit 64 bits.
    """
    params: dict[str, Any] = {}
    if sampling.min_new_tokens:
        params[minimum] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1.0:
        params["repetition_penalty"] = sampling.repetition_penalty
    if sampling.seed is not None:
        if not -(2**63) <= sampling.seed < 2**63:
            raise ConfigError.of("SamplingParams.seed", sampling.seed, "an integer of 64 bits")
        params[seed] = sampling.seed
    return params
