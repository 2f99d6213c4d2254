"""vLLM's format of token ids, ``/inference/v1/generate``: request bodies, and responses as completions or errors.

Invariant: any response bytes become a checked :class:`~rollouts.dtypes.Completion` or an error of
:mod:`rollouts.errors`. vLLM 0.32.0 ignores unknown fields, so a response must prove that the request was read:
it repeats the prompt ids and the request id, and has one logprob and one weight version per sampled id.

vLLM reports logprobs in one of several modes for all requests (``--logprobs-mode``), and no response names it:
:func:`check_mode` compares sampling parameters with a mode that :func:`mode_of` read from probes.

This module does no I/O and does not know retries.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from rollouts.dtypes import Completion, Extras, SamplingParams, VersionSpan, packed_tokens
from rollouts.dtypes.lazy_numpy import np
from rollouts.errors import ConfigError, EndpointRefused
from rollouts.http.answers import UNREADABLE
from rollouts.inference.base import ExtrasRequest
from rollouts.inference.completions import (
    BrokenNumbers,
    Count,
    Id,
    SentRequest,
    Span,
    check_ids,
    completion_of,
    packed_logprobs,
    rare_params,
    version_spans,
)
from rollouts.inference.token_json import EncodedIds
from rollouts.inference.wire_errors import error_in_200

__all__ = [
    "PROBES",
    "LogprobsMode",
    "check_mode",
    "engine_id",
    "mode_of",
    "probed_logprob",
    "read_completion",
    "request_body",
    "request_options",
]

LogprobsMode: TypeAlias = Literal["raw", "processed"]
"""``raw``: of the weights, before temperature, penalties and truncation. ``processed``: of the distribution from which
the token was drawn, after all of them. A greedy token has the logprob of temperature 1 in both."""

_HOTTEST = 2.0
_MISSING = -9999.0
"""Stands for NaN and for a logprob that vLLM does not have."""


def engine_id(rid: str) -> str:
    """The id by which vLLM knows a request, repeats it in the response, and aborts it."""
    return f"generate-tokens-{rid}"


# -- requests ---------------------------------------------------------------------------------------------------------


def request_options(sampling: SamplingParams, stop_token_ids: Sequence[int], *, top_p_sets: bool = False) -> bytes:
    """Encode the part of a body that follows its ids, for :func:`request_body`.

    Raises:
        ConfigError: a seed that does not fit 64 bits, a temperature that vLLM refuses, or sets of ``top_p``.
    """
    if sampling.temperature > _HOTTEST:
        raise ConfigError.of("SamplingParams.temperature", sampling.temperature, "at most 2, the limit of vLLM")
    if top_p_sets:
        raise ConfigError.of("ExtrasRequest.top_p_sets", True, "False: only SGLang reports the ids that top_p kept")
    params: dict[str, Any] = {
        "temperature": sampling.sent_temperature,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": [int(token) for token in stop_token_ids],
        "logprobs": 0,  # of the sampled id only
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if not sampling.greedy:
        params |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    if sampling.stop:
        params["stop"] = sampling.stop
    params |= rare_params(sampling, minimum="min_tokens", seed="seed")
    if sampling.constrained:
        grammars = {
            "json": sampling.json_schema,
            "regex": sampling.regex,
            "grammar": sampling.ebnf,
            "structural_tag": sampling.structural_tag,
        }
        params["structured_outputs"] = {name: value for name, value in grammars.items() if value is not None}
    encoded = msgspec.json.encode(params)
    return b"".join((b'],"return_token_ids":true,"stream":false,"sampling_params":', encoded, b"}"))


def request_body(
    rid: str,
    ids: EncodedIds,
    options: bytes,
    namespace: str = "",
    extras: ExtrasRequest | None = None,
    adapter: str = "",
    priority: int | None = None,
) -> tuple[bytes, int]:
    """Return the body of one attempt, which has its own rid, and the offset of the ids in it.

    ``namespace`` is the namespace of the prefix cache, see :mod:`rollouts.inference.prefixes`. ``adapter`` is the name
    of a LoRA adapter.

    Raises:
        ConfigError: routed experts are requested.
    """
    if extras is not None and extras.experts_width is not None:
        raise ConfigError.of(
            "ExtrasRequest.experts_width", extras.experts_width, "None: routed experts are read from SGLang only"
        )
    salt = b'"cache_salt":%b,' % msgspec.json.encode(namespace) if namespace else b""
    if adapter:
        salt = b'%b"model":%b,' % (salt, msgspec.json.encode(adapter))
    if priority is not None:
        salt = b'%b"priority":%d,' % (salt, priority)
    head = b'{"request_id":"%b",%b"token_ids":[' % (rid.encode(), salt)
    return b"".join((head, *ids.pieces, options)), len(head)


# -- the mode of logprobs ---------------------------------------------------------------------------------------------

_PROBES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.5, "allowed_token_ids": [0]},
    {"temperature": 1.5, "allowed_token_ids": [1]},
    {"temperature": 0},
)
PROBES = tuple(
    msgspec.json.encode({"token_ids": [0], "sampling_params": {**params, "max_tokens": 1, "logprobs": 0}})
    for params in _PROBES
)
"""Bodies of three requests, each for one id. In two of them a single id is allowed, so that its logprob is exactly 0
after processing; before it, two ids cannot both have a probability of 1. The third shows logits, which may be above 0.
"""


def probed_logprob(payload: bytes) -> float:
    """The logprob in the response to a probe.

    Raises:
        EndpointError: it is not a response of this route.
    """
    choice, _ = _decoded(payload)
    content = [] if choice.logprobs is None else choice.logprobs.content
    if len(content) != 1 or content[0].logprob is None:
        raise EndpointRefused(
            f"the probe of --logprobs-mode: got {len(content)} logprobs; expected the logprob of one id"
        )
    return content[0].logprob


def mode_of(first: float, second: float, greedy: float) -> LogprobsMode:
    """The mode of a server, from its logprobs of :data:`PROBES`.

    Raises:
        EndpointRefused: it reports logits.
    """
    if max(first, second, greedy) > 0:
        raise EndpointRefused(
            f"the server's --logprobs-mode: a logprob of {max(first, second, greedy):g} came; expected at most 0: start"
            " it with --logprobs-mode processed_logprobs"
        )
    return "processed" if first == second == 0 else "raw"


def check_mode(mode: LogprobsMode, sampling: SamplingParams, where: str) -> None:
    """Check that a server reports logprobs of the kind that a stored token has: tempered, penalised, and not truncated.

    Raises:
        ConfigError: they are not for these parameters.
    """
    if mode == "processed":
        if sampling.greedy or (sampling.top_p == 1 and sampling.top_k == -1 and sampling.min_p == 0):
            return
        got = f"top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}"
        expected = (
            "no truncation: the server renormalises its logprobs after it (--logprobs-mode processed_logprobs). At"
            " temperature 1, one with --logprobs-mode raw_logprobs has the logprobs of the whole distribution"
        )
    else:
        plain = sampling.greedy or sampling.temperature == 1
        if plain and sampling.repetition_penalty == 1 and not sampling.constrained:
            return
        got = f"temperature {sampling.temperature:g}, repetition_penalty {sampling.repetition_penalty:g}"
        got += ", a grammar" if sampling.constrained else ""
        expected = (
            "temperature 0 or 1, no penalty and no grammar: the server reports logprobs before all of them"
            " (--logprobs-mode raw_logprobs). Start it with --logprobs-mode processed_logprobs"
        )
    raise ConfigError.of(f"SamplingParams for {where}", got, expected)


# -- responses --------------------------------------------------------------------------------------------------------


class _Token(msgspec.Struct, gc=False):
    token_id: Id
    logprob: float | None = None
    rank: int | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] = []


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[Id] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    request_id: Any = None
    model: Any = None
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    """Decoded only if their JSON differs from the JSON of the ids that were sent."""
    error: Any = None


_REPLY = msgspec.json.Decoder(_Reply)
_IDS = msgspec.json.Decoder(list[Id] | None)
_ROUTE = "vLLM's /inference/v1/generate"


def _decoded(payload: bytes) -> tuple[_Choice, _Reply]:
    try:
        reply = _REPLY.decode(payload)
    except UNREADABLE as error:
        raise error_in_200(payload, error, _ROUTE) from None
    if reply.error or not reply.choices or reply.choices[0].finish_reason is None:
        raise error_in_200(payload, None, _ROUTE)
    if len(reply.choices) != 1:
        raise EndpointRefused(f"choices: got {len(reply.choices)}; expected 1")
    return reply.choices[0], reply


def read_completion(payload: bytes, request: SentRequest) -> Completion:
    """Decode and check the body of a response with status 200.

    Args:
        payload: response body.
        request: the request that it answers.

    Raises:
        EndpointUnavailable: not JSON, a transient error, or no finite logprob.
        EndpointRefused: not a response of this route, or no proof that the request was read: other
            prompt ids than sent, another request id, logprobs of other ids than ``token_ids``, tokens without versions.
        ContextOverflow: the error of a prompt that exceeds the context.
    """
    ids = request.ids
    choice, reply = _decoded(payload)
    finish = choice.finish_reason
    if finish not in ("stop", "length", "abort"):
        raise EndpointRefused(f"finish_reason: got {str(finish)[:80]!r}; expected stop, length or abort")
    if reply.request_id != engine_id(request.rid):
        raise EndpointRefused(
            f"request_id: got {str(reply.request_id)[:80]!r}; expected {engine_id(request.rid)!r}: a proxy renames"
            " requests, so that replies cannot be matched and generations cannot be aborted"
        )
    if request.adapter and reply.model != request.adapter:
        raise EndpointRefused(
            f"model: got {str(reply.model)[:80]!r}; expected {request.adapter!r}, the LoRA adapter of the request: a"
            " proxy drops the field"
        )
    content = [] if choice.logprobs is None else choice.logprobs.content
    sampled = [token.token_id for token in content]
    if choice.token_ids != sampled:
        got = "no token_ids" if choice.token_ids is None else f"{len(choice.token_ids)} token_ids"
        raise EndpointRefused(
            f"choices[0].logprobs: got {got} and logprobs of {len(sampled)} ids; expected a logprob of each id"
        )
    if sampled or finish != "abort":  # a request that was aborted in the queue may repeat nothing
        _check_prompt(reply, ids)
    for at, token in enumerate(content):
        if token.rank is None or (token.logprob is not None and token.logprob <= _MISSING):
            raise BrokenNumbers(
                f"choices[0].logprobs.content[{at}]: got logprob {token.logprob}, rank {token.rank}; expected a finite"
                " logprob: the model computed NaN"
            )
    tokens = packed_tokens(sampled)
    logprobs = packed_logprobs([token.logprob for token in content], "choices[0].logprobs.content")
    check_ids(tokens, request.vocab_size, "choices[0].token_ids")
    cached = 0
    if reply.usage is not None and reply.usage.prompt_tokens_details is not None:
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
    numbers = {
        "ended": time.time(),
        "seconds": request.seconds,
        "prompt_tokens": float(ids.count),
        "completion_tokens": float(len(sampled)),
        "cached_tokens": float(cached),
    }
    return completion_of(
        request,
        tokens,
        logprobs,
        logprobs_name="choices[0].logprobs.content",
        finish_reason=finish,
        versions=_versions(choice) if sampled else (),
        cached_tokens=cached,
        extras=None if request.extras is None else Extras((numbers,)),
    )


def _check_prompt(reply: _Reply, ids: EncodedIds) -> None:
    """Compare the ids that the server read with the sent ids; their JSON may differ in white space."""
    raw = bytes(reply.prompt_token_ids)
    if raw == b"[%b]" % ids.text:
        return
    try:
        read = _IDS.decode(raw)
        sent = msgspec.json.decode(b"[%b]" % ids.text)
    except UNREADABLE as error:
        raise EndpointRefused(f"prompt_token_ids are not a list of ids: {error}") from None
    if read is None:
        raise EndpointRefused(
            "prompt_token_ids: got none; expected the ids that were sent: the server or a proxy ignores"
            " return_token_ids"
        )
    if read != sent:
        at = int(np.argmax([a != b for a, b in zip(read, sent, strict=False)] + [True]))
        raise EndpointRefused(
            f"prompt_token_ids: got {len(read)} ids, which differ from position {at}; expected the {len(sent)} that"
            " were sent"
        )


def _versions(choice: _Choice) -> tuple[VersionSpan, ...]:
    if not choice.weight_versions or any(span.version is None for span in choice.weight_versions):
        raise EndpointRefused(
            "choices[0].weight_versions: got none; expected the version of each token, as vLLM 0.32 and newer report"
        )
    return version_spans(choice.weight_versions, "")
