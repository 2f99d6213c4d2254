"""The wheel that is built from the source distribution, installed into an empty environment, does the main job.

Its dependencies are the packages of the running interpreter: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(360)  # builds, installs and starts four processes that import everything


def built(target: str, source: Path, folder: Path) -> Path:
    """The file that hatchling builds from a folder."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds for a user without a clone: from the unpacked source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(built("sdist", ROOT, folder / "sdist")) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return built("wheel", source, folder / "wheel")


@pytest.fixture(scope="module")
def rollouts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that contains the wheel and no other file of the repository."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    # An editable installation's own .pth file is not read from a folder that another .pth file names.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    install += ["--no-compile"]  # few of the modules are imported
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return folder / "venv" / "bin" / "rollouts"


def run(command: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(
        [command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_main_job_runs_from_an_empty_folder(rollouts: Path, tmp_path: Path) -> None:
    """A built-in recipe fills a batch on the embedded engine; this takes longer than two seconds of CPU, since nothing
    less shows that the wheel contains the engine and its model."""
    pytest.importorskip("torch")
    options = ["--set", "batch_size=1", "--set", "n_samples_per_prompt=4", "--format", "jsonl"]
    done = run(rollouts, tmp_path, "run", "calculator", "--out", "runs/a", *options)
    assert done.returncode == 0, done.stderr
    info = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert (info["status"], info["command"]["recipe"]) == ("finished", "calculator")


def test_the_wheel_contains_every_file_of_recipes_and_environments(wheel: Path) -> None:
    """Both are links in the package: a builder that has seen a file by one path may leave it out at the other."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"rollouts/recipes/{path.relative_to(ROOT).as_posix()}"
        for folder in ("configs", "environments")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(expected) > 30
    assert sorted(expected - names) == []


def test_recipes_and_environments_of_the_wheel_can_be_imported(rollouts: Path, tmp_path: Path) -> None:
    """``rollouts recipes`` lists every recipe with its options, and every environment is imported."""
    listed = json.loads(run(rollouts, tmp_path, "recipes", "--json").stdout)
    assert listed.keys() == {path.stem for path in (ROOT / "configs").glob("*.py")} - {"__init__"}
    assert listed["calculator"]["options"]["batch_size"] == {"type": "int", "required": False, "default": 32}
    assert str(ROOT) not in listed["calculator"]["file"]
    names = sorted(path.parent.name for path in (ROOT / "environments").glob("*/__init__.py"))
    assert len(names) >= 7
    code = f"import importlib\nfor name in {names}: importlib.import_module(f'rollouts.recipes.environments.{{name}}')"
    done = run(rollouts.parent / "python", tmp_path, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
