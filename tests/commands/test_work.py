"""``rollouts work``: a worker from the command line, until SIGTERM; and the examples that start many."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest
import yaml

from rollouts.commands import work
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import READY
from rollouts.service import Rollouts
from rollouts.testing.server import StubServer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "configs" / "deploy"


async def test_a_worker_plays_and_leaves_at_sigterm(tmp_path: Path) -> None:
    """The run is that of the service; the worker's exit code is 0, before it has joined and after."""

    def play(endpoint: str) -> None:
        line = [sys.executable, "-m", "rollouts"]
        up = [*line, "up", "calculator", "--endpoint", endpoint, "--model", str(DEMO_MODEL), "--port", "0"]
        up += ["--set", "batch_size=2", "--set", "n_samples_per_prompt=2", "--set", "keep=all", "--batches", "1"]
        up += ["--out", str(tmp_path / "run"), "--remote-workers", "1:2", "--stop-with-stdin"]
        environment = {**os.environ, "ROLLOUTS_SERVICE_KEY": "secret"}
        with subprocess.Popen(
            up, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as service:
            assert service.stdout is not None
            url = next(text for text in service.stdout if READY in text).removeprefix(READY).strip()
            with (
                subprocess.Popen(
                    [*line, "work", "--join", url], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
                ) as worker,
                Rollouts(url, key="secret") as trainer,
            ):
                assert worker.stderr is not None
                assert worker.stderr.readline() == "worker: joined\n"
                for batch in trainer.batches(1):
                    batch.ack()
                state = trainer.state()
                assert (state["workers"], state["workers_wanted"], state["groups_acknowledged"]) == (1, 1, 2)
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(60) == 0
                assert worker.stderr.readline() == "worker: left\n"
            service.communicate(timeout=60)
            assert service.returncode == 0

    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        await anyio.to_thread.run_sync(play, server.url)


def test_the_commands_of_the_examples_meet_their_parser() -> None:
    """The container's command, and the last line of the job; the shell reads the job's file."""
    verbs = argparse.ArgumentParser().add_subparsers()
    work.add(verbs)
    deployment, scaler = yaml.safe_load_all((DEPLOY / "workers.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    job = DEPLOY / "workers.sbatch"
    last = shlex.split(job.read_text().splitlines()[-1].removeprefix("exec "))
    for command in (container["command"], last):
        assert command[:2] == ["rollouts", "work"]
        assert verbs.choices["work"].parse_args(command[2:]).join
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaler["spec"]["metrics"][0]["external"]["metric"]["name"] == "rollouts_workers_wanted"
    subprocess.run(["bash", "-n", str(job)], check=True)


@pytest.mark.extra
def test_the_deployment_fits_the_schemas_of_kubernetes() -> None:
    """Of the version that the package kubernetes-validate has; a misspelt field is refused."""
    validate = pytest.importorskip("kubernetes_validate")
    for number, document in enumerate(yaml.safe_load_all((DEPLOY / "workers.yaml").read_text())):
        validate.validate(document, validate.latest_version(), strict=True)
        document["spec"]["replica" if number else "selectors"] = 1
        with pytest.raises(validate.ValidationError):
            validate.validate(document, validate.latest_version(), strict=True)
