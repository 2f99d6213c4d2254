"""Reward files, and the warning of lost verdicts."""

from __future__ import annotations

import logging

import pytest

from rollouts.errors import Failure
from rollouts.harbor.verdict import LostVerdicts, no_verdict, parse_rewards, reward_in


@pytest.mark.parametrize(
    ("reward_json", "reward_text", "expected"),
    [
        (None, b"1\n", {"reward": 1.0}),
        (None, b" 0.25 ", {"reward": 0.25}),
        (None, b"-3", {"reward": -3.0}),
        (b'{"a": 1, "b": 0.5}', None, {"a": 1.0, "b": 0.5}),
        (b'{"a": true}', None, {"a": 1.0}),
        (b'{"a": 1}', b"0", {"a": 1.0}),
        (None, None, "missing"),
        (None, b"", "empty"),
        (b"", b"1", "empty"),
        (None, b"nan", "unreadable"),
        (None, b"inf", "unreadable"),
        (None, b"one", "unreadable"),
        (None, b"\xff", "unreadable"),
        (b"{", b"1", "unreadable"),
        (b"[1]", None, "unreadable"),
        (b"1", None, "unreadable"),
        (b"{}", None, "unreadable"),
        (b'{"a": null}', None, "unreadable"),
        (b'{"a": "1"}', None, "unreadable"),
        (b'{"a": NaN}', None, "unreadable"),
        (b'{"a": 1e999}', None, "unreadable"),
        (b'{"a": 1' + b"0" * 400 + b"}", None, "unreadable"),
        (b"[" * 100_000, None, "unreadable"),
    ],
)
def test_rewards_are_read_as_harbor_reads_them(
    reward_json: bytes | None, reward_text: bytes | None, expected: object
) -> None:
    """JSON before text, finite numbers only, and no value for a file that is not readable."""
    assert parse_rewards(reward_json, reward_text) == expected


def test_the_reward_that_is_trained_is_the_named_one_the_only_one_or_reward() -> None:
    """No other key is guessed."""
    assert reward_in({"x": 0.5}, None) == 0.5
    assert reward_in({"x": 0.5, "reward": 1.0}, None) == 1.0
    assert reward_in({"x": 0.5, "y": 1.0}, None) is None
    assert reward_in({"x": 0.5, "reward": 1.0}, "x") == 0.5
    assert reward_in({"reward": 1.0}, "x") is None


def test_no_verdict_is_a_failure_with_the_cause_verifier() -> None:
    """Its message begins with the reason, the task and the rung."""
    failure = Failure.of(no_verdict("timeout", "slug", "carry", "60 s"))
    assert failure.cause == "verifier"
    assert failure.message.startswith("no verdict (timeout) of task slug at rung carry: ")


def test_a_task_whose_rollouts_lose_verdicts_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Only a task that is known to give verdicts; with the counts by reason."""
    lost = LostVerdicts()
    with caplog.at_level(logging.WARNING):
        lost.note("slug", None, checked=True)
        for reason in ("missing", "timeout", "missing", "missing"):
            lost.note("slug", reason, checked=True)  # type: ignore[arg-type]
            lost.note("unchecked", "missing", checked=False)
    [record] = caplog.records
    assert "task slug: 3 of 4 rollouts have no verdict (missing 2, timeout 1)" in record.getMessage()
    assert lost.lost["slug", "missing"] == 3
