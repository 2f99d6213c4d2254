"""Logprobs of a teacher: one for each token of the response, of exactly the ids of the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rollouts.errors import ConfigError, GenerateFailure
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.convert import Reading, add_teacher, leaves
from rollouts.integrations.slime.records import records
from rollouts.integrations.slime.returned_samples import view
from rollouts.integrations.slime.scoring import score_by
from rollouts.rewards.teachers import Teacher
from rollouts.testing.server import StubServer
from rollouts.training import Sample
from tests.integrations.slime.launches import Launch, Source
from tests.integrations.slime.test_pipeline import single_turn

Serve = Callable[..., StubServer]


def teacher(**changed: Any) -> Callable[[list[int], dict[str, Any]], Mapping[str, Any]]:
    """A server's script: the logprob of a token is minus its id over 1024."""

    def answer(input_ids: list[int], params: dict[str, Any]) -> Mapping[str, Any]:
        rows = [[None if at == 0 else -token / 1024, token, None] for at, token in enumerate(input_ids)]
        return {"text": "", "meta_info": {"input_token_logprobs": rows, **changed}}

    return answer


@pytest.mark.parametrize("recipe", [False, True], ids=["single turn", "recipe"])
def test_every_sample_has_the_logprobs_of_the_teacher(serve: Serve, recipe: bool) -> None:
    """The rewards of the task stay what they are; the request is for the logprobs of the response."""
    stub, judge = serve(), serve(reply=teacher())
    flags = {"use_opd": True, "opd_type": "sglang", "rollouts_teacher_url": f"{judge.url}/generate"}
    args = Launch().args(**flags) if recipe else single_turn(stub, **flags)
    samples = list(leaves(generate_rollout_batch(args, 0, Source(2)).samples))
    for sample in samples:
        response = sample.tokens[-sample.response_length :]
        expected = [-token / 1024 * bit for token, bit in zip(response, sample.loss_mask, strict=True)]
        assert str(sample.teacher_log_probs.dtype) == "torch.float32"
        assert sample.teacher_log_probs.tolist() == expected
    assert {sample.reward for sample in samples} == ({0.0, 1.0} if recipe else {1.0})
    request = judge.requests[0]
    first = len(samples[0].tokens) - samples[0].response_length
    assert (request.body["return_logprob"], request.body["logprob_start_len"]) == (True, first - 1)


def test_a_teacher_at_another_temperature_is_refused(serve: Serve) -> None:
    """A server reports the logprobs of a prompt before the temperature, the trainer's are after it."""
    args = single_turn(serve(), rollout_temperature=0.5, rollouts_teacher_url=f"{serve().url}/generate")
    with pytest.raises(ConfigError, match=r"args\.rollout_temperature: got 0\.5.*rollouts_teacher_url"):
        generate_rollout_batch(args, 0, Source(2))


@pytest.mark.parametrize("masked", [False, True])
async def test_a_sample_that_trains_no_token_has_a_column(serve: Serve, masked: bool) -> None:
    """slime converts a column of every sample or of none; no request is sent for it."""
    pytest.importorskip("torch")
    judge = serve(reply=teacher())
    made = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -0.5], "loss_mask": [1, 1]}
    changed = {"loss_mask": [0, 0]} if masked else {"remove_sample": True}
    record = records().sample(**{**made, **changed})
    await score_by(Teacher(f"{judge.url}/generate"), view(record, None, Reading()), record)
    assert (record.teacher_log_probs.tolist(), judge.requests) == ([0.0, 0.0], [])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "input_token_logprobs"),
        ([[-0.5, 1, None]], "other ids"),
        ([], "other ids"),
        ("text", "expected one for each id"),
    ],
)
def test_logprobs_of_other_tokens_are_a_failure(serve: Serve, rows: Any, message: str) -> None:
    """The rollout is lost, and never trained towards another text."""
    judge = serve(reply=teacher(input_token_logprobs=rows))
    args = single_turn(serve(), rollouts_teacher_url=f"{judge.url}/generate", rollouts_max_attempts=1)
    with pytest.raises(GenerateFailure, match=message):
        generate_rollout_batch(args, 0, Source(2))


def test_distillation_without_a_teacher_is_refused() -> None:
    """The loss would fail after the first batch."""
    flags = {"use_opd": True, "opd_type": "sglang", "rollouts_recipe_filter": False}
    with pytest.raises(ConfigError, match=r"args\.opd_type.*rollouts_teacher_url"):
        generate_rollout_batch(Launch().args(**flags), 0, Source(2))
    assert generate_rollout_batch(Launch().args(use_opd=True, opd_type="megatron"), 0, Source(2)).samples


def test_a_filter_of_a_teachers_replies_is_refused() -> None:
    """Their rewards are all 0, so the filter could only drop every group."""
    flags = {
        "custom_rm_path": "slime.rollout.on_policy_distillation.reward_func",
        "custom_reward_post_process_path": "slime.rollout.on_policy_distillation.post_process_rewards",
        "dynamic_sampling_filter_path": "rollouts.integrations.slime.filters.check_reward_nonzero_std",
    }
    with pytest.raises(ConfigError, match=r"args\.dynamic_sampling_filter_path.*none with"):
        generate_rollout_batch(Launch().args(**flags), 0, Source(2))


@pytest.mark.parametrize("url", ["teacher:8000", 8000])
def test_a_teacher_is_a_url(url: Any) -> None:
    """By the name of the key."""
    with pytest.raises(ConfigError, match=r"args\.rollouts_teacher_url: url: got .*; expected a URL"):
        generate_rollout_batch(Launch().args(rollouts_teacher_url=url), 0, Source(2))


async def test_a_refusal_of_images_does_not_show_the_password_of_a_teacher() -> None:
    """A failure is stored and printed."""
    pytest.importorskip("torch")
    client = Teacher("http://user:secret@127.0.0.1:1/generate")
    record = records().sample(multimodal_inputs={"images": ["an image"]})
    with pytest.raises(ConfigError, match="none for samples with images") as refused:
        await score_by(client, Sample(prompt="asked", response="", tokens=[]), record)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "mask", [[0, 0, 1, 1], [0, 1, 1, 0]], ids=["an unsampled token first", "a record cut at its end"]
)
async def test_the_column_is_that_of_the_records_response(serve: Serve, mask: list[int]) -> None:
    """Whether ours has a shorter response, or the record ends before it, as with routed experts."""
    pytest.importorskip("torch")
    judge = serve(reply=teacher())
    tokens = [1, 2, 3, 4] if mask[-1] else [1, 2, 3]
    record = records().sample(tokens=tokens, response_length=len(tokens) - 1)
    ours = Sample(prompt="", response="", tokens=[1, 2, 3, 4], loss_mask=mask, rollout_log_probs=[0.0] * 4)
    expected = [-token / 1024 * bit for token, bit in zip(tokens, mask, strict=False)][1:]
    await score_by(Teacher(f"{judge.url}/generate"), ours, record)
    assert record.teacher_log_probs.tolist() == expected
    add_teacher(record, ours)
    assert record.teacher_log_probs.tolist() == expected
