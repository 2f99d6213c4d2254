"""``scripts/install`` with a fake Python and a fake pip: a failed installation never counts as complete."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"

PYTHON = """\
#!/bin/sh
# Makes a venv in which rollouts can be imported, as an earlier installation leaves it.
[ "$1" = - ] && { echo "probe $2" >> calls; [ -e index ]; exit; }
[ "$1" = -m ] || exit 0
mkdir -p .venv/bin
cp "$0" .venv/bin/python
[ -e venv-fails ] && { echo "ensurepip is not available"; exit 1; }
cp pip .venv/bin/pip
"""
PIP = """\
#!/bin/sh
echo "$@" >> calls
[ -t 1 ] && echo "a progress bar"
case "$*" in *--no-index*) [ -e wheel ]; exit ;; esac
echo "WARNING: Location 'file:///wheels/torch/' is ignored" >&2
echo "WARNING: another one" >&2
[ -e pip-fails ] || exit 0
echo "ERROR: Could not find a version that satisfies the requirement torch" >&2
exit 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the script, a fake Python and a fake pip."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "install")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    for name, text in (("python", PYTHON), ("pip", PIP)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def install(project: Path, extras: str = "test", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [project / "scripts" / "install", extras],
        env={"PATH": f"{project / 'bin'}:{os.environ['PATH']}", "PYTHON": str(project / "python"), **environment},
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )


def stamps(project: Path) -> list[Path]:
    return list((project / ".venv").glob("installed-*"))


def calls(project: Path) -> list[str]:
    return (project / "calls").read_text().splitlines()


def test_a_failed_installation_fails_each_time_until_it_works(project: Path) -> None:
    """The error has pip's message, also after an earlier installation; once it succeeds it is not repeated."""
    (project / "pip-fails").touch()
    for _ in range(2):
        failed = install(project)
        assert failed.returncode == 1, failed
        assert "ERROR: Could not find a version that satisfies the requirement torch" in failed.stderr
        assert failed.stderr.endswith("scripts/install: pip failed with exit code 3; rollouts[test] is not installed\n")
        assert "WARNING: another one" in failed.stderr
        assert "Location" not in failed.stderr
        assert stamps(project) == []
    assert len(calls(project)) == 2
    (project / "pip-fails").unlink()
    for _ in range(2):
        assert install(project).returncode == 0
        assert len(stamps(project)) == 1
    assert len(calls(project)) == 3


def test_an_environment_that_was_not_finished_is_made_again(project: Path) -> None:
    """With a venv without pip, as left by a system without ensurepip, the second call prints the same error."""
    (project / "venv-fails").touch()
    for _ in range(2):
        failed = install(project)
        assert failed.returncode == 1, failed
        assert "ensurepip is not available" in failed.stdout
        assert stamps(project) == []
    (project / "venv-fails").unlink()
    assert install(project).returncode == 0


def test_pip_shows_its_progress_on_a_terminal_and_is_quiet_elsewhere(project: Path) -> None:
    """pip writes to the terminal directly; a log has no line for each package."""
    assert "a progress bar" not in install(project, "test").stdout
    assert "--quiet" in calls(project)[-1]
    ours, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "python")}
    line = [project / "scripts" / "install", "engine"]
    assert subprocess.run(line, env=environment, stdout=theirs, check=False, timeout=60).returncode == 0
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that no process has open
        while part := os.read(ours, 10_000):
            shown += part
    os.close(ours)
    assert b"a progress bar" in shown
    assert "--quiet" not in calls(project)[-1]


INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
CPU_INDEX = "PyTorch: the CPU build of https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("files", "environment", "message", "asked"),
    [
        (["wheel", "index"], {}, "PyTorch: installed, or a wheel on this machine", ""),
        (["index"], {}, CPU_INDEX, INDEX),
        ([], {}, "PyTorch: the build torch==2.13.0 of the package index", ""),
        (["index"], {"TORCH_INDEX": "http://mirror/cpu"}, "the CPU build of http://mirror/cpu", "http://mirror/cpu"),
        (["wheel", "index", "bin/nvidia-smi"], {}, "PyTorch: the build of PyPI", ""),
        (["index", "bin/nvidia-smi"], {"TORCH": "cpu"}, CPU_INDEX, INDEX),
        (["wheel", "index"], {"TORCH": "cuda"}, "PyTorch: the build of PyPI", ""),
    ],
    ids=["wheel", "index", "no index", "mirror", "GPU", "GPU, CPU build wanted", "CUDA wanted"],
)
def test_the_build_of_pytorch_has_cuda_only_for_a_gpu_or_on_request(
    project: Path, files: list[str], environment: dict[str, str], message: str, asked: str
) -> None:
    """A wheel on the machine goes first, then PyTorch's index of CPU builds; the message names the build."""
    (project / "bin").mkdir()
    for name, text in {"uname": "echo Linux", "nvidia-smi": "[ -e bin/nvidia-smi.here ]"}.items():
        (project / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (project / "bin" / name).chmod(0o755)
    for name in files:
        (project / name.replace("nvidia-smi", "nvidia-smi.here")).touch()
    done = install(project, "engine", **environment)
    assert (done.returncode, done.stdout) == (0, "")
    assert message in done.stderr
    assert " MB\n" in done.stderr
    assert "torch==2.13.0" in calls(project)[-1]
    assert asked in calls(project)[-1]
    assert ("extra-index-url" in calls(project)[-1]) == bool(asked)


def test_a_wrong_build_of_pytorch_is_named(project: Path) -> None:
    """Nothing is installed."""
    done = install(project, "engine", TORCH="gpu")
    assert (done.returncode, done.stderr) == (2, "scripts/install: TORCH: got 'gpu'; expected cpu or cuda\n")
