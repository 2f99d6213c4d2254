"""Timelines: what was added comes back, in order, and impossible spans are refused by name."""

from __future__ import annotations

import copy
import math
import pickle
import time
from typing import Any

import numpy as np
import pytest

from rollouts.concurrency.times import Span, Timeline, checked_spans, now
from rollouts.errors import ConfigError

SPANS = [Span("environment", "World.start", 10.0, 0.5), Span("generating", "http://a", 10.5, 2.0)]


def test_spans_come_back_in_order() -> None:
    """Also as plain data, from a number on, copied and pickled; an equal timeline is equal."""
    line = Timeline(SPANS)
    line.add("generating", "http://a", 13.0, 0.25)
    assert list(line) == [*SPANS, Span("generating", "http://a", 13.0, 0.25)]
    assert line.to_list(2) == [["generating", "http://a", 13.0, 0.25]]
    assert Timeline(line.to_list()) == copy.deepcopy(line) == pickle.loads(pickle.dumps(line)) == line
    assert line != Timeline(SPANS)


def test_a_span_that_ends_now_has_its_seconds() -> None:
    """The clock agrees with the machine's."""
    began, line = now(), Timeline()
    line.add("tool", "add", began, now() - began)
    (span,) = line
    assert span.began == began
    assert 0 <= span.seconds == span.ended - began
    assert abs(now() - time.time()) < 3600


@pytest.mark.parametrize(
    "span",
    [
        ["sleeping", "a", 1.0, 1.0],
        ["tool", None, 1.0, 1.0],
        ["tool", "a", "1", 1.0],
        ["tool", "a", 1.0],
        ["tool", "a", math.nan, 1.0],
        ["tool", "a", 1.0, math.inf],
    ],
)
def test_impossible_spans_are_refused(span: list[object]) -> None:
    """The error has the span; a number that JSON stores as null makes the sample unreadable."""
    with pytest.raises(ConfigError, match="times: got"):
        Timeline([span])


def test_a_span_before_a_timeline() -> None:
    """A wait that ended first comes first, whether its name is new or not; the timeline itself stays as it was."""
    spans = [Span("generating", "a server", 2.0, 1.0), Span("tool", "ask", 3.0, 0.5)]
    timeline = Timeline(spans)
    for before in (Span("queued", "a slot", 0.5, 1.5), Span("generating", "a server", 1.0, 0.5)):
        assert list(timeline.after(before)) == [before, *spans]
    assert list(timeline) == spans


@pytest.mark.parametrize("spans", [None, 0, False])
def test_only_an_iterable_has_spans(spans: Any) -> None:
    """A false value is not an empty timeline."""
    with pytest.raises(TypeError):
        checked_spans(spans)


def test_spans_may_be_in_any_iterable() -> None:
    """Also in one whose truth is not its length, such as an array."""
    row = ["tool", "ask", 3.0, 0.5]
    for spans in (np.array([row], object), np.array([row, row], object), iter([row])):
        assert {*checked_spans(spans)} == {Span("tool", "ask", 3.0, 0.5)}
    assert checked_spans(np.empty((0, 4))) == checked_spans([]) == ()
