"""``rollouts ls``: the runs and evaluations of a folder, in every state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.commands import main
from rollouts.runs.writer import RunWriter
from tests.stored_runs import edit_info, store_run


async def test_runs_are_listed_by_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finished, running, killed, and unreadable runs, and an evaluation; a table has a line for each."""
    await store_run(tmp_path / "finished")
    await store_run(tmp_path / "killed")
    edit_info(tmp_path / "killed", lambda info: info.update(status="running"))
    active = RunWriter(tmp_path / "active", {"recipe": "calculator", "batches_wanted": 5})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    (tmp_path / "exam").mkdir()
    (tmp_path / "exam" / "eval.json").write_text('{"recipe": "gsm8k", "estimates": {"reward": {"value": 0.25}}}')
    (tmp_path / "other").mkdir()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    found = {Path(entry["path"]).name: entry for entry in json.loads(capsys.readouterr().out)}
    assert {name: entry["status"] for name, entry in found.items()} == {
        "finished": "finished",
        "killed": "killed",
        "active": "running",
        "damaged": "unreadable",
        "exam": "evaluated",
    }
    assert (found["finished"]["batches"], found["finished"]["groups"]["in_batch"]) == (2, 6)
    assert found["exam"]["reward"] == 0.25
    assert main(["ls", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 6
    active.finish("stopped")


@pytest.mark.parametrize(
    "fields",
    [
        {"accounting": [1]}, {"accounting": {"dropped": {}}}, {"started": 5}, {"batches": "x"}, {"status": [{}]},
        {"recipe": {"a": 1}}, {"versions": 3},
    ],
)  # fmt: skip
async def test_a_field_of_a_wrong_type_is_an_unreadable_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object]
) -> None:
    """The run is listed with the reason, and so are the others; before, one such file ended the list."""
    await store_run(tmp_path / "sound")
    (tmp_path / "other").mkdir()
    text = {"status": "finished", "versions": {"rollouts": "0.1.0"}, **fields}
    (tmp_path / "other" / "run.json").write_text(json.dumps(text))
    (tmp_path / "exam").mkdir()
    (tmp_path / "exam" / "eval.json").write_text('{"estimates": {"reward": {"value": "high"}}}')
    assert main(["ls", str(tmp_path), "--json"]) == 0
    found = {Path(entry["path"]).name: entry for entry in json.loads(capsys.readouterr().out)}
    states = {name: entry["status"] for name, entry in found.items()}
    assert states == {"sound": "finished", "other": "unreadable", "exam": "unreadable"}
    assert found["other"]["error"]
    assert main(["ls", str(tmp_path)]) == 0
    assert "unreadable" in capsys.readouterr().out


def test_a_folder_without_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that does not exist is an error."""
    assert main(["ls", str(tmp_path)]) == 0
    assert "contains no run and no evaluation" in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "none")]) == 2
    assert "DIR: got '" in capsys.readouterr().err
