"""A service whose workers are Ray tasks and a process: Ray's head is killed, and the run is completed without Ray."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import READY
from rollouts.runs.verify import verify_run
from rollouts.service import Rollouts
from rollouts.testing.server import StubServer
from scripts.faults import service_run

pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

ROOT = Path(__file__).resolve().parents[2]
BATCHES = 40

pytestmark = [pytest.mark.extra, pytest.mark.timeout(600)]

CLUSTER = """
import json, signal, sys
from ray.cluster_utils import Cluster

small = {"object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
cluster.add_node(num_cpus=2, **small)
nodes = [cluster.head_node, *cluster.worker_nodes]
pids = [[one.process.pid for kind in node.all_processes.values() for one in kind] for node in nodes]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its workers take a zombie raylet for a live one
print(json.dumps({"address": cluster.address, "head": pids[0], "node": pids[1]}), flush=True)
sys.stdin.read()
"""
"""A head without room for workers, and a node with room for two."""


@contextlib.contextmanager
def started(*line: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end."""
    with subprocess.Popen([sys.executable, *line], cwd=ROOT, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def a_cluster(stack: contextlib.ExitStack, options: dict[str, Any]) -> dict[str, Any]:
    """Start a cluster; a loaded machine may exceed the 30 s that Ray gives a node (Ray 2.60.0, _private/node.py)."""
    for _ in range(5):
        process = stack.enter_context(started("-c", CLUSTER, **options))
        assert process.stdout is not None
        line = next((text for text in process.stdout if text.startswith("{")), None)
        if line is not None:
            cluster: dict[str, Any] = json.loads(line)
            return cluster
    pytest.fail("Ray did not start")


def killed(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def play_and_kill(folder: Path, endpoint: str) -> tuple[dict[str, Any], list[int]]:
    """The numbers of the service at its end, and the exit codes of the service and of the script with Ray."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLOUTS_SERVICE_KEY": "secret"}
    environment |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "10", "RAY_AUTH_MODE": "disabled"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    up = ["-m", "rollouts", "up", "calculator", "--endpoint", endpoint, "--model", str(DEMO_MODEL), "--port", "0"]
    up += ["--set", "batch_size=3", "--set", "n_samples_per_prompt=2", "--set", "keep=all"]
    up += ["--batches", str(BATCHES), "--out", str(folder / "run"), "--remote-workers", "1:3", "--stop-with-stdin"]
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(started(*up, **pipes))
        assert service.stdout is not None
        url = next(text for text in service.stdout if READY in text).removeprefix(READY).strip()
        stack.enter_context(started("-m", "rollouts", "work", "--join", url, env=environment))
        pids = a_cluster(stack, pipes)
        stack.callback(killed, [*pids["head"], *pids["node"]])
        join = ["configs/deploy/ray_workers.py", "--join", url, "--workers", "2", "--address", pids["address"]]
        script = stack.enter_context(started(*join, env=environment))
        trainer = stack.enter_context(Rollouts(url, key="secret", consumer="trainer"))
        wait_until(lambda: trainer.state().get("workers") == 3, 120, "Ray's workers joined")
        with (folder / "witness").open("a") as witness:

            def note(kind: str, token: int, groups: tuple[int, ...]) -> None:
                witness.write(f"{json.dumps([kind, token, list(groups)])}\n")

            for number, batch in enumerate(trainer.batches(3)):
                if number == 4:
                    killed(pids["head"])
                if number == BATCHES - 4:  # if the rest had come too fast
                    wait_until(lambda: trainer.state()["workers"] == 1, 120, "the workers of Ray ended")
                note("taken", batch.token, batch.groups)
                batch.ack()
                note("acknowledged", batch.token, batch.groups)
        state = trainer.state()
        assert "_raylet" not in Path(f"/proc/{service.pid}/maps").read_text()
        service.communicate(timeout=60)
        return state, [service.returncode, script.wait(60)]


async def test_a_service_outlives_rays_head(tmp_path: Path) -> None:
    """The worker without Ray completes the run; no group is lost, failed, or acknowledged twice.

    Without a word from them, the service gives the rollouts of Ray's workers away.
    """

    async def second(request: Any) -> None:
        await anyio.sleep(0.6)

    info = {"model_path": str(DEMO_MODEL), "weight_version": "v1"}
    async with StubServer(model_info=info, latency=second) as server:
        state, codes = await anyio.to_thread.run_sync(functools.partial(play_and_kill, tmp_path, server.url))
    assert (state["workers"], state["groups_acknowledged"]) == (1, 3 * BATCHES)
    assert codes == [0, 1], "the service ended at its end of input, the script by the loss of Ray's head"
    assert service_run.check(tmp_path) == []
    assert verify_run(tmp_path / "run").violations == []
