"""The head of a request: where a URL leads, and what is said there.

Invariant: what is sent is one request, whatever stands in the URL and in the headers; what would be none is refused
before anything is sent, and no password or value of a header is told. It knows no socket.
"""

from __future__ import annotations

import base64
import functools
import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError

__all__ = ["Origin", "request_head"]

_HOST = re.compile(r"[a-z0-9._~!$&'()*+,;=-]+|[0-9a-f:.]+(%[a-z0-9._~-]+)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "/%:@!$&'()*+,;=~?[]"


class Origin(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    secure: bool


def request_head(method: str, url: str, headers: tuple[tuple[str, str], ...], last: bool) -> tuple[Origin, bytes]:
    """Where a request goes, and its head up to the length of its body.

    Args:
        method: ``GET``, ``POST`` or the like; not ``HEAD`` or ``CONNECT``, whose answers have no body.
        url: a user and a password in it become a header.
        headers: sent as they are.
        last: tell the server that no other request will follow on the connection.

    Raises:
        ConfigError: the URL leads nowhere, or a header cannot be sent. No value of a header is told.
    """
    origin, start = _start(method, url, tuple([name.lower() for name, _ in headers]), last)
    for name, value in headers:
        if _UNSENDABLE.search(value):
            raise ConfigError(f"header {name}: its value holds characters that cannot stand in a header")
    return origin, start + "".join([f"{name}: {value}\r\n" for name, value in headers]).encode()


@functools.lru_cache(maxsize=256)
def _start(method: str, url: str, given: tuple[str, ...], last: bool) -> tuple[Origin, bytes]:
    """What does not depend on the values of the headers: a key is among them, and a name for each conversation."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host = host if host.isascii() else host.encode("idna").decode()
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host):
            raise ValueError("no host")
        path = quote(_LONE_PERCENT.sub("%25", parts.path or "/"), safe=_SAFE)
        query = f"?{quote(_LONE_PERCENT.sub('%25', parts.query), safe=_SAFE)}" if parts.query else ""
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    except ValueError:  # not chained: it may tell the password
        raise ConfigError.of("Endpoint.base_url", without_password(url), "a URL with a host") from None
    shown = f"[{host.partition('%')[0]}]" if ":" in host else host
    lines = {"Host": shown if port is None else f"{shown}:{port}"}
    lines |= {"User-Agent": "rollouts", "Accept-Encoding": "identity"}
    if last:
        lines["Connection"] = "close"
    if parts.username is not None:
        lines["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
    if "authorization" in given and "Authorization" in lines:
        raise ConfigError(f"{without_password(url)}: names a user, but there is a header Authorization, too")
    for name in given:
        if not _NAME.fullmatch(name) or name in ("content-length", "transfer-encoding"):
            raise ConfigError.of("the name of a header", name, "one that a request may bring")
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if name.lower() not in given)
    secure = parts.scheme == "https"
    origin = Origin(host, port if port is not None else (443 if secure else 80), secure)
    return origin, f"{method} {path}{query} HTTP/1.1\r\n{text}".encode()
