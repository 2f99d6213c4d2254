"""The command that installs what an extra of this package needs.

It names the packages, as the metadata of the installation list them. The name of this package would not do: on PyPI it
belongs to another project, and an installation from a clone or a wheel has another name for pip.
"""

from __future__ import annotations

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """The ``pip`` command for an extra, e.g. ``pip install "pyarrow>=17"``."""
    import importlib.metadata  # here: only a message needs these

    from packaging.requirements import Requirement

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
    return f"pip install {' '.join(packages)}{_index_of(extra)}"


def _index_of(extra: str) -> str:
    """PyTorch's index of CPU builds, on Linux without an NVIDIA GPU: PyPI's builds for Linux contain CUDA, 4 GB."""
    import shutil
    import sys

    needs_torch = extra in ("engine", "images") and sys.platform == "linux" and shutil.which("nvidia-smi") is None
    return " --extra-index-url https://download.pytorch.org/whl/cpu" if needs_torch else ""
