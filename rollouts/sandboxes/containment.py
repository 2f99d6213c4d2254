"""The limits that the sandbox enforces on this machine or does not, computed from the supervisor's report.

Invariant: every name of :data:`NAMES` is in exactly one of ``enforced`` and ``not_enforced``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import attrs

from rollouts.errors import ConfigError

__all__ = ["NAMES", "REQUIRED", "Containment", "containment_of"]

NAMES = (
    "seconds",
    "cpu_seconds",
    "memory",
    "processes",
    "file_size",
    "disk",
    "output",
    "network",
    "writing",
    "reading",
    "signals",
    "survivors",
    "privileges",
    "environment",
    "descriptors",
)
"""Everything that a sandbox can enforce: resource limits and isolation."""

REQUIRED = ("network", "writing", "reading", "signals", "survivors")
"""Required by default. Namespaces enforce all of it; so do Landlock and seccomp together."""


@attrs.frozen(repr=False)
class Containment:
    """The enforced limits with their mechanisms, and the other limits with the reasons."""

    enforced: Mapping[str, str]
    not_enforced: Mapping[str, str]
    mechanisms: Sequence[str]
    """The mechanisms in use, of ``namespaces``, ``bubblewrap``, ``landlock``, ``seccomp``, ``user``."""

    @property
    def namespaces(self) -> bool:
        return "namespaces" in self.mechanisms

    @property
    def bubblewrap(self) -> bool:
        """Whether bubblewrap makes the namespaces, which this process may not make itself."""
        return "bubblewrap" in self.mechanisms

    def check(self, require: Collection[str] | Literal["all"]) -> None:
        """Raise if a required name is not enforced.

        Raises:
            ConfigError: a required name is not enforced or is unknown.
        """
        names = NAMES if require == "all" else (require,) if isinstance(require, str) else tuple(require)
        missing: dict[str, list[str]] = {}
        for name in names:
            if name not in NAMES:
                raise ConfigError.of("require", name, f'"all" or some of {", ".join(NAMES)}')
            if name in self.not_enforced:
                missing.setdefault(self.not_enforced[name], []).append(name)
        if missing:
            lacks = ", ".join(f"{', '.join(group)} ({why})" for why, group in missing.items())
            got = require if isinstance(require, str) else list(names)
            enforced = [name for name in names if name in self.enforced]
            raise ConfigError(
                f"require: got {got!r}; this machine does not enforce "
                f"{lacks}; expected one that does, or pass require={enforced!r} to run without"
            )

    def __repr__(self) -> str:
        lines = [f"  {name}: {how}" for name, how in self.enforced.items()]
        lines += [f"  {name}: NOT ENFORCED, {why}" for name, why in self.not_enforced.items()]
        return "\n".join(["Containment:", *lines])


_NO_NETWORK = "a network namespace without a network"


def containment_of(mechanisms: Sequence[str], why_no_namespaces: str, platform: str = sys.platform) -> Containment:
    """Derive the containment from the mechanisms that a first run reported."""
    namespaces = "namespaces" in mechanisms
    calls, files, user = ("seccomp" in mechanisms, "landlock" in mechanisms, "user" in mechanisms)
    boxed = "bubblewrap" in mechanisms
    inside = namespaces or boxed
    file_system = "a separate file system" + ("" if namespaces else ", by bubblewrap") if inside else None
    here = f"no namespaces here ({why_no_namespaces})"
    no_filter = f"{here} and no system call filter"
    how_by_name: dict[str, str | None] = {
        "seconds": "everything is killed at the deadline",
        "cpu_seconds": "RLIMIT_CPU, of each process",
        "memory": "RLIMIT_AS, of each process" if platform == "linux" else None,
        "processes": "RLIMIT_NPROC in a user namespace" if namespaces else "seccomp: only the first" if calls else None,
        "file_size": "RLIMIT_FSIZE",
        "disk": "a file system in memory, of that size" if inside else None,
        "output": "the supervisor discards the rest",
        "network": _NO_NETWORK if inside else "seccomp: no sockets" if calls else None,
        "writing": file_system or ("Landlock and seccomp" if files and calls else None),
        "reading": file_system or ("Landlock" if files else None),
        "signals": "a process namespace" if namespaces else "seccomp: only to itself" if calls else None,
        "survivors": "a process namespace" if inside else "seccomp: no other process" if calls else None,
        "privileges": "no capability, not root" if user else None,
        "environment": "not passed on",
        "descriptors": "closed except the three streams",
    }
    reasons = {
        "memory": f"{platform} does not limit the address space",
        "disk": f"{here}; each file is limited",
        "writing": f"{here} and no Landlock with a system call filter",
        "reading": f"{here} and no Landlock",
        "privileges": "we are root" if boxed else "we are root, and only root can read the interpreter",
    }
    return Containment(
        {name: how for name, how in how_by_name.items() if how is not None},
        {name: reasons.get(name, no_filter) for name, how in how_by_name.items() if how is None},
        tuple(mechanisms),
    )
