"""Laws 1 to 3 in Trajectory: it accepts only tokens that were sampled from its ids, and only at its end."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.dtypes import Completion, Image, ImageSpan, Message, StopReason, VersionSpan, packed_tokens
from rollouts.errors import TokenMismatchError
from rollouts.trajectory import CompletionRecord, Segment, Trajectory, digest

REPLY = Message("assistant", "ok")


def sampled_from(ids: list[int], tokens: list[int], *, versions: Any = None, **fields: Any) -> Completion:
    """The completion of a policy for ``ids``; its digest is computed independently of the package."""
    return Completion(
        **{
            "tokens": tokens,
            "logprobs": [-(token % 7) / 8 - 0.125 for token in tokens],
            "finish_reason": "stop",
            "versions": versions or ([VersionSpan("v1", 0, len(tokens))] if tokens else []),
            "prompt_tokens": len(ids),
            "prompt_digest": zlib.crc32(b"".join(token.to_bytes(4, "little", signed=True) for token in ids)),
            "request_id": "r",
            **fields,
        }
    )


def opened(ids: list[int]) -> Trajectory:
    trajectory = Trajectory()
    trajectory.add_context(packed_tokens(ids))
    return trajectory


pieces = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.integers(0, 2**31 - 1), max_size=12),
        st.sampled_from(["v1", "v2"]),
        st.integers(0, 12),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(pieces=pieces)
def test_columns_stay_aligned_under_any_appends(pieces: list[tuple[bool, list[int], str, int]]) -> None:
    """Ids are unchanged; the mask, logprobs and versions cover exactly the sampled tokens; segments have no gap, and
    none is empty."""
    trajectory = Trajectory()
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[str | None] = []
    views: list[tuple[Any, list[int]]] = []
    for is_reply, tokens, version, cut in pieces:
        if is_reply:
            cut = min(cut, len(tokens))
            spans = [VersionSpan("v0", 0, cut), VersionSpan(version, cut, len(tokens))]
            answer = sampled_from(ids, tokens, versions=[span for span in spans if span.stop > span.start])
            trajectory.add_reply(answer, REPLY)
            logprobs += answer.logprobs.tolist()
            versions += ["v0"] * cut + [version] * (len(tokens) - cut)
        else:
            trajectory.add_context(packed_tokens(tokens))
            logprobs += [0.0] * len(tokens)
            versions += [None] * len(tokens)
        ids += tokens
        mask += [is_reply] * len(tokens)
        views.append((trajectory.tokens, list(ids)))
    for sealed in (False, True):
        if sealed:
            trajectory.seal(StopReason.TASK_COMPLETED)
        assert trajectory.tokens.tolist() == ids
        assert trajectory.mask.tolist() == mask
        assert trajectory.logprobs.tolist() == logprobs
        for start in range(len(ids) + 1):
            columns = tuple(column.tolist() for column in trajectory.sampled(start))
            assert columns == (mask[start:], logprobs[start:])
        assert [
            segment.version for segment in trajectory.segments for _ in range(segment.start, segment.stop)
        ] == versions
        assert [(s.start, s.stop) for s in trajectory.segments] == list(
            zip([0, *(s.stop for s in trajectory.segments)], [s.stop for s in trajectory.segments], strict=False)
        )
        assert all(segment.start < segment.stop for segment in trajectory.segments)
        for call in trajectory.completions:
            assert digest(trajectory.tokens[: call.start]) == call.prompt_digest
            assert trajectory.mask[call.start : call.stop].all()
        for view, expected in views:
            assert view.tolist() == expected, "an earlier view stays unchanged"


@pytest.mark.parametrize(
    ("ids", "why"),
    [([1, 2], "fewer"), ([1, 2, 3, 4], "more"), ([1, 2, 4], "another id"), ([3, 2, 1], "another order"), ([], "none")],
)
def test_a_completion_sampled_from_other_ids_is_refused(ids: list[int], why: str) -> None:
    """Law 1, by count and by checksum; the trajectory is unchanged."""
    trajectory = opened([1, 2, 3])
    with pytest.raises(TokenMismatchError, match="was sampled from"):
        trajectory.add_reply(sampled_from(ids, [9]), REPLY)
    assert trajectory.tokens.tolist() == [1, 2, 3]
    assert (trajectory.completions, trajectory.messages) == ([], [])
    trajectory.add_reply(sampled_from([1, 2, 3], [9]), REPLY)
    assert trajectory.tokens.tolist() == [1, 2, 3, 9]


def test_the_same_completion_is_not_added_twice() -> None:
    """Law 3: after the first time its request no longer equals the stored ids."""
    trajectory = opened([1])
    answer = sampled_from([1], [9])
    trajectory.add_reply(answer, REPLY)
    with pytest.raises(TokenMismatchError):
        trajectory.add_reply(answer, REPLY)


def test_a_step_reward_has_the_number_of_the_reply_that_its_step_answered() -> None:
    """Each of several rewards, also after a reply without one."""
    trajectory = opened([1])
    for number, rewards in enumerate([[0.5, 1.0], [], [2.0]]):
        trajectory.add_reply(sampled_from([1, *range(number)], [number]), REPLY)
        trajectory.add_rewards(rewards)
    assert (trajectory.step_rewards, trajectory.step_completions) == ([0.5, 1.0, 2.0], [0, 0, 2])


def test_a_sealed_trajectory_never_changes() -> None:
    """Not by appending, not by sealing again, not through its columns."""
    trajectory = opened([1, 2])
    trajectory.add_reply(sampled_from([1, 2], [3]), REPLY)
    trajectory.seal(StopReason.MAX_TURNS)
    image = ImageSpan(Image(b"\x89PNG\r\n\x1a\n" + bytes(16) + b"\x08\x02"), 0, 1)
    for change in (
        lambda: trajectory.add_context(packed_tokens([4])),
        lambda: trajectory.add_context(packed_tokens([4]), images=[image]),
        lambda: trajectory.add_reply(sampled_from([1, 2, 3], [4]), REPLY),
        lambda: trajectory.seal(StopReason.TASK_COMPLETED),
    ):
        with pytest.raises(TokenMismatchError, match="a sealed trajectory cannot change"):
            change()
    for column in (trajectory.tokens, trajectory.mask, trajectory.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            column.flags.writeable = True
    assert trajectory.tokens.tolist() == [1, 2, 3]
    assert trajectory.images == []
    assert trajectory.stop_reason is StopReason.MAX_TURNS


def test_runs_of_one_origin_are_one_segment() -> None:
    """Adjacent contexts join, as do replies of one version; another version begins a new segment."""
    trajectory = opened([1])
    trajectory.add_context(packed_tokens([2]))
    trajectory.add_reply(sampled_from([1, 2], [3]), REPLY)
    trajectory.add_reply(sampled_from([1, 2, 3], [4]), REPLY)
    trajectory.add_reply(sampled_from([1, 2, 3, 4], [5], versions=[VersionSpan("v2", 0, 1)]), REPLY)
    assert trajectory.segments == [Segment(0, 2, None), Segment(2, 4, "v1"), Segment(4, 5, "v2")]
    assert [segment.version is not None for segment in trajectory.segments] == [False, True, True]
    assert trajectory.versions == (VersionSpan("v1", 2, 4), VersionSpan("v2", 4, 5))


def test_a_trajectory_of_any_length_costs_nine_bytes_a_token() -> None:
    """Sealed columns have no spare capacity."""
    trajectory = opened(list(range(1000)))
    trajectory.add_context(packed_tokens([1]))
    trajectory.seal(StopReason.DEADLINE)
    assert sum(column.nbytes for column in (trajectory.tokens, trajectory.mask, trajectory.logprobs)) == 9 * 1001
    assert trajectory.tokens.base is None or trajectory.tokens.base.nbytes == 4 * 1001
    assert "1001 tokens, 0 sampled" in repr(trajectory)
    assert digest(np.arange(3), digest(np.arange(0))) == digest(np.arange(3))


@pytest.mark.parametrize("known", [{}, {"continues": True}, {"temperature": 0.0, "logprobs_of": "sampled"}])
def test_a_stored_record_of_a_completion_is_the_record(known: dict[str, Any]) -> None:
    """Its fields come back; false and unknown ones are not stored, so that rows of earlier versions are equal."""
    record = CompletionRecord("id", 3, 7, "stop", 11, 0, 0.5, **known)
    stored = record.to_dict()
    assert CompletionRecord(**stored) == record
    assert {"continues", "temperature", "logprobs_of"} & stored.keys() == known.keys()
