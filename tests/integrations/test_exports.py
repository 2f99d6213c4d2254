"""``rollouts export --to`` a trainer: one file a batch, whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest

from rollouts.commands import main
from rollouts.errors import ConfigError
from rollouts.integrations.exports import EXPORTERS, export_batches
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.training.batch import group_advantages
from rollouts.training.rows import split, trimmed
from tests.trainer_samples import scored_groups


def stored(path: Path, batches: list[list[Sample]]) -> Path:
    writer = RunWriter(path, {"recipe": "test"})
    for samples in batches:
        writer.write_batch(samples, {})
    writer.finish("finished")
    return path


def needs(package: str) -> pytest.MarkDecorator:
    lacks = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(lacks, reason=f"scripts/test --trainers {package} runs it")


@pytest.mark.parametrize("trainer", [name for name, exporter in EXPORTERS.items() if exporter.package])
def test_a_trainer_that_is_not_installed_is_named(trainer: str, tmp_path: Path) -> None:
    """With the page that says how to install it; nothing is left at OUT."""
    if importlib.util.find_spec(str(EXPORTERS[trainer].package)) is not None:
        pytest.skip(f"{trainer} is installed")
    run = stored(tmp_path / "run", [scored_groups(1, 2)])
    with pytest.raises(ConfigError, match=rf"--to: got '{trainer}'.*docs/trainers/{trainer}\.md"):
        export_batches(run, tmp_path / "out", trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("present", ["a file", "a folder with others", "an earlier export"])
def test_an_existing_output_is_kept(present: str, tmp_path: Path) -> None:
    """OUT is a folder that is new or empty; ``--overwrite`` replaces only what an export wrote."""
    run, out = stored(tmp_path / "run", [scored_groups(1, 2)]), tmp_path / "out"
    if present == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / ("batch-000000.pt" if present == "an earlier export" else "mine")).write_text("mine")
    with pytest.raises(ConfigError, match="expected a folder that is new or empty"):
        export_batches(run, out, "areal", overwrite=present != "an earlier export")


@pytest.mark.parametrize("kind", ["hf", "areal"])
def test_the_current_folder_is_no_output(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder appears when it is complete, so that the folder in which a shell is would be another one."""
    run = stored(tmp_path / "run", [scored_groups(1, 2)])
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        assert main(["export", str(run), "--to", kind, "."]) == 2
        assert "OUT: got '.'; expected the name of a folder that is new" in capsys.readouterr().err
        assert not list(Path().iterdir())


def test_a_trainer_takes_whole_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other outcomes are refused by the command, as for slime."""
    run = stored(tmp_path / "run", [scored_groups(1, 2)])
    assert main(["export", str(run), "--to", "verl", str(tmp_path / "out"), "--outcome", "all"]) == 2
    assert "--outcome: got 'all'; expected \"kept\" with --to verl" in capsys.readouterr().err


@pytest.mark.trainer
@needs("areal")
@pytest.mark.filterwarnings("ignore")
def test_areal_reads_a_batch(tmp_path: Path, compared: Callable[..., None]) -> None:
    """A list of dicts, one for each group; a batch with forks is refused."""
    import torch

    with pytest.raises(ConfigError, match="takes no forks"):
        export_batches(stored(tmp_path / "forks", [scored_groups(2, 3, forks=True)]), tmp_path / "out", "areal")
    samples = scored_groups(2, 3)
    (file, _) = export_batches(stored(tmp_path / "run", [samples, samples]), tmp_path / "out", "areal")
    rows = [
        {name: tensor[row].numpy() for name, tensor in group.items()}
        for group in torch.load(file)
        for row in range(len(group["rewards"]))
    ]
    worst = 0.0
    for row, sample in zip(rows, samples, strict=True):
        real = row["attention_mask"].astype(bool)
        assert row["input_ids"][real].tolist() == trimmed(sample).tokens
        assert (row["loss_mask"][real].tolist(), row["rewards"]) == (trimmed(sample).loss_mask, sample.reward)
        worst = max(worst, float(np.abs(row["logprobs"][real] - np.array(trimmed(sample).rollout_log_probs)).max()))
    compared("AReaL 1.0.4", "export", "a batch read back", worst)


@pytest.mark.trainer
@needs("verl")
@pytest.mark.filterwarnings("ignore")
def test_verl_reads_a_batch(tmp_path: Path, compared: Callable[..., None]) -> None:
    """A ``DataProto``; a batch with forks is refused, and leaves no file."""
    from verl import DataProto

    samples = scored_groups(2, 3)
    (file,) = export_batches(stored(tmp_path / "run", [samples]), tmp_path / "out", "verl")
    data = DataProto.load_from_disk(str(file))
    worst = 0.0
    for number, sample in enumerate(samples):
        batch, row = {name: tensor[number] for name, tensor in data.batch.items()}, split(sample)
        real = batch["attention_mask"].bool()
        assert batch["input_ids"][real].tolist() == trimmed(sample).tokens
        ends = real[-batch["responses"].shape[0] :]
        assert batch["response_mask"][ends].tolist() == row.mask.tolist()
        worst = max(worst, float(np.abs(batch["rollout_log_probs"][ends].numpy() - row.logprobs).max()))
    assert data.non_tensor_batch["uid"].tolist() == [str(sample.group_index) for sample in samples]
    compared("verl 0.9.1", "export", "a batch read back", worst)
    forked = stored(tmp_path / "forked", [scored_groups(2, 3, forks=True)])
    with pytest.raises(ConfigError, match="no forks in v0"):
        export_batches(forked, tmp_path / "refused", "verl")
    assert not (tmp_path / "refused").exists()


def columns_of(sample: Sample) -> tuple[list[int], list[int], list[float]]:
    """Tokens, mask and logprobs of a row."""
    row = trimmed(sample)
    logprobs = row.logprob_column
    assert logprobs is not None
    return row.token_column.tolist(), row.mask_column.astype(int).tolist(), logprobs.tolist()


@pytest.mark.parametrize("forks", [False, True])
def test_tinker_lines_are_the_rows_of_a_batch(tmp_path: Path, forks: bool) -> None:
    """Every datum's columns, un-shifted, and the advantages of the batch."""
    samples = scored_groups(2, 3, forks=forks)
    (file,) = export_batches(stored(tmp_path / "run", [samples]), tmp_path / "out", "tinker")
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    for line, sample, advantage in zip(lines, samples, group_advantages(samples), strict=True):
        tokens, mask, logprobs = columns_of(sample)
        assert [line["model_input"][0], *line["target_tokens"]] == tokens
        assert (line["model_input"][1:], line["mask"], line["logprobs"]) == (tokens[1:-1], mask[1:], logprobs[1:])
        assert line["advantages"] == [float(advantage) * one for one in mask[1:]]


@pytest.mark.parametrize("forks", [False, True])
def test_a_skyrl_object_has_the_rows_of_a_batch(tmp_path: Path, forks: bool) -> None:
    """Step-wise where rollouts fork; the ids of trajectories are the groups."""
    samples = scored_groups(2, 3, forks=forks)
    (file,) = export_batches(stored(tmp_path / "run", [samples]), tmp_path / "out", "skyrl")
    output = msgspec.json.decode(file.read_bytes())
    for number, sample in enumerate(samples):
        tokens, mask, logprobs = columns_of(sample)
        prompt = output["prompt_token_ids"][number]
        assert prompt + output["response_ids"][number] == tokens
        assert output["loss_masks"][number] == mask[len(prompt) :]
        assert output["rollout_logprobs"][number] == logprobs[len(prompt) :]
        assert output["rewards"][number] == sample.reward
        assert output["trajectory_ids"][number]["instance_id"] == str(sample.group_index)
    assert (output["is_last_step"] is not None) == forks


def test_openrlhf_lines_are_the_rows_of_a_batch(tmp_path: Path) -> None:
    """A response each; a batch with forks is refused, and leaves no file."""
    samples = scored_groups(2, 3)
    (file,) = export_batches(stored(tmp_path / "run", [samples]), tmp_path / "out", "openrlhf")
    for line, sample in zip(map(msgspec.json.decode, file.read_bytes().splitlines()), samples, strict=True):
        tokens, mask, logprobs = columns_of(sample)
        assert (line["observation_tokens"], line["rollout_log_probs"]) == (tokens, logprobs)
        assert sum(stop - start for start, stop in line["action_ranges"]) == sum(mask)
        assert line["reward"] == sample.reward
    forked = stored(tmp_path / "forked", [scored_groups(2, 3, forks=True)])
    with pytest.raises(ConfigError, match="no forks"):
        export_batches(forked, tmp_path / "refused", "openrlhf")
    assert not (tmp_path / "refused").exists()


def test_a_nemo_file_has_the_rows_of_a_batch(tmp_path: Path) -> None:
    """``torch.load`` with weights only: message logs, rewards, the oldest version; forks are refused."""
    torch = pytest.importorskip("torch")
    samples = scored_groups(2, 3)
    (file,) = export_batches(stored(tmp_path / "run", [samples]), tmp_path / "out", "nemo")
    batch = torch.load(file, weights_only=True)
    for log, sample in zip(batch["message_log"], samples, strict=True):
        tokens, mask, logprobs = columns_of(sample)
        assert torch.cat([message["token_ids"] for message in log]).tolist() == tokens
        assert [int("generation_logprobs" in one) for one in log for _ in one["token_ids"]] == mask
        given = torch.cat([message["generation_logprobs"] for message in log if "generation_logprobs" in message])
        assert given.tolist() == [one for one, sampled in zip(logprobs, mask, strict=True) if sampled]
    assert batch["total_reward"].tolist() == torch.tensor([sample.reward for sample in samples]).tolist()


def test_a_version_that_is_no_number_gets_one_from_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the option, and with it the file has that version; formats without versions refuse it."""
    torch = pytest.importorskip("torch")
    samples = scored_groups(2, 3)
    for sample in samples:
        sample.versions = [attrs.evolve(span, version="default") for span in sample.versions]
    run, out = str(stored(tmp_path / "run", [samples])), str(tmp_path / "out")
    assert main(["export", run, "--to", "nemo", out]) == 2
    assert "--version N" in capsys.readouterr().err
    assert main(["export", run, "--to", "nemo", out, "--version", "7"]) == 0
    assert torch.load(next(Path(out).iterdir()), weights_only=True)["weight_version"] == 7
    for kind in ("tinker", "jsonl", "slime"):
        assert main(["export", run, "--to", kind, f"{out}-{kind}", "--version", "7"]) == 2
        assert f"version: got 7; expected none with --to {kind}" in capsys.readouterr().err


@pytest.mark.trainer
@needs("prime_rl")
@pytest.mark.parametrize("forks", [False, True])
def test_prime_rl_reads_a_batch(tmp_path: Path, forks: bool) -> None:
    """A list of prime-rl's own ``TrainingSample``."""
    from prime_rl.transports.rollouts.types import TrainingSample

    samples = scored_groups(2, 3, forks=forks)
    (file,) = export_batches(stored(tmp_path / "run", [samples]), tmp_path / "out", "prime-rl")
    rows = msgspec.msgpack.decode(file.read_bytes(), type=list[TrainingSample])
    for row, sample, advantage in zip(rows, samples, group_advantages(samples), strict=True):
        tokens, mask, logprobs = columns_of(sample)
        assert (row.token_ids, row.mask, row.logprobs) == (tokens, [bool(one) for one in mask], logprobs)
        assert row.advantages == [float(advantage) * one for one in mask]
