"""The lowest version of each dependency that pyproject.toml allows, as constraints for pip: ``scripts/test --oldest``.

Invariant: a dependency without a lower bound is refused by name, because its oldest version is unknown.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

__all__ = ["lowest_versions"]

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest_versions(project: Mapping[str, Any], extras: Sequence[str]) -> list[str]:
    """A line ``name==version`` for each dependency of a project and of these extras, in order.

    Args:
        project: the table ``project`` of pyproject.toml.
        extras: names of its optional dependencies; extras of the project that they name are included.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    lines = []
    for requirement in _requirements(project, extras):
        lowest = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        if len(lowest) != 1:
            raise ValueError(f"pyproject.toml: got {str(requirement)!r}; expected one lower bound, such as >=1.0")
        lines.append(f"{requirement.name}=={lowest[0]}")
    return list(dict.fromkeys(lines))


def _requirements(project: Mapping[str, Any], extras: Sequence[str]) -> Iterator[Requirement]:
    optional = project["optional-dependencies"]
    for text in (*project["dependencies"], *(text for extra in extras for text in optional[extra])):
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            yield from _requirements({**project, "dependencies": []}, sorted(requirement.extras))
        else:
            yield requirement


if __name__ == "__main__":
    print("\n".join(lowest_versions(tomllib.loads(PROJECT.read_text())["project"], sys.argv[1].split(","))))
