"""A client of Docker's HTTP API over its unix socket, as far as a sandbox needs it. Podman serves the same API.

Invariant: one connection for each request, closed with it, also when the caller is cancelled. An answer that is not
HTTP, is larger than its caller allows, or is late, is a :class:`SandboxError`; only a stream has no deadline. It knows
no sandbox.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs
import httptools
import msgspec

from rollouts.sandboxes.base import SandboxError

__all__ = ["DockerApi", "DockerError"]

VERSION = "v1.41"
"""Of Docker 20.10; Podman 4 also serves it."""
_JSON_BYTES = 16 << 20
_FRAME_HEAD = 8
_CHUNK = 1 << 20


class DockerError(SandboxError):
    """The daemon refused a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Parts:
    """The callbacks of httptools."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.headed = self.done = self.has_end = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True


@attrs.frozen
class DockerApi:
    """Requests to the daemon at one unix socket."""

    path: str
    seconds: float = 60.0
    """Deadline of a request whose answer is not a stream; a second longer for each MiB of its body."""

    async def json(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None) -> Any:
        """Send a JSON request; return the decoded answer, ``None`` if it is empty."""
        data = None if body is None else msgspec.json.encode(body)
        answer = await self.send(method, path, query, data, "application/json", _JSON_BYTES)
        try:
            return msgspec.json.decode(answer) if answer.strip() else None
        except msgspec.DecodeError:
            raise SandboxError(f"{method} {path} at {self.path}: the answer is not JSON") from None

    async def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | Path | None = None,
        kind: str = "application/x-tar",
        max_bytes: int = _JSON_BYTES,
    ) -> bytes:
        """Send a request with a body of any kind, or a file's; return the answer's of at most ``max_bytes`` bytes."""
        whole, seconds = bytearray(), self.seconds + _size_of(body) / (1 << 20)
        with anyio.move_on_after(seconds) as scope:
            async with contextlib.aclosing(self.stream(method, path, query, body, kind)) as chunks:
                async for chunk in chunks:
                    whole += chunk
                    if len(whole) > max_bytes:
                        raise SandboxError(f"{method} {path} at {self.path}: got more than {max_bytes:,} bytes")
        if scope.cancelled_caught:
            raise SandboxError(f"{method} {path} at {self.path}: no answer within {seconds:g} s")
        return bytes(whole)

    async def frames(self, path: str, body: Any) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the outputs of a started command: 1 for standard output, 2 for standard error, and some bytes."""
        unread = b""
        data = msgspec.json.encode(body)
        async with contextlib.aclosing(self.stream("POST", path, None, data, "application/json")) as chunks:
            async for chunk in chunks:
                unread += chunk
                while len(unread) >= _FRAME_HEAD:
                    size = int.from_bytes(unread[4:8], "big")
                    if unread[0] > 2 or unread[1:4] != b"\0\0\0":
                        raise SandboxError(f"POST {path} at {self.path}: the answer is not a stream of frames")
                    if len(unread) < _FRAME_HEAD + size:
                        break
                    yield unread[0], unread[_FRAME_HEAD : _FRAME_HEAD + size]
                    unread = unread[_FRAME_HEAD + size :]

    async def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | Path | None = None,
        kind: str = "application/x-tar",
    ) -> AsyncGenerator[bytes, None]:
        """Send a request; yield the answer's body as it comes."""
        target = f"/{VERSION}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        head = f"{method} {target} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: {kind}\r\n"
        head += f"Content-Length: {_size_of(body)}\r\n\r\n"
        what = f"{method} {path} at {self.path}"
        try:
            connection = await anyio.connect_unix(self.path)
        except OSError as error:
            raise SandboxError(f"{what}: cannot connect: {error.strerror or error}; expected a daemon") from None
        async with connection:
            parts = _Parts()
            parser = httptools.HttpResponseParser(parts)
            try:
                if isinstance(body, Path):
                    await connection.send(head.encode())
                    async with await anyio.open_file(body, "rb") as file:
                        while chunk := await file.read(_CHUNK):
                            await connection.send(chunk)
                else:
                    await connection.send(head.encode() + (body or b""))
                while not parts.done:
                    try:
                        parser.feed_data(await connection.receive())
                    except anyio.EndOfStream:
                        if parts.headed and parser.get_status_code() >= 400:
                            break
                        if not parts.headed or parts.has_end:  # a part of an archive would be read as the whole
                            raise SandboxError(f"{what}: the daemon closed the connection") from None
                        return  # the end of a body without a length
                    if parts.headed and parser.get_status_code() < 400 and parts.body:
                        yield bytes(parts.body)
                        parts.body.clear()
            except (anyio.BrokenResourceError, httptools.HttpParserError) as error:
                raise SandboxError(f"{what}: {type(error).__name__}: {error}") from None
            if parser.get_status_code() >= 400:
                status = parser.get_status_code()
                raise DockerError(f"{what}: HTTP {status}: {_message(bytes(parts.body))}", status)


def _size_of(body: bytes | Path | None) -> int:
    return body.stat().st_size if isinstance(body, Path) else len(body or b"")


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
