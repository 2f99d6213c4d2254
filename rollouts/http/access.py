"""Access to the servers of this package: no request of a web page, and none without the key on a public address.

Invariant: a page of another origin reaches no route, neither by a request that needs no preflight (the browser then
names its origin) nor by a name that it resolves to this machine (the Host is then that name). A server that listens on
anything but a loopback address has a key. This module does not know routes.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler

__all__ = ["guard", "is_loopback"]

_PUBLIC = "/health"
"""Answered without the key, as by SGLang 0.5.23: a load balancer has none."""


def guard(host: str, api_key: str | None, variable: str = "ROLLOUTS_API_KEY") -> Any:
    """The middleware of a server.

    Args:
        host: the address that the server listens on.
        api_key: clients send it as ``Authorization: Bearer KEY`` or as ``X-API-Key: KEY``.
        variable: the environment variable that the command reads the key from, for errors.

    Raises:
        ConfigError: the address is not a loopback address and the key is missing, or the key cannot be sent.
    """
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or not api_key.strip()):
        raise ConfigError("api_key: contains characters that are not allowed in a header, or is empty")
    if api_key is None and not is_loopback(host):
        expected = f"127.0.0.1, or a key (in {variable}): every machine that reaches this address could use it"
        raise ConfigError.of("host", host, expected)

    from aiohttp import web  # here: whether a host is a loopback address is asked without the extras that serve

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _foreign(request, any_host=api_key is not None)
        if refusal is not None:
            return _refused(403, refusal)
        if api_key is not None and request.path != _PUBLIC and not _has_key(request, api_key):
            return _refused(401, "the API key is missing or wrong; expected Authorization: Bearer KEY")
        return await handler(request)

    return middleware


def is_loopback(host: str) -> bool:
    """Whether an address, or the name in a Host header, means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _foreign(request: web.Request, *, any_host: bool) -> str | None:
    """Why a request may come from a web page; ``None`` if it does not."""
    host = request.headers.get("Host")
    origin = request.headers.get("Origin")
    if origin is not None and _part(origin, "netloc") != host:
        return f"Origin: got {origin!r}; expected none, or this server"
    if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        return "Sec-Fetch-Site: got a request of another site's page; expected none"
    if host is not None and not any_host and not is_loopback(_part(f"//{host}", "hostname") or ""):
        return f"Host: got {host!r}; expected localhost or a loopback address"
    return None


def _part(url: str, part: str) -> str | None:
    try:
        value: str | None = getattr(urlsplit(url), part)
    except ValueError:
        return None
    return value


def _has_key(request: web.Request, api_key: str) -> bool:
    received = request.headers.get("X-API-Key")
    if received is None:
        received = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(received.encode("utf-8", "replace"), api_key.encode())


def _refused(status: int, message: str) -> web.Response:
    from aiohttp import web

    body = msgspec.json.encode({"error": {"message": message}, "detail": message})
    return web.Response(body=body, status=status, content_type="application/json")
