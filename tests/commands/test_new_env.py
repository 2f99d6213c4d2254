"""``rollouts new-env``: the written files pass their own tests and the check; nothing is overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.commands import main
from rollouts.commands.new_env import new_environment
from rollouts.errors import ConfigError
from rollouts.runs.reader import load_run

ROOT = Path(__file__).parents[2]


def test_a_new_environment_passes_its_own_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With pytest alone, in a separate folder, warnings as errors; the command names the next one."""
    assert main(["new-env", "word_game", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"next: rollouts check-env {tmp_path / 'word_game' / 'recipe.py'}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", "word_game"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_a_new_environment_runs_on_the_embedded_engine(engine_url: str, tmp_path: Path) -> None:
    """With the command of its README, which the recipe repeats."""
    new_environment("atlas_game", tmp_path)
    command = "rollouts run atlas_game/recipe.py --set keep=all --out runs/atlas_game"
    assert all(command in (tmp_path / "atlas_game" / name).read_text() for name in ("README.md", "recipe.py"))
    recipe, out = str(tmp_path / "atlas_game" / "recipe.py"), tmp_path / "run"
    options = {"keep": "all", "batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 16}
    settings = [text for name, value in options.items() for text in ("--set", f"{name}={value}")]
    assert main(["run", recipe, "--endpoint", engine_url, "--out", str(out), "--format", "jsonl", *settings]) == 0
    assert len(load_run(out)) == 4
    assert json.loads((out / "run.json").read_text())["recipe"] == "atlas_game"


@pytest.mark.parametrize("name", ["", "Wordle", "word-game", "2048", "class", "a/b", ".."])
def test_an_invalid_name_is_refused(name: str, tmp_path: Path) -> None:
    """Before a file is written."""
    with pytest.raises(ConfigError, match=r"NAME: got .*a Python name in lower case"):
        new_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """An existing folder stays unchanged; the parent folder must exist."""
    (tmp_path / "wordle").mkdir()
    with pytest.raises(ConfigError, match="a folder that does not exist yet"):
        new_environment("wordle", tmp_path)
    with pytest.raises(ConfigError, match="--into: got"):
        new_environment("wordle", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"--into: got '/proc'; expected a folder that can be written to \(\["):
        new_environment("wordle", Path("/proc"))
