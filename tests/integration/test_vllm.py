"""The real vLLM server, on the CPU with the demo model in float32: runs over updates, aborts, and kills of both sides.

Only ``scripts/test --vllm`` runs these tests: it creates the environment of the server. One server is started for all
of them. Every run is checked for laws 1 to 5 and, token by token, for law 8. The demo model has heads of 32 dimensions
here, because vLLM needs them on a CPU: the same function (``scripts/widened_model.py``).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import msgspec
import numpy as np
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.conformance.vllm import vllm_conformance_of
from rollouts.dtypes import Completion, Endpoint, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL, running_server
from rollouts.errors import ConfigError, ContextOverflow
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.sglang import SGLangPolicy
from rollouts.inference.shared import shared_policies
from rollouts.inference.vllm import VLLMPolicy
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.runs.folder import read_info, read_rows
from rollouts.runs.logprobs import LogprobReport, check_logprobs
from rollouts.runs.run import RunResult
from rollouts.runs.verify import verify_run
from scripts.widened_model import widen

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TOLERANCE = 5e-5
"""Largest difference of a logprob in float32."""
START_SECONDS = 300.0

RECIPE = """
from itertools import islice
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import agent_recipe
from rollouts.recipes.calculator import exact_answer_reward

def recipe(endpoint, *, groups: int = 10, max_new_tokens: int = 64, temperature: float = 1.0):
    prompts = islice(calculator_prompts(0), 400)
    sizes = {"batch_size": groups, "n_samples_per_prompt": 3, "max_turns": 6, "max_new_tokens": max_new_tokens}
    return agent_recipe("load", endpoint, CalculatorEnvironment, prompts, reward_fn=exact_answer_reward, keep="all",
        temperature=temperature, **sizes)
"""


class RealServer:
    """vLLM on one port, which can be killed and started again."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        self.python = python
        self.model = model
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(provider="vllm", base_url=self.url, model=str(self.model))

    def start(self) -> None:
        command = [self.python, ROOT / "scripts" / "vllm_server.py", self.model, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"vLLM did not start: {self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """Kill all processes of the server at once, as a machine that is lost."""
        group = re.findall(r"process group (\d+)", self.log.read_text(errors="replace"))[-1]
        os.killpg(int(group), signal.SIGKILL)
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
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("weights")
    widen(DEMO_MODEL, root / "default")
    folders = {"default": root / "default"}
    for number in range(1, 4):
        folder = root / f"v{number}"
        shutil.copytree(root / "default", folder)
        torch.manual_seed(number)
        before = load_file(folder / "model.safetensors")
        after = {name: value + 0.003 * torch.randn_like(value) for name, value in before.items()}
        save_file(after, folder / "model.safetensors", {"format": "pt"})
        folders[folder.name] = folder
    return folders


@pytest.fixture(scope="session")
def running(python: Path, weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(python, weights["default"], tmp_path_factory.mktemp("vllm") / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def server(running: RealServer, weights: dict[str, Path]) -> RealServer:
    """The server with the demo model's weights, under the name that they have at its start."""
    await update_weights(running.endpoint, weights["default"], "default")
    return running


@pytest.fixture
def report_line(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line of measured numbers, also of a test that passes."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}: {text}", flush=True)

    return write


# -- runs -------------------------------------------------------------------------------------------------------------


async def play(out: Path, server: RealServer | None, *, resume: bool = False, **target: Any) -> RunResult:
    recipe = None
    if server is not None:
        recipe = out.with_suffix(".py")
        await anyio.Path(recipe).write_text(RECIPE)
        target = {"urls": (server.url,), "provider": "vllm", "model": str(server.model), **target}
    asked = RunTarget(**{"recipe": recipe, "batches": 1, **target})
    result = await launch(asked, out, "jsonl", False, Console(file=io.StringIO()), resume=resume, rehearsal=False)
    assert result is not None
    assert result.error is None, result.error
    assert result.status == "finished"
    return result


async def completions(count: int) -> None:
    """Return when the policies of this loop have so many completions."""
    while sum(policy.totals.completions for policy in shared_policies()) < count:  # noqa: ASYNC110 - other processes
        await anyio.sleep(0.02)


@attrs.frozen
class Proof:
    """What laws 1 to 5 and 8 say about a run."""

    samples: int
    report: LogprobReport
    spanning: int
    """Samples with tokens of several versions."""
    tool_calls: int

    @property
    def versions(self) -> set[str]:
        return {version.version for version in self.report.versions}

    def __str__(self) -> str:
        tokens = sum(version.tokens for version in self.report.versions)
        worst = max((version.largest for version in self.report.versions), default=0.0)
        return (
            f"{self.samples} samples, {self.tool_calls} tool calls, {tokens} tokens of {len(self.versions)} versions,"
            f" {self.spanning} samples of several; worst logprob difference {worst:.1e}"
        )


def proven(run: Path, models: Mapping[str | None, Path]) -> Proof:
    """Check all laws of a run."""
    laws = verify_run(run)
    assert laws.ok, [*map(str, laws.violations)]
    report = check_logprobs(run, models, tolerance=TOLERANCE)
    assert report.ok, [*map(str, report.violations)]
    samples = [row.sample() for row in read_rows(run, "all")]
    return Proof(
        len(samples),
        report,
        sum(len({span.version for span in sample.versions}) > 1 for sample in samples),
        sum(len(message.get("tool_calls") or ()) for sample in samples for message in sample.messages),
    )


# -- the tests --------------------------------------------------------------------------------------------------------


async def test_the_server_conforms(server: RealServer, tmp_path: Path, report_line: Callable[[str], None]) -> None:
    """Every point that a feature relies on holds."""
    report = await vllm_conformance_of(server.endpoint, unsafe=True)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    report_line(f"{Counter(result.verdict for result in report.results)}; {tmp_path}/report.json")
    assert report.failed == [], report
    assert report.server == "vLLM 0.32.0"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_200_groups_over_three_updates(
    server: RealServer,
    weights: dict[str, Path],
    tmp_path: Path,
    report_line: Callable[[str], None],
    temperature: float,
) -> None:
    """Three retract updates under load: no group fails, and each token fits the weights that it names."""

    async def update() -> None:
        for number in range(1, 4):
            await completions(250 * number)
            await update_weights(server.endpoint, weights[f"v{number}"], f"v{number}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        options = {"groups": "25", "temperature": str(temperature)}
        result = await play(tmp_path / "run", server, options=options, batches=8)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {result.seconds:.0f} s")
    assert (result.accounting.in_batch, result.accounting.failed) == (200, 0)
    assert proof.samples >= 500
    assert len(proof.versions) == 4
    assert proof.spanning > 0
    assert proof.tool_calls > 0


@pytest.mark.parametrize("mode", ["abort", "wait", "in_place"])
async def test_other_updates(
    server: RealServer,
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
            await completions(60 * number)
            await update_weights(server.endpoint, weights[f"v{number}"], f"v{number}", while_running=mode)

    options = {"groups": "15", "max_new_tokens": "128"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        result = await play(tmp_path / "run", server, options=options, batches=2)
    assert result.accounting.failed == 0
    if mode != "in_place":
        proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
        report_line(str(proof))
        assert len(proof.versions) == 3
        assert proof.spanning > 0
    await play(tmp_path / "after", server)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "after", weights)
    report_line(f"a run after it: {proof}")
    assert proof.versions == {"v2"}


async def test_interrupted_replies_go_on(server: RealServer, weights: dict[str, Path], tmp_path: Path) -> None:
    """32 long replies, aborted twice by the client and once by another one: whole and exact."""
    from rollouts.engine.teacher import Teacher

    prompt = packed_tokens(range(10, 40))
    replies: list[Completion] = []
    async with VLLMPolicy(server.endpoint) as policy, VLLMPolicy(server.endpoint) as other:
        resumable = ResumablePolicy(policy)

        async def call(number: int) -> None:
            sampling = SamplingParams(max_new_tokens=400, temperature=1.7, seed=number)
            replies.append(await resumable.complete(prompt, sampling, session=str(number)))

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
        assert float(np.abs(exact - reply.logprobs).max()) <= TOLERANCE


async def test_greedy_replies_are_those_of_the_embedded_engine(
    server: RealServer, report_line: Callable[[str], None]
) -> None:
    """Ten prompts, two servers, one model: the same ids."""
    greedy = SamplingParams(temperature=0, max_new_tokens=120)
    worst = 0.0
    async with running_server(DEMO_MODEL) as url:
        async with VLLMPolicy(server.endpoint) as real, SGLangPolicy(Endpoint(base_url=url)) as embedded:
            policies: tuple[ServerPolicy, ServerPolicy] = (real, embedded)
            for number in range(10):
                prompt = packed_tokens(range(10 + 40 * number, 45 + 40 * number))
                one, two = [await policy.complete(prompt, greedy) for policy in policies]
                assert one.tokens.tolist() == two.tokens.tolist()
                assert one.finish_reason == two.finish_reason
                worst = max(worst, float(np.abs(np.asarray(one.logprobs) - two.logprobs).max()))
    report_line(f"10 of 10 equal; worst logprob difference {worst:.1e}")
    assert worst <= TOLERANCE


async def test_prompts_around_the_context(server: RealServer) -> None:
    """A prompt that does not fit is an overflow, in both sentences; a reply that the context cuts ends by length."""
    async with VLLMPolicy(server.endpoint) as policy:
        assert (await policy.describe()).max_context == 1024
        for length in (1018, 1022, 1023):
            reply = await policy.complete(
                packed_tokens([10] * length), SamplingParams(max_new_tokens=50, min_new_tokens=50)
            )
            assert (len(reply.tokens), reply.finish_reason) == (1024 - length, "length")
        for length in (1024, 1025):
            with pytest.raises(ContextOverflow):
                await policy.complete(packed_tokens([10] * length), SamplingParams())


async def test_truncation_is_refused_where_it_renormalises(server: RealServer) -> None:
    """The mode of this server's logprobs is found by the probe."""
    async with VLLMPolicy(server.endpoint) as policy:
        with pytest.raises(ConfigError, match=r"renormalises its logprobs"):
            await policy.complete(packed_tokens([10, 20]), SamplingParams(top_k=3))


async def test_a_killed_client_resumes_on_its_server(
    server: RealServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """SIGKILL, then ``--resume`` without an endpoint: the same server samples, and no law is broken."""
    run, recipe = tmp_path / "run", tmp_path / "load.py"
    recipe.write_text(RECIPE)
    line = [sys.executable, "-m", "rollouts", "run", str(recipe), "--endpoint", server.url, "--provider", "vllm"]
    line += ["--model", str(server.model), "--out", str(run), "--format", "jsonl", "--batches", "50"]
    line += ["--no-rehearsal", "--quiet"]
    async with await anyio.open_process(line, cwd=ROOT, stdout=None, stderr=None) as process:
        while not list(run.glob("batches/batch-000001*")):
            assert process.returncode is None
            await anyio.sleep(0.05)
        process.kill()
    result = await play(run, None, resume=True, batches=4)
    proof = await anyio.to_thread.run_sync(proven, run, weights)
    report_line(f"{proof}; {read_info(run)['accounting']}")
    assert result.accounting.failed == 0
    assert result.accounting.in_batch == 40
    assert proof.versions == {"default"}


async def test_a_killed_server_comes_back(
    server: RealServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """It comes back with the weights of its start: requests wait for theirs, and no prompt is lost."""
    await update_weights(server.endpoint, weights["v1"], "v1")
    away = 0.0

    async def restart() -> None:
        nonlocal away
        await completions(40)
        await anyio.to_thread.run_sync(server.kill)
        began = time.monotonic()
        await anyio.to_thread.run_sync(server.start)
        await anyio.sleep(3)  # some looks
        assert sum(policy.in_flight for policy in shared_policies()) == 0, "the server has other weights"
        await update_weights(server.endpoint, weights["v1"], "v1")
        away = time.monotonic() - began

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(restart)
        result = await play(tmp_path / "run", server, options={"groups": "20"}, batches=2)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"away for {away:.0f} s; {result.accounting}; {proof}")
    accounting = result.accounting
    assert (accounting.in_batch, accounting.failed, accounting.dropped) == (40, 0, 0)
    assert accounting.taken == accounting.in_batch + accounting.returned
    assert proof.versions == {"v1"}


async def test_the_command_proves_law_8(server: RealServer, weights: dict[str, Path], tmp_path: Path) -> None:
    """``rollouts verify --model`` exits 0 for a run on the real server, and 1 for weights that it did not have."""
    await play(tmp_path / "run", server, options={"groups": "5"})
    for folder, code in ((weights["default"], 0), (weights["v1"], 1)):
        line = ["verify", str(tmp_path / "run"), "--tolerance", str(TOLERANCE), "--model", str(folder)]
        assert await anyio.to_thread.run_sync(main, line) == code
