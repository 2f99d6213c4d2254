"""The verbs in scripts/ run from a clean clone: each installs what it needs into an environment and runs there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERBS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.is_file() and not path.suffix)
FOLDERS = {"benches", "demo_model", "docs", "faults", "servers"}


@pytest.mark.parametrize("verb", VERBS, ids=lambda path: str(path.relative_to(ROOT / "scripts")))
def test_a_verb_installs_what_it_runs(verb: Path) -> None:
    """It is a bash file that calls scripts/install, and every project module that it runs exists."""
    text = verb.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert verb.name == "install" or "\nscripts/install " in text
    assert os.access(verb, os.X_OK)
    for module in re.findall(r"-m ((?:scripts|training)[.\w]*)", text):
        path = ROOT / module.replace(".", "/")
        main = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"
        guarded = [ast.unparse(node.test) for node in ast.parse(main.read_text()).body if isinstance(node, ast.If)]
        assert "__name__ == '__main__'" in guarded


def test_scripts_has_twelve_entries() -> None:
    """Commands that few need are in folders."""
    found = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.name != "__pycache__")
    assert found == sorted(FOLDERS | {"bench", "check", "install", "learn", "run", "site", "test"})


def test_every_command_that_a_page_names_exists() -> None:
    """Each ``scripts/…`` in the pages, in CONTRIBUTING and in the scripts themselves is a file or a folder."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *VERBS, *(ROOT / "scripts").rglob("*.py")]
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in pages
        for name in re.findall(r"(?<![\w/}])scripts/[a-z][\w/]*(?:\.py|\.sh)?(?!\w)", path.read_text(encoding="utf-8"))
    }
    assert [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()] == []


def test_an_extra_that_a_verb_installs_exists() -> None:
    """Every extra in a verb is defined in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = set(re.findall(r"^([\w-]+) = \[", table, re.MULTILINE))
    named = {
        extra
        for verb in VERBS
        for listed in re.findall(r'(?:^ *scripts/install |extras\+?=),?"?([\w,-]+)', verb.read_text(), re.MULTILINE)
        for extra in listed.split(",")
    }
    assert {"engine", "bench", "bench-peers"} <= named <= known


def _installed(folder: Path, *, pip: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of ``scripts/install a`` with the environment ``folder/other``; ``pip`` is the text of its pip."""
    for name, text in {"other/bin/python": "exit 0", "other/bin/pip": pip, "pyproject.toml": ""}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install", folder / "scripts" / "install")
    return subprocess.run(
        ["scripts/install", "a"],
        cwd=folder,
        env={**os.environ, "VENV": "other"},
        capture_output=True,
        text=True,
        check=False,
    )


def learn_says(folder: Path, *arguments: str) -> list[str]:
    """The command line of Python that ``scripts/learn`` ends with."""
    stubs = {"scripts/install": "exit 0", ".venv/bin/python": 'echo "$@"'}
    for name, text in stubs.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    shutil.copy(ROOT / "scripts" / "learn", folder / "scripts" / "learn")
    line = ["scripts/learn", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True).stdout.split()


def test_learn_passes_its_recipe_on(tmp_path: Path) -> None:
    """scripts/learn names no recipe itself, so that the recipe that follows is the only one."""
    said = learn_says(tmp_path, "calculator_program", "--steps", "2")
    assert said[:3] == ["-m", "training.learn", "--out"]
    assert said[-3:] == ["calculator_program", "--steps", "2"]


@pytest.mark.parametrize("first", ["--sft", "--distill", "--service", "--samplers", "--duel", "--proposer"])
def test_learn_has_other_trainings(first: str, tmp_path: Path) -> None:
    """Each is another module, which gets the arguments that follow."""
    flag, module, *rest = learn_says(tmp_path, first, "--out", "folder")
    assert (flag, rest) == ("-m", ["--out", "folder"])
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_a_newer_python_is_found_among_those_of_pyenv(tmp_path: Path) -> None:
    """A command of pyenv that only says which version has it, and a Python that is too old, are passed over."""
    folder = tmp_path / "versions" / "3.12.9" / "bin"
    folder.mkdir(parents=True)
    for path, code in ((tmp_path, 127), (folder, 0)):
        for name in ("python3.12", "python3.13", "python3.14", "python3"):
            (path / name).write_text(f"#!/bin/sh\nexit {code}\n")
            (path / name).chmod(0o755)
    line = ["bash", str(ROOT / "scripts/servers/newer_python.sh")]
    places = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path)}
    found = subprocess.run(line, env={**os.environ, **places}, capture_output=True, text=True, check=True)
    assert found.stdout == f"{folder}/python3\n"


def test_venv_names_the_environment(tmp_path: Path) -> None:
    """scripts/install installs into it, and records there what is installed."""
    assert _installed(tmp_path, pip="exit 0").returncode == 0
    assert [path.name.startswith("installed-a-") for path in tmp_path.glob("other/installed-*")] == [True]
    assert not (tmp_path / ".venv").exists()
