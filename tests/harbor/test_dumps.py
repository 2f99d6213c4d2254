"""Dumps of Harbor's trials, without alarm: ``scripts/test --harbor -s tests/harbor/test_dumps.py``."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import attrs
import pytest

from rollouts.audit import audit, reader_of
from rollouts.harbor.boxes import BoxOptions
from rollouts.harbor.tasks import load_tasks
from rollouts.harbor.trial import ENVIRONMENT
from rollouts.recipes.environments.harbor_tasks.tasks import write_tasks
from tests.audit.dumps import conversations, model_tokens, said
from tests.harbor.roots import base_root

pytestmark = [
    pytest.mark.harbor,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:harbor"),
]
pytest.importorskip("harbor")

TRIALS = 4


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of trials of two tasks, two each."""
    folder = tmp_path_factory.mktemp("dumps")
    anyio.run(play, folder)
    return folder / "trials"


async def play(folder: Path) -> None:
    """Trials that Harbor's own Trial plays, judges and writes."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    write_tasks(folder / "tasks", "base")
    tasks = sorted(load_tasks(folder / "tasks"), key=lambda task: str(task.folder))
    options = BoxOptions(root=base_root())
    for number in range(TRIALS):
        agent = AgentConfig(import_path="tests.harbor.token_agent:TokenAgent", kwargs={"number": number})
        config = TrialConfig(
            task=TaskConfig(path=tasks[number % 2].folder),
            trials_dir=folder / "trials",
            agent=agent,
            environment=EnvironmentConfig(import_path=ENVIRONMENT, kwargs={**attrs.asdict(options), "ignore": []}),
        )
        result = await (await Trial.create(config)).run()
        assert result.exception_info is None, result.exception_info
        assert result.verifier_result is not None


def test_the_dumps_of_trials_raise_no_alarm(trials: Path, tmp_path: Path) -> None:
    """The results with their details, and the trajectories in ATIF: every call of every rollout is judged."""
    report = audit(trials, reader_of("calls"), model_tokens=model_tokens())
    assert said("Harbor 0.25.0, results of trials, two calls", report) == []
    assert (report.rows, report.judged["requests"]) == (TRIALS, TRIALS)
    tokens = sum(len(one.columns[0]) for one in conversations()[:TRIALS])
    assert report.tokens == tokens
    trajectories = sorted(trials.rglob("trajectory.json"))
    assert len(trajectories) == TRIALS
    lines = [json.dumps(json.loads(path.read_text())) + "\n" for path in trajectories]
    (tmp_path / "atif.jsonl").write_text("".join(lines))
    report = audit(tmp_path / "atif.jsonl", reader_of("calls"), model_tokens=model_tokens())
    assert said("Harbor 0.25.0, ATIF trajectories of the same", report) == []
    assert (report.rows, report.judged["requests"], report.tokens) == (TRIALS, TRIALS, tokens)
    assert audit(trajectories[0], reader_of("calls")).broken.total() == 0


def test_a_planted_defect_is_found(trials: Path, tmp_path: Path) -> None:
    """In a result and a trajectory: another id in the second prompt, a logprob above 0, a column that is too short."""
    result = json.loads(sorted(trials.rglob("result.json"))[0].read_text())
    (detail,) = result["agent_result"]["rollout_details"]
    at = len(detail["prompt_token_ids"][0])
    detail["prompt_token_ids"][1][at] += 1
    detail["logprobs"][0][0] = 0.5
    detail["logprobs"][1].pop()
    trajectory = json.loads(sorted(trials.rglob("trajectory.json"))[0].read_text())
    first, second = (step["metrics"] for step in trajectory["steps"] if step["source"] == "agent")
    second["prompt_token_ids"][at] += 1
    first["logprobs"][0] = 0.5
    second["logprobs"].pop()
    for name, value in (("result.json", result), ("trajectory.json", trajectory)):
        (tmp_path / name).write_text(json.dumps(value))
        report = audit(tmp_path / name, reader_of("calls"), model_tokens=model_tokens())
        assert report.broken["requests"] == 1
        assert report.broken["logprobs"] >= 2
