"""The packages that a message names can be installed."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rollouts.base.extras import install_command
from rollouts.base.torch_index import torch_index

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
    pip, install, *packages = shlex.split(install_command(extra).removesuffix(torch_index(extra)))
    assert (pip, install) == ("pip", "install")
    assert {*map(Requirement, packages)} == {*map(Requirement, EXTRAS[extra])}


@pytest.mark.parametrize("extra", ["engine", "serve"])
def test_torch_comes_from_the_index_of_cpu_builds_where_there_is_no_gpu(extra: str) -> None:
    """PyPI's builds for Linux contain CUDA, 4 GB in all."""
    without_gpu = sys.platform == "linux" and shutil.which("nvidia-smi") is None
    named = install_command(extra).endswith(" --extra-index-url https://download.pytorch.org/whl/cpu")
    assert named is (without_gpu and extra == "engine")


def test_no_message_names_the_package_of_another_project() -> None:
    """``pip install rollouts[…]`` would install another project's package from PyPI."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    files += [path for folder in ("rollouts", "training") for path in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"pip install [^\n]{0,3}rollouts\[[a-z]")
    assert [path.relative_to(ROOT) for path in files if named.search(path.read_text(encoding="utf-8"))] == []
