"""Prompts that clients give to a running service: on disk before the answer, each once, in one order over kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
import pytest

from rollouts.concurrency.deadlines import pauses
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, DataExhausted, JournalError
from rollouts.http.client import HttpClient
from rollouts.recipe import Recipe
from rollouts.runs.verify import verify_run
from rollouts.service import Leases, Rollouts, ServiceError, leased_run
from rollouts.service.fed_buffer import MOST_PROMPTS, MOST_WAITING, Fed, FedBuffer, FedFull, NameTaken, fed_recipe
from rollouts.service.server import Service, serving
from rollouts.training import DataBuffer, Sample
from rollouts.training.samplers import PassRateSampler
from tests.distributed import games
from tests.service.test_lease_laws import copied, recipe, taken
from tests.service.test_server import asked


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "label": number, "metadata": {"n": number}} for number in numbers]


def texts(buffer: FedBuffer) -> list[Any]:
    return [prompt.prompt for prompt in buffer.prompts]


# -- the log ----------------------------------------------------------------------------------------------------------


async def test_a_kill_at_any_byte_leaves_whole_requests_and_the_order(tmp_path: Path) -> None:
    """After a kill between two bytes of the log, clients ask again: the same numbers, and no prompt twice."""
    requests = {"a": rows(0, 1), "b": rows(2), "c": rows(3, 4, 5)}
    answers: dict[str, Fed] = {}
    sizes = []
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        for name, given in requests.items():
            answers[name] = await buffer.feed(name, given)
            sizes.append((tmp_path / "log").stat().st_size)  # of what is answered
    assert [answers[name].first for name in requests] == [0, 2, 3]
    data = (tmp_path / "log").read_bytes()
    for end in range(0, len(data) + 1, 7):
        path = tmp_path / f"cut {end}"
        path.write_bytes(data[:end])
        with FedBuffer().opened(path, "r") as buffer:
            answered = sum(size <= end for size in sizes)
            assert len(buffer) == [0, 2, 3, 6][answered]
            for number, (name, given) in enumerate(requests.items()):
                fed = await buffer.feed(name, given)
                assert fed == attrs.evolve(answers[name], repeated=number < answered)
            assert texts(buffer) == [f"question {number}" for number in range(6)]


async def test_a_name_stands_for_one_list_of_prompts(tmp_path: Path) -> None:
    """The same request twice, at once or after a restart, changes nothing; other prompts under its name are refused."""
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        answers: list[Fed] = []

        async def feed() -> None:
            answers.append(await buffer.feed("a", rows(0, 1)))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(feed)
        assert sorted(answer.repeated for answer in answers) == [False, True, True, True, True]
        assert {(answer.first, answer.count) for answer in answers} == {(0, 2)}
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        reordered = [dict(reversed(row.items())) for row in rows(0, 1)]
        assert await buffer.feed("a", reordered) == Fed(0, 2, repeated=True)
        for other in (rows(1, 0), rows(0), rows(0, 1, 2)):
            with pytest.raises(NameTaken, match="'a' stands for other prompts"):
                await buffer.feed("a", other)
        assert len(buffer) == 2


async def test_a_request_that_is_cancelled_while_it_is_written_is_whole(tmp_path: Path) -> None:
    """The client leaves at some moment: its prompts are in the buffer and in the log, or in neither."""
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        for number in range(12):
            size = (tmp_path / "log").stat().st_size
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(buffer.feed, f"{number}", rows(number))
                    for _ in range(number):
                        await anyio.lowlevel.checkpoint()
                    while number % 2 and (tmp_path / "log").stat().st_size == size:
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
        before = texts(buffer)
    assert len(before) >= 6, "every second request was written"
    with FedBuffer().opened(tmp_path / "log", "r") as again:
        assert texts(again) == before


async def test_a_repeated_request_after_a_cancelled_task_adds_nothing(tmp_path: Path) -> None:
    """``Task.cancel`` ends a wait whose record is still written: the log may have it twice, the data have it once."""
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        assert buffer._log is not None
        buffer._log._writing.acquire()
        task = asyncio.get_running_loop().create_task(buffer.feed("a", rows(0)))
        while not buffer._log._in_order.locked():
            await anyio.lowlevel.checkpoint()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answers: list[Fed] = []
        async with anyio.create_task_group() as tasks:

            async def again() -> None:
                answers.append(await buffer.feed("a", rows(0)))

            tasks.start_soon(again)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            buffer._log._writing.release()
        assert (len(buffer), answers[0].first) == (1, 0)
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        assert texts(buffer) == ["question 0"]


async def test_a_log_belongs_to_its_run_and_to_one_process(tmp_path: Path) -> None:
    """A log of another run, or of another process, or without prompts that were taken, is refused by name."""
    with FedBuffer().opened(tmp_path / "log", "one") as buffer:
        await buffer.feed("a", rows(0))
        with pytest.raises(ConfigError, match="no other process"), FedBuffer().opened(tmp_path / "log", "one"):
            pass
    with pytest.raises(ConfigError, match="of the run one"), FedBuffer().opened(tmp_path / "log", "two"):
        pass
    short = FedBuffer()
    short.resume_after(2, [1])
    with pytest.raises(ConfigError, match=r"got '1 prompts'; expected the 2 that the run took"):
        with short.opened(tmp_path / "log", "one"):
            pass


async def test_a_full_disk_is_an_error_and_adds_nothing(tmp_path: Path) -> None:
    """The request is not answered, and no prompt of it is played."""
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        assert buffer._log is not None
        buffer._log.close()
        with pytest.raises(JournalError, match="cannot be written"):
            await buffer.feed("a", rows(0))
        assert len(buffer) == 0


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("", rows(0), "id: got ''"),
        ("x" * 201, rows(0), "1 to 200 characters"),
        (7, rows(0), "id: got 7"),
        ("a", [], "1 to 10000 rows"),
        ("a", ["x"] * (MOST_PROMPTS + 1), "got '10001 rows'"),
        ("a", "text", "a list"),
        ("a", [""], "some text"),
        ("a", [[{"role": "user", "content": [{"type": ["text"]}]}]], r"prompts\[0\]: message.content"),
        ("a", [7], r"prompts\[0\]: got 7"),
        ("a", [{"question": "x"}], '"prompt"'),
        ("a", [{"prompt": "x", "label": 2**70}], "64 bits"),
        ("a", [{"prompt": "x", "label": object()}], "plain data"),
        ("a", [{"prompt": "x", "metadata": {"template_kwargs": {}}}], "template_kwargs"),
        ("a", [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]], "data:"),
    ],
)
async def test_invalid_prompts_change_nothing(name: Any, given: Any, match: str, tmp_path: Path) -> None:
    """Each is refused by name."""
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        size = (tmp_path / "log").stat().st_size
        with pytest.raises(ConfigError, match=match):
            await buffer.feed(name, given)
        assert (len(buffer), (tmp_path / "log").stat().st_size) == (0, size)


async def test_prompts_that_wait_are_bounded(tmp_path: Path) -> None:
    """The request may be repeated when groups have taken some."""
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        for number in range(MOST_WAITING // MOST_PROMPTS):
            await buffer.feed(f"{number}", ["x"] * (MOST_PROMPTS - (number == 0)))
        with pytest.raises(FedFull, match="ask again"):
            await buffer.feed("a", rows(0, 1))
        buffer.get_prompts(1)
        assert (await buffer.feed("a", rows(0, 1))).count == 2


async def test_prompts_that_wait_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Also if there are few of them; what is finished counts no more."""
    with FedBuffer(most_bytes=4000).opened(tmp_path / "log", "r") as buffer:
        await buffer.feed("a", ["x" * 1500, "x" * 1500])
        with pytest.raises(FedFull, match="ask again"):
            await buffer.feed("b", ["x" * 1500])
        buffer.mark_done(buffer.get_prompts(1)[0])
        assert (await buffer.feed("b", ["x" * 1500])).first == 2


async def test_a_prompt_leaves_the_memory_when_its_group_is_finished(tmp_path: Path) -> None:
    """Not before: a group may be returned. A restart reads those into memory that are not finished."""
    unfinished = {2, 57, 59}
    with FedBuffer().opened(tmp_path / "log", "r") as buffer:
        for number in range(60):
            await buffer.feed(f"{number}", rows(number))
            (prompt,) = buffer.get_prompts(1)
            buffer.put_back([prompt])
            (prompt,) = buffer.get_prompts(1)
            assert prompt.label == number
            if number not in unfinished:
                buffer.mark_done(prompt)
            assert len(buffer.prompts) <= 3
        assert [prompt.label for prompt in buffer.prompts] == sorted(unfinished)
        await buffer.feed("last", rows(60, 61))
        assert buffer.numbers()["prompts_held"] == 5
    again = FedBuffer()
    again.resume_after(60, unfinished)
    with again.opened(tmp_path / "log", "r"):
        assert [prompt.label for prompt in again.prompts] == [2, 57, 59, 60, 61]
        assert [prompt.group_index for prompt in again.get_prompts(5)] == [2, 57, 59, 60, 61]
        assert (len(again), await again.feed("7", rows(7))) == (62, Fed(7, 1, repeated=True))


# -- over a run -------------------------------------------------------------------------------------------------------


def fed(batches: int) -> tuple[Recipe, FedBuffer]:
    """A recipe of batches of 3 groups, whose prompts come from clients."""

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await anyio.lowlevel.checkpoint()
        return await games.generate(prompts)

    whole = recipe(batches)
    whole = attrs.evolve(whole, config=attrs.evolve(whole.config, generate_fn=generate, reward_fn=lambda sample: 1.0))
    played = fed_recipe(whole)
    assert isinstance(played.data_buffer, FedBuffer)
    return played, played.data_buffer


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_a_run_without_prompts_waits_and_goes_on(tmp_path: Path) -> None:
    """It neither ends nor starts a group; ``/health`` and ``/v1/state`` say so until prompts come."""
    played, buffer = fed(2)
    async with leased_run(tmp_path, played) as leases, serving(Service(leases, fed=buffer)) as url:
        for given in (rows(0, 1, 2), rows(3, 4, 5)):
            await until(lambda: buffer.is_empty)
            assert (await asked(url, "/health"))[1] == b"ok: the run waits for prompts\n"
            state = json.loads((await asked(url, "/v1/state"))[1])
            assert (state["waits_for_prompts"], state["ended"]) == (1, None)
            assert (await asked(url, "/v1/prompts", {"id": str(given[0]["label"]), "prompts": given}))[0] == 200
            lease = await taken(leases, 3, wait_seconds=30)
            assert [sample.label for sample in lease.samples[::4]] == [row["label"] for row in given]
            await leases.acknowledge(lease.token)
        with pytest.raises(DataExhausted):
            await leases.take(1, wait_seconds=30)
        assert (await asked(url, "/health"))[1] == b"ok\n"
    assert not [pause for pause in pauses() if pause.blocks_new_work], "the pause ends with the run"
    assert verify_run(tmp_path).violations == []


async def test_a_run_ends_when_clients_say_that_no_more_prompts_come(tmp_path: Path) -> None:
    """A trainer's loop ends after the last whole batch; the end is on disk, and no prompt is taken after it."""
    played, buffer = fed(1_000)
    got: list[int] = []

    def train(url: str) -> None:
        with Rollouts(url) as service:
            for batch in service.batches(3):
                got.extend(batch.groups)
                batch.ack()
                if len(got) == 6:
                    assert service.end_prompts() == service.end_prompts() == 7

    async with leased_run(tmp_path, played) as leases, serving(Service(leases, fed=buffer)) as url:
        await buffer.feed("a", rows(*range(7)))
        with anyio.fail_after(30):
            await anyio.to_thread.run_sync(train, url)
        assert got == [0, 1, 2, 3, 4, 5], "the last prompt fills no batch"
        assert await buffer.feed("a", rows(*range(7))) == Fed(0, 7, repeated=True)
        status, answer = await asked(url, "/v1/prompts", {"id": "b", "prompts": ["x"]})
        assert (status, b"no more prompts" in answer) == (409, True)
        state = json.loads((await asked(url, "/v1/state"))[1])
        assert (state["ended"], state["prompts_ended"], state["waits_for_prompts"]) == ("exhausted", 1, 0)
    assert not [pause for pause in pauses() if pause.blocks_new_work]
    again, buffer = fed(1_000)
    async with leased_run(tmp_path, again) as leases:
        with pytest.raises(DataExhausted):
            await leases.take(1, wait_seconds=30)
    assert verify_run(tmp_path).violations == []


async def test_the_end_of_prompts_needs_a_fed_run(tmp_path: Path) -> None:
    """The recipe's data end by themselves."""
    with Leases(tmp_path / "log", groups_in_work=8) as leases:
        async with serving(Service(leases)) as url:
            status, answer = await asked(url, "/v1/prompts/end", {})
            assert (status, b"rollouts up --fed" in answer) == (422, True)


async def test_prompts_start_while_other_groups_are_in_flight(tmp_path: Path) -> None:
    """A group that lasts does not keep new prompts from starting."""
    played, buffer = fed(1)
    started, may_end = set[int](), anyio.Event()

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        started.add(prompts[0].group_index or 0)
        if prompts[0].group_index == 0:
            await may_end.wait()
        return await games.generate(prompts)

    played = attrs.evolve(played, config=attrs.evolve(played.config, generate_fn=generate))
    async with leased_run(tmp_path, played) as leases:
        await buffer.feed("a", rows(0))
        await until(lambda: started == {0})
        await buffer.feed("b", rows(1, 2))
        await until(lambda: started == {0, 1, 2})
        may_end.set()
        assert (await taken(leases, 3, wait_seconds=30)).groups == (0, 1, 2)


async def test_a_killed_run_plays_each_prompt_once_in_the_order_of_the_log(tmp_path: Path) -> None:
    """Killed after a request is on disk and before its answer, with groups in flight and leased; the client repeats."""
    given = {f"request {number}": rows(number, number + 1, number + 2) for number in range(0, 18, 3)}
    folder, labels = tmp_path / "0", dict[int, Any]()
    for number, (name, wanted) in enumerate(given.items()):
        with contextlib.suppress(_Killed):
            played, buffer = fed(6)
            async with leased_run(folder, played) as leases:
                assert len(buffer) == 3 * number, "the unanswered request was kept"
                if number:
                    answer = await buffer.feed(f"request {3 * number - 3}", given[f"request {3 * number - 3}"])
                    assert answer == Fed(3 * number - 3, 3, repeated=True)
                    lease = await taken(leases, 3, wait_seconds=30)
                    labels |= {sample.group_index or 0: sample.label for sample in lease.samples}
                    await leases.acknowledge(lease.token)
                await buffer.feed(name, wanted)
                folder = copied(folder, tmp_path / str(number + 1))
                raise _Killed
    played, buffer = fed(6)
    async with leased_run(folder, played) as leases:
        lease = await taken(leases, 3, wait_seconds=30)
        labels |= {sample.group_index or 0: sample.label for sample in lease.samples}
        await leases.acknowledge(lease.token)
        with pytest.raises(DataExhausted):
            await leases.take(1, wait_seconds=30)
    assert labels == {number: number for number in range(18)}
    assert verify_run(folder).violations == []


class _Killed(Exception):
    """The process ends here."""


async def test_a_run_keeps_the_source_of_its_prompts(tmp_path: Path) -> None:
    """A run of clients' prompts is not continued with the recipe's data, nor the other way round."""
    async with leased_run(tmp_path / "fed", fed(1)[0]):
        pass
    with pytest.raises(ConfigError, match="--resume, data"):
        async with leased_run(tmp_path / "fed", recipe(1)):
            pass
    async with leased_run(tmp_path / "own", recipe(1)):
        pass
    with pytest.raises(ConfigError, match="--resume, data"):
        async with leased_run(tmp_path / "own", fed(1)[0]):
            pass


@pytest.mark.parametrize("what", ["sampler", "epochs", "batch_seconds", "lifetime"])
def test_a_recipe_whose_data_cannot_be_replaced_is_refused(what: str) -> None:
    """By the name of the option that needs the recipe's own data."""
    whole = recipe(1)
    if what == "sampler":
        whole = attrs.evolve(whole, data_buffer=DataBuffer(games.PROMPTS, seed=1, sampler=PassRateSampler()))
    elif what == "epochs":
        whole = attrs.evolve(whole, data_buffer=DataBuffer(games.PROMPTS, epochs=2))
    elif what == "batch_seconds":
        whole = attrs.evolve(whole, config=attrs.evolve(whole.config, batch_seconds=60.0))
    else:
        whole = attrs.evolve(whole, lifetime=contextlib.AsyncExitStack())
    with pytest.raises(ConfigError, match=what):
        fed_recipe(whole)


# -- over HTTP --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[FedBuffer, str]]:
    with Leases(path / "leases", groups_in_work=8) as leases, FedBuffer().opened(path / "log", None) as buffer:
        async with serving(Service(leases, fed=buffer)) as url:
            yield buffer, url


async def test_a_client_gives_prompts(tmp_path: Path) -> None:
    """It gets the numbers of their groups; other prompts under the name are 409, invalid ones 422.

    Data that JSON does not represent are refused with the name of their field.
    """
    async with served(tmp_path) as (buffer, url):

        def give() -> None:
            with Rollouts(url) as service:
                assert service.add_prompts("a", rows(0, 1)) == range(2)
                assert service.add_prompts("b", ["text"]) == range(2, 3)
                assert service.add_prompts("a", rows(0, 1)) == range(2)
                for name, wrong, status in (("a", rows(7), 409), ("c", [""], 422), ("c", [], 422)):
                    with pytest.raises(ServiceError) as refused:
                        service.add_prompts(name, wrong)
                    assert refused.value.status == status
                for field, name, wrong in (
                    ("prompts", "d", ["\ud800"]),
                    ("prompts", "d", [{1}]),
                    ("id", "\ud800", [""]),
                ):
                    with pytest.raises(ServiceError, match=f"^{field}: got .*; expected plain data of JSON"):
                        service.add_prompts(name, wrong)

        await anyio.to_thread.run_sync(give)
        assert texts(buffer) == ["question 0", "question 1", "text"]
        metrics = (await asked(url, "/metrics"))[1]
        assert b"rollouts_prompts_given 3\n" in metrics


async def test_bodies_are_bounded_and_the_route_needs_a_fed_run(tmp_path: Path) -> None:
    """17 MiB are 413, nothing is decompressed; a service of a recipe's data names the option; 503 before the run."""
    async with served(tmp_path) as (buffer, url):
        assert (await asked(url, "/v1/prompts", {"id": "a", "prompts": ["x" * (17 << 20)]}))[0] == 413
        assert (await asked(url, "/v1/prompts", {"id": "a", "prompts": ["x" * (2 << 20)]}))[0] == 200
        assert (await asked(url, "/v1/prompts", {"id": "a", "prompts": ["x"], "more": 1}))[0] == 422
        packed = zlib.compress(json.dumps({"id": "b", "prompts": ["x" * (2 << 20)]}).encode())
        transport = HttpClient(connect_seconds=5)
        assert (await transport.post(f"{url}/v1/prompts", packed, {"Content-Encoding": "deflate"}))[0] == 422
        await transport.aclose()
        assert len(buffer) == 1
    with Leases(tmp_path / "other", groups_in_work=8) as leases:
        async with serving(Service(leases)) as url:
            status, answer = await asked(url, "/v1/prompts", {"id": "a", "prompts": ["x"]})
            assert (status, b"rollouts up --fed" in answer) == (422, True)
    async with serving(Service(fed=FedBuffer())) as url:
        assert (await asked(url, "/v1/prompts", {"id": "a", "prompts": ["x"]}))[0] == 503
