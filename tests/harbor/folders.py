"""Task folders in Harbor's format for the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["MINIMAL", "write_task"]

MINIMAL: Mapping[str, str] = {
    "task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write 42 to answer.txt.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "if grep -qx 42 answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "echo 42 > answer.txt\n",
}
"""A task with a file as its result; its scripts get a first line and the right to be run."""


def write_task(folder: Path, files: Mapping[str, str | None] | None = None, *, toml: str | None = None) -> Path:
    """Write a task: :data:`MINIMAL` with these files; ``None`` leaves a file out."""
    wanted = {**MINIMAL, **({"task.toml": toml} if toml is not None else {}), **(files or {})}
    for path, text in wanted.items():
        if text is None:
            continue
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        is_script = path.endswith(".sh") and not text.startswith("#!")
        file.write_text(f"#!/bin/bash\n{text}" if is_script else text, encoding="utf-8")
        file.chmod(0o755 if path.endswith(".sh") else 0o644)
    return folder
