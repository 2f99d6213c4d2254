"""The HTTP side of leases: a consumer in another process takes groups, acknowledges them, and announces versions.

    POST /v1/leases {groups, wait_s, lease_s, consumer, request}   200 with wire.py's message; 204 too few groups ready;
                                                                   410 every group is acknowledged or dropped
    GET  /v1/leases?consumer=NAME                                  the leases that a consumer has
    GET  /v1/leases/TOKEN                                          the message of such a lease again
    POST /v1/leases/TOKEN/ack {step} · /renew {lease_s} · /release 200; 409 the lease has ended, and nothing changed
    POST /v1/versions {name, path, while_running}                  200; 409 an earlier version; 502 servers refused it
    POST /v1/prompts {id, prompts}                                 200; 409 the id stands for other prompts, or the end
    POST /v1/prompts/end                                           200: no more prompts come
    GET  /v1/state · /metrics · /health                            numbers; the same for Prometheus; alive

Invariant: a request may be repeated: one whose answer was lost changes nothing the second time. A lease whose answer
cannot be sent returns at once; one whose answer may have been sent is found again by ``request``, or returns at its
time. Bodies of requests are JSON of known fields, at most :data:`MOST_BYTES` long, with prompts
:data:`MOST_OF_PROMPTS`, and together :data:`MOST_HELD`; nothing is unpickled. Access is that of
:mod:`rollouts.http.access`. Where groups come from is not known here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, get_args

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rollouts.concurrency.task_groups import first_error
from rollouts.errors import ConfigError, DataExhausted, EndpointError, JournalError, RolloutsError
from rollouts.http.access import guard
from rollouts.http.address import url_of
from rollouts.http.bodies import Bodies
from rollouts.http.server_log import server_log
from rollouts.inference.weights import WhileRunning
from rollouts.service.fed_buffer import FedBuffer, FedEnded, FedFull, NameTaken
from rollouts.service.leases import Lease, LeaseLost, Leases
from rollouts.service.wire import MEDIA_TYPE, lease_bytes

__all__ = ["MOST_BYTES", "MOST_HELD", "MOST_OF_PROMPTS", "Publish", "Route", "Service", "serving"]

MOST_BYTES = 1 << 20
MOST_HELD = 1 << 26
MOST_OF_PROMPTS = 1 << 24
_KEY = "ROLLOUTS_SERVICE_KEY"
_LONGEST_WAIT = 60.0
"""Most seconds that a request waits for groups; the consumer asks again."""

Route: TypeAlias = tuple[str, str, Handler]
"""Method, path and handler; the handler bounds the bodies that it reads."""
Publish: TypeAlias = Callable[[str, str, Any], Awaitable[None]]
"""Lets the inference servers load weights: folder, version, ``while_running``."""
Body = TypeVar("Body", bound=msgspec.Struct)


class _Take(msgspec.Struct, forbid_unknown_fields=True):
    groups: int
    wait_s: float = 0.0
    lease_s: float = 600.0
    consumer: str = ""
    request: str = ""


class _Ack(msgspec.Struct, forbid_unknown_fields=True):
    step: int | None = None


class _Renew(msgspec.Struct, forbid_unknown_fields=True):
    lease_s: float = 600.0


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Prompts(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    prompts: list[Any]


class _Version(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str | None = None
    while_running: str | None = None


@attrs.define(eq=False)
class Service:
    """Leases behind HTTP.

    Attributes:
        leases: of the run; ``None`` before it begins and after it ends, when requests are answered with 503.
        publish: loads weights into the servers; without it, only versions without a path are accepted.
        numbers: further gauges, such as those of workers, by name.
        routes: further routes, such as those of workers.
        fed: the buffer of a run whose prompts clients give.
        facts: what ``GET /v1/state`` says in addition, such as the folder of the run.
    """

    leases: Leases | None = None
    publish: Publish | None = None
    numbers: Callable[[], Mapping[str, float]] = dict
    routes: Sequence[Route] = ()
    fed: FedBuffer | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    _tokens: dict[str, tuple[int, web.Request]] = attrs.field(factory=dict)
    """The leases by the ``request`` that took them, with its latest repetition."""
    _publishing: anyio.Lock = attrs.field(factory=anyio.Lock)
    _bodies: Bodies = attrs.field(factory=lambda: Bodies(MOST_HELD))

    def app(self, host: str, key: str | None) -> web.Application:
        """The application; raises ConfigError as :func:`rollouts.http.access.guard`."""
        app = web.Application(
            client_max_size=MOST_BYTES, middlewares=[guard(host, key, _KEY), _cancelled_by_scope, _errors_as_json]
        )
        own: tuple[Route, ...] = (
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/state", self._state),
            ("POST", "/v1/leases", self._take),
            ("GET", "/v1/leases", self._held),
            ("GET", r"/v1/leases/{token:\d{1,19}}", self._again),
            ("POST", r"/v1/leases/{token:\d{1,19}}/ack", self._acknowledge),
            ("POST", r"/v1/leases/{token:\d{1,19}}/renew", self._renew),
            ("POST", r"/v1/leases/{token:\d{1,19}}/release", self._release),
            ("POST", "/v1/versions", self._announce),
            ("POST", "/v1/prompts", self._feed),
            ("POST", "/v1/prompts/end", self._end),
        )
        for method, path, handler in (*own, *self.routes):
            app.router.add_route(method, path, handler)
        return app

    @property
    def _open(self) -> Leases:
        if self.leases is None:
            raise _NotReady
        return self.leases

    async def _health(self, request: web.Request) -> web.Response:
        waits = self.fed is not None and self.fed.is_empty
        return web.Response(text="ok: the run waits for prompts\n" if waits else "ok\n")

    @contextlib.contextmanager
    def _of_run(self) -> Iterator[Leases]:
        """The leases; after the end of the run, closed logs and servers say that the client asks the next process."""
        leases = self._open
        try:
            yield leases
        except (JournalError, EndpointError):
            if self.leases is not leases:
                raise _NotReady from None
            raise

    async def _take(self, request: web.Request) -> web.Response:
        with self._of_run() as leases:
            return await self._taken(leases, request, await self._body(request, _Take))

    async def _taken(self, leases: Leases, request: web.Request, body: _Take) -> web.Response:
        lease = self._of_request(leases, body.request)
        if lease is None:
            lease = await leases.take(
                body.groups,
                lease_seconds=body.lease_s,
                wait_seconds=min(body.wait_s, _LONGEST_WAIT),
                consumer=body.consumer,
            )
        if lease is None:
            return web.Response(status=204)
        if (earlier := self._of_request(leases, body.request)) not in (None, lease):
            leases.release(lease.token)  # the same request, repeated while the first waited, took one meanwhile
            lease = earlier
        assert lease is not None
        if body.request:
            self._tokens[body.request] = lease.token, request
        try:
            response = await _delivered(lease)
            await anyio.lowlevel.checkpoint_if_cancelled()  # the client left while the message was encoded
            return response
        except BaseException:
            if self._tokens.get(body.request, (lease.token, request))[1] is request:  # else a repetition has the lease
                with contextlib.suppress(LeaseLost):
                    leases.release(lease.token)
            raise

    def _of_request(self, leases: Leases, request: str) -> Lease | None:
        """The lease that a request took whose answer was lost."""
        held = {lease.token: lease for lease in leases.held()}
        self._tokens = {name: taken for name, taken in self._tokens.items() if taken[0] in held}
        return held[self._tokens[request][0]] if request in self._tokens else None

    async def _held(self, request: web.Request) -> web.Response:
        leases = self._open.held(request.query.get("consumer"))
        rows = [{"token": lease.token, "groups": lease.groups, "consumer": lease.consumer} for lease in leases]
        return _json({"leases": rows})

    async def _again(self, request: web.Request) -> web.Response:
        return await _delivered(self._open.lease(_token(request)))

    async def _acknowledge(self, request: web.Request) -> web.Response:
        with self._of_run() as leases:
            body = await self._body(request, _Ack)
            await leases.acknowledge(_token(request), step=body.step)
        return _json({"acknowledged": _token(request)})

    async def _renew(self, request: web.Request) -> web.Response:
        leases, body = self._open, await self._body(request, _Renew)
        leases.renew(_token(request), lease_seconds=body.lease_s)
        return _json({"renewed": _token(request)})

    async def _release(self, request: web.Request) -> web.Response:
        leases = self._open
        await self._body(request, _Nothing)
        leases.release(_token(request))
        return _json({"released": _token(request)})

    async def _announce(self, request: web.Request) -> web.Response:
        with self._of_run() as leases:
            return await self._announced(leases, await self._body(request, _Version))

    async def _announced(self, leases: Leases, body: _Version) -> web.Response:
        if body.path is None and body.while_running is not None:
            raise ConfigError.of("while_running", body.while_running, "none without a path")
        if body.while_running not in (None, *get_args(WhileRunning)):  # before the version is announced
            raise ConfigError.of("while_running", body.while_running, f"one of {get_args(WhileRunning)}")
        if body.path is not None and self.publish is None:
            raise ConfigError.of("path", body.path, "none: this service has no servers that load weights")
        async with self._publishing:
            is_known = body.name == leases.version
            try:
                await leases.announce_version(body.name)
            except ConfigError as error:
                return _error(409 if body.name else 422, error)
            if body.path is not None and self.publish is not None:
                with anyio.CancelScope(shield=True):  # a client that leaves would leave servers with different weights
                    await self.publish(body.path, body.name, body.while_running)
        return _json({"version": body.name, "repeated": is_known})

    async def _feed(self, request: web.Request) -> web.Response:
        with self._of_run():
            body = await self._body(request, _Prompts, MOST_OF_PROMPTS)
            return _json(attrs.asdict(await self._buffer.feed(body.id, body.prompts)))

    async def _end(self, request: web.Request) -> web.Response:
        with self._of_run():
            await self._body(request, _Nothing)
            return _json({"prompts": await self._buffer.end()})

    @property
    def _buffer(self) -> FedBuffer:
        if self.fed is None:
            raise ConfigError("prompts: expected none, this service plays the recipe's data (rollouts up --fed)")
        return self.fed

    async def _body(self, request: web.Request, kind: type[Body], most: int = MOST_BYTES) -> Body:
        content = await self._bodies.read(request, most)
        try:
            return msgspec.json.decode(content or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"body of {request.path}: {error}") from None
        finally:
            self._bodies.release(len(content))

    async def _state(self, request: web.Request) -> web.Response:
        leases = self.leases
        state: dict[str, Any] = {**self.facts, **self._gauges(), "begun": leases is not None}
        if leases is not None:
            ended = leases.ended
            state |= {
                **_groups(leases),
                "dropped": dict(leases.dropped),
                "version": leases.version,
                "groups_in_work": leases.groups_in_work,
                "ended": None if ended is None else "exhausted" if isinstance(ended, DataExhausted) else str(ended),
            }
        return _json(state)

    def _gauges(self) -> dict[str, float]:
        return {**self.numbers(), **({} if self.fed is None else self.fed.numbers())}

    async def _metrics(self, request: web.Request) -> web.Response:
        numbers = {**self._gauges(), **({} if self.leases is None else _groups(self.leases))}
        lines = [f"# TYPE rollouts_{name} gauge\nrollouts_{name} {value!r}\n" for name, value in numbers.items()]
        return web.Response(text="".join(lines), headers={"Content-Type": "text/plain; version=0.0.4"})


def _groups(leases: Leases) -> dict[str, int]:
    return {
        "groups_ready": leases.ready,
        "groups_leased": leases.leased,
        "groups_acknowledged": len(leases.acknowledged),
        "groups_dropped": leases.dropped.total(),
    }


@contextlib.asynccontextmanager
async def serving(
    service: Service, host: str = "127.0.0.1", port: int = 0, key: str | None = None
) -> AsyncIterator[str]:
    """Serve while the context lasts; yields the URL.

    Args:
        service: the leases.
        host: the address to listen on; any but a loopback address needs a key.
        port: 0 selects a free port.
        key: every request but those of ``/health`` has ``Authorization: Bearer KEY``.

    Raises:
        ConfigError: the address is not available, or is public without a key.
    """
    app = service.app(host, key)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=4096)
    except (OSError, OverflowError) as error:
        raise ConfigError.of("host:port", f"{host}:{port}", f"an address to listen on ({error})") from None
    options: dict[str, Any] = {"access_log": None, "logger": server_log(), "handler_cancellation": True}
    options["auto_decompress"] = False  # a body of 1 MiB may stand for a thousand; no client of ours compresses
    runner = web.AppRunner(app, shutdown_timeout=0.5, **options)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=4096).start()
        yield url_of(host, listening.getsockname()[1])
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


class _NotReady(Exception):
    """The run has not begun, or has ended."""


@web.middleware
async def _cancelled_by_scope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer in a child task: aiohttp cancels the task of a client that left, and only a scope's cancellation obeys
    shields, which an acknowledgement and the loading of weights need."""
    answers: list[web.StreamResponse] = []

    async def answer() -> None:
        answers.append(await handler(request))

    async with first_error() as tasks:
        tasks.start_soon(answer)
    return answers[0]


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _NotReady:
        return _error(503, RolloutsError("the run has not begun, or the service stops"))
    except (LeaseLost, NameTaken, FedEnded) as error:
        return _error(409, error)
    except FedFull as error:
        answer = _error(503, error)
        answer.headers["Retry-After"] = "1"
        return answer
    except DataExhausted as error:
        return _error(410, error)
    except ConfigError as error:
        return _error(422, error)
    except EndpointError as error:
        return _error(502, error)
    except RolloutsError as error:
        return _error(500, error)
    except web.HTTPException as refused:
        answer = _error(refused.status, RolloutsError(refused.text or refused.reason))
        answer.headers.update({name: value for name, value in refused.headers.items() if name == "Retry-After"})
        return answer


def _token(request: web.Request) -> int:
    return int(request.match_info["token"])


async def _delivered(lease: Lease) -> web.Response:
    body = await anyio.to_thread.run_sync(lease_bytes, lease)
    return web.Response(body=body, content_type=MEDIA_TYPE, headers={"Lease": str(lease.token)})


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, error: RolloutsError) -> web.Response:
    return _json({"error": {"type": type(error).__name__, "message": str(error)}}, status)
