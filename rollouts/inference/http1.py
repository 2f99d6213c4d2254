"""HTTP/1.1 over one connection: a request out, an answer in.

Invariant: an answer is taken whole or not at all, and belongs to the one request that was written before it; a
connection that said anything else, or whose request was given up, is never used again. What is no HTTP is a
:class:`NotHttp`, a connection that ended early a :class:`Broken` that tells whether an answer had begun.

It speaks what a server of JSON speaks: lengths, chunks, bodies up to the end; no redirect, no compression (none is
asked for), no pipeline. This module knows no pool, no deadline and nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import re
import ssl
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote, urlsplit

import attrs

__all__ = ["Broken", "Connection", "NotHttp", "Target"]

_TOGETHER = 1 << 16
"""A request up to so many bytes is written in one piece; the parts of a longer one are not copied."""
_LONGEST_HEAD = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?\Z")
_CHUNK = re.compile(rb"[0-9a-fA-F]{1,16}")


class Broken(Exception):
    """The connection ended before the whole answer was there."""

    def __init__(self, reason: BaseException | None, *, answered: bool) -> None:
        super().__init__(f"{type(reason).__name__}: {reason}" if reason is not None else "the server closed it")
        self.answered = answered


class NotHttp(Exception):
    """What came is no HTTP answer."""


@attrs.frozen
class Target:
    """Where a URL leads."""

    host: str
    port: int
    secure: bool
    path: bytes
    head: bytes = attrs.field(repr=False)
    """Headers that follow from the URL: the host, and who asks where the URL says so."""

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, url: str) -> Target:
        """Read a URL.

        Raises:
            ValueError: it has no host, or no port that there is.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no host")
        secure = parts.scheme == "https"
        name = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
        shown = f"[{name}]" if ":" in name else name
        head = f"Host: {shown}{f':{parts.port}' if parts.port else ''}\r\n".encode()
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            head += b"Authorization: Basic " + base64.b64encode(user.encode()) + b"\r\n"
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{parts.query}" if parts.query else "")
        return cls(name, parts.port or (443 if secure else 80), secure, path.encode(), head)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class Connection(asyncio.Protocol):
    """One connection; :meth:`exchange` one request after another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = bytearray()
        self._body: _Body | None = None
        self._keeps = True
        self.used = 0
        """Exchanges that came to their end."""

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """Connect.

        Raises:
            OSError: there is no connection.
        """
        loop = asyncio.get_running_loop()
        context = _tls() if target.secure else None
        _, connection = await loop.create_connection(cls, target.host, target.port, ssl=context)
        return connection

    @property
    def usable(self) -> bool:
        """Whether another request may be written."""
        return self._keeps and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """End it at once."""
        self._keeps = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(
        self, method: str, target: Target, headers: Mapping[str, str], body: Sequence[bytes], *, last: bool = False
    ) -> tuple[int, bytes]:
        """Write a request and read its answer.

        Args:
            method: ``GET`` or ``POST``.
            target: what is asked.
            headers: sent as they are.
            body: the parts of the body.
            last: say that no other request will follow.

        Returns:
            The status and the body.

        Raises:
            Broken: the connection ended.
            NotHttp: the answer is none.
        """
        if self._transport is None:
            raise Broken(None, answered=False)
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        head = b"%s %s HTTP/1.1\r\n%sAccept: */*\r\n%s%sContent-Length: %d\r\n\r\n" % (
            method.encode(), target.path, target.head, "".join(lines).encode("latin-1"),
            b"Connection: close\r\n" if last else b"", sum(map(len, body)),
        )  # fmt: skip
        self._answer = asyncio.get_running_loop().create_future()
        try:
            if sum(map(len, body)) <= _TOGETHER:
                self._transport.write(b"".join((head, *body)))
            else:
                for part in (head, *body):
                    self._transport.write(part)
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None
            self.used += 1
            if last or not self._keeps:
                self.close()

    # -- what the event loop says --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody asked
            return
        self._buffer += data
        try:
            self._read()
        except NotHttp as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        body, self._transport = self._body, None
        if self._answer is None or self._answer.done():
            return
        if body is not None and body.up_to_the_end and exc is None:
            self._finish(body.status, bytes(self._buffer))
        else:
            self._fail(Broken(exc, answered=body is not None or bool(self._buffer)))

    def _read(self) -> None:
        """Take what there is of the answer."""
        while self._body is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _LONGEST_HEAD or not b"HTTP/1.".startswith(self._buffer[:7]):
                    raise NotHttp(f"it begins with {bytes(self._buffer[:40])!r}")
                return
            body = _Body.of(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            if body.status >= 200:  # those before it say that there is more to come
                self._body, self._keeps = body, body.keeps
        whole = self._body.take(self._buffer)
        if whole is not None:
            self._keeps = self._keeps and not self._buffer
            self._finish(self._body.status, whole)

    def _finish(self, status: int, body: bytes) -> None:
        self._buffer, self._body = bytearray(), None
        assert self._answer is not None
        self._answer.set_result((status, body))

    def _fail(self, error: Exception) -> None:
        assert self._answer is not None
        self._answer.set_exception(error)


@attrs.define
class _Body:
    """How long the body of an answer is."""

    status: int
    keeps: bool
    """Whether the server keeps the connection."""
    length: int | None
    chunked: bool
    chunks: list[bytes] = attrs.field(factory=list)

    @property
    def up_to_the_end(self) -> bool:
        return self.length is None and not self.chunked

    @classmethod
    def of(cls, head: bytes) -> _Body:
        """Read the head of an answer."""
        line, *fields = head.split(b"\r\n")
        found = _STATUS.match(line)
        if found is None:
            raise NotHttp(f"it begins with {line[:40]!r}")
        status, length, chunked, keeps = int(found[2]), None, False, found[1] == b"1"
        for field in fields:
            name, _, value = field.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                if not value.isdigit() or length not in (None, int(value)):
                    raise NotHttp(f"its length is {value[:40]!r}")
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = value.lower() == b"chunked"
                if not chunked:
                    raise NotHttp(f"it is encoded as {value[:40]!r}")
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise NotHttp(f"it is encoded as {value[:40]!r}, which was not asked for")
            elif name == b"connection":
                keeps = b"close" not in value.lower() and (keeps or b"keep-alive" in value.lower())
        if status in (204, 304):
            length, chunked = 0, False
        body = cls(status, keeps, None if chunked else length, chunked)
        body.keeps = keeps and not body.up_to_the_end
        return body

    def take(self, buffer: bytearray) -> bytes | None:
        """The whole body, taken off the buffer; ``None`` while it is not all there."""
        if self.chunked:
            return self._take_chunks(buffer)
        if self.length is None or len(buffer) < self.length:
            return None
        whole = bytes(memoryview(buffer)[: self.length])
        del buffer[: self.length]
        return whole

    def _take_chunks(self, buffer: bytearray) -> bytes | None:
        while True:
            end = buffer.find(b"\r\n")
            if end < 0:
                return None
            size = _CHUNK.match(buffer)
            if size is None:
                raise NotHttp(f"a chunk begins with {bytes(buffer[:40])!r}")
            length = int(size[0], 16)
            if not length:
                return self._take_trailer(buffer, end)
            if len(buffer) < end + 2 + length + 2:
                return None
            self.chunks.append(bytes(memoryview(buffer)[end + 2 : end + 2 + length]))
            if buffer[end + 2 + length : end + 4 + length] != b"\r\n":
                raise NotHttp("a chunk is longer than it says")
            del buffer[: end + 4 + length]

    def _take_trailer(self, buffer: bytearray, end: int) -> bytes | None:
        """What follows the last chunk: lines, and an empty one."""
        at = end + 2
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                return None
            if end == at:
                del buffer[: end + 2]
                return b"".join(self.chunks)
            at = end + 2
