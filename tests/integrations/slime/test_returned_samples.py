"""Custom generate functions behind the rollout function: the sample that one returns is the sample that leaves."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from rollouts.errors import ConfigError, GenerateFailure
from rollouts.integrations.slime import generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.records import records
from rollouts.training import Sample
from tests.integrations.slime.launches import Launch, Source

KIND: Any = records().sample
DONE: Any = KIND.Status.COMPLETED


def plain_args(function: str, **overrides: Any) -> Namespace:
    """A launch of slime's with a custom generate function, and none of our own keys."""
    values = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 2,
        "rollout_temperature": 1.0,
        "rollout_max_response_len": 32,
        "hf_checkpoint": "nowhere",
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 9,
        "custom_generate_function_path": f"{__name__}.{function}",
        "reward_key": None,
        "made": [],
        "calls": [],
    }
    return Namespace(**{**values, **overrides})


def filled(sample: Any, **fields: Any) -> Any:
    """A reply of three tokens after a prompt of two, with a tool's token in the middle."""
    values = {
        "tokens": [1, 2, 3, 4, 5],
        "response": "a b c",
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25],
        "status": DONE,
        **fields,
    }
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


def run(args: Namespace, source: Source | None = None) -> list[Any]:
    source = source or Source(args.n_samples_per_prompt)
    return list(leaves(generate_rollout_batch(args, 0, source).samples))


# -- what the function set is what leaves -----------------------------------------------------------------------------


async def sets_everything(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    filled(
        sample,
        reward=float(sample.index % 2),
        label="another label",
        weight_versions=["7", "7"],
        multimodal_inputs={"images": ["raw"]},
        multimodal_train_inputs={"pixel_values": [[0.5]]},
        multimodal_train_input_id="image",
        rollout_routed_experts=[[[1, 2]]],
        rollout_top_p_token_ids=[3, 4],
        rollout_top_p_token_offsets=[0, 1, 1, 2],
        teacher_log_probs=[-1.0, -2.0, -3.0],
        train_metadata={"loss": "a"},
        metadata={**sample.metadata, "turns": 4},
        non_generation_time=1.5,
        spec_info=KIND.SpecInfo(3, 4, 5, 6),
        prefix_cache_info=KIND.PrefixCacheInfo(7, 8),
        source="a data set",
        tool_call_count=9,
        messages=[{"role": "user", "content": "hi"}],
    )
    args.made.append((sample, copy.deepcopy(sample)))
    return sample


def test_the_returned_sample_is_the_one_that_leaves() -> None:
    """That very object, with every field and every further attribute as the function left them."""
    args = plain_args("sets_everything")
    output = run(args)
    assert len(output) == 4
    expected = {id(sample): before for sample, before in args.made}
    for sample in output:
        before = expected[id(sample)]
        names = {field.name for field in fields(KIND)} | vars(before).keys()
        assert {name: getattr(sample, name) for name in names - {"rollout_id"}} == {
            name: getattr(before, name) for name in names - {"rollout_id"}
        }
        assert sample.rollout_id == sample.index
        assert (sample.tool_call_count, sample.source) == (9, "a data set")


async def removes_odd(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    filled(sample, reward=1.0)
    sample.remove_sample = sample.index % 2 == 1
    return sample


def test_a_removed_sample_stays_removed() -> None:
    """A part that the function took out of the loss is not trained."""
    assert [sample.remove_sample for sample in run(plain_args("removes_odd"))] == [False, True] * 2


async def fails_by_itself(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append(sample.index)
    if sample.index % 2:
        values = {"tokens": [0, 0], "response": "", "response_length": 1, "loss_mask": [0], "rollout_log_probs": [0.0]}
        return filled(sample, **values, reward=0.0, remove_sample=True, status=KIND.Status.FAILED)
    return filled(sample, reward=1.0)


def test_a_failure_that_the_function_removed_keeps_its_group() -> None:
    """It has dealt with the failure by itself: nothing is played again, and the group trains what is left."""
    args = plain_args("fails_by_itself")
    output = run(args)
    assert sorted(args.calls) == [0, 1, 2, 3]
    assert [sample.status for sample in output] == [DONE, KIND.Status.FAILED] * 2


async def needs_a_session(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.made.append((sample.index, sample.session_id))
    if len(args.made) == 1:
        raise RuntimeError("the sandbox is gone")
    return filled(sample, reward=1.0)


def test_each_attempt_has_a_session_of_its_own() -> None:
    """As slime numbers them before the call; an attempt after a failure does not reuse the one before."""
    args = plain_args("needs_a_session")
    output = run(args)
    sessions = [session for _, session in args.made]
    assert len(set(sessions)) == len(sessions) == 5
    assert all(sessions)
    assert {sample.session_id for sample in output} == set(sessions[1:])


# -- rewards ----------------------------------------------------------------------------------------------------------


async def counts_calls(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    filled(sample, label=["set"])
    sample.tool_call_count = sample.index + 1
    args.made.append(sample)
    return sample


async def by_count(args: Any, sample: Any, **_: Any) -> float:
    """A reward that reads an attribute of the generate function's, and writes its own."""
    sample.metadata["raw_reward"] = 10.0 * sample.tool_call_count
    sample.judged = "yes"
    sample.label.append("edited")
    return float(sample.tool_call_count)


def test_a_reward_sees_the_very_sample() -> None:
    """It reads what the generate function set, and what it writes stays."""
    args = plain_args("counts_calls", custom_rm_path=f"{__name__}.by_count")
    output = run(args)
    assert [sample.reward for sample in output] == [1.0, 2.0, 3.0, 4.0]
    assert [sample.metadata["raw_reward"] for sample in output] == [10.0, 20.0, 30.0, 40.0]
    assert [sample.label for sample in output] == [["set", "edited"]] * 4
    assert {id(sample) for sample in output} == {id(sample) for sample in args.made}


async def annotates(args: Any, sample: Any, **_: Any) -> float:
    sample.metadata["raw_reward"] = 3.0
    sample.judged = "yes"
    return float(sample.index % 2)


def keeps_judged(args: Any, samples: list[Any], **_: Any) -> Any:
    """A dynamic filter that reads what the reward wrote."""
    assert [sample.reward for sample in samples] == [0.0, 1.0]
    return records().filter_output(keep=all(sample.judged == "yes" for sample in samples))


def test_what_a_reward_writes_stays_with_a_recipe_too() -> None:
    """Metadata and attributes reach the filter and the trainer."""
    launch = Launch()
    args = launch.args(custom_rm_path=f"{__name__}.annotates", dynamic_sampling_filter_path=f"{__name__}.keeps_judged")
    output = run(args, launch.source())
    assert [(sample.metadata["raw_reward"], sample.judged, sample.metadata["row"]) for sample in output] == [
        (3.0, "yes", sample.group_index) for sample in output
    ]


async def scores_itself(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return filled(sample, reward={"score": float(sample.index), "acc": True, "pred": "[INVALID]"})


async def never_asked(args: Any, sample: Any, **_: Any) -> float:
    raise AssertionError("the sample has its reward")


@pytest.mark.parametrize("reward", [None, f"{__name__}.never_asked"], ids=["no reward function", "a reward function"])
def test_a_reward_that_generate_set_is_the_reward(reward: str | None) -> None:
    """Also a reward of several parts, of which only the part under ``--reward-key`` is a number."""
    output = run(plain_args("scores_itself", reward_key="score", custom_rm_path=reward))
    assert [sample.reward for sample in output] == [
        {"score": float(number), "acc": True, "pred": "[INVALID]"} for number in range(4)
    ]


async def unscored(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return filled(sample)


async def dapo(args: Any, sample: Any, **_: Any) -> Any:
    """The shape of slime's ``--rm-type dapo``."""
    return {"score": 1.0 if sample.index % 2 else -1.0, "acc": bool(sample.index % 2), "pred": "[INVALID]"}


@pytest.mark.parametrize("recipe", [False, True], ids=["custom generate", "recipe"])
def test_only_the_part_that_the_key_names_has_to_be_a_number(recipe: bool) -> None:
    """The prediction of slime's ``dapo`` reward is text."""
    launch = Launch()
    flags = {"custom_rm_path": f"{__name__}.dapo", "reward_key": "score"}
    args = launch.args(**flags) if recipe else plain_args("unscored", **flags)
    output = run(args, launch.source())
    assert [sample.reward["score"] for sample in output] == [-1.0, 1.0] * 2
    assert {sample.reward["pred"] for sample in output} == {"[INVALID]"}


async def no_number(args: Any, sample: Any, **_: Any) -> Any:
    return {"score": "high", "acc": 1.0}


def test_the_part_that_the_key_names_has_to_be_a_number() -> None:
    """Text there is a failed reward."""
    args = plain_args("unscored", custom_rm_path=f"{__name__}.no_number", reward_key="score")
    with pytest.raises(GenerateFailure, match="expected a finite number"):
        run(args)


async def teacher(args: Any, sample: Any, **_: Any) -> Any:
    """The raw reply of a teacher, as in slime's on-policy distillation."""
    return {"text": "", "meta_info": {"input_token_logprobs": [[-0.5, 1, None]]}}


async def with_reply(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return filled(sample, reward=await teacher(args, sample))


PROCESSING = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")


@pytest.mark.parametrize("function", ["unscored", "with_reply"])
@pytest.mark.parametrize("flag", PROCESSING)
def test_a_reward_that_is_processed_later_needs_no_number(function: str, flag: str) -> None:
    """Where the launch names a function that makes it one, the reward reaches it unchanged."""
    rewards = {"custom_rm_path": f"{__name__}.teacher"} if function == "unscored" else {}
    output = run(plain_args(function, **rewards, **{flag: "slime.rollout.on_policy_distillation.post_process_rewards"}))
    assert [set(sample.reward) for sample in output] == [{"text", "meta_info"}] * 4


def test_a_reward_that_no_function_processes_needs_a_number() -> None:
    """The error names the key that is missing."""
    with pytest.raises(GenerateFailure, match="--reward-key"):
        run(plain_args("unscored", custom_rm_path=f"{__name__}.teacher"))


def test_an_evaluation_may_be_scored_by_another_part(tmp_path: Path) -> None:
    """``--eval-reward-key`` selects the number; the dict of the reward function stays unchanged."""
    args = plain_args(
        "unscored",
        custom_rm_path=f"{__name__}.dapo",
        reward_key="score",
        eval_reward_key="acc",
        eval_datasets=[eval_set(tmp_path, 2)],
    )
    output = generate_rollout_batch(args, 0, Source(2), evaluation=True).data["one"]
    assert output["rewards"] == [0.0, 1.0]
    assert [sample.reward["score"] for sample in output["samples"]] == [-1.0, 1.0]


# -- fan-out ----------------------------------------------------------------------------------------------------------


async def fans_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    branches = [filled(copy.deepcopy(sample)) for _ in range(3)]
    branches[1].reward = 0.5
    for number, branch in enumerate(branches):
        branch.rollout_id, branch.number = sample.index, number
    args.made += branches
    return branches


async def ranks(args: Any, samples: list[Any], **_: Any) -> list[float]:
    """A reward of all samples of one rollout."""
    args.calls.append([sample.number for sample in samples])
    return [10.0 + sample.number for sample in samples]


def test_a_rollout_that_fans_out_is_scored_as_a_list() -> None:
    """The reward function is called once per rollout, with its samples that have no reward yet."""
    args = plain_args("fans_out", custom_rm_path=f"{__name__}.ranks")
    output = run(args)
    assert args.calls == [[0, 2]] * 4
    assert [sample.reward for sample in output] == [10.0, 0.5, 12.0] * 4
    assert {id(sample) for sample in output} == {id(sample) for sample in args.made}


async def ranks_in_an_array(args: Any, samples: list[Any], **_: Any) -> Any:
    return np.asarray(await ranks(args, samples), np.float32)


async def ranks_one_by_one(args: Any, samples: list[Any], **_: Any) -> Any:
    return iter(await ranks(args, samples))


async def ranks_in_a_tensor(args: Any, samples: list[Any], **_: Any) -> Any:
    return pytest.importorskip("torch").tensor(await ranks(args, samples))


@pytest.mark.parametrize("group_rm", [False, True], ids=["fan-out", "group"])
@pytest.mark.parametrize("reward", ["ranks_in_an_array", "ranks_one_by_one", "ranks_in_a_tensor"])
def test_rewards_of_a_list_may_be_an_array_or_a_generator(reward: str, group_rm: bool) -> None:
    """As slime takes them, of a rollout that fans out and of a group with ``--group-rm``."""
    function = "numbered" if group_rm else "fans_out"
    output = run(plain_args(function, custom_rm_path=f"{__name__}.{reward}", group_rm=group_rm))
    assert [sample.reward for sample in output] == ([10.0, 11.0] * 2 if group_rm else [10.0, 0.5, 12.0] * 4)


async def numbered(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.number = sample.index % 2
    return filled(sample)


async def ranks_without_an_order(args: Any, samples: list[Any], **_: Any) -> Any:
    return {1.0, 2.0}


def test_rewards_without_an_order_are_refused() -> None:
    """A set or a dict does not say which sample a reward belongs to."""
    args = plain_args("numbered", custom_rm_path=f"{__name__}.ranks_without_an_order", group_rm=True)
    with pytest.raises(GenerateFailure, match=r"got \{1\.0, 2\.0\}; expected a list of 2 rewards"):
        run(args)


def judges_lists(args: Any, group: list[Any], **_: Any) -> Any:
    """A dynamic filter as slime calls it: a list of rollouts, each a list of samples."""
    args.calls.append([[sample.number for sample in rollout] for rollout in group])
    return records().filter_output(keep=all(sample.reward is not None for rollout in group for sample in rollout))


def test_a_filter_gets_the_list_of_a_rollout_that_fans_out() -> None:
    """With the very samples, which have their rewards."""
    path = f"{__name__}.judges_lists"
    run(plain_args("fans_out", custom_rm_path=f"{__name__}.one_each", dynamic_sampling_filter_path=path))


def drops_first(args: Any, group: list[Any], **_: Any) -> Any:
    return records().filter_output(keep=group[0][0].group_index != 0)


def sees_rollouts(args: Any, groups: list[Any], get_samples: Any) -> None:
    args.calls.append([[[(s.reward, s.metadata) for s in rollout] for rollout in group] for group in groups])


def test_the_all_samples_function_gets_what_the_filter_dropped() -> None:
    """As it was played, with the rewards of its rollouts, also where a rollout fans out."""
    flags = {"dynamic_sampling_filter_path": "drops_first", "rollout_all_samples_process_path": "sees_rollouts"}
    flags = {name: f"{__name__}.{function}" for name, function in flags.items()}
    args = plain_args("fans_out", custom_rm_path=f"{__name__}.one_each", **flags)
    assert {sample.group_index for sample in run(args)} == {1, 2}
    assert args.calls == [[[[(reward, {"row": row}) for reward in (1.0, 0.5, 1.0)]] * 2 for row in range(3)]]


async def one_each(args: Any, samples: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(samples)


async def alone(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return [filled(sample, reward=1.0, rollout_id=sample.index)]


def test_a_list_of_one_sample_stays_a_list() -> None:
    """Sample filters and slime's own checks get the shape that the function returned."""
    groups = generate_rollout_batch(plain_args("alone"), 0, Source(2)).samples
    assert [[len(rollout) for rollout in group] for group in groups] == [[1, 1], [1, 1]]


async def two_rollouts_in_one(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    branches = [filled(copy.deepcopy(sample), reward=1.0) for _ in range(2)]
    for number, branch in enumerate(branches):
        branch.rollout_id = 100 * sample.index + number
    return branches


def test_the_samples_of_a_rollout_share_its_id() -> None:
    """slime's own check fails on them; here the failure names the numbers."""
    with pytest.raises(GenerateFailure, match="one rollout_id"):
        run(plain_args("two_rollouts_in_one"))


async def twice(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return [filled(sample, reward=1.0)] * 2


def test_a_sample_that_comes_twice_is_refused() -> None:
    """Its tokens would be trained twice."""
    with pytest.raises(GenerateFailure, match="each sample once"):
        run(plain_args("twice"))


# -- what does not train is not held to the laws of what does ---------------------------------------------------------


async def placeholder(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """slime's coding agent returns this if its sandbox never started, and for every evaluation."""
    if not evaluation and sample.index % 2 == 0:
        return filled(sample, reward=1.0)
    values = {"tokens": [0, 0], "response": "", "response_length": 1, "loss_mask": [0], "rollout_log_probs": [0.0]}
    return filled(sample, **values, reward=0.25, remove_sample=True)


def test_a_placeholder_keeps_its_place_in_the_group() -> None:
    """A rollout without a token to train is not a failure if the function removed it."""
    output = run(plain_args("placeholder"))
    assert [sample.tokens for sample in output] == [[1, 2, 3, 4, 5], [0, 0]] * 2
    assert [sample.reward for sample in output] == [1.0, 0.25] * 2


async def masked(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return filled(sample, reward=1.0, loss_mask=[0, 0, 0] if sample.index % 2 else None)


def test_an_empty_mask_and_no_mask_are_slimes_words() -> None:
    """An empty mask trains nothing and is accepted; no mask trains everything and stays none."""
    assert [sample.loss_mask for sample in run(plain_args("masked"))] == [None, [0, 0, 0]] * 2


def eval_set(folder: Path, rows: int) -> Namespace:
    path = folder / "one.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"q": f"question {row}"}) + b"\n" for row in range(rows)))
    return Namespace(name="one", path=str(path), input_key="q", n_samples_per_eval_prompt=1)


async def bare(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    sample.response, sample.reward, sample.status = "an answer", 0.75, DONE
    args.made.append(sample)
    return sample


@pytest.mark.parametrize("function", ["placeholder", "bare"])
def test_an_evaluation_needs_a_reward_and_nothing_else(tmp_path: Path, function: str) -> None:
    """No tokens, no logprobs: nothing of it is trained."""
    args = plain_args(function, eval_datasets=[eval_set(tmp_path, 3)])
    output = generate_rollout_batch(args, 0, Source(2), evaluation=True)
    assert output.metrics["eval/one/failed_samples"] == 0
    assert output.data["one"]["rewards"] == [0.25 if function == "placeholder" else 0.75] * 3
    assert {id(sample) for sample in output.data["one"]["samples"]} >= {id(sample) for sample in args.made}


@pytest.mark.parametrize("mixed", [False, True], ids=["all", "some"])
def test_samples_without_logprobs_are_trained_where_the_trainer_computes_them(mixed: bool) -> None:
    """The trainer takes the logprobs of all samples of a batch, or of none."""
    output = run(plain_args("harmful" if mixed else "without_logprobs", harm="no logprobs"))
    assert {sample.group_index for sample in output} == {0, 1}
    assert [sample.rollout_log_probs for sample in output] == [None] * 4


async def without_logprobs(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append(sample.index)
    return filled(sample, reward=1.0, rollout_log_probs=None)


@pytest.mark.parametrize("flag", ["use_tis", "use_rollout_logprobs", "get_mismatch_metrics"])
def test_logprobs_that_the_trainer_uses_are_required(flag: str) -> None:
    """The error names the function, and comes after the first groups."""
    args = plain_args("without_logprobs", **{flag: True})
    with pytest.raises(GenerateFailure, match=rf"{__name__}\.without_logprobs: slime sample .*'rollout_log_probs': 0"):
        run(args)
    assert len(set(args.calls)) <= 4


async def marks_failed(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append(sample.index)
    return filled(sample, reward=1.0, status=KIND.Status.FAILED if sample.index % 4 == 0 else DONE)


def test_a_sample_marked_failed_is_trained_as_in_slime() -> None:
    """Its function did not remove it; it is not played again."""
    args = plain_args("marks_failed")
    output = run(args)
    assert [sample.status for sample in output] == [KIND.Status.FAILED, DONE, DONE, DONE]
    assert sorted(args.calls) == [0, 1, 2, 3]


async def fails_empty(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append(sample.index)
    return filled(sample, tokens=[], response_length=0, loss_mask=[], rollout_log_probs=[], status=KIND.Status.FAILED)


def test_a_failed_sample_without_tokens_is_refused_by_its_function() -> None:
    """slime's tensors cannot have it; the error names the function and the remedy, and comes after the first groups."""
    args = plain_args("fails_empty")
    with pytest.raises(GenerateFailure, match=rf"{__name__}\.fails_empty: slime sample .* and remove_sample"):
        run(args)
    assert len(set(args.calls)) <= 4


HARMS: dict[str, Callable[[Any], Any]] = {
    "no logprobs": lambda sample: filled(sample, reward=1.0, rollout_log_probs=None),
    "logprobs that are not numbers": lambda sample: filled(sample, reward=1.0, rollout_log_probs=[float("nan")] * 3),
    "a short mask": lambda sample: filled(sample, reward=1.0, loss_mask=[1]),
    "no prompt": lambda sample: filled(sample, reward=1.0, tokens=[1, 2, 3]),
    "a status in text": lambda sample: filled(sample, reward=1.0, status="completed"),
    "removed, without logprobs": lambda sample: filled(sample, reward=1.0, remove_sample=True, rollout_log_probs=None),
    "no sample": lambda sample: "a reply",
}


async def harmful(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return HARMS[args.harm](sample) if sample.group_index == 0 else filled(sample, reward=1.0)


@pytest.mark.parametrize("harm", HARMS)
def test_what_slime_would_choke_on_costs_its_group_only(harm: str) -> None:
    """Checked when the function returns, so that one bad rollout does not lose the batch."""
    output = run(plain_args("harmful", harm=harm, use_tis=True))
    assert 0 not in {sample.group_index for sample in output}


# -- hooks, filters, versions -----------------------------------------------------------------------------------------


def notes(args: Any, sample: Any, **_: Any) -> None:
    """A sample hook that changes the sample in place."""
    sample.hooked = True
    sample.reward = 2.0


def shortens(args: Any, sample: Any, **_: Any) -> Any:
    """A sample hook that returns another object, with other columns."""
    other = copy.deepcopy(sample)
    other.loss_mask, other.hooked = [1, 0, 0], True
    return other


@pytest.mark.parametrize("hook", ["notes", "shortens"])
@pytest.mark.parametrize("function", ["sets_everything", "fans_out"])
def test_hooks_work_on_the_very_sample(hook: str, function: str) -> None:
    """Before the reward; the object that a hook returns is scored, and is in the batch."""
    args = plain_args(
        function, rollout_sample_hook_path=[f"{__name__}.{hook}"], custom_rm_path=f"{__name__}.hooked_only"
    )
    output = run(args)
    assert all(sample.hooked for sample in output)
    if hook == "shortens":
        assert {tuple(sample.loss_mask) for sample in output} == {(1, 0, 0)}
    else:
        assert {sample.reward for sample in output} == {2.0}


async def hooked_only(args: Any, given: Any, **_: Any) -> Any:
    assert all(sample.hooked for sample in (given if isinstance(given, list) else [given]))
    return [1.0] * len(given) if isinstance(given, list) else 1.0


async def versioned(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append(sample.group_index)
    old = sample.group_index == 0 and args.calls.count(0) <= 2
    if old:
        await anyio.wait_all_tasks_blocked()  # so groups of the new weights may end first
    return filled(sample, reward=1.0, weight_versions=["1"] if old else ["2"])


def test_the_versions_on_the_sample_count_for_staleness() -> None:
    """A group of older weights is played again under a bound of 0, and its tokens are in no batch."""
    args = plain_args("versioned", rollouts_carry_over=True, rollouts_max_staleness=0, made=None)
    source = Source(2)
    batches = [
        [sample.weight_versions for sample in leaves(generate_rollout_batch(args, number, source).samples)]
        for number in range(2)
    ]
    assert batches[1] == [["2"]] * 4


async def aborted_once(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append((sample.index, len(sample.tokens)))
    if not sample.tokens:
        values = {"response_length": 1, "loss_mask": [1], "rollout_log_probs": [-0.5], "status": KIND.Status.ABORTED}
        return filled(sample, **{**values, "tokens": [1, 2, 3]})
    columns = {"tokens": [*sample.tokens, 4, 5], "loss_mask": [*sample.loss_mask, 1, 1]}
    return filled(sample, **columns, reward=float(sample.index % 2))


@pytest.mark.parametrize(("masked", "mask"), [(False, [1, 1, 1]), (True, [0, 1, 1])])
def test_a_partial_rollout_goes_on_from_what_was_aborted(masked: bool, mask: list[int]) -> None:
    """With ``--partial-rollout`` the function gets its aborted sample again, with masked tokens if configured."""
    args = plain_args("aborted_once", partial_rollout=True, mask_offpolicy_in_partial_rollout=masked)
    output = run(args)
    assert sorted(args.calls) == [(number, tokens) for number in range(4) for tokens in (0, 3)]
    assert [sample.loss_mask for sample in output] == [mask] * 4


def test_without_partial_rollouts_an_aborted_sample_is_played_again() -> None:
    """From its prompt, with nothing of the first attempt."""
    args = plain_args("aborted_first")
    assert [sample.tokens for sample in run(args)] == [[1, 2, 3, 4, 5]] * 4
    assert set(args.calls) == {0}


async def aborted_first(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    args.calls.append(len(sample.tokens))
    first = args.made.count(sample.index) == 0
    args.made.append(sample.index)
    return filled(sample, reward=1.0, status=KIND.Status.ABORTED if first else DONE)


def test_what_the_manager_holds_points_at_slimes_sample() -> None:
    """The record of another system is not part of what a sample stores."""
    sample = Sample(prompt="p", tokens=[1], loss_mask=[0])
    sample.trainer_record = object()
    assert "trainer_record" not in sample.to_dict()
    assert sample == Sample(prompt="p", tokens=[1], loss_mask=[0])


def test_a_batch_that_shares_rollout_ids_does_not_leave() -> None:
    """Two rollouts with one id would be one rollout in slime's loss."""

    with pytest.raises(ConfigError, match="no other rollout has"):
        run(plain_args("same_id"))


async def same_id(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return filled(sample, reward=1.0, rollout_id=1)
