"""The command that installs the packages of an extra, by their names: on PyPI this package's is another project's."""

from __future__ import annotations

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """The ``pip`` command for an extra, e.g. ``pip install "pyarrow>=17"``."""
    import importlib.metadata  # here: only a message needs these

    from packaging.requirements import Requirement

    from rollouts.base.torch_index import torch_index

    try:
        requirements = [*map(Requirement, importlib.metadata.requires("rollouts") or [])]
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    packages = [
        f'"{each.name}{each.specifier}"'
        for each in requirements
        if each.marker and each.marker.evaluate({"extra": extra}) and not each.marker.evaluate({"extra": ""})
    ]
    if not packages:  # a source tree that is on the path, or that has changed since it was installed
        return f"install the packages of the extra {extra} in pyproject.toml"
    return f"pip install {' '.join(packages)}{torch_index(extra)}"
