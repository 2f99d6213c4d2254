"""Protocols that send each server requests for facts that its description lacks.

A server is asked before its first request for which a fact matters, and again after it was unreachable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeAlias, TypeVar

import anyio

from rollouts.errors import without_password
from rollouts.http.answers import message_of
from rollouts.http.client import HttpClient
from rollouts.inference.routing import Worker
from rollouts.inference.servers import ServerProtocol
from rollouts.inference.wire_errors import error_of

__all__ = ["ProbedProtocol", "posted"]

T = TypeVar("T")

Probe: TypeAlias = Callable[[HttpClient, str, Mapping[str, str]], Awaitable[T]]
"""Called with the transport, the URL of a server and the headers of its requests."""


class ProbedProtocol(ServerProtocol, Generic[T]):
    """A protocol with one fact of each server, such as the kind of its logprobs."""

    def __init__(self, transport: HttpClient, headers: Mapping[str, str]) -> None:
        super().__init__(transport, headers)
        self.probed: dict[str, T] = {}
        """The facts, by the URL of the server."""
        self._probing: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def probe(self, worker: Worker, send: Probe[T]) -> T:
        """Return the fact of a server; ``send`` finds it once, until the server is forgotten."""
        if worker.url not in self.probed:
            async with self._probing[worker.url]:
                if worker.url not in self.probed:
                    self.probed[worker.url] = await send(self._transport, worker.url, self._headers)
        return self.probed[worker.url]

    def forget(self, worker: Worker) -> None:
        self.probed.pop(worker.url, None)


async def posted(bodies: Iterable[bytes], transport: HttpClient, url: str, headers: Mapping[str, str]) -> list[bytes]:
    """Post one body after the other; raise the error of a response whose status is not 200."""
    answers = []
    for body in bodies:
        status, payload = await transport.post(url, body, headers)
        if status != 200:
            raise error_of(status, f"{message_of(payload)} (POST {without_password(url)})")
        answers.append(payload)
    return answers
