"""Request heads from URLs and headers, and invalid ones."""

from __future__ import annotations

import pytest

from rollouts.errors import ConfigError
from rollouts.http.request import Origin, request_head

HEADS = {
    "http://host/generate": (Origin("host", 80, False), b"POST /generate", b"host"),
    "https://Host.Example": (Origin("host.example", 443, True), b"POST /", b"host.example"),
    "http://host:8000/a/b?c=d&e": (Origin("host", 8000, False), b"POST /a/b?c=d&e", b"host:8000"),
    "https://host:443/": (Origin("host", 443, True), b"POST /", b"host:443"),
    "http://[::1]:30000/x": (Origin("::1", 30000, False), b"POST /x", b"[::1]:30000"),
    "http://[fe80::1%eth0]/": (Origin("fe80::1%eth0", 80, False), b"POST /", b"[fe80::1]"),
    "http://h/é b/%7e?q=ü%20+#part": (Origin("h", 80, False), b"POST /%C3%A9%20b/%7e?q=%C3%BC%20+", b"h"),
    "http://h/100%/%zz?50%": (Origin("h", 80, False), b"POST /100%25/%25zz?50%25", b"h"),
    "http://bücher.example/": (Origin("xn--bcher-kva.example", 80, False), b"POST /", b"xn--bcher-kva.example"),
    "http://a_b-c.d:1": (Origin("a_b-c.d", 1, False), b"POST /", b"a_b-c.d:1"),
}


@pytest.mark.parametrize("url", HEADS)
def test_a_url_gives_the_origin_and_the_request_line(url: str) -> None:
    """The Host header has the port if the URL has one."""
    origin, line, host = HEADS[url]
    actual, head = request_head("POST", url, (("X-A", "b"),), False)
    assert actual == origin
    assert head == line + b" HTTP/1.1\r\nHost: " + host + (
        b"\r\nUser-Agent: rollouts\r\nAccept-Encoding: identity\r\nX-A: b\r\n"
    )


def test_a_user_in_a_url_becomes_a_header() -> None:
    """Its parts may be percent-encoded."""
    _, head = request_head("GET", "http://me:a%40b@h/", (), True)
    assert b"\r\nConnection: close\r\nAuthorization: Basic bWU6YUBi\r\n" in head
    with pytest.raises(ConfigError, match="Authorization") as raised:
        request_head("GET", "http://me:secret@h/", (("authorization", "Bearer k"),), True)
    assert "secret" not in str(raised.value)


def test_headers_of_the_caller_replace_the_defaults() -> None:
    """Names are compared without case; no header is sent twice."""
    _, head = request_head("GET", "http://h/", (("user-agent", "me"), ("HOST", "other")), False)
    assert head == b"GET / HTTP/1.1\r\nAccept-Encoding: identity\r\nuser-agent: me\r\nHOST: other\r\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X", "a\r\nY: b"),
        ("X", "a\nb"),
        ("X", "a\0"),
        ("X", "\udc80"),
        ("a b", "c"),
        ("", "c"),
        ("X:", "c"),
        ("Content-Length", "3"),
    ],
)
def test_an_invalid_header_is_a_config_error(name: str, value: str) -> None:
    """The message does not contain its value, which may be a secret."""
    with pytest.raises(ConfigError, match="header") as raised:
        request_head("POST", "http://h/", ((name, f"secret{value}"),), False)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "http:///x",
        "http://host:99999999/x",
        "http://host:x/",
        "ftp://host/",
        "host/x",
        "http://a b/",
        "http://host/\udc80",
        "http://me:secret\udc80@host/",
        "http://me:secret@/",
        "http://[::1/",
        "http://a\x00b/",
        f"http://{'ü' * 80}/",
        f"http://{'a' * 64}.com/",
        "http://a..b/",
        "http://<h>/",
        "http://me:secret@h:x/",
    ],
)
def test_an_invalid_url_is_a_config_error(url: str) -> None:
    """The message does not contain its password, nor does the cause."""
    with pytest.raises(ConfigError, match="base_url") as raised:
        request_head("POST", url, (), False)
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
