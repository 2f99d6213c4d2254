"""``rollouts curate`` on runs of 10,000 and 1,000,000 rollouts: CPU of a rollout, and peak memory of the process.

Each size is curated in a separate process. The rollouts are of 1,000 tasks with half of the rewards 1, and are all
distinct; 8 of each task are taken. Their rows have 24 tokens, since the time of longer ones is that of reading JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from rollouts.runs.checksums import sealed
from rollouts.runs.layout import CHECKED
from rollouts.training import Sample

__all__ = ["bench_curate", "curate_options"]

_ROWS = 4096
"""Rows of a batch."""
_TASKS = 1000
_TOKENS = 24


def curate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--target", default="tokens", choices=("tokens", "chat", "kto"))


def bench_curate(args: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """One row for each size."""
    rows: list[dict[str, float | int | str]] = []
    for rollouts in args.rollouts:
        with tempfile.TemporaryDirectory() as folder:
            _store(Path(folder) / "run", rollouts)
            command = [sys.executable, "-m", "scripts.benches.curate", str(Path(folder) / "run"), args.target]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = json.loads(done.stdout)
        rows.append({"rollouts": rollouts, **measured, "rollouts a CPU second": rollouts / measured["CPU s"]})
    return rows


def _store(run: Path, rollouts: int) -> None:
    (run / "batches").mkdir(parents=True)
    info = {"status": "finished", CHECKED: True, "batches": -(-rollouts // _ROWS)}
    (run / "run.json").write_bytes(sealed(msgspec.json.encode(info)))
    rng = random.Random(0)
    for number, start in enumerate(range(0, rollouts, _ROWS)):
        with (run / "batches" / f"batch-{number:06d}.jsonl").open("wb") as file:
            for index in range(start, min(start + _ROWS, rollouts)):
                file.write(sealed(msgspec.json.encode(_row(rng, index, number))))


def _row(rng: random.Random, index: int, batch: int) -> dict[str, Any]:
    group = index // 8
    task = group % _TASKS
    tokens = [rng.randrange(30_000) for _ in range(_TOKENS)]
    half = _TOKENS // 2
    sample = Sample(
        f"task {task}", "reply", tokens, [0] * half + [1] * half, label=task, reward=float(rng.random() < 0.5)
    )
    sample.group_index, sample.index, sample.rollout_id, sample.tools = group, index, index, None
    sample.status, sample.messages = "completed", [{"role": "user", "content": f"task {task}"}]
    completion = {"request_id": f"{index:016x}", "start": half, "stop": _TOKENS, "finish_reason": "stop"}
    return {**sample.to_dict(), "completions": [completion], "outcome": "kept", "reason": "", "batch": batch}


def _measure(run: str, target: Any) -> dict[str, float]:
    from rollouts.curation import Selection, curate, write_folder

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        selection = Selection(where="pass_rate in 0.1..0.9", per_task=8)
        account = write_folder(curate(run, target, selection), Path(folder) / "out")
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rows": account.rows, "CPU s": seconds, "peak MB": peak / 1024, "of it imports": before / 1024}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2])))
