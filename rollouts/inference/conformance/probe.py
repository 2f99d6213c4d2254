"""Requests of the conformance points to an SGLang server, or to a router and the servers behind it.

A probe of another protocol overrides the requests, and returns answers of the same form.

Invariant: ``/generate`` goes to the URL of the endpoint; control routes go to the servers behind a router. Prompts are
new in every probe, so that no prefix of an earlier one is cached.

This module judges nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import attrs
import msgspec

from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Endpoint
from rollouts.errors import EndpointUnavailable
from rollouts.http.answers import loads, message_of
from rollouts.http.client import HttpClient
from rollouts.inference.aborts import headers_of, workers_behind
from rollouts.inference.base import ServerInfo
from rollouts.inference.discovery import describe_server, served_version
from rollouts.inference.wire_errors import Overloaded, error_of

__all__ = ["FREE", "Probe", "Reply", "listed", "opened"]

FREE = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
"""A reply of 24 tokens from the full distribution."""
_QUEUE_SECONDS = 60.0
"""How long a full queue, or requests that still run, are waited for."""


@attrs.frozen
class Reply:
    """One response of ``/generate`` with status 200."""

    prompt: Sequence[int]
    ids: list[int]
    logprobs: list[float]
    logprob_ids: list[int]
    text: str
    meta: dict[str, Any]

    @property
    def cached(self) -> int:
        return int(self.meta.get("cached_tokens") or 0)

    @property
    def finish(self) -> dict[str, Any]:
        reason = self.meta["finish_reason"]
        return reason if isinstance(reason, dict) else {"type": reason}


@attrs.define
class Probe:
    """A server and its properties."""

    endpoint: Endpoint
    tolerance: float | None
    """Largest difference of two logprobs of one token; ``None``: by the dtype that the server reports."""
    idle_seconds: float
    client: HttpClient
    servers: list[str] = attrs.field(factory=list)
    is_router: bool = False
    _salt: str = attrs.field(factory=lambda: os.urandom(8).hex())

    @property
    def url(self) -> str:
        return self.endpoint.base_url[0]

    @property
    def prefix(self) -> int:
        """Ids of a prompt that is long enough for the prefix cache."""
        return 48

    def prompt(self, name: str, length: int = 24) -> list[int]:
        """Ids that every vocabulary has; the same for one name."""
        rng = random.Random(f"{self._salt} {name}")
        return [10 + rng.randrange(400) for _ in range(length)]

    def version(self) -> str:
        """A name for weights that this probe loads."""
        return f"conformance-{self._salt}"

    # -- requests -----------------------------------------------------------------------------------------------------

    async def post(self, body: Mapping[str, Any] | bytes, session: str = "") -> tuple[int, bytes]:
        """POST to ``/generate``."""
        headers = headers_of(self.endpoint) | ({"X-SMG-Routing-Key": f"{self._salt} {session}"} if session else {})
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.client.post(f"{self.url}/generate", data, headers, new_connection=True)

    async def reply(self, prompt: Sequence[int], *, session: str = "", rid: str = "", **fields: Any) -> Reply:
        """Generate; ``sampling_params`` are added to ``FREE``. A full queue is waited for.

        Raises:
            EndpointError: a status other than 200.
        """
        sampling = {**FREE, "skip_special_tokens": False, "no_stop_trim": True, **fields.pop("sampling_params", {})}
        body = {"input_ids": prompt, "return_logprob": True, "rid": rid or uuid.uuid4().hex, **fields}
        until = anyio.current_time() + _QUEUE_SECONDS
        while True:
            status, payload = await self.post({**body, "sampling_params": sampling}, session or str(body["rid"]))
            if status == 200:
                return self.read(prompt, msgspec.json.decode(payload))
            error = error_of(status, message_of(payload))
            if not isinstance(error, Overloaded) or anyio.current_time() > until:
                raise error
            await anyio.sleep(0.1)

    async def until_idle(self) -> None:
        """Wait until nothing runs on the servers, for :data:`_QUEUE_SECONDS` at most."""
        with anyio.move_on_after(_QUEUE_SECONDS, shield=True):
            while await self.running():  # noqa: ASYNC110 - another process
                await anyio.sleep(0.05)

    def read(self, prompt: Sequence[int], answer: Any) -> Reply:
        """A decoded response as a reply."""
        meta = answer["meta_info"]
        triples = meta.get("output_token_logprobs") or []
        return Reply(
            prompt,
            answer["output_ids"],
            [triple[0] for triple in triples],
            [triple[1] for triple in triples],
            answer.get("text", ""),
            meta,
        )

    async def scores(self, reply: Reply) -> list[float]:
        """The logprobs of a reply as the server scores it: cold, at temperature 1, over the whole vocabulary."""
        ids = [*reply.prompt, *reply.ids]
        scored = await self.reply(ids, sampling_params={"max_new_tokens": 0}, logprob_start_len=0)
        return [triple[0] for triple in scored.meta["input_token_logprobs"][len(reply.prompt) :]]

    async def text(self, reply: Reply) -> str:
        """The text of a reply; empty if the server has none."""
        return reply.text

    async def describe(self) -> ServerInfo:
        """The description of the server.

        Raises:
            EndpointError: it does not answer, or has another protocol.
        """
        return await describe_server(self.client, self.url, headers_of(self.endpoint))

    async def dtype(self) -> str | None:
        """The dtype that the server reports."""
        return (await self.info("/server_info")).get("dtype")

    async def served(self) -> set[str | None]:
        """The weight versions that the servers report."""
        return {await served_version(self.client, url, headers_of(self.endpoint)) for url in self.servers}

    async def folder(self) -> str:
        """The folder of the weights."""
        return str((await self.info("/model_info"))["model_path"])

    async def abort(self, rid: str) -> set[int]:
        """Abort a request by the id with which it was sent; returns the statuses."""
        return {status for status, _ in await self.control("/abort_request", {"rid": rid})}

    async def pause(self) -> str:
        """Pause all servers, so that running requests compute their K/V again; what they answered, and then report.

        Raises:
            ValueError: a server did not pause, or says that it is ready.
        """
        paused = [status for status, _ in await self.control("/pause_generation", {"mode": "retract"})]
        ready = [status for status, _ in await self.get("/ready")]
        came = f"/pause_generation {listed(paused)}, /ready {listed(ready)}"
        if set(paused) != {200} or not set(ready) <= {503, 404}:
            raise ValueError(came)
        return came

    async def unpause(self) -> None:
        """Let all servers continue."""
        await self.control("/continue_generation", {})

    async def rename(self, version: str) -> None:
        """Give the weights another name."""
        await self.control("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def load_in_place(self, folder: str) -> None:
        """Load weights and keep all cached K/V."""
        await self.control("/pause_generation", {"mode": "in_place"})
        body = {"model_path": folder, "weight_version": self.version(), "flush_cache": False}
        await self.control("/update_weights_from_disk", body)
        await self.unpause()

    async def clear(self) -> None:
        """Clear the prefix caches."""
        await self.control("/flush_cache", {})

    async def control(self, path: str, body: dict[str, Any]) -> list[tuple[int, bytes]]:
        """POST to every server itself."""
        headers = headers_of(self.endpoint, admin=True)
        data = msgspec.json.encode(body)
        return [await self.client.post(url + path, data, headers, new_connection=True) for url in self.servers]

    async def get(self, path: str) -> list[tuple[int, bytes]]:
        """GET from every server itself."""
        return [await self.client.get(url + path, headers_of(self.endpoint)) for url in self.servers]

    async def info(self, path: str) -> dict[str, Any]:
        """The JSON object of the first server; empty if it has none."""
        status, payload = (await self.get(path))[0]
        found = loads(payload) if status == 200 else None
        return found if isinstance(found, dict) else {}

    async def context(self) -> int | None:
        """The context length that the server names."""
        cards = (await self.info("/v1/models")).get("data") or [{}]
        return cards[0].get("max_model_len") or (await self.info("/server_info")).get("context_length")

    async def running(self) -> int | None:
        """Requests in the servers; ``None`` if one does not say."""
        count = 0
        for status, payload in await self.get("/v1/loads"):
            answer = loads(payload) if status == 200 else None
            if not isinstance(answer, dict) or not answer.get("loads"):
                return None
            count += sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer["loads"])
        return count

    @contextlib.asynccontextmanager
    async def long(self, name: str, tokens: int = 80, **fields: Any) -> AsyncIterator[Callable[[], Reply]]:
        """A long reply that has begun; inside the context, it runs. After the context the function returns it."""
        prompt = self.prompt(name)
        replies: list[Reply] = []

        async def call() -> None:
            sampling = {"max_new_tokens": await self.budget(tokens)}
            replies.append(await self.reply(prompt, sampling_params=sampling, **fields))

        async with first_error() as tasks:
            tasks.start_soon(call)
            with anyio.move_on_after(10):
                while await self.running() == 0 and not replies:  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.01)
            await anyio.sleep(0.05)
            yield lambda: replies[0]

    async def budget(self, tokens: int) -> int:
        """``tokens``, or less where the context has less room after a prompt."""
        return min(tokens, (await self.context() or 1024) - 64)


def listed(values: object) -> str:
    """Different values, in the order in which they came."""
    found = list(dict.fromkeys(map(str, values)))  # type: ignore[call-overload]
    return ", ".join(found)


P = TypeVar("P", bound=Probe)


@contextlib.asynccontextmanager
async def opened(
    kind: type[P], endpoint: Endpoint, *, tolerance: float | None = None, idle_seconds: float = 7.0
) -> AsyncIterator[P]:
    """A probe of the first URL of an endpoint.

    Args:
        kind: of its protocol.
        endpoint: URL and keys.
        tolerance: largest difference of two logprobs of one token; by default by the server's dtype.
        idle_seconds: how long a connection stays idle until it is looked at.
    """
    client = HttpClient(connect_seconds=endpoint.connect_seconds)
    try:
        probe = kind(endpoint, tolerance, idle_seconds, client)
        workers: Sequence[str] = ()
        with contextlib.suppress(EndpointUnavailable):  # the points report it
            workers = await workers_behind(client, probe.url, headers_of(endpoint))
        probe.servers, probe.is_router = list(workers) or [probe.url], bool(workers)
        yield probe
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()
