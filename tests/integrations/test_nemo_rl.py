"""NeMo-RL 0.6: its own masks, flattening and padding on our message logs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.nemo_rl import to_batch, to_message_log
from rollouts.training import Status
from rollouts.training.batch import group_advantages
from tests.lifted import lifted
from tests.trainer_samples import columns, scored_groups

torch = pytest.importorskip("torch")


def test_a_message_log_is_one_message_for_each_run_of_the_mask() -> None:
    """The ids concatenate to the row, and only replies have generation_logprobs."""
    for sample in scored_groups(2, 3):
        tokens, mask, logprobs = columns(sample)
        log = to_message_log(sample)
        assert torch.cat([message["token_ids"] for message in log]).tolist() == tokens
        trained = [("generation_logprobs" in message) for message in log for _ in message["token_ids"]]
        assert trained == mask
        assert {message["role"] for message in log if "generation_logprobs" in message} == {"assistant"}
        given = torch.cat([message["generation_logprobs"] for message in log if "generation_logprobs" in message])
        assert given.tolist() == [one for one, sampled in zip(logprobs, mask, strict=True) if sampled]


def test_a_batch_has_groups_next_to_each_other() -> None:
    """Rewards, multipliers and the oldest version; the order of arrival does not matter."""
    samples = scored_groups(3, 4)
    samples[5].loss_multiplier = 0.0
    batch = to_batch(sorted(samples, key=lambda sample: sample.index or 0, reverse=True))
    assert batch["idx"] == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(batch["total_reward"].tolist()) == sorted(torch.tensor([s.reward for s in samples]).tolist())
    assert batch["loss_multiplier"].tolist().count(0.0) == 1
    assert batch["length"].tolist() == [len(log[0]["token_ids"]) for log in batch["message_log"]], "of the prompt"
    assert batch["weight_version"] == 3


@pytest.mark.parametrize(
    ("field", "value"), [("status", Status.FAILED), ("reward", None), ("advantages", "zeros"), ("group_index", None)]
)
def test_what_nemo_rl_cannot_carry_is_refused(field: str, value: Any) -> None:
    """By the name of the field."""
    (sample,) = scored_groups(1, 1)
    setattr(sample, field, [0.0] * len(sample) if value == "zeros" else value)
    with pytest.raises(ConfigError, match=rf"\.{field}: got"):
        to_batch([sample])


def test_a_group_of_unlike_prompts_is_refused() -> None:
    """NeMo-RL would compare each with itself alone, and no rollout would have an advantage."""
    samples = scored_groups(1, 2)
    samples[1].tokens = [999, *samples[1].token_column[1:].tolist()]
    with pytest.raises(ConfigError, match=r"its prompt ids: got 'others'; expected those of .*of one prompt"):
        to_batch(samples)


def test_forks_and_versions_without_numbers_are_refused() -> None:
    """A branch would count as a rollout in the baseline; the buffer compares versions as numbers."""
    with pytest.raises(ConfigError, match="2 branches"):
        to_batch(scored_groups(1, forks=True))
    named = scored_groups(1, version="default")
    with pytest.raises(ConfigError, match=r"versions: got \['default'\]"):
        to_batch(named)
    assert to_batch(named, version=7)["weight_version"] == 7
    with pytest.raises(ConfigError, match="at least one sample"):
        to_batch([])


def function_of(file: str, name: str) -> Any:
    """One function of a module of theirs, alone."""
    spec = importlib.util.find_spec("nemo_rl")
    if spec is None or spec.origin is None:
        pytest.skip("scripts/test --trainers nemo runs it")
    scope = {"torch": torch, "cast": lambda _, value: value, "backfill_missing_routed_experts": lambda logs: None}
    return lifted(Path(spec.origin).parent / file, name, **scope)[name]


@pytest.mark.trainer
@pytest.mark.filterwarnings("default")
def test_their_flattened_batch_has_our_rows(compared: Callable[..., None]) -> None:
    """Masks, flattening and padding of theirs; un-padded, the rows are ours, and rewards give our advantages."""
    utils = pytest.importorskip("nemo_rl.data.llm_message_utils")
    samples = scored_groups(3, 4)
    batch = to_batch(samples)
    function_of("algorithms/grpo.py", "add_grpo_token_loss_masks_and_generation_logprobs")(batch["message_log"])
    flat, lengths = utils.batched_message_log_to_flat_message(
        batch["message_log"], pad_value_dict={"token_ids": 0}, make_sequence_length_divisible_by=8
    )
    assert flat["token_ids"].shape[1] % 8 == 0
    for number, sample in enumerate(samples):
        tokens, mask, logprobs = columns(sample)
        width = int(lengths[number])
        assert flat["token_ids"][number, :width].tolist() == tokens
        assert (flat["token_loss_mask"][number, :width] == 1).tolist() == mask
        assert flat["generation_logprobs"][number, :width].tolist() == logprobs
    compared("NeMo-RL 0.6.0", "b", "flat message logs: tokens, mask, logprobs", 0.0, note="masks lifted out of grpo.py")


@pytest.mark.trainer
def test_their_baseline_and_deviation_give_our_advantages(compared: Callable[..., None]) -> None:
    """extract_initial_prompt_messages finds prompts by ``length``; calculate_baseline_and_std_per_prompt compares their
    rewards, without leaving one out, as their estimator divides them.
    """
    utils = pytest.importorskip("nemo_rl.data.llm_message_utils")
    samples = scored_groups(3, 4)
    batch = to_batch(samples)
    rewards, prompts_of = batch["total_reward"], function_of("algorithms/grpo.py", "extract_initial_prompt_messages")
    prompts = prompts_of(batch["message_log"], batch["length"])
    flat, _ = utils.batched_message_log_to_flat_message(prompts, pad_value_dict={"token_ids": 0})
    groups = flat["token_ids"]
    statistics = function_of("algorithms/utils.py", "calculate_baseline_and_std_per_prompt")
    baseline, deviation = statistics(groups, rewards, torch.ones_like(rewards), leave_one_out_baseline=False)
    theirs = (rewards - baseline) / (deviation + 1e-6)
    worst = float(np.abs(theirs.numpy() - group_advantages(samples)).max())
    compared("NeMo-RL 0.6.0", "b", "GRPO of its total_reward", worst, within=1e-5, note="float32 there, lifted")
