"""Policy that samples from SGLang servers.

The kind of a server's logprobs is probed before its first request with a temperature for which it matters, and again
after it was unreachable.

This module knows which routes of SGLang a policy needs; ``generate_wire.py`` knows their format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollouts.dtypes import SamplingParams
from rollouts.http.client import HttpClient
from rollouts.inference import generate_wire
from rollouts.inference.aborts import SGLANG_ABORTS
from rollouts.inference.base import PriorityOrder, ServerInfo
from rollouts.inference.call import Call
from rollouts.inference.discovery import Routes, describe_server
from rollouts.inference.pauses import is_ready
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.probing import ProbedProtocol, posted
from rollouts.inference.routing import Worker

if TYPE_CHECKING:
    from rollouts.inference.generate_probe import ReportedLogprobs

__all__ = ["SGLangPolicy", "SGLangProtocol", "reported_logprobs"]


class SGLangProtocol(ProbedProtocol["ReportedLogprobs"]):
    """Routes and format of SGLang, and the kind of logprobs of each server."""

    ROUTE = "/generate"
    ABORTS = SGLANG_ABORTS
    takes_images = True
    request_options = staticmethod(generate_wire.request_options)
    read_completion = staticmethod(generate_wire.read_completion)

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

        generate_probe.check_reported(await self.probe(worker, reported_logprobs), sampling, worker.name)


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

    answers = await posted(generate_probe.PROBES, transport, url + SGLangProtocol.ROUTE, headers)
    return generate_probe.reported_by(*map(generate_probe.top_logprobs, answers))
