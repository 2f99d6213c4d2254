"""The URL of a host and a port, of which either may come from a user."""

from __future__ import annotations

__all__ = ["url_of"]


def url_of(host: object, port: object) -> str:
    """``http://HOST:PORT``; an IPv6 address has brackets, whether it is given with them or not."""
    name = str(host)
    return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"
