"""The kinds of sandboxes that this machine can open, for tests that hold for all of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import AsyncIterator

import pytest

from rollouts.sandboxes import NamespaceSandbox, ProcessSandbox, Sandbox, SandboxLimits
from tests.sandboxes.machines import FolderSandbox

__all__ = ["KINDS", "SERVICES", "kind_of", "needs_a_machine", "served_kind"]

KINDS = ("process", "namespaces", "bubblewrap", "remote")
SERVICES = {"daytona": "daytona", "e2b": "e2b", "kubernetes": "kubernetes_asyncio", "modal": "modal"}
"""The remote kinds, and what their SDKs are imported as."""
needs_a_machine = pytest.mark.skipif(
    shutil.which("bwrap") is None or os.geteuid() != 0, reason="a machine of the tests needs bubblewrap and root"
)


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
    if name == "remote":
        if shutil.which("bwrap") is None or os.geteuid() != 0:
            pytest.skip("a machine of the tests needs bubblewrap and root")
        return FolderSandbox(limits=limits)
    return NamespaceSandbox(limits=limits, bubblewrap=name == "bubblewrap")


@contextlib.asynccontextmanager
async def served_kind(name: str, limits: SandboxLimits) -> AsyncIterator[Sandbox]:
    """A remote kind, with the fake of its service; skip the test where its SDK is not installed."""
    pytest.importorskip(SERVICES[name])
    if shutil.which("bwrap") is None or os.geteuid() != 0:
        pytest.skip("a machine of the tests needs bubblewrap and root")
    module = importlib.import_module(f"tests.sandboxes.services.{name}")
    async with module.service() as service:
        yield service.kind(limits=limits)
