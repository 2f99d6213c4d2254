"""The tasks of all environments as rows for slime and ``rollouts run``.

Invariant: for the same tasks and seed the rows are those of the kit, unless weights are set.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rollouts.environments.ors import spec_digest
from rollouts.errors import ConfigError
from rollouts.recipes.environments.openreward.config import KitSettings

__all__ = ["prepare_tasks"]


async def prepare_tasks(settings: KitSettings, *, max_tasks: int | None = None, seed: int = 42) -> list[dict[str, str]]:
    """Fetch the tasks: rows with ``prompt``, ``label`` and ``metadata`` (JSON as text), shuffled.

    Raises:
        ConfigError: a missing split or key.
        EnvironmentFailure: an unreachable or failing server.
    """
    rng = random.Random(seed)
    rows: dict[str, list[dict[str, str]]] = {}
    for name, entry in settings.environments.items():
        server = settings.server(name)
        found = rows[name] = []
        try:
            for split in entry.splits:
                specs = await server.task_specs(split, limit=entry.num_samples or max_tasks, rng=rng)
                found += [_row(name, await server.name(), split, spec) for spec in specs]
        finally:
            await server.aclose()
        if not found:
            raise ConfigError.of(f"tasks of {name}", 0, "at least one")
    mixed = _weighted(rows, settings)
    rng.shuffle(mixed)
    return mixed


def write_tasks(rows: list[dict[str, str]], path: Path) -> None:
    """Write one row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(name: str, environment: str, split: str, spec: Any) -> dict[str, str]:
    namespace, _, server = name.rpartition("/")
    digest = spec_digest(spec)
    metadata = {
        "env_name": name,
        "deployment_name": name,
        "server_name": server,
        "environment_name": environment,
        "namespace": namespace or None,
        "split": split,
        "task_spec": spec,
        "task_hash": digest,
    }
    return {"prompt": f"[{name}:{split}:{digest}]", "label": "", "metadata": json.dumps(metadata)}


def _weighted(rows: dict[str, list[dict[str, str]]], settings: KitSettings) -> list[dict[str, str]]:
    """All rows. With weights: the same number in these shares, with repeated rows where there are too few."""
    weights = {name: settings.of(name).weight for name in rows}
    if all(weight is None for weight in weights.values()):
        return [row for found in rows.values() for row in found]
    total = sum(len(found) for found in rows.values())
    shares = {name: 1.0 if weight is None else weight for name, weight in weights.items()}
    whole = sum(shares.values())
    mixed: list[dict[str, str]] = []
    for name, found in rows.items():
        wanted = max(1, round(total * shares[name] / whole))
        mixed += [found[number % len(found)] for number in range(wanted)]
    return mixed
