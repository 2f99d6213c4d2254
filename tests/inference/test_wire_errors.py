"""Errors from error bodies in every format."""

from __future__ import annotations

import pytest

from rollouts.errors import ContextOverflow, EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.http.answers import loads, message_of
from rollouts.inference.wire_errors import MayStillRun, error_of


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"the message"}}',
        b'{"error":"the message"}',
        b'{"object":"error","message":"the message","type":"Bad Request","param":null,"code":400}',
        b'{"error":{"message":"the message","type":"invalid_request_error","code":400,"retryable":false}}',
        b'{"detail":"the message"}',
        b"the message",
    ],
)
def test_every_format_has_one_message(body: bytes) -> None:
    """SGLang has four formats, its web framework a fifth, and proxies have their own."""
    assert message_of(body) == "the message"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EndpointRefused), (401, EndpointRefused), (403, EndpointRefused), (404, EndpointRefused),
        (422, EndpointRefused), (302, EndpointRefused), (408, EndpointUnavailable), (429, EndpointUnavailable),
        (500, EndpointUnavailable), (502, EndpointUnavailable), (503, EndpointUnavailable),
    ],
)  # fmt: skip
def test_the_status_decides_about_retries(status: int, kind: type[EndpointError]) -> None:
    """Overload and server errors are transient; a refusal is final."""
    assert isinstance(error_of(status, "x"), kind)


@pytest.mark.parametrize(
    ("status", "message", "may"),
    [
        (500, "x", True), (502, "bad gateway", True), (504, "x", True), (400, "Duplicate request ID detected: r", True),
        (503, "queue", False), (429, "x", False), (400, "x", False),
    ],
)  # fmt: skip
def test_the_error_class_states_whether_a_generation_may_still_run(status: int, message: str, may: bool) -> None:
    """Not after a full queue; possibly after a proxy error or a duplicate rid."""
    assert isinstance(error_of(status, message), MayStillRun) is may


@pytest.mark.parametrize(
    "message",
    [
        "The input (9 tokens) is longer than the model's context length (8 tokens).",
        "Requested token count exceeds the model's maximum context length of 8 tokens.",
        "Input length (1021 tokens) exceeds the maximum allowed length (1018 tokens). Use a shorter input or enable"
        " --allow-auto-truncate.",
        "Request prompt exceeds the KV memory budget: input_len=1021.",
    ],
)
def test_every_message_about_a_request_that_does_not_fit_is_an_overflow(message: str) -> None:
    """Messages of the front end, and messages of the scheduler, whose limits are lower."""
    assert isinstance(error_of(400, message), ContextOverflow)


def test_a_long_body_is_cut() -> None:
    """So that an error does not contain a whole web page; an empty body is named."""
    assert len(message_of(b"<p>" * 10_000)) == 200
    assert message_of(b"") == "(empty body)"


def test_invalid_json_is_none() -> None:
    """For every cause."""
    assert [loads(body) for body in (b"", b"{", b'"\xff"', b"[" * 100_000, b"1e999")] == [None] * 5
