"""The option of ``pip`` that finds CPU builds of PyTorch: PyPI's builds for Linux contain CUDA, 4 GB in all."""

from __future__ import annotations

import shutil
import sys

__all__ = ["torch_index"]


def torch_index(extra: str) -> str:
    """PyTorch's index of CPU builds, for an extra with PyTorch on Linux without an NVIDIA GPU; else empty."""
    needs = extra in ("engine", "images") and sys.platform == "linux" and shutil.which("nvidia-smi") is None
    return " --extra-index-url https://download.pytorch.org/whl/cpu" if needs else ""
