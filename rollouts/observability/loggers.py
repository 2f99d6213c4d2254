"""Loggers of services: Weights & Biases, trackio, TensorBoard, MLflow.

The packages are imported when a run begins; their environment variables apply (``WANDB_MODE``,
``MLFLOW_TRACKING_URI``, …).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError
from rollouts.observability.run_logger import LoggedRun, RunLogger

__all__ = ["MLflowLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger", "logger_of"]


def _installed(instance: Any, field: Any, value: Any) -> None:
    """An attrs validator: the module is set, or the logger's package is installed."""
    if value is not None:
        return
    spec = importlib.util.find_spec(instance.package)
    if spec is None or spec.origin is None:  # a folder of that name, such as ``wandb/``, has no origin
        expected = f"a logger whose package is installed: {install_command(instance.name)}"
        raise ConfigError.of("--log", instance.name, expected)


@attrs.define
class _ProjectLogger:
    """A service with projects, whose package has the interface of wandb."""

    package: ClassVar[str]
    project: str = "rollouts"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of the package's ``init``."""
    module: Any = attrs.field(default=None, validator=_installed, repr=False)
    _run: Any = attrs.field(default=None, init=False, repr=False)

    def _begin(self, run: LoggedRun, **identity: str) -> None:
        package = self.module or importlib.import_module(self.package)
        fixed = {"project": self.project, "resume": "allow", "config": dict(run.description)}
        self._run = package.init(**fixed, **identity, **self.options)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)


@attrs.define
class WandbLogger(_ProjectLogger):
    """Weights & Biases. A resumed run continues its curves."""

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    def begin(self, run: LoggedRun) -> None:
        self._begin(run, name=run.name, id=run.id)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


@attrs.define
class TrackioLogger(_ProjectLogger):
    """trackio. A run is found by its name, which therefore ends with its id; a resumed run continues its curves."""

    name: ClassVar[str] = "trackio"
    package: ClassVar[str] = "trackio"

    def begin(self, run: LoggedRun) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # it prints where its files are; with --json, stdout is for JSON
            self._begin(run, name=f"{run.name}-{run.id}")

    def finish(self, status: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


@attrs.define
class TensorBoardLogger:
    """TensorBoard, through tensorboardX. A resumed run adds its batches in the same folder."""

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboardX"
    folder: str | Path | None = None
    """Default: ``tensorboard`` in the folder of the run."""
    module: Any = attrs.field(default=None, validator=_installed, repr=False)
    _writer: Any = attrs.field(default=None, init=False, repr=False)

    def begin(self, run: LoggedRun) -> None:
        tensorboard = self.module or importlib.import_module(self.package)
        folder = run.path / "tensorboard" if self.folder is None else Path(self.folder)
        suffix = f".from-{run.first_step}"  # the name has only the second, in which a run may be resumed
        self._writer = tensorboard.SummaryWriter(str(folder), purge_step=run.first_step, filename_suffix=suffix)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()


@attrs.define
class MLflowLogger:
    """MLflow. ``run.json`` is an artifact of the run; a resumed run continues its curves."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"
    experiment: str = "rollouts"
    module: Any = attrs.field(default=None, validator=_installed, repr=False)
    _client: Any = attrs.field(default=None, init=False, repr=False)
    _run_id: str = attrs.field(default="", init=False)

    def begin(self, run: LoggedRun) -> None:
        mlflow = self.module or importlib.import_module(self.package)
        self.module = mlflow
        self._client = mlflow.MlflowClient()  # the functions of the module work on a run of their thread
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        same = self._client.search_runs([experiment], f"tags.`{_MLFLOW_ID}` = '{run.id}'", max_results=1)
        if same:
            self._run_id = same[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {_MLFLOW_ID: run.id}
            self._run_id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        self._client.log_dict(self._run_id, dict(run.description), "run.json")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        now, entity = time.time_ns() // 1_000_000, self.module.entities.Metric
        named = {re.sub(r"[^\w.\-/ ]", "_", name): value for name, value in numbers.items()}
        metrics = [entity(name, float(value), now, step) for name, value in named.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: str) -> None:
        ends = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run_id, status=ends[status])


_MLFLOW_ID = "rollouts.id"
_LOGGERS: Mapping[str, Callable[..., RunLogger]] = {
    kind.name: kind for kind in (WandbLogger, TensorBoardLogger, TrackioLogger, MLflowLogger)
}


def logger_of(text: str) -> RunLogger:
    """The logger of ``NAME`` or ``NAME:WHERE``; WHERE is its project or experiment, for TensorBoard its folder.

    Raises:
        ConfigError: no logger has this name, or its package is not installed.
    """
    name, colon, where = text.partition(":")
    if name not in _LOGGERS or (colon and not where):
        names = ", ".join(_LOGGERS)
        raise ConfigError.of("--log", text, f"one of {names}; or one of them with its project, as in wandb:PROJECT")
    return _LOGGERS[name](where) if where else _LOGGERS[name]()
