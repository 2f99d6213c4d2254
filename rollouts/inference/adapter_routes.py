"""Routes by which SGLang and vLLM load, unload and list LoRA adapters.

Invariant: a router, which lacks these routes, stands for all workers that it lists. An adapter counts as listed there
only if all of them have it.

This module does not know which adapter is the newest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs
import msgspec

from rollouts.dtypes import Endpoint
from rollouts.errors import EndpointError, EndpointRefused, EndpointUnavailable, without_password
from rollouts.http.answers import loads, message_of
from rollouts.http.client import HttpClient
from rollouts.inference.aborts import headers_of, workers_behind
from rollouts.inference.discovery import Routes

__all__ = ["AdapterRoutes"]

_LIST_SECONDS = 10.0
_PREFIX = {"sglang": "", "vllm": "/v1"}
_STARTED = {
    "sglang": "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules",
    "vllm": "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
}
_UNKNOWN = "rollouts-no-such-adapter"


@attrs.frozen
class AdapterRoutes:
    """The routes of one endpoint's servers."""

    endpoint: Endpoint
    transport: HttpClient

    @property
    def _headers(self) -> dict[str, str]:
        return headers_of(self.endpoint)

    @property
    def _control_headers(self) -> dict[str, str]:
        """vLLM's routes are guarded by its one key."""
        return headers_of(self.endpoint, admin=self.endpoint.provider == "sglang")

    async def servers(self, url: str) -> Sequence[str]:
        """The URLs of the workers of a router; that of the server if it is none."""
        workers: Sequence[str] = ()
        with contextlib.suppress(EndpointUnavailable), anyio.move_on_after(_LIST_SECONDS):
            workers = await workers_behind(self.transport, url, self._headers)
        return workers or (url,)

    async def listed(self, url: str) -> dict[str, str]:
        """The loaded adapters and their folders.

        Raises:
            EndpointUnavailable: no server answers there.
            EndpointRefused: wrong API key.
        """
        found: dict[str, str] | None = None
        for server in await self.servers(url):
            here = await self._listed(server)
            found = here if found is None else {name: folder for name, folder in found.items() if name in here}
        return found or {}

    async def _listed(self, url: str) -> dict[str, str]:
        routes = Routes(self.transport, url, self._headers, f"a server of {self.endpoint.provider}")
        cards = (await routes.first("/v1/models")).get("data")
        entries = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        return {str(card.get("id")): str(card.get("root")) for card in entries if card.get("parent")}

    async def load(self, url: str, name: str, folder: str) -> None:
        """Load an adapter on the server, or on the workers of a router that lack it.

        Raises:
            EndpointRefused: a server refuses it.
            EndpointUnavailable: a server does not answer.
        """
        for server in await self.servers(url):
            if name not in await self._listed(server):
                await self._post(server, "/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload(self, url: str, name: str) -> None:
        """Unload an adapter; errors as :meth:`load`."""
        for server in await self.servers(url):
            if name in await self._listed(server):
                await self._post(server, "/unload_lora_adapter", {"lora_name": name})

    async def _post(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        path = _PREFIX[self.endpoint.provider] + path
        payload = msgspec.json.encode(body)
        status, answer = await self.transport.post(url + path, payload, self._control_headers, new_connection=True)
        if status != 200:
            raise self._error(without_password(url) + path, status, answer)

    def _error(self, where: str, status: int, payload: bytes) -> EndpointError:
        answer = loads(payload)
        message = answer.get("error_message") if isinstance(answer, dict) else None
        text = f"{where}: {status}: {message or message_of(payload)}"
        if status in (401, 403):
            text += ". Check Endpoint.admin_key"
        if status in (404, 405) or "not enabled" in text:
            text += f". Is LoRA enabled: {_STARTED[self.endpoint.provider]}"
        return EndpointRefused(text) if status < 500 else EndpointUnavailable(text)

    async def is_plain_sglang(self, url: str) -> bool:
        """Whether a server is SGLang itself, not the embedded engine, which has its protocol."""
        if self.endpoint.provider != "sglang":
            return False
        routes = Routes(self.transport, url, self._headers, "an SGLang server")
        return (await routes.first("/server_info", "/get_server_info")).get("engine") != "rollouts"

    async def check_reads_adapters(self, url: str) -> None:
        """Check that a server reads the field that names an adapter: it must refuse an unknown name.

        A vLLM server repeats the name in each response instead.

        Raises:
            EndpointRefused: it ignores the field, and would answer with the base model.
            EndpointUnavailable: no answer.
        """
        if self.endpoint.provider != "sglang":
            return
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "lora_path": _UNKNOWN}
        status, _ = await self.transport.post(f"{url}/generate", msgspec.json.encode(body), self._headers)
        if status == 200:
            raise EndpointRefused(
                f"{without_password(url)} ignores lora_path: it answered a request for the adapter {_UNKNOWN!r}."
                " Use the URL of a worker, or update the router or the server"
            )
