"""The embedded engine on a GPU: runs over updates, interruptions, and law 8 in float32 and in bfloat16.

Only ``scripts/test --gpu`` runs these tests. Other kernels have other rounding than a CPU's, and other batches have
other kernels. The wide model has the layers and widths of Qwen3-0.6B, random weights, and the demo model's vocabulary.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from rollouts.commands import main
from rollouts.dtypes import Completion, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.inference.base import CompletionRequest
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.sglang import SGLangPolicy
from tests.integration.real_servers import ROOT, RealServer, play, play_over_updates, proven, versions_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = 2e-4
"""Largest difference of a logprob in float32; on a CPU the tests of the engine have 1e-4."""
START_SECONDS = 120.0

REPLIES = """
from rollouts.environments import CalculatorEnvironment
from rollouts.recipe import agent_recipe

def length(sample):
    return float(len(sample.response))

def recipe(endpoint):
    prompts = [f"What is {number} + 3?" for number in range(640)]
    sizes = {"batch_size": 64, "n_samples_per_prompt": 2, "max_turns": 1, "min_new_tokens": 40, "max_new_tokens": 60}
    return agent_recipe("replies", endpoint, CalculatorEnvironment, prompts, reward_fn=length, keep="all", **sizes)
"""


class EngineServer(RealServer):
    """The embedded engine in its own process."""

    provider = "sglang"

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        super().__init__(Path(sys.executable), model, log)
        self.flags = flags

    def start(self) -> None:
        command = [str(self.python), "-m", "rollouts", "serve", "--port", str(self.port), "--model", str(self.model)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )
        until = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the engine did not start: {self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self.process.wait(60)


def wide_model(folder: Path) -> Path:
    """Write a model of the size of Qwen3-0.6B, in bfloat16, whose tokenizer is the demo model's."""
    import torch
    import transformers

    folder.mkdir()
    for path in DEMO_MODEL.iterdir():
        if path.name not in ("config.json", "model.safetensors", "processor_config.json"):
            shutil.copy(path, folder)
    given = json.loads((DEMO_MODEL / "config.json").read_text())
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=given["vocab_size"], hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        initializer_range=0.05, tie_word_embeddings=False, eos_token_id=given["eos_token_id"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    shutil.copy(DEMO_MODEL / "generation_config.json", folder)
    return folder


def neighbour_of(model: Path, folder: Path) -> Path:
    """Write a model with noise of 0.3 % of the standard deviation of each tensor, in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    torch.manual_seed(1)
    before = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    after = {name: value + 0.003 * value.std() * torch.randn_like(value) for name, value in before.items()}
    save_file(after, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


async def verdict_on(
    run: Path, wide: Path, neighbour: Path, capsys: pytest.CaptureFixture[str], report_line: Callable[[str], None]
) -> tuple[int, float]:
    """The exit code of ``rollouts verify`` on a run in bfloat16, and its slope: 0 for ``wide``, 1 for its neighbour."""
    line = ["verify", str(run), "--dtype", "bfloat16", "--model", f"default={wide}", f"near={neighbour}"]
    code = await anyio.to_thread.run_sync(main, line)
    printed = capsys.readouterr()
    for words in re.findall(r"law 8.*|version 'default'.*|.*slope.*", printed.out):
        report_line(words)
    slope = re.search(r"(\d+) tokens, .*slope towards .*neighbour: (-?[\d.]+) ± ([\d.]+)", printed.out)
    assert slope is not None, printed.out + printed.err
    return code, float(slope[2])


async def check_a_thousand_replies(policy: ServerPolicy, wide: Path, report_line: Callable[[str], None]) -> None:
    """1,024 replies of 128 tokens at a time: the logprobs of 64 of them have rounding and no bias."""
    from rollouts.engine.teacher import Teacher

    prompts = [packed_tokens([(7 * number + at) % 500 for at in range(64)]) for number in range(1024)]
    replies: dict[int, Completion] = {}

    async def call(number: int) -> None:
        sampling = SamplingParams(max_new_tokens=128, min_new_tokens=128, seed=number)
        replies[number] = await policy.complete(CompletionRequest(prompts[number], sampling, session=str(number)))

    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        for number in range(len(prompts)):
            tasks.start_soon(call, number)
    seconds = time.monotonic() - began
    tokens = sum(len(reply.tokens) for reply in replies.values())
    assert tokens == 1024 * 128
    teacher, errors = Teacher(wide, "bfloat16"), []
    for number in range(0, 1024, 16):
        ids = np.concatenate([prompts[number], replies[number].tokens])
        exact = teacher.logprobs(ids, np.arange(64, len(ids)), 1.0, masked=np.ones(128, bool))
        errors.append(replies[number].logprobs - exact)
    error = np.concatenate(errors)
    report_line(
        f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} a second; logprob error: mean"
        f" {np.abs(error).mean():.4f}, signed mean {error.mean():.4f}, largest {np.abs(error).max():.3f}"
    )
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error)) + 0.005
    assert np.abs(error).mean() < 0.1


@pytest.fixture(scope="session")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not request.config.getoption("--gpu"):
        pytest.skip("scripts/test --gpu runs this, on a machine with a GPU")
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="session")
def weights(root: Path) -> dict[str, Path]:
    """The demo model as version ``default``, and three versions that differ a little."""
    return versions_of(DEMO_MODEL, root, 3)


@pytest.fixture(scope="session")
def wide(root: Path) -> Path:
    return wide_model(root / "wide")


@pytest.fixture(scope="session")
def neighbour(wide: Path, root: Path) -> Path:
    return neighbour_of(wide, root / "neighbour")


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[EngineServer]:
    """The demo model in float32."""
    server = EngineServer(DEMO_MODEL, tmp_path / "server.log", "--slots", "128")
    server.start()
    yield server
    server.kill()


def test_the_engine_is_on_the_gpu(server: EngineServer, report_line: Callable[[str], None]) -> None:
    """The server names its device."""
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=10) as response:
        device = json.load(response)["device"]
    report_line(device)
    assert device.startswith("cuda")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_200_groups_over_three_updates(
    server: EngineServer,
    weights: dict[str, Path],
    tmp_path: Path,
    report_line: Callable[[str], None],
    temperature: float,
) -> None:
    """Three retract updates under load: no group fails, and each token fits the weights that it names."""
    options = {"groups": "25", "temperature": str(temperature)}
    result = await play_over_updates(tmp_path / "run", server, weights, 250, options)
    proof = await anyio.to_thread.run_sync(lambda: proven(tmp_path / "run", weights, tolerance=TOLERANCE))
    report_line(f"{proof}; {result.seconds:.0f} s")
    assert result.accounting.in_batch == 200
    assert len(proof.versions) == 4
    assert proof.spanning > 0
    assert proof.tool_calls > 0


async def test_an_interruption_does_not_repeat_random_numbers(server: EngineServer, weights: dict[str, Path]) -> None:
    """With seeds, the token after an interruption repeats the first token as often as under the policy."""
    from rollouts.engine.teacher import Teacher
    from tests.interruptions import check_stops_at_every_split, deviation_of_repeats

    async with SGLangPolicy(server.endpoint) as policy:
        for after, at in (((), 1), ((1,), 1), ((1, 1), 2)):
            deviation = await deviation_of_repeats(
                policy, Teacher(weights["default"], "float32"), 500, after=after, at=at
            )
            assert abs(deviation) < 5, (after, deviation)
        await check_stops_at_every_split(policy)


@pytest.mark.parametrize(("served", "code"), [("own", 0), ("neighbour", 1)])
async def test_neighbouring_weights_are_found_in_bfloat16(
    wide: Path,
    neighbour: Path,
    tmp_path: Path,
    served: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    report_line: Callable[[str], None],
) -> None:
    """A run of 28 layers in bfloat16: one of the right weights passes, one of neighbouring weights is found."""
    model = neighbour if served == "neighbour" else wide
    server = EngineServer(model, tmp_path / "server.log", "--dtype", "bfloat16", "--slots", "128")
    server.start()
    try:
        result = await play(tmp_path / "run", server, text=REPLIES)
    finally:
        server.kill()
    report_line(f"{result.seconds:.1f} s")
    found, slope = await verdict_on(tmp_path / "run", wide, neighbour, capsys, report_line)
    assert abs(slope - code) < 0.3
    assert found == code


async def test_a_thousand_replies_at_a_time(wide: Path, tmp_path: Path, report_line: Callable[[str], None]) -> None:
    """1,024 replies of 128 tokens through 256 slots in bfloat16: their logprobs have rounding and no bias."""
    server = EngineServer(wide, tmp_path / "server.log", "--dtype", "bfloat16", "--slots", "256")
    server.start()
    try:
        async with SGLangPolicy(server.endpoint) as policy:
            await check_a_thousand_replies(policy, wide, report_line)
    finally:
        server.kill()
