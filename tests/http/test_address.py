"""The URL of a host and a port."""

from __future__ import annotations

import pytest

from rollouts.http.address import url_of


@pytest.mark.parametrize(
    ("host", "expected"),
    [("engine", "http://engine:80"), ("::1", "http://[::1]:80"), ("[::1]", "http://[::1]:80")],
)
def test_an_ipv6_address_has_brackets(host: str, expected: str) -> None:
    """Once, whether it comes with them or not."""
    assert url_of(host, 80) == url_of(host, "80") == expected
