"""A stored run as slime's debug data: what ``--load-debug-rollout-data`` and ``--load-forge-rollout-data`` read.

Invariant: one file holds one batch of the run, flat, in the run's order; every sample in it can be trained on, and
``Sample.from_dict`` of slime reads it. A run of several batches becomes several files, numbered as slime numbers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError
from rollouts.integrations.slime.convert import to_slime
from rollouts.training.run_folder import read_rows
from rollouts.training.types import Sample

__all__ = ["export_run", "write_debug_data"]


def export_run(run: str | Path, out: str | Path) -> list[Path]:
    """Write the batches of a run.

    Args:
        run: the run's folder.
        out: the file; with ``{rollout_id}`` in it, one file for each batch, else all batches go into the one.

    Returns:
        The files.

    Raises:
        ConfigError: no run there, no batch in it, a sample that cannot be trained on, or torch is not installed.
    """
    batches: dict[int, list[Sample]] = {}
    for row in read_rows(run, "kept"):
        number = row.data.get("batch")
        batches.setdefault(0 if number is None else int(number), []).append(row.sample())
    if not batches:
        raise ConfigError.of("run", str(run), "a run with at least one batch")
    template = str(out)
    if "{rollout_id}" not in template:
        whole = [sample for number in sorted(batches) for sample in batches[number]]
        return [write_debug_data(whole, Path(template))]
    return [
        write_debug_data(batches[number], Path(template.format(rollout_id=number)), rollout_id=number)
        for number in sorted(batches)
    ]


def write_debug_data(samples: Sequence[Sample], path: Path, *, rollout_id: int = 0) -> Path:
    """Write one file, whole or not at all.

    Raises:
        ConfigError: a sample that cannot be trained on, or torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError.of("export", "no torch", 'torch installed: pip install "rollouts[engine]"') from None
    rows: list[dict[str, Any]] = [to_slime(sample).to_dict() for sample in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    torch.save({"rollout_id": rollout_id, "samples": rows}, temporary)
    temporary.replace(path)
    return path
