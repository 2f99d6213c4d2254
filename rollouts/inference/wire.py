"""SGLang's /generate on the wire: requests to bytes, answers to completions.

Invariant: pure. Ids and logprobs come from the ids that the server says it sampled, never from its text; an answer that
contradicts itself is a typed error, never a completion. This module knows no connection and no retry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollouts.dtypes import Completion, FinishReason, SamplingParams, VersionSpan
from rollouts.errors import ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable, TokenMismatchError
from rollouts.inference.transport import Answer

__all__ = ["error_of", "read_completion", "request_tail"]

_OVERFLOWS = ("longer than the model's context length", "exceeds the model's maximum context length")
_REFUSALS = range(400, 500)
_WORTH_RETRYING = (408, 409, 425, 429)


class _Triple(msgspec.Struct, array_like=True, gc=False):
    """``[logprob, id, text]``; the text is skipped, no object is made of it."""

    logprob: float | None
    token: int


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None
    matched: int | str | list[int] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Triple] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(_Generated, strict=False)


def request_tail(sampling: SamplingParams, stop_token_ids: Sequence[int], request_id: str) -> bytes:
    """Everything of a request's body but the ids: what follows ``{"input_ids":[…]`` up to the closing brace."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.min_p:
        params["min_p"] = sampling.min_p
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if stop_token_ids:
        params["stop_token_ids"] = list(stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    rest = {"sampling_params": params, "return_logprob": True, "rid": request_id}
    return b"," + msgspec.json.encode(rest)[1:]


def read_completion(
    answer: Answer, *, sent: int, prompt_digest: int, request_id: str, seconds: float, place: str
) -> Completion:
    """The completion that an answer holds, checked.

    Raises:
        EndpointError: the answer is an error, or no generation; the class says whether another attempt may help.
        TokenMismatchError: the server counted other prompt tokens than were sent, or its two lists of ids differ.
    """
    if answer.status != 200:
        raise error_of(answer, place)
    try:
        generated = _DECODER.decode(answer.body)
    except msgspec.MsgspecError as error:
        if _message(answer.body) is not None:
            raise error_of(answer, place) from None
        raise EndpointUnavailable(f"{place}: not an answer of /generate ({error}): {_start(answer.body)}") from error
    meta = generated.meta_info
    finish = _finish(meta, place)
    triples = meta.output_token_logprobs or []
    tokens = [triple.token for triple in triples]
    if generated.output_ids is not None and generated.output_ids != tokens:
        if generated.output_ids and not triples:
            raise EndpointRefused(f"{place}: output_ids came without output_token_logprobs; expected return_logprob")
        raise TokenMismatchError(
            f"{place}: output_ids ({len(generated.output_ids)}) and output_token_logprobs ({len(tokens)}) differ"
        )
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
        logprobs = np.array([math.nan if triple.logprob is None else triple.logprob for triple in triples], np.float32)
    if not np.isfinite(logprobs).all() or (tokens and min(tokens) < 0):
        position = int(np.argmin(np.isfinite(logprobs)))
        raise EndpointUnavailable(f"{place}: sampled token {position} of {len(tokens)} has no finite logprob")
    if meta.prompt_tokens is not None and meta.prompt_tokens != sent:
        raise TokenMismatchError(f"{place}: {sent} ids were sent, the server counted {meta.prompt_tokens}")
    try:
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=finish,
            versions=_versions(meta, len(tokens)),
            prompt_tokens=sent,
            prompt_digest=prompt_digest,
            request_id=request_id,
            cached_tokens=meta.cached_tokens or 0,
            seconds=seconds,
        )
    except (ValueError, OverflowError) as error:
        raise EndpointUnavailable(f"{place}: {error}") from error


def _finish(meta: _Meta, place: str) -> FinishReason:
    finish = meta.finish_reason
    if finish is None:
        raise EndpointUnavailable(f"{place}: the answer has no finish_reason")
    if finish.matched == "NaN happened":
        raise EndpointUnavailable(f"{place}: the model's numbers broke (NaN happened)")
    if finish.type == "abort" and finish.status_code is not None:
        raise EndpointUnavailable(f"{place}: {finish.status_code}: {finish.message}")
    if finish.type == "stop":
        return "stop"
    if finish.type == "length":
        return "length"
    if finish.type == "abort":
        return "abort"
    raise EndpointRefused(f"{place}: finish_reason {finish.type!r}; expected stop, length or abort")


def _versions(meta: _Meta, count: int) -> tuple[VersionSpan, ...]:
    """The spans of the answer; one span where the server is too old to send any."""
    spans = [VersionSpan(span.version, span.start, span.end) for span in meta.weight_versions or []]
    spans = [span for span in spans if span.stop > span.start]
    if not spans and count:
        spans = [VersionSpan(meta.weight_version or "default", 0, count)]
    return tuple(spans)


def error_of(answer: Answer, place: str) -> EndpointError:
    """The typed error that an answer with an error stands for; SGLang has four shapes of them."""
    message = _message(answer.body) or _start(answer.body)
    text = f"{place}: {answer.status}: {message}"
    if any(sign in message for sign in _OVERFLOWS):
        return ContextOverflow(text)
    if answer.status in _REFUSALS and answer.status not in _WORTH_RETRYING:
        return EndpointRefused(text)
    return EndpointUnavailable(text)


def _message(body: bytes) -> str | None:
    """``{"error": {"message"}}``, ``{"error": "…"}``, ``{"message"}`` or ``{"detail"}``."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return None
    if not isinstance(value, dict):
        return None
    error = value.get("error", value)
    if isinstance(error, dict):
        error = error.get("message", error.get("detail"))
    return error if isinstance(error, str) else None


def _start(body: bytes) -> str:
    text = body[:200].decode(errors="replace").strip()
    return repr(text) if text else "an empty body"
