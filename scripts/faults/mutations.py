"""Mutations of a module: one small change each, of an operator, a constant, an order of arguments or a statement.

Not changed: annotations, docstrings, assertions, ``__repr__``, f-strings, and the messages of errors. This module runs
nothing; ``scripts/faults/mutants.py`` does.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs

__all__ = ["Mutant", "mutants_of"]

_COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_COMPUTED = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitOr: (r"\|", "&"),
    ast.BitAnd: ("&", "|"),
}
_DECLARING = {"eq", "init", "kw_only", "repr", "slots"}
"""Options of attrs, which change what a class accepts and how it is shown."""
_JOINED = {ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and")}


@attrs.frozen
class Mutant:
    """A module with the text from ``start`` to ``stop`` replaced."""

    path: str
    source: str = attrs.field(repr=False)
    start: int
    stop: int
    replacement: str
    lines: range = range(0)
    """The lines of the smallest statement around it, without the body of a compound statement."""
    at_import: bool = False
    """Whether the statement runs when the module is imported, so that each test depends on it."""

    @property
    def line(self) -> int:
        return self.source.count("\n", 0, self.start) + 1

    @property
    def text(self) -> str:
        return self.source[: self.start] + self.replacement + self.source[self.stop :]

    @property
    def diff(self) -> str:
        """The changed lines, without context."""
        lines = difflib.unified_diff(self.source.splitlines(), self.text.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a module that can be parsed, in the order of the text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def place(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    found: list[Mutant] = []
    for node, lines, at_import in _nodes(ast.parse(source)):
        for first, last, replacement in _changes(node, _Text(source, place)):
            mutant = Mutant(path, source, first, last, replacement, lines, at_import)
            if mutant.text != source and _parses(mutant.text):
                found.append(mutant)
    return sorted(dict.fromkeys(found), key=lambda mutant: (mutant.start, mutant.stop, mutant.replacement))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _nodes(node: ast.AST, lines: range = range(0), at_import: bool = True) -> Iterator[tuple[ast.AST, range, bool]]:
    """The nodes whose change can change behaviour, each with the lines of its statement, and when that runs."""
    if isinstance(node, ast.Assert | ast.JoinedStr) or getattr(node, "name", "") == "__repr__":
        return
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return
    if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
        lines = _own_lines(node)
    yield node, lines, at_import
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (isinstance(node, ast.keyword) and node.arg in _DECLARING):
            continue
        later = name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in value if isinstance(value, list) else [value]:
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not is_docstring:
                yield from _nodes(child, lines, at_import and not later)


def _own_lines(node: Any) -> range:
    """The lines of a statement; of its body only the first: Python skips the head of ``while True``."""
    body = getattr(node, "body", None)
    first = getattr(node, "pattern", node).lineno
    return range(first, (body[0].lineno if body else node.end_lineno) + 1)


@attrs.frozen
class _Text:
    """The text of a module by the positions of its syntax tree."""

    source: str
    place: Callable[[int, int], int]
    """The position of a line and a column, which counts bytes."""

    def span(self, node: Any) -> tuple[int, int]:
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        start, stop = self.span(node)
        return self.source[start:stop]

    def between(self, left: ast.AST, right: ast.AST, pattern: str, replacement: str) -> Iterator[tuple[int, int, str]]:
        """Replace the operator between two operands."""
        start, stop = self.span(left)[1], self.span(right)[0]
        match = re.search(pattern, self.source[start:stop])
        if match is not None:
            yield start + match.start(), start + match.end(), replacement


def _changes(node: ast.AST, text: _Text) -> Iterator[tuple[int, int, str]]:
    """The changes of one node itself, as start, stop and replacement."""
    match node:
        case ast.Compare():
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from text.between(left, right, *_COMPARED[type(operator)])
        case ast.BinOp() if type(node.op) in _COMPUTED:
            yield from text.between(node.left, node.right, *_COMPUTED[type(node.op)])
        case ast.BoolOp():
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from text.between(left, right, *_JOINED[type(node.op)])
        case ast.UnaryOp(op=ast.Not()):
            yield *text.span(node), f"({text.of(node.operand)})"
        case ast.Constant():
            yield from ((*text.span(node), other) for other in _other_constant(node.value, text.of(node)))
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.GeneratorExp):
            if not isinstance(second, ast.Starred):
                whole = text.source[text.span(first)[1] : text.span(second)[0]]
                yield text.span(first)[0], text.span(second)[1], text.of(second) + whole + text.of(first)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.UnaryOp):
            yield *text.span(node.test), f"not ({text.of(node.test)})"
        case ast.AugAssign() if type(node.op) in _COMPUTED:
            yield *text.span(node), "pass"
            yield from text.between(node.target, node.value, *_COMPUTED[type(node.op)])
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield *text.span(node), "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield *text.span(node), "pass"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield *text.span(node), "return None"
        case ast.Continue() | ast.Break():
            yield *text.span(node), "break" if isinstance(node, ast.Continue) else "continue"


def _other_constant(value: object, written: str) -> list[str]:
    match value:
        case bool():
            return [repr(not value)]
        case int() | float():
            return [repr(value + 1)]
        case str() if re.fullmatch(r"[\w.]+", value):
            return [f"{written[:-1]}_{written[-1]}"]
    return []
