"""Policy that samples from vLLM servers, by ``/inference/v1/generate`` (``vllm serve --enable-scale-out``).

The mode of a server's logprobs is probed before its first request, and again after it was unreachable. Routes that
pause, report weights, or abort the requests of other clients exist only with ``VLLM_SERVER_DEV_MODE=1``.

This module knows which routes of vLLM a policy needs; ``vllm_wire.py`` knows their format.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import anyio
import attrs

from rollouts.dtypes import SamplingParams
from rollouts.dtypes.inference import NEEDS_TOKEN_IDS
from rollouts.errors import EndpointRefused, EndpointUnavailable, without_password
from rollouts.http.answers import loads
from rollouts.http.client import HttpClient
from rollouts.inference import vllm_wire
from rollouts.inference.aborts import AbortRoutes
from rollouts.inference.base import PriorityOrder, ServerInfo
from rollouts.inference.call import Call
from rollouts.inference.discovery import Routes, length_of, text_of
from rollouts.inference.limiter import Load
from rollouts.inference.pauses import POLL_SECONDS
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.probing import ProbedProtocol, posted
from rollouts.inference.routing import Worker
from rollouts.inference.vllm_wire import LogprobsMode

__all__ = ["VLLMPolicy", "VLLMProtocol", "describe_vllm", "logprobs_mode", "read_metrics"]

_METRIC = re.compile(rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}\n]*\} (\S+)$", re.M)


def read_metrics(payload: bytes) -> Load | None:
    """Parse the load in ``/metrics``, over all engines of the server; ``None`` if it is something else."""
    found: dict[bytes, list[float]] = {}
    for name, value in _METRIC.findall(payload):
        with contextlib.suppress(ValueError):
            found.setdefault(name, []).append(float(value))
    running, waiting = found.get(b"num_requests_running"), found.get(b"num_requests_waiting")
    if not running or not waiting:
        return None
    return Load(int(sum(running)), int(sum(waiting)), max(found.get(b"kv_cache_usage_perc", [0.0])))


class VLLMProtocol(ProbedProtocol[LogprobsMode]):
    """Routes and format of vLLM, and the kind of logprobs of each server."""

    ROUTE = "/inference/v1/generate"
    ABORTS = AbortRoutes(
        one="/inference/v1/abort_requests",
        body=lambda rid: {"request_ids": [vllm_wire.engine_id(rid)]},
        all="/abort_requests",
        all_body={"request_ids": []},
        load="/metrics",
        read_load=read_metrics,
    )
    minimum_delays_stops = True
    request_options = staticmethod(vllm_wire.request_options)
    read_completion = staticmethod(vllm_wire.read_completion)

    def request_body(self, rid: str, call: Call) -> tuple[bytes, int]:
        assert not call.images, "complete refuses images"
        return vllm_wire.request_body(
            rid, call.ids, call.options, call.namespace, call.request.extras, call.adapter, call.request.priority
        )

    def session_headers(self, session: str) -> dict[str, str]:
        return {"X-Session-ID": session, "X-SMG-Routing-Key": session}

    async def describe(self, worker: Worker) -> ServerInfo:
        info = await describe_vllm(self._transport, worker.url, self._headers)
        processed = await self.probe(worker, logprobs_mode) == "processed"
        return attrs.evolve(info, has_grammars=processed, has_structural_tags=processed)

    async def priority_order(self, worker: Worker) -> PriorityOrder | None:
        """Known with ``VLLM_SERVER_DEV_MODE=1`` only; the server collects its environment for the answer (seconds)."""
        routes = Routes(self._transport, worker.url, self._headers, "a vLLM server")
        config = (await routes.first("/server_info?config_format=json")).get("vllm_config")
        scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
        return "lower first" if isinstance(scheduler, dict) and scheduler.get("policy") == "priority" else None

    async def is_ready(self, url: str) -> bool | None:
        with anyio.move_on_after(POLL_SECONDS), contextlib.suppress(EndpointUnavailable):
            status, payload = await self._transport.get(f"{url}/is_paused", self._headers)
            response = loads(payload) if status == 200 else None
            paused = response.get("is_paused") if isinstance(response, dict) else None
            return {True: False, False: True}.get(paused) if isinstance(paused, bool) else None
        return None

    async def check_server(self, worker: Worker, sampling: SamplingParams) -> None:
        vllm_wire.check_mode(await self.probe(worker, logprobs_mode), sampling, worker.name)


class VLLMPolicy(ServerPolicy):
    """Samples from one or several vLLM servers of the same model; arguments as :class:`ServerPolicy`."""

    PROTOCOL = VLLMProtocol


async def describe_vllm(transport: HttpClient, url: str, headers: Mapping[str, str]) -> ServerInfo:
    """Query the description of one server; without ``VLLM_SERVER_DEV_MODE`` it does not report its weight version.

    Raises:
        EndpointUnavailable: no server listens there, or it is not ready.
        EndpointRefused: wrong API key, or not a vLLM server.
    """
    routes = Routes(transport, url, headers, "a vLLM server")
    models = await routes.first("/v1/models")
    cards = models.get("data")
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    if card.get("owned_by") != "vllm":
        raise EndpointRefused(
            f"{without_password(url)} is not a vLLM server: {'; '.join(routes.log)}; owned_by {card.get('owned_by')!r}."
            f" Expected a model of 'vllm' from /v1/models{routes.hint}. Other servers cannot be used: {NEEDS_TOKEN_IDS}"
        )
    return ServerInfo(
        version=text_of((await routes.first("/version")).get("version")),
        model=text_of(card.get("root")) or text_of(card.get("id")),
        weight_version=text_of((await routes.first("/weight_info")).get("weight_version")),
        max_context=length_of(card.get("max_model_len")),
    )


async def logprobs_mode(transport: HttpClient, url: str, headers: Mapping[str, str]) -> LogprobsMode:
    """Probe the mode of a server's logprobs, which it does not report.

    Raises:
        EndpointUnavailable: no answer.
        EndpointRefused: the server does not serve token ids, or reports logits.
    """
    answers = await posted(vllm_wire.PROBES, transport, url + VLLMProtocol.ROUTE, headers)
    return vllm_wire.mode_of(*map(vllm_wire.probed_logprob, answers))
