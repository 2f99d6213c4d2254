"""Harbor as the judge of our grading: the same tasks, players and boxes, with Harbor's Trial and with ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.harbor.boxes import BoxOptions, TaskBoxes
from rollouts.harbor.check import check_tasks
from rollouts.harbor.grading import fill, grade, healthy, run_solution
from rollouts.harbor.tasks import HarborTask, load_tasks
from rollouts.harbor.trial import ENVIRONMENT
from rollouts.harbor.workspace import fresh_box, rungs_of, verifier_env
from rollouts.recipes.environments.harbor_tasks.tasks import SPECIAL, write_tasks
from tests.harbor.roots import base_root

pytestmark = [
    pytest.mark.harbor,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:harbor"),
]
pytest.importorskip("harbor")

SERVES: Mapping[str, int] = {"separate": 1, "server": 1, "steps": 0}
"""Rungs that serve a task; three where a task has no entry."""
COMMANDS = {
    "half": "for file in *.py; do echo 'raise ValueError' > $file; done; echo wrong > answer.txt",
    "cheat": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HarborTask]:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, "base")
    return {task.name: task for task in load_tasks(folder)}


@pytest.fixture(scope="module")
def options() -> BoxOptions:
    return BoxOptions(root=base_root())


async def by_harbor(task: HarborTask, player: str, options: BoxOptions, folder: Path) -> dict[str, float] | str:
    """The rewards of Harbor's Trial with Harbor's verifier, or the exception that it recorded."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    command = COMMANDS.get(player)
    agent = (
        AgentConfig(name="oracle" if player == "oracle" else "nop")
        if command is None
        else AgentConfig(import_path="tests.harbor.script_agent:ScriptAgent", kwargs={"command": command})
    )
    config = TrialConfig(
        task=TaskConfig(path=task.folder),
        trials_dir=folder,
        agent=agent,
        environment=EnvironmentConfig(import_path=ENVIRONMENT, kwargs={**attrs.asdict(options), "ignore": []}),
    )
    result = await (await Trial.create(config)).run()
    if result.verifier_result is None:
        return str(result.exception_info.exception_type)
    return {name: float(value) for name, value in result.verifier_result.rewards.items()}


async def by_us(task: HarborTask, player: str, rung: Any, options: BoxOptions) -> dict[str, float]:
    boxes = TaskBoxes(options)
    async with fresh_box(task, boxes, "keep") as box:
        await fill(task, box)
        await healthy(box, task.config.environment.healthcheck)
        if player == "oracle":
            await run_solution(task, box, {}, seconds=60)
        elif player in COMMANDS:
            await box.shell(COMMANDS[player], seconds=60)
        verdict = await grade(task, box, rung, lambda: fresh_box(task, boxes, rung), env=verifier_env(task, {}))
    return dict(verdict.rewards)


async def test_our_rewards_are_those_of_harbor_on_every_rung_that_serves(
    tasks: dict[str, HarborTask], options: BoxOptions, tmp_path: Path
) -> None:
    """Ten repositories and six special tasks, each with oracle, no-op, a half solution and a cheat: no difference."""
    checks = {check.task: check for check in await check_tasks(list(tasks.values()), TaskBoxes(options))}
    differences, compared = [], 0
    for name, task in tasks.items():
        rungs = rungs_of(task)
        serving = [] if checks[name].rung is None else rungs[rungs.index(checks[name].rung) :]
        assert len(serving) == SERVES.get(name, 3), checks[name]
        for player in ("oracle", "noop", *COMMANDS):
            theirs = await by_harbor(task, player, options, tmp_path)
            assert isinstance(theirs, dict), (name, player, theirs)
            assert (theirs["reward"] == 1) is (player == "oracle"), (name, player, theirs)
            for rung in serving:
                compared += 1
                if (ours := await by_us(task, player, rung, options)) != theirs:
                    differences.append((name, player, rung, ours, theirs))
    assert differences == []
    assert compared == 4 * (3 * 13 + 1 + 1)


def test_harbor_runs_on_our_boxes_alone(options: BoxOptions, tmp_path: Path) -> None:
    """``harbor run -e`` with our environment: all oracles get 1, also that of the task with steps."""
    write_tasks(tmp_path / "tasks", "base")
    line = [str(Path(sys.executable).with_name("harbor")), "run", "-p", str(tmp_path / "tasks"), "-a", "oracle"]
    line += ["-e", ENVIRONMENT, "--ek", f"root={options.root}", "-o", str(tmp_path / "jobs"), "-n", "2"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HARBOR_TELEMETRY": "0", "PYTHONPATH": "."}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rewards = [path.read_text().strip() for path in (tmp_path / "jobs").rglob("reward.txt")]
    parsed = [path.read_text() for path in (tmp_path / "jobs").rglob("reward.json")]
    assert rewards == ["1"] * (len(SPECIAL) + 1), "six tasks, one of which has two steps"
    assert len(parsed) == 10
    assert all('"reward": 1' in text for text in parsed)
