"""The tables of metric names: complete, and the page that is written from them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollouts
from rollouts.training.metric_names import OF_BATCHES, is_counted
from scripts.docs.metrics import pages
from tests.manager_semantics.world import answer_at_once, manager_of

PACKAGE = Path(rollouts.__file__).parent
COUNTED_IN = ("agent", "environments", "programs", "integrations/token_episodes.py")


def counted(path: Path) -> Iterator[str]:
    """The names that a module counts: of ``count(name)``, of ``counts[name]`` and of ``metrics={name: …}``.

    The public ``counts`` of an object are its own, such as those of sandboxes that are opened ahead.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        named: list[ast.expr] = []
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="count"), args=[first, *_]):
                named = [] if "text" in ast.unparse(owner) else [first]
            case ast.AugAssign(target=ast.Subscript(value=owner, slice=key)) if "counts" in ast.unparse(
                owner
            ) and "self.counts" not in ast.unparse(owner):
                named = [key]
            case ast.keyword(arg="metrics", value=ast.Dict(keys=keys)):
                named = [key for key in keys if key is not None]
        for each in named:
            for part in (each.body, each.orelse) if isinstance(each, ast.IfExp) else (each,):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
                elif isinstance(part, ast.JoinedStr) and isinstance(part.values[0], ast.Constant):
                    yield f"{part.values[0].value}x"


def test_each_count_of_the_package_is_in_a_table() -> None:
    """A name that a module writes down, whole or up to its part that varies."""
    files = [
        file
        for name in COUNTED_IN
        for file in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
    ]
    names = {name for file in files for name in counted(file)}
    assert len(names) > 40
    assert sorted(name for name in names if not is_counted(name)) == []


async def test_each_metric_of_a_batch_is_in_a_table() -> None:
    """A batch with a failed rollout, and with samples that have metrics of an environment."""
    async with manager_of(answer_at_once, batch_size=2, n_samples_per_prompt=2) as manager:
        await manager.generate_batch()
        patterns = [name.split("/") for name in OF_BATCHES]
        known = [[part for part in name if not part.isupper()] for name in patterns]
        lost = [
            name
            for name in manager.metrics
            if not any(name.split("/")[: len(fixed)] == fixed and fixed for fixed in known)
        ]
    assert lost == []


def test_the_page_is_the_table() -> None:
    """docs/metrics.md is up to date with scripts/docs/write metrics."""
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tool_calls", True), ("malformed_tool_calls/json", True), ("tool_eror", False), ("FAULT", False)],
)
def test_a_name_with_a_part_that_varies_is_counted(name: str, expected: bool) -> None:
    """By the part that does not vary."""
    assert is_counted(name) is expected
