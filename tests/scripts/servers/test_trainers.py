"""``scripts/test --trainers``: which trainers can run here, and what the others lack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.servers.trainers import TRAINERS, Trainer, interpreter, main

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def fake_python(folder: Path, version: str) -> Path:
    """A program that says that it is Python of this version."""
    path = folder / f"{version}.1" / "bin" / f"python{version}"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_found_by_its_version(tmp_path: Path) -> None:
    """``PYTHON`` goes first, if it has the version; pyenv's need not be on the path."""
    assert interpreter(VERSION, {}) == sys.executable
    assert interpreter("9.9", {"PYENV_ROOT": str(tmp_path)}) is None
    of_pyenv = fake_python(tmp_path / "versions", "9.9")
    assert interpreter("9.9", {"PYENV_ROOT": str(tmp_path)}) == str(of_pyenv)
    named = fake_python(tmp_path / "other", "9.9")
    assert interpreter("9.9", {"PYENV_ROOT": str(tmp_path), "PYTHON": str(named)}) == str(named)
    assert interpreter("9.9", {"PYENV_ROOT": str(tmp_path), "PYTHON": sys.executable}) == str(of_pyenv)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (Trainer(tests=()), ""),
        (Trainer(tests=(), python="9.9"), "Python 9.9: not found; PYTHON may name it"),
        (Trainer(tests=(), checkout="A_PATH"), "A_PATH: got None; expected a checkout of it"),
        (Trainer(tests=(), checkout="A_FILE"), f"A_FILE: got {sys.executable!r}; expected a checkout of it"),
    ],
)
def test_what_a_trainer_lacks_is_named(trainer: Trainer, expected: str) -> None:
    """Before an environment is made."""
    assert trainer.lacks({"PYENV_ROOT": "/nowhere", "A_FILE": sys.executable}) == expected


def test_an_unknown_trainer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names that are known."""
    assert main(["verl", "nowhere"]) == 2
    assert f"got 'nowhere'; expected one of {', '.join(TRAINERS)}" in capsys.readouterr().err
