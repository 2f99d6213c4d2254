"""Cache of encoded ids: exact for any history, and bounded."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import ConfigError
from rollouts.inference.token_json import EncodedIds, SequenceCache

ID = st.integers(0, 2**31 - 1)


def expected(ids: list[int]) -> tuple[bytes, int, int]:
    return msgspec.json.encode(ids)[1:-1], len(ids), zlib.crc32(np.asarray(ids, "<i4").tobytes())


def as_tuple(ids: EncodedIds) -> tuple[bytes, int, int]:
    return ids.text, ids.count, ids.digest


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 9), st.lists(ID, max_size=5)), max_size=12))
def test_the_text_is_that_of_the_ids(steps: list[tuple[str, int, list[int]]]) -> None:
    """If a sequence grew, shrank, forked or is new."""
    cache = SequenceCache(max_bytes=200)
    ids: list[int] = [0]
    for session, common, new in steps:
        ids = [*ids[:common], *new] or [1]
        assert as_tuple(cache.encode(np.asarray(ids, np.int32), session)) == expected(ids)


def test_only_new_ids_are_encoded() -> None:
    """A repeated call encodes nothing."""
    cache = SequenceCache()
    for length in (10, 30, 30):
        cache.encode(np.arange(length), "a")
    assert cache.encoded == 30


def test_the_cache_does_not_share_a_buffer_with_the_caller() -> None:
    """A caller may overwrite the array that it passed."""
    cache, column = SequenceCache(), np.arange(4, dtype=np.int32)
    first = cache.encode(column, "a")
    column[0] = 9
    assert as_tuple(cache.encode(column, "a")) == expected([9, 1, 2, 3])
    assert as_tuple(first) == expected([0, 1, 2, 3])


def test_read_only_views_are_encoded_exactly() -> None:
    """Views of one array: longer, shorter, at another offset; of another array; of another session."""
    cache = SequenceCache()
    memory, other = np.arange(100, dtype=np.int32), np.arange(50, 150, dtype=np.int32)

    def text(column: np.ndarray, session: str = "s") -> str:
        column.flags.writeable = False
        return cache.encode(column, session).text.decode()

    for column in (memory[:10], memory[:30], memory[5:40], memory[:20], memory[:60:2], other[:40], memory[:40]):
        assert text(column) == ",".join(map(str, column.tolist()))
    assert text(memory[:50], "t") == ",".join(map(str, range(50)))
    encoded = cache.encoded
    assert text(memory[:60]) == ",".join(map(str, range(60)))
    assert cache.encoded - encoded == 20
    assert text(memory[60:70]) == ",".join(map(str, range(60, 70)))
    assert text(memory[60:90]) == ",".join(map(str, range(60, 90)))
    assert cache.encoded - encoded == 20 + 10 + 20


def test_memory_is_bounded_by_size() -> None:
    """The least recently used session is evicted first."""
    cache = SequenceCache(max_bytes=2 * 5)
    for session in ("a", "b", "a", "c"):
        cache.encode([1, 2, 3], session)
    assert len(cache) == 2
    before = cache.encoded
    cache.encode([1, 2, 3], "a")
    assert cache.encoded == before


def test_memory_is_bounded_by_age() -> None:
    """Idle sessions are evicted as soon as another one is stored."""
    cache = SequenceCache(max_idle_seconds=0.0)
    for session in "abc":
        cache.encode([1], session)
    assert len(cache) == 1


def test_calls_without_a_session_are_not_cached() -> None:
    """No later call can extend them."""
    cache = SequenceCache()
    cache.encode([1, 2])
    assert len(cache) == 0
    assert repr(cache) == "<SequenceCache: 0 sessions, 0.0 MiB>"


@pytest.mark.parametrize("tokens", [[], [[1]], [0.5], ["1"], [True], [2**70]])
def test_invalid_tokens_are_a_config_error(tokens: Any) -> None:
    """No ids, too many dimensions, or no integers."""
    with pytest.raises(ConfigError, match="tokens"):
        SequenceCache().encode(tokens)


def test_an_id_is_checked_where_it_is_new() -> None:
    """Its position is that in the whole sequence."""
    cache = SequenceCache(vocab_size=10)
    cache.encode([1, 2], "a")
    with pytest.raises(ConfigError, match=r"tokens\[3\]: got id 10; expected 0 <= id < 10 \(vocab_size\)"):
        cache.encode([1, 2, 3, 10], "a")


def test_without_a_vocabulary_an_id_still_fits_the_column() -> None:
    """Below 2**31, so that int32 does not wrap to another id."""
    with pytest.raises(ConfigError, match=rf"tokens\[0\]: got id {2**31}; expected 0 <= id < {2**31}"):
        SequenceCache().encode([2**31])


def test_a_vocabulary_size_is_positive() -> None:
    """0 is invalid; an unknown size is ``None``."""
    with pytest.raises(ConfigError, match="vocab_size"):
        SequenceCache(0)


def test_a_text_is_in_memory_only_once() -> None:
    """While a request is in flight, the cached text is a view of its body; the next call extends it."""
    cache = SequenceCache()
    first = cache.encode(np.array([1, 22, 333], np.int32), "a")
    body = b'{"ids":[1,22,333],"more":1}'
    first.move_into(body, body.index(b"1,22"))
    assert as_tuple(first) == expected([1, 22, 333])
    assert [piece.obj for piece in first.pieces if isinstance(piece, memoryview)] == [body]
    assert cache._entries["a"].ids is first
    grown = cache.encode(np.array([1, 22, 333, 4], np.int32), "a")
    assert as_tuple(grown) == expected([1, 22, 333, 4])
    assert grown.pieces[0] is first.pieces[0]
    assert cache.encoded == 4


def test_the_body_of_an_earlier_call_is_not_cached() -> None:
    """If its session has grown in the meantime."""
    cache = SequenceCache()
    first = cache.encode(np.array([1], np.int32), "a")
    cache.encode(np.array([1, 2], np.int32), "a")
    first.move_into(b"[1]", 1)
    assert as_tuple(first) == expected([1])
    assert as_tuple(cache.encode(np.array([1, 2, 3], np.int32), "a")) == expected([1, 2, 3])
