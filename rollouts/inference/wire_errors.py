"""Errors from HTTP statuses and error bodies of SGLang, vLLM and proxies.

Invariant: any status with any bytes becomes one ``EndpointError``, whose class states whether a retry may help and
whether a generation may still be running. This module does no I/O.
"""

from __future__ import annotations

from typing import Any

from rollouts.errors import ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.http.answers import RETRIED_STATUSES, loads, message_of

__all__ = [
    "MayStillRun",
    "Overloaded",
    "error_in_200",
    "error_of",
    "status_of",
]

_OVERFLOWS = (
    ("longer than", "context length"),  # the prompt alone
    ("longer than", "maximum model length"),  # vLLM: the prompt alone, or with one more token
    ("exceed", "context length"),  # prompt and budget
    ("input length", "exceeds the maximum allowed length"),  # max_req_input_len: a few tokens less than the context
    ("exceeds the kv memory budget",),  # the KV pool, which may be smaller than the context
)
"""Parts of messages about a request that does not fit; SGLang's unless a comment names another server."""


class MayStillRun(EndpointUnavailable):
    """An error after which the generation may still be running, e.g. from a proxy."""


class Overloaded(EndpointUnavailable):
    """The server takes no further request now: its queue is full, or it is not ready."""


def error_of(status: int, message: str) -> EndpointError:
    """Return the error for an HTTP status and its message."""
    text = f"status {status}: {message}"
    lowered = message.lower()
    if status >= 400 and any(all(part in lowered for part in parts) for parts in _OVERFLOWS):
        return ContextOverflow(text)
    # 503 is a full queue. Any other 5xx may be a proxy's, while the server still generates. A duplicate rid means that
    # a router sent the request twice, and the first one still runs.
    if (status >= 500 and status != 503) or (status == 400 and "duplicate request id" in lowered):
        return MayStillRun(text)
    if status == 503:
        return Overloaded(text)
    if status in RETRIED_STATUSES:
        return EndpointUnavailable(text)
    refused = EndpointRefused(text)
    refused.of_content = status in (400, 422)
    return refused


def error_in_200(payload: bytes, problem: BaseException | None, route: str = "SGLang's /generate") -> EndpointError:
    """Return the error for a response with status 200 that is not a completion of ``route``."""
    value = loads(payload)
    if value is None:
        return EndpointUnavailable(f"status 200, but the body is not JSON: {message_of(payload)}")
    inner = value.get("error") if isinstance(value, dict) else None
    if isinstance(value, dict) and (inner or value.get("object") == "error"):
        source = inner if isinstance(inner, dict) else value
        status = status_of(source.get("code")) or status_of(source.get("status_code"))
        if status is None or status < 400:
            kind = source.get("type")
            status = 400 if isinstance(kind, str) and ("invalid" in kind or "BadRequest" in kind) else 500
        return error_of(status, f"{message_of(payload)} (in a body that came with status 200)")
    reason = "no finish_reason" if problem is None else str(problem)[:200]
    return EndpointRefused(f"not a response of {route} ({reason}): {message_of(payload)}")


def status_of(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599 else None
