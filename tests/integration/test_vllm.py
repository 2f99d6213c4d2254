"""The real vLLM server, on the CPU with the demo model in float32: runs over updates, aborts, and kills of both sides.

Only ``scripts/test --vllm`` runs these tests: it creates the environment of the server. One server is started for all
of them. Every run is checked for laws 1 to 5 and, token by token, for law 8. The demo model has heads of 32 dimensions
here, because vLLM needs them on a CPU: the same function (``scripts/servers/widened_model.py``).
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError, ContextOverflow
from rollouts.inference.base import CompletionRequest
from rollouts.inference.conformance.vllm import vllm_conformance_of
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.vllm import VLLMPolicy
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.runs.info import read_info
from scripts.servers.widened_model import widen
from tests.integration.real_adapters import check_adapters
from tests.integration.real_servers import (
    ROOT,
    Proof,
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

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class VLLMServer(RealServer):
    """vLLM on one port, which can be killed and started again."""

    provider = "vllm"
    flags: Sequence[str] = ()
    start_seconds = 300.0
    tolerance = 5e-5
    """Largest difference of a logprob in float32."""

    def command(self) -> list[str]:
        script = str(ROOT / "scripts" / "servers" / "vllm_server.py")
        return [str(self.python), script, str(self.model), "--port", str(self.port), *self.flags]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def launch(self) -> None:
        """Start the process."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=self.environment())
        self.until = time.monotonic() + self.start_seconds

    def wait(self) -> None:
        """Return when it is ready."""
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > self.until:
                raise AssertionError(f"vLLM did not start: {self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def start(self) -> None:
        self.launch()
        self.wait()

    @property
    def proven(self) -> Callable[..., Proof]:
        return functools.partial(proven_within, tolerance=self.tolerance)

    def stop(self) -> None:
        self.process.wait(60)


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of the server's environment."""
    if not request.config.getoption("--vllm"):
        pytest.skip("scripts/test --vllm installs vLLM and runs this")
    return ROOT / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="session")
def weights(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model as version ``default``, and three versions that differ a little."""
    root = tmp_path_factory.mktemp("weights")
    widen(DEMO_MODEL, root / "default")
    return versions_of(root / "default", root, 3)


@pytest.fixture(scope="session")
def running(python: Path, weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    server = VLLMServer(python, weights["default"], tmp_path_factory.mktemp("vllm") / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def server(running: VLLMServer, weights: dict[str, Path]) -> VLLMServer:
    """The server with the demo model's weights, under the name that they have at its start."""
    await update_weights(running.endpoint, weights["default"], "default")
    return running


# -- the tests --------------------------------------------------------------------------------------------------------


async def test_the_server_conforms(server: VLLMServer, tmp_path: Path, report_line: Callable[[str], None]) -> None:
    """Every point that a feature relies on holds."""
    report = await vllm_conformance_of(server.endpoint, unsafe=True)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    report_line(f"{Counter(result.verdict for result in report.results)}; {tmp_path}/report.json")
    assert report.failed == [], report
    assert report.server == "vLLM 0.32.0"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_200_groups_over_three_updates(
    server: VLLMServer,
    weights: dict[str, Path],
    tmp_path: Path,
    report_line: Callable[[str], None],
    temperature: float,
) -> None:
    """Three retract updates under load: no group fails, and each token fits the weights that it names."""
    options = {"groups": "25", "temperature": str(temperature)}
    result = await play_over_updates(tmp_path / "run", server, weights, 250, options)
    proof = await anyio.to_thread.run_sync(server.proven, tmp_path / "run", weights)
    report_line(f"{proof}; {result.seconds:.0f} s")
    assert result.accounting.in_batch == 200
    assert proof.samples >= 500
    assert len(proof.versions) == 4
    assert proof.spanning > 0
    assert proof.tool_calls > 0


@pytest.mark.parametrize("mode", ["abort", "wait", "in_place"])
async def test_other_updates(
    server: VLLMServer,
    weights: dict[str, Path],
    tmp_path: Path,
    report_line: Callable[[str], None],
    mode: WhileRunning,
) -> None:
    """Aborted replies go on under the new weights; no update loses a prompt; a later run never reads an old prefix.

    The logprobs of replies that run during an update in place are of no single version, as it documents, so only the
    run after it is compared.
    """

    async def update() -> None:
        for number in (1, 2):
            await completions(40 * number)  # early: "wait" takes as long as the longest reply
            await update_weights(server.endpoint, weights[f"v{number}"], f"v{number}", while_running=mode)

    options = {"groups": "15", "max_new_tokens": "128"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        result = await play(tmp_path / "run", server, options=options, batches=2)
    assert result.accounting.failed == 0
    if mode != "in_place":
        proof = await anyio.to_thread.run_sync(server.proven, tmp_path / "run", weights)
        report_line(str(proof))
        assert len(proof.versions) == 3
        assert proof.spanning > 0
    await play(tmp_path / "after", server)
    proof = await anyio.to_thread.run_sync(server.proven, tmp_path / "after", weights)
    report_line(f"a run after it: {proof}")
    assert proof.versions == {"v2"}


async def test_interrupted_replies_go_on(server: VLLMServer, weights: dict[str, Path], tmp_path: Path) -> None:
    """32 long replies, aborted twice by the client and once by another one: whole and exact."""
    from rollouts.engine.teacher import Teacher

    prompt = packed_tokens(range(10, 40))
    replies: list[Completion] = []
    async with VLLMPolicy(server.endpoint) as policy, VLLMPolicy(server.endpoint) as other:
        resumable = ResumablePolicy(policy)

        async def call(number: int) -> None:
            sampling = SamplingParams(max_new_tokens=400, temperature=1.7, seed=number)
            replies.append(await resumable.complete(CompletionRequest(prompt, sampling, session=str(number))))

        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(call, number)
            for abort in (policy.interrupt, policy.interrupt, lambda: other.abort_all(30.0)):
                while not policy.in_flight and len(replies) < 32:  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.01)
                await anyio.sleep(0.1)  # some tokens
                await abort()
        assert resumable.resumed > 0
    teacher = Teacher(weights["default"], "float32")
    assert len(replies) == 32
    assert {reply.finish_reason for reply in replies} <= {"stop", "length"}
    for reply in replies:
        ids = np.concatenate([prompt, reply.tokens])
        exact = teacher.logprobs(ids, np.arange(len(prompt), len(ids)), 1.7)
        assert float(np.abs(exact - reply.logprobs).max()) <= server.tolerance


async def test_an_interruption_does_not_repeat_random_numbers(server: VLLMServer, weights: dict[str, Path]) -> None:
    """With seeds, the token after an interruption repeats the first token as often as under the policy."""
    from rollouts.engine.teacher import Teacher
    from tests.interruptions import deviation_of_repeats

    async with VLLMPolicy(server.endpoint) as policy:
        for after, at in (((), 1), ((1,), 1), ((1, 1), 2)):
            deviation = await deviation_of_repeats(
                policy, Teacher(weights["default"], "float32"), 500, after=after, at=at
            )
            assert abs(deviation) < 5, (after, deviation)


async def test_a_stop_string_may_span_an_interruption(server: VLLMServer) -> None:
    """At every split point, the reply ends as an uninterrupted one."""
    from tests.interruptions import check_stops_at_every_split

    async with VLLMPolicy(server.endpoint) as policy:
        await check_stops_at_every_split(policy)


async def test_greedy_replies_are_those_of_the_embedded_engine(
    server: VLLMServer, report_line: Callable[[str], None]
) -> None:
    """Ten prompts, two servers, one model: the same ids."""
    greedy = SamplingParams(temperature=0, max_new_tokens=120)
    worst = 0.0
    async with running_server(DEMO_MODEL) as url:
        async with VLLMPolicy(server.endpoint) as real, SGLangPolicy(Endpoint(base_url=url)) as embedded:
            policies: tuple[ServerPolicy, ServerPolicy] = (real, embedded)
            for number in range(10):
                prompt = packed_tokens(range(10 + 40 * number, 45 + 40 * number))
                one, two = [await policy.complete(CompletionRequest(prompt, greedy)) for policy in policies]
                assert one.tokens.tolist() == two.tokens.tolist()
                assert one.finish_reason == two.finish_reason
                worst = max(worst, float(np.abs(np.asarray(one.logprobs) - two.logprobs).max()))
    report_line(f"10 of 10 equal; worst logprob difference {worst:.1e}")
    assert worst <= server.tolerance


async def test_prompts_around_the_context(server: VLLMServer) -> None:
    """A prompt that does not fit is an overflow, in both sentences; a reply that the context cuts ends by length."""
    async with VLLMPolicy(server.endpoint) as policy:
        assert (await policy.describe()).max_context == 1024
        for length in (1018, 1022, 1023):
            reply = await policy.complete(
                CompletionRequest(packed_tokens([10] * length), SamplingParams(max_new_tokens=50, min_new_tokens=50))
            )
            assert (len(reply.tokens), reply.finish_reason) == (1024 - length, "length")
        for length in (1024, 1025):
            with pytest.raises(ContextOverflow):
                await policy.complete(CompletionRequest(packed_tokens([10] * length), SamplingParams()))


async def test_truncation_is_refused_where_it_renormalises(server: VLLMServer) -> None:
    """The mode of this server's logprobs is found by the probe."""
    async with VLLMPolicy(server.endpoint) as policy:
        with pytest.raises(ConfigError, match=r"renormalises its logprobs"):
            await policy.complete(CompletionRequest(packed_tokens([10, 20]), SamplingParams(top_k=3)))


async def test_a_killed_client_resumes_on_its_server(
    server: VLLMServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """SIGKILL, then ``--resume`` without an endpoint: the same server samples, and no law is broken."""
    run = tmp_path / "run"
    await play_over_a_kill(run, server)
    proof = await anyio.to_thread.run_sync(server.proven, run, weights)
    report_line(f"{proof}; {read_info(run)['accounting']}")
    assert proof.versions == {"default"}


async def test_a_killed_server_comes_back(
    server: VLLMServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """It comes back with the weights of its start: requests wait for theirs, and no prompt is lost."""
    result, away = await play_over_a_restart(tmp_path / "run", server, weights)
    proof = await anyio.to_thread.run_sync(server.proven, tmp_path / "run", weights)
    report_line(f"away for {away:.0f} s; {result.accounting}; {proof}")
    assert proof.versions == {"v1"}


async def test_the_command_proves_law_8(server: VLLMServer, weights: dict[str, Path], tmp_path: Path) -> None:
    """``rollouts check-run --model`` exits 0 for a run on the real server, and 1 for weights that it did not have."""
    await play(tmp_path / "run", server, options={"groups": "5"})
    await check_the_command(tmp_path / "run", weights, tolerance=server.tolerance)


@pytest.mark.parametrize("while_running", ["finish", "switch"])
async def test_adapters_are_updated_under_load(
    python: Path,
    weights: dict[str, Path],
    tmp_path: Path,
    while_running: Literal["finish", "switch"],
    report_line: Callable[[str], None],
) -> None:
    """Three adapters in six versions: no rollout fails, nothing pauses, and each token is of the adapter it names."""
    server = VLLMServer(python, weights["default"], tmp_path / "server.log")
    server.flags = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8"]
    server.start()
    try:
        await check_adapters(server.endpoint, tmp_path, while_running, report_line)
    finally:
        server.kill()
