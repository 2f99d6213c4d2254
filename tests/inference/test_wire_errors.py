"""What an error body amounts to, in whichever shape it comes."""

from __future__ import annotations

import pytest

from rollouts.errors import EndpointError, EndpointRefused, EndpointUnavailable
from rollouts.inference.wire_errors import MayStillRun, error_of, loads, message_of


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"so it is"}}',
        b'{"error":"so it is"}',
        b'{"object":"error","message":"so it is","type":"Bad Request","param":null,"code":400}',
        b'{"error":{"message":"so it is","type":"invalid_request_error","code":400,"retryable":false}}',
        b'{"detail":"so it is"}',
        b"so it is",
    ],
)
def test_an_error_in_any_shape_says_one_thing(body: bytes) -> None:
    """The server has four shapes, its framework a fifth, and proxies have their own."""
    assert message_of(body) == "so it is"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EndpointRefused), (401, EndpointRefused), (403, EndpointRefused), (404, EndpointRefused),
        (422, EndpointRefused), (302, EndpointRefused), (408, EndpointUnavailable), (429, EndpointUnavailable),
        (500, EndpointUnavailable), (502, EndpointUnavailable), (503, EndpointUnavailable),
    ],
)  # fmt: skip
def test_a_status_says_whether_another_attempt_may_help(status: int, kind: type[EndpointError]) -> None:
    """Overload and breakage may pass; a refusal does not."""
    assert isinstance(error_of(status, "x"), kind)


@pytest.mark.parametrize(
    ("status", "message", "may"),
    [
        (500, "x", True), (502, "bad gateway", True), (504, "x", True), (400, "Duplicate request ID detected: r", True),
        (503, "queue", False), (429, "x", False), (400, "x", False),
    ],
)  # fmt: skip
def test_an_error_says_whether_something_may_still_run(status: int, message: str, may: bool) -> None:
    """What a full queue turned away does not; behind a proxy's error, or under a rid that was sent again, it may."""
    assert isinstance(error_of(status, message), MayStillRun) is may


def test_a_long_body_is_cut() -> None:
    """A web page is not repeated in an error; what is empty is called so."""
    assert len(message_of(b"<p>" * 10_000)) == 200
    assert message_of(b"") == "(empty body)"


def test_what_is_no_json_is_none() -> None:
    """Whatever keeps it from being read."""
    assert [loads(body) for body in (b"", b"{", b'"\xff"', b"[" * 100_000, b"1e999")] == [None] * 5
