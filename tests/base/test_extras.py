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

from rollouts.base.extras import check_installed, imported, install_command
from rollouts.base.torch_index import torch_index
from rollouts.errors import ConfigError

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


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    """Only the missing one; the check imports nothing."""
    check_installed("--model", ("msgspec",), "engine")
    expected = f"--model needs no_such_package: {install_command('engine')}, or --endpoint"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        check_installed("--model", ("msgspec", "no_such_package"), "engine", ", or --endpoint")


def test_a_module_of_a_missing_package_is_an_error_with_the_command() -> None:
    """The message has the name under which the package is published."""
    assert imported("msgspec.json", "msgspec", "engine").__name__ == "msgspec.json"
    with pytest.raises(ConfigError, match=re.escape(f"no-such-package is not installed: {install_command('otel')}")):
        imported("no_such_package.trace", "no-such-package", "otel")
