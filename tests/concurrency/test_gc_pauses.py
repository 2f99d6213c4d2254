"""The garbage collector during a run: it skips older objects, and its settings are restored."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from rollouts.concurrency import gc_pauses
from rollouts.concurrency.gc_pauses import calm_collector, free


@pytest.fixture(scope="module", autouse=True)
def thawed() -> Iterator[None]:
    """No object is frozen, for all tests here: to freeze again visits every object."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def _fail_inside(old: list[list[object]]) -> None:
    with calm_collector():
        assert not any(entry is old for entry in gc.get_objects())
        new: list[object] = []
        new.append(new)
        del new
        assert gc.collect() >= 1
        raise OSError("ended")


def test_existing_objects_are_frozen_and_unfrozen() -> None:
    """Cycles of the run are still freed; thresholds are restored, also after an error."""
    old: list[list[object]] = [[] for _ in range(1000)]
    thresholds = gc.get_threshold()
    with pytest.raises(OSError, match="ended"):
        _fail_inside(old)
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


def test_a_process_that_has_frozen_its_objects_is_left_alone() -> None:
    """Its thresholds and frozen objects stay."""
    gc.freeze()
    count, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        with calm_collector():
            assert gc.get_threshold() == thresholds
        assert gc.get_freeze_count() > count / 2, "some objects may be freed since, but they were not unfrozen"
    finally:
        gc.unfreeze()


def test_a_long_full_collection_is_not_repeated_over_the_same_objects() -> None:
    """The objects that remain are frozen; all are unfrozen at the end, so that their cycles are freed."""
    with calm_collector():
        frozen, thresholds = gc.get_freeze_count(), gc.get_threshold()
        kept: list[list[object]] = [[[number]] for number in range(1_000_000)]
        gc.collect()
        assert gc.get_freeze_count() > frozen + 1_000_000
        assert gc.get_threshold() < thresholds, "the next one is due earlier, and visits fewer objects"
        kept[0].append(kept)
        del kept
        assert gc.get_freeze_count() > frozen + 1_000_000, "a cycle of frozen objects waits"
    assert gc.collect() >= 1_000_000
    assert gc.get_freeze_count() == 0


def test_the_cycles_of_a_trainer_in_the_process_are_freed_after_a_long_collection() -> None:
    """They may hold tensors; without a trainer, cycles of that time wait for the end of the run."""
    with calm_collector(shared=True):
        frozen = gc.get_freeze_count()
        kept: list[list[object]] = [[[number]] for number in range(1_000_000)]
        gc.collect()
        assert gc.get_freeze_count() <= frozen
        kept[0].append(kept)
        del kept
        assert gc.collect() >= 1_000_000


async def test_many_new_objects_do_not_wait_behind_old_ones_that_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts what is allocated less what is freed, so it alone would visit all new objects at once."""
    monkeypatch.setattr(gc_pauses, "_LONG_SECONDS", 1e-9)
    monkeypatch.setattr(gc_pauses, "_YOUNG_SECONDS", 0.01)
    old: list[list[object]] = [[[]] for _ in range(100_000)]
    gc.collect()
    with calm_collector():
        gc.collect()
        new = []
        for _ in range(100):
            for _ in range(1000):
                old.pop()
                new.append([[]])
            await anyio.sleep(0.001)
        await anyio.sleep(0.05)
        assert len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1)) < 50_000
    collected = gc.get_stats()[1]["collections"]
    await anyio.sleep(0.05)
    assert gc.get_stats()[1]["collections"] == collected, "afterwards it is the interpreter's own again"
    assert len(new) == 100_000


_LARGE_BLOCKS = """
import ctypes
from rollouts.concurrency.gc_pauses import calm_collector

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
with calm_collector({}):
    block = bytearray(8 * 2**20)
    del block
    before = mallinfo2().hblks
    blocks = [bytearray(2 * 2**20) for _ in range(5)]
    print(mallinfo2().hblks - before)
"""


@pytest.mark.parametrize(
    ("how", "variables", "apart"),
    [("", {}, 5), ("shared=True", {}, 0), ("", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4194304"}, 0)],
)
def test_a_large_block_is_mapped_alone(how: str, variables: dict[str, str], apart: int) -> None:
    """Also after a larger one was freed; not where a trainer works, or where the user has set another size."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library is not glibc 2.33 or later")
    text = _LARGE_BLOCKS.replace("{}", how)
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_MMAP_THRESHOLD_"} | variables
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == apart


def test_freed_memory_returns_to_the_system() -> None:
    """Small objects between others leave no resident pages; harmless without glibc."""
    resident = Path("/proc/self/statm")
    if not resident.exists():
        pytest.skip("/proc is not mounted")
    small = [bytes(2_000) for _ in range(100_000)]
    kept = small[::500]
    before = int(resident.read_text().split()[1])
    free(small)
    assert small == []
    assert len(kept) == 200
    assert int(resident.read_text().split()[1]) < before - 20_000, "most of 200 MB in pages of 4 KB"
