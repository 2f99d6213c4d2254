"""The PyTorch wheel to install where PyTorch's own index of CPU builds cannot be reached: prints ``VERSION MB``.

``scripts/install`` runs it with the Python of the environment and the arguments ``INDEX VERSION``. It reads the page of
torch of the package index that pip is configured for (PEP 691, sizes by PEP 700). It chooses the newest CPU build from
2.6 on, if the index has one; otherwise the given version, whose builds for Linux contain CUDA. It prints nothing where
the index does not list sizes. Only the standard library and pip's own packages are there.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pip._vendor.packaging.version import Version

__all__ = ["chosen"]

_LEAST = Version("2.6")
_JSON = "application/vnd.pypi.simple.v1+json"
_SECONDS = 20


def chosen(files: Iterable[Mapping[str, Any]], tested: str, tags: frozenset[Any]) -> tuple[str, int] | None:
    """Version and bytes of the wheel to install; ``None`` if no wheel fits, or its size is not listed.

    Args:
        files: those of the index, with ``filename``, ``size`` and ``yanked``.
        tested: the version that the engine is tested with.
        tags: that this interpreter accepts.
    """
    found: dict[Version, int] = {}
    for file in files:
        try:
            _, version, _, of_file = parse_wheel_filename(file["filename"])
        except InvalidWheelFilename:
            continue
        if tags & of_file and isinstance(file.get("size"), int) and not file.get("yanked"):
            found[version] = min(file["size"], found.get(version, file["size"]))
    cpu = [version for version in found if version.local == "cpu" and version >= _LEAST]
    best = max(cpu, default=Version(tested))
    return (str(best), found[best]) if best in found else None


def main(index: str, tested: str) -> None:
    request = urllib.request.Request(f"{index.rstrip('/')}/torch/", headers={"Accept": _JSON})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        files = json.load(answer)["files"]
    wheel = chosen(files, tested, frozenset(sys_tags()))
    if wheel is not None:
        print(wheel[0], round(wheel[1] / 1e6))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:  # scripts/install continues without a size
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
