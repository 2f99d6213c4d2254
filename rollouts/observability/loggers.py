"""Loggers of a run's batches: Weights & Biases, trackio, TensorBoard, MLflow, or any object with three methods.

Invariant: a logger cannot delay or fail a run. Each has a queue and is called in threads; one that raises, or that does
not answer within a minute, is off for the rest of the run, which is reported on standard error. Only an error of
``begin``, before the first rollout, ends the run. The packages are imported when a run begins; their own environment
variables apply (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, …).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import anyio
import attrs

from rollouts.base.extras import install_command
from rollouts.base.terminal import say
from rollouts.concurrency.boundary import call_foreign
from rollouts.errors import ConfigError, RolloutsError

__all__ = [
    "LoggedRun",
    "MLflowLogger",
    "RunLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "logger_of",
    "logging_to",
]

_SECONDS = 60.0
"""Most seconds of one call of a logger."""
_END_SECONDS = 120.0
"""Most seconds for what is queued when a run ends."""


@attrs.frozen
class LoggedRun:
    """What a logger knows of a run."""

    name: str
    """The name of its folder."""
    id: str
    """Unique; a resumed run has the same."""
    path: Path
    description: Mapping[str, Any] = MappingProxyType({})
    """The content of ``run.json``: recipe, config, endpoint without keys, versions."""
    first_step: int = 0
    """Number of the first batch of this process; larger than 0 in a resumed run."""


@runtime_checkable
class RunLogger(Protocol):
    """Receives the numbers of a run's batches. Methods are called one at a time, in threads."""

    def begin(self, run: LoggedRun) -> None:
        """Called once, before the first rollout."""
        ...

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Called with the metrics of each batch, as in ``metrics.jsonl``, and its number."""
        ...

    def finish(self, status: str) -> None:
        """Called once, with ``finished``, ``stopped`` or ``failed``."""
        ...


def _installed(instance: Any, field: Any, value: Any) -> None:
    """An attrs validator: the module is given, or the logger's package is installed."""
    if value is not None:
        return
    spec = importlib.util.find_spec(instance.package)
    if spec is None or spec.origin is None:  # a folder of that name, such as the one that wandb creates, has none
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
        given = {"project": self.project, "resume": "allow", "config": dict(run.description)}
        self._run = package.init(**given, **identity, **self.options)

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
    """TensorBoard, through tensorboardX. A resumed run writes to the same folder, from its first own batch."""

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


@attrs.define
class Log:
    """The queues of a run's loggers."""

    status: str = "failed"
    """How the run ended; set before the context of :func:`logging_to` ends."""
    _queues: list[Any] = attrs.field(factory=list)

    def batch(self, numbers: Mapping[str, float]) -> None:
        """Queue the metrics of a batch; never waits."""
        for queue in self._queues:
            with contextlib.suppress(anyio.BrokenResourceError):  # this logger is off
                queue.send_nowait((dict(numbers), int(numbers["batch"])))


@contextlib.asynccontextmanager
async def logging_to(loggers: Sequence[RunLogger], run: LoggedRun) -> AsyncIterator[Log]:
    """Begin the loggers, pass them what is given to the :class:`Log`, and finish them.

    Raises:
        RolloutsError: a logger could not begin.
    """
    log, failure = Log(), None
    for number, logger in enumerate(loggers):
        try:
            await _call(logger, "begin", run)
        except RolloutsError:
            for begun in loggers[:number]:
                await _finish(begun, "failed")
            raise
    async with anyio.create_task_group() as tasks, contextlib.AsyncExitStack() as queues:
        for logger in loggers:
            send, receive = anyio.create_memory_object_stream[tuple[Mapping[str, float], int]](math.inf)
            log._queues.append(await queues.enter_async_context(send))
            tasks.start_soon(_feed, logger, receive, log)
        try:
            yield log
        except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
            failure = error
        tasks.cancel_scope.deadline = anyio.current_time() + _END_SECONDS
    if tasks.cancel_scope.cancelled_caught:
        _warn(f"the loggers did not end within {_END_SECONDS:g} s; batches may be missing there, metrics.jsonl has all")
    if failure is not None:
        raise failure


async def _feed(logger: RunLogger, receive: Any, log: Log) -> None:
    """Pass queued batches to a logger until the run ends, then finish it; an error turns the logger off."""
    try:
        with receive:
            async for numbers, step in receive:
                await _call(logger, "log", numbers, step)
    except RolloutsError as error:
        _warn(f"{error}; this logger is off, the run continues")
    await _finish(logger, log.status)


async def _finish(logger: RunLogger, status: str) -> None:
    try:
        await _call(logger, "finish", status)
    except RolloutsError as error:
        _warn(str(error))


async def _call(logger: RunLogger, method: str, *arguments: Any) -> None:
    name = getattr(logger, "name", type(logger).__name__)
    await call_foreign(RolloutsError, f"{name}.{method}", getattr(logger, method), *arguments, seconds=_SECONDS)


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        say(f"rollouts: {text}", file=sys.stderr, flush=True)
