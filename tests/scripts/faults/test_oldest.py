"""``scripts/test --oldest``: the lowest version of each dependency."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from scripts.faults.oldest import PROJECT, lowest_versions


def project(*dependencies: str) -> dict[str, Any]:
    """A project with these dependencies, and two extras of which one names the other."""
    optional = {"small": ["numpy>=1.26"], "large": ["ours[small]", "msgspec==0.19", "numpy>=1.26"]}
    return {"name": "ours", "dependencies": [*dependencies], "optional-dependencies": optional}


def test_each_dependency_has_its_lowest_version() -> None:
    """Those of extras too, once each."""
    expected = ["anyio==4.6", "mcp==1.30", "numpy==1.26", "msgspec==0.19"]
    assert lowest_versions(project("anyio>=4.6", "mcp>=1.30,<2"), ["large"]) == expected


@pytest.mark.parametrize("text", ["anyio", "anyio<5"])
def test_a_dependency_without_a_lower_bound_is_refused(text: str) -> None:
    """Its oldest version is unknown."""
    with pytest.raises(ValueError, match=f"got '{text}'; expected one lower bound"):
        lowest_versions(project(text), [])


def test_every_dependency_of_this_project_has_a_lower_bound() -> None:
    """With all extras."""
    own = tomllib.loads(PROJECT.read_text())["project"]
    assert len(lowest_versions(own, [*own["optional-dependencies"]])) > 50
