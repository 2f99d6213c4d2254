"""The answers of a server that are not what was asked for: statuses to retry, and the message in a body.

Invariant: any bytes have a message. This module does no I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["RETRIED_STATUSES", "UNREADABLE", "loads", "message_of"]

RETRIED_STATUSES = frozenset({408, 425, 429})
"""Retried statuses in addition to 5xx."""

_ANY = msgspec.json.Decoder()
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""Exceptions of the decoder for bytes that are not the expected JSON."""


def message_of(payload: bytes) -> str:
    """Extract the message from an error body of any known format; else return its beginning."""
    value = loads(payload)
    message = _message(value)
    if message is None:
        message = " ".join(payload[:400].decode(errors="replace").split())[:200]
    return message[:1000] or "(empty body)"


def loads(payload: bytes) -> Any:
    """Decode any JSON; ``None`` for invalid JSON."""
    try:
        return _ANY.decode(payload)
    except UNREADABLE:
        return None


def _message(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    for candidate in (inner, value.get("message"), value.get("detail")):
        if isinstance(candidate, str) and candidate:
            return candidate
    return None
