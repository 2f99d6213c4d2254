"""``rollouts up``: a recipe behind HTTP, from the command line to the client, over a kill."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
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
def up(out: Path, endpoint: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its URL; killed at the end."""
    line = [sys.executable, "-m", "rollouts", "up", "calculator", "--endpoint", endpoint, "--model", str(DEMO_MODEL)]
    line += ["--set", "batch_size=2", "--set", "n_samples_per_prompt=2", "--batches", "3", "--set", "keep=all"]
    line += ["--out", str(out), "--port", "0", "--stop-with-stdin"]
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
