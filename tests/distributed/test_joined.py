"""Workers over HTTP: they join and leave while a run plays, repeat what was lost, and receive plain data."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts import __version__
from rollouts.distributed.dispatch import Dispatcher, LinkLost, Workers
from rollouts.distributed.join import Facts, _Built, _Membership, _Service, parts_of, recipe_of, recipe_sha256
from rollouts.distributed.joined import JoinedWorkers, _JoinedWorker
from rollouts.distributed.messages import PLAIN, Request, check_plain, received_error, sample_records
from rollouts.dtypes import Prompt
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, EndpointUnavailable, GenerateFailure
from rollouts.http.client import HttpClient
from rollouts.planning.simulation import VirtualLoop
from rollouts.recipe.files import file_of
from rollouts.runs.record_bytes import framed, read_framed
from rollouts.service.server import Service, serving
from rollouts.testing.json_server import JsonServer
from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig, Sample
from tests.distributed import games
from tests.processors import picture
from tests.stored_runs import some_sample

PROMPTS = [{"prompt": f"question {number}", "label": [number, None], "metadata": {"n": number}} for number in range(20)]


@asynccontextmanager
async def joining(workers: Workers, **options: Any) -> AsyncIterator[tuple[JoinedWorkers, Dispatcher, str]]:
    """A service for workers, before any has joined."""
    joined = JoinedWorkers(**options)
    async with serving(Service(routes=joined.routes)) as url:
        yield joined, joined.dispatcher(workers), url  # type: ignore[misc]


def config(seconds: float = 0.0) -> RolloutConfig:
    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.sleep(seconds)
        return [some_sample(prompt, 7) for prompt in prompts]

    return attrs.evolve(games.config(attempts=1), generate_fn=generate, reward_fn=None)


@asynccontextmanager
async def worker(url: str, played: RolloutConfig) -> AsyncIterator[anyio.Event]:
    """A worker in this process that leaves when the event is set."""
    leaves, transport = anyio.Event(), HttpClient(connect_seconds=5)
    service = _Service(transport, url, None, 5.0)
    try:
        async with anyio.create_task_group() as tasks:

            async def stay() -> None:
                while not leaves.is_set():
                    await _Membership(service, played, leaves, lambda _: None).run()

            tasks.start_soon(stay)
            yield leaves
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await transport.aclose()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not holds():
            await anyio.lowlevel.checkpoint()


async def batches(config: RolloutConfig, count: int) -> list[Sample]:
    samples: list[Sample] = []
    async with AsyncRolloutManager(config, DataBuffer(PROMPTS)) as manager:
        for _ in range(count):
            samples += await manager.generate_batch()
    manager.accounting.check()
    assert manager.accounting.failed == 0
    return samples


def as_bytes(samples: Sequence[Sample]) -> list[Any]:
    rows = [({**sample.fields_to_dict(), "times": []}, sample.columns) for sample in samples]
    return [(fields, [None if column is None else column.tobytes() for column in columns]) for fields, columns in rows]


async def test_samples_over_http_are_those_of_one_process() -> None:
    """Byte for byte, whichever worker played them."""
    expected = await batches(config(), 3)
    async with joining((1, 2)) as (_, entering, url), worker(url, config()), worker(url, config()):
        async with entering as workers:
            received = await batches(workers.config(config()), 3)
            assert workers.rollouts == 36
    assert as_bytes(received) == as_bytes(expected)


async def test_workers_come_and_go_and_no_attempt_is_lost() -> None:
    """Each leaves in the middle of its rollouts when the next has joined, more often than there are slots."""
    played = config(0.05)
    async with joining((1, 2)) as (joined, entering, url), worker(url, played) as first:
        async with entering as workers, anyio.create_task_group() as tasks:

            async def change() -> None:
                leaves = first
                async with AsyncExitStack() as stack:
                    for number in range(1, 6):
                        following = await stack.enter_async_context(worker(url, played))
                        await until(lambda: len(workers.alive) == 2)
                        leaves.set()
                        await until(functools.partial(has_left, number))
                        leaves = following
                    done.set()
                    await finished.wait()

            def has_left(number: int) -> bool:
                return workers.departures == number

            done, finished = anyio.Event(), anyio.Event()
            tasks.start_soon(change)
            samples: list[Sample] = []
            async with AsyncRolloutManager(workers.config(played), DataBuffer(PROMPTS)) as manager:
                while not done.is_set():
                    samples += await manager.generate_batch()
            manager.accounting.check()
            finished.set()
        assert len({sample.index for sample in samples}) == len(samples)
        assert (manager.accounting.failed, manager.failures.lost.total()) == (0, 0)
        assert (workers.departures, workers.deaths) == (5, 0)
        assert joined.numbers()["workers_wanted"] == 1


async def test_one_worker_after_another_gets_every_rollout() -> None:
    """The only worker leaves, and the next fills another slot: no rollout waits in a slot that stays empty."""
    played, results = config(0.2), list[Sample]()
    async with joining((1, 3)) as (_, entering, url), worker(url, played) as first:
        async with entering as workers, anyio.create_task_group() as tasks:

            async def play(number: int) -> None:
                results.extend(await workers.generate([Prompt("p", group_index=number, index=number)]))

            for number in range(6):
                tasks.start_soon(play, number)
            await anyio.wait_all_tasks_blocked()
            first.set()
            await until(lambda: not workers.alive)
            for number in range(6, 12):
                tasks.start_soon(play, number)
            await until(lambda: workers.departures == 1)
            async with worker(url, played):
                await until(lambda: len(results) == 12)
            assert workers.numbers()["outstanding"] == 0


async def test_repeated_requests_play_and_count_once() -> None:
    """Orders are sent again until they are acknowledged; records with an earlier number are there already."""
    async with joining(1) as (_, entering, url):
        transport = HttpClient(connect_seconds=5)

        async def post(path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
            return await transport.post(f"{url}/v1/workers{path}", body, headers)

        async def play() -> None:
            identity = json.loads((await post(""))[1])["worker"]
            after = json.dumps({"after": 0}).encode()
            first = await post(f"/{identity}/orders", after)
            while first[0] == 204:
                first = await post(f"/{identity}/orders", after)
            second = await post(f"/{identity}/orders", after)
            (request,), _ = PLAIN.read(first[1])
            assert PLAIN.read(second[1])[0][0].number == request.number
            records = sample_records(request.number, request.prompt, [some_sample(request.prompt, 7)])
            for _ in range(3):
                assert (await post(f"/{identity}/records", records, Record="0"))[0] == 200
            assert (await post(f"/{identity}/records", records, Record="2"))[0] == 422
            assert (await post(f"/{identity}/records", records[:-1], Record="1"))[0] == 422
            assert (await post(f"/{identity}/orders", b"[]"))[0] == 422
            assert (await post(f"/{'0' * 32}/orders", after))[0] == 410
            answered.set()

        answered = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            async with entering as workers:
                (sample,) = await workers.generate([Prompt("p", group_index=0, index=0)])
                assert sample == some_sample(Prompt("p", group_index=0, index=0), 7)
                await answered.wait()
                assert (workers.rollouts, workers.refused) == (1, 0)
        await transport.aclose()


def test_a_pause_of_the_service_is_no_silence_of_its_workers() -> None:
    """It was stopped for longer than the limit and read no request: the link lasts, and ends after real silence."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        link = _JoinedWorker("0" * 32, 1.5, {}, lambda size: None)

        async def receive() -> None:
            with pytest.raises(LinkLost, match=r"0{8} sent no request for 1.5 s"):
                await link.receive()
            ended.set()

        ended = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.sleep(1.0)
            loop._clock.now += 3600
            await anyio.sleep(0.2)
            link.beats()
            await anyio.sleep(1.2)
            assert not ended.is_set()
            await anyio.sleep(0.4)
            assert ended.is_set()

    anyio.run(run, backend_options={"loop_factory": VirtualLoop})


async def test_a_worker_never_plays_what_an_earlier_service_said() -> None:
    """The service restarts with other servers: a worker that was built for the old ones is built again, and joins."""
    sha256 = recipe_sha256("calculator")
    facts = {"version": __version__, "recipe": "calculator", "sha256": sha256, "options": {}}
    async with joining(1) as (joined, entering, url):
        transport = HttpClient(connect_seconds=5)
        service = _Service(transport, url, None, 5.0)
        servers = {"provider": "sglang", "model": str(DEMO_MODEL), "base_url": ["http://127.0.0.1:1"]}
        joined.facts = {**facts, **servers}
        built = _Built(None)
        await built.update(service)
        first = built.config
        await built.update(service)
        assert built.config is first
        joined.facts = {**facts, **servers, "base_url": ["http://127.0.0.1:2"]}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_enter, entering)
            await until(lambda: bool(joined._open_slots))
            with anyio.fail_after(10):
                await _Membership(service, played_by(built), anyio.Event(), pytest.fail, facts=built.facts).run()
            await built.update(service)
            assert built.config is not first
            said: list[str] = []
            tasks.start_soon(_Membership(service, played_by(built), anyio.Event(), said.append, facts=built.facts).run)
            await until(lambda: said == ["joined"])
            tasks.cancel_scope.cancel()
        await transport.aclose()


async def test_a_worker_never_plays_another_file_than_the_service(tmp_path: Path) -> None:
    """The file changed at a restart of the service, and is the old one here: the worker refuses it by name."""
    file = tmp_path / "mine.py"
    file.write_text(file_of("calculator").read_text())
    servers = {"provider": "sglang", "model": str(DEMO_MODEL), "base_url": ["http://127.0.0.1:1"]}
    facts = {"version": __version__, "recipe": str(file), "sha256": recipe_sha256(file), "options": {}, **servers}
    async with joining(1) as (joined, _, url):
        transport = HttpClient(connect_seconds=5)
        service, built = _Service(transport, url, None, 5.0), _Built(None)
        joined.facts = facts
        await built.update(service)
        joined.facts = {**facts, "sha256": "ab" * 32}
        with pytest.raises(ConfigError, match=r"recipe .*mine\.py: got 'SHA-256 .*expected SHA-256 abababababab…"):
            await built.update(service)
        await transport.aclose()


async def test_records_are_refused_while_there_is_no_room_for_them() -> None:
    """A body without room is refused with 503, so that its worker repeats it; at the end no bytes are held."""
    played = config()
    async with joining(2) as (joined, entering, url):
        joined.bodies.most = 20_000
        async with worker(url, played), worker(url, played), entering as workers:
            assert len(await batches(workers.config(played), 3)) == 36
            transport = HttpClient(connect_seconds=5)
            identity = next(iter(joined._workers))
            path = f"{url}/v1/workers/{identity}/records"
            records = framed({"kind": "turn", "data": b"x" * 30_000}, None)
            status, _ = await transport.post(path, records, {"Record": "9"})
            assert status == 503
            await transport.aclose()
        assert joined.bodies.held == 0
        assert joined.numbers()["worker_bodies_refused"] >= 1


async def test_a_request_without_room_is_a_sign_of_life_and_a_slow_body_is_sent_again() -> None:
    """A worker that only asks for orders is not silent while the records of others fill the memory."""
    async with joining(1) as (joined, entering, url), worker(url, config()), entering:
        transport = HttpClient(connect_seconds=5)
        (identity, joined_worker), joined.bodies.most = next(iter(joined._workers.items())), 1
        beat = joined_worker._beat
        status, _ = await transport.post(f"{url}/v1/workers/{identity}/orders", b'{"after": 0}', {})
        assert (status, beat.is_set()) == (503, True)
        joined.bodies.most = 1 << 30
        async with JsonServer(lambda asked: (408 if len(server.asked) == 1 else 200, {})) as server:
            assert (await _Service(transport, server.url, None, 5.0).ask("POST", "/", b"{}"))[0] == 200
        await transport.aclose()


async def _enter(entering: Dispatcher) -> None:
    async with entering:
        await anyio.sleep_forever()


def played_by(built: _Built) -> RolloutConfig:
    assert built.config is not None
    return built.config


async def test_a_silent_worker_is_replaced_by_the_next() -> None:
    """It joined and sends nothing more; its rollouts are tried again, and the next worker gets its slot."""
    played = attrs.evolve(config(), max_attempts=3)
    async with joining(1, silent_seconds=0.1) as (_, entering, url):
        transport = HttpClient(connect_seconds=5)
        async with anyio.create_task_group() as tasks:

            async def join_and_be_silent() -> None:
                await transport.post(f"{url}/v1/workers", b"", {})
                async with worker(url, played):
                    await done.wait()

            done = anyio.Event()
            tasks.start_soon(join_and_be_silent)
            async with entering as workers:
                assert len(await batches(workers.config(played), 1)) == 12
                assert workers.deaths >= 1
            done.set()
        await transport.aclose()


@pytest.mark.parametrize(
    "body",
    [
        b"\0\0\0\0",
        b"\4\0\0\0\0\0\0\0",
        framed({"kind": "sample"}, None),
        framed({"kind": "sample", "number": 0, "columns": [1000, True]}, None),
        b"\x08\x10\0\0\x04\x10\0\0" + b"\x91" * 4100,
    ],
    ids=["empty", "no fields", "no number", "no columns", "deep"],
)
async def test_a_worker_that_sends_no_records_is_replaced(body: bytes) -> None:
    """Its rollouts are played by the next worker, and the run continues; a number of 5,000 digits is refused."""
    played = attrs.evolve(config(), max_attempts=3)
    async with joining(1) as (_, entering, url):
        transport = HttpClient(connect_seconds=5)
        async with anyio.create_task_group() as tasks:

            async def disturb() -> None:
                identity = json.loads((await transport.post(f"{url}/v1/workers", b"", {}))[1])["worker"]
                records = f"{url}/v1/workers/{identity}/records"
                assert (await transport.post(records, body, {"Record": "9" * 5000}))[0] == 422
                assert (await transport.post(records, body, {"Record": "0"}))[0] == 200
                async with worker(url, played):
                    await done.wait()

            done = anyio.Event()
            tasks.start_soon(disturb)
            async with entering as workers:
                assert len(await batches(workers.config(played), 1)) == 12
                assert workers.deaths == 1
            done.set()
        await transport.aclose()


async def test_large_orders_arrive_in_parts() -> None:
    """A group's prompts may have more bytes of images together than a worker reads at once."""
    played = config()
    async with joining(1) as (_, entering, url), worker(url, played), entering as workers:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(9):
                    prompt = Prompt("p", metadata={"data": f"{number}" * 8_000_000}, group_index=0, index=number)
                    tasks.start_soon(workers.generate, [prompt])
        assert workers.rollouts == 9


def test_records_of_a_long_pause_are_sent_in_parts() -> None:
    """All that a worker played while the service was away may be more than one request may have."""
    records = [framed({"kind": "turn", "data": b"x" * size}, None) for size in (10, 500, 10, 10, 60, 10)]
    parts = list(parts_of(b"".join(records), 150, 1000))
    assert parts == [records[0], records[1], records[2] + records[3], records[4] + records[5]]
    assert list(parts_of(records[1], 150, 1000)) == [records[1]]


def test_a_record_that_the_service_refuses_fails_its_rollout_and_no_worker() -> None:
    """It would be refused from each worker that gets the rollout, and end one after the other."""
    records = [framed({"kind": "turn", "number": n, "data": b"x" * size}, None) for n, size in enumerate((10, 500, 10))]
    for message in (records, records[1:], records[:2], records[1:2]):
        parts = list(parts_of(b"".join(message), 150, 400))
        (at,) = [number for number, part in enumerate(parts) if b"broken" in part]
        assert [*parts[:at], *parts[at + 1 :]] == [record for record in message if record is not records[1]]
        ((fields, _),) = read_framed(parts[at])
        assert (fields["number"], type(received_error(fields))) == (1, GenerateFailure)


def test_orders_are_plain_data() -> None:
    """Prompts with images, metadata and logged turns arrive as they are; messages may be joined; nothing is pickled."""
    seen = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": picture(8, 9)}]}
    prompts = [
        Prompt("text", label=[1, (None, ())], metadata={"a": [{"b": (2,)}]}, group_index=3, index=7, replacement=2),
        Prompt([{"role": "system", "content": "be brief"}, seen], group_index=4, index=8),  # type: ignore[arg-type]
    ]
    messages = [PLAIN.encode(Request(number, prompt, True)) for number, prompt in enumerate(prompts)]
    joined = PLAIN.join(messages, [5]) + PLAIN.join([], [6])
    assert b"\x80\x05" not in joined
    requests, cancelled = PLAIN.read(joined)
    assert [(request.number, request.prompt, request.logs_turns) for request in requests] == [
        (0, prompts[0], True),
        (1, prompts[1], True),
    ]
    assert repr(requests[0].prompt) == repr(prompts[0])
    assert cancelled == [5, 6]


class Place(NamedTuple):
    """It equals a tuple."""

    x: int
    y: int


def test_a_prompt_that_would_change_is_refused() -> None:
    """A set would arrive as a list, an object not at all, a named tuple without names; tuples arrive as they are."""
    check_plain([Prompt("p", label=(1, [2]))])
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for label in ({1}, object(), 1 << 70, deep, Place(1, 2), {"at": [Place(1, 2)]}):
        with pytest.raises(ConfigError, match=r"Prompt: .*plain data, of the types of MessagePack"):
            check_plain([Prompt("p", label=label)])


async def test_a_worker_of_another_version_and_a_silent_service_are_errors() -> None:
    """Neither plays anything."""
    facts = Facts("0.0", "calculator", "", {}, "sglang", "m", ["http://127.0.0.1:1"])
    with pytest.raises(ConfigError, match=f"version of the service: got '0.0'; expected {__version__}"):
        recipe_of(facts)
    transport = HttpClient(connect_seconds=5)
    with pytest.raises(EndpointUnavailable, match=r"did not answer for 0.2 s"):
        await _Service(transport, "http://127.0.0.1:9", None, 0.2).facts()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with anyio.fail_after(10), pytest.raises(EndpointUnavailable, match=r"for 0.2 s: no answer for 0.15 s"):
            await _Service(transport, url, None, 0.2, 0.15).facts()
    async with serving(Service()) as url:
        with pytest.raises(ConfigError, match="refused this worker with status 404"):
            await _Service(transport, url, None, 0.2).facts()
    await transport.aclose()
