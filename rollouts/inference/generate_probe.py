"""The probes of an SGLang server: the kind of its logprobs, and the version of its weights.

A server with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` reports logprobs before the temperature, and does not say so (SGLang
0.5.23, layers/sampler.py: Sampler.forward). Two requests for one token, at temperatures 1 and 2, show it: twice the
temperature halves the distance between the logprobs of two ids, or leaves it.

A reply names the version of the weights that sampled it. ``/model_info`` names the version that its HTTP worker stored
last, and a server has several with ``--tokenizer-worker-num`` (SGLang 0.5.23, managers/multi_tokenizer_mixin.py).

``vllm_wire.py`` has the probe of vLLM. This module does no I/O.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.http.answers import UNREADABLE
from rollouts.inference.completions import Span, Version
from rollouts.inference.wire_errors import error_in_200

__all__ = [
    "PROBES",
    "VERSION_PROBE",
    "ReportedLogprobs",
    "check_reported",
    "replied_version",
    "reported_by",
    "top_logprobs",
]

ReportedLogprobs: TypeAlias = Literal["raw", "tempered"]
"""``raw``: before the temperature; ``tempered``: after it. Both are after penalties and before truncation."""

_TOP = 8
"""Ids of which the logprobs are compared: the first two alone may be equally probable."""
_LEAST_DISTANCE = 1e-2
PROBES = tuple(
    msgspec.json.encode(
        {
            "input_ids": [0],
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": _TOP,
        }
    )
    for temperature in (1.0, 2.0)
)
"""Bodies of the two requests."""
VERSION_PROBE = msgspec.json.encode({"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
"""Body of a request whose reply names the version."""


class _Finish(msgspec.Struct):
    type: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_top_logprobs: list[list[tuple[float, int, Any]]] | None = None
    weight_version: Version | None = None
    weight_versions: list[Span] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


def replied_version(payload: bytes) -> str | None:
    """The version of the weights that sampled the reply to :data:`VERSION_PROBE`; ``None`` if it names none.

    Raises:
        EndpointUnavailable: it was aborted.
    """
    meta = _meta_of(payload, "weights")
    last = meta.weight_versions[-1].version if meta.weight_versions else meta.weight_version
    return None if last is None else str(last)


def _meta_of(payload: bytes, probed: str) -> _Meta:
    try:
        meta = msgspec.json.decode(payload, type=_Reply).meta_info
    except UNREADABLE as error:
        raise error_in_200(payload, error) from None
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise EndpointUnavailable(f"the probe of the server's {probed} was aborted")
    return meta


def top_logprobs(payload: bytes) -> dict[int, float]:
    """The logprobs of the most probable ids in the response to a probe.

    Raises:
        EndpointUnavailable: it was aborted, e.g. by a weight update.
        EndpointRefused: they are missing.
    """
    meta = _meta_of(payload, "logprobs")
    found = {token: logprob for logprob, token, _ in (meta.output_top_logprobs or [[]])[0]}
    if len(found) < 2:
        raise EndpointRefused(
            f"meta_info.output_top_logprobs: got {len(found)} ids; expected {_TOP} (top_logprobs_num): they show"
            " whether logprobs are of the tempered distribution. Temperatures 0 and 1 do not need them"
        )
    return found


def reported_by(first: dict[int, float], second: dict[int, float]) -> ReportedLogprobs:
    """Return the kind of logprobs that a server reports, from its logprobs at temperatures 1 and 2.

    Raises:
        EndpointRefused: they do not show it.
    """
    common = sorted(first.keys() & second.keys(), key=first.__getitem__)
    distance = first[common[-1]] - first[common[0]] if common else 0.0
    ratio = (second[common[-1]] - second[common[0]]) / distance if distance > _LEAST_DISTANCE else 0.0
    if 0.4 < ratio < 0.6:
        return "tempered"
    if 0.8 < ratio < 1.2:
        return "raw"
    raise EndpointRefused(
        f"the probe of the server's logprobs: two ids are {distance:g} apart at temperature 1, and {ratio:g} of it at"
        " temperature 2; expected 0.5 of it (tempered) or all of it (SGLANG_RETURN_ORIGINAL_LOGPROB)"
    )


def check_reported(reported: ReportedLogprobs, sampling: SamplingParams, where: str) -> None:
    """Check that a server reports logprobs of the kind that a stored token has.

    Raises:
        ConfigError: they are not for these parameters.
    """
    if reported == "raw" and sampling.tempered:
        expected = (
            "temperature 0 or 1: the server reports logprobs before the temperature. Start it without"
            " SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
        raise ConfigError.of(f"SamplingParams for {where}", f"temperature {sampling.temperature:g}", expected)
