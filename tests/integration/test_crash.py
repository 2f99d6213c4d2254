"""A real run, killed with SIGKILL and resumed, loses nothing; the long form of this is ``scripts/faults/crash``."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.recipe.files import build, load_recipe
from rollouts.recipes.configs.calculator_program import workspace_reward

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def test_the_recipe_has_programs(tmp_path: Path) -> None:
    """With ``programs`` a rollout is a process, scored by what it wrote; its prompts are the same at each resume."""
    options = {"witness": str(tmp_path / "witness"), "programs": "True", "prompts": "3"}
    function = load_recipe(ROOT / "scripts" / "faults" / "crash_recipe.py")
    made, again = (build(function, Endpoint(model=str(DEMO_MODEL)), options) for _ in range(2))
    generate_fn, reward_fn = made.config.generate_fn, made.config.reward_fn
    assert isinstance(generate_fn, partial)
    assert isinstance(reward_fn, partial)
    assert "program" in generate_fn.keywords
    assert reward_fn.keywords["reward_fn"] is workspace_reward
    assert made.data_buffer.get_prompts(5) == again.data_buffer.get_prompts(5)


@pytest.mark.timeout(600)
def test_a_killed_run_resumes_without_a_difference() -> None:
    """Two kills; tokens, groups and batches are those of the run without a kill."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.faults.crash_run", "--kills", "2", "--longest", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("passed\n")
