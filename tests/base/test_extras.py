"""The packages that a message names can be installed."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rollouts.base.extras import install_command

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    "extra",
    [
        "engine",
        "serve",
        "gateway",
        "parquet",
        "math",
        "search",
        "mcp",
        "ray",
        "otel",
        "prometheus",
    ],
)
def test_the_command_names_the_packages_of_the_extra(extra: str) -> None:
    """Those of pyproject.toml, quoted for a shell."""
    pip, install, *packages = shlex.split(install_command(extra))
    assert (pip, install) == ("pip", "install")
    assert {*map(Requirement, packages)} == {*map(Requirement, EXTRAS[extra])}


def test_no_message_names_the_package_of_another_project() -> None:
    """``pip install rollouts[…]`` would install another project's package from PyPI."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    files += [path for folder in ("rollouts", "training") for path in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"pip install [^\n]{0,3}rollouts\[[a-z]")
    assert [path.relative_to(ROOT) for path in files if named.search(path.read_text(encoding="utf-8"))] == []
