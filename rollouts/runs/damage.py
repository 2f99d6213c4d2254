"""Detection of changed bits in the files of a run, by their checksums.

Invariant: one flipped bit anywhere in ``run.json``, in the files of samples and metrics, in the journal or in the
recording is found and located: by line, by row group and column of a Parquet file, or by offset in a journal. Not
covered: ``engine.log``, and runs whose files have no checksums (:func:`is_covered`). This module checks no law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.errors import JournalError
from rollouts.runs import parquet
from rollouts.runs.checksums import CHECKSUM, is_sound
from rollouts.runs.folder import lines_of
from rollouts.runs.journal import JournalReader
from rollouts.runs.layout import CHECKED, METRICS, RECORDING, run_files

__all__ = ["find_damage", "is_covered"]


def is_covered(info: Mapping[str, Any]) -> bool:
    """Whether ``run.json`` shows that the run has checksums. Either of two marks suffices, as one may be damaged."""
    return bool(info.get(CHECKED, CHECKSUM in info))


def find_damage(run: Path, *, growing: bool = False) -> Iterator[tuple[str, str]]:
    """Yield ``(location, description)`` for each damaged record of a run that :func:`is_covered`.

    The run's journal is not read: the caller reads it, and its reader checks every record.

    Args:
        run: the run's folder.
        growing: the run is active or was killed; unfinished appends and a torn tail of the recording are not damage.
    """
    if not is_sound((run / "run.json").read_bytes()):
        yield str(run / "run.json"), "damaged (its checksum does not fit)"
    files = [file for _, file in run_files(run, growing=growing)]
    for file in [*files, *([METRICS] if (run / METRICS).is_file() else [])]:
        if (run / file).is_dir():
            yield str(run / file), "a folder"
        elif file.endswith(".parquet"):
            damage = parquet.damage_in(run / file)
            if damage is not None:
                yield str(run / file), damage
        else:
            yield from _in_lines(run / file, growing=growing and not file.startswith("batches/"))
    if (run / RECORDING).is_dir():
        try:
            for _ in JournalReader(run / RECORDING, 0 if growing else None):
                pass
        except JournalError as error:
            yield str(run / RECORDING), str(error)


def _in_lines(path: Path, *, growing: bool) -> Iterator[tuple[str, str]]:
    for number, _, line in lines_of(path, growing=growing):
        sound = is_sound(line)
        if not sound:
            reason = "its checksum does not fit" if sound is False else "it has no checksum"
            yield f"{path}, line {number}", f"damaged ({reason})"
