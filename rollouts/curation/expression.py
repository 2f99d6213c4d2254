"""The expression of ``--where``: comparisons, ranges, ``and``, ``or`` and ``not`` over the fields of a rollout.

    pass_rate in 0.1..0.9 and turns <= 20 and status != "truncated"

Invariant: the expression is parsed and never executed; a form that is not listed here is refused with its text. A
comparison with a field that a rollout does not have is neither true nor false, and neither is ``not`` of it, so that a
rollout is kept only by values that it has. The same holds where ``None`` would be ordered; ``== None`` asks for it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs

from rollouts.base.validators import is_number
from rollouts.errors import ConfigError

__all__ = ["ROLLOUT_FIELDS", "TASK_FIELDS", "Facts", "Where"]

TASK_FIELDS = {
    "pass_rate": "share of the task's rollouts with a verdict that passed",
    "mean": "mean reward of the task's rollouts with a verdict",
    "best": "highest reward of the task",
    "spread": "highest reward of the task minus the lowest",
    "n": "rollouts of the task with a verdict, over all runs",
    "failed": "rollouts of the task without a verdict",
}
"""Fields of a rollout's task, over all runs."""

ROLLOUT_FIELDS = {
    "reward": "reward of the rollout",
    "passed": "whether the reward is at least --passing",
    "tokens": "tokens of all its branches",
    "sampled": "sampled tokens",
    "turns": "completions",
    "branches": "branches",
    "status": "`completed` or `truncated`",
    "stop_reason": "why its last branch ended",
    "version": "policy version of its last sampled token, a number where it is one",
    "batch": "number of its batch",
    "outcome": "`kept`, `dropped`, `failed` or `unbatched`",
    "label": "label of the prompt",
}
"""Fields of the rollout itself; ``metadata.NAME`` and ``metrics.NAME`` are fields, too."""

Facts: TypeAlias = Mapping[str, Any]
"""The fields of one rollout by name; ``metadata`` and ``metrics`` are mappings."""

_Value: TypeAlias = Callable[[Facts], Any]
_OPEN = ("metadata", "metrics")
_MOST = 2000
"""Characters of an expression."""
_RANGE = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)""")
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class _Absent:
    """The value of a field that a rollout does not have."""

    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


@attrs.frozen
class _Range:
    low: float
    high: float


class Where:
    """A parsed expression.

    Args:
        text: the expression.

    Attributes:
        fields: the names that it uses.

    Raises:
        ConfigError: it is not an expression of the forms above.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields: set[str] = set()
        if len(text) > _MOST:
            raise self._refused(f"{len(text)} characters", f"at most {_MOST}")
        source = _RANGE.sub(lambda hit: hit[1] or f"__range__({hit[2]}, {hit[3]})", text)
        try:
            tree = ast.parse(source.strip(), mode="eval")
            self._test = self._boolean(tree.body)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._refused(text, f"comparisons joined by and, or, not ({type(error).__name__})") from None
        self._asked: set[str] = set()
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"<Where {self.text}>"

    def __call__(self, facts: Facts) -> bool:
        """Whether a rollout matches.

        Raises:
            ConfigError: two values cannot be ordered, such as a number and a string.
        """
        return self._test(facts) is True

    def check_seen(self) -> None:
        """Check that each open field that was compared was in at least one rollout: a misspelled one keeps nothing.

        Raises:
            ConfigError: no rollout had a field.
        """
        missing = sorted(self._asked - self._seen)
        if missing:
            raise self._refused(missing[0], "a field that at least one rollout has")

    def _refused(self, got: Any, expected: str) -> ConfigError:
        return ConfigError.of("--where", got, expected)

    def _boolean(self, node: ast.expr) -> Callable[[Facts], bool | None]:
        """The test of a node; it returns ``None`` where a field that decides is absent."""
        match node:
            case ast.BoolOp(op=operation, values=values):
                parts = [self._boolean(value) for value in values]
                decides = isinstance(operation, ast.Or)
                return lambda facts: _joined((part(facts) for part in parts), decides=decides)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._boolean(operand)
                return lambda facts: None if (found := inner(facts)) is None else not found
            case ast.Compare(left=left, ops=operations, comparators=others):
                if any(isinstance(operation, ast.Is | ast.IsNot) for operation in operations):
                    raise self._refused(ast.unparse(node), "==, !=, <, <=, >, >=, in or not in")
                sides = [self._value(side) for side in (left, *others)]
                steps = list(zip(operations, sides, sides[1:], strict=False))
                return lambda facts: _joined(
                    (self._compare(op, one(facts), two(facts)) for op, one, two in steps), decides=False
                )
            case ast.Name() | ast.Attribute() | ast.Subscript():
                value = self._value(node)
                return lambda facts: None if (found := value(facts)) is _ABSENT else found is True
        raise self._refused(ast.unparse(node), "a comparison, or comparisons joined by and, or, not")

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value=constant) if constant is None or isinstance(constant, bool | int | float | str):
                return lambda facts: constant
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=number)) if is_number(number):
                negative = -number
                return lambda facts: negative
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                parts = [self._value(element) for element in elements]
                return lambda facts: [part(facts) for part in parts]
            case ast.Call(func=ast.Name(id="__range__"), args=[low, high]):
                limits = _Range(float(ast.literal_eval(low)), float(ast.literal_eval(high)))
                if limits.low > limits.high:
                    raise self._refused(
                        f"{limits.low:g}..{limits.high:g}", "a range from the lower number to the higher"
                    )
                return lambda facts: limits
            case ast.Name(id=name) if name in TASK_FIELDS or name in ROLLOUT_FIELDS:
                self.fields.add(name)
                return lambda facts: facts.get(name, _ABSENT)
            case ast.Attribute() | ast.Subscript():
                return self._open_field(node)
        names = ", ".join([*TASK_FIELDS, *ROLLOUT_FIELDS, "metadata.NAME", "metrics.NAME"])
        raise self._refused(ast.unparse(node), f"a number, a string, a list, a range LOW..HIGH, or one of: {names}")

    def _open_field(self, node: ast.expr) -> _Value:
        path: list[str] = []
        inner: ast.expr = node
        while True:
            match inner:
                case ast.Attribute(value=value, attr=name):
                    path.append(name)
                    inner = value
                case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                    path.append(name)
                    inner = value
                case ast.Name(id=name) if name in _OPEN and path:
                    break
                case _:
                    raise self._refused(ast.unparse(node), 'metadata.NAME, metrics.NAME or metrics["NAME"]')
        keys = [name, *reversed(path)]
        whole = ".".join(keys)
        self.fields.add(whole)

        def value_of(facts: Facts) -> Any:
            value: Any = facts
            self._asked.add(whole)
            for key in keys:
                if not isinstance(value, Mapping) or key not in value:
                    return _ABSENT
                value = value[key]
            self._seen.add(whole)
            return value

        return value_of

    def _compare(self, operation: ast.cmpop, left: Any, right: Any) -> bool | None:
        if left is _ABSENT or right is _ABSENT:
            return None
        if isinstance(operation, ast.Eq | ast.NotEq):
            return bool(left == right) is isinstance(operation, ast.Eq)
        if isinstance(operation, ast.In | ast.NotIn):
            found = self._contains(left, right)
            return None if found is None else found is isinstance(operation, ast.In)
        if left is None or right is None:
            return None
        try:
            return _ORDER[type(operation)](left, right)
        except TypeError:
            raise self._refused(f"{left!r} and {right!r}", "two numbers, or two strings, to be ordered") from None

    def _contains(self, left: Any, right: Any) -> bool | None:
        if isinstance(right, _Range):
            return None if left is None else is_number(left) and right.low <= left <= right.high
        if isinstance(right, str):
            return isinstance(left, str) and left in right
        if isinstance(right, dict) and not isinstance(left, str):
            raise self._refused(f"{left!r} in {right!r}", "a string: what is in an object is its name")
        if isinstance(right, list | tuple | dict):
            return left in right
        raise self._refused(f"in {right!r}", "in a list, a string, or a range LOW..HIGH")


def _joined(parts: Iterable[bool | None], *, decides: bool) -> bool | None:
    """The value of ``or`` (``decides`` is true) or ``and`` (false): stops at the part that decides."""
    result: bool | None = not decides
    for part in parts:
        if part is decides:
            return decides
        if part is None:
            result = None
    return result
