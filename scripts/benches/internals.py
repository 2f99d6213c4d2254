"""The savings of the parts of ``docs/internals.md``: each against the plain way, in CPU time; the two alternate."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import aiohttp
import anyio
import msgspec
import numpy as np

from rollouts.concurrency.boundary import call_foreign
from rollouts.concurrency.gc_pauses import calm_collector
from rollouts.errors import EnvironmentFailure
from rollouts.http.client import HttpClient
from rollouts.inference.token_json import SequenceCache
from rollouts.renderer import load_tokenizer
from rollouts.renderer.byte_level import ByteTable
from rollouts.renderer.fast_encoder import loader
from rollouts.testing.canned import Canned, canned_server
from scripts.benches.workloads import default_tokenizer

__all__ = ["bench_internals", "internals_options"]

Row = dict[str, float | int | str]
_JSON = {"Content-Type": "application/json"}
_HISTORY, _NEW = 16_000, 640
_CALLS = 5_000


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _row(name: str, unit: str, scale: float, ours: Callable[[], object], plain: Callable[[], object], n: int) -> Row:
    ours(), plain()
    pairs = [(_seconds(ours), _seconds(plain)) for _ in range(n)]
    ratios = [other / own for own, other in pairs]
    return {
        "part": name,
        "unit": unit,
        "ours": scale * statistics.median(own for own, _ in pairs),
        "the plain way": scale * statistics.median(other for _, other in pairs),
        "times": f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
    }


def bench_internals(options: argparse.Namespace) -> list[Row]:
    """CPU time of each part of ``docs/internals.md``, and that of the plain way."""
    tokenizer = load_tokenizer(str(options.tokenizer or default_tokenizer()))
    raw = tokenizer.backend_tokenizer
    fast, table, rounds = loader(tokenizer)().result(), ByteTable.of(tokenizer), options.rounds
    if fast is None or table is None:
        raise SystemExit("this tokenizer has no fast encoder or no byte table")
    book = "\n".join(topics.values())
    starts = itertools.count()

    def texts() -> list[str]:
        """Two hundred texts, none of which was encoded before: both libraries keep caches."""
        first = 17 * next(starts)
        return [book[at : at + 2000] for at in range(first, first + 400_000, 2000)]

    ids = fast.encode(book[:400_000])
    assert ids is not None
    replies = [ids[at : at + 512] for at in range(0, 51_200, 512)]
    lists = [reply.tolist() for reply in replies]
    rows = [
        _row(
            "fast_encoder.py", "µs for 2,000 characters", 1e6 / 200,
            lambda: [fast.encode(text) for text in texts()],
            lambda: [raw.encode_batch_fast([text], add_special_tokens=False)[0].ids for text in texts()], rounds,
        ),
        _row(
            "byte_level.py", "µs a reply of 512 tokens", 1e6 / len(replies),
            lambda: [table.decode(reply) for reply in replies],
            lambda: [raw.decode(reply, skip_special_tokens=False) for reply in lists], rounds,
        ),
        _row(
            "token_json.py", f"µs a request of {_HISTORY:,} ids, 6 of them new", 1e6 / 100,
            _requests(ids), lambda: [msgspec.json.encode(ids[: _HISTORY + 6 * turn].tolist()) for turn in range(100)],
            rounds,
        ),
    ]  # fmt: skip
    with canned_server(Canned([lists[0]])) as url:
        body = msgspec.json.encode({"rid": "r", "input_ids": ids[:2000].tolist(), "sampling_params": {}})
        rows.append(
            _row(
                "http/", "µs a POST of 2,000 ids, a reply of 128", 1e6 / 300,
                lambda: anyio.run(_ours, url, body), lambda: anyio.run(_aiohttp, url, body), rounds,
            )
        )  # fmt: skip
    rows += [
        _row(
            "cancellation.py", "µs a call of user code that does not wait", 1e6 / _CALLS,
            lambda: anyio.run(_guarded), lambda: anyio.run(_in_own_tasks), rounds,
        ),
        _collections(rounds),
    ]  # fmt: skip
    return rows


def _requests(ids: np.ndarray) -> Callable[[], object]:
    """A hundred turns of one sequence: each adds ids behind a long history."""
    sessions = map(str, itertools.count())

    def run() -> None:
        cache, session = SequenceCache(), next(sessions)
        column = ids[: _HISTORY + _NEW].copy()
        column.flags.writeable = False
        for turn in range(100):
            cache.encode(column[: _HISTORY + 6 * turn], session).move_into(b"", 0)

    return run


async def _ours(url: str, body: bytes) -> None:
    client = HttpClient(connect_seconds=10.0)
    try:
        for _ in range(300):
            await client.post(f"{url}/generate", body, _JSON)
    finally:
        await client.aclose()


async def _aiohttp(url: str, body: bytes) -> None:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        for _ in range(300):
            async with session.post(f"{url}/generate", data=body, headers=_JSON) as response:
                await response.read()


async def _user_code() -> int:
    return 1


async def _guarded() -> None:
    for _ in range(_CALLS):
        await call_foreign(EnvironmentFailure, "step", _user_code, seconds=60.0)


async def _in_own_tasks() -> None:
    """The least that can be cancelled and left: a task for each call, within a deadline."""
    for _ in range(_CALLS):
        with anyio.fail_after(60.0):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_user_code)


def _collections(rounds: int) -> Row:
    """A full collection with a million objects from before, e.g. those of a tokenizer and of torch."""
    before = [[number] for number in range(1_000_000)]
    with calm_collector():
        ours = [_seconds(gc.collect) for _ in range(rounds)]
    plain = [_seconds(gc.collect) for _ in range(rounds)]
    del before
    ratios = [other / own for own, other in zip(ours, plain, strict=True)]
    return {
        "part": "gc_pauses.py",
        "unit": "ms a full collection",
        "ours": 1000 * statistics.median(ours),
        "the plain way": 1000 * statistics.median(plain),
        "times": f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
    }


def internals_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder or name (default: Qwen3's where the tests' assets are)")
