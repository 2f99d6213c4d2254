"""Kill service, workers and trainer of a run over HTTP with SIGKILL at random moments, and count groups in the files.

Four processes are forked from this one: a service (leases over a journal, workers that join), two workers and a trainer
that takes two groups, acknowledges them, and writes both to its own file. After a random time, or when the log of
leases grows, i.e. between the fsync of an acknowledgement and its answer, one of them is killed and started again. At
the end the run is completed without a kill. The files are read by the code below, not by the package: every sealed
group must be acknowledged once, and each answer that the trainer got must be in the log. Exits with 1 if a group was
lost or doubled.

    python -m scripts.faults.service_run --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rollouts.distributed.join import work
from rollouts.distributed.joined import JoinedWorkers
from rollouts.dtypes import Endpoint, Prompt
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import RolloutsError
from rollouts.recipe import Recipe
from rollouts.service import Rollouts, ServiceError, leased_run
from rollouts.service.client import LeaseLost
from rollouts.service.server import Service, serving
from rollouts.training import DataBuffer, RolloutConfig, Sample, Status

_SIZE, _N = 3, 2
"""Groups of a batch, and rollouts of a group."""


async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
    (prompt,) = prompts
    await anyio.sleep(0.005)
    ids = [1, 2, 3 + (prompt.index or 0) % 1000]
    return [
        Sample(
            prompt=prompt.prompt,
            tokens=ids,
            loss_mask=[0, 1, 1],
            rollout_log_probs=[0.0, -0.5, -0.25],
            reward=float((prompt.index or 0) % 2),
            group_index=prompt.group_index,
            index=prompt.index,
            rollout_id=prompt.index,
            status=Status.COMPLETED,
        )
    ]


def _config() -> RolloutConfig:
    return RolloutConfig(batch_size=_SIZE, n_samples_per_prompt=_N, generate_fn=generate, max_attempts=1000)


async def _serve(crew: Crew) -> None:
    joined = JoinedWorkers(silent_seconds=crew.silent_seconds)
    joined.facts = {}
    service = Service(routes=joined.routes, numbers=joined.numbers)
    async with serving(service, port=crew.port), joined.dispatcher((1, 4)) as workers:
        recipe = Recipe(
            name="kills",
            config=workers.config(crew.config()),
            data_buffer=DataBuffer([f"question {number}" for number in range(50)]),
            endpoint=Endpoint(),
            tokenizer="none",
            environment_cls=CalculatorEnvironment,
            batches=crew.batches,
        )
        async with leased_run(crew.folder / "run", recipe, trains_here=False) as service.leases:
            await anyio.sleep_forever()


async def _work(url: str, config: Callable[[], RolloutConfig]) -> None:
    await work(url, factory=config)


def _train(url: str, witness: Path) -> None:
    def note(kind: str, token: int, groups: Sequence[int]) -> None:
        with witness.open("a") as file:
            file.write(f"{json.dumps([kind, token, list(groups)])}\n")

    with Rollouts(url, consumer="trainer") as service:
        for lease in service.held():
            service.release(lease["token"])
        while True:
            try:
                for batch in service.batches(2, lease_seconds=3.0):
                    note("taken", batch.token, batch.groups)
                    batch.ack()
                    note("acknowledged", batch.token, batch.groups)
                return
            except LeaseLost:
                continue


# -- processes --------------------------------------------------------------------------------------------------------


def _forked(log: Path, function: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        function()
        code = 0
    except (RolloutsError, ServiceError, ExceptionGroup) as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


class Crew:
    """The processes, by name."""

    def __init__(
        self,
        folder: Path,
        batches: int,
        *,
        config: Callable[[], RolloutConfig] = _config,
        silent_seconds: float = 0.5,
    ) -> None:
        self.folder, self.batches = folder, batches
        self.config, self.silent_seconds = config, silent_seconds
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.pids: dict[str, int] = {}

    def start(self, name: str) -> None:
        url = f"http://127.0.0.1:{self.port}"
        functions: dict[str, Callable[[], Any]] = {
            "service": lambda: anyio.run(_serve, self),
            "trainer": lambda: _train(url, self.folder / "witness"),
        }
        function = functions.get(name, lambda: anyio.run(_work, url, self.config))
        self.pids[name] = _forked(self.folder / f"{name}.log", function)

    def kill(self, name: str) -> bool:
        """Kill a process; whether it was running."""
        pid = self.pids.pop(name)
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True

    def complete(self) -> int:
        """Let the run end soon, after a restart of the service; returns the exit code of the trainer."""
        self.kill("service")
        self.batches = sum(1 for _ in _sealed_so_far(self.folder / "run" / "journal")) + 2
        self.start("service")
        _, status = os.waitpid(self.pids.pop("trainer"), 0)
        os.kill(self.pids["service"], signal.SIGTERM)
        return os.waitstatus_to_exitcode(status)


def _wait_for_growth(log: Path, seconds: float) -> bool:
    size, until = _size(log), time.monotonic() + seconds
    while time.monotonic() < until:
        if _size(log) != size:
            return True
    return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# -- our own reader of the files --------------------------------------------------------------------------------------


def _acknowledgements(log: Path) -> list[dict[str, Any]]:
    """The records of the log of leases: magic, format, length, sequence, crc, MessagePack."""
    data, at = log.read_bytes(), 0
    records: list[dict[str, Any]] = []
    while at + 19 <= len(data):
        magic, version, length, number, crc = struct.unpack_from("<2sBIQI", data, at)
        payload = data[at + 19 : at + 19 + length]
        assert (magic, version, number) == (b"rL", 1, len(records))
        assert crc == zlib.crc32(payload, zlib.crc32(data[at : at + 15]))
        records.append(msgspec.msgpack.decode(payload))
        at += 19 + length
    assert at == len(data)
    return records


def _sealed(journal: Path) -> Iterator[list[int]]:
    """The groups of each sealed batch: records of kind 7, with a length, a sequence, and two checksums."""
    for segment in sorted(journal.glob("segment-*")):
        data, at = segment.read_bytes(), 0
        while at + 24 <= len(data):
            magic, kind, _, length, _, crc, _ = struct.unpack_from("<2sBBIQII", data, at)
            payload = data[at + 24 : at + 24 + length]
            assert magic == b"rJ"
            assert crc == zlib.crc32(payload)
            if kind == 7:
                (size,) = struct.unpack_from("<I", payload)
                yield msgspec.msgpack.decode(payload[4 : 4 + size])["groups"]
            at += 24 + length
        assert at == len(data)


def check(folder: Path) -> list[str]:
    """List the errors in the files of a completed run, in words."""
    run = folder / "run"
    records = _acknowledgements(run / "leases.log")
    acknowledged = {one["token"]: one["groups"] for one in records if one["kind"] == "acknowledged"}
    by_group = Counter(group for groups in acknowledged.values() for group in groups)
    sealed = Counter(group for groups in _sealed(run / "journal") for group in groups)
    answers = [json.loads(line) for line in (folder / "witness").read_text().splitlines() if line.endswith("]")]
    counts = json.loads((run / "run.json").read_text())["accounting"]
    found = [f"group {group} is acknowledged {count} times" for group, count in by_group.items() if count > 1]
    found += [f"group {group} is sealed {count} times" for group, count in sealed.items() if count > 1]
    found += [f"group {group} is lost" for group in sealed.keys() - by_group.keys()]
    found += [f"group {group} was never sealed" for group in by_group.keys() - sealed.keys()]
    answered = [(token, groups) for kind, token, groups in answers if kind == "acknowledged"]
    found += [
        f"the log lacks lease {token}, whose answer the trainer got"
        for token, got in answered
        if acknowledged.get(token) != got
    ]
    if (counts["in_batch"], counts["failed"]) != (len(by_group), 0):
        found.append(f"run.json counts {counts}, the log {len(by_group)} groups")
    lost = len(acknowledged) - len(answered)
    print(
        f"{len(by_group)} groups acknowledged in {len(acknowledged)} leases, {lost} answers lost, {len(sealed)} sealed"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    options = parser.parse_args()
    dice, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="rollouts-service-"))
    crew = Crew(folder, 1_000_000)
    names = ("service", "worker 1", "worker 2", "trainer")
    killed: Counter[str] = Counter()
    log = folder / "run" / "leases.log"
    try:
        for name in names:
            crew.start(name)
        while killed.total() < options.kills:
            name = dice.choice(("service", "service", "trainer", "worker 1", "worker 2"))
            at_growth = dice.random() < 0.5
            time.sleep(dice.uniform(0.05, 1.5))
            grew = at_growth and _wait_for_growth(log, 5.0)
            if crew.kill(name):
                killed[f"{name.partition(' ')[0]}{' when the log grew' if grew else ''}"] += 1
            crew.start(name)
        code = crew.complete()
        print(f"{killed.total()} kills: {dict(killed)}; the trainer ended with {code}")
    finally:
        for name in list(crew.pids):
            crew.kill(name)
    found = check(folder)
    print("\n".join(found) or f"0 groups lost, 0 acknowledged twice ({folder})")
    return 1 if found else 0


def _sealed_so_far(journal: Path) -> Iterator[list[int]]:
    """Batches before a torn tail."""
    with contextlib.suppress(AssertionError, struct.error, msgspec.DecodeError):
        yield from _sealed(journal)


if __name__ == "__main__":
    sys.exit(main())
