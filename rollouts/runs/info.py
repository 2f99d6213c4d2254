"""The description of a run, ``run.json``.

Invariant: it is a JSON object of bounded size, or refused; ``damage.py`` compares its checksum. It knows no sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError
from rollouts.runs.checksums import CHECKSUM
from rollouts.runs.reading import check_file, decoded_object, reading

__all__ = ["batches_written", "is_growing", "note_of_calls", "read_info"]

_MAX_INFO = 1 << 24
"""Bytes of ``run.json``: it describes the run, and lists its resumptions."""


def read_info(path: str | Path, argument: str = "run") -> dict[str, Any]:
    """Read ``run.json``; an error names the argument.

    Raises:
        ConfigError: the folder contains no run, or the file is damaged or of another program.
    """
    file = Path(path) / "run.json"
    if not file.is_file():
        raise ConfigError.of(argument, str(path), "the folder of a run, with run.json")
    check_file(file)
    if file.stat().st_size > _MAX_INFO:
        raise ConfigError.of(argument, f"{file} of {file.stat().st_size} bytes", f"at most {_MAX_INFO}")
    with reading(file):
        info = decoded_object(file.read_bytes(), str(file))
        if CHECKSUM not in info and "rollouts" not in info.get("versions", ()):  # every writer stores both
            raise ConfigError.of(argument, str(file), "the run.json of a run, with the version of rollouts")
        return info


def batches_written(info: Mapping[str, Any]) -> int:
    """The number of batches that ``run.json`` counts; each was sealed in the journal, on disk, before it had a file."""
    batches = info.get("batches", 0)
    return batches if isinstance(batches, int) and batches >= 0 else 0


def is_growing(path: str | Path) -> bool:
    """Whether the run is active or was killed; its files may then lag behind its journal."""
    return read_info(path).get("status") == "running"


def note_of_calls(info: Mapping[str, Any]) -> str | None:
    """A sentence about a run whose tool calls were not checked against its chat template; ``None`` for any other."""
    template = (info.get("settings") or {}).get("template") or {}
    if template.get("calls") != "unchecked":
        return None
    return f'tool calls: calls="unchecked", dialect {template.get("dialect")!r} read the replies'
