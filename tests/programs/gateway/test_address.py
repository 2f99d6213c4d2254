"""The public address of the gateway: what is a URL to send a key to, and what is an address to listen on."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.programs.gateway.address import PublicAddress


@pytest.mark.parametrize(
    "url",
    [
        "https://gateway.example.org",
        "https://gateway.example.org:8443/rl/",
        "http://10.1.2.3:8080",
        "http://[fd00::1]:8080",
        "http://host.docker.internal:8080",
        "http://trainer.default.svc:8080",
        "http://trainer:8080",
    ],
)
def test_a_url_over_tls_or_in_a_private_network_is_taken(url: str) -> None:
    """Without its last slash."""
    assert PublicAddress(url, "0.0.0.0:8080").url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "http://gateway.example.org",
        "http://8.8.8.8:8080",
        "https://user:word@a.example",
        "https://a.example?x=1",
        "https://a.example:99999",
        "https://a b.example",
        "gateway.example.org",
        "ftp://a",
        "https://",
        "",
        None,
    ],
)
def test_a_url_that_would_show_the_key_or_is_none_is_refused(url: Any) -> None:
    """By name: plain HTTP on the internet, a password, no URL."""
    with pytest.raises(ConfigError, match=r"PublicAddress.url: got .*; expected https://HOST, or http://HOST of a"):
        PublicAddress(url, "0.0.0.0:8080")


@pytest.mark.parametrize(("listen", "host", "port"), [("0.0.0.0:80", "0.0.0.0", 80), ("[::1]:8080", "::1", 8080)])
def test_an_address_to_listen_on_has_a_host_and_a_port(listen: str, host: str, port: int) -> None:
    """Also of IPv6."""
    address = PublicAddress("https://a.example", listen)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize("listen", ["8080", ":8080", "a", "a:0", "a:b", "a:1/x", "u@a:1", "a:1?x", 8080, None])
def test_an_address_that_is_none_is_refused(listen: Any) -> None:
    """By name; port 0 would lead nowhere."""
    with pytest.raises(ConfigError, match=r'PublicAddress.listen: got .*; expected "HOST:PORT" of this machine'):
        PublicAddress("https://a.example", listen)
