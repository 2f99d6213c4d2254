"""Abort requests for generations.

Invariant: :func:`abort_generation` returns only if the server acknowledged the abort or is known to be down. Otherwise
it raises, and the generation may still be running.

This module does not know why a generation is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import msgspec

from rollouts.concurrency.boundary import boundary
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError, EndpointUnavailable, without_password
from rollouts.http.answers import loads, message_of
from rollouts.http.client import ConnectFailed, HttpClient

if TYPE_CHECKING:
    from rollouts.inference.limiter import Load

__all__ = ["SGLANG_ABORTS", "AbortRoutes", "abort_generation", "headers_of", "post_abort", "workers_behind"]

ABORT_SECONDS = 5.0
"""Deadline of one abort, including the requests to the workers of a router."""


@attrs.frozen
class AbortRoutes:
    """Routes by which a server of one protocol aborts requests and reports its load."""

    one: str
    """Path of an abort of one request."""
    body: Callable[[str], Mapping[str, Any]]
    """Body of such an abort, for the id with which the request was sent."""
    all: str
    """Path of an abort of all requests."""
    all_body: Mapping[str, Any]
    load: str
    """Path of the load."""
    read_load: Callable[[bytes], Load | None]
    """Parse the load; ``None`` if the response is something else."""


def _sglang_load(payload: bytes) -> Load | None:
    from rollouts.inference.limiter import read_load  # here: only an update of weights and an adaptive limit ask

    return read_load(loads(payload))


SGLANG_ABORTS = AbortRoutes(
    one="/abort_request",
    body=lambda rid: {"rid": rid},
    all="/abort_request",
    all_body={"rid": "", "abort_all": True},
    load="/v1/loads?include=core",
    read_load=_sglang_load,
)


def headers_of(endpoint: Endpoint, *, admin: bool = False) -> dict[str, str]:
    """The headers of a request to the endpoint.

    Args:
        endpoint: its keys are used.
        admin: for a control route: with ``admin_key`` if there is one.

    Raises:
        ConfigError: a key is not a valid header.
    """
    keys = {"api_key": endpoint.api_key, "admin_key": endpoint.admin_key}
    for name, key in keys.items():
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError(f"Endpoint.{name}: contains characters that are not allowed in a header")
    key = (endpoint.admin_key if admin else None) or endpoint.api_key
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


_GONE = b"nothing listens there"
_KEY_HINT = ". Check Endpoint.admin_key"


async def abort_generation(
    transport: HttpClient, url: str, rid: str, headers: Mapping[str, str], routes: AbortRoutes = SGLANG_ABORTS
) -> bool:
    """Abort the generation ``rid`` on the server at ``url``; the server also acknowledges an unknown rid (SGLang 0.5.23
    and vLLM 0.32.0 return 200).

    A router does not pass aborts on: every worker that it lists gets the abort, whatever the others answer.

    Returns:
        Whether a server is there; false if the connection was refused.

    Raises:
        EndpointUnavailable: not acknowledged within :data:`ABORT_SECONDS`.
    """
    with boundary(EndpointUnavailable, f"POST {without_password(url)}{routes.one}", seconds=ABORT_SECONDS):
        status, payload = await post_abort(transport, url + routes.one, routes.body(rid), headers)
        if status in (404, 405) and (workers := await workers_behind(transport, url, headers)):
            failed: list[EndpointUnavailable] = []

            async def abort(worker: str) -> None:
                try:
                    await abort_generation(transport, worker, rid, headers, routes)
                except EndpointUnavailable as error:
                    failed.append(error)

            async with anyio.create_task_group() as tasks:
                for worker in workers:
                    tasks.start_soon(abort, worker)
            if failed:  # as a ConnectFailed, it would say that the router is away
                raise EndpointUnavailable(f"a worker of the router: {failed[0]}") from failed[0]
            return True
        if status != 200:
            raise EndpointUnavailable(
                f"a generation may still be running: POST {without_password(url)}{routes.one} returned status"
                f" {status}: {message_of(payload)}{_KEY_HINT if status in (401, 403) else ''}"
            )
        return payload is not _GONE


async def post_abort(
    transport: HttpClient, url: str, which: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """Send one abort; a server that nothing listens for has nothing to abort, which counts as an acknowledgement."""
    try:
        return await transport.post(url, msgspec.json.encode(which), headers, new_connection=True)
    except ConnectFailed as error:
        if error.refused:
            return 200, _GONE  # no server listens there, so nothing runs there
        raise


async def workers_behind(transport: HttpClient, url: str, headers: Mapping[str, str]) -> Sequence[str]:
    """Return the URLs of the workers of a router; empty if the server is not a router."""
    status, payload = await transport.get(f"{url}/workers", headers)
    listing = loads(payload) if status == 200 else None
    entries = listing.get("workers") if isinstance(listing, dict) else listing
    if not isinstance(entries, list):
        return ()
    urls = [entry.get("url") if isinstance(entry, dict) else entry for entry in entries]
    return [url.rstrip("/") for url in urls if isinstance(url, str) and url.startswith(("http://", "https://"))]
