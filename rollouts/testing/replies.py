"""What a stub of SGLang says: the scripted reply in its wire shape, and the ways in which it can be wrong.

Invariant: without a fault the reply is what SGLang 0.5.23 sends for those ids. This module knows no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

__all__ = ["ERRORS", "Answer", "Fault", "Request", "Script", "reply_body"]

Script: TypeAlias = Callable[[list[int], dict[str, Any]], Sequence[int] | tuple[Any, Any, Any] | Mapping[str, Any]]
"""``(input_ids, sampling_params)`` to the ids of a reply; to ``(ids, logprobs, finish)``, where finish is a
``finish_reason`` or ``None``; or to a whole answer's body."""

Fault: TypeAlias = Literal[
    "none",  # answer as scripted
    "reset",  # reset the connection without a word; the generation goes on until it is aborted
    "reset_in_body",  # reset it half way through the answer
    "hang",  # generate until aborted
    "drip",  # answer byte by byte
    "close_after",  # answer, then close the connection without saying so
    "error_500",  # {"error": {"message"}}; the generation goes on until it is aborted
    "error_503",  # {"object": "error", "message"}: the queue is full
    "error_duplicate",  # 400, as if the rid had been sent twice: the generation goes on until it is aborted
    "error_string",  # 400 {"error": "…"}: an unknown sampling key
    "error_object",  # 400 {"error": {"message"}}: a value out of range
    "error_type",  # 400 {"object": "error", "message", "type"}: malformed
    "error_context",  # 400, longer than the context
    "error_budget",  # 400, prompt and budget longer than the context
    "error_in_200",  # 200 {"error": {"message", "code"}}
    "abort_503",  # 200 with a reply that was aborted for overload
    "not_json",  # 200 with HTML
    "not_http",  # bytes that are no HTTP
    "wrong_ids",  # output_ids and logprobs that contradict each other
    "wrong_count",  # prompt_tokens that is not what was sent
    "wrong_rid",  # the answer to another request
    "nan",  # a token without a logprob
    "nan_happened",  # the server's own word for it
    "no_logprobs",  # a server that ignores return_logprob
    "no_output_ids",  # ids only beside their logprobs
    "old",  # only the fields that every version has
    "abort",  # the answer to somebody else's abort: half the reply
    "abort_queued",  # the same for a request that had not begun
]


@attrs.frozen
class Answer:
    """Any answer at all, in place of a fault's name."""

    status: int
    body: bytes


@attrs.frozen
class Request:
    """One call of ``/generate`` as it arrived."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def reply_body(script: Script, arrived: Request, fault: Fault | Answer) -> Mapping[str, Any]:
    """What the script says to a request, in SGLang's shape, spoilt as the fault says."""
    said: Any = script(arrived.input_ids, arrived.sampling_params)
    if isinstance(said, Mapping):
        return said
    ids, logprobs, finish = said if _is_triple(said) else (said, None, None)
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
        "weight_version": "v1",
        "weight_versions": [{"version": "v1", "start": 0, "end": len(ids)}],
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


def _is_triple(said: Any) -> bool:
    return isinstance(said, tuple) and len(said) == 3 and not isinstance(said[0], int)


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
