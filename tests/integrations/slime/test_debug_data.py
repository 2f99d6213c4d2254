"""A stored run as slime's debug data: through ``torch.save`` and back, flat, in order, and trainable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.integrations.slime import export_run
from rollouts.integrations.slime.records import records
from rollouts.training import load_run
from tests.stored_runs import store_run


def read(path: Path) -> tuple[int, list[Any]]:
    """As slime reads the file."""
    data = torch.load(path, weights_only=False)
    return data["rollout_id"], [records().sample.from_dict(row) for row in data["samples"]]


async def test_all_batches_go_into_one_file(tmp_path: Path) -> None:
    """Every sample of the run's batches, in their order, with the columns of the response."""
    run = tmp_path / "run"
    await store_run(run)
    (path,) = export_run(run, tmp_path / "out.pt")
    number, samples = read(path)
    assert number == 0
    assert samples
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length < len(sample.tokens)
        assert sample.status in (records().sample.Status.COMPLETED, records().sample.Status.TRUNCATED)
    assert [sample.index for sample in samples] == [sample.index for sample in load_run(run)]


async def test_each_batch_gets_its_file_where_the_name_asks_for_it(tmp_path: Path) -> None:
    """``{rollout_id}`` is slime's own placeholder."""
    run = tmp_path / "run"
    await store_run(run)
    paths = export_run(run, tmp_path / "data_{rollout_id}.pt")
    assert [path.name for path in paths] == [f"data_{number}.pt" for number in range(len(paths))]
    assert [read(path)[0] for path in paths] == list(range(len(paths)))


async def test_the_command_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``rollouts export RUN --to slime OUT``."""
    run = tmp_path / "run"
    await store_run(run)
    assert main(["export", str(run), "--to", "slime", str(tmp_path / "out.pt")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.pt'}\n"
    (again,) = export_run(run, tmp_path / "again.pt")
    assert [sample.to_dict() for sample in read(tmp_path / "out.pt")[1]] == [s.to_dict() for s in read(again)[1]]


def test_a_missing_run_is_an_error(tmp_path: Path) -> None:
    """The error names its path."""
    with pytest.raises(ConfigError, match=r"run\.json"):
        export_run(tmp_path, tmp_path / "out.pt")
