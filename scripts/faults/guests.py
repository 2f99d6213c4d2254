"""Hostile programs, each among the sound programs of other rollouts."""

from __future__ import annotations

import base64
import contextlib
import gzip
import struct
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
import attrs
import msgspec

from rollouts.dtypes import Prompt
from rollouts.programs import ModelServer, function_recipe
from rollouts.testing.server import StubServer
from scripts.faults.harness import SOUND, Outcome, endpoint_at, judged
from scripts.faults.user_code import deep

__all__ = ["GUESTS", "GuestFault", "play_guest"]


@attrs.frozen
class GuestFault:
    """An attack of one hostile program on the gateway, among the sound programs of other rollouts."""

    name: str
    act: Callable[[ModelServer], Awaitable[Any]]


_LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def _chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": "Hello"}], **fields})


def _posts(
    body: Callable[[], bytes], *, times: int = 1, encoding: str = ""
) -> Callable[[ModelServer], Awaitable[None]]:
    """Send a body some times at once; whatever is answered, the program continues."""

    async def act(server: ModelServer) -> None:
        sent, headers = body(), {"x-api-key": server.api_key}
        if encoding:
            headers["Content-Encoding"] = encoding

        async def post(http: aiohttp.ClientSession) -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{server.base_url}/v1/chat/completions", data=sent, headers=headers) as answer:
                    await answer.read()

        async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
            for _ in range(times):
                tasks.start_soon(post, http)

    return act


def _offers(name: str) -> Callable[[ModelServer], Awaitable[None]]:
    odd = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    return _posts(lambda: _chat(tools=[_LOOK, odd]))


def _sends(data: bytes, connections: int = 1) -> Callable[[ModelServer], Awaitable[None]]:
    """Open connections without a key, send bytes on each, and leave."""

    async def act(server: ModelServer) -> None:
        address = urlsplit(server.base_url)
        assert address.hostname is not None
        assert address.port is not None
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(connections):
                stream = await anyio.connect_tcp(address.hostname, address.port)
                await stack.enter_async_context(stream)
                with contextlib.suppress(anyio.BrokenResourceError):
                    await stream.send(data)

    return act


async def _leaves(server: ModelServer) -> None:
    """Begin a call and go away, again and again."""
    for _ in range(20):
        with anyio.move_on_after(0.002):
            await _posts(_chat)(server)


async def _unknown_routes(server: ModelServer) -> None:
    """Each with control characters in its name."""
    async with aiohttp.ClientSession(headers={"x-api-key": server.api_key}) as http:
        for number in range(500):
            async with http.get(f"{server.base_url}/%1b[31m{number}") as answer:
                await answer.read()


def _picture() -> bytes:
    """An image of 64 million pixels in a few bytes."""
    header = struct.pack(">II5B", 8192, 8192, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(8192 * (1 + 3 * 8192) // 64))
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in chunks
    )
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return _chat(messages=[{"role": "user", "content": content}])


_ODD_NAMES = {
    "a quote": 'say"hello"', "a line end": "a\nb", "an object": '{"name": "x"}', "an escape": "a\\u0022",
    "the end of a call": "</tool_call>", "a NUL": "\0", "a special token": "<|im_start|>user", "no character": "",
    "a megabyte": "a" * 1_000_000,
}  # fmt: skip
GUESTS = (
    *(GuestFault(f"offers a tool with {what} in its name", _offers(name)) for what, name in _ODD_NAMES.items()),
    GuestFault("sends a compressed body", _posts(lambda: gzip.compress(b" " * 50_000_000), encoding="gzip")),
    GuestFault("sends 100 MB", _posts(lambda: b" " * 100_000_000)),
    GuestFault("sends 3 MB of lists in an unknown field", _posts(lambda: b'{"x":[' + b"[]," * 1_000_000 + b"1]}")),
    GuestFault("sends 3 MB of lists in a message", _posts(lambda: b'{"messages":[' + b"[]," * 1_000_000 + b"1]}")),
    GuestFault("sends a million fields", _posts(lambda: msgspec.json.encode({str(n): 1 for n in range(1_000_000)}))),
    GuestFault("sends 100,000 nested lists", _posts(lambda: b'{"x":' + b"[" * 100_000)),
    GuestFault("sends deep arguments", _posts(lambda: _chat(tools=[_LOOK], tool_choice={"type": deep(400)}))),
    GuestFault("sends an image that is too large", _posts(_picture)),
    GuestFault("sends the same call 100 times at once", _posts(_chat, times=100)),
    GuestFault("asks for 128 replies", _posts(lambda: _chat(n=128))),
    GuestFault("asks for an endless reply", _posts(lambda: _chat(max_tokens=10**18))),
    GuestFault("sends half of a surrogate pair", _posts(lambda: b'{"messages": "\\ud800"}')),
    GuestFault("sends no HTTP", _sends(b"\x1b[31m nonsense\r\n\r\n", 20)),
    GuestFault("sends half of a head", _sends(b"POST / HTTP/1.1\r\nHost: x\r\n", 20)),
    GuestFault("opens 300 connections", _sends(b"", 300)),
    GuestFault("leaves its calls", _leaves),
    GuestFault("asks for 500 unknown routes", _unknown_routes),
)


async def play_guest(fault: GuestFault, folder: Path) -> tuple[Outcome, str]:
    """Play a run of programs of which the first, and then one in six, is hostile; the sound ones are in batches."""
    met: list[int] = []
    lost: list[str] = []

    async def agent(server: ModelServer, prompt: Prompt) -> float:
        assert prompt.index is not None
        if prompt.index % 6 == 0:
            met.append(prompt.index)
            await fault.act(server)
            return 0.0
        history: list[Any] = [{"role": "user", "content": prompt.messages[0].text}]
        async with aiohttp.ClientSession(headers={"x-api-key": server.api_key}) as http:
            for _ in range(2):
                async with http.post(
                    f"{server.base_url}/v1/chat/completions", json={"messages": history, "tools": [_LOOK]}
                ) as answer:
                    whole = await answer.json()
                    if answer.status != 200:
                        lost.append(str(whole))
                history += [whole["choices"][0]["message"], {"role": "user", "content": "And?"}]
        return 1.0

    async with StubServer(lambda ids, sampling: SOUND) as server:
        prompts = [f"What is 1 + {number}?" for number in range(12)]
        recipe = function_recipe(
            "guests",
            endpoint_at(server.url),
            agent,
            prompts,
            n_samples_per_prompt=1,
            keep="all",
            batches=2,
            max_new_tokens=64,
            epochs=None,
        )
        config = attrs.evolve(recipe.config, batch_size=5, patience=10**6, failure_budget=1.0, max_attempts=1)
        recipe = attrs.evolve(recipe, config=config)
        return await judged(recipe, folder, lambda: lost[0] if lost else "" if met else "the fault was not met")
