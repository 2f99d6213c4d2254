"""Who answers at a URL: a server that speaks SGLang, somebody else, or nobody.

Invariant: what does not answer as SGLang does is named with what it said, so that a wrong port or a wrong server is
seen before the first rollout. Older servers and routers, which lack some of the routes, are recognised by the others.

This module knows nothing of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.dtypes import without_password
from rollouts.errors import ConfigError, EndpointRefused, EndpointUnavailable
from rollouts.http.client import ConnectFailed, HttpClient, ProtocolError
from rollouts.inference.base import ServerInfo
from rollouts.inference.wire_errors import RETRIED_STATUSES, loads, message_of

__all__ = ["describe_server", "merged", "served_version"]

_MARKS = ("model_path", "tokenizer_path", "weight_version")


async def describe_server(transport: HttpClient, url: str, headers: Mapping[str, str]) -> ServerInfo:
    """Ask one server what it is.

    Raises:
        EndpointUnavailable: nobody listens there, or it is not ready.
        EndpointRefused: it wants another key, or it is no SGLang server.
    """
    asked = _Asked(transport, url, headers)
    model = await asked.first("/model_info", "/get_model_info")
    server = await asked.first("/server_info", "/get_server_info")
    if not any(mark in answer for answer in (model, server) for mark in _MARKS):
        raise EndpointRefused(
            f"{without_password(url)} is not an SGLang server: {'; '.join(asked.log)}."
            " Expected /model_info or /server_info to answer with a model_path"
        )
    models = await asked.first("/v1/models")
    return ServerInfo(
        version=_text(server.get("version")),
        model=_text(model.get("model_path")) or _text(server.get("model_path")),
        weight_version=_text(model.get("weight_version")) or _text(server.get("weight_version")),
        max_context=_max_context(models, server),
    )


async def served_version(transport: HttpClient, url: str, headers: Mapping[str, str]) -> str | None:
    """The version of the weights that one server says it serves; ``None`` if it says none.

    Raises:
        EndpointUnavailable: nobody listens there, or it is not ready.
        EndpointRefused: it wants another key, or it is no SGLang server.
    """
    model = await _Asked(transport, url, headers).first("/model_info", "/get_model_info")
    return _text(model.get("weight_version"))


def merged(infos: list[ServerInfo]) -> ServerInfo:
    """What several workers say together: what they agree on, and the shortest context.

    Raises:
        ConfigError: they serve different models.
    """
    models = sorted({info.model for info in infos if info.model is not None})
    if len(models) > 1:
        raise ConfigError.of("Endpoint.base_url", models, "workers that serve one model")

    def agreed(field: str) -> Any:
        values = {getattr(info, field) for info in infos}
        return values.pop() if len(values) == 1 else None

    contexts = [info.max_context for info in infos if info.max_context is not None]
    return ServerInfo(
        version=agreed("version"),
        model=agreed("model"),
        weight_version=agreed("weight_version"),
        max_context=min(contexts, default=None),
    )


class _Asked:
    """The questions put to one server, and what it answered to each."""

    def __init__(self, transport: HttpClient, url: str, headers: Mapping[str, str]) -> None:
        self._transport = transport
        self._url = url
        self._headers = headers
        self.log: list[str] = []

    async def first(self, *routes: str) -> dict[str, Any]:
        """The JSON object that the first of these routes gives; an empty one if none does."""
        for route in routes:
            where = without_password(self._url) + route
            try:
                status, payload = await self._transport.get(self._url + route, self._headers)
            except ConnectFailed as error:
                where = without_password(self._url)
                raise EndpointUnavailable(
                    f"nobody answers at {where}: {error}. Start the server, or correct Endpoint.base_url"
                ) from error
            except ProtocolError as error:
                raise EndpointRefused(f"{without_password(self._url)} is not an SGLang server: {error}") from error
            if status in (401, 403):
                raise EndpointRefused(f"{where}: status {status}: {message_of(payload)}. Check Endpoint.api_key")
            if status >= 500 or status in RETRIED_STATUSES:
                raise EndpointUnavailable(f"{where}: status {status}: {message_of(payload)}. Is it ready?")
            answer = loads(payload) if status == 200 else None
            if isinstance(answer, dict):
                self.log.append(f"GET {route} gave JSON with {', '.join(list(answer)[:5]) or 'nothing in it'}")
                return answer
            self.log.append(f"GET {route} gave status {status}: {message_of(payload)[:80]}")
        return {}


def _max_context(models: dict[str, Any], server: dict[str, Any]) -> int | None:
    cards = models.get("data")
    lengths = [card.get("max_model_len") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    for length in (*lengths, server.get("context_length")):
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return length
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
