"""Control groups of one sandbox: memory and processors of all its processes together, where this process may make them.

Invariant: a group that cannot be made is an error that names it, before a program starts; no limit is left out. The
groups are removed by the sandbox's launcher when it ends, and again when the sandbox is closed. Version 1 was run;
version 2 was not.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping

from rollouts.sandboxes.base import SandboxError

__all__ = ["join_groups", "make_groups", "remove_groups"]

_ROOT = "/sys/fs/cgroup"
_PERIOD = 100_000
"""Microseconds in which the processors are counted."""


def make_groups(memory_bytes: int | None, cpus: float | None, root: str = _ROOT) -> list[str]:
    """Make the groups for these limits, under the root of the control groups.

    Raises:
        SandboxError: this machine or its rights do not allow it; none is left.
    """
    name = f"rollouts-{os.getpid()}-{uuid.uuid4().hex[:12]}"  # a number of a process is used again
    quota = None if cpus is None else round(cpus * _PERIOD)
    second = os.path.exists(os.path.join(root, "cgroup.controllers"))
    limits: dict[str, dict[str, str]] = {}
    if memory_bytes is not None:
        of_memory = "memory.max" if second else "memory.limit_in_bytes"
        limits.setdefault("" if second else "memory", {})[of_memory] = str(memory_bytes)
    if quota is not None and second:
        limits.setdefault("", {})["cpu.max"] = f"{quota} {_PERIOD}"
    elif quota is not None:
        limits["cpu"] = {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": str(quota)}
    made: list[str] = []
    try:
        for controller, files in limits.items():
            made.append(_make(os.path.join(root, controller, name), files))
    except OSError as error:
        remove_groups(made)
        what = " and ".join(word for word, value in (("memory", memory_bytes), ("cpus", cpus)) if value is not None)
        raise SandboxError(
            f"{what}: no control group can be made ({error.filename}: {error.strerror}); expected to be root on a "
            "machine whose control groups can be written, or None"
        ) from None
    return made


def _make(path: str, files: Mapping[str, str]) -> str:
    os.mkdir(path)
    try:
        for name, text in files.items():
            with open(os.path.join(path, name), "w") as file:
                file.write(text)
    except OSError:
        os.rmdir(path)
        raise
    return path


def join_groups(groups: list[str], process: int) -> None:
    """Move a process, and what it starts from then on, into the groups."""
    for group in groups:
        with open(os.path.join(group, "cgroup.procs"), "w") as file:
            file.write(str(process))


def remove_groups(groups: list[str]) -> list[str]:
    """Remove groups; return those with processes, which stay."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.rmdir(group)
    return [group for group in groups if os.path.isdir(group)]
