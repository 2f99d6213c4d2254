"""The training guide of OpenReward: its settings load, and its command fetches tasks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import pytest

from rollouts.dtypes import Endpoint
from rollouts.integrations.ors_server.app import environment_server
from rollouts.recipes.environments.openreward import load_settings
from rollouts.training import load_prompts
from tests import ors_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def blocks(asset: Callable[[str], Path]) -> Callable[[str], list[str]]:
    """The guide's blocks of code in a language."""
    text = asset("../source-documents/004_ec52cdc8f5f27095.txt").read_text(encoding="utf-8")
    return lambda language: re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_its_settings_are_read(blocks: Callable[[str], list[str]], tmp_path: Path) -> None:
    """Both files load: one environment with a system prompt that lists the tools, and several environments."""
    path = tmp_path / "train_config.yaml"
    whole, several = blocks("yaml")
    path.write_text(whole)
    settings = load_settings(path)
    (entry,) = settings.environments.values()
    assert (entry.splits, entry.nonterminal_reward, entry.reward_reduction, entry.max_turns) == (
        ("train",),
        0.0,
        "sum",
        20,
    )
    assert (settings.tools_in_prompt, settings.thinking, settings.run_name) == (True, False, "slime-rl-test-openreward")
    path.write_text(several)
    assert [
        (name, entry.reward_reduction, entry.max_turns) for name, entry in load_settings(path).environments.items()
    ] == [
        ("GeneralReasoning/WhoDunit", "sum", 20),
        ("MATH/GSM8K", "mean", 10),
    ]


async def test_its_command_fetches_tasks(
    blocks: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python prepare_tasks.py --config … --output …``, with our module in place of its file and a local server."""
    (tmp_path / "train_config.yaml").write_text(blocks("yaml")[0])
    (line,) = [code.strip() for code in blocks("bash") if "prepare_tasks.py" in code]
    assert line.startswith("python prepare_tasks.py ")
    command = [sys.executable, "-m", "rollouts.recipes.environments.openreward.prepare_tasks", *shlex.split(line)[2:]]
    async with environment_server(ors_recipe.recipe(Endpoint())) as url:
        for name, value in (("PYTHONPATH", str(ROOT)), ("OPENREWARD_SESSION_URL", url), ("OPENREWARD_API_KEY", "none")):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

        done = await anyio.to_thread.run_sync(run)
    assert (done.returncode, done.stdout.strip()) == (0, "4 tasks: tasks.jsonl"), done.stderr
    rows = [json.loads(text) for text in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert {tuple(row) for row in rows} == {("prompt", "label", "metadata")}
    assert {prompt.metadata["env_name"] for prompt in load_prompts(tmp_path / "tasks.jsonl")} == {
        "GeneralReasoning/WhoDunit"
    }
