"""Loggers of runs: a fake of the protocol, fakes of the packages, and the packages themselves, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest

from rollouts.commands import main
from rollouts.dtypes import Endpoint
from rollouts.environments import CalculatorEnvironment
from rollouts.errors import ConfigError, RolloutsError
from rollouts.observability import MLflowLogger, RunLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from rollouts.observability.loggers import logger_of
from rollouts.observability.run_logger import LoggedRun
from rollouts.recipe import Recipe
from rollouts.runs.info import read_info
from rollouts.runs.run import RunResult, run
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import RunWriter
from rollouts.training import DataBuffer, Prompt, RolloutConfig, Sample
from tests.packages import needing
from tests.stored_runs import some_sample, spread


@attrs.define
class ListLogger:
    """Keeps what it receives; raises where it is asked to."""

    raises_in: str = ""
    run: LoggedRun | None = None
    numbers: dict[int, Mapping[str, float]] = attrs.field(factory=dict)
    status: str = ""
    threads: set[int] = attrs.field(factory=set)

    def _called(self, method: str) -> None:
        self.threads.add(threading.get_ident())
        if method == self.raises_in:
            raise OSError("no network")

    def begin(self, run: LoggedRun) -> None:
        self._called("begin")
        self.run = run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._called("log")
        self.numbers[step] = numbers

    def finish(self, status: str) -> None:
        self._called("finish")
        self.status = status


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    await anyio.lowlevel.checkpoint()
    return [some_sample(prompt, 0) for prompt in prompts]


async def play(path: Path, *loggers: RunLogger, batches: int = 2, epochs: int | None = None) -> RunResult:
    recipe = Recipe(
        name="test",
        config=RolloutConfig(generate_fn=generate, batch_size=3, n_samples_per_prompt=4, filter_fn=spread),
        data_buffer=DataBuffer([f"question {number}" for number in range(8)], epochs=epochs),
        endpoint=Endpoint(),
        tokenizer="none",
        environment_cls=CalculatorEnvironment,
        batches=batches,
    )
    return await run(recipe, RunWriter(path, recipe.describe(), format="jsonl"), loggers=loggers)


def metrics_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "crc32"} for line in lines]


async def test_a_logger_receives_each_batch(tmp_path: Path) -> None:
    """The same numbers as in ``metrics.jsonl``, with the number of the batch; then how the run ended."""
    logger = ListLogger()
    result = await play(tmp_path / "run", logger)
    assert result.status == logger.status == "finished"
    assert [*logger.numbers] == [0, 1]
    assert [*logger.numbers.values()] == metrics_of(tmp_path / "run")
    assert logger.run is not None
    assert (logger.run.name, logger.run.first_step, logger.run.description["recipe"]) == ("run", 0, "test")
    assert verify_run(tmp_path / "run").violations == []


async def test_a_logger_is_not_called_on_the_event_loop(tmp_path: Path) -> None:
    """A slow request of a logger delays no rollout."""
    logger = ListLogger()
    await play(tmp_path / "run", logger)
    assert threading.get_ident() not in logger.threads


async def test_a_logger_learns_of_a_failed_run(tmp_path: Path) -> None:
    """A run whose data are used up ends as failed."""
    logger = ListLogger()
    result = await play(tmp_path / "run", logger, batches=9, epochs=1)
    assert result.error is not None
    assert logger.status == "failed"


async def test_a_logger_that_fails_is_off_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is printed once, with its place; other loggers have every batch."""
    broken, sound = ListLogger("log"), ListLogger()
    result = await play(tmp_path / "run", broken, sound)
    assert result.status == "finished"
    assert [*sound.numbers] == [0, 1]
    assert (broken.numbers, broken.status) == ({}, "failed")
    errors = capsys.readouterr().err
    assert errors.count("ListLogger.log raised OSError: no network") == 1
    assert "this logger is off, the run continues" in errors


async def test_a_logger_that_cannot_begin_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    """The run is stored as failed, with the reason, and a logger that has begun is finished."""
    sound = ListLogger()
    with pytest.raises(RolloutsError, match=r"ListLogger\.begin raised OSError: no network"):
        await play(tmp_path / "run", sound, ListLogger("begin"))
    assert sound.status == "failed"
    info = read_info(tmp_path / "run")
    assert (info["status"], info["accounting"]["taken"]) == ("failed", 0)
    assert "no network" in info["error"]


async def test_a_resumed_run_has_the_same_id(tmp_path: Path) -> None:
    """Loggers continue the curves of the run instead of a second one."""
    first = RunWriter(tmp_path / "run")
    identity, description = first.log_identity()
    assert description["status"] == "running"
    first.finish("stopped")
    assert RunWriter.reopen(tmp_path / "run").log_identity()[0] == identity
    assert RunWriter(tmp_path / "other").log_identity()[0] != identity


class Calls:
    """Records the calls of any method, also of what a method returns."""

    def __init__(self, **known: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Calls:
            self.calls.append((name, arguments, named))
            return self

        return call


A_RUN = LoggedRun("a", "0123", Path("runs/a"), {"recipe": "test"}, 3)


def used(logger: RunLogger) -> None:
    logger.begin(A_RUN)
    logger.log({"reward/mean": 0.5, "environment/a b:c/share": 1.0}, 3)
    logger.finish("failed")


@pytest.mark.parametrize(("kind", "name"), [(WandbLogger, "a"), (TrackioLogger, "a-0123")])
def test_wandb_and_trackio_are_called_as_they_expect(kind: Any, name: str) -> None:
    """One run in the project, which a resumed process continues, with the batch as its step."""
    module = Calls()
    used(kind("some project", {"mode": "offline"}, module))
    (init, log, finish) = module.calls
    assert init[2].items() >= {"project": "some project", "name": name, "resume": "allow", "mode": "offline"}.items()
    assert init[2]["config"] == {"recipe": "test"}
    assert log[1:] == (({"reward/mean": 0.5, "environment/a b:c/share": 1.0},), {"step": 3})
    assert finish[0] == "finish"


def test_tensorboard_is_called_as_it_expects(tmp_path: Path) -> None:
    """Scalars by batch; what an earlier process wrote from this batch on is purged."""
    module = Calls()
    used(TensorBoardLogger(tmp_path, module))
    assert module.calls[0] == ("SummaryWriter", (str(tmp_path),), {"purge_step": 3, "filename_suffix": ".from-3"})
    assert ("add_scalar", ("reward/mean", 0.5, 3), {}) in module.calls
    assert module.calls[-1][0] == "close"


def test_mlflow_is_called_as_it_expects() -> None:
    """A new run with the id as its tag, metrics with names that MLflow allows, and the status of MLflow."""
    client = Calls()
    client.get_experiment_by_name = lambda name: SimpleNamespace(experiment_id="7")
    client.search_runs = lambda experiments, query, max_results: []
    client.info = SimpleNamespace(run_id="r")
    metric = lambda name, value, now, step: (name, value, step)  # noqa: E731
    used(MLflowLogger("e", SimpleNamespace(MlflowClient=lambda: client, entities=SimpleNamespace(Metric=metric))))
    calls = {name: (arguments, named) for name, arguments, named in client.calls}
    assert calls["create_run"] == (("7",), {"tags": {"rollouts.id": "0123"}, "run_name": "a"})
    assert calls["log_batch"][1]["metrics"] == [("reward/mean", 0.5, 3), ("environment/a b_c/share", 1.0, 3)]
    assert calls["set_terminated"] == (("r",), {"status": "FAILED"})


@pytest.mark.parametrize("text", ["nothing", "", "wandb:", ":x"])
def test_an_unknown_logger_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the known ones, before the folder of the run exists."""
    with pytest.raises(ConfigError, match=r"--log: got .*; expected one of wandb, tensorboard, trackio, mlflow"):
        logger_of(text)
    assert main(["run", "calculator", "--out", str(tmp_path / "run"), "--log", text]) == 2
    assert "--log" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


REAL = """
import sys
from pathlib import Path
import anyio
from rollouts.observability.loggers import logger_of
from rollouts.observability.run_logger import LoggedRun, logging_to

async def main():
    for first in (0, 2):
        description = {"recipe": "test", "config": {"batch_size": 3}}
        run = LoggedRun("a", "0123", Path("run"), description, first)
        async with logging_to([logger_of(sys.argv[1])], run) as log:
            for step in (first, first + 1):
                log.batch({"batch": step, "reward/mean": step / 4, "environment/a b:c/share": 1.0})
            log.status = "finished" if first else "stopped"

anyio.run(main)
"""


def wandb_values(folder: Path) -> list[float]:
    """The file is a log as LevelDB's: blocks of 32 KiB, records of a header of 7 bytes and a fragment."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            at += -at % 32768 if 32768 - at % 32768 < 7 else 0
            if kind in (1, 4):
                record = Record.FromString(whole)
                whole = b""
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                found += [json.loads(items["reward/mean"])] if "reward/mean" in items else []
    return found


def tensorboard_values(folder: Path) -> list[float]:
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "run" / "tensorboard").glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            found += [value.simple_value for value in event.summary.value if value.tag == "reward/mean"]
            at += 16 + length
    return found


def trackio_values(folder: Path) -> list[float]:
    import sqlite3

    (path,) = list(folder.glob("trackio/*.db"))
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {row[0] for row in rows} == {"a-0123"}
    return [json.loads(row[2])["reward/mean"] for row in rows]


def mlflow_values(folder: Path) -> list[float]:
    (path,) = folder.glob("mlflow/*/*/metrics/reward/mean")
    (meta,) = folder.glob("mlflow/*/*/meta.yaml")
    assert "status: 3" in meta.read_text()  # finished
    return [float(line.split()[1]) for line in path.read_text().splitlines()]


def offline(folder: Path) -> dict[str, str]:
    own = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    own |= {"MLFLOW_TRACKING_URI": f"file://{folder / 'mlflow'}", "MLFLOW_DISABLE_TELEMETRY": "true"}
    own |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
    return {**os.environ, **own, "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize(
    "package",
    [
        needing("wandb", ("wandb", wandb_values), "wandb"),
        needing("tensorboardX", ("tensorboard", tensorboard_values), "tensorboard"),
        needing("trackio", ("trackio", trackio_values), "trackio"),
        needing("mlflow-skinny", ("mlflow", mlflow_values), "mlflow"),
    ],
)
def test_the_package_stores_what_was_logged(package: tuple[str, Any], tmp_path: Path) -> None:
    """The real package, offline in a separate process: a run and its resumption are one curve of four values."""
    name, values = package
    line = [sys.executable, "-c", REAL, name]
    done = subprocess.run(line, cwd=tmp_path, env=offline(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert values(tmp_path) == [0, 0.25, 0.5, 0.75]
    assert done.stdout == ""
