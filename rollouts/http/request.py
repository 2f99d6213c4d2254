"""Request heads: origin, request line and header lines from a URL and headers.

Invariant: any accepted URL and headers form exactly one request; others raise a ConfigError before anything is sent. No
error contains a password or the value of a header. This module does not know sockets.
"""

from __future__ import annotations

import base64
import functools
import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from rollouts.errors import ConfigError, without_password

__all__ = ["Origin", "request_head"]

_HOST = re.compile(r"[a-z0-9._~!$&'()*+,;=-]+|[0-9a-f:.]+(%[a-z0-9._~-]+)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "/%:@!$&'()*+,;=~?[]"


class Origin(NamedTuple):
    """Host, port and scheme of a connection."""

    host: str
    port: int
    secure: bool


def request_head(method: str, url: str, headers: tuple[tuple[str, str], ...], close: bool) -> tuple[Origin, bytes]:
    """Return the origin of a URL and the request head, without ``Content-Length`` and the final empty line.

    Args:
        method: any except ``HEAD`` and ``CONNECT``, whose responses lack a body.
        url: its user and password become an ``Authorization`` header.
        headers: sent unchanged; they replace the default headers of the same name.
        close: send ``Connection: close``.

    Raises:
        ConfigError: invalid URL or header.
    """
    origin, head = _cached_head(method, url, tuple([name for name, _ in headers]), close)
    for name, value in headers:
        if _UNSENDABLE.search(value):
            raise ConfigError(f"header {name}: its value contains characters that are not allowed in a header")
    return origin, head + "".join([f"{name}: {value}\r\n" for name, value in headers]).encode()


@functools.lru_cache(maxsize=256)
def _cached_head(method: str, url: str, names: tuple[str, ...], close: bool) -> tuple[Origin, bytes]:
    """Build the part without header values: those contain keys, and a session id that differs for each rollout."""
    names = tuple([name.lower() for name in names])
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host = host.encode("idna").decode()  # also refuses an ASCII name that no lookup takes
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host):
            raise ValueError("no host")
        path = quote(_LONE_PERCENT.sub("%25", parts.path or "/"), safe=_SAFE)
        query = f"?{quote(_LONE_PERCENT.sub('%25', parts.query), safe=_SAFE)}" if parts.query else ""
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    except ValueError:  # not chained: its message may contain the password
        raise ConfigError.of("Endpoint.base_url", without_password(url), "a URL with a host") from None
    hostname = f"[{host.partition('%')[0]}]" if ":" in host else host
    lines = {"Host": hostname if port is None else f"{hostname}:{port}"}
    lines |= {"User-Agent": "rollouts", "Accept-Encoding": "identity"}
    if close:
        lines["Connection"] = "close"
    if parts.username is not None:
        lines["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
    if "authorization" in names and "Authorization" in lines:
        raise ConfigError(f"{without_password(url)}: contains a user, and the headers contain Authorization, too")
    for name in names:
        if not _NAME.fullmatch(name) or name in ("content-length", "transfer-encoding"):
            raise ConfigError.of("header name", name, "a valid name other than Content-Length and Transfer-Encoding")
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if name.lower() not in names)
    secure = parts.scheme == "https"
    origin = Origin(host, port if port is not None else (443 if secure else 80), secure)
    return origin, f"{method} {path}{query} HTTP/1.1\r\n{text}".encode()
