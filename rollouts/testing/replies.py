"""Response bodies of an SGLang stub: the scripted reply in the wire format, and its possible faults.

Invariant: without a fault the body is what SGLang 0.5.23 sends for these ids. This module does not know connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

__all__ = ["ERRORS", "Answer", "Fault", "Request", "Script", "probe_body", "reply_body"]

Script: TypeAlias = Callable[[list[int], dict[str, Any]], Sequence[int] | tuple[Any, Any, Any] | Mapping[str, Any]]
"""A function of ``(input_ids, sampling_params)`` that returns the ids of a reply; ``(ids, logprobs, finish)``, where
finish is a ``finish_reason`` or ``None``; or a whole response body."""

Fault: TypeAlias = Literal[
    "none",  # respond as scripted
    "reset",  # reset the connection without a response; the generation continues until it is aborted
    "reset_in_body",  # reset the connection half way through the body
    "hang",  # generate until aborted
    "drip",  # respond byte by byte
    "close_after",  # respond, then close the connection without "Connection: close"
    "error_500",  # {"error": {"message"}}; the generation continues until it is aborted
    "error_503",  # {"object": "error", "message"}: the queue is full
    "error_duplicate",  # 400, as if the rid had been sent twice; the generation continues until it is aborted
    "error_string",  # 400 {"error": "…"}: an unknown sampling key
    "error_object",  # 400 {"error": {"message"}}: a value out of range
    "error_type",  # 400 {"object": "error", "message", "type"}: malformed
    "error_context",  # 400, longer than the context
    "error_budget",  # 400, prompt and budget longer than the context
    "error_in_200",  # 200 {"error": {"message", "code"}}
    "abort_503",  # 200 with a reply that was aborted for overload
    "not_json",  # 200 with HTML
    "not_http",  # bytes that are not HTTP
    "wrong_ids",  # output_ids and logprobs that contradict each other
    "wrong_count",  # prompt_tokens that is not what was sent
    "wrong_rid",  # the response to another request
    "nan",  # a token without a logprob
    "nan_happened",  # finish_reason "NaN happened"
    "no_logprobs",  # a server that ignores return_logprob
    "no_output_ids",  # ids only in output_token_logprobs
    "old",  # only the fields that every version has
    "abort",  # aborted by another client: half the reply
    "abort_queued",  # aborted by another client while in the queue
]


@attrs.frozen
class Answer:
    """Any response, in place of a fault's name."""

    status: int
    body: bytes


@attrs.frozen
class Request:
    """One received request to ``/generate``."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def reply_body(script: Script, arrived: Request, fault: Fault | Answer, *, version: str = "v1") -> Mapping[str, Any]:
    """The script's response to a request in SGLang's format, by weights of a version, with the fault applied."""
    scripted: Any = script(arrived.input_ids, arrived.sampling_params)
    if isinstance(scripted, Mapping):
        return scripted
    ids, logprobs, finish = scripted if _is_triple(scripted) else (scripted, None, None)
    budget = arrived.sampling_params.get("max_new_tokens", 128)
    cut = len(ids) > budget
    ids = list(ids)[:budget]
    if finish is None:
        finish = {"type": "length", "length": budget} if cut else {"type": "stop", "matched": ids[-1:] and ids[-1]}
    if fault == "abort":
        ids, finish = ids[: len(ids) // 2], {"type": "abort", "message": "Aborted", "status_code": None}
    if fault == "abort_queued":
        finish = {"type": "abort", "message": "Abort in waiting queue"}
        return {"text": "", "output_ids": [], "meta_info": {"id": arrived.rid, "finish_reason": finish}}
    if fault == "abort_503":
        finish = {"type": "abort", "message": "The request queue is full.", "status_code": 503, "err_type": None}
    if fault == "nan_happened":
        finish = {"type": "stop", "matched": "NaN happened"}
    if logprobs is None:
        logprobs = [-1 / (1 + position) for position in range(len(ids))]
    triples = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]
    if fault == "nan":
        triples[0][0] = None
    meta: dict[str, Any] = {
        "id": "another" if fault == "wrong_rid" else arrived.rid,
        "finish_reason": finish,
        "prompt_tokens": len(arrived.input_ids) + (fault == "wrong_count"),
        "completion_tokens": len(ids),
        "cached_tokens": max(0, len(arrived.input_ids) - 1),
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        "output_token_logprobs": triples,
        "output_token_logprobs_length": len(triples),
        "e2e_latency": 0.0,
    }
    if fault == "no_logprobs":
        del meta["output_token_logprobs"], meta["output_token_logprobs_length"]
    if fault == "old":
        meta = {name: meta[name] for name in ("finish_reason", "output_token_logprobs")}
    answer = {"text": "…", "output_ids": [*ids[:-1], ids[-1] + 1] if fault == "wrong_ids" else ids}
    if fault == "no_output_ids":
        del answer["output_ids"]
    return {**answer, "meta_info": meta}


def probe_body(body: Mapping[str, Any], *, original_logprobs: bool = False) -> Mapping[str, Any]:
    """The response to a request for the most probable ids of one fixed distribution, after the temperature.

    ``original_logprobs``: before it, as with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``.
    """
    params = body.get("sampling_params", {})
    temperature = 1.0 if original_logprobs else params.get("temperature", 1.0)
    logits = [-number / (temperature or 1.0) for number in range(20)]
    total = math.log(sum(map(math.exp, logits)))
    tops = [[logit - total, token, None] for token, logit in enumerate(logits)][: body["top_logprobs_num"]]
    meta = {"finish_reason": {"type": "length", "length": 1}, "output_top_logprobs": [tops]}
    return {"output_ids": [0], "meta_info": {**meta, "output_token_logprobs": tops[:1]}}


def _is_triple(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and not isinstance(value[0], int)


_CONTEXT = "The input (9 tokens) is longer than the model's context length (8 tokens)."
_BUDGET = "Requested token count exceeds the model's maximum context length of 8 tokens."
ERRORS: dict[Any, tuple[int, dict[str, Any]]] = {
    "error_500": (500, {"error": {"message": "scheduler died"}}),
    "error_duplicate": (400, {"error": {"message": "Duplicate request ID detected: r"}}),
    "error_503": (503, {"object": "error", "message": "The request queue is full.", "type": "503", "code": 503}),
    "error_string": (400, {"error": "unknown sampling parameter: max_tokens"}),
    "error_object": (400, {"error": {"message": "top_p must be in (0, 1]"}}),
    "error_type": (400, {"object": "error", "message": "bad request", "type": "Bad Request", "code": 400}),
    "error_context": (400, {"error": {"message": _CONTEXT}}),
    "error_budget": (400, {"object": "error", "message": _BUDGET, "type": "BadRequestError", "code": 400}),
    "error_in_200": (200, {"error": {"message": "out of memory", "code": 500}}),
}
