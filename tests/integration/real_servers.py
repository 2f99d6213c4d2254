"""What the tests of real servers share: a server that can be killed, runs on it, and the check of all laws.

``test_sglang.py`` and ``test_vllm.py`` use it with their servers.
"""

from __future__ import annotations

import abc
import io
import os
import re
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import attrs
from rich.console import Console

from rollouts.commands import main
from rollouts.commands.run import launch
from rollouts.commands.target import RunTarget
from rollouts.dtypes import Endpoint, StopReason
from rollouts.inference.shared import shared_policies
from rollouts.inference.weights import update_weights
from rollouts.runs.folder import read_rows
from rollouts.runs.logprobs import LogprobReport, check_logprobs
from rollouts.runs.run import RunResult
from rollouts.runs.verify import verify_run

ROOT = Path(__file__).parents[2]

RECIPE = """
from itertools import islice
from rollouts.environments.calculator import CalculatorEnvironment, calculator_prompts
from rollouts.recipe import agent_recipe
from rollouts.recipes.configs.calculator import exact_answer_reward

def recipe(endpoint, *, groups: int = 10, samples: int = 3, max_new_tokens: int = 64, temperature: float = 1.0):
    prompts = islice(calculator_prompts(0), 400)
    sizes = {"batch_size": groups, "n_samples_per_prompt": samples, "max_turns": 6, "max_new_tokens": max_new_tokens}
    return agent_recipe("load", endpoint, CalculatorEnvironment, prompts, reward_fn=exact_answer_reward, keep="all",
        temperature=temperature, **sizes)
"""


# -- the server -------------------------------------------------------------------------------------------------------


class RealServer(abc.ABC):
    """A server on one port, which can be killed and started again."""

    provider: ClassVar[str]

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
        return Endpoint(provider=self.provider, base_url=self.url, model=str(self.model))

    def is_ready(self) -> bool:
        """Whether it answers that it can serve."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @abc.abstractmethod
    def start(self) -> None:
        """Start it, and return when it is ready."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Wait for the end of the process that was started."""

    def kill(self) -> None:
        """Kill all processes of the server at once, as a machine that is lost."""
        group = re.findall(r"process group (\d+)", self.log.read_text(errors="replace"))[-1]
        os.killpg(int(group), signal.SIGKILL)
        self.stop()


def versions_of(model: Path, root: Path, count: int) -> dict[str, Path]:
    """A model as version ``default``, and ``count`` versions in ``root`` that differ a little."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    folders = {"default": model}
    for number in range(1, count + 1):
        folder = root / f"v{number}"
        shutil.copytree(model, folder)
        torch.manual_seed(number)
        before = load_file(folder / "model.safetensors")
        after = {name: value + 0.003 * torch.randn_like(value) for name, value in before.items()}
        save_file(after, folder / "model.safetensors", {"format": "pt"})
        folders[folder.name] = folder
    return folders


# -- runs -------------------------------------------------------------------------------------------------------------


async def play(
    out: Path, server: RealServer | None, *, text: str = RECIPE, resume: bool = False, **target: Any
) -> RunResult:
    """Run a recipe on a server; ``None`` leaves recipe, server and model to the resumed run."""
    recipe = None
    if server is not None:
        recipe = out.with_suffix(".py")
        await anyio.Path(recipe).write_text(text)
        target = {"urls": (server.url,), "provider": server.provider, "model": str(server.model), **target}
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


async def play_over_updates(
    out: Path, server: RealServer, weights: Mapping[str, Path], every: int, options: Mapping[str, str]
) -> RunResult:
    """Eight batches, and an update to each version, in order, after so many more completions."""

    async def update() -> None:
        for number in range(1, len(weights)):
            await completions(every * number)
            await update_weights(server.endpoint, weights[f"v{number}"], f"v{number}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update)
        result = await play(out, server, options=options, batches=8)
    assert result.accounting.failed == 0
    return result


async def play_over_a_restart(
    out: Path, server: RealServer, weights: Mapping[str, Path], *, down: float = 0.0, away: float = 0.0
) -> tuple[RunResult, float]:
    """Two batches under ``v1``, during which the server is killed and started with the weights of its start.

    Args:
        out: the folder of the run.
        server: is updated to ``v1`` before the run, and when it is back.
        weights: the folders of the versions.
        down: seconds from the kill to the start.
        away: least seconds from the kill to the update.

    Returns:
        The result, and the seconds from the kill until the server had its weights again.
    """
    await update_weights(server.endpoint, weights["v1"], "v1")
    lasted = 0.0

    async def restart() -> None:
        nonlocal lasted
        await completions(40)
        await anyio.to_thread.run_sync(server.kill)
        began = time.monotonic()
        await anyio.sleep(down)
        await anyio.to_thread.run_sync(server.start)
        await anyio.sleep(max(3.0, began + away - time.monotonic()))  # some looks
        assert sum(policy.in_flight for policy in shared_policies()) == 0, "the server has other weights"
        await update_weights(server.endpoint, weights["v1"], "v1")
        lasted = time.monotonic() - began

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(restart)
        result = await play(out, server, options={"groups": "20"}, batches=2)
    accounting = result.accounting
    assert (accounting.in_batch, accounting.failed, accounting.dropped) == (40, 0, 0)
    assert accounting.taken == accounting.in_batch + accounting.returned
    return result, lasted


async def play_over_a_kill(run: Path, server: RealServer) -> RunResult:
    """Four batches: the client is killed in the second, and resumed without an endpoint."""
    recipe = run.with_name("load.py")
    await anyio.Path(recipe).write_text(RECIPE)
    line = [sys.executable, "-m", "rollouts", "run", str(recipe), "--endpoint", server.url]
    line += ["--provider", server.provider, "--model", str(server.model), "--out", str(run), "--format", "jsonl"]
    line += ["--batches", "50", "--no-rehearsal", "--quiet"]
    async with await anyio.open_process(line, cwd=ROOT, stdout=None, stderr=None) as process:
        while not [path async for path in anyio.Path(run).glob("batches/batch-000001*")]:
            assert process.returncode is None
            await anyio.sleep(0.05)
        process.kill()
    result = await play(run, None, resume=True, batches=4)
    assert result.accounting.failed == 0
    assert result.accounting.in_batch == 40
    return result


# -- the laws ---------------------------------------------------------------------------------------------------------


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


def proven(run: Path, models: Mapping[str | None, Path], *, tolerance: float) -> Proof:
    """Check all laws of a run; ``tolerance`` is the largest difference of a logprob."""
    laws = verify_run(run)
    assert laws.ok, [*map(str, laws.violations)]
    report = check_logprobs(run, models, tolerance=tolerance)
    assert report.ok, [*map(str, report.violations)]
    samples = [row.sample() for row in read_rows(run, "all")]
    return Proof(
        len(samples),
        report,
        sum(len({span.version for span in sample.versions}) > 1 for sample in samples),
        Counter(sample.stop_reason for sample in samples),
        sum(len(message.get("tool_calls") or ()) for sample in samples for message in sample.messages),
    )


async def check_the_command(run: Path, weights: Mapping[str, Path], *, tolerance: float) -> None:
    """``rollouts check-run --model`` exits 0 for the weights ``default`` of a run, and 1 for those of ``v1``."""
    for version, code in (("default", 0), ("v1", 1)):
        line = ["verify", str(run), "--tolerance", str(tolerance), "--model", str(weights[version])]
        assert await anyio.to_thread.run_sync(main, line) == code
