"""Parts of a module of another system, run alone: the module itself imports a whole trainer."""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["lifted", "run_statements"]


def lifted(path: Path, *names: str, **scope: Any) -> dict[str, Any]:
    """Functions or methods of a file by name, unchanged; ``scope`` has what they read of their module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names}
    _run(path, [found[name] for name in names], scope)
    return scope


def run_statements(path: Path, function: str, chosen: Callable[[ast.stmt], bool], scope: dict[str, Any]) -> int:
    """Run the statements of a function that are chosen, in order and unchanged; returns their number."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    found = [node for node in ast.walk(body) if isinstance(node, ast.stmt) and chosen(node)]
    _run(path, sorted(found, key=lambda node: node.lineno), scope)
    return len(found)


def _run(path: Path, nodes: list[Any], scope: dict[str, Any]) -> None:
    module = ast.fix_missing_locations(ast.Module(nodes, []))
    exec(compile(module, str(path), "exec", __future__.annotations.compiler_flag), scope)
