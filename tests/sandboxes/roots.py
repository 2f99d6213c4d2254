"""A small root folder for the kind ``image``: a shell and a few programs of this machine, with their libraries."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

__all__ = ["small_root"]

_PROGRAMS = (
    *("sh", "cat", "chmod", "chown", "echo", "env", "false", "grep", "id", "kill", "ln", "ls", "mkdir", "mkfifo", "mv"),
    *("pwd", "readlink", "rm", "sleep", "tail", "test", "touch", "true", "wc", "setsid"),
)


@functools.cache
def small_root() -> str:
    """Its path; made once in a process, and removed at the end of it."""
    if shutil.which("ldd") is None:
        pytest.skip("ldd is not installed")
    holder = tempfile.TemporaryDirectory(prefix="rollouts-root-")
    _kept.append(holder)
    root = Path(holder.name)
    root.chmod(0o755)
    for name in ("bin", "etc", "root", "tmp", "home/bob"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nbob:x:1000:1000::/home/bob:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nbob:x:1000:\nteam:x:2000:bob\n")
    (root / "etc/secret").write_text("of root\n")
    (root / "etc/secret").chmod(0o600)
    if os.geteuid() == 0:
        os.chown(root / "home/bob", 1000, 1000)
    for name in _PROGRAMS:
        found = shutil.which(name)
        assert found is not None, name
        shutil.copy(os.path.realpath(found), root / "bin" / name)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        for word in listed.split():
            if word.startswith("/"):
                place = root / word[1:]
                if not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(os.path.realpath(word), place)
    return str(root)


_kept: list[tempfile.TemporaryDirectory[str]] = []
