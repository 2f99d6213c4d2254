"""Bits that changed in the files of a run since they were written, found by the checksums that they carry.

Invariant: one flipped bit anywhere in ``run.json``, in the files of samples and metrics, in the journal or in the
recording is found, with the file and the record that it is in: the line, the row group and column of a Parquet file,
the offset in a journal. Not covered: ``engine.log``, and runs that were written before their files carried checksums;
that is said. This module knows no law of the house.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.errors import JournalError
from rollouts.runs import parquet
from rollouts.runs.checksums import CHECKSUM, is_sound
from rollouts.runs.folder import CHECKED, RECORDING, run_files
from rollouts.runs.journal import read_journal

__all__ = ["find_damage", "is_covered"]

_METRICS = "metrics.jsonl"


def is_covered(info: Mapping[str, Any]) -> bool:
    """Whether the run was written with checksums, by its ``run.json``. Either sign will do: one may be the damaged."""
    return bool(info.get(CHECKED, CHECKSUM in info))


def find_damage(run: Path, *, growing: bool = False) -> Iterator[tuple[str, str]]:
    """Where something is no longer as it was written, and what is found there; of a run :func:`is_covered`.

    Args:
        run: its folder.
        growing: the run goes on or was killed: a last line without its end is being written.

    The run's journal is left to whoever reads it anyway.
    """
    if not is_sound((run / "run.json").read_bytes()):
        yield str(run / "run.json"), "damaged (its checksum does not fit)"
    files = [file for _, file in run_files(run)]
    for file in [*files, *([_METRICS] if (run / _METRICS).is_file() else [])]:
        if file.endswith(".parquet"):
            found = parquet.damage_in(run / file)
            if found is not None:
                yield str(run / file), found
        else:
            yield from _in_lines(run / file, growing=growing and not file.startswith("batches/"))
    if (run / RECORDING).is_dir():
        try:
            for _ in read_journal(run / RECORDING):
                pass
        except JournalError as error:
            yield str(run / RECORDING), str(error)


def _in_lines(path: Path, *, growing: bool) -> Iterator[tuple[str, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if growing and not line.endswith(b"\n"):
                return
            sound = is_sound(line)
            if not sound:
                said = "damaged (its checksum does not fit)" if sound is False else "damaged (it has no checksum)"
                yield f"{path}, line {number}", said
