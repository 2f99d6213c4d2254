"""Policy that samples from SGLang servers.

The kind of a server's logprobs is probed before its first request with a temperature for which it matters, and again
after it was unreachable.

This module knows which routes of SGLang a policy needs; ``generate_wire.py`` knows their format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio

from rollouts.dtypes import Completion, SamplingParams
from rollouts.errors import without_password
from rollouts.http.answers import message_of
from rollouts.http.client import HttpClient
from rollouts.inference import generate_wire
from rollouts.inference.aborts import SGLANG_ABORTS
from rollouts.inference.base import PriorityOrder, ServerInfo
from rollouts.inference.call import Call
from rollouts.inference.completions import SentRequest
from rollouts.inference.discovery import Routes, describe_server
from rollouts.inference.pauses import is_ready
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.routing import Worker
from rollouts.inference.servers import ServerProtocol
from rollouts.inference.wire_errors import error_of

if TYPE_CHECKING:
    from rollouts.inference.generate_probe import ReportedLogprobs

__all__ = ["SGLangPolicy", "SGLangProtocol", "reported_logprobs"]

ROUTE = "/generate"


class SGLangProtocol(ServerProtocol):
    """Routes and format of SGLang, and the kind of logprobs of each server."""

    ROUTE = ROUTE
    ABORTS = SGLANG_ABORTS
    takes_images = True

    def __init__(self, transport: HttpClient, headers: Mapping[str, str]) -> None:
        super().__init__(transport, headers)
        self._reported: dict[str, ReportedLogprobs] = {}
        """The kinds of the servers' logprobs, by URL."""
        self._probing: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def request_options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...], *, top_p_sets: bool) -> bytes:
        return generate_wire.request_options(sampling, stop_token_ids, top_p_sets=top_p_sets)

    def request_body(self, rid: str, call: Call) -> tuple[bytes, int]:
        return generate_wire.request_body(
            rid,
            call.ids,
            call.options,
            call.namespace,
            call.request.extras,
            call.images,
            call.adapter,
            call.request.priority,
        )

    def session_headers(self, session: str) -> dict[str, str]:
        return {"X-SMG-Routing-Key": session}

    def read_completion(self, payload: bytes, request: SentRequest) -> Completion:
        return generate_wire.read_completion(payload, request)

    async def describe(self, worker: Worker) -> ServerInfo:
        return await describe_server(self._transport, worker.url, self._headers)

    async def priority_order(self, worker: Worker) -> PriorityOrder | None:
        server = await Routes(self._transport, worker.url, self._headers, "an SGLang server").first("/server_info")
        if server.get("enable_priority_scheduling") is not True:
            return None
        return "lower first" if server.get("schedule_low_priority_values_first") is True else "higher first"

    async def is_ready(self, url: str) -> bool | None:
        return await is_ready(self._transport, url, self._headers)

    async def check_server(self, worker: Worker, sampling: SamplingParams) -> None:
        if not sampling.tempered:
            return
        from rollouts.inference import generate_probe  # here: most runs sample at temperature 1

        if worker.url not in self._reported:
            async with self._probing[worker.url]:
                if worker.url not in self._reported:
                    found = await reported_logprobs(self._transport, worker.url, self._headers)
                    self._reported[worker.url] = found
        generate_probe.check_reported(self._reported[worker.url], sampling, worker.name)

    def forget(self, worker: Worker) -> None:
        self._reported.pop(worker.url, None)


class SGLangPolicy(ServerPolicy):
    """Samples from one or several SGLang servers of the same model; arguments as :class:`ServerPolicy`."""

    PROTOCOL = SGLangProtocol


async def reported_logprobs(transport: HttpClient, url: str, headers: Mapping[str, str]) -> ReportedLogprobs:
    """Probe the kind of a server's logprobs, which it does not report.

    Raises:
        EndpointUnavailable: no answer, or it was aborted.
        EndpointRefused: the answers do not show it.
    """
    from rollouts.inference import generate_probe

    found = []
    for body in generate_probe.PROBES:
        status, payload = await transport.post(url + ROUTE, body, headers)
        if status != 200:
            raise error_of(status, f"{message_of(payload)} (POST {without_password(url)}{ROUTE})")
        found.append(generate_probe.top_logprobs(payload))
    return generate_probe.reported_by(*found)
