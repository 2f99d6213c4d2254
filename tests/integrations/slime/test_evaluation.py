"""Evaluation: every configured data set, in order, and a failure that costs one rollout."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollouts.errors import ConfigError, GenerateFailure
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.evaluation import load_eval_prompts
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.settings import Settings
from rollouts.training import Prompt, Sample, Status
from tests.integrations.slime.launches import Launch, made_sample


def data_set(folder: Path, name: str, rows: int, **fields: Any) -> Namespace:
    path = folder / f"{name}.jsonl"
    path.write_bytes(
        b"".join(msgspec.json.encode({"q": f"{name} {i}", "a": str(i), "meta": {"i": i}}) + b"\n" for i in range(rows))
    )
    values = {"name": name, "path": str(path), "input_key": "q", "label_key": "a", "metadata_key": "meta"}
    return Namespace(**{**values, "n_samples_per_eval_prompt": 1, **fields})


def test_every_data_set_is_played_in_order(tmp_path: Path) -> None:
    """Rewards, truncations and samples of each, equally long, by row and repetition."""

    async def play(prompt: Prompt) -> list[Sample]:
        cut = prompt.metadata["i"] == 1
        return [made_sample(prompt, status=Status.TRUNCATED if cut else Status.COMPLETED)]

    launch = Launch(play=play, reward=lambda sample: float(sample.label))
    sets = [data_set(tmp_path, "one", 3, n_samples_per_eval_prompt=2), data_set(tmp_path, "two", 2)]
    output = generate_rollout_batch(launch.args(eval_datasets=sets), 5, launch.source(), evaluation=True)
    assert isinstance(output, records().eval_output)
    assert list(output.data) == ["one", "two"]
    assert output.data["one"]["rewards"] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert output.data["one"]["truncated"] == [False, False, True, True, False, False]
    samples = output.data["one"]["samples"]
    assert [sample.prompt for sample in samples] == [f"one {i // 2}" for i in range(6)]
    assert [sample.index for sample in samples] == list(range(6))
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert output.data["two"]["rewards"] == [0.0, 1.0]
    assert output.metrics == {"eval/one/failed_samples": 0, "eval/two/failed_samples": 0}


def test_a_failed_rollout_is_left_out_and_counted(tmp_path: Path) -> None:
    """It gets no reward; the others of its prompt stay."""

    def reward(sample: Sample) -> float:
        if sample.index == 1:
            raise RuntimeError("no judge")
        return 1.0

    launch = Launch(reward=reward)
    sets = [data_set(tmp_path, "one", 2, n_samples_per_eval_prompt=2)]
    output = generate_rollout_batch(launch.args(eval_datasets=sets), 0, launch.source(), evaluation=True)
    assert [sample.index for sample in output.data["one"]["samples"]] == [0, 2, 3]
    assert output.metrics["eval/one/failed_samples"] == 1


def test_a_data_set_where_all_fail_raises(tmp_path: Path) -> None:
    """With the reason."""

    def reward(sample: Sample) -> float:
        raise RuntimeError("no judge at all")

    launch = Launch(reward=reward)
    args = launch.args(eval_datasets=[data_set(tmp_path, "one", 2)])
    with pytest.raises(GenerateFailure, match="no judge at all"):
        generate_rollout_batch(args, 0, launch.source(), evaluation=True)


async def parts(args: Any, sample: Any, **_: Any) -> Any:
    """A dict reward."""
    return {"score": float(sample.metadata["i"]), "length": 1.0}


def test_a_data_set_has_its_own_reward(tmp_path: Path) -> None:
    """``custom_rm_path`` of the data set, and the key that the launch names."""
    launch = Launch()
    sets = [data_set(tmp_path, "one", 2, custom_rm_path=f"{__name__}.parts")]
    args = launch.args(eval_datasets=sets, reward_key="score")
    output = generate_rollout_batch(args, 0, launch.source(), evaluation=True)
    assert output.data["one"]["rewards"] == [0.0, 1.0]
    assert output.data["one"]["samples"][1].get_reward_value(args) == 1.0


def test_slices_and_chat_prompts(tmp_path: Path) -> None:
    """slime's ``path@[a:b]``, and text as a message with ``--apply-chat-template``."""
    entry = data_set(tmp_path, "one", 5, apply_chat_template=True)
    entry.path += "@[1:3]"
    settings = Settings.from_args(Launch().args(eval_datasets=[entry]))
    prompts = load_eval_prompts(settings.eval_sets[0], settings)
    assert [prompt.messages[0].content for prompt in prompts] == ["one 1", "one 2"]
    assert [prompt.label for prompt in prompts] == ["1", "2"]
    assert not isinstance(prompts[0].prompt, str)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The file, or the row and the key."""
    entry = data_set(tmp_path, "one", 1, input_key="question")
    settings = Settings.from_args(Launch().args(eval_datasets=[entry]))
    with pytest.raises(ConfigError, match=r"row 0.*'question'"):
        load_eval_prompts(settings.eval_sets[0], settings)
