"""A connection that breaks at any byte of a response: the call gets one result, and nothing is left running."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias, get_args

import anyio
import anyio.abc
import attrs
import pytest

from rollouts.dtypes import Endpoint, SamplingParams, packed_tokens
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy
from rollouts.testing.server import StubServer

RESET = struct.pack("ii", 1, 0)
"""A linger time of zero, so that closing resets the connection."""

How: TypeAlias = Literal["reset", "half_close"]


@attrs.define
class Cutting:
    """A proxy that cuts the first connection with a response to ``/generate``, after a number of its bytes."""

    port: int
    how: How
    """Reset the connection; or close the sending half and continue to read."""
    left: int | None = None
    """Bytes until the cut; ``None`` for no cut."""
    passed: int = 0
    """Bytes of the last complete response."""

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        async with client, await anyio.connect_tcp("127.0.0.1", self.port) as server:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._forward, client, server, tasks.cancel_scope)
                if await self._answer(server, client):
                    tasks.cancel_scope.cancel()  # else it ends when the client closes its half

    async def _forward(
        self, client: anyio.abc.SocketStream, server: anyio.abc.SocketStream, scope: anyio.CancelScope
    ) -> None:
        try:
            async for data in client:
                self._asked = b"/generate" in data[:20] or (self._asked and b"POST" not in data[:5])
                self.passed = 0
                await server.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        scope.cancel()

    _asked: bool = False

    async def _answer(self, server: anyio.abc.SocketStream, client: anyio.abc.SocketStream) -> bool:
        """Whether the connection is to be closed."""
        try:
            async for data in server:
                if self._asked and self.left is not None:
                    data, rest = data[: self.left], data[self.left :]
                    self.left -= len(data)
                    await client.send(data)
                    if rest or not self.left:
                        self.left = None
                        if self.how == "half_close":
                            await client.send_eof()
                            return False
                        client.extra(anyio.abc.SocketAttribute.raw_socket).setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, RESET
                        )
                        return True
                else:
                    self.passed += len(data)
                    await client.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        return True


@asynccontextmanager
async def cutting(server: StubServer, how: How) -> AsyncIterator[tuple[Cutting, str]]:
    proxy = Cutting(int(server.url.rpartition(":")[2]), how)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.serve)
        yield proxy, f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("how", get_args(How))
async def test_an_answer_that_is_cut_at_any_byte_is_asked_for_again(how: How) -> None:
    """A cut in the status line, a header, after the headers or in the body still yields one complete result."""
    async with StubServer() as server, cutting(server, how) as (proxy, url):
        policy = SGLangPolicy(Endpoint(base_url=url, max_retries=2), backoff=lambda failures: 0.0)
        sampling = SamplingParams(max_new_tokens=8)
        prompt = packed_tokens([5, 6, 7])
        try:
            whole = await policy.complete(CompletionRequest(prompt, sampling))
            length = proxy.passed
            assert length > 300
            for cut in range(length):
                asked = len(server.requests)
                proxy.left = cut
                again = await policy.complete(CompletionRequest(prompt, sampling))
                assert again.tokens.tolist() == whole.tokens.tolist(), cut
                assert proxy.left is None, cut
                assert len(server.requests) == asked + 2, cut
                assert not server.live, cut
        finally:
            await policy.aclose()
        rids = [request.rid for request in server.requests]
        assert len(set(rids)) == len(rids)


async def test_what_runs_at_a_worker_that_dies_is_answered_by_the_others() -> None:
    """Each request is sent again at once, with its own rid; later calls of its sessions follow it."""
    arrived, lost = anyio.Event(), list[bytes]()

    async def never(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            lost.append(await stream.receive())
            if len(lost) == 3:
                arrived.set()
            await anyio.sleep_forever()

    async with StubServer() as sound, await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        dying = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        policy = SGLangPolicy(Endpoint(base_url=(dying, sound.url)), backoff=lambda failures: 0.0)

        async def turn(session: str) -> None:
            await policy.complete(
                CompletionRequest(packed_tokens([5, 6, 7]), SamplingParams(max_new_tokens=8), session=session)
            )

        try:
            async with anyio.create_task_group() as turns:
                async with anyio.create_task_group() as worker:
                    async with anyio.create_task_group() as listening:
                        listening.start_soon(listener.serve, never, worker)
                        for session in "abcdef":
                            turns.start_soon(turn, session)
                        await arrived.wait()
                        listening.cancel_scope.cancel()
                    await listener.aclose()
                    worker.cancel_scope.cancel()
            for session in "abcdef":
                await turn(session)
        finally:
            await policy.aclose()
        rids = {request.rid for request in sound.requests}
        assert (len(lost), len(rids), len(sound.requests)) == (3, 12, 12)
        assert not any(rid.encode() in data for rid in rids for data in lost)
        assert policy.totals.requests == 15
