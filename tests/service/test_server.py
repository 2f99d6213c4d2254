"""The laws of leases over HTTP: repeated, late and lost requests, restarts, staleness, access, bounded bodies."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import pytest
from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request

import rollouts.service
from rollouts.errors import ConfigError, EndpointRefused
from rollouts.http.client import HttpClient
from rollouts.service import Leases
from rollouts.service.fed_buffer import FedBuffer
from rollouts.service.server import MOST_BYTES, Service, serving
from rollouts.service.wire import read_lease
from rollouts.training import Sample
from tests.service.test_lease_laws import group, groups, on_virtual_clock, records_of, taken


@asynccontextmanager
async def service_of(path: Path, *numbers: int, **options: Any) -> AsyncIterator[tuple[Leases, str]]:
    """A service with ready groups, and its URL."""
    with Leases(path / "log", **{"groups_in_work": 8, **options}) as leases:
        leases.restore(groups(*numbers))
        async with serving(Service(leases)) as url:
            yield leases, url


async def asked(url: str, path: str, value: Any = None, *, key: str | None = None) -> tuple[int, bytes]:
    """POST a value, or GET without one, over a new connection."""
    transport = HttpClient(connect_seconds=5)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        if value is None:
            return await transport.get(f"{url}{path}", headers)
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return await transport.post(f"{url}{path}", body, headers)
    finally:
        await transport.aclose()


async def test_s1_a_group_is_in_one_acknowledged_lease(tmp_path: Path) -> None:
    """Consumers get different groups; acknowledged ones do not return, also after a restart; the end is 410."""
    async with service_of(tmp_path, 0, 1, 2, 3) as (leases, url):
        first, second = [read_lease((await asked(url, "/v1/leases", {"groups": 2}))[1]) for _ in range(2)]
        assert (first.groups, second.groups) == ((0, 1), (2, 3))
        assert (await asked(url, "/v1/leases", {"groups": 1}))[0] == 204
        assert (await asked(url, f"/v1/leases/{first.token}/ack", {"step": 7}))[0] == 200
        assert leases.acknowledged == {0: first.token, 1: first.token}
    async with service_of(tmp_path, 0, 1, 2, 3) as (leases, url):
        leases.finish()
        third = read_lease((await asked(url, "/v1/leases", {"groups": 4}))[1])
        assert third.groups == (2, 3)
        assert (await asked(url, f"/v1/leases/{third.token}/ack", {}))[0] == 200
        assert (await asked(url, "/v1/leases", {"groups": 1}))[0] == 410
    records = records_of(tmp_path / "log")
    assert [record["step"] for record in records if record["kind"] == "acknowledged"] == [7, None]


async def test_samples_arrive_byte_for_byte(tmp_path: Path) -> None:
    """Fields, columns and tools of the delivered samples are those of the leased ones."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        added = group(0)
        for sample in added:
            sample.tools = '[{"type": "function"}]'
        leases.add({0: added, 1: group(1)})
        async with serving(Service(leases)) as url:
            status, body = await asked(url, "/v1/leases", {"groups": 2, "consumer": "a"})
            lease = read_lease(body)
            (held,) = leases.held("a")
            assert (status, lease.token, lease.consumer) == (200, held.token, "a")
            assert body.count(b'[{"type": "function"}]') == 1
            for before, after in zip(held.samples, lease.samples, strict=True):
                assert as_bytes(after) == as_bytes(before)
            assert (await asked(url, f"/v1/leases/{lease.token}"))[1] == body


def as_bytes(sample: Sample) -> tuple[Any, ...]:
    columns = [None if column is None else column.tobytes() for column in sample.columns]
    return sample.fields_to_dict(), columns


class _Direct:
    """Calls the routes of a service without sockets, on a virtual clock."""

    def __init__(self, service: Service) -> None:
        self._app = service.app("127.0.0.1", None)
        self._app.freeze()

    async def post(self, path: str, value: Any) -> web.Response:
        stream = StreamReader(_Protocol(), 2**16, loop=asyncio.get_running_loop())  # type: ignore[arg-type]
        stream.feed_data(json.dumps(value).encode())
        stream.feed_eof()
        request = make_mocked_request("POST", path, payload=stream, app=self._app, headers={"Host": "localhost"})
        response = await self._app._handle(request)
        assert isinstance(response, web.Response)
        return response


class _Protocol:
    """The connection that a body is read from: it is there already."""

    _reading_paused = False

    def pause_reading(self) -> None: ...

    def resume_reading(self, resume_parser: bool = True) -> None: ...


def test_s2_a_lease_returns_within_a_second_of_its_time(tmp_path: Path) -> None:
    """A consumer that waits gets the groups of a lease that ended; a renewed lease ends later."""

    async def run() -> None:
        with Leases(tmp_path / "log", groups_in_work=8) as leases:
            leases.add(groups(0, 1))
            service = _Direct(Service(leases))
            began = anyio.current_time()
            first = read_lease(_body(await service.post("/v1/leases", {"groups": 2, "lease_s": 30})))
            await anyio.sleep(20)
            renewed = await service.post(f"/v1/leases/{first.token}/renew", {"lease_s": 30})
            second = read_lease(_body(await service.post("/v1/leases", {"groups": 2, "wait_s": 60})))
            assert 50 <= anyio.current_time() - began <= 51
            assert (renewed.status, second.groups) == (200, first.groups)
            for verb in ("renew", "release", "ack"):
                assert (await service.post(f"/v1/leases/{first.token}/{verb}", {})).status == 409

    on_virtual_clock(run)


def _body(response: web.Response) -> bytes:
    assert response.status == 200
    assert isinstance(response.body, bytes)
    return response.body


def test_s3_late_acknowledgements_are_409(tmp_path: Path) -> None:
    """1,000 of 1,000, and none changes the log."""

    async def run() -> None:
        with Leases(tmp_path / "log", groups_in_work=8) as leases:
            leases.add(groups(0, 1))
            service = _Direct(Service(leases))
            before = (tmp_path / "log").read_bytes()
            for number in range(1000):
                lease = await taken(leases, 2, lease_seconds=10)
                if number % 2:
                    await anyio.sleep(10)
                else:
                    leases.release(lease.token)
                assert (await service.post(f"/v1/leases/{lease.token}/ack", {})).status == 409
            assert ((tmp_path / "log").read_bytes(), leases.acknowledged) == (before, {})

    on_virtual_clock(run)


def test_no_clock_but_that_of_the_event_loop_is_read() -> None:
    """A clock of the machine that is set changes nothing: the service imports no other clock."""
    folder = Path(rollouts.service.__file__).parent
    for path in sorted(folder.glob("*.py")):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        }
        assert not names & {"datetime", "pickle", "marshal", "shelve"}
        assert "time" not in names or path.name == "client.py"


async def test_s4_an_acknowledgement_whose_answer_was_lost_is_idempotent(tmp_path: Path) -> None:
    """The connection breaks before the answer; the trainer asks again, also after a restart: one record."""
    async with service_of(tmp_path, 0) as (leases, url):
        lease = read_lease((await asked(url, "/v1/leases", {"groups": 1}))[1])
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/leases/{lease.token}/ack HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2"
            connection.sendall(f"{head}\r\n\r\n{{}}".encode())
            with anyio.fail_after(10):
                while not leases.acknowledged:
                    await anyio.lowlevel.checkpoint()
        before = (tmp_path / "log").read_bytes()
        assert (await asked(url, f"/v1/leases/{lease.token}/ack", {}))[0] == 200
    async with service_of(tmp_path, 0) as (leases, url):
        assert (await asked(url, f"/v1/leases/{lease.token}/ack", {}))[0] == 200
        assert (await asked(url, "/v1/leases", {"groups": 1}))[0] == 204
        log = (tmp_path / "log").read_bytes()
        assert (log.count(b"acknowledged"), log.startswith(before)) == (1, True)


def send_and_leave(url: str, path: str, value: Any) -> socket.socket:
    """Send a request on a connection that the caller closes before the answer."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps(value)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


async def test_s4_a_trainer_that_leaves_while_its_acknowledgement_is_written_has_acknowledged(tmp_path: Path) -> None:
    """It was killed between its request and the answer: the groups are settled, and neither stuck nor ready."""
    async with service_of(tmp_path, *range(4)) as (leases, url):
        for number in range(4):
            lease = read_lease((await asked(url, "/v1/leases", {"groups": 1}))[1])
            connection = send_and_leave(url, f"/v1/leases/{lease.token}/ack", {})
            with anyio.fail_after(10):
                while leases._writing.statistics().locked is False and number not in leases.acknowledged:
                    await anyio.lowlevel.checkpoint()
                connection.close()
                while number not in leases.acknowledged:
                    await anyio.lowlevel.checkpoint()
        assert (leases.leased, (tmp_path / "log").read_bytes().count(b"acknowledged")) == (0, 4)


async def test_a_client_that_leaves_does_not_interrupt_the_loading_of_weights(tmp_path: Path) -> None:
    """Servers with different weights would remain."""
    began, left, loaded = anyio.Event(), anyio.Event(), anyio.Event()

    async def publish(folder: str, version: str, while_running: Any) -> None:
        began.set()
        await left.wait()
        await anyio.sleep(0.2)
        loaded.set()

    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        async with serving(Service(leases, publish)) as url:
            connection = send_and_leave(url, "/v1/versions", {"name": "a", "path": "/weights"})
            with anyio.fail_after(10):
                await began.wait()
                connection.close()
                left.set()
                await loaded.wait()


async def test_a_repeated_request_for_groups_gets_the_same_lease(tmp_path: Path) -> None:
    """Its answer was lost; another request, and one after the end of the lease, gets another lease."""
    async with service_of(tmp_path, 0, 1) as (leases, url):
        bodies = [(await asked(url, "/v1/leases", {"groups": 1, "request": name}))[1] for name in ("a", "a", "b")]
        first, again, other = map(read_lease, bodies)
        assert (first.token, first.groups) == (again.token, again.groups) == (leases.held()[0].token, (0,))
        assert other.groups == (1,)
        leases.release(first.token)
        late = read_lease((await asked(url, "/v1/leases", {"groups": 1, "request": "a"}))[1])
        assert (late.groups, late.token > other.token) == ((0,), True)


async def test_a_request_repeated_while_the_first_waits_gets_the_same_lease(tmp_path: Path) -> None:
    """The first one's connection is cut off, which the service cannot see: one lease, not two."""
    async with service_of(tmp_path) as (leases, url):
        bodies: list[bytes] = []

        async def ask() -> None:
            bodies.append((await asked(url, "/v1/leases", {"groups": 1, "wait_s": 30, "request": "a"}))[1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
            await anyio.sleep(0.2)
            leases.add(groups(0, 1))
        first, second = map(read_lease, bodies)
        assert (first.token, first.groups) == (second.token, (0,))
        assert (leases.ready, leases.leased) == (1, 1)


async def test_a_consumer_that_leaves_while_it_waits_takes_nothing(tmp_path: Path) -> None:
    """The groups that become ready later go to others."""
    async with service_of(tmp_path) as (leases, url):
        with anyio.move_on_after(0.2):
            await asked(url, "/v1/leases", {"groups": 1, "wait_s": 60})
        await anyio.wait_all_tasks_blocked()
        leases.add(groups(0))
        assert read_lease((await asked(url, "/v1/leases", {"groups": 1, "wait_s": 5}))[1]).groups == (0,)


async def test_s5_versions_are_in_order_and_repeatable(tmp_path: Path) -> None:
    """A repeated version changes nothing; an earlier one is 409; a lease that is too old when it returns is dropped."""

    def of(number: int, version: str) -> dict[int, list[Sample]]:
        samples = group(number, 1)
        for sample in samples:
            sample.versions = [attrs.evolve(span, version=version) for span in sample.versions]
        return {number: samples}

    with Leases(tmp_path / "log", groups_in_work=8, max_staleness=1) as leases:
        leases.add(of(0, "a") | of(1, "a"))
        async with serving(Service(leases)) as url:
            first = read_lease((await asked(url, "/v1/leases", {"groups": 1}))[1])
            for name, status in (("b", 200), ("b", 200), ("c", 200), ("a", 409), ("b", 409), ("", 422)):
                assert (await asked(url, "/v1/versions", {"name": name}))[0] == status
                leases.restore(of(2, "b") if name == "b" and leases.ready == 1 else {})
            assert (await asked(url, f"/v1/leases/{first.token}/release", {}))[0] == 200
            assert read_lease((await asked(url, "/v1/leases", {"groups": 1}))[1]).groups == (2,)
            state = json.loads((await asked(url, "/v1/state"))[1])
            assert (state["dropped"], state["version"]) == ({"too old": 2}, "c")


async def test_a_version_that_could_not_be_stored_is_an_error_again(tmp_path: Path) -> None:
    """A repetition is not answered with 200: no restart would know the version."""
    async with service_of(tmp_path, 0) as (leases, url):
        leases._log.close()
        for _ in range(2):
            assert (await asked(url, "/v1/versions", {"name": "a"}))[0] == 500


async def test_a_request_while_the_service_stops_is_503(tmp_path: Path) -> None:
    """Also if it waits for another's write when the logs are closed: the client waits for the next process."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases, FedBuffer().opened(tmp_path / "fed", None) as buffer:
        leases.add(groups(0))
        service = Service(leases, fed=buffer)
        token = (await taken(leases, 1)).token
        requests = [(f"/v1/leases/{token}/ack", {}), ("/v1/versions", {"name": "a"}), ("/v1/prompts/end", {})]
        requests.append(("/v1/prompts", {"id": "a", "prompts": ["x"]}))

        async def ask(path: str, body: dict[str, Any]) -> None:
            assert (path, (await asked(url, path, body))[0]) == (path, 503)

        async with serving(service) as url, anyio.create_task_group() as tasks:
            async with leases._writing, buffer._writing:
                for one in requests:
                    tasks.start_soon(ask, *one)
                with anyio.fail_after(10):
                    while sum(lock.statistics().tasks_waiting for lock in (leases._writing, buffer._writing)) < 4:
                        await anyio.lowlevel.checkpoint()
                service.leases, buffer._log = None, None
                leases._log.close()
            await ask(*requests[0])


async def test_a_lease_is_not_returned_by_the_first_of_two_requests_for_it(tmp_path: Path) -> None:
    """Its client is noticed to have left when the repetition has the lease already: the answer would have a lease
    whose groups are ready again, so that they are trained twice."""
    async with service_of(tmp_path, 0) as (leases, url), anyio.create_task_group() as tasks:
        request, bodies = {"groups": 1, "request": "a"}, list[bytes]()

        async def repeat() -> None:
            bodies.append((await asked(url, "/v1/leases", request))[1])

        threads = anyio.to_thread.current_default_thread_limiter()
        most, threads.total_tokens = threads.total_tokens, 1
        with anyio.fail_after(10):
            async with threads:  # no message is encoded meanwhile
                first = send_and_leave(url, "/v1/leases", request)
                for waiting, step in ((1, lambda: tasks.start_soon(repeat)), (2, first.close), (1, lambda: None)):
                    while threads.statistics().tasks_waiting != waiting:
                        await anyio.lowlevel.checkpoint()
                    step()
            threads.total_tokens = most
            while not bodies:
                await anyio.lowlevel.checkpoint()
        await leases.acknowledge(read_lease(bodies[0]).token)


async def test_a_version_with_a_path_is_loaded_by_the_servers(tmp_path: Path) -> None:
    """It is announced first; if the servers refuse it, the answer is 502, and it may be published again."""
    loaded: list[tuple[str, str, Any]] = []

    async def publish(folder: str, version: str, while_running: Any) -> None:
        assert leases.version == version
        loaded.append((folder, version, while_running))
        if len(loaded) == 1:
            raise EndpointRefused("no such folder")

    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        async with serving(Service(leases, publish)) as url:
            request = {"name": "a", "path": "/weights", "while_running": "in_place"}
            assert [(await asked(url, "/v1/versions", request))[0] for _ in range(2)] == [502, 200]
            assert loaded == [("/weights", "a", "in_place")] * 2
            status, body = await asked(url, "/v1/versions", {"name": "b", "path": "/weights", "while_running": "run"})
            assert (status, b"while_running: got 'run'; expected one of ('retract'," in body) == (422, True)
            assert leases.version == "a"  # a request that is refused announces nothing
        async with serving(Service(leases)) as url:
            assert (await asked(url, "/v1/versions", request))[0] == 422


async def test_s6_ready_and_leased_groups_are_bounded(tmp_path: Path) -> None:
    """More groups than can be ready are refused; the numbers say what is ready, leased and acknowledged."""
    async with service_of(tmp_path, 0, 1, 2, groups_in_work=3) as (leases, url):
        status, body = await asked(url, "/v1/leases", {"groups": 4})
        assert (status, b"an integer from 1 to 3" in body) == (422, True)
        await asked(url, "/v1/leases", {"groups": 1})
        lease = read_lease((await asked(url, "/v1/leases", {"groups": 1}))[1])
        await asked(url, f"/v1/leases/{lease.token}/ack", {})
        assert leases.room == 1
        metrics = (await asked(url, "/metrics"))[1].decode()
        leases.acknowledged |= dict.fromkeys(range(10, 1_234_576), 1)
        assert b"rollouts_groups_acknowledged 1234567\n" in (await asked(url, "/metrics"))[1]
        for line in ("groups_ready 1", "groups_leased 1", "groups_acknowledged 1", "groups_dropped 0"):
            assert f"rollouts_{line}\n" in metrics


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/leases", b"\x80\x04.", 422),  # a pickle
        ("/v1/leases", b'{"groups": "4"}', 422),
        ("/v1/leases", b'{"groups": 1, "more": 1}', 422),
        ("/v1/leases", b'{"groups": 1, "lease_s": 0}', 422),
        ("/v1/leases", b"[" * 100_000, 422),
        ("/v1/leases/1/ack", b'{"step": -1}', 422),
        ("/v1/leases/1/ack", b"{}", 409),
        ("/v1/leases/x/ack", b"{}", 404),
        ("/v1/leases", b" " * (MOST_BYTES + 1), 413),
        ("/v1/versions", b"{}", 422),
        ("/nowhere", b"{}", 404),
        ("/metrics", b"{}", 405),
    ],
)
async def test_a_bad_request_is_an_answer(path: str, body: bytes, status: int, tmp_path: Path) -> None:
    """Each has its status and a message as JSON, and changes nothing."""
    async with service_of(tmp_path, 0) as (leases, url):
        answer = await asked(url, path, body)
        assert answer[0] == status
        assert json.loads(answer[1])["error"]["message"]
        assert (leases.ready, leases.leased) == (1, 0)


async def test_a_service_has_a_key_or_a_loopback_address(tmp_path: Path) -> None:
    """Every route but ``/health`` needs it."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        with pytest.raises(ConfigError, match=r"host: got '0\.0\.0\.0'.*ROLLOUTS_SERVICE_KEY"):
            async with serving(Service(leases), "0.0.0.0"):
                pass
        async with serving(Service(leases), key="secret") as url:
            assert (await asked(url, "/health"))[0] == 200
            for path in ("/v1/state", "/metrics", "/v1/leases"):
                assert (await asked(url, path))[0] == 401
                assert (await asked(url, path, key="secrets"))[0] == 401
                assert (await asked(url, path, key="secret"))[0] == 200


async def test_requests_before_the_run_begins_are_503(tmp_path: Path) -> None:
    """Its workers or servers may take minutes; the service is alive meanwhile."""
    async with serving(Service()) as url:
        assert (await asked(url, "/health"))[0] == 200
        assert (await asked(url, "/v1/leases", {"groups": 1}))[0] == 503
        assert json.loads((await asked(url, "/v1/state"))[1])["begun"] is False


async def test_a_client_that_leaves_before_its_body_is_complete_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer or a worker that is killed while it sends leaves no traceback in the log of the service."""
    async with service_of(tmp_path) as (_, url):
        async with await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream:
            await stream.send(b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\nhalf")
            await anyio.lowlevel.checkpoint()
        assert (await asked(url, "/v1/state"))[0] == 200  # the service has seen the end of the connection
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
