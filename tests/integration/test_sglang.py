"""The real SGLang server, on the CPU with the demo model in float32: runs over updates, aborts, restarts and routers.

Only ``scripts/test --sglang`` runs these tests: it creates the environment of the server. One server is started for all
of them. Every run is checked for laws 1 to 5 and, token by token, for law 8.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import attrs
import msgspec
import pytest
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.conformance.sglang import conformance_of
from rollouts.dtypes import Endpoint, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import engine_process
from rollouts.inference.shared import shared_policies
from rollouts.inference.weights import WhileRunning, update_weights
from rollouts.runs.folder import read_info, read_rows
from rollouts.runs.logprobs import LogprobReport, check_logprobs
from rollouts.runs.run import RunResult
from rollouts.runs.verify import verify_run
from scripts.sglang_server import READY
from tests.integration.routers import SGLANG_ROUTER, get, router, until_ready

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-5  # rounding of float32: in runs of some 21,000 tokens the largest difference was 7e-6 to 1.0e-5
"""Largest difference of a logprob in float32."""
OUTAGE_SECONDS = 90.0

RECIPE = """
from itertools import islice
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import agent_recipe
from rollouts.recipes.calculator import exact_answer_reward

def recipe(endpoint, *, groups: int = 10, max_new_tokens: int = 64):
    prompts = islice(calculator_prompts(0), 400)
    sizes = {"batch_size": groups, "n_samples_per_prompt": 3, "max_turns": 6, "max_new_tokens": max_new_tokens}
    return agent_recipe("load", endpoint, CalculatorEnvironment, prompts, reward_fn=exact_answer_reward, keep="all",
        **sizes)
"""

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


class RealServer:
    """SGLang on one port, which can be killed and started again."""

    def __init__(self, python: Path, log: Path) -> None:
        self.python = python
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [self.python, "-m", "scripts.sglang_server", "--cpu", DEMO_MODEL, "--port", str(self.port)]
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith(READY):
            raise AssertionError(f"SGLang did not start: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """Kill all processes of the server at once, as a machine that is lost."""
        group = re.findall(r"process group (\d+)", self.log.read_text(errors="replace"))[-1]
        os.killpg(int(group), signal.SIGKILL)
        self.stop()

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
def running(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(python, tmp_path_factory.mktemp("sglang") / "server.log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def server(running: RealServer) -> RealServer:
    """The server with the demo model's weights, under the name that they have at its start."""
    await update_weights(Endpoint(base_url=running.url), DEMO_MODEL, "default")
    return running


@pytest.fixture(scope="session")
def weights(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model as version ``default``, and six versions that differ a little."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    folders = {"default": DEMO_MODEL}
    for number in range(1, 7):
        folder = tmp_path_factory.mktemp("weights") / f"v{number}"
        shutil.copytree(DEMO_MODEL, folder)
        torch.manual_seed(number)
        before = load_file(folder / "model.safetensors")
        after = {name: value + 0.003 * torch.randn_like(value) for name, value in before.items()}
        save_file(after, folder / "model.safetensors", {"format": "pt"})
        folders[folder.name] = folder
    return folders


@pytest.fixture
def report_line(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line of measured numbers, also of a test that passes."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}: {text}", flush=True)

    return write


# -- runs -------------------------------------------------------------------------------------------------------------


async def play(out: Path, text: str | None, url: str | None, *, resume: bool = False, **target: Any) -> RunResult:
    recipe = None
    if text is not None:
        recipe = out.with_suffix(".py")
        await anyio.Path(recipe).write_text(text)
    urls = () if url is None else (url,)
    asked = RunTarget(**{"recipe": recipe, "urls": urls, "model": str(DEMO_MODEL), "batches": 1, **target})
    result = await launch(asked, out, "jsonl", False, Console(file=io.StringIO()), resume=resume, rehearsal=False)
    assert result is not None
    assert result.error is None, result.error
    assert result.status == "finished"
    return result


async def completions(count: int) -> None:
    """Return when the policies of this loop have so many completions."""
    while sum(policy.totals.completions for policy in shared_policies()) < count:  # noqa: ASYNC110 - other processes
        await anyio.sleep(0.02)


async def load(url: str) -> int:
    """Requests that the server runs."""
    return sum(rank["num_running_reqs"] for rank in (await get(f"{url}/v1/loads"))[1]["loads"])


async def busy(url: str, count: int) -> None:
    """Return when the server runs so many requests."""
    while await load(url) < count:  # noqa: ASYNC110 - another process
        await anyio.sleep(0.02)


async def generated(url: str) -> int:
    """Tokens that an embedded engine has generated so far."""
    return int((await get(f"{url}/server_info"))[1]["internal_states"][0]["generated_tokens"])


@attrs.frozen
class Proof:
    """What laws 1 to 5 and 8 say about a run."""

    samples: int
    report: LogprobReport
    spanning: int
    """Samples with tokens of several versions."""
    stops: Counter[StopReason | None]
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
        Counter(sample.stop_reason for sample in samples),
        sum(len(message.get("tool_calls") or ()) for sample in samples for message in sample.messages),
    )


# -- the tests --------------------------------------------------------------------------------------------------------


async def test_the_server_conforms(server: RealServer, tmp_path: Path, report_line: Callable[[str], None]) -> None:
    """Every point that a feature relies on holds."""
    report = await conformance_of(Endpoint(base_url=server.url))
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report))
    report_line(f"{Counter(result.verdict for result in report.results)}; {tmp_path}/report.json")
    assert report.failed == [], report
    assert report.server == "SGLang 0.5.23"


async def test_200_groups_over_six_updates(
    server: RealServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """Six retract updates under load: no group fails, and each token fits the weights that it names."""
    endpoint = Endpoint(base_url=server.url)

    async def update() -> None:
        for number in range(1, 7):
            await completions(150 * number)
            await update_weights(endpoint, weights[f"v{number}"], f"v{number}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        result = await play(tmp_path / "run", RECIPE, server.url, options={"groups": "25"}, batches=8)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {result.seconds:.0f} s")
    assert result.accounting.in_batch == 200
    assert result.accounting.failed == 0
    assert proof.samples >= 500
    assert len(proof.versions) >= 6
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
        result = await play(tmp_path / "run", RECIPE, server.url, options=options, batches=2)
        tasks.cancel_scope.cancel()
    assert updated == 2
    assert result.accounting.failed == 0
    if mode == "abort":
        proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
        report_line(str(proof))
        assert proof.stops[StopReason.ABORTED] == 0
        assert proof.spanning > 0
    await play(tmp_path / "after", RECIPE, server.url)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "after", weights)
    report_line(f"a run after it: {proof}")
    assert proof.versions == {"v2"}


async def test_a_server_that_is_away_for_90_seconds(
    server: RealServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """A killed server comes back with the weights of its start: requests wait for theirs, and no prompt is lost."""
    endpoint = Endpoint(base_url=server.url)
    await update_weights(endpoint, weights["v1"], "v1")
    away = 0.0

    async def restart() -> None:
        nonlocal away
        await completions(40)
        await anyio.to_thread.run_sync(server.kill)
        began = time.monotonic()
        await anyio.sleep(OUTAGE_SECONDS / 2)  # a machine that reboots: the start alone takes less than the outage
        await anyio.to_thread.run_sync(server.start)
        await anyio.sleep(max(0.0, began + OUTAGE_SECONDS - time.monotonic()))
        assert sum(policy.in_flight for policy in shared_policies()) == 0, "the server has other weights"
        await update_weights(endpoint, weights["v1"], "v1")
        away = time.monotonic() - began

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(restart)
        result = await play(tmp_path / "run", RECIPE, server.url, options={"groups": "20"}, batches=2)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"away for {away:.0f} s; {result.accounting}; {proof}")
    accounting = result.accounting
    assert away >= OUTAGE_SECONDS
    assert (accounting.in_batch, accounting.failed, accounting.dropped) == (40, 0, 0)
    assert accounting.taken == accounting.in_batch + accounting.returned
    assert proof.versions == {"v1"}


async def test_a_killed_client_resumes_on_its_server(
    server: RealServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """SIGKILL, then ``--resume`` without an endpoint: the same server samples, and no law is broken."""
    run, recipe = tmp_path / "run", tmp_path / "load.py"
    recipe.write_text(RECIPE)
    line = [sys.executable, "-m", "rollouts", "run", str(recipe), "--endpoint", server.url, "--model", str(DEMO_MODEL)]
    line += ["--out", str(run), "--format", "jsonl", "--batches", "50", "--no-rehearsal", "--quiet"]
    async with await anyio.open_process(line, cwd=ROOT, stdout=None, stderr=None) as process:
        while not list(run.glob("batches/batch-000001*")):
            assert process.returncode is None
            await anyio.sleep(0.05)
        process.kill()
    result = await play(run, None, None, resume=True, model=None, batches=4)
    proof = await anyio.to_thread.run_sync(proven, run, weights)
    report_line(f"{proof}; {read_info(run)['accounting']}")
    assert result.accounting.failed == 0
    assert result.accounting.in_batch == 40
    assert proof.versions == {"default"}


async def test_prompts_around_the_context(
    server: RealServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """Prompts that fill the context, or all but a few tokens of it, are truncated; no rollout fails."""
    options = {"shortest": "1010", "longest": "1025"}
    result = await play(tmp_path / "run", LONG_PROMPTS, server.url, options=options)
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {dict(proof.stops)}")
    assert result.accounting.failed == 0
    assert proof.stops == {StopReason.CONTEXT_OVERFLOW: 32}


@pytest.mark.parametrize("module", ["sglang_router", "smg"])
async def test_a_fleet_behind_a_router(
    server: RealServer,
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
            result = await play(tmp_path / "run", RECIPE, url, options={"groups": "20"}, batches=3)
        new = await generated(engines[1].url) - before
    proof = await anyio.to_thread.run_sync(proven, tmp_path / "run", weights)
    report_line(f"{proof}; {new} tokens of the new worker; {result.accounting}")
    assert result.accounting.failed == 0
    assert result.accounting.in_batch == 60
    assert new > 0


async def test_the_command_proves_law_8(server: RealServer, weights: dict[str, Path], tmp_path: Path) -> None:
    """``rollouts verify --model`` exits 0 for a run on the real server, and 1 for weights that it did not have."""
    await play(tmp_path / "run", RECIPE, server.url, options={"groups": "5"})
    for folder, code in ((DEMO_MODEL, 0), (weights["v1"], 1)):
        line = ["verify", str(tmp_path / "run"), "--tolerance", str(TOLERANCE), "--model", str(folder)]
        assert await anyio.to_thread.run_sync(main, line) == code
