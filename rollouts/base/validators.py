"""Checks of values from users: predicates, and attrs validators whose errors name the field.

Invariant: a bool, NaN, infinity or an integer that does not fit a float is not a number. This module knows only the
error of the package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeGuard

import attrs

from rollouts.errors import ConfigError

__all__ = ["are_texts", "as_texts", "check", "finite", "integer", "is_int", "is_number", "number", "seconds"]

Validator: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def finite(value: Any) -> float | None:
    """A value from user code as a float; ``None`` if it is not a number, NaN or infinite.

    Any value that ``float()`` accepts is a number, also NumPy and torch scalars, except text.
    """
    if type(value) is float:
        return value if -math.inf < value < math.inf else None
    try:
        number = math.nan if isinstance(value, _TEXTS) else float(value)
    except Exception:  # noqa: BLE001 - __float__ is user code: a tensor of two elements raises RuntimeError
        return None
    return number if math.isfinite(number) else None


_TEXTS = (str, bytes, bytearray)


def is_int(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer, and at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite ``int`` or ``float``."""
    if type(value) is float:
        return -math.inf < value < math.inf
    return isinstance(value, int | float) and not isinstance(value, bool) and finite(value) is not None


def are_texts(value: Any) -> bool:
    """Whether a value is a tuple of strings."""
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


def as_texts(value: Any) -> Any:
    """One string or several as a tuple; any other value unchanged, for the validator to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def check(expected: str, good: Callable[[Any], bool], *, optional: bool = False) -> Validator:
    """An attrs validator whose error names the class, the field, the value and what was expected."""

    def validate(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not (optional and value is None) and not good(value):
            raise ConfigError.of(f"{type(instance).__name__}.{field.name}", value, expected)

    return validate


def integer(least: int, *, optional: bool = False) -> Validator:
    """An attrs validator of integers from ``least`` on."""
    return check(f"an integer >= {least}", lambda value: is_int(value, least), optional=optional)


def number(
    what: str = "a number", *, least: float = -math.inf, above: float = -math.inf, optional: bool = False
) -> Validator:
    """An attrs validator of finite numbers from ``least`` on, or above ``above``."""
    bound = f">= {least:g}" if above == -math.inf else f"> {above:g}"
    good = lambda value: is_number(value) and value >= least and value > above  # noqa: E731
    return check(f"{what} {bound}", good, optional=optional)


seconds = functools.partial(number, "a number of seconds")
"""As :func:`number`, for seconds."""
