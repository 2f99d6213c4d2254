"""Let workers of a service join and leave over HTTP, and count what it costs.

The processes are those of :mod:`scripts.faults.service_run`; a worker plays four rollouts of a second at once, and a
rollout has one attempt. First one worker plays alone, then a second one joins, and the acknowledged groups a second are
compared. Then, ten times a minute, a worker joins and an earlier one gets SIGTERM. At the end the run is completed, and
its files are read by our own reader. Exits with 1 if a group was lost, doubled or failed, if a worker did not end with
0, or if the second worker did not multiply the rate by 1.8.

    python -m scripts.faults.joins_run --minutes 10
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import attrs

from rollouts.dtypes import Prompt
from rollouts.training import RolloutConfig, Sample
from scripts.faults import service_run

_AT_ONCE, _SECONDS = 4, 1.0
_A_MINUTE = 10
_LONGEST_LEAVE = 60.0


def _config() -> RolloutConfig:
    limit = anyio.CapacityLimiter(_AT_ONCE)

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        async with limit:
            await anyio.sleep(_SECONDS)
        return await service_run.generate(prompts)

    whole = RolloutConfig(batch_size=6, n_samples_per_prompt=2, generate_fn=generate, max_attempts=1)
    return attrs.evolve(whole, over_sampling_factor=3.0, in_flight=24)


def _acknowledged(folder: Path) -> int:
    """Groups that the trainer acknowledged so far."""
    witness = folder / "witness"
    lines = witness.read_text().splitlines() if witness.exists() else []
    return sum(len(json.loads(line)[2]) for line in lines if line.startswith('["acknowledged"') and line.endswith("]"))


def _rate(folder: Path, seconds: float) -> float:
    before, began = _acknowledged(folder), time.monotonic()
    time.sleep(seconds)
    return (_acknowledged(folder) - before) / (time.monotonic() - began)


def _leave(crew: service_run.Crew, name: str) -> int:
    """Send SIGTERM to a worker and wait; returns its exit code, -1 if it does not end."""
    pid = crew.pids.pop(name)
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _LONGEST_LEAVE
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of joins and leaves (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args()
    dice, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="rollouts-joins-"))
    crew = service_run.Crew(folder, 1_000_000, config=_config, silent_seconds=30.0)
    workers = [f"worker {number}" for number in range(1, 5)]
    codes: list[int] = []
    try:
        for name in ("service", workers[0], "trainer"):
            crew.start(name)
        while _acknowledged(folder) < 12:
            time.sleep(0.1)
        alone = _rate(folder, options.seconds)
        crew.start(workers[1])
        time.sleep(10)
        both = _rate(folder, options.seconds)
        print(f"{alone:.2f} groups a second, {both:.2f} from 10 s after a worker joined: {both / alone:.2f} x")
        crew.start(workers[2])
        time.sleep(10)
        began = time.monotonic()
        while time.monotonic() < began + 60 * options.minutes:
            earlier = [name for name in workers if name in crew.pids]
            crew.start(next(name for name in workers if name not in crew.pids))
            codes.append(_leave(crew, dice.choice(earlier)))
            time.sleep(max(0.0, began + len(codes) * 60 / _A_MINUTE - time.monotonic()))
        print(f"{len(codes)} joins and leaves in {options.minutes:g} minutes; exit codes {sorted(set(codes))}")
        print(f"the trainer ended with {crew.complete()}")
    finally:
        for name in list(crew.pids):
            crew.kill(name)
    found = service_run.check(folder)
    found += [f"a worker ended with {code} after SIGTERM" for code in codes if code != 0]
    found += [f"a second worker multiplied the rate by {both / alone:.2f} only"] if both < 1.8 * alone else []
    print("\n".join(found) or f"0 groups lost, failed, or acknowledged twice ({folder})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
