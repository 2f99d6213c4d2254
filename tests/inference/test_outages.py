"""Unreachable servers: requests wait, deadlines stand still, and no prompt is lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.concurrency.deadlines import deadline, pauses
from rollouts.dtypes import Completion, Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError, EndpointAway, EndpointRefused, EndpointUnavailable
from rollouts.inference.base import CompletionRequest, ServerInfo, describe_once
from rollouts.inference.outages import ServedWeights, ServerUnreachable
from rollouts.inference.resumable import ResumablePolicy, SessionRecorder
from rollouts.inference.sglang import SGLangPolicy
from rollouts.renderer import renderer_for
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.replies import Fault
from rollouts.testing.server import StubServer
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample, generate_rollout_batch
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.types import Status
from tests.inference.client import Client
from tests.raw_server import Visit, answer, full_backlog, raw_server

POLL = 0.01


def policy_of(*urls: str, outage_seconds: float = 60.0, **options: Any) -> SGLangPolicy:
    """A policy without retries, that polls often."""
    endpoint = Endpoint(base_url=urls, outage_seconds=outage_seconds, **{"max_retries": 0, **options})
    return SGLangPolicy(endpoint, backoff=lambda failures: 0.0, poll_seconds=POLL)


class Restartable:
    """A server that can stop, and start again at the same port."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.stub = StubServer(**options)
        self.url = ""

    async def start(self, **options: Any) -> None:
        """Start, with other options than before where given."""
        self.stub = StubServer(port=int(self.url.rpartition(":")[2] or 0), **{**self.options, **options})
        self.url = (await self.stub.__aenter__()).url

    async def die(self) -> None:
        """Listen no more; connections stay until they are reset."""
        for site in list(self.stub._runner.sites):
            await site.stop()

    async def stop(self) -> None:
        await self.stub.__aexit__(None, None, None)


@pytest.fixture
async def server() -> Any:
    """A started server."""
    server = Restartable()
    await server.start()
    yield server
    await server.stop()


async def until_paused(count: int = 1) -> str:
    """Wait until a pause with ``count`` waiting turns is listed; return it."""
    with anyio.fail_after(20):
        while not any(pause.waiting() == count for pause in pauses()):
            await anyio.lowlevel.checkpoint()
    return str(pauses()[0])


async def test_a_restart_of_the_only_server_fails_no_request(client: Client, server: Restartable) -> None:
    """All requests wait without a failed attempt, and the wait is listed with its start."""
    answers: list[Completion] = []

    async def ask() -> None:
        answers.append(await client.complete(policy))

    async with policy_of(server.url) as policy:
        await ask()
        await server.stop()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            listed = await until_paused(3)
            assert listed.startswith(f"no server answers at {server.url} for ")
            assert listed.endswith("3 turns wait")
            assert pauses()[0].blocks_new_work
            await server.start()
        assert len(answers) == 4
        assert pauses() == []


async def test_deadlines_stand_still_while_a_server_is_away(client: Client, server: Restartable) -> None:
    """That of the request, and those around it."""
    async with policy_of(server.url, request_seconds=0.3) as policy:
        await client.complete(policy)
        await server.stop()
        with deadline(0.3) as limit:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.complete, policy)
                await until_paused()
                with anyio.move_on_after(0.5):
                    await anyio.sleep_forever()
                await server.start()
        assert not limit.expired


async def test_patience_ends(client: Client, server: Restartable) -> None:
    """The error contains the servers, the time and the option that changes it."""
    async with policy_of(server.url, outage_seconds=0.05) as policy:
        await client.complete(policy)
        await server.stop()
        with pytest.raises(EndpointAway, match=rf"no server answers at {server.url}; .* 0.05 s \(Endpoint.outage_sec"):
            await client.complete(policy)
        await server.start()
        assert len((await client.complete(policy)).tokens) == 3


async def test_a_full_queue_fails_no_request(client: Client) -> None:
    """The request is sent again as often as needed, also without retries."""
    full: list[Fault] = ["error_503", "abort_503"] * 20
    async with StubServer(faults=full) as stub, policy_of(stub.url) as policy:
        assert len((await client.complete(policy)).tokens) == 3
        assert len(stub.requests) == 41
        assert not stub.live


async def test_a_queue_that_stays_full_ends_patience(client: Client) -> None:
    """If no request at all is answered in that time."""
    async with StubServer(faults=itertools.repeat("error_503")) as stub:
        async with policy_of(stub.url, outage_seconds=0.1) as policy:
            with pytest.raises(EndpointAway, match=r"takes no request.*queue is full"):
                await client.complete(policy)


async def test_a_session_moves_while_another_server_serves(client: Client, server: Restartable) -> None:
    """At once and without a pause; the server gets requests again once it is back."""
    async with StubServer() as other, policy_of(server.url, other.url) as policy:
        await client.complete(policy, session="a")
        await server.stop()
        await client.complete(policy, session="a")
        assert len(other.requests) == 1
        assert pauses() == []
        await server.start()
        for worker in policy.servers.workers.all:
            worker.suspect_until = 0.0
        await client.complete(policy, session="b")
        await client.complete(policy, session="c")
        assert server.stub.requests


async def test_an_interrupt_answers_requests_that_wait(client: Client, server: Restartable) -> None:
    """Without tokens, so that a trainer can pause generation while its servers are unreachable."""
    async with policy_of(server.url) as inner:
        policy = ResumablePolicy(inner)
        await client.complete(inner)
        await server.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policy.complete, CompletionRequest(client.ids, client.sampling))
            await until_paused()
            await policy.pause(seconds=5)
            assert policy.in_flight == 0
            await server.start()
            policy.resume()


# -- before the first answer ------------------------------------------------------------------------------------------


@pytest.fixture
async def gone() -> Any:
    """A server that has stopped before anyone spoke with it."""
    server = Restartable()
    await server.start()
    await server.stop()
    yield server
    await server.stop()


async def test_a_wrong_url_is_an_error_of_the_description_at_once() -> None:
    """Preflight asks for it, so that a wrong URL is not waited for."""
    async with policy_of("http://127.0.0.1:9") as policy:
        with pytest.raises(EndpointUnavailable, match=r"Start the server, or correct Endpoint\.base_url") as caught:
            await policy.describe()
    assert not isinstance(caught.value, EndpointAway)


async def test_a_request_waits_for_a_server_that_never_answered(client: Client, gone: Restartable) -> None:
    """As for a server that answered before."""
    answers: list[Completion] = []

    async def ask() -> None:
        answers.append(await client.complete(policy))

    async with policy_of(gone.url) as policy, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until_paused()
        await gone.start()
    assert len(answers) == 1
    assert policy.totals.requests == 2


async def test_rollouts_wait_for_the_description_of_their_server(gone: Restartable) -> None:
    """Each is listed, and their deadlines stand still."""
    found: list[ServerInfo] = []

    async def ask() -> None:
        with deadline(0.3) as limit:
            found.append(await describe_once(SessionRecorder(ResumablePolicy(policy))))
        assert not limit.expired

    async with policy_of(gone.url) as policy, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(ask)
        listed = await until_paused(4)
        assert listed.startswith(f"no server answers at {gone.url} for ")
        assert pauses()[0].blocks_new_work
        with anyio.move_on_after(0.5):
            await anyio.sleep_forever()
        await gone.start()
    assert len(found) == 4
    assert pauses() == []


async def test_concurrent_rollouts_ask_a_server_that_is_away_once() -> None:
    """Before they wait, and after: a host that drops packets takes seconds to ask."""
    asked, waiting, is_back = 0, 0, anyio.Event()

    class Away(ScriptedPolicy):
        async def describe(self) -> ServerInfo:
            nonlocal asked
            asked += 1
            await anyio.lowlevel.checkpoint()
            if not is_back.is_set():
                raise EndpointUnavailable("down")
            return ServerInfo(max_context=77)

        async def wait_for_servers(self, error: EndpointUnavailable) -> None:
            nonlocal waiting
            waiting += 1
            await is_back.wait()

    policy = Away([])
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(describe_once, policy)
        with anyio.fail_after(10):
            while waiting < 5:
                await anyio.lowlevel.checkpoint()
        assert asked == 1
        is_back.set()
    assert (asked, (await describe_once(policy)).max_context) == (2, 77)


async def test_another_kind_of_server_at_the_url_is_not_waited_for(client: Client, gone: Restartable) -> None:
    """Neither by a request nor for its description, also where it starts late."""
    async with policy_of(gone.url) as policy, anyio.create_task_group() as tasks:
        refused: list[str] = []

        async def ask() -> None:
            try:
                await describe_once(policy)
            except EndpointRefused as error:
                refused.append(str(error))

        async def complete() -> None:
            try:
                await client.complete(policy)
            except EndpointRefused as error:
                refused.append(str(error))

        tasks.start_soon(ask)
        tasks.start_soon(complete)
        await until_paused(2)
        await gone.start(model_info=None)
    assert len(refused) == 2
    assert all("is not an SGLang server" in message for message in refused)


async def test_the_first_wait_for_a_server_that_never_answered_is_logged(
    client: Client, gone: Restartable, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all requests: the URL may be wrong, and a program without a display shows nothing else."""
    async with policy_of(gone.url) as policy, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(client.complete, policy)
        await until_paused(3)
        await gone.start()
    (record,) = [record for record in caplog.records if record.name == "rollouts.inference.unreachable"]
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"no server answers at {gone.url}: requests wait for up to 60 s (Endpoint.outage_seconds)."
        " Start the server, or correct Endpoint.base_url"
    )


async def test_a_policy_without_a_wait_raises_its_own_error() -> None:
    """Only policies of servers know how to wait."""

    class Down(ScriptedPolicy):
        async def describe(self) -> ServerInfo:
            raise EndpointUnavailable("down")

    for policy in (Down([]), ResumablePolicy(Down([])), SessionRecorder(Down([]))):
        with pytest.raises(EndpointUnavailable, match=r"^down$"):
            await describe_once(policy)


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_a_server_that_lost_its_weights_is_held_until_they_are_right(client: Client) -> None:
    """No token of other weights is sampled, and the pause lists both versions."""
    info = {"model_path": "m", "weight_version": "v1"}
    server = Restartable(model_info=info)
    await server.start()
    async with policy_of(server.url) as policy:
        await client.complete(policy)
        await server.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.complete, policy)
            await until_paused()
            await server.start(model_info={**info, "weight_version": "default"})
            with anyio.fail_after(20):
                while not str(pauses()[0]).startswith(
                    f"{server.url} is back with the weights 'default'; expected 'v1'"
                ):
                    await anyio.lowlevel.checkpoint()
            held = server.stub
            await server.stop()
            await server.start()
        assert not held.requests
        assert len(server.stub.requests) == 1
        await server.stop()


async def test_a_server_that_keeps_other_weights_is_refused_by_name(client: Client) -> None:
    """When patience ends."""
    info = {"model_path": "m", "weight_version": "v1"}
    server = Restartable(model_info=info)
    await server.start()
    async with policy_of(server.url, outage_seconds=0.3) as policy:
        await client.complete(policy)
        await server.stop()
        await server.start(model_info={**info, "weight_version": "default"})
        policy.servers.workers.all[0].unreachable = True  # as after a request that was refused meanwhile
        with pytest.raises(EndpointAway, match="is back with the weights 'default'; expected 'v1'"):
            await client.complete(policy)
        assert not server.stub.requests
        await server.stop()


async def test_a_server_may_come_back_with_earlier_weights_to_which_it_was_updated(client: Client) -> None:
    """A trainer that resumes from an earlier step loads an earlier version, which is the right one since then."""
    info = {"model_path": "m", "weight_version": "v1"}
    server = Restartable(model_info=info)
    await server.start()
    async with policy_of(server.url, outage_seconds=0.3) as policy:
        for info["weight_version"] in ("v1", "v2", "v1"):
            await client.complete(policy)
        await server.stop()
        await server.start(model_info=info)
        policy.servers.workers.all[0].unreachable = True  # as after a request that was refused meanwhile
        (span,) = (await client.complete(policy)).versions
        assert span.version == "v1"
        await server.stop()


@pytest.mark.parametrize(
    ("seen", "back", "message"),
    [
        (["default"], ServerInfo(model="m", weight_version="default"), None),
        (["default"], ServerInfo(), None),
        (["default"], ServerInfo(model="n", weight_version="default"), "model 'n'; expected 'm'"),
        (["default"], ServerInfo(model="m", weight_version="x"), "weights 'x'; expected 'default'"),
        (["default", "1"], ServerInfo(model="m", weight_version="default"), "weights 'default'; expected '1'"),
        (["default", "1"], ServerInfo(model="folder/1", weight_version="1"), None),
        (["default", "1"], ServerInfo(model="folder/2", weight_version="2"), None),  # another process updates
    ],
)
def test_which_weights_are_right(seen: Sequence[str], back: ServerInfo, message: str | None) -> None:
    """The newest that a server reported; new ones where the weights are updated during the run."""
    weights = ServedWeights()
    weights.described(ServerInfo(model="m", weight_version=seen[0]))
    for version in seen:
        weights.saw(version)
    if message is None:
        weights.check("http://there", back)
    else:
        with pytest.raises(ServerUnreachable, match=f"http://there is back with the {message}"):
            weights.check("http://there", back)


async def test_a_request_waits_for_a_server_that_vanishes_with_it(client: Client) -> None:
    """Its abort reaches no server, and no process there refuses it: that is an outage, not a failed attempt."""
    with contextlib.ExitStack() as vanished:

        async def vanish(request: Any) -> None:
            await vanishing.die()
            vanished.enter_context(full_backlog(int(vanishing.url.rpartition(":")[2])))

        vanishing = Restartable()
        await vanishing.start(latency=vanish, faults=["reset"])
        async with policy_of(vanishing.url, connect_seconds=0.1) as policy:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.complete, policy)
                assert "no server answers" in await until_paused()
                vanished.close()
                await vanishing.stop()
                await vanishing.start()
            assert policy.totals.completions == 1
        await vanishing.stop()


async def test_requests_of_a_server_that_vanishes_go_to_the_others(client: Client) -> None:
    """A host that is removed closes its connections and answers no abort: its generations have ended with it."""
    with contextlib.ExitStack() as vanished:
        arrived, gone = 0, anyio.Event()

        async def vanish(request: Any) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 2:
                await vanishing.die()
                vanished.enter_context(full_backlog(int(vanishing.url.rpartition(":")[2])))
                gone.set()
            await gone.wait()

        vanishing = Restartable(latency=vanish, faults=["reset", "reset"])
        await vanishing.start()
        async with StubServer() as other, policy_of(vanishing.url, other.url, connect_seconds=0.1) as policy:
            await policy.describe()
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(functools.partial(client.complete, policy, session="of both"))
            assert (policy.totals.completions, len(other.requests)) == (2, 2)


# -- requests that may have killed their server -----------------------------------------------------------------------


async def test_a_request_whose_server_died_alone_with_it_goes_to_no_other(client: Client) -> None:
    """It waits for that server while others serve; a second death refuses it."""
    died = anyio.Event()

    async def die(request: Any) -> None:
        await deadly.die()
        died.set()

    deadly = Restartable(latency=die, faults=["reset"])
    await deadly.start()
    async with StubServer() as other, policy_of(deadly.url, other.url) as policy:
        await policy.describe()
        errors: list[Exception] = []

        async def ask() -> None:
            try:
                await client.complete(policy, session="deadly")
            except EndpointRefused as error:
                errors.append(error)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                for _ in range(2):
                    await died.wait()
                    died = anyio.Event()
                    await deadly.stop()
                    await client.complete(policy, session="innocent")
                    await deadly.start()
        assert len(other.requests) == 2
        assert "died 2 times while this request, of 5 ids, was the only new one" in str(errors[0])
        assert {request.headers["X-SMG-Routing-Key"] for request in other.requests} == {"innocent"}
    await deadly.stop()


async def deadly_server(**options: Any) -> Restartable:
    """A server that dies with each request."""

    async def die(request: Any) -> None:
        await deadly.die()

    deadly = Restartable(latency=die, faults=["reset"], **options)
    await deadly.start()
    return deadly


async def test_a_request_does_not_wait_for_its_dead_server_for_ever_once_others_serve_again(client: Client) -> None:
    """Its wait began in an outage of all servers, which another server ended."""
    deadly, other = await deadly_server(), Restartable()
    await other.start()
    async with policy_of(deadly.url, other.url, outage_seconds=0.5) as policy:
        await policy.describe()
        await other.stop()
        policy.servers.workers.all[1].unreachable = True  # as after a request that was refused meanwhile
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    with pytest.raises(EndpointRefused, match=r"is not back after 0\.5 s"):
                        await client.complete(policy, session="deadly")

                tasks.start_soon(ask)
                await until_paused()
                await deadly.stop()
                await other.start()
                assert len((await client.complete(policy, session="innocent")).tokens) == 3
        assert pauses() == []
    await other.stop()


async def test_a_server_back_with_other_weights_stops_no_new_groups_while_others_serve(client: Client) -> None:
    """The request that waits for it is refused, and nothing stays listed."""
    info = {"model_path": "m", "weight_version": "v1"}
    deadly = await deadly_server(model_info=info)
    async with (
        StubServer(model_info=info) as other,
        policy_of(deadly.url, other.url, outage_seconds=0.3) as policy,
    ):
        await policy.describe()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(EndpointRefused, match=r"is not back after 0\.3 s"):
                    await client.complete(policy, session="deadly")
                tasks.cancel_scope.cancel()

            tasks.start_soon(ask)
            while not policy.servers.workers.all[0].unreachable:
                await anyio.lowlevel.checkpoint()
            await deadly.stop()
            await deadly.start(model_info={**info, "weight_version": "default"})
            while True:
                assert not any(pause.blocks_new_work for pause in pauses())
                await anyio.lowlevel.checkpoint()
        assert pauses() == []
    await deadly.stop()


async def test_a_server_that_dies_later_is_not_blamed_on_a_request_that_was_lost_elsewhere(client: Client) -> None:
    """The request goes to another server: it was the only one at the server that lost it, which did not die."""

    async def die(request: Any) -> None:
        await dying.die()

    dying = Restartable(latency=die, faults=["error_500"])
    await dying.start()
    async with (
        StubServer(faults=["reset"]) as losing,
        policy_of(losing.url, dying.url, outage_seconds=0.3, max_retries=2) as policy,
    ):
        assert len((await client.complete(policy, session="lost")).tokens) == 3
        assert [len(losing.requests), len(dying.stub.requests)] == [2, 1]
    await dying.stop()


async def test_a_request_sent_since_a_server_is_back_stays_suspected(client: Client) -> None:
    """Two calls find at the same time that the server is back; the slower one does not clear what the other sent."""
    visits, release = itertools.count(), anyio.Event()

    async def serve(visit: Visit) -> None:
        await visit.request()
        if not next(visits):
            await release.wait()
        await visit.say(answer(b'{"model_path": "m"}'))

    async with raw_server(serve) as port, policy_of(f"http://127.0.0.1:{port}") as policy:
        (worker,) = policy.servers.workers.all
        worker.unreachable, worker.unanswered = True, {"of its former process": 1.0}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policy._reachability.check_return, worker)
            await anyio.lowlevel.checkpoint()
            await policy._reachability.check_return(worker)
            assert not worker.unanswered
            worker.unanswered["sent"] = 2.0
            release.set()
        assert worker.unanswered == {"sent": 2.0}


# -- the manager ------------------------------------------------------------------------------------------------------


def config_of(client: Client, policy: SGLangPolicy) -> RolloutConfig:
    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        await client.complete(policy)
        sample = Sample(prompt="p", tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], reward=1.0)
        return [attrs.evolve(sample, status=Status.COMPLETED)]

    return RolloutConfig(batch_size=2, n_samples_per_prompt=2, over_sampling_factor=2.0, generate_fn=generate)


async def test_no_group_starts_while_a_server_is_away(client: Client, server: Restartable) -> None:
    """No rollout fails: the batch is filled after the restart."""
    async with policy_of(server.url) as policy:
        await client.complete(policy)
        await server.stop()
        manager = AsyncRolloutManager(config_of(client, policy), DataBuffer(["p"] * 99))
        batch: list[Sample] = []

        async def fill() -> None:
            batch.extend(await manager.generate_batch())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            await until_paused(8)
            manager._top_up()
            assert manager.accounting.taken == 4
            assert "no server answers" in manager.waiting_for()[0]
            await server.start()
        assert (len(batch), manager.accounting.failed) == (4, 0)


async def test_a_run_whose_servers_stay_away_returns_its_prompts(client: Client, server: Restartable) -> None:
    """No group fails; the error ends the run."""
    async with policy_of(server.url, outage_seconds=0.1) as policy:
        await client.complete(policy)
        await server.stop()
        manager = AsyncRolloutManager(config_of(client, policy), DataBuffer(["p"] * 99))
        with pytest.raises(EndpointAway):
            await manager.generate_batch()
        counts = manager.accounting
        assert (counts.taken, counts.returned, counts.failed) == (4, 4, 0)
        await server.start()


def length(sample: Sample) -> float:
    return float(len(sample.response))


def agents(policy: SGLangPolicy) -> RolloutConfig:
    """Agents of one turn, as a Python program starts them: they send the first requests to the server."""
    options = {
        "environment_cls": SingleTurnEnvironment,
        "tokenizer": renderer_for(DEMO_MODEL),
        "endpoint": policy.endpoint,
    }
    generate_fn = functools.partial(generate_rollout_batch, policy=policy, **options)
    sizes: dict[str, Any] = {"batch_size": 6, "n_samples_per_prompt": 2, "over_sampling_factor": 1.0}
    return RolloutConfig(**sizes, generate_fn=generate_fn, reward_fn=length)


async def test_no_prompt_is_lost_if_the_server_starts_after_the_run(gone: Restartable) -> None:
    """From Python, without preflight: all prompts are played, and the accounting adds up."""
    async with policy_of(gone.url) as policy:
        manager = AsyncRolloutManager(agents(policy), DataBuffer([f"p{n}" for n in range(6)], epochs=1))
        batch: list[Sample] = []

        async def fill() -> None:
            batch.extend(await manager.generate_batch())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            await until_paused(12)
            await gone.start()
    assert {sample.prompt for sample in batch} == {f"p{n}" for n in range(6)}
    counts = manager.accounting
    assert (len(batch), counts.taken, counts.in_batch, counts.failed) == (12, 6, 6, 0)
    counts.check()


async def test_no_prompt_is_lost_if_the_server_dies_between_preflight_and_the_first_request(
    server: Restartable,
) -> None:
    """It answered once, and its description is requested again when the first rollout starts."""
    async with policy_of(server.url) as policy:
        await policy.describe()
        await server.stop()
        manager = AsyncRolloutManager(agents(policy), DataBuffer([f"p{n}" for n in range(6)], epochs=1))
        batch: list[Sample] = []

        async def fill() -> None:
            batch.extend(await manager.generate_batch())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            await until_paused(12)
            await server.start()
    assert (len(batch), manager.accounting.taken, manager.accounting.failed) == (12, 6, 0)


async def test_a_run_whose_server_never_comes_returns_its_prompts(gone: Restartable) -> None:
    """It ends within ``outage_seconds`` with the URL and the remedy; a second call plays the same prompts."""
    async with policy_of(gone.url, outage_seconds=0.1) as policy:
        buffer = DataBuffer([f"p{n}" for n in range(6)], epochs=1)
        manager = AsyncRolloutManager(agents(policy), buffer)
        with pytest.raises(EndpointAway) as caught, anyio.fail_after(10):
            await manager.generate_batch()
        assert str(caught.value) == (
            f"no server answers at {gone.url}; no request was answered for 0.1 s (Endpoint.outage_seconds)."
            " Start the server, or correct Endpoint.base_url"
        )
        counts = manager.accounting
        assert (counts.taken, counts.returned, counts.failed) == (6, 6, 0)
        counts.check()
        assert pauses() == []
        await gone.start()
        assert len({sample.prompt for sample in await manager.generate_batch()}) == 6
        assert (manager.accounting.in_batch, manager.accounting.failed) == (6, 0)


def test_the_time_of_an_outage_is_checked() -> None:
    """0 waits for nothing."""
    assert Endpoint(outage_seconds=0).outage_seconds == 0
    with pytest.raises(ConfigError, match=r"outage_seconds: got -1; expected a number of seconds >= 0"):
        Endpoint(outage_seconds=-1)


def test_a_version_is_found_among_thousands_without_a_look_at_each() -> None:
    """Every reply names one, and a run of weeks has seen thousands."""
    compared = 0

    class Version(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    weights = ServedWeights()
    for number in range(1000):
        weights.saw(Version(number))
    compared = 0
    weights.saw(Version(999))
    assert compared < 10
