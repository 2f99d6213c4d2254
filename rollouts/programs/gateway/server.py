"""The HTTP server of the gateway: routes, keys, heads and pings of streams, clients that go away.

Invariant: the key of a request alone names its session; a request without the key of an open session reaches nothing,
and gets an answer only to a probe of the server.
Every answer, also to a wrong request, has the form of its API. A stream that has begun is kept open until its reply is
there. The size of a body is limited, and the time in which it arrives, and the size of all bodies under way, of one
session and of all: other bodies wait. This module knows no token and no tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
import socket
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import attrs
import msgspec

from rollouts.base.extras import install_command
from rollouts.concurrency.deadlines import scope_class
from rollouts.errors import ConfigError
from rollouts.programs.gateway import chat, messages, responses
from rollouts.programs.gateway.address import PublicAddress
from rollouts.programs.gateway.guest_names import GuestNames
from rollouts.programs.gateway.in_flight import InFlight
from rollouts.programs.gateway.types import ApiError, CallReply, CallRequest, Session
from rollouts.programs.gateway.wire import Counts, Entries, Wire, decoded_body, encoded

try:
    from aiohttp import web
except ImportError as missing:
    raise ConfigError(f"the gateway needs aiohttp: {install_command('gateway')} ({missing})") from missing

from rollouts.programs.gateway.connections import BACKLOG, Connection, Connections, Listener, most_connections

__all__ = ["LINEAGE", "Gateway", "shared_gateway"]

WIRES: Mapping[str, Wire] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
LINEAGE = (
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
    "x-claude-code-session-id",
    "x-session-id",
    "x-parent-session-id",
    "session-id",
    "thread-id",
    "x-codex-window-id",
)
"""Headers in which programs name their agents and conversations."""
RETRY = "x-stainless-retry-count"
"""The header in which the SDKs of OpenAI and Anthropic say how often they have sent a request before."""
_IN_THREAD = 1 << 20
"""A body of more bytes, or with an image, is read in a worker thread: it would hold up the other calls."""
_ALL_BODIES = 1 << 30
"""Bytes of the bodies under way of all sessions."""
_KEY_LENGTH = 16
_SHOWN_PATH = 80
_UNKNOWN_ROUTES = 20
"""Unknown routes of a session that are counted by their path; the path is the client's, and may be anything."""
_PROBES = ("", "/", "/api/hello")
"""Paths to which programs send HEAD without a key, to connect before their first call."""
_GOOGLE = re.compile(
    r"/v1(alpha|beta)\w*(/.*)?|/v1/models/.*:(?:generateContent|streamGenerateContent|countTokens|embedContent|batch\w+)"
)
"""The paths of Google's API, which is not served."""
_PATH = re.compile(r"(?:/s/([^/]*))?(/.*)?", re.DOTALL)


class Gateway:
    """Serves sessions while its context lasts.

    Args:
        host: the address to listen on.
        port: 0 picks a free port.
        sock: a listening socket to serve instead of ``host`` and ``port``.
        model: the name in the list of models; requests may name any other.
        max_body: bytes of a request, if its session has no lower limit.
        head_seconds: how long the head of a stream waits for the reply, so that a failure is an HTTP status.
        ping_seconds: the interval of pings in a stream after its head.
        read_seconds: how long a client may take to send the head of a request, and then its body.
        connections: the most connections; by default three quarters of the file descriptors that the process may have.
            A quarter of them are for one session.
        names: the names of counts that clients made so far; by default none.

    Attributes:
        url: the URL of the server, without the path of a session.
        port: the port that it listens on.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        sock: socket.socket | None = None,
        model: str = "policy",
        max_body: int = 1 << 26,
        head_seconds: float = 5.0,
        ping_seconds: float = 5.0,
        read_seconds: float = 120.0,
        connections: int | None = None,
        names: GuestNames | None = None,
    ) -> None:
        self.url, self.port = "", 0
        self._address, self._sock = (host, port), sock
        self._model, self._created, self._max_body = model, int(time.time()), max_body
        self._head_seconds, self._ping_seconds, self._read_seconds = head_seconds, ping_seconds, read_seconds
        self._most_connections = connections
        self._bodies = InFlight(_ALL_BODIES)
        self._names = GuestNames() if names is None else names
        self._opened: dict[str, _Opened] = {}
        self._connections: Connections
        self._runner: web.ServerRunner

    def __repr__(self) -> str:
        calls = sum(len(opened.calls) for opened in self._opened.values())
        return f"<Gateway {self.url}: {len(self._opened)} sessions, {calls} calls>"

    async def __aenter__(self) -> Self:
        most = self._most_connections or most_connections()
        self._connections = Connections(
            self._handle, _malformed, most=most, most_of_one=max(most // 4, 1), head_seconds=self._read_seconds
        )
        self._runner = web.ServerRunner(self._connections, shutdown_timeout=0.5)
        sock = self._sock or _listening(*self._address)
        self.url, self.port = _url_of(sock), sock.getsockname()[1]
        await self._runner.setup()
        await web.SockSite(self._runner, Listener(sock), backlog=BACKLOG).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            for opened in list(self._opened.values()):
                self.close(opened.session)
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def listening(self, sock: socket.socket) -> AsyncIterator[str]:
        """Accept connections of one more listening socket while the context lasts, and close it; yields its URL.

        The socket may be of another network namespace.
        """
        url = _url_of(sock)
        site = web.SockSite(self._runner, Listener(sock), backlog=BACKLOG)
        await site.start()
        try:
            yield url
        finally:
            with anyio.CancelScope(shield=True):
                await site.stop()

    def open(self, session: Session, url: str | None = None) -> str:
        """Accept the calls of a session; return the base URL for its program, without ``/v1``.

        Args:
            session: its key is not the key of another open session.
            url: the URL at which the program reaches the server; by default :attr:`url`.

        Raises:
            ConfigError: the key is too short, cannot be sent in a header, or is in use.
        """
        key = session.key
        if len(key) < _KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"key: got {len(key)} characters; expected at least {_KEY_LENGTH} that a header can have")
        digest = _digest(key)
        if digest in self._opened:
            raise ConfigError("key: got the key of an open session; expected one key for each session")
        most = min(self._max_body, session.max_body)
        self._opened[digest] = _Opened(session, most, self._bodies, self._read_seconds, self._names)
        return f"{self.url if url is None else url}/s/{_name(digest)}"

    def close(self, session: Session) -> None:
        """Accept no more calls of a session, and cancel those under way. Its key is unknown from now on."""
        opened = self._opened.pop(_digest(session.key), None)
        for scope in set() if opened is None else set(opened.calls):
            scope.cancel()

    # -- routes --

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, Connection), "made by Connections"
        connection.begin()
        try:
            return await self._answer(http, connection)
        finally:
            connection.busy = False

    async def _answer(self, http: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        found = _PATH.fullmatch(http.path)
        name, path = found.groups("") if found is not None else ("", http.path)
        if http.method == "HEAD" and path in _PROBES:
            return web.Response()
        if _GOOGLE.fullmatch(path) is not None:
            return self._googles(http, path)
        wire = _wire_of(http, path)
        try:
            opened = self._find(http, name)
            if not self._connections.own(connection, opened.session.key):
                raise ApiError("rate_limit", "the session has too many connections; expected fewer at the same time")
            with _failures(opened, ConnectionError):  # the client has gone while it sent its body
                return await self._route(http, wire, opened, path)
        except ApiError as error:
            return _json(*wire.error(error))

    async def _route(self, http: web.BaseRequest, wire: Wire, opened: _Opened, path: str) -> web.StreamResponse:
        if path in WIRES and http.method == "POST":
            return await self._call(http, wire, opened)
        if path == "/v1/messages/count_tokens" and http.method == "POST":
            length = await opened.session.count_tokens(await _request_of(http, messages, opened))
            return _json(200, {"input_tokens": length})
        if path == "/v1/models" and http.method == "GET":
            return _json(200, self._models())
        if path.startswith("/v1/models/") and http.method == "GET":
            return _json(200, self._described(path.removeprefix("/v1/models/")))
        if path in WIRES and "websocket" in http.headers.get("Upgrade", "").lower():
            raise ApiError("upgrade", "this server has no WebSocket; expected a POST request")
        opened.count_unknown(path)
        shown = f"{http.method} {path[:_SHOWN_PATH]}"
        raise ApiError("not_found", f"{shown}: no such route; expected POST to one of {', '.join(WIRES)}")

    def _googles(self, http: web.BaseRequest, path: str) -> web.StreamResponse:
        """The answer to a request of Google's API, in its form; it is counted if it has the key of a session."""
        opened = self._opened.get(_digest(http.headers.get("x-goog-api-key", "") or http.query.get("key", "")))
        if opened is not None:
            opened.count_unknown(path)
        text = f"{http.method} {path[:_SHOWN_PATH]}: Google's API is not served; expected one of {', '.join(WIRES)}"
        return _json(404, {"error": {"code": 404, "message": text, "status": "NOT_FOUND"}})

    def _find(self, http: web.BaseRequest, name: str) -> _Opened:
        """The session of the request's key. A request with another key is counted by the session that its path names.

        Raises:
            ApiError: the request has no key of an open session, or the path names another session, or it has ended.
        """
        scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
        keys = {bearer.strip() if scheme.lower() == "bearer" else "", http.headers.get("x-api-key", "").strip()}
        digests = {digest for key in keys if key and (digest := _digest(key)) in self._opened}
        if len(digests) != 1:
            for named in [opened for digest, opened in self._opened.items() if any(keys) and name == _name(digest)]:
                named.session.count("refused/authentication")
            expected = "the key of an open session in Authorization: Bearer KEY or in x-api-key: KEY"
            raise ApiError("authentication", f"the key is missing or unknown; expected {expected}")
        (digest,) = digests
        if name and name != _name(digest):
            raise ApiError(
                "authentication", f"the key does not belong to the session /s/{name[:_SHOWN_PATH]} in the path"
            )
        opened = self._opened[digest]
        if opened.session.ended:
            raise ApiError("conflict", "the session has ended; it takes no more calls")
        return opened

    def _models(self) -> dict[str, Any]:
        name = self._model
        data = [self._described(name)]
        return {"object": "list", "data": data, "has_more": False, "first_id": name, "last_id": name}

    def _described(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._created, "owned_by": "rollouts"}

    # -- calls --

    async def _call(self, http: web.BaseRequest, wire: Wire, opened: _Opened) -> web.StreamResponse:
        request = await _request_of(http, wire, opened)
        lineage = {name: http.headers[name] for name in LINEAGE if name in http.headers}
        call = _Call(opened, wire, request, lineage, _attempt(http))
        headers = {"Content-Type": "text/event-stream" if request.stream else "application/json"}
        response = web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
        scope = scope_class()()
        opened.calls.add(scope)  # closing the session cancels it
        try:
            with scope:
                await (self._stream(http, response, call) if request.stream else _whole(http, response, call))
        finally:
            opened.calls.discard(scope)
            call.report()
        if scope.cancelled_caught and not response.prepared:
            raise ApiError("conflict", "the session has ended")
        if scope.cancelled_caught and http.transport is not None:
            http.transport.close()  # the end of the stream would say that the answer is complete
        return response

    async def _stream(self, http: web.BaseRequest, response: web.StreamResponse, call: _Call) -> None:
        done = anyio.Event()

        async def run() -> None:
            await call.run()
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            seconds = self._head_seconds
            while not done.is_set():
                with anyio.move_on_after(seconds):
                    await done.wait()
                if not done.is_set() and not await _written(http, response, call.wire.PING):
                    tasks.cancel_scope.cancel()
                    return
                seconds = self._ping_seconds
        if call.error is not None and not response.prepared:
            raise call.error
        if call.error is not None:
            await _written(http, response, call.wire.error_event(call.request, call.error), end=True)
        else:
            call.delivered = await _written(http, response, call.answer, end=True)


@attrs.define(eq=False)
class _Shared:
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    gateway: Gateway | None = None
    users: int = 0
    names: GuestNames = attrs.field(factory=GuestNames)


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[PublicAddress | None, _Shared]]
_SHARED = weakref.WeakKeyDictionary()


@contextlib.asynccontextmanager
async def shared_gateway(address: PublicAddress | None = None) -> AsyncIterator[Gateway]:
    """The gateway of the running event loop, on loopback; it is started by its first user and closed by its last.

    Args:
        address: of another gateway of the event loop, which programs on other machines reach.

    Raises:
        ConfigError: this machine cannot listen on the address.
    """
    shared = _SHARED.setdefault(asyncio.get_running_loop(), {}).setdefault(address, _Shared())
    with anyio.CancelScope(shield=True):
        async with shared.lock:
            if shared.gateway is None:
                place = ("127.0.0.1", 0) if address is None else (address.host, address.port)
                new = Gateway(*place, names=shared.names)
                shared.gateway = await new.__aenter__()
            shared.users += 1
            gateway = shared.gateway
    try:
        yield gateway
    finally:
        with anyio.CancelScope(shield=True):
            async with shared.lock:
                shared.users -= 1
                if not shared.users:
                    shared.gateway = None
                    await gateway.__aexit__(None, None, None)


async def _whole(http: web.BaseRequest, response: web.StreamResponse, call: _Call) -> None:
    await call.run()
    if call.error is not None:
        raise call.error
    call.delivered = await _written(http, response, call.answer, end=True)


async def _written(http: web.BaseRequest, response: web.StreamResponse, data: bytes, *, end: bool = False) -> bool:
    """Send data, after the head if it was not sent yet; false if the client has gone."""
    try:
        if not response.prepared:
            if end and response.content_type == "application/json":
                response.content_length = len(data)
            await response.prepare(http)
        await response.write(data)
        if end:
            await response.write_eof()
    except ConnectionError:
        return False
    return True


@attrs.define(eq=False)
class _Opened:
    """An open session, and its calls under way."""

    session: Session
    max_body: int
    all_bodies: InFlight
    read_seconds: float
    names: GuestNames
    calls: set[anyio.CancelScope] = attrs.field(factory=set)
    unknown: set[str] = attrs.field(factory=set)
    entries: defaultdict[Wire, Entries] = attrs.field(init=False)
    bodies: InFlight = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        no_images = self.session.no_images
        self.entries = defaultdict(lambda: Entries(no_images=no_images))
        self.bodies = InFlight(self.max_body)

    def count_unknown(self, path: str) -> None:
        """Count a request to a route that does not exist."""
        if path not in self.unknown and len(self.unknown) >= _UNKNOWN_ROUTES:
            path = "other"
        self.unknown.add(path)
        self.session.count(self.names.of(f"unknown_route/{path[:_SHOWN_PATH].lstrip('/')}"))


@attrs.define(eq=False)
class _Call:
    """A call of a session, and its replies or error."""

    opened: _Opened
    wire: Wire
    request: CallRequest
    lineage: Mapping[str, str]
    attempt: int
    replies: Sequence[CallReply] = ()
    delivered: bool = False
    """Whether the whole answer was written to the client's connection."""
    answer: bytes = b""
    error: ApiError | None = None

    async def run(self) -> None:
        """Ask the session; never raises an error."""
        try:
            with _failures(self.opened):
                self.replies = await self.opened.session.call(self.request, lineage=self.lineage, attempt=self.attempt)
                wire, request = self.wire, self.request
                if request.stream:
                    self.answer = b"".join(wire.events(request, self.replies))
                else:
                    self.answer = encoded(wire.answer(request, self.replies))
        except ApiError as error:
            self.error = error

    def report(self) -> None:
        """Tell the session whether the client got its replies."""
        session = self.opened.session
        (session.delivered if self.delivered else session.undelivered)(self.replies)


class _failures:  # noqa: N801 - used as `with _failures(...)`; no generator, as every call enters two
    """Fail the session with an error that is not an :class:`ApiError`, and answer with an error of the server.

    Args:
        passed: errors that do not fail the session.
    """

    __slots__ = ("_opened", "_passed")

    def __init__(self, opened: _Opened, *passed: type[Exception]) -> None:
        self._opened, self._passed = opened, passed

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, (ApiError, *self._passed)):
            self._opened.session.fail(error)
            raise ApiError("server", f"the call failed ({type(error).__name__})") from error


# -- requests ---------------------------------------------------------------------------------------------------------


async def _request_of(http: web.BaseRequest, wire: Wire, opened: _Opened) -> CallRequest:
    """Read a request.

    Raises:
        ApiError: the body is too long or too slow, is not JSON, or has a wrong field.
    """
    try:
        size = _size_of(http, opened.max_body)
        async with opened.bodies.more(size), opened.all_bodies.more(size):
            request = await _read(await _body_of(http, opened), wire, opened)
    except web.RequestPayloadError as error:
        opened.session.count("refused/invalid_request")
        raise ApiError("invalid_request", f"body: cannot be read; expected JSON ({error})") from None
    except ApiError as error:
        opened.session.count(f"refused/{error.counted}")
        raise
    if not request.counts:
        return request
    counts: Counts = Counter()
    for name, amount in request.counts.items():
        counts[opened.names.of(name)] += amount  # type: ignore[assignment]  # some counts are of seconds
    return attrs.evolve(request, counts=counts)


async def _read(body: bytes, wire: Wire, opened: _Opened) -> CallRequest:
    long = len(body) > _IN_THREAD
    decode = functools.partial(decoded_body, body, wire.HISTORY, wire.FIELDS)
    with _json_errors(body):
        fields = await anyio.to_thread.run_sync(decode) if long else decode()
        entries = opened.entries[wire]
        read = functools.partial(wire.read, fields, opened.session.reply, entries)
        images = b"base64" in body and b"base64" in entries.unread(fields, wire.HISTORY)
        return await anyio.to_thread.run_sync(read) if long or images else read()


def _size_of(http: web.BaseRequest, most: int) -> int:
    """The most bytes that the body of a request can have."""
    encoding = http.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError("media_type", f"Content-Encoding: got {encoding[:40]!r}; expected a body that is not compressed")
    size = http.content_length
    if size is not None and size > most:
        raise _too_large(size, most)
    return most if size is None else size


async def _body_of(http: web.BaseRequest, opened: _Opened) -> bytes:
    body = bytearray()
    if http.content.is_eof():  # all of it came with the head, as most bodies do: there is nothing to wait for
        while not http.content.at_eof():
            body += http.content.read_nowait()
        if len(body) > opened.max_body:
            raise _too_large(len(body), opened.max_body)
        return bytes(body)
    with anyio.move_on_after(opened.read_seconds) as late:
        if "100-continue" in http.headers.get("Expect", "").lower():
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http.writer.output_size = 0
        while chunk := await http.content.readany():
            body += chunk
            if len(body) > opened.max_body:
                raise _too_large(len(body), opened.max_body)
    if late.cancelled_caught:
        raise ApiError("timeout", f"body: got {len(body)} bytes in {opened.read_seconds:g} s; expected all of it")
    return bytes(body)


def _too_large(size: int, most: int) -> ApiError:
    return ApiError("too_large", f"body: got {size} bytes; expected at most {most}")


def _attempt(http: web.BaseRequest) -> int:
    """How often the client says that it has sent the request before."""
    given = http.headers.get(RETRY, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 4 else 0


def _malformed(message: str | None) -> web.Response:
    """The answer to bytes that are not HTTP."""
    return _json(*chat.error(ApiError("invalid_request", f"not an HTTP request ({message})"[:200])))


@contextlib.contextmanager
def _json_errors(body: bytes) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("invalid_request", f"body: got {len(body)} bytes; expected JSON ({error})") from None


def _wire_of(http: web.BaseRequest, path: str) -> Wire:
    """The format of a request's errors."""
    if path in WIRES:
        return WIRES[path]
    return messages if "/messages" in path or "anthropic-version" in http.headers else chat


def _json(status: int, value: Mapping[str, Any]) -> web.Response:
    headers = {"x-should-retry": "false"} if 400 <= status < 500 and status != 429 else None  # clients retry a 409
    return web.Response(body=encoded(value), status=status, headers=headers, content_type="application/json")


# -- addresses --------------------------------------------------------------------------------------------------------


def _digest(key: str) -> str:
    """The hash by which a key is looked up: the time of a look-up reveals nothing of the keys."""
    raw = key.encode("utf-8", "surrogateescape")  # as aiohttp decodes the bytes of a header
    return hashlib.sha256(raw).hexdigest()


def _name(digest: str) -> str:
    """The name of a session in its path, which logs may show."""
    return digest[:16]


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError.of("host:port", f"{host}:{port}", f"an address to listen on ({error})") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _url_of(sock: socket.socket) -> str:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        raise ConfigError.of("sock", sock.family.name, "a socket of an internet address")
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
