"""``rollouts up``: a recipe behind HTTP, from the command line to the client, over a kill."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import pytest

from rollouts.commands import up as up_command
from rollouts.engine import DEMO_MODEL
from rollouts.engine.process import READY
from rollouts.errors import ConfigError
from rollouts.runs.info import read_info
from rollouts.runs.verify import verify_run
from rollouts.service import Rollouts, ServiceError
from rollouts.testing.server import StubServer

ROOT = Path(__file__).parents[2]


@contextmanager
def up(out: Path, endpoint: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its URL; killed at the end."""
    line = [sys.executable, "-m", "rollouts", "up", "calculator", "--endpoint", endpoint, "--model", str(DEMO_MODEL)]
    line += ["--set", "batch_size=2", "--set", "n_samples_per_prompt=2", "--batches", "3", "--set", "keep=all"]
    line += ["--out", str(out), "--port", "0", "--stop-with-stdin", *more]
    environment = {**os.environ, "ROLLOUTS_SERVICE_KEY": "secret"}
    with subprocess.Popen(
        line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process, next(text for text in process.stdout if READY in text).removeprefix(READY).strip()
        finally:
            process.kill()


def test_a_chat_api_is_refused(tmp_path: Path) -> None:
    """By name, before anything is served: its rollouts have no ids that a trainer could train."""
    verbs = argparse.ArgumentParser().add_subparsers()
    up_command.add(verbs)
    line = ["calculator", "--out", str(tmp_path / "run"), "--provider", "openai", "--model", "m"]
    for more in ([], ["--workers", "2"], ["--remote-workers", "2"]):
        with pytest.raises(ConfigError, match=r"up --provider openai: .* needs token ids"):
            up_command._up(verbs.choices["up"].parse_args([*line, *more]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--groups-in-work", "6"], r"--groups-in-work: got 6; expected at least 7, 2 \* batch_size - 1"),
        (["--fed", "--set", "epochs=2"], "epochs: got 2; expected None"),
    ],
)
def test_options_that_no_trainer_could_use_are_refused_at_the_start(
    options: list[str], match: str, tmp_path: Path
) -> None:
    """Before a server is asked and a folder exists: fewer groups than a leased batch needs, and counted epochs."""
    verbs = argparse.ArgumentParser().add_subparsers()
    up_command.add(verbs)
    line = [
        "calculator",
        "--out",
        str(tmp_path / "run"),
        "--endpoint",
        "http://127.0.0.1:9",
        "--model",
        str(DEMO_MODEL),
    ]
    line += ["--set", "batch_size=4", "--port", "0", *options]
    with pytest.raises(ConfigError, match=match):
        up_command._up(verbs.choices["up"].parse_args(line))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "workers", [[], ["--workers", "1"], ["--remote-workers", "1"]], ids=["here", "local", "remote"]
)
async def test_a_folder_is_refused_before_anything_is_served(workers: list[str], tmp_path: Path) -> None:
    """No line says where it serves, and no worker is started or waited for."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "batches").mkdir()

    def ended(url: str) -> tuple[int, str, str]:
        line = [sys.executable, "-m", "rollouts", "up", "calculator", "--endpoint", url, "--model", str(DEMO_MODEL)]
        line += ["--out", str(tmp_path), "--port", "0", *workers]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        return done.returncode, done.stdout, done.stderr

    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        code, printed, errors = await anyio.to_thread.run_sync(ended, server.url)
    assert code == 2, errors
    assert READY not in printed
    assert "Traceback" not in errors
    assert "workers" not in errors


async def test_a_report_of_waits_does_not_end_the_service(tmp_path: Path) -> None:
    """SIGUSR1 asks for the report, as of a run; by default it would end the process."""

    def reported(url: str) -> None:
        with up(tmp_path / "run", url) as (process, _):
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            process.communicate(timeout=60)
            assert process.returncode == 0

    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        await anyio.to_thread.run_sync(reported, server.url)


async def test_a_trainer_gets_every_group_once_over_a_kill(tmp_path: Path) -> None:
    """The service is killed with a lease in hand; the same command continues, and the laws hold on its run."""

    def train(url: str) -> None:
        with up(tmp_path / "run", url) as (_, address), Rollouts(address, key="secret") as service:
            first, second = next(service.batches(1)), next(service.batches(1))
            first.ack(step=1)
        seen = [first.groups]
        with up(tmp_path / "run", url) as (process, address):
            with Rollouts(address, key="wrong") as stranger, pytest.raises(ServiceError, match="API key"):
                stranger.state()
            with Rollouts(address, key="secret") as service:
                service.ack(first.token)  # its answer was lost, for all that the trainer knows
                for batch in service.batches(1):
                    batch.ack()
                    seen.append(batch.groups)
                assert service.state()["groups_acknowledged"] == 6
            process.communicate(timeout=60)
            assert process.returncode == 0
        assert second.groups in seen
        assert sorted(seen) == [(number,) for number in sorted({number for (number,) in seen})]
        assert len(seen) == 6

    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        await anyio.to_thread.run_sync(train, server.url)
    assert verify_run(tmp_path / "run").violations == []
    info = read_info(tmp_path / "run")
    assert info["settings"]["reward"]
    assert info["server"]["model"] == str(DEMO_MODEL)


async def test_prompts_of_clients_survive_a_kill(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The service is killed after it answered; the same command plays the prompts and later ones, in their order.

    A client that repeats its request changes nothing.
    """
    if not request.config.getoption("--long"):
        pytest.skip("two processes: with --long; tests/service/test_fed_buffer.py has the law in one")
    rows = [{"prompt": f"What is {number} + 1?", "label": str(number + 1)} for number in range(6)]

    def train(url: str) -> None:
        with up(tmp_path / "run", url, "--fed") as (_, address), Rollouts(address, key="secret") as service:
            assert service.add_prompts("first", rows[:2]) == range(2)
        labels = []
        with up(tmp_path / "run", url, "--fed") as (process, address), Rollouts(address, key="secret") as service:
            assert service.add_prompts("first", rows[:2]) == range(2)
            assert service.add_prompts("second", rows[2:]) == range(2, 6)
            for batch in service.batches(1):
                batch.ack()
                labels += [(sample.group_index, sample.fields["label"]) for sample in batch.samples]
            process.communicate(timeout=60)
            assert process.returncode == 0
        assert labels == [(number, str(number + 1)) for number in range(6) for _ in range(2)]

    async with StubServer(model_info={"model_path": str(DEMO_MODEL), "weight_version": "v1"}) as server:
        await anyio.to_thread.run_sync(train, server.url)
    assert verify_run(tmp_path / "run").violations == []
