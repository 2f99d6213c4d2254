"""The real SGLang server, on the CPU with the demo model in float32: runs over updates, aborts, restarts and routers.

Only ``scripts/test --sglang`` runs these tests: it creates the environment of the server. One server is started for all
of them. Every run is checked for laws 1 to 5 and, token by token, for law 8.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anyio
import anyio.to_thread
import attrs
import msgspec
import pytest

from rollouts.dtypes import Endpoint, SamplingParams, StopReason, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.inference.base import CompletionRequest
from rollouts.inference.conformance.sglang import conformance_of
from rollouts.inference.priorities import behind_training
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.programs.gateway.tree import Call, Training
from rollouts.programs.gateway.types import Constraint
from rollouts.runs.info import read_info
from scripts.servers.sglang_server import READY
from tests.integration.real_adapters import check_adapters
from tests.integration.real_servers import (
    ROOT,
    RealServer,
    check_the_command,
    completions,
    play,
    play_over_a_kill,
    play_over_a_restart,
    play_over_updates,
    versions_of,
)
from tests.integration.real_servers import proven as proven_within
from tests.integration.routers import SGLANG_ROUTER, get, router, until_ready
from tests.integration.sampling_load import FaultyProxy, SamplingLoad
from tests.peft_folders import TARGETS
from tests.programs.gateway.programs import asks, session_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

TOLERANCE = 2e-5  # rounding of float32: in runs of some 21,000 tokens the largest difference was 7e-6 to 1.0e-5
"""Largest difference of a logprob in float32."""
proven = functools.partial(proven_within, tolerance=TOLERANCE)
OUTAGE_SECONDS = 90.0
SOAK_SECONDS, MAX_SOAK_SECONDS = 40.0, 600.0
SOAK_TOLERANCE = 1e-4  # random prompts have rare tokens, which round more: the largest of 10,000 tokens was 2.5e-5
MODES: tuple[WhileRunning, ...] = ("retract", "wait", "abort", "in_place")

LONG_PROMPTS = """
from rollouts.dtypes import Message
from rollouts.environments import SingleTurnEnvironment
from rollouts.recipe import agent_recipe
from rollouts.renderer import renderer_for

def recipe(endpoint, *, shortest: int, longest: int):
    renderer = renderer_for(endpoint.model)
    template = len(renderer.opening([Message("user", "")]))
    prompts = ["x" * (count - template) for count in range(shortest, longest + 1)]
    assert len(renderer.opening([Message("user", prompts[-1])])) == longest
    return agent_recipe("long", endpoint, SingleTurnEnvironment, prompts, reward_fn=lambda sample: 0.0, keep="all",
        batch_size=len(prompts), n_samples_per_prompt=2, over_sampling_factor=1, max_new_tokens=24)
"""


# -- the server -------------------------------------------------------------------------------------------------------


class SGLangServer(RealServer):
    """SGLang on one port, which can be killed and started again."""

    provider = "sglang"

    def __init__(self, python: Path, model: Path, log: Path, *flags: str) -> None:
        super().__init__(python, model, log)
        self.flags = flags

    def start(self) -> None:
        command = [
            str(self.python),
            "-m",
            "scripts.servers.sglang_server",
            "--cpu",
            str(self.model),
            "--port",
            str(self.port),
            *self.flags,
        ]
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith(READY):
            raise AssertionError(f"SGLang did not start: {self.log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        assert self.process.stdout is not None
        self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of the server's environment."""
    if not request.config.getoption("--sglang"):
        pytest.skip("scripts/test --sglang installs SGLang and runs this")
    return ROOT / ".venv-sglang" / "bin" / "python"


@pytest.fixture(scope="session")
def running(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    server = SGLangServer(python, DEMO_MODEL, tmp_path_factory.mktemp("sglang") / "server.log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def server(running: SGLangServer) -> SGLangServer:
    """The server with the demo model's weights, under the name that they have at its start."""
    await update_weights(Endpoint(base_url=running.url), DEMO_MODEL, "default")
    return running


@pytest.fixture(scope="session")
def weights(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model as version ``default``, and six versions that differ a little."""
    return versions_of(DEMO_MODEL, tmp_path_factory.mktemp("weights"), 6)


# -- runs -------------------------------------------------------------------------------------------------------------


async def load(url: str) -> int:
    """Requests that the server runs."""
    return sum(rank["num_running_reqs"] for rank in (await get(f"{url}/v1/loads"))[1]["loads"])


async def running_after(url: str, seconds: float) -> int:
    """Requests that still run when the server is idle, or after so many seconds."""
    with anyio.move_on_after(seconds):
        while await load(url):  # noqa: ASYNC110 - another process
            await anyio.sleep(0.1)
    return await load(url)


async def busy(url: str, count: int) -> None:
    """Return when the server runs so many requests."""
    while await load(url) < count:  # noqa: ASYNC110 - another process
        await anyio.sleep(0.02)


async def generated(url: str) -> int:
    """Tokens that an embedded engine has generated so far."""
    return int((await get(f"{url}/server_info"))[1]["internal_states"][0]["generated_tokens"])


# -- the tests --------------------------------------------------------------------------------------------------------


async def test_the_server_conforms(server: SGLangServer, tmp_path: Path, report_line: Callable[[str], None]) -> None:
    """Every point that a feature relies on holds."""
    report = await conformance_of(Endpoint(base_url=server.url))
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    report_line(f"{Counter(result.verdict for result in report.results)}; {tmp_path}/report.json")
    assert report.failed == [], report
    assert report.server == "SGLang 0.5.23"


async def test_200_groups_over_six_updates(
    server: SGLangServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """Six retract updates under load: no group fails, and each token fits the weights that it names."""
    result = await play_over_updates(tmp_path / "run", server, weights, 150, {"groups": "25"})
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {result.seconds:.0f} s")
    assert result.accounting.in_batch == 200
    assert proof.samples >= 500
    assert len(proof.versions) >= 6
    assert proof.spanning > 0
    assert proof.tool_calls > 0


@pytest.mark.parametrize("mode", ["abort", "wait", "in_place"])
async def test_other_updates(
    server: SGLangServer,
    weights: dict[str, Path],
    tmp_path: Path,
    report_line: Callable[[str], None],
    mode: WhileRunning,
) -> None:
    """Aborted replies go on under the new weights; no update loses a prompt; a later run never reads an old prefix.

    The logprobs of replies that run during an update in place are of no single version, as it documents; those during
    an update that waits may be so, if the server fails to flush. So only the run after these updates is compared.
    """
    endpoint, updated = Endpoint(base_url=server.url), 0

    async def update() -> None:
        nonlocal updated
        for number in (1, 2):
            await busy(server.url, 20)
            await update_weights(endpoint, weights[f"v{number}"], f"v{number}", while_running=mode)
            updated = number

    options = {"groups": "15", "max_new_tokens": "128"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        result = await play(tmp_path / "run", server, options=options, batches=2)
        tasks.cancel_scope.cancel()
    assert updated == 2
    assert result.accounting.failed == 0
    if mode == "abort":
        proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
        report_line(str(proof))
        assert proof.stops[StopReason.ABORTED] == 0
        assert proof.spanning > 0
    await play(tmp_path / "after", server)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "after", weights)
    report_line(f"a run after it: {proof}")
    assert proof.versions == {"v2"}


@pytest.mark.timeout(3600)  # 80 updates: 15 minutes on two cores that others use too
async def test_two_http_workers(
    python: Path, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """With ``--tokenizer-worker-num 2``, 20 of 20 updates succeed in every mode under load, and each token is exact.

    Only those in place are not compared: logprobs of running replies are then of no single version.
    """
    server = SGLangServer(python, DEMO_MODEL, tmp_path / "server.log", "--tokenizer-worker-num", "2")
    await anyio.to_thread.run_sync(server.start)
    folders = list(weights.values())
    models = {"default": DEMO_MODEL}
    try:
        async with SGLangPolicy(server.endpoint) as inner:
            for mode in MODES:
                load = SamplingLoad(ResumablePolicy(inner), seed=len(models))
                async with load.running():
                    for number in range(20):
                        version = f"{mode}-{number}"
                        models[version] = folders[number % len(folders)]
                        await update_weights(server.endpoint, models[version], version, while_running=mode)
                        assert (await inner.describe()).weight_version == version
                compared = mode != "in_place"
                worst = float(load.differences(models).max()) if compared else 0.0
                found = f"worst logprob difference {worst:.1e}" if compared else "not compared"
                report_line(f"{mode}: 20 of 20 updates, {load.tokens} tokens, {found}")
                assert load.tokens > 1000
                assert not compared or worst <= TOLERANCE
    finally:
        await anyio.to_thread.run_sync(server.stop)


async def test_everything_at_once(
    server: SGLangServer, weights: dict[str, Path], report_line: Callable[[str], None]
) -> None:
    """Faults, updates, interrupts and cancels at once: no token is wrong, and no generation is left on the server.

    For 40 s, and on a slow machine until each has happened five times and 5,000 tokens were sampled.
    """
    folders, models = list(weights.values()), {"default": DEMO_MODEL}
    proxy = FaultyProxy(server.port, faults=0.4)
    updates = interrupts = 0

    async def update() -> None:
        nonlocal updates
        while True:
            mode: WhileRunning = "abort" if updates % 2 else "retract"  # "wait" is not exact where a flush fails
            updates += 1
            models[f"s{updates}"] = folders[updates % len(folders)]
            await update_weights(server.endpoint, models[f"s{updates}"], f"s{updates}", while_running=mode)
            await anyio.sleep(1.0)

    async def interrupt() -> None:
        nonlocal interrupts
        while True:
            try:
                await policy.pause()
            finally:
                policy.resume()
            interrupts += 1
            await anyio.sleep(0.7)

    def least() -> int:
        return min(updates, interrupts, policy.resumed, load.cancelled, proxy.broken, load.tokens // 1000)

    began = time.monotonic()
    async with proxy.serving():
        endpoint = attrs.evolve(server.endpoint, base_url=proxy.url, max_retries=1000)
        async with SGLangPolicy(endpoint, backoff=lambda failures: 0.1) as inner:
            policy = ResumablePolicy(inner, backoff_seconds=0.1)
            load = SamplingLoad(policy, seed=1, max_new_tokens=200, cancels=0.2)
            async with anyio.create_task_group() as tasks, load.running():
                tasks.start_soon(update)
                tasks.start_soon(interrupt)
                await anyio.sleep(SOAK_SECONDS)
                with anyio.fail_after(MAX_SOAK_SECONDS):
                    while least() < 5:  # noqa: ASYNC110 - counts of several tasks
                        await anyio.sleep(1.0)
                seconds = time.monotonic() - began
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    left = await running_after(server.url, 5.0)
    differences = load.differences(models)
    wrong = int((differences > SOAK_TOLERANCE).sum())
    report_line(
        f"{seconds:.0f} s: {len(load.replies)} replies, {load.tokens} tokens, {wrong} wrong (worst"
        f" {differences.max():.1e}), {left} generations left; {updates} updates, {interrupts} interrupts,"
        f" {policy.resumed} resumed, {load.cancelled} cancels, {proxy.broken} broken connections"
    )
    assert least() >= 5
    assert wrong == 0
    assert left == 0


async def test_an_interruption_does_not_repeat_random_numbers(server: SGLangServer) -> None:
    """With seeds, the token after an interruption repeats the first token as often as under the policy."""
    from rollouts.engine.teacher import Teacher
    from tests.interruptions import deviation_of_repeats

    async with SGLangPolicy(server.endpoint) as policy:
        for after, at in (((), 1), ((1,), 1), ((1, 1), 2)):
            deviation = await deviation_of_repeats(policy, Teacher(DEMO_MODEL, "float32"), 500, after=after, at=at)
            assert abs(deviation) < 5, (after, deviation)


async def test_a_stop_string_may_span_an_interruption(server: SGLangServer) -> None:
    """At every split point, the reply ends as an uninterrupted one."""
    from tests.interruptions import check_stops_at_every_split

    async with SGLangPolicy(server.endpoint) as policy:
        await check_stops_at_every_split(policy)


async def test_a_server_that_is_away_for_90_seconds(
    server: SGLangServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """A killed server comes back with the weights of its start: requests wait for theirs, and no prompt is lost."""
    down = OUTAGE_SECONDS / 2  # a machine that reboots: the start alone takes less than the outage
    result, away = await play_over_a_restart(tmp_path / "run", server, weights, down=down, away=OUTAGE_SECONDS)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"away for {away:.0f} s; {result.accounting}; {proof}")
    assert away >= OUTAGE_SECONDS
    assert proof.versions == {"v1"}


async def test_a_killed_client_resumes_on_its_server(
    server: SGLangServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """SIGKILL, then ``--resume`` without an endpoint: the same server samples, and no law is broken."""
    run = tmp_path / "run"
    await play_over_a_kill(run, server)
    proof = await anyio.to_thread.run_sync(proven, run, weights)
    report_line(f"{proof}; {read_info(run)['accounting']}")
    assert proof.versions == {"default"}


async def test_prompts_around_the_context(
    server: SGLangServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """Prompts that fill the context, or all but a few tokens of it, are truncated; no rollout fails."""
    options = {"shortest": "1010", "longest": "1025"}
    result = await play(tmp_path / "run", server, text=LONG_PROMPTS, options=options)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {dict(proof.stops)}")
    assert result.accounting.failed == 0
    assert proof.stops == {StopReason.CONTEXT_OVERFLOW: 32}


@pytest.mark.parametrize("module", ["sglang_router", "smg"])
async def test_a_fleet_behind_a_router(
    server: SGLangServer,
    weights: dict[str, Path],
    tmp_path: Path,
    report_line: Callable[[str], None],
    module: str,
) -> None:
    """A worker of two is killed, and one is added: no group fails, and the tokens of all workers are exact.

    The others are embedded engines: a second real server does not fit on a small machine.
    """
    command = SGLANG_ROUTER if module == "sglang_router" else (str(server.python), "-m", "smg.launch_router")
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(engine_process(DEMO_MODEL, tmp_path / f"engine{number}.log"))
            for number in range(2)
        ]
        routed = router([server.url, engines[0].url], tmp_path / "router.log", command=command)
        url = stack.enter_context(routed)
        await until_ready(url, 2)
        report = await conformance_of(Endpoint(base_url=url), idle_seconds=0.1)
        assert report.failed == [], report

        async def change() -> None:
            await completions(50)
            engines[0].kill()
            await completions(100)
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{url}/workers", json={"url": engines[1].url}) as answer:
                    assert answer.status in (200, 202), await answer.text()

        before = await generated(engines[1].url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change)
            result = await play(tmp_path / "run", server, urls=(url,), options={"groups": "20"}, batches=3)
        new = await generated(engines[1].url) - before
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {new} tokens of the new worker; {result.accounting}")
    assert result.accounting.failed == 0
    assert result.accounting.in_batch == 60
    assert new > 0


async def test_the_command_proves_law_8(server: SGLangServer, weights: dict[str, Path], tmp_path: Path) -> None:
    """``rollouts check-run --model`` exits 0 for a run on the real server, and 1 for weights that it did not have."""
    await play(tmp_path / "run", server, options={"groups": "5"})
    await check_the_command(tmp_path / "run", weights, tolerance=TOLERANCE)


# -- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("while_running", ["finish", "switch"])
async def test_adapters_are_updated_under_load(
    python: Path, tmp_path: Path, while_running: Literal["finish", "switch"], report_line: Callable[[str], None]
) -> None:
    """Three adapters in six versions: no rollout fails, nothing pauses, and each token is of the adapter it names."""
    flags = ["--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native", "--max-loras-per-batch", "4"]
    flags += ["--lora-target-modules", *TARGETS]
    server = SGLangServer(python, DEMO_MODEL, tmp_path / "server.log", *flags)
    server.start()
    try:
        await check_adapters(server.endpoint, tmp_path, while_running, report_line)
    finally:
        server.stop()


async def test_priorities(python: Path, tmp_path: Path, report_line: Callable[[str], None]) -> None:
    """With ``--enable-priority-scheduling``, the last rollouts of a group come first, and an evaluation comes last."""
    flags = ("--enable-priority-scheduling", "--max-running-requests", "1")
    server = SGLangServer(python, DEMO_MODEL, tmp_path / "server.log", *flags)
    await anyio.to_thread.run_sync(server.start)
    order: list[str] = []
    sampling = SamplingParams(max_new_tokens=64, min_new_tokens=64)
    try:
        async with SGLangPolicy(attrs.evolve(server.endpoint, priority=True)) as policy:
            assert await policy.priority_order() == "higher first"

            async def ask(name: str, urgency: Callable[[], int]) -> None:
                request = CompletionRequest(packed_tokens([5, 6, 7]), sampling)
                await policy.of_rollout(urgency).complete(request)
                order.append(name)

            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(ask, "evaluation", behind_training)
                await busy(server.endpoint.base_url[0], 1)
                tasks.start_soon(ask, "first of a group", lambda: 0)
                tasks.start_soon(ask, "last of a group", lambda: 3)
    finally:
        await anyio.to_thread.run_sync(server.stop)
    report_line(f"order of the ends: {', '.join(order)}")
    first, last = order.index("first of a group"), order.index("last of a group")
    assert last < first < 4


async def test_calls_of_strict_tools_fit_their_schemas(
    python: Path, tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """The server holds them to it, and leaves the rest free; the record says that the logprobs are under the form."""
    server = SGLangServer(python, DEMO_MODEL, tmp_path / "server.log", "--grammar-backend", "xgrammar")
    await anyio.to_thread.run_sync(server.start)
    try:
        await check_strict_tools(server.endpoint, report_line)
    finally:
        await anyio.to_thread.run_sync(server.stop)


async def check_strict_tools(endpoint: Endpoint, report_line: Callable[[str], None]) -> None:
    """Of the same 60 questions, with the tools enforced and free; and replies of one form to 8 of them."""
    one = {"enum": [1]}
    schema = {"type": "object", "properties": {"a": one, "b": one}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    add, *others = CalculatorEnvironment().tools
    tools = (attrs.evolve(add, parameters=schema), *others)
    form = Constraint("response_format", "json_schema", json.dumps(schema))
    async with SGLangPolicy(endpoint) as policy:
        assert (await policy.describe()).has_structural_tags
        enforced = await answers(
            policy, Training(strict_tools="enforce"), 60, tools=tools, strict=frozenset({add.name})
        )
        free = await answers(policy, Training(), 60, tools=tools, strict=frozenset({add.name}))
        formed = await answers(policy, Training(), 8, tools=(), constraint=form)
    ends = [reply for reply in enforced if reply.completion.finish_reason == "stop"]
    calls = [call for reply in ends for call in reply.message.tool_calls]
    strict = [dict(call.arguments) for call in calls if call.name == add.name]
    others_called = Counter(call.name for call in calls if call.name != add.name)
    without = [call for reply in free for call in reply.message.tool_calls]
    whole = [reply.message.content for reply in formed if reply.completion.finish_reason == "stop"]
    fit = sum(call.arguments == {"a": 1, "b": 1} for call in without)
    report_line(
        f"enforced: {len(ends)} of {len(enforced)} replies ended, {len(strict)} calls of a strict tool, {others_called}"
        f" of others; free: {fit} of {len(without)} calls fit; of one form: {len(whole)} of {len(formed)} ended"
    )
    assert {reply.completion.logprobs_of for reply in (*enforced, *formed)} == {"constrained"}
    assert {reply.completion.logprobs_of for reply in free} == {"tempered"}
    assert [call.error for call in calls if call.error is not None] == []
    assert len(strict) >= 3
    assert all(arguments == {"a": 1, "b": 1} for arguments in strict)
    assert fit == 0, "the questions do not lead to such a call"
    assert whole
    assert all(json.loads(text) == {"a": 1, "b": 1} for text in whole)


async def answers(policy: SGLangPolicy, training: Training, count: int, **fields: Any) -> list[Call]:
    """The calls of a program that asks for so many sums, none of them 1 + 1."""
    sampling = SamplingParams(max_new_tokens=96)
    async with session_of(policy, sampling=sampling, training=training, max_context=1024) as session:
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                request = asks(f"What is {number + 3} + {number + 8}?", **fields)
                tasks.start_soon(functools.partial(session.call, request, lineage={"agent": str(number)}))
        return list(session.tree.calls)
