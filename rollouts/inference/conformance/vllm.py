"""The points of vLLM's protocol that a run relies on: its share of SGLang's points, and the mode of its logprobs.

Invariant: as for SGLang, each point leaves the server as it was. The server must be started with ``--enable-scale-out``
and ``VLLM_SERVER_DEV_MODE=1``; it scores its replies with ``prompt_logprobs``, for which it uses no cached prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from rollouts.dtypes import Endpoint
from rollouts.errors import EndpointRefused
from rollouts.http.answers import loads
from rollouts.inference.aborts import headers_of
from rollouts.inference.base import ServerInfo
from rollouts.inference.conformance.points import Finding, Point, Report, ask_all
from rollouts.inference.conformance.probe import Probe, Reply, listed, opened
from rollouts.inference.conformance.sglang import POINTS as SGLANG_POINTS
from rollouts.inference.vllm import VLLMProtocol, describe_vllm, logprobs_mode
from rollouts.inference.vllm_wire import engine_id

__all__ = ["VLLM_POINTS", "vllm_conformance_of"]

_NAMES = {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Sampling parameters of SGLang, and vLLM's names for them."""


class VLLMProbe(Probe):
    """A vLLM server, asked in the words of SGLang."""

    @property
    def prefix(self) -> int:
        return 288  # the cache keeps blocks of 16 ids, on a CPU of 128

    async def post(self, body: Mapping[str, Any] | bytes, session: str = "") -> tuple[int, bytes]:
        headers = headers_of(self.endpoint) | ({"X-Session-ID": f"{self._salt} {session}"} if session else {})
        data = body if isinstance(body, bytes) else msgspec.json.encode(_translated(body))
        return await self.client.post(f"{self.url}{VLLMProtocol.ROUTE}", data, headers, new_connection=True)

    def read(self, prompt: Sequence[int], answer: Any) -> Reply:
        if answer["prompt_token_ids"] != list(prompt):
            raise EndpointRefused("prompt_token_ids differ from the ids that were sent")
        choice, usage = answer["choices"][0], answer["usage"]
        content = choice["logprobs"]["content"]
        meta = {
            "id": answer["request_id"].removeprefix(engine_id("")),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "finish_reason": {"type": choice["finish_reason"], "matched": choice.get("stop_reason")},
            "weight_versions": choice["weight_versions"],
            "prompt_logprobs": answer.get("prompt_logprobs"),
        }
        logprobs, ids = [one["logprob"] for one in content], [one["token_id"] for one in content]
        return Reply(prompt, choice["token_ids"], logprobs, ids, "", meta)

    async def scores(self, reply: Reply) -> list[float]:
        ids = [*reply.prompt, *reply.ids]
        scored = await self.reply(ids, sampling_params={"max_new_tokens": 1, "prompt_logprobs": 0})
        rows = scored.meta["prompt_logprobs"][len(reply.prompt) :]
        return [row[str(token)]["logprob"] for row, token in zip(rows, reply.ids, strict=True)]

    async def text(self, reply: Reply) -> str:
        body = msgspec.json.encode({"tokens": reply.ids})
        status, payload = await self.client.post(
            f"{self.url}/detokenize", body, headers_of(self.endpoint), new_connection=True
        )
        answer = loads(payload) if status == 200 else None
        return str(answer.get("prompt", "")) if isinstance(answer, dict) else ""

    async def describe(self) -> ServerInfo:
        return await describe_vllm(self.client, self.url, headers_of(self.endpoint))

    async def dtype(self) -> str | None:
        config = re.search(r"dtype=torch\.(\w+)", str((await self.info("/server_info")).get("vllm_config")))
        return None if config is None else config[1]

    async def served(self) -> set[str | None]:
        return {(await self.describe()).weight_version}

    async def folder(self) -> str:
        return str((await self.describe()).model)

    async def abort(self, rid: str) -> set[int]:
        routes = VLLMProtocol.ABORTS
        return {status for status, _ in await self.control(routes.one, dict(routes.body(rid)))}

    async def pause(self) -> str:
        paused = [status for status, _ in await self.control("/pause?mode=keep", {})]
        says = await self.info("/is_paused")
        came = f"/pause keep {listed(paused)}, /is_paused {says.get('is_paused')}"
        if set(paused) != {200} or says.get("is_paused") is not True:
            raise ValueError(came)
        return came

    async def unpause(self) -> None:
        await self.control("/resume", {})

    async def rename(self, version: str) -> None:
        await self.control("/update_weight_version", {"new_version": version})

    async def load_in_place(self, folder: str) -> None:
        requests: Sequence[tuple[str, dict[str, Any]]] = (
            ("/pause?mode=keep&clear_cache=false", {}),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            ("/update_weight_version", {"new_version": self.version()}),
            ("/resume", {}),
        )
        for path, body in requests:
            statuses = {status for status, _ in await self.control(path, body)}
            if statuses != {200}:
                raise ValueError(f"{path}: status {listed(statuses)}")

    async def clear(self) -> None:
        await self.control("/reset_prefix_cache", {})

    async def running(self) -> int | None:
        status, payload = (await self.get(VLLMProtocol.ABORTS.load))[0]
        load = VLLMProtocol.ABORTS.read_load(payload) if status == 200 else None
        return None if load is None else load.total


def _translated(body: Mapping[str, Any]) -> dict[str, Any]:
    params = {_NAMES.get(name, name): value for name, value in body.get("sampling_params", {}).items()}
    names = {"input_ids": "token_ids", "rid": "request_id", "extra_key": "cache_salt"}
    kept = {new: body[old] for old, new in names.items() if old in body}
    return {**kept, "return_token_ids": True, "sampling_params": {**params, "logprobs": 0}}


async def vllm_conformance_of(
    endpoint: Endpoint, *, unsafe: bool = False, tolerance: float | None = None, idle_seconds: float = 7.0
) -> Report:
    """Ask every point of the vLLM server at the first URL of an endpoint; arguments as for SGLang.

    Raises:
        EndpointUnavailable: no server answers.
        EndpointRefused: it is not a vLLM server, or it wants another key.
    """
    async with opened(VLLMProbe, endpoint, tolerance=tolerance, idle_seconds=idle_seconds) as probe:
        info = await probe.describe()
        results = await ask_all(VLLM_POINTS, probe, unsafe=unsafe)
        return Report(f"vLLM {info.version or 'of an unknown version'}", results)


async def _mode(probe: VLLMProbe) -> Finding:
    return Finding(True, await logprobs_mode(probe.client, probe.url, headers_of(probe.endpoint)))


async def _ready(probe: VLLMProbe) -> Finding:
    says = await probe.info("/is_paused")
    return Finding(says.get("is_paused") is False, f"/is_paused: {says.get('is_paused', 'no such route')}")


_CHANGES: Mapping[str, dict[str, Any]] = {
    "describes itself": {"asked": "GET /v1/models, /version, /weight_info: model and room for prompt and reply"},
    "ready": {"asked": "GET /is_paused: false", "check": _ready},
    "load": {"asked": "GET /metrics: requests that run and wait"},
    "a whole reply": {"asked": "24 ids with logprobs: request_id, prompt_token_ids, ids equal to the logprobs' ids"},
    "temperature scales logprobs": {
        "feature": "none: in raw mode the client refuses other temperatures than 0 and 1",
        "relied": False,
    },
    "top_k does not renormalise": {
        "feature": "none: in processed mode the client refuses truncation",
        "relied": False,
    },
    "abort": {"asked": "POST /inference/v1/abort_requests by the prefixed id: the reply so far, with its logprobs"},
    "a rid twice": {"feature": "none: the client aborts before it sends a request again", "relied": False},
    "a budget beyond the context": {"asked": "prompt and budget exceed the context: served to its end"},
    "pause": {"asked": "POST /pause keep during a reply: it is held, continues, and is whole"},
    "extra_key": {"asked": "a known prompt with a new cache_salt: nothing cached"},
    "prefixes after an update in place": {"asked": "a known prompt after it, with a new cache_salt: nothing cached"},
}
"""The differences, by the name of SGLang's point."""
_ABSENT = ("limits of a request", "update of a busy server")

VLLM_POINTS: Sequence[Point[Any]] = (
    *(attrs.evolve(point, **_CHANGES.get(point.name, {})) for point in SGLANG_POINTS if point.name not in _ABSENT),
    Point(
        "mode of logprobs",
        "two requests that allow one id each: both certain in processed mode, not in raw mode; no logits",
        "law 8: parameters for which the mode reports another distribution are refused",
        _mode,
    ),
)
"""In the order of asking."""
