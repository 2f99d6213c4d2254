"""SGLang's ``/generate`` format: request bodies, and responses as completions or errors.

Invariant: any response bytes become a checked :class:`~rollouts.dtypes.Completion` or an error of
:mod:`rollouts.errors`. A completion contains the ids that the server sampled, never encoded text, and one logprob per
id. Ids are below the vocabulary size where it is known.

Fields that older servers lack have defaults. This module does no I/O and does not know retries.
"""

from __future__ import annotations

import base64
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rollouts.base.validators import finite
from rollouts.dtypes import (
    CONSTRAINTS,
    Completion,
    Extras,
    LogprobColumn,
    SamplingParams,
    TokenColumn,
    VersionSpan,
    frozen,
    packed_tokens,
)
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import EndpointRefused
from rollouts.http.answers import UNREADABLE
from rollouts.inference.base import ExtrasRequest
from rollouts.inference.completions import (
    BrokenNumbers,
    Count,
    Id,
    SentRequest,
    Span,
    Version,
    check_ids,
    completion_of,
    packed_logprobs,
    rare_params,
    version_spans,
)
from rollouts.inference.token_json import EncodedIds
from rollouts.inference.wire_errors import error_in_200, error_of, status_of

__all__ = [
    "MissingField",
    "read_completion",
    "request_body",
    "request_options",
]


class MissingField(EndpointRefused):
    """The response lacks a field of ``meta_info`` that was requested."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(
            f"meta_info.{field}: got none; expected the requested column: the server was started without it, or a"
            " proxy drops fields of requests"
        )


class _Triple(msgspec.Struct, array_like=True, gc=False):
    """``[logprob, id, text]``; the text is not decoded."""

    logprob: float | None
    token: Id


class _Finish(msgspec.Struct):
    type: str = ""
    matched: Any = None
    message: Any = None
    status_code: Any = None


class _Meta(msgspec.Struct):
    id: Any = None
    finish_reason: _Finish | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    weight_version: Version | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[_Triple] | None = None
    output_token_logprobs_length: int | None = None
    # Read only where the caller asks for extras, so that a value of another type does not harm other runs.
    routed_experts: Any = None
    routed_experts_start_len: Any = None
    top_p_token_ids: Any = None
    top_p_token_offsets: Any = None
    top_p_kept_token_ids: Any = None
    top_p_kept_token_offsets: Any = None
    e2e_latency: Any = None
    queue_time: Any = None
    decode_throughput: Any = None
    spec_accept_token_num: Any = None
    spec_draft_token_num: Any = None
    spec_verify_ct: Any = None


_NUMBERS = (
    "e2e_latency",
    "queue_time",
    "decode_throughput",
    "spec_accept_token_num",
    "spec_draft_token_num",
    "spec_verify_ct",
)


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: msgspec.Raw = msgspec.Raw(b"null")
    """Decoded only if their JSON differs from the JSON of the ids in ``output_token_logprobs``."""
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    """The ids of the prompt with its images expanded; decoded only if there are images."""
    error: Any = None


_BASE64_PIECE = 1 << 20
"""Characters decoded at once; between two pieces, other threads run."""
_REPLY = msgspec.json.Decoder(_Reply)
_IDS = msgspec.json.Decoder(list[Id] | None)


# -- requests ---------------------------------------------------------------------------------------------------------


def request_options(sampling: SamplingParams, stop_token_ids: Sequence[int], *, top_p_sets: bool = False) -> bytes:
    """Encode the part of a ``/generate`` body that follows its ids, for :func:`request_body`.

    Raises:
        ConfigError: the seed does not fit 64 bits.
    """
    params: dict[str, Any] = {
        "temperature": sampling.sent_temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = sampling.stop
    if stop_token_ids:
        params["stop_token_ids"] = [int(token) for token in stop_token_ids]
    params |= rare_params(sampling, minimum="min_new_tokens", seed="sampling_seed")
    params |= {name: value for name in CONSTRAINTS if (value := getattr(sampling, name)) is not None}
    if top_p_sets:
        params["custom_params"] = {"return_top_p_token_ids": True}
    encoded = msgspec.json.encode(params)
    # logprob_start_len -1: logprobs of the reply only; 0 would disable the prefix cache for the prompt (SGLang 0.5.23).
    return b"".join(
        (b'],"return_logprob":true,"logprob_start_len":-1,"stream":false,"sampling_params":', encoded, b"}")
    )


def request_body(
    rid: str,
    ids: EncodedIds,
    options: bytes,
    namespace: str = "",
    extras: ExtrasRequest | None = None,
    images: Sequence[bytes] = (),
    adapter: str = "",
    priority: int | None = None,
) -> tuple[bytes, int]:
    """Return the body of one attempt, which has its own rid, and the offset of the ids in it.

    ``namespace`` is the namespace of the prefix cache, see :mod:`rollouts.inference.prefixes`. ``images`` are JSON
    strings. ``adapter`` is the name of a LoRA adapter.
    """
    extra = b'"extra_key":%b,' % msgspec.json.encode(namespace) if namespace else b""
    if extras is not None and extras.experts_width is not None:
        start = b'"routed_experts_start_len":%d,' % extras.experts_start if extras.experts_start else b""
        extra = b'%b"return_routed_experts":true,%b' % (extra, start)
    if images:
        extra = b'%b"return_prompt_token_ids":true,"image_data":[%b],' % (extra, b",".join(images))
    if adapter:
        extra = b'%b"lora_path":%b,' % (extra, msgspec.json.encode(adapter))
    if priority is not None:
        extra = b'%b"priority":%d,' % (extra, priority)
    head = b'{"rid":"%b",%b"input_ids":[' % (rid.encode(), extra)
    return b"".join((head, *ids.pieces, options)), len(head)


# -- responses --------------------------------------------------------------------------------------------------------


def read_completion(payload: bytes, request: SentRequest) -> Completion:
    """Decode and check the body of a response with status 200.

    Args:
        payload: response body.
        request: the request that it answers.

    Raises:
        MissingField: the response lacks a column of ``extras``.
        EndpointUnavailable: not JSON, a transient error, or NaN instead of logprobs.
        EndpointRefused: not a ``/generate`` response, or an inconsistent one: another number of prompt ids than sent,
            logprobs of other ids than ``output_ids``, an id outside the vocabulary, a logprob above 0.
        ContextOverflow: the error of a prompt that exceeds the context.
    """
    ids = request.ids
    try:
        reply = _REPLY.decode(payload)
    except UNREADABLE as error:
        raise error_in_200(payload, error) from None
    meta = reply.meta_info
    if reply.error or meta.finish_reason is None:
        raise error_in_200(payload, None)
    finish = meta.finish_reason
    status = status_of(finish.status_code) if finish.type == "abort" else None
    if status is not None and status >= 400:
        raise error_of(status, finish.message if isinstance(finish.message, str) else "aborted")
    if finish.type not in ("stop", "length", "abort"):
        raise EndpointRefused(f"finish_reason.type: got {finish.type[:80]!r}; expected stop, length or abort")
    if finish.matched == "NaN happened" and "NaN happened" not in request.stop:
        raise BrokenNumbers("the model computed NaN: its last id was replaced by the server")
    if meta.id is not None and meta.id != request.rid:
        raise EndpointRefused(
            f"meta_info.id: got {str(meta.id)[:80]!r}; expected {request.rid!r}: a proxy renames requests,"
            " so that replies cannot be matched and generations cannot be aborted"
        )
    tokens, logprobs = _columns(reply, meta)
    check_ids(tokens, request.vocab_size, "output_ids")
    # A request that was aborted in the queue may lack counts, or have zeros (SGLang 0.5.23).
    prompt_tokens = ids.count if meta.prompt_tokens is None else meta.prompt_tokens
    if request.images and (len(tokens) or finish.type != "abort"):
        _check_images(meta.prompt_tokens, reply.prompt_token_ids, request)
    if prompt_tokens != ids.count and (len(tokens) or finish.type != "abort"):
        hint = ". Does it truncate prompts? Start it without --allow-auto-truncate" if prompt_tokens < ids.count else ""
        raise EndpointRefused(f"{ids.count} ids were sent; the server counts {prompt_tokens}{hint}")
    return completion_of(
        request,
        tokens,
        logprobs,
        logprobs_name="output_token_logprobs",
        finish_reason=finish.type,
        versions=_versions(meta, len(tokens)),
        cached_tokens=meta.cached_tokens or 0,
        extras=None if request.extras is None else _extras(meta, request, len(tokens), request.extras),
    )


def _check_images(counted: int | None, prompt_token_ids: msgspec.Raw, sent: SentRequest) -> None:
    """Compare the ids of a prompt with images: their number, and where the server sends them, the ids."""
    count, images = sent.ids.count, f"{sent.images} image{'s' * (sent.images != 1)}"
    if counted != count:
        raise EndpointRefused(
            f"meta_info.prompt_tokens: got {counted}; expected {count}, the ids of the prompt with {images}: the"
            " server's processor expands images otherwise. Is it of another version, or has it other settings?"
        )
    try:
        read = _IDS.decode(prompt_token_ids)
    except UNREADABLE as error:
        raise EndpointRefused(f"prompt_token_ids are not a list of ids: {error}") from None
    if read is None:
        return  # an older server
    assert sent.expanded is not None, "a prompt with images has its ids"
    if not np.array_equal(read, sent.expanded):
        raise EndpointRefused(
            f"prompt_token_ids: got {len(read)} other ids; expected the {count} ids of the prompt with {images}: the"
            " server encodes its text again"
        )


def _extras(meta: _Meta, sent: SentRequest, sampled: int, wanted: ExtrasRequest) -> Extras:
    """Read the requested columns; an aborted request without tokens may lack them."""
    prompt_tokens = sent.ids.count
    request: dict[str, float] = {
        "ended": time.time(),
        "seconds": sent.seconds,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "cached_tokens": meta.cached_tokens or 0,
    }
    for name in _NUMBERS:
        value = getattr(meta, name)
        number = None if value is None else finite(value)
        if number is not None:
            request[name] = number
    experts, start = None, 0
    aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
    if wanted.experts_width is not None and (meta.routed_experts is not None or not aborted):
        start = _start_of(meta.routed_experts_start_len, wanted.experts_start)
        column = _int32_column(meta.routed_experts, "routed_experts")
        rows = max(0, prompt_tokens + sampled - 1 - start)
        if len(column) != rows * wanted.experts_width:
            raise EndpointRefused(
                f"meta_info.routed_experts: got {len(column)} numbers; expected {rows} rows of {wanted.experts_width}"
                f" (layers x top-k), from position {start} to that before the last of {prompt_tokens + sampled} tokens"
            )
        experts = column.reshape(rows, wanted.experts_width)
    ids = counts = None
    if wanted.top_p_sets and sampled:
        ids = _int32_column(_first(meta.top_p_token_ids, meta.top_p_kept_token_ids), "top_p_token_ids")
        offsets = _int32_column(_first(meta.top_p_token_offsets, meta.top_p_kept_token_offsets), "top_p_token_offsets")
        if len(offsets) != sampled + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
            got = f"{len(offsets)} offsets from {offsets[:1]} to {offsets[-1:]} for {len(ids)} ids"
            raise EndpointRefused(
                f"meta_info.top_p_token_offsets: got {got}; expected {sampled + 1}, rising from 0 to the number of ids"
            )
        counts = frozen(np.diff(offsets))
    return Extras((request,), experts, start, ids, counts)


def _start_of(reported: Any, wanted: int) -> int:
    """The first position of the routed experts: servers that do not know the option start at 0."""
    start = 0 if reported is None else reported
    if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start <= wanted:
        raise EndpointRefused(f"meta_info.routed_experts_start_len: got {str(reported)[:80]}; expected 0 to {wanted}")
    return start


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _int32_column(value: Any, name: str) -> TokenColumn:
    """A column of int32 numbers: base64 of little-endian bytes, or a list."""
    if value is None:
        raise MissingField(name)
    try:
        if isinstance(value, str):
            pieces = [value[at : at + _BASE64_PIECE] for at in range(0, len(value), _BASE64_PIECE)]
            payload = b"".join([base64.b64decode(piece, validate=True) for piece in pieces])
            return frozen(np.frombuffer(payload, "<i4").astype(np.int32, copy=False))
        return packed_tokens(value)
    except (ValueError, TypeError) as error:
        raise EndpointRefused(
            f"meta_info.{name}: {str(error)[:200]}; expected int32 numbers, as base64 or as a list"
        ) from None


def _columns(reply: _Reply, meta: _Meta) -> tuple[TokenColumn, LogprobColumn]:
    triples = meta.output_token_logprobs or []
    sampled = [triple.token for triple in triples]
    if bytes(reply.output_ids) != msgspec.json.encode(sampled):
        _check_same(reply.output_ids, sampled, meta)
    if meta.output_token_logprobs_length not in (None, len(sampled)):
        raise EndpointRefused(
            f"output_token_logprobs_length: got {meta.output_token_logprobs_length}; expected {len(sampled)}"
        )
    tokens = np.frombuffer(struct.pack(f"={len(sampled)}i", *sampled), np.int32)
    return tokens, packed_logprobs([triple.logprob for triple in triples], "output_token_logprobs")


def _check_same(output_ids: msgspec.Raw, sampled: list[int], meta: _Meta) -> None:
    """Compare ids as numbers; their JSON text may differ by white space, and ``output_ids`` may be missing."""
    try:
        tokens = _IDS.decode(output_ids)
    except UNREADABLE as error:
        raise EndpointRefused(f"output_ids are not a list of ids: {error}") from None
    if tokens is None or tokens == sampled:
        return
    if meta.output_token_logprobs is None:
        raise EndpointRefused(f"{len(tokens)} sampled ids came without the requested output_token_logprobs")
    at = next((i for i, (a, b) in enumerate(zip(tokens, sampled, strict=False)) if a != b), None)
    where = f"{len(tokens)} ids, {len(sampled)} logprobs" if at is None else f"first difference at {at}"
    raise EndpointRefused(f"output_token_logprobs are not those of output_ids: {where}")


def _versions(meta: _Meta, count: int) -> tuple[VersionSpan, ...]:
    last = "default" if meta.weight_version is None else sys.intern(str(meta.weight_version))
    spans = version_spans(meta.weight_versions, last) if count and meta.weight_versions else ()
    return spans or ((VersionSpan(last, 0, count),) if count else ())
