"""New weights for a server that is up: from a folder on disk, under a version that every later token carries.

Invariant: when :func:`update_weights` returns, every worker serves the folder under ``version``, and none is paused.
What happens to the requests that run is the caller's choice, by name; no turn of this process that waits for the server
meanwhile comes too late by that (``pauses.py``). This module knows no trainer and no tensor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import anyio
import attrs
import msgspec

from rollouts.dtypes import Endpoint, without_password
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable, boundary
from rollouts.inference.pauses import ordered
from rollouts.transport import Transport

__all__ = ["WhileRunning", "update_weights"]

WhileRunning: TypeAlias = Literal["wait", "retract", "in_place", "abort"]
"""What becomes of requests that run when weights change.

``wait``: they end first, under the old weights. ``retract``: they stop, and go on under the new weights, which read
their tokens anew: the logprob of each token is exactly that of the version that it carries. ``in_place``: they go on
at once on what the old weights computed: nothing is read again, and their later logprobs are of no single version.
``abort``: they end now, and are tried again by whoever sent them.
"""


async def update_weights(
    endpoint: Endpoint,
    folder: str | Path,
    version: str,
    *,
    while_running: WhileRunning = "wait",
    seconds: float = 600.0,
) -> None:
    """Serve the weights of ``folder``, on every worker of the endpoint.

    Args:
        endpoint: the server or workers.
        folder: a model folder that the server can read.
        version: what the weights are called from now on.
        while_running: what becomes of requests that run.
        seconds: deadline of the whole update.

    Raises:
        ConfigError: an unknown ``while_running``.
        EndpointRefused: a server did not take the weights; it serves on with the old ones.
        EndpointUnavailable: a server did not answer.
    """
    if while_running not in get_args(WhileRunning):
        raise ConfigError.of("while_running", while_running, f"one of {get_args(WhileRunning)}")
    where = os.path.abspath(folder)  # noqa: ASYNC240 - reads no disk but the name of the working directory
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    server = _Server(Transport(connect_seconds=endpoint.connect_seconds), headers)
    try:
        with boundary(EndpointUnavailable, f"updating weights to {version}", seconds=seconds):
            for url in endpoint.base_url:
                with ordered(url):
                    await server.update(url, where, version, while_running)
    finally:
        with anyio.CancelScope(shield=True):
            await server.transport.aclose()


@attrs.frozen
class _Server:
    transport: Transport
    headers: dict[str, str]

    async def update(self, url: str, folder: str, version: str, while_running: WhileRunning) -> None:
        body = {
            "model_path": folder,
            "weight_version": version,
            "flush_cache": while_running != "in_place",
            "abort_all_requests": while_running == "abort",
        }
        pauses = while_running in ("retract", "in_place")
        if pauses:
            await self._post(url, "/pause_generation", {"mode": while_running})
        try:
            await self._post(url, "/update_weights_from_disk", body)
        finally:
            if pauses:
                with anyio.CancelScope(shield=True):
                    await self._post(url, "/continue_generation", {})

    async def _post(self, url: str, path: str, body: dict[str, Any]) -> None:
        status, answer = await self.transport.post(url + path, msgspec.json.encode(body), self.headers)
        try:
            content = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            content = None
        refused = isinstance(content, dict) and content.get("success") is False
        if status != 200 or refused:
            text = content.get("message", content) if isinstance(content, dict) else repr(answer[:200])
            raise EndpointRefused(f"{without_password(url)}{path}: {status}: {text}")
