"""The content of a view, read from the folder of a run or of an evaluation.

Invariant: groups are read one at a time, and nothing is written. A run may be active: its last lines may be missing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.images import ImageFolder
from rollouts.runs.info import batches_written, read_info
from rollouts.runs.layout import METRICS
from rollouts.runs.reading import check_file, reading
from rollouts.runs.tools import ToolFolder
from rollouts.runs.verify import Report, verify_run
from rollouts.training.evaluation import task_key
from rollouts.training.types import Sample

__all__ = ["Entry", "Source", "open_source"]


@attrs.frozen
class Entry:
    """One group, or the rollouts of one task of an evaluation."""

    number: int
    outcome: str
    """``kept``, ``dropped``, ``failed`` or ``unbatched``; of an evaluation ``sampled`` or ``greedy``."""
    batch: int | None
    reason: str
    """Why it was dropped or failed."""
    samples: list[Sample]


@attrs.frozen
class Source:
    """A run or an evaluation."""

    path: Path
    info: dict[str, Any]
    """The content of ``run.json`` or ``eval.json``."""
    metrics: list[dict[str, Any]]
    """The lines of ``metrics.jsonl``, one for each batch; empty for an evaluation."""
    groups: Callable[[], Iterator[Entry]]
    report: Report | None
    """The verification of a run; ``None`` if it was not asked for."""

    @property
    def growing(self) -> bool:
        return self.info.get("status") == "running"

    @property
    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Name, size and time of change of its files: another stamp means other content."""
        found = []
        for file in sorted(self.path.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # renamed since
                if file.is_file() and file.name != "engine.log" and not file.name.endswith(".writing"):
                    state = file.stat()
                    found.append((str(file.relative_to(self.path)), state.st_size, state.st_mtime_ns))
        return tuple(found)


def open_source(path: str | Path, *, verify: bool = True) -> Source:
    """Open the folder of a run or of an evaluation.

    Args:
        path: the folder.
        verify: also check laws 1 to 5 of a run, which reads all of it once more.

    Raises:
        ConfigError: the folder has neither a run nor an evaluation, or its first file is damaged.
    """
    path = Path(path)
    with reading(path):
        if (path / "eval.json").is_file():
            check_file(path / "eval.json")
            info = _object((path / "eval.json").read_bytes(), path / "eval.json")
            return Source(path, info, [], lambda: _tasks(path), None)
        info = read_info(path)
        metrics = list(itertools.islice(_lines(path / METRICS), batches_written(info)))
        return Source(path, info, metrics, lambda: _groups(path), verify_run(path) if verify else None)


def _groups(path: Path) -> Iterator[Entry]:
    rows = read_rows(path, "all")
    for key, members in itertools.groupby(rows, lambda row: (row.data.get("group_index"), row.outcome, row.file)):
        group = list(members)
        data = group[0].data
        yield Entry(key[0], key[1], data.get("batch"), data.get("reason") or "", [row.sample() for row in group])


def _tasks(path: Path) -> Iterator[Entry]:
    with reading(path):
        yield from _tasks_of(path)


def _tasks_of(path: Path) -> Iterator[Entry]:
    number = 0
    for outcome, name in (("sampled", "rollouts.jsonl"), ("greedy", "greedy.jsonl")):
        tasks: dict[str, list[Sample]] = {}
        for line in _lines(path / name):
            sample = Sample.from_dict(ToolFolder(path).restored(line), ImageFolder(path).load)
            tasks.setdefault(task_key(sample.prompt, sample.label), []).append(sample)
        for samples in tasks.values():
            yield Entry(number, outcome, None, "", samples)
            number += 1


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of lines; a last line that is not whole is left out."""
    if not path.is_file():
        return
    check_file(path)
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield _object(line, path)


def _object(text: bytes, path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: corrupted, not JSON ({error})") from None
