"""A stored run as slime's debug data, for ``--load-debug-rollout-data`` and ``--load-forge-rollout-data``.

Invariant: a file contains one batch of the run, flat, in the run's order; every sample can be trained on, and slime's
``Sample.from_dict`` reads it. A run of several batches becomes several files, numbered by slime's ``rollout_id``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.base.extras import imported
from rollouts.errors import ConfigError
from rollouts.integrations.slime.convert import to_slime
from rollouts.runs.export import replacing
from rollouts.runs.folder import read_rows
from rollouts.runs.layout import check_output, run_files
from rollouts.training.rows import check_temperature
from rollouts.training.types import Sample

__all__ = ["export_run", "write_debug_data"]


def export_run(
    run: str | Path, out: str | Path, *, overwrite: bool = False, temperature: float | None = None
) -> list[Path]:
    """Write the batches of a run; return the paths of the files.

    Args:
        out: the file. With ``{rollout_id}`` in it, one file per batch, and one batch at a time in memory; else one file
            with all batches, all in memory.
        temperature: slime's ``--rollout-temperature``, by which its trainer divides logits.

    Raises:
        ConfigError: as :func:`write_debug_data`; no run, no batch, or ``out`` exists or is among the files of a run.
    """
    template = str(out)
    batch_count = sum(outcome == "kept" for outcome, _ in run_files(run))
    for number in range(max(1, batch_count)):
        check_output(template.replace("{rollout_id}", str(number)), "OUT", overwrite=overwrite)
    paths = []
    rows = read_rows(run, "kept")
    one_file = "{rollout_id}" not in template
    for number, batch in itertools.groupby(rows, lambda row: 0 if one_file else row.data.get("batch") or 0):
        path, samples = Path(template.replace("{rollout_id}", str(number))), [row.sample() for row in batch]
        paths.append(write_debug_data(samples, path, rollout_id=number, temperature=temperature))
    if not paths:
        raise ConfigError.of("run", str(run), "a run with at least one batch")
    return paths


def write_debug_data(
    samples: Sequence[Sample], path: Path, *, rollout_id: int = 0, temperature: float | None = None
) -> Path:
    """Write one file atomically.

    Raises:
        ConfigError: a sample cannot be trained on, or was sampled at another temperature, or torch is not installed.
    """
    for sample in samples:
        check_temperature(sample, "slime", temperature)
    torch = imported("torch", "torch", "engine")
    rows: list[dict[str, Any]] = [to_slime(sample).to_dict() for sample in samples]
    with replacing(path) as temporary:
        torch.save({"rollout_id": rollout_id, "samples": rows}, temporary)
    return path
