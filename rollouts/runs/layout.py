"""The layout of a run's folder: the names of its files, and which of them exist.

    run.json          recipe, config, endpoint, versions; status and accounting
    batches/          accepted groups, one file a batch: batch-000000.jsonl or .parquet
    dropped.jsonl     groups that the filter rejected
    failed.jsonl      groups lost to a failure
    unbatched.jsonl   accepted groups that were in no batch when the run stopped
    metrics.jsonl     one line a batch
    journal/          the append-only log from which a stopped or killed run resumes
    recording/        server replies and environment results of a run with --record, for replay
    images/           the images that samples, turns and recordings name, <sha256>.png, each once
    leases.log        acknowledgements of a run whose groups are leased; prompts.log: the prompts of its clients
    tools/            the tools that samples name, <sha256>.json, each list of schemas once

This module writes none of them, and reads no content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from rollouts.errors import ConfigError
from rollouts.runs.images import IMAGES
from rollouts.runs.reading import check_file, reading
from rollouts.runs.tools import TOOLS

__all__ = [
    "CHECKED",
    "JOURNAL",
    "METRICS",
    "METRICS_CRC",
    "OUTCOMES",
    "RECORDING",
    "RUN_FILES",
    "StoredOutcome",
    "Which",
    "batch_name",
    "check_files",
    "check_output",
    "check_outside",
    "run_files",
]

StoredOutcome: TypeAlias = Literal["kept", "dropped", "failed", "unbatched"]
"""Which files contain a group: ``kept`` the batches, else the file of that name."""

Which: TypeAlias = StoredOutcome | Literal["all"]

RUN_FILES = (
    "run.json",
    "batches",
    "dropped.jsonl",
    "failed.jsonl",
    "unbatched.jsonl",
    "metrics.jsonl",
    "journal",
    "recording",
    "leases.log",
    "prompts.log",
)
"""Files and folders of a run but its images; any of them makes a folder a run."""

JOURNAL = "journal"
METRICS = "metrics.jsonl"
METRICS_CRC = "metrics_crc32"
"""The entry of ``run.json`` with the CRC-32 of the lines of ``metrics.jsonl``, one for each batch."""
RECORDING = "recording"

CHECKED = "checksums"
"""The entry of ``run.json`` that is true if every file of the run has checksums."""

OUTCOMES: tuple[StoredOutcome, ...] = ("kept", "dropped", "failed", "unbatched")
"""In the order of :func:`run_files`."""


def check_outside(path: str | Path, option: str) -> None:
    """Check that writing to ``path`` overwrites no file of a run.

    Raises:
        ConfigError: it is a file of a run, or lies in one of its folders; the message names ``option``.
    """
    whole = Path(path).resolve()
    for run in whole.parents:
        if whole.relative_to(run).parts[0] in (*RUN_FILES, IMAGES, TOOLS) and (run / "run.json").is_file():
            raise ConfigError.of(option, str(path), f"a place outside the files of the run in {str(run)!r}")


def check_output(path: str | Path, option: str, *, overwrite: bool) -> None:
    """Check that a file may be written to ``path``.

    Raises:
        ConfigError: it lies among the files of a run, is a folder, or exists and ``overwrite`` is false; the message
            names ``option``.
    """
    check_outside(path, option)
    if Path(path).is_dir():
        raise ConfigError.of(option, str(path), "a file; a folder is there")
    if Path(path).exists() and not overwrite:
        raise ConfigError.of(option, str(path), "a file that does not exist. --overwrite replaces it")


def batch_name(number: int) -> str:
    """The name of a batch's file, without its suffix."""
    return f"batch-{number:06d}"


def run_files(path: str | Path, *, growing: bool = False) -> list[tuple[StoredOutcome, str]]:
    """The existing sample files as ``(outcome, name relative to the run)``; batches first, in order.

    Without ``unbatched.jsonl`` if the run is growing: it died at its end, and the journal has the groups.

    Raises:
        ConfigError: as :func:`check_files`.
    """
    path = Path(path)
    check_files(path)
    batches = sorted((path / "batches").glob("batch-*"))
    files: list[tuple[StoredOutcome, str]] = [
        ("kept", f"batches/{file.name}") for file in batches if file.suffix in (".jsonl", ".parquet")
    ]
    appended = OUTCOMES[1:3] if growing else OUTCOMES[1:]
    return files + [(name, f"{name}.jsonl") for name in appended if (path / f"{name}.jsonl").exists()]


def check_files(path: Path) -> None:
    """Check that every file of a run but its images may be opened; a folder in the place of a file is found later.

    Raises:
        ConfigError: one of them is a FIFO, a socket, a device or a sparse file, or a link leads nowhere.
    """
    with reading(path):
        names = ("run.json", METRICS, *(f"{name}.jsonl" for name in OUTCOMES[1:]))
        folders = (path / name for name in ("batches", JOURNAL, RECORDING))
        files = [*(path / name for name in names), *(file for folder in folders for file in folder.glob("[!.]*"))]
        for file in files:
            if os.path.lexists(file) and not file.is_dir():
                check_file(file)
