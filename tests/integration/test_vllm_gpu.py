"""The real vLLM server on a GPU: the demo model in float32, and the wide model of ``test_gpu.py`` in bfloat16.

``ROLLOUTS_VLLM_PYTHON=PYTHON scripts/test --gpu`` runs these tests too; ``PYTHON`` is an interpreter that has vLLM. The
tests of ``test_vllm.py`` run here on the server with the demo model. ``ROLLOUTS_VLLM_FLAGS`` are further flags of both
servers, such as ``--enforce-eager`` or ``--attention-backend TRITON_ATTN``. Triton multiplies float32 with 10 bits of
mantissa by default, which law 8 would find: the servers here have ``TRITON_F32_DEFAULT=ieee``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from rollouts.commands import main
from rollouts.engine import DEMO_MODEL
from rollouts.inference.vllm import VLLMPolicy
from rollouts.inference.weights import update_weights
from scripts.servers.vllm_server import ENVIRONMENT
from scripts.servers.widened_model import widen
from tests.integration.real_servers import play, versions_of
from tests.integration.test_gpu import REPLIES, check_a_thousand_replies, neighbour_of, verdict_on, wide_model
from tests.integration.test_vllm import (
    VLLMServer,
    test_200_groups_over_three_updates,
    test_a_stop_string_may_span_an_interruption,
    test_an_interruption_does_not_repeat_random_numbers,
    test_greedy_replies_are_those_of_the_embedded_engine,
    test_interrupted_replies_go_on,
    test_other_updates,
    test_prompts_around_the_context,
    test_the_command_proves_law_8,
    test_the_server_conforms,
    test_truncation_is_refused_where_it_renormalises,
)

__all__ = [
    "test_200_groups_over_three_updates",
    "test_a_stop_string_may_span_an_interruption",
    "test_an_interruption_does_not_repeat_random_numbers",
    "test_greedy_replies_are_those_of_the_embedded_engine",
    "test_interrupted_replies_go_on",
    "test_other_updates",
    "test_prompts_around_the_context",
    "test_the_command_proves_law_8",
    "test_the_server_conforms",
    "test_truncation_is_refused_where_it_renormalises",
]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(140)]

HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


class GPUServer(VLLMServer):
    """vLLM in its own process group, on a GPU with another server: it takes a fixed part of the memory."""

    start_seconds = 100.0
    tolerance = 2e-4

    def command(self) -> list[str]:
        command = ["setsid", str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--served-model-name",
            "served",
            "--enable-scale-out",
        ]
        command += ["--enable-prompt-tokens-details", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "256"]
        command += ["--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "8G", *self.flags]
        return [*command, *shlex.split(os.environ.get("ROLLOUTS_VLLM_FLAGS", ""))]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **ENVIRONMENT, "TRITON_F32_DEFAULT": "ieee"}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.stop()


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> Path:
    """An interpreter that has vLLM."""
    if not request.config.getoption("--gpu"):
        pytest.skip("scripts/test --gpu runs this, on a machine with a GPU")
    named = os.environ.get("ROLLOUTS_VLLM_PYTHON")
    if not named:
        pytest.skip("ROLLOUTS_VLLM_PYTHON names no interpreter")
    if subprocess.run([named, "-c", HAS_VLLM]).returncode:
        pytest.skip(f"{named}, which ROLLOUTS_VLLM_PYTHON names, has no vLLM")
    return Path(named)


@pytest.fixture(scope="session")
def root(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="session")
def weights(root: Path) -> dict[str, Path]:
    """The demo model as version ``default``, and three versions that differ a little."""
    widen(DEMO_MODEL, root / "default")
    return versions_of(root / "default", root, 3)


@pytest.fixture(scope="session")
def wide(root: Path) -> Path:
    return wide_model(root / "wide")


@pytest.fixture(scope="session")
def neighbour(wide: Path, root: Path) -> Path:
    return neighbour_of(wide, root / "neighbour")


@pytest.fixture(scope="session")
def launched(
    python: Path, weights: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[tuple[GPUServer, GPUServer]]:
    """Both servers, in float32 and in bfloat16, which start at the same time."""
    logs = Path(os.environ.get("ROLLOUTS_VLLM_LOGS", weights["default"].parent))
    servers = []

    def launch(model: Path, dtype: str) -> GPUServer:
        servers.append(GPUServer(python, model, logs / f"vllm-{dtype}.log"))
        servers[-1].flags = ["--dtype", dtype]
        servers[-1].launch()
        return servers[-1]

    try:
        yield launch(weights["default"], "float32"), launch(request.getfixturevalue("wide"), "bfloat16")
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="session")
def running(launched: tuple[GPUServer, GPUServer]) -> GPUServer:
    launched[0].wait()
    return launched[0]


@pytest.fixture(scope="session")
def running_wide(launched: tuple[GPUServer, GPUServer]) -> GPUServer:
    launched[1].wait()
    return launched[1]


@pytest.fixture
async def wide_server(running_wide: GPUServer, wide: Path) -> GPUServer:
    """The server with the wide model's weights, under the name that they have at its start."""
    assert running_wide.process.poll() is None, "the server has ended"
    await update_weights(running_wide.endpoint, wide, "default")
    return running_wide


@pytest.fixture
async def server(running: GPUServer, weights: dict[str, Path]) -> GPUServer:
    """The server with the demo model's weights, under the name that they have at its start."""
    assert running.process.poll() is None, "the server has ended"
    await update_weights(running.endpoint, weights["default"], "default")
    return running


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_server_passes(
    dtype: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], report_line: Callable[[str], None]
) -> None:
    """``rollouts check-server`` finds every point on which a run relies."""
    server: GPUServer = request.getfixturevalue("running" if dtype == "float32" else "running_wide")
    line = ["check-server", "--endpoint", server.url, "--provider", "vllm"]
    code = main(line)
    printed = capsys.readouterr()
    for words in printed.out.splitlines():
        report_line(words)
    assert code == 0, printed.err


async def test_200_groups_of_eight_at_once(
    server: GPUServer, weights: dict[str, Path], tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    """1,600 episodes with tools in one batch: no group fails, and each logprob is that of a forward pass."""
    result = await play(tmp_path / "run", server, options={"groups": "200", "samples": "8"})
    proof = await anyio.to_thread.run_sync(server.proven, tmp_path / "run", weights)
    tokens = sum(version.tokens for version in proof.report.versions)
    report_line(f"{proof}; {result.seconds:.1f} s, {tokens / result.seconds:,.0f} tokens a second")
    assert (result.accounting.in_batch, result.accounting.failed) == (200, 0)
    assert proof.samples >= 1600  # with those of groups that ended after the batch was full
    assert proof.tool_calls > 0


@pytest.mark.parametrize(("served", "code"), [("own", 0), ("neighbour", 1)])
async def test_an_update_to_neighbouring_weights_is_found_in_bfloat16(
    wide_server: GPUServer,
    wide: Path,
    neighbour: Path,
    tmp_path: Path,
    served: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    report_line: Callable[[str], None],
) -> None:
    """28 layers in bfloat16: a run passes; one after an update to neighbouring weights of the same name is found."""
    if served == "neighbour":
        await update_weights(wide_server.endpoint, neighbour, "default")
    result = await play(tmp_path / "run", wide_server, text=REPLIES)
    report_line(f"{result.seconds:.1f} s")
    found, slope = await verdict_on(tmp_path / "run", wide, neighbour, capsys, report_line)
    assert abs(slope - code) < 0.3
    assert found == code


async def test_a_thousand_replies_at_a_time(
    wide_server: GPUServer, wide: Path, report_line: Callable[[str], None]
) -> None:
    """1,024 replies of 128 tokens in bfloat16: their logprobs have rounding and no bias."""
    async with VLLMPolicy(wide_server.endpoint) as policy:
        await check_a_thousand_replies(policy, wide, report_line)
