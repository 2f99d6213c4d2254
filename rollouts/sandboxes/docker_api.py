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

__all__ = ["DockerApi", "DockerError", "Request"]

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
class Request:
    """A request with a body of any kind, or a file's."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: bytes | Path | None = None
    kind: str = "application/x-tar"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return self.body.stat().st_size if isinstance(self.body, Path) else len(self.body or b"")

    @property
    def head(self) -> bytes:
        """The lines before the body."""
        target = f"/{VERSION}{self.path}" + (f"?{urllib.parse.urlencode(self.query)}" if self.query else "")
        head = f"{self.method} {target} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
        if self.body is not None:
            head += f"Content-Type: {self.kind}\r\n"
        return f"{head}Content-Length: {self.size}\r\n\r\n".encode()


@attrs.frozen
class DockerApi:
    """Requests to the daemon at one unix socket."""

    path: str
    seconds: float = 60.0
    """Deadline of a request whose answer is not a stream; a second longer for each MiB of its body."""

    async def json(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None) -> Any:
        """Send a JSON request; return the decoded answer, ``None`` if it is empty."""
        data = None if body is None else msgspec.json.encode(body)
        answer = await self.send(Request(method, path, query, data, "application/json"))
        try:
            return msgspec.json.decode(answer) if answer.strip() else None
        except msgspec.DecodeError:
            raise SandboxError(f"{method} {path} at {self.path}: the answer is not JSON") from None

    async def send(self, request: Request, *, max_bytes: int = _JSON_BYTES) -> bytes:
        """Send a request; return the answer's body of at most ``max_bytes`` bytes."""
        whole, seconds = bytearray(), self.seconds + request.size / (1 << 20)
        with anyio.move_on_after(seconds) as scope:
            async with contextlib.aclosing(self.stream(request)) as chunks:
                async for chunk in chunks:
                    whole += chunk
                    if len(whole) > max_bytes:
                        raise SandboxError(f"{request} at {self.path}: got more than {max_bytes:,} bytes")
        if scope.cancelled_caught:
            raise SandboxError(f"{request} at {self.path}: no answer within {seconds:g} s")
        return bytes(whole)

    async def frames(self, path: str, body: Any) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the outputs of a started command: 1 for standard output, 2 for standard error, and some bytes."""
        unread = b""
        request = Request("POST", path, None, msgspec.json.encode(body), "application/json")
        async with contextlib.aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                unread += chunk
                while len(unread) >= _FRAME_HEAD:
                    size = int.from_bytes(unread[4:8], "big")
                    if unread[0] > 2 or unread[1:4] != b"\0\0\0":
                        raise SandboxError(f"{request} at {self.path}: the answer is not a stream of frames")
                    if len(unread) < _FRAME_HEAD + size:
                        break
                    yield unread[0], unread[_FRAME_HEAD : _FRAME_HEAD + size]
                    unread = unread[_FRAME_HEAD + size :]

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Send a request; yield the answer's body as it comes."""
        what, body = f"{request} at {self.path}", request.body
        try:
            connection = await anyio.connect_unix(self.path)
        except OSError as error:
            raise SandboxError(f"{what}: cannot connect: {error.strerror or error}; expected a daemon") from None
        async with connection:
            parts = _Parts()
            parser = httptools.HttpResponseParser(parts)
            try:
                if isinstance(body, Path):
                    await connection.send(request.head)
                    async with await anyio.open_file(body, "rb") as file:
                        while chunk := await file.read(_CHUNK):
                            await connection.send(chunk)
                else:
                    await connection.send(request.head + (body or b""))
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


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
