"""The root folder of an image for the tests: a shell, the usual commands, Python and pytest of this machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest

from rollouts.sandboxes import SandboxError, opened
from rollouts.sandboxes.image import ImageSandbox

__all__ = ["add_program", "base_root", "usable_root"]

_PROGRAMS = (
    *(
        "bash",
        "cat",
        "chmod",
        "cp",
        "dirname",
        "echo",
        "env",
        "false",
        "find",
        "grep",
        "head",
        "id",
        "kill",
        "ln",
        "ls",
    ),
    *("mkdir", "mkfifo", "mv", "nohup", "pkill", "pwd", "rm", "sed", "seq", "setsid", "sleep", "tail", "tee", "test"),
    *("touch", "tr", "true", "wc", "yes", "dd"),
)
_PYTHON = "/usr/bin/python3"
_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEFT_OUT = ("test", "idlelib", "ensurepip", "lib2to3", "tkinter", "__pycache__", "site-packages", "dist-packages")
_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def base_root() -> str:
    """Its path; made once in a process, and removed at the end of it."""
    if sys.platform != "linux" or shutil.which("ldd") is None or not os.path.exists(_PYTHON):
        pytest.skip("the root of the tests needs Linux, ldd and a Python of the system")
    holder = tempfile.TemporaryDirectory(prefix="rollouts-root-")
    _kept.append(holder)
    root = Path(holder.name)
    root.chmod(0o755)
    for name in ("usr/bin", "usr/lib", "etc", "root", "tmp", "home/bob", "app", "usr/local/bin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nbob:x:1000:1000::/home/bob:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\nbob:x:1000:\n")
    if os.geteuid() == 0:
        os.chown(root / "home/bob", 1000, 1000)
    for name in _PROGRAMS:
        found = shutil.which(name)
        assert found is not None, name
        add_program(root, found, f"usr/bin/{name}")
    (root / "usr/bin/sh").symlink_to("bash")
    _add_python(root)
    return str(root)


def usable_root() -> str:
    """A small root; skips the test where this machine opens no box."""

    async def open_one() -> None:
        async with opened(ImageSandbox(base_root())):
            pass

    try:
        anyio.run(open_one)
    except SandboxError as error:
        pytest.skip(f"this machine opens no box: {error}")
    return base_root()


def add_program(root: Path, program: str, path: str) -> None:
    """Copy a program of this machine into a root, with the libraries that it loads."""
    shutil.copy(os.path.realpath(program), root / path)
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for word in listed.split():
        place = root / word.lstrip("/")
        if word.startswith("/") and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(word), place)


def _add_python(root: Path) -> None:
    version = subprocess.run(
        [_PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    add_program(root, _PYTHON, "usr/bin/python3")
    shutil.copytree(version, root / version[1:], ignore=shutil.ignore_patterns(*_LEFT_OUT, "config-*"))
    for name in os.listdir(f"{version}/lib-dynload"):
        for word in subprocess.run(
            ["ldd", f"{version}/lib-dynload/{name}"], capture_output=True, text=True
        ).stdout.split():
            place = root / word.lstrip("/")
            if word.startswith("/") and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(os.path.realpath(word), place)
    target = root / "usr/lib/python3/dist-packages"
    target.mkdir(parents=True)
    site = Path(pytest.__file__).parents[1]
    shutil.copy(site / "py.py", target)
    for name in _PACKAGES:
        shutil.copytree(site / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
