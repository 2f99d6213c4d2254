"""A real Podman for the tests marked ``containers``: its API at a unix socket, with runc, and one image."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["BASE", "IMAGE", "Engine", "running_engine"]

BASE = Path(__file__).parents[2] / ".containers" / "base.tar"
IMAGE = "localhost/base:1"
_SETTINGS = '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
_SHOWN = 2000


class Engine:
    """A running Podman with a separate storage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "api.sock")
        (folder / "containers.conf").write_text(_SETTINGS)
        self.env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}

    def podman(self, *arguments: str) -> str:
        """The output of one of its commands."""
        line = ["podman", "--root", str(self.folder / "root"), "--runroot", str(self.folder / "run"), *arguments]
        end = subprocess.run(line, env=self.env, capture_output=True, text=True, check=False, timeout=120)
        assert end.returncode == 0, end.stderr[-_SHOWN:]
        return end.stdout

    def containers(self) -> list[str]:
        """The ids of all containers."""
        return self.podman("ps", "--all", "--quiet").split()


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """Start a Podman, and stop it; its containers, mounts and files are gone afterwards."""
    if not BASE.is_file() or os.geteuid() != 0:
        pytest.skip("no .containers/base.tar, or not root: scripts/test --containers makes it, as root")
    with tempfile.TemporaryDirectory(prefix="rollouts-podman-", ignore_cleanup_errors=True) as folder:
        engine = Engine(Path(folder))
        engine.podman("import", "--change", "WORKDIR=/srv", "--change", "ENV=OF_IMAGE=yes", str(BASE), IMAGE)
        line = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "system", "service", "--time=0"]
        with (
            (Path(folder) / "log").open("wb") as log,
            subprocess.Popen([*line, f"unix://{engine.socket}"], env=engine.env, stdout=log, stderr=log) as service,
        ):
            try:
                end = time.monotonic() + 20
                while not os.path.exists(engine.socket) and time.monotonic() < end:
                    assert service.poll() is None, (Path(folder) / "log").read_text()[-_SHOWN:]
                yield engine
            finally:
                with contextlib.suppress(AssertionError):
                    engine.podman("rm", "--all", "--force", "--time", "0")
                    engine.podman("rmi", "--all", "--force")
                service.terminate()
