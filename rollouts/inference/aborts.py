"""Abort requests for generations.

Invariant: :func:`abort_generation` returns only if the server acknowledged the abort or is known to be down. Otherwise
it raises, and the generation may still be running.

This module does not know why a generation is aborted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Endpoint, without_password
from rollouts.errors import ConfigError, EndpointUnavailable
from rollouts.http.client import ConnectFailed, HttpClient
from rollouts.inference.wire_errors import loads, message_of

__all__ = ["abort_generation", "workers_behind"]

ABORT_SECONDS = 5.0
"""Deadline of one abort, including the requests to the workers of a router."""


def headers_of(endpoint: Endpoint, *, admin: bool = False) -> dict[str, str]:
    """The headers of a request to the endpoint.

    Args:
        endpoint: its keys are used.
        admin: for a control route: with ``admin_key`` if there is one.

    Raises:
        ConfigError: a key is no valid header.
    """
    keys = {"api_key": endpoint.api_key, "admin_key": endpoint.admin_key}
    for name, key in keys.items():
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError(f"Endpoint.{name}: contains characters that are not allowed in a header")
    key = (endpoint.admin_key if admin else None) or endpoint.api_key
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


_GONE = b"nothing listens there"
_KEY_HINT = ". Check Endpoint.admin_key"


async def abort_generation(transport: HttpClient, url: str, rid: str, headers: Mapping[str, str]) -> bool:
    """Abort the generation ``rid`` on the server at ``url``; the server also acknowledges an unknown rid.

    A router has no abort route: every worker that it lists receives the abort, since any of them may run it.

    Returns:
        Whether a server is there; false if the connection was refused.

    Raises:
        EndpointUnavailable: not acknowledged within :data:`ABORT_SECONDS`.
    """
    with boundary(EndpointUnavailable, f"POST {without_password(url)}/abort_request", seconds=ABORT_SECONDS):
        status, payload = await _abort(transport, url, rid, headers)
        if status in (404, 405):
            for worker in await workers_behind(transport, url, headers):
                status, payload = await _abort(transport, worker, rid, headers)
                if status != 200:
                    break
        if status != 200:
            raise EndpointUnavailable(
                f"a generation may still be running: POST {without_password(url)}/abort_request returned status"
                f" {status}: {message_of(payload)}{_KEY_HINT if status in (401, 403) else ''}"
            )
        return payload is not _GONE


async def _abort(transport: HttpClient, url: str, rid: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    try:
        return await transport.post(f"{url}/abort_request", msgspec.json.encode({"rid": rid}), headers, fresh=True)
    except ConnectFailed as error:
        if error.refused:
            return 200, _GONE  # no server listens there, so nothing runs there
        raise


async def workers_behind(transport: HttpClient, url: str, headers: Mapping[str, str]) -> Sequence[str]:
    """Return the URLs of the workers of a router; none if the server is no router."""
    status, payload = await transport.get(f"{url}/workers", headers)
    listing = loads(payload) if status == 200 else None
    entries = listing.get("workers") if isinstance(listing, dict) else listing
    if not isinstance(entries, list):
        return ()
    urls = [entry.get("url") if isinstance(entry, dict) else entry for entry in entries]
    return [url.rstrip("/") for url in urls if isinstance(url, str) and url.startswith(("http://", "https://"))]
