"""Checks of numbers and strings from users."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.base.validators import are_texts, as_texts, finite, integer, is_int, is_number, number, seconds
from rollouts.dtypes import Limits, SamplingParams
from rollouts.environments.mcp import McpServer
from rollouts.environments.python_tool import PythonLimits
from rollouts.errors import ConfigError
from rollouts.training.failures import FailurePolicy

HUGE = 10**400
"""An integer that no float holds."""


@attrs.frozen
class Values:
    """One field for each validator."""

    count: Any = attrs.field(default=1, validator=integer(1))
    bound: Any = attrs.field(default=None, validator=integer(0, optional=True))
    share: Any = attrs.field(default=0.5, validator=number(least=0))
    factor: Any = attrs.field(default=None, validator=number(above=1, optional=True))
    wait: Any = attrs.field(default=1, validator=seconds(above=0))


@pytest.mark.parametrize(
    ("field", "expected", "good", "bad"),
    [
        ("count", "an integer >= 1", [1, HUGE], [0, True, 1.0, "1", None]),
        ("bound", "an integer >= 0", [0, None], [-1, False, 0.5]),
        ("share", "a number >= 0", [0, 1.5], [-0.1, True, math.nan, math.inf, HUGE, "0", None]),
        ("factor", "a number > 1", [1.1, None], [1, math.nan]),
        ("wait", "a number of seconds > 0", [0.1, 3], [0, math.inf, HUGE, None]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, expected: str, good: list[Any], bad: list[Any]) -> None:
    """A bool, NaN, infinity, or an integer that does not fit a float is not a number."""
    for value in good:
        assert getattr(Values(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ConfigError, match=rf"^Values\.{field}: got .*; expected {expected}$"):
            Values(**{field: value})


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (SamplingParams, "temperature"),
        (Limits, "step_seconds"),
        (FailurePolicy, "backoff_seconds"),
        (PythonLimits, "seconds"),
        (McpServer, "open_seconds"),
    ],
)
def test_a_number_that_no_float_holds_is_refused_by_every_class(kind: Any, field: str) -> None:
    """By name: not by an OverflowError, and not later, where it is used."""
    needed = {"url": "http://127.0.0.1:1"} if kind is McpServer else {}
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field}"):
        kind(**needed, **{field: HUGE})


def test_numbers_of_user_code_are_read_as_float_does() -> None:
    """Scalars of NumPy and decimals are numbers; text, NaN and arrays of several elements are not."""
    assert [finite(value) for value in (1, True, np.float32(0.5), Decimal("0.25"))] == [1.0, 1.0, 0.5, 0.25]
    assert {finite(value) for value in ("1", b"1", math.nan, -math.inf, HUGE, np.zeros(2), None, 1j)} == {None}
    assert [is_number(value) for value in (1, 0.5, True, HUGE, np.float32(1))] == [True, True, False, False, False]
    assert [is_int(value, 0) for value in (0, -1, False, 0.0)] == [True, False, False, False]


def test_one_text_or_several_are_a_tuple() -> None:
    """Any other value stays, for the validator to refuse."""
    assert [as_texts(value) for value in ("a", ["a", "b"], 1)] == [("a",), ("a", "b"), 1]
    assert [are_texts(value) for value in (("a",), (), ("a", 1), "a")] == [True, True, False, False]
