"""The kinds of sandboxes that this machine can open, for tests that hold for all of them."""

from __future__ import annotations

import shutil
import sys

import pytest

from rollouts.sandboxes import ContainerSandbox, ImageSandbox, NamespaceSandbox, ProcessSandbox, Sandbox, SandboxLimits
from tests.sandboxes.engine import IMAGE
from tests.sandboxes.roots import small_root

__all__ = ["KINDS", "KINDS_THAT_KEEP", "kind_of", "requested_kind"]

_CONTAINER = pytest.param("container", marks=pytest.mark.containers)
KINDS_THAT_KEEP = ("namespaces", "bubblewrap", "image", _CONTAINER)
"""The kinds that can keep processes."""
KINDS = ("process", *KINDS_THAT_KEEP)


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


def requested_kind(request: pytest.FixtureRequest, limits: SandboxLimits | None = None) -> Sandbox:
    """The kind that a fixture is asked for; a container is one of the session's engine."""
    if request.param == "container":
        socket = request.getfixturevalue("engine").socket
        return ContainerSandbox(IMAGE, socket, limits=limits or SandboxLimits())
    return kind_of(request.param, limits)
