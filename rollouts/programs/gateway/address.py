"""The address at which programs on other machines reach the gateway.

Invariant: a session's key is sent over TLS, or within a private network. This module opens no socket.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import SplitResult, urlsplit

import attrs

from rollouts.base.validators import check
from rollouts.errors import ConfigError

__all__ = ["PublicAddress"]

_PRIVATE = ("internal", "local", "localhost", "svc")
"""The last label of names that no public DNS has."""


def _split(text: Any) -> SplitResult | None:
    """The parts of a URL; ``None`` for any other value."""
    if not isinstance(text, str) or not text.isascii() or not text.isprintable() or " " in text:
        return None
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return None
    return parts


def _is_private(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.rpartition(".")[2] in _PRIVATE


def _is_url(value: Any) -> bool:
    parts = _split(value)
    if parts is None or not parts.hostname or parts.username is not None or parts.query or parts.fragment:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and _is_private(parts.hostname))


def _is_listen(value: Any) -> bool:
    parts = _split(f"//{value}") if isinstance(value, str) else None
    return (
        parts is not None and bool(parts.hostname) and bool(parts.port) and value == parts.netloc and "@" not in value
    )


def _without_slash(value: Any) -> Any:
    return value.rstrip("/") if isinstance(value, str) else value


@attrs.frozen
class PublicAddress:
    """Where the gateway listens, and the URL that leads there from another machine.

    This class sets up nothing between the two: the URL belongs to a proxy or a tunnel with TLS, or to this machine in a
    private network. A client that has the key of an open session can call the model as its program.
    """

    url: str = attrs.field(
        converter=_without_slash,
        validator=check(
            "https://HOST, or http://HOST of a private network, as the key of a session is sent to it", _is_url
        ),
    )
    """The base URL, without ``/s/…`` and ``/v1``."""
    listen: str = attrs.field(validator=check('"HOST:PORT" of this machine to listen on', _is_listen))
    """The address on this machine. ``127.0.0.1`` is enough for a proxy or a tunnel that runs on it."""

    @property
    def host(self) -> str:
        """The host of ``listen``."""
        return str(urlsplit(f"//{self.listen}").hostname)

    @property
    def port(self) -> int:
        """The port of ``listen``."""
        port = urlsplit(f"//{self.listen}").port
        if port is None:
            raise ConfigError.of("PublicAddress.listen", self.listen, '"HOST:PORT"')
        return port
