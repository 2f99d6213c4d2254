"""``rollouts doctor``: versions, the build of PyTorch, the sandbox, the extras, and the verbs that lack one.

Invariant: nothing is installed, changed or requested from a network; PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import runpy
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from packaging.requirements import Requirement

from rollouts import __version__
from rollouts.base.extras import install_command
from rollouts.base.terminal import say
from rollouts.commands.arguments import add_verb
from rollouts.environments.python_tool import REQUIRED, containment
from rollouts.sandboxes.base import SandboxError

__all__ = ["add", "extras_of", "lacking", "report_text"]

VersionOf: TypeAlias = Callable[[str], "str | None"]
"""The installed version of a distribution; ``None`` if there is none."""

NEEDS: dict[str, str] = {
    "run, play, eval without --endpoint": "engine",
    "serve": "engine",
    "serve-env": "serve",
    "up": "serve",
    "gateway": "gateway",
    "run --format parquet, export --to parquet or hf": "parquet",
    "export --to slime": "engine",
    "run --metrics-port": "prometheus",
    "run --trace": "otel",
    "--images, run visual or geo3k": "images",
    "run retool": "math",
    "run search": "search",
    "run search_r1": "search",
}
"""The verbs, with the extra that each needs."""

_FOR_DEVELOPERS = ("bench", "dev", "docs", "test")
_LIBRARIES = ("anyio", "httptools", "msgspec", "numpy", "transformers", "uvloop")


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "doctor", _doctor, "what is installed here, and which verbs lack a package?", "doctor --json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(args: argparse.Namespace) -> int:
    extras = extras_of(importlib.metadata.requires("rollouts") or [], _version_of)
    report = {
        "rollouts": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version_of(name) for name in _LIBRARIES},
        "torch": _torch(),
        "gpu": shutil.which("nvidia-smi") is not None,
        "sandbox": _sandbox(),
        "extras": extras,
        "lacking": lacking(extras),
    }
    say(json.dumps(report) if args.json else report_text(report))
    return 0


def extras_of(requires: Iterable[str], version_of: VersionOf) -> dict[str, list[str]]:
    """For each extra that users install, its requirements that are not satisfied.

    Args:
        requires: the requirements of the distribution, with their markers.
        version_of: the installed versions.
    """
    requirements = [Requirement(text) for text in requires]
    names = sorted({extra for each in requirements for extra in _extras_in(each)})
    return {
        name: [
            f"{each.name}{each.specifier}"
            for each in requirements
            if each.marker is not None
            and each.marker.evaluate({"extra": name})
            and not each.marker.evaluate({"extra": ""})
            and not _satisfied(each, version_of)
        ]
        for name in names
        if not name.startswith(_FOR_DEVELOPERS)
    }


def lacking(extras: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The verbs that do not work here, each with its extra."""
    return {verb: extra for verb, extra in NEEDS.items() if extras.get(extra, [extra])}


def report_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    torch, sandbox = report["torch"], report["sandbox"]
    build = "not installed" if torch is None else f"{torch['version']} ({torch['build']} build)"
    libraries = ", ".join(f"{name} {version}" for name, version in report["libraries"].items() if version)
    lines = [
        f"rollouts {report['rollouts']}, Python {report['python']}, {report['platform']}",
        f"libraries  {libraries}",
        f"torch      {build}; nvidia-smi {'found' if report['gpu'] else 'not found'}",
        f"sandbox    {', '.join(sandbox['mechanisms']) or 'no mechanism'}: {_verdict(sandbox)}",
        "extras",
    ]
    width = max(map(len, report["extras"]), default=0)
    for name, missing in report["extras"].items():
        state = f"missing: {', '.join(missing)}" if missing else "installed"
        lines.append(f"  {name:<{width}}  {state}")
    lines += [f"{verb}: {install_command(extra)}" for verb, extra in report["lacking"].items()]
    lines.append("some verbs lack an extra" if report["lacking"] else "every verb has what it needs")
    return "\n".join(lines)


def _verdict(sandbox: Mapping[str, Any]) -> str:
    if sandbox["error"]:
        return f"no program can run: {sandbox['error']}"
    open_names = [name for name in REQUIRED if name in sandbox["not_enforced"]]
    return f"does not contain {', '.join(open_names)}" if open_names else f"contains {', '.join(REQUIRED)}"


def _extras_in(requirement: Requirement) -> list[str]:
    """The extras that the marker of a requirement of an installed distribution names."""
    quoted = str(requirement.marker or "").replace("'", '"').split('extra == "')[1:]
    return [text.partition('"')[0] for text in quoted]


def _satisfied(requirement: Requirement, version_of: VersionOf) -> bool:
    version = version_of(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, str] | None:
    """Version and build of PyTorch, from its version file: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    names = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    kinds = {"cuda": "CUDA", "hip": "ROCm"}
    build = next((f"{label} {names[key]}" for key, label in kinds.items() if names.get(key)), "CPU")
    return {"version": str(names["__version__"]), "build": build}


def _sandbox() -> dict[str, Any]:
    try:
        found = containment()
    except SandboxError as error:
        return {"mechanisms": [], "not_enforced": {}, "error": str(error)}
    return {"mechanisms": list(found.mechanisms), "not_enforced": dict(found.not_enforced), "error": None}
