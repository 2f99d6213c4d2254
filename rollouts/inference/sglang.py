"""Policy that samples from SGLang servers.

This module knows which routes of SGLang a policy needs; ``generate_wire.py`` knows their format.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.dtypes import Completion, SamplingParams
from rollouts.inference import generate_wire
from rollouts.inference.aborts import SGLANG_ABORTS
from rollouts.inference.base import ExtrasRequest, ServerInfo
from rollouts.inference.completions import SentRequest
from rollouts.inference.discovery import describe_server
from rollouts.inference.pauses import is_ready
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.routing import Worker
from rollouts.inference.token_json import EncodedIds

__all__ = ["SGLangPolicy"]


class SGLangPolicy(ServerPolicy):
    """Samples from one or several SGLang servers of the same model; arguments as :class:`ServerPolicy`."""

    ROUTE = "/generate"
    ABORTS = SGLANG_ABORTS
    takes_images = True

    def _request_options(self, sampling: SamplingParams, stop_token_ids: tuple[int, ...], *, top_p_sets: bool) -> bytes:
        return generate_wire.request_options(sampling, stop_token_ids, top_p_sets=top_p_sets)

    def _request_body(
        self,
        rid: str,
        ids: EncodedIds,
        options: bytes,
        namespace: str,
        extras: ExtrasRequest | None,
        images: Sequence[bytes],
    ) -> tuple[bytes, int]:
        return generate_wire.request_body(rid, ids, options, namespace, extras, images)

    def _session_headers(self, session: str) -> dict[str, str]:
        return {"X-SMG-Routing-Key": session}

    def _read_completion(self, payload: bytes, request: SentRequest) -> Completion:
        return generate_wire.read_completion(payload, request)

    async def _describe_server(self, worker: Worker) -> ServerInfo:
        return await describe_server(self._transport, worker.url, self._headers)

    async def _is_ready(self, url: str) -> bool | None:
        return await is_ready(self._transport, url, self._headers)

    async def _check_server(self, worker: Worker, sampling: SamplingParams) -> None:
        return  # all servers report the same logprobs

    def _forget_server(self, worker: Worker) -> None:
        return
