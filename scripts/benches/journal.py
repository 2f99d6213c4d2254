"""The cost of the journal, compared with plain writes and reads of the same bytes."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rollouts.runs.journal import Columns, Journal, read_journal
from scripts.benches.lines import Line

__all__ = ["journal"]

RECORDS, TOKENS = 512, 2500
BATCH = 32


def journal(rounds: int) -> Iterator[Line]:
    """CPU time of the journal written and read, over that of a plain write of the same bytes."""
    tokens = np.arange(TOKENS, dtype=np.int32)
    columns = Columns(tokens, tokens % 2 == 0, -tokens.astype(np.float32))
    writes, reads = [], []
    folder = Path(tempfile.mkdtemp(prefix="rollouts-bench-"))
    try:
        for number in range(rounds + 1):
            path = folder / str(number)
            with Journal(path) as held:

                def write(held: Journal = held) -> None:
                    for record in range(RECORDS):
                        held.append("sample", {"index": record}, columns)
                        if record % BATCH == BATCH - 1:
                            held.flush()

                ours = _cpu(write)
            (segment,) = path.glob("segment-*")
            data = segment.read_bytes()
            plain = _cpu(functools.partial(_write, path / "plain", data))
            writes.append(ours / plain)
            reads.append(_cpu(functools.partial(_read, path)) / plain)
    finally:
        shutil.rmtree(folder)
    yield Line.of("journal write", "journal / the same bytes written", writes[1:], 3.0)
    yield Line.of("journal read", "journal / the same bytes written", reads[1:], 3.0)


def _write(path: Path, data: bytes) -> None:
    piece = len(data) // (RECORDS // BATCH) + 1
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), piece):
            file.write(data[start : start + piece])


def _read(path: Path) -> None:
    for _ in read_journal(path):
        pass


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
