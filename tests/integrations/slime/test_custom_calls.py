"""Custom generate functions send their own requests: they are bounded, and no request is left when a call returns."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import pytest

from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.custom_calls import CustomCalls, Stopped, ends_its_requests
from rollouts.integrations.slime.records import records
from rollouts.testing.replies import Request
from rollouts.testing.server import StubServer
from tests.integrations.slime.launches import Source
from tests.integrations.slime.test_returned_samples import eval_set, filled, plain_args

Serve = Callable[..., StubServer]


def on(stub: StubServer, function: str, **overrides: Any) -> Namespace:
    """A launch with a function of this module, in front of a stub."""
    host, port = stub.url.removeprefix("http://").split(":")
    flags = {"sglang_router_ip": host, "sglang_router_port": int(port), "running": 0, "most": 0, "waits": set()}
    args = plain_args("", **{**flags, **overrides})
    args.custom_generate_function_path = f"{__name__}.{function}"
    return args


async def late(request: Request) -> None:
    """The server never answers the prompts of the third group and later."""
    if request.input_ids[0] >= 2:
        await anyio.sleep_forever()


async def ask(args: Any, sample: Any) -> Any:
    """One request as slime sends it: without a request id of the caller's."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    args.calls.append(sample.group_index)
    body = {"rid": f"{sample.index}/{len(args.calls)}", "input_ids": [sample.group_index]}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return (await response.json())["meta_info"]["finish_reason"]["type"]


async def one_request(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    status = records().sample.Status
    finish = await ask(args, sample)
    return filled(sample, reward=1.0, status=status.ABORTED if finish == "abort" else status.COMPLETED)


@pytest.mark.parametrize(
    ("flags", "begun"),
    [({}, 12), ({"rollouts_carry_over": True}, 12), ({"partial_rollout": True}, 12)],
    ids=["default", "carried over", "partial rollouts"],
)
@pytest.mark.parametrize("colocate", [False, True])
def test_no_request_is_left_when_a_call_returns(serve: Serve, flags: Any, begun: int, colocate: bool) -> None:
    """Requests of cancelled functions are aborted on the workers: with --colocate the trainer takes their memory."""
    worker = serve(latency=late, loads=dict)
    args = on(worker, "one_request", over_sampling_batch_size=6, colocate=colocate, **flags)
    output = generate_rollout_batch(args, 0, Source(2))
    assert [group[0].group_index for group in output.samples] == [0, 1]
    assert len(worker.requests) == begun
    assert worker.live == set()
    assert worker.aborted
    assert "rollouts/pause_failed" not in output.metrics


@pytest.mark.parametrize("flags", [{}, {"rollouts_carry_over": True}])
def test_a_function_that_was_stopped_serves_the_next_call(serve: Serve, flags: dict[str, Any]) -> None:
    """It starts again from the prompt; no group is lost and none is served twice."""
    worker = serve(loads=dict)
    args, source = on(worker, "slow_beginning", over_sampling_batch_size=6, **flags), Source(2)
    output = [generate_rollout_batch(args, number, source).samples for number in range(3)]
    groups = [group[0].group_index for batch in output for group in batch]
    assert len(set(groups)) == len(groups) == 6
    assert worker.live == set()


async def slow_beginning(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Waits for ever at the first attempt of the third group and later."""
    if sample.group_index >= 2 and sample.index not in args.waits:
        args.waits.add(sample.index)
        await anyio.sleep_forever()
    return await one_request(args, sample, sampling_params)


async def test_a_function_that_does_not_return_in_time_is_cancelled() -> None:
    """With partial rollouts a function has time to return what an abort left; a tool that hangs stops no trainer."""
    rounds: list[float] = []

    async def abort_all(seconds: float) -> None:
        rounds.append(seconds)
        returns.set()

    async def returning() -> str:
        await returns.wait()
        return "aborted"

    found: list[Any] = []

    async def run(call: Callable[[], Any]) -> None:
        try:
            found.append(await calls.run(policy, call))
        except Stopped:
            found.append("stopped")

    returns = anyio.Event()
    calls = CustomCalls(abort_all, grace_seconds=0.05)
    policy = ResumablePolicy(SGLangPolicy(Endpoint()), at_most=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, returning)
        tasks.start_soon(run, anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        await policy.pause()
        await calls.stop(lets_return=True)
        assert found == ["aborted", "stopped"]
    assert len(rounds) >= 2
    assert repr(calls) == "<CustomCalls: 0 running>"


async def partial_reply(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Keeps what it has on the sample, and ends its own request when it is cancelled; slow from the third group on."""
    if sample.group_index >= 2 and not sample.response_length:
        filled(sample, status=records().sample.Status.PENDING)
        args.waits.add(sample.index)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        body = {"rid": f"slow {sample.index}", "input_ids": [sample.group_index]}
        async with aiohttp.ClientSession() as session:
            try:
                async with session.post(f"{url}/generate", json=body) as response:
                    await response.read()
            finally:
                with anyio.CancelScope(shield=True):
                    await session.post(f"{url}/abort_request", json={"rid": body["rid"]})
    args.calls.append((sample.index, sample.response_length, sample.status))
    return filled(sample, reward=1.0)


partial_reply.abort_mode = "request"  # type: ignore[attr-defined]


@pytest.mark.parametrize("partial", [False, True])
def test_a_function_that_ends_its_own_requests_is_cancelled_alone(serve: Serve, partial: bool) -> None:
    """No request is left, requests of others are not aborted, and a partial rollout continues from its sample."""
    worker = serve(latency=late, loads=dict)
    args, source = on(worker, "partial_reply", over_sampling_batch_size=4, partial_rollout=partial), Source(2)
    generate_rollout_batch(args, 0, source)
    assert worker.live == set()
    assert args.waits
    assert "" not in worker.aborted
    args.calls.clear()
    if partial:
        (group, *_) = generate_rollout_batch(args, 1, source).samples
        assert [sample.group_index for sample in group] == [2, 2]
        aborted = records().sample.Status.ABORTED
        assert {(4, 3, aborted), (5, 3, aborted)} <= set(args.calls)


def test_an_unknown_way_to_abort_is_refused() -> None:
    """By the function's name."""
    assert ends_its_requests(partial_reply)
    assert not ends_its_requests(one_request)
    with pytest.raises(ConfigError, match=r"odd\.abort_mode: got 'later'; expected \"request\""):
        ends_its_requests(odd)


def odd() -> None:
    """Names no way that exists."""


odd.abort_mode = "later"  # type: ignore[attr-defined]


def test_a_call_without_leftovers_aborts_nothing(serve: Serve) -> None:
    """Where every function returned, requests of others on the same servers are let alone."""
    worker = serve(loads=dict)
    generate_rollout_batch(on(worker, "one_request"), 0, Source(2))
    assert worker.aborted == []


async def counted(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    args.running += 1
    args.most = max(args.most, args.running)
    try:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
    finally:
        args.running -= 1
    return filled(sample, reward=1.0)


def test_the_concurrency_of_a_launch_bounds_the_functions(serve: Serve, tmp_path: Any) -> None:
    """As in slime: each call counts from its start to its end, so that sandboxes are bounded, also in evaluation."""
    worker = serve(loads=dict)
    sets = [eval_set(tmp_path, 12), eval_set(tmp_path, 12)]
    sets[1].name = "two"
    flags = {"rollout_batch_size": 8, "over_sampling_batch_size": 16, "sglang_server_concurrency": 3}
    args = on(worker, "counted", eval_datasets=sets, **flags)
    generate_rollout_batch(args, 0, Source(2))
    assert args.most == 3
    args.most = 0
    generate_rollout_batch(args, 0, Source(2), evaluation=True)
    assert args.most == 3


def test_engines_that_the_trainer_takes_do_not_generate_between_calls() -> None:
    """``--colocate`` with fully asynchronous rollouts is refused by name."""
    with pytest.raises(ConfigError, match="colocate"):
        generate_rollout_batch(plain_args("unscored", colocate=True, rollouts_fully_async=True), 0, Source(2))


def test_the_samples_are_those_of_the_functions(serve: Serve) -> None:
    """Bounding and stopping do not copy what a function returns."""
    args = on(serve(loads=dict), "keeps")
    assert {id(sample) for sample in leaves(generate_rollout_batch(args, 0, Source(2)).samples)} == {
        id(sample) for sample in args.made
    }


async def keeps(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.made.append(sample)
    return filled(sample, reward=1.0)
