"""The kinds of sandboxes that this machine can open, for tests that hold for all of them."""

from __future__ import annotations

import shutil
import sys

import pytest

from rollouts.sandboxes import ImageSandbox, NamespaceSandbox, ProcessSandbox, Sandbox, SandboxLimits
from tests.sandboxes.roots import small_root

__all__ = ["KINDS", "kind_of"]

KINDS = ("process", "namespaces", "bubblewrap", "image")


def kind_of(name: str, limits: SandboxLimits | None = None) -> Sandbox:
    """The kind with these limits; skip the test where the machine lacks it."""
    limits = limits or SandboxLimits()
    if name == "process":
        if sys.platform == "win32":
            pytest.skip("the tests run sh")
        return ProcessSandbox(limits)
    if sys.platform != "linux":
        pytest.skip("Linux only")
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if name == "image":
        return ImageSandbox(small_root(), workdir="/work", limits=limits)
    return NamespaceSandbox(limits=limits, bubblewrap=name == "bubblewrap")
