"""The leaderboard's mathematics as tools, without state; an impossible computation is an error message to the model."""

from __future__ import annotations

import json
import math
import statistics

from rollouts.environments.base import tool

__all__ = ["MathTools"]

_IMPERIAL = {
    ("inch", "cm"): 2.54,
    ("ft", "m"): 0.3048,
    ("yd", "m"): 0.9144,
    ("miles", "km"): 1.609344,
    ("lb", "kg"): 0.45359237,
    ("oz", "g"): 28.349523125,
    ("gal", "l"): 3.785411784,
}
_PREFIXES = {"k": 1e3, "h": 1e2, "da": 1e1, "": 1.0, "d": 1e-1, "c": 1e-2, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNITS = ("mol", "g", "m", "s", "A", "K", "l")


class MathTools:
    """The tools."""

    @tool
    def add(self, a: float, b: float) -> str:
        """Add two numbers."""
        return _to_json(a + b)

    @tool
    def subtract(self, a: float, b: float) -> str:
        """Subtract b from a."""
        return _to_json(a - b)

    @tool
    def multiply(self, a: float, b: float) -> str:
        """Multiply two numbers."""
        return _to_json(a * b)

    @tool
    def divide(self, a: float, b: float) -> str:
        """Divide a by b."""
        return _to_json(a / b)

    @tool
    def power(self, base: float, exponent: float) -> str:
        """Raise a number to a power."""
        return _to_json(base**exponent)

    @tool
    def absolute_value(self, number: float) -> str:
        """A number without its sign."""
        return _to_json(abs(number))

    @tool
    def round_number(self, number: float, decimal_places: int = 0) -> str:
        """Round a number to so many decimal places."""
        return _to_json(round(number, decimal_places))

    @tool
    def square_root(self, number: float, precision: int) -> str:
        """The square root of a number, to so many decimal places."""
        return _to_json(round(math.sqrt(number), precision))

    @tool
    def logarithm(self, value: float, base: float, precision: int) -> str:
        """The logarithm of a number to a base, to so many decimal places."""
        return _to_json(round(math.log(value, base), precision))

    @tool
    def percentage(self, part: float, whole: float) -> str:
        """How many percent of the whole a part is."""
        return _to_json(100 * part / whole)

    @tool
    def sum_values(self, numbers: list[float]) -> str:
        """The sum of numbers."""
        return _to_json(math.fsum(numbers))

    @tool
    def mean(self, numbers: list[float]) -> str:
        """The mean of numbers."""
        return _to_json(statistics.fmean(numbers))

    @tool
    def standard_deviation(self, numbers: list[float]) -> str:
        """The standard deviation of numbers, as a whole population."""
        return _to_json(statistics.pstdev(numbers))

    @tool
    def max_value(self, numbers: list[float]) -> str:
        """The largest of numbers."""
        return _to_json(max(numbers))

    @tool
    def min_value(self, numbers: list[float]) -> str:
        """The smallest of numbers."""
        return _to_json(min(numbers))

    @tool
    def si_unit_conversion(self, value: float, unit_in: str, unit_out: str) -> str:
        """Convert between multiples of one unit, e.g. km and cm."""
        (factor, unit), (other_factor, other) = _unit(unit_in), _unit(unit_out)
        if unit != other:
            raise ValueError(f"{unit_in} and {unit_out} measure different things")
        return _to_json(value * factor / other_factor)

    @tool
    def imperial_si_conversion(self, value: float, unit_in: str, unit_out: str) -> str:
        """Convert between an imperial unit and its metric one, e.g. ft and m."""
        if (unit_in, unit_out) in _IMPERIAL:
            return _to_json(value * _IMPERIAL[unit_in, unit_out])
        if (unit_out, unit_in) in _IMPERIAL:
            return _to_json(value / _IMPERIAL[unit_out, unit_in])
        raise ValueError(f"{unit_in} to {unit_out} is not known; known are {', '.join(map(' and '.join, _IMPERIAL))}")


def _unit(name: str) -> tuple[float, str]:
    """The factor and the base unit of a unit."""
    for unit in _UNITS:
        prefix = name.removesuffix(unit)
        if name.endswith(unit) and prefix in _PREFIXES:
            return _PREFIXES[prefix], unit
    raise ValueError(f"{name} is not a known unit")


def _to_json(result: float) -> str:
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return json.dumps({"result": result})
