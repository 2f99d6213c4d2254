"""The writer of a run's folder (layout: ``layout.py``).

Invariant: each group is stored exactly once. Dropped and failed groups are appended as they settle; accepted ones stay
in memory until their batch is sealed or the run ends, and are then written whole. ``run.json`` and batches appear
complete or not at all. A run has one writer, which locks the folder before it removes the first file and until it
finishes. This module knows no manager, no recipe and no network.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from rollouts import __version__
from rollouts.base.extras import install_command, is_installed
from rollouts.base.storable import to_json
from rollouts.errors import ConfigError
from rollouts.runs.checksums import CHECKSUM, sealed
from rollouts.runs.images import ImageFolder
from rollouts.runs.info import read_info
from rollouts.runs.journal import LOCK
from rollouts.runs.layout import CHECKED, JOURNAL, METRICS, METRICS_CRC, RUN_FILES, batch_name, check_outside, run_files
from rollouts.runs.locks import is_locked, take_lock
from rollouts.runs.tools import ToolFolder, with_named_tools
from rollouts.training.column_digests import column_digests
from rollouts.training.metrics import Accounting
from rollouts.training.types import Group, Outcome, Sample

__all__ = ["Format", "RunStatus", "RunWriter", "append", "check_free", "check_idle", "now", "versions"]

Format: TypeAlias = Literal["jsonl", "parquet", "auto"]
"""File format of batches; ``auto`` is Parquet if pyarrow is installed."""

RunStatus: TypeAlias = Literal["running", "finished", "stopped", "failed"]

PYARROW = "pyarrow"
_LOCK = ".lock"
"""Not in RUN_FILES, which a new run removes: the lock of a removed file excludes no other writer."""

_IDLE = "a run that no other process is writing to"

_PACKAGES = ("anyio", "attrs", "aiohttp", "httptools", "msgspec", "numpy", "transformers", "torch", "pyarrow")


def check_free(path: str | Path, *, overwrite: bool = False) -> None:
    """Check that a run may be written to ``path``.

    Raises:
        ConfigError: ``path`` is a file, contains a run (unless ``overwrite``) or an active run, or lies among the files
            of a run.
    """
    path = Path(path)
    check_outside(path, "--out")
    if path.exists() and not path.is_dir():
        raise ConfigError.of("--out", str(path), "a folder, new or without a run in it; a file is there")
    present = [name for name in RUN_FILES if (path / name).exists()]
    if present and not overwrite:
        raise ConfigError.of(
            "--out", str(path), f"a folder without a run in it; it has {', '.join(present)}. --overwrite replaces it"
        )
    check_idle(path, "--out")


def check_idle(path: str | Path, option: str) -> None:
    """Check that no process writes the files or the journal of the run in a folder.

    Raises:
        ConfigError: a process does; the message names ``option``.
    """
    path = Path(path)
    try:
        written = is_locked(path / _LOCK) or is_locked(path / JOURNAL / LOCK)
    except OSError as error:
        raise ConfigError.of(option, str(path), f"a folder whose locks can be read ({error})") from error
    if written:
        raise ConfigError.of(option, str(path), _IDLE)


class RunWriter:
    """Writer of one run; it locks the folder until :meth:`finish` or until it is garbage-collected.

    Args:
        path: the run's folder; created if missing.
        description: initial fields of ``run.json``: recipe, seed, endpoint, server.
        format: file format of batches.
        overwrite: delete the existing run; other files in the folder stay.

    Raises:
        ConfigError: as :func:`check_free`; the format is unknown, or is Parquet without pyarrow.
    """

    def __init__(
        self,
        path: str | Path,
        description: Mapping[str, Any] | None = None,
        *,
        format: Format = "auto",
        overwrite: bool = False,
    ) -> None:
        if format not in ("jsonl", "parquet", "auto"):
            raise ConfigError.of("--format", format, '"jsonl", "parquet" or "auto"')
        if format == "parquet" and not is_installed(PYARROW):
            raise ConfigError.of("--format", format, f'pyarrow, or "jsonl": {install_command("parquet")}')
        check_free(path, overwrite=overwrite)
        self.path = Path(path)
        self.format = "parquet" if format != "jsonl" and is_installed(PYARROW) else "jsonl"
        self.batches = 0
        self.finished = False
        """Whether :meth:`finish` has written the end of the run."""
        self._lock = threading.RLock()
        self._accepted: dict[int, Group] = {}
        self._images, self._tools = ImageFolder(self.path), ToolFolder(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock("--out")
            for name in RUN_FILES:
                _remove(self.path / name)
            self._images.clear()
            self._tools.clear()
            (self.path / "run.json").touch()
        except OSError as error:
            raise ConfigError.of("--out", str(path), f"a folder that can be written to ({error})") from error
        self._info: dict[str, Any] = {
            "status": "running",
            "started": now(),
            "versions": versions(),
            "format": self.format,
            CHECKED: True,
            **(description or {}),
        }
        self._write_info()

    @classmethod
    def reopen(cls, path: str | Path) -> RunWriter:
        """Open an existing run to continue it.

        Raises:
            ConfigError: there is no run, or another process writes it.
        """
        writer = cls.__new__(cls)
        writer.path = Path(path)
        if (writer.path / "run.json").is_file():  # a folder without a run gets no lock
            writer._take_lock("--resume")
        info = read_info(path)
        writer.format, writer.finished = info.get("format", "jsonl"), False
        writer._lock = threading.RLock()
        writer._accepted = {}
        writer._images, writer._tools = ImageFolder(path), ToolFolder(path)
        writer._info = {CHECKED: False} | {
            name: value for name, value in info.items() if name not in ("error", "ended", CHECKSUM)
        }
        writer.batches = len([file for outcome, file in run_files(path) if outcome == "kept"])
        writer.update(status="running", resumed=info.get("resumed", 0) + 1)
        return writer

    def __repr__(self) -> str:
        return f"<RunWriter {self.path}: {self.batches} batches, {len(self._accepted)} accepted groups in memory>"

    def update(self, **fields: Any) -> None:
        """Set fields of ``run.json``."""
        with self._lock:
            self._info.update(fields)
            self._write_info()

    def log_identity(self) -> tuple[str, dict[str, Any]]:
        """The id of the run at loggers, which a resumed run keeps, and the content of ``run.json``."""
        if "log_id" not in self._info:
            self.update(log_id=uuid.uuid4().hex[:12])
        return self._info["log_id"], msgspec.json.decode(to_json(self._info))

    def on_group(self, group: Group) -> None:
        """Write a settled group, or keep it for its batch; thread-safe."""
        with self._lock:
            if group.outcome == "kept":
                self._accepted[group.group_index] = group
                return
            self._accepted.pop(group.group_index, None)  # accepted before, then dropped as stale
            rows = self._rows(group.samples, group.outcome, group.reason, None)
            append(self.path / f"{group.outcome}.jsonl", map(_line, rows))

    def write_batch(
        self, samples: Sequence[Sample], metrics: Mapping[str, Any], accounting: Accounting | None = None
    ) -> Path:
        """Write a batch and drop its groups from memory. One call at a time.

        Returns:
            The batch's file.
        """
        path = self.write_samples(self.batches, samples)  # outside the lock, so that settling groups do not wait
        with self._lock:
            line = _line(metrics)
            try:
                append(self.path / METRICS, [line])
            except OSError:  # no batch without its line of metrics
                path.unlink()
                raise
            self.batches += 1
            for sample in samples:
                if sample.group_index is not None:
                    self._accepted.pop(sample.group_index, None)
            crc = zlib.crc32(line, self._info.get(METRICS_CRC, 0))
            counts = {} if accounting is None else {"accounting": attrs.asdict(accounting)}
            self.update(**{METRICS_CRC: crc, "batches": self.batches, **counts})
            return path

    def write_samples(self, number: int, samples: Sequence[Sample]) -> Path:
        """Write the file of a batch, and nothing else; returns the file."""
        rows = self._rows(samples, "kept", "", number)
        path = self.path / "batches" / f"{batch_name(number)}.{self.format}"
        path.parent.mkdir(exist_ok=True)
        _write_atomically(path, [_parquet(rows)] if self.format == "parquet" else map(_line, rows))
        return path

    def write_metrics(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Rewrite ``metrics.jsonl`` with the lines of all batches; returns whether it was another file."""
        lines, path = b"".join(map(_line, batches)), self.path / METRICS
        with self._lock:
            changed = bool(lines) and (not path.is_file() or path.read_bytes() != lines)
            _write_atomically(path, [lines])
            self.batches = len(batches)
            self.update(**{METRICS_CRC: zlib.crc32(lines), "batches": self.batches})
        return changed

    def finish(self, status: RunStatus, accounting: Accounting | None = None, *, error: str | None = None) -> None:
        """End the run: write unbatched groups to ``unbatched.jsonl``, finalize ``run.json``, release the lock."""
        with self._lock, contextlib.ExitStack() as stack:
            stack.callback(self._release)
            groups = [self._accepted[number] for number in sorted(self._accepted)]
            samples = [sample for group in groups for sample in group.samples]
            if samples:
                append(self.path / "unbatched.jsonl", map(_line, self._rows(samples, "kept", "in no batch", None)))
            self._accepted.clear()
            self._info |= {
                "status": status,
                "error": error,
                "ended": now(),
                "batches": self.batches,
                "unbatched_groups": len(groups),
            }
            if accounting is not None:
                self._info["accounting"] = attrs.asdict(accounting)
            self._write_info()
            self.finished = True

    def _rows(
        self, samples: Sequence[Sample], outcome: Outcome, reason: str, batch: int | None
    ) -> Iterator[dict[str, Any]]:
        """Yield the row of each sample, behind its images and tools; a row may have eight times the sample's size."""
        for sample in samples:
            self._images.write(sample.named_images)
            self._tools.write(sample.tools)
            yield _row(sample, outcome, reason, batch)

    def _take_lock(self, option: str) -> None:
        lock = take_lock(self.path / _LOCK)
        if lock is None:
            raise ConfigError.of(option, str(self.path), _IDLE)
        self._release = weakref.finalize(self, os.close, lock)

    def _write_info(self) -> None:
        _write_atomically(self.path / "run.json", [sealed(msgspec.json.format(to_json(self._info), indent=2))])


def _row(sample: Sample, outcome: Outcome, reason: str, batch: int | None) -> dict[str, Any]:
    digests = column_digests(sample.token_column, sample.mask_column, sample.logprob_column)
    return {
        **with_named_tools(sample.to_dict()),
        "outcome": outcome,
        "reason": reason,
        "batch": batch,
        "digests": digests,
    }


def now() -> str:
    """The time as ``run.json`` stores it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def versions() -> dict[str, str]:
    """The versions of Python, of this package, and of the installed packages that it uses."""
    found = {"python": platform.python_version(), "rollouts": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _parquet(rows: Iterable[dict[str, Any]]) -> bytes:
    from rollouts.runs import parquet  # here: pyarrow is an extra

    return parquet.encode(rows, to_json)


def _line(row: Mapping[str, Any]) -> bytes:
    return sealed(to_json(row))


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Append all lines, or none if a write fails."""
    with path.open("ab", buffering=0) as file:  # a buffer would write the rest again before a truncation
        end = file.tell()
        try:
            for line in lines:
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def _write_atomically(path: Path, parts: Iterable[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
