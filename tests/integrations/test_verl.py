"""verl 0.9.1: our agent inside it, our samples through its own functions. ``scripts/test --trainers verl`` runs all."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import types
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Prompt, SamplingParams, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable, GenerateFailure
from rollouts.inference.base import CompletionRequest
from rollouts.inference.sglang import SGLangPolicy
from rollouts.integrations.verl import (
    RolloutsLoop,
    RolloutsManager,
    ServerManagerPolicy,
    put_group,
    register_advantages,
    teacher_columns,
    to_data_proto,
    to_outputs,
    worker,
)
from rollouts.integrations.verl.agent_loop import sampling_of
from rollouts.renderer import load_tokenizer
from rollouts.rewards.teacher_top import top_of
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample, Status
from rollouts.training.comparisons import comparison_name
from rollouts.training.credit import assign_advantages, returns_to_go
from rollouts.training.rows import by_rollout, row_images, split, split_advantages, trimmed
from tests.image_samples import VisionModel, image_samples, vision_model
from tests.integrations.verl_recipe import PLAYED
from tests.rewards.test_teacher_top import with_top
from tests.trainer_samples import proposed, scored_groups, tiny_model, token_logprobs, two_seats

needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="scripts/test --trainers verl runs it")
trainer = [pytest.mark.trainer, needs_verl, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def trainer_test(test: Any) -> Any:
    for mark in trainer:
        test = mark(test)
    return test


P, R = 16, 32
ROUNDING = 1.2e-7
"""One unit in the last place of a float32 advantage: verl computes in float32, we in float64."""
TOKENS = np.array([5, 6, 7], np.int32)


# -- the policy over verl's servers: nothing of verl is needed ---------------------------------------------------------


class Servers:
    """A server manager that answers with given outputs, and keeps the requests."""

    def __init__(self, *outputs: Namespace) -> None:
        self.outputs = list(outputs)
        self.requests: list[dict[str, Any]] = []

    async def generate(self, **request: Any) -> Namespace:
        self.requests.append(request)
        return self.outputs.pop(0)


def output(ids: Sequence[int] = (8, 9), **fields: Any) -> Namespace:
    values = {"log_probs": [-0.5] * len(ids), "stop_reason": "completed", "extra_fields": {"global_steps": 4}}
    return Namespace(token_ids=list(ids), **{**values, **fields})


async def test_a_request_has_the_tokens_and_verls_names() -> None:
    """One sticky key for all turns, ``max_tokens``, stop ids, and logprobs always."""
    servers = Servers(output())
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=20, max_new_tokens=10)
    completion = await ServerManagerPolicy(servers, P, R).complete(
        CompletionRequest(TOKENS, sampling, stop_token_ids=(2,), session="s")
    )
    (request,) = servers.requests
    assert (request["request_id"], request["prompt_ids"]) == ("s", [5, 6, 7])
    assert request["sampling_params"] == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.0, "max_tokens": 10,
        "stop_token_ids": [2], "logprobs": True,
    }  # fmt: skip
    assert (completion.tokens.tolist(), completion.finish_reason) == ([8, 9], "stop")
    assert [span.version for span in completion.versions] == ["4"]


@pytest.mark.parametrize(
    ("fields", "version", "expected"),
    [
        ({"global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}, None, "3"),
        ({"global_steps": None}, 7, "7"),
        ({"min_global_steps": 0, "global_steps": 5}, 7, "0"),
    ],
)
async def test_tokens_have_the_oldest_weights_that_verl_names(
    fields: dict[str, Any], version: int | None, expected: str
) -> None:
    """A reply that verl resumed across an update has only the oldest and newest; rules of staleness want the oldest."""
    policy = ServerManagerPolicy(Servers(output(extra_fields=fields)), P, R, version)
    completion = await policy.complete(CompletionRequest(TOKENS, SamplingParams(), session="s"))
    assert [span.version for span in completion.versions] == [expected]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (output(()), EndpointUnavailable, "returned 0 tokens"),
        (output(stop_reason="aborted"), EndpointUnavailable, "'aborted'"),
        (output(log_probs=None), EndpointRefused, "no logprobs"),
        (output(log_probs=[-0.5]), EndpointRefused, "2 tokens and 1 logprobs"),
        (output(log_probs=[0.5, -0.5]), EndpointRefused, "finite logprob"),
        (output(extra_fields={"global_steps": None}), EndpointRefused, "set version: in the configuration"),
    ],
)
async def test_a_bad_answer_is_no_reply(answer: Namespace, error: type[Exception], message: str) -> None:
    """verl returns an empty list where its logprobs do not fit, and the raw stop reason of its server."""
    with pytest.raises(error, match=message):
        await ServerManagerPolicy(Servers(answer), P, R).complete(
            CompletionRequest(TOKENS, SamplingParams(), session="s")
        )


@pytest.mark.parametrize("fields", [{"stop": ("x",)}, {"seed": 1}, {"min_p": 0.1}, {"min_new_tokens": 1}])
async def test_what_verls_servers_do_not_get_is_refused(fields: dict[str, Any]) -> None:
    """Its SGLang runs without a tokenizer, so a stop string would never stop."""
    with pytest.raises(ConfigError, match="verl has no field for it"):
        await ServerManagerPolicy(Servers(), P, R).complete(
            CompletionRequest(TOKENS, SamplingParams(**fields), session="s")
        )


async def test_a_row_stays_within_verls_lengths() -> None:
    """The response ends at ``response_length`` of the first request; a prompt over ``prompt_length`` is not sent."""
    servers = Servers(output([*range(1, 31)], stop_reason="length"), output((4,)))
    policy = ServerManagerPolicy(servers, P, R)
    first = await policy.complete(CompletionRequest(TOKENS, SamplingParams(max_new_tokens=30), session="s"))
    assert first.finish_reason == "length"
    second = await policy.complete(
        CompletionRequest(np.arange(34, dtype=np.int32), SamplingParams(max_new_tokens=30), session="s")
    )
    assert (servers.requests[1]["sampling_params"]["max_tokens"], second.finish_reason) == (3 + R - 34, "length")
    with pytest.raises(ContextOverflow):
        await policy.complete(CompletionRequest(np.arange(3 + R, dtype=np.int32), SamplingParams(), session="s"))
    with pytest.raises(ContextOverflow, match="prompt_length is 16"):
        await ServerManagerPolicy(Servers(), P, R).complete(
            CompletionRequest(np.arange(17, dtype=np.int32), SamplingParams())
        )


async def test_a_later_branch_begins_with_a_long_prompt() -> None:
    """Its history counts as its prompt, within both lengths together."""
    servers = Servers(output(), output())
    policy = ServerManagerPolicy(servers, P, R)
    await policy.complete(CompletionRequest(TOKENS, SamplingParams(), session="first"))
    await policy.complete(
        CompletionRequest(np.arange(40, dtype=np.int32), SamplingParams(max_new_tokens=30), session="second")
    )
    assert servers.requests[1]["sampling_params"]["max_tokens"] == P + R - 40


def test_sampling_is_verls() -> None:
    """Of a validation it is that of the validation; ``logprobs`` is not a parameter of ours."""
    given = {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": False}
    assert sampling_of(given, 64) == SamplingParams(temperature=0, max_new_tokens=64)


def loop(**options: Any) -> RolloutsLoop:
    rollout = Namespace(prompt_length=P, response_length=R)
    config = Namespace(config=Namespace(actor_rollout_ref=Namespace(rollout=rollout)))
    return RolloutsLoop(config, None, options.pop("tokenizer", Tokenizer), name="rollouts", processor=None, **options)


class Tokenizer:
    """Stands for the one tokenizer of a worker."""


def test_what_a_loop_plays_is_built_once() -> None:
    """verl makes a loop for each rollout; the recipe is built for the first one of a tokenizer and its options."""
    options: dict[str, Any] = {"recipe": "calculator", "limits": {"max_turns": 3}}
    one, other = loop(**options), loop(**options)
    assert one.episodes is other.episodes
    assert one.episodes.limits.max_turns == 3
    assert loop(recipe="calculator").episodes is not one.episodes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of recipe and environment"),
        ({"recipe": "calculator", "environment": "a:b"}, "expected one of recipe and environment"),
        ({"environment": "rollouts.nowhere:X"}, "environment.*module:name"),
        ({"recipe": "calculator", "turns": 3}, "turns.*expected one of"),
        ({"recipe": "nowhere"}, "nowhere"),
        ({"recipe": "calculator", "recipe_options": {"nothing": 1}}, "nothing"),
    ],
)
def test_a_wrong_option_of_the_yaml_is_refused(options: dict[str, Any], message: str) -> None:
    """Before a rollout starts, with its name."""
    with pytest.raises(ConfigError, match=message):
        loop(**options)


def test_an_environment_is_named_in_the_yaml() -> None:
    """Instead of a recipe, with a reward function and limits."""
    made = loop(
        environment="rollouts.environments.calculator:CalculatorEnvironment",
        reward="tests.integrations.test_verl:one",
        history="error",
        template_kwargs={"enable_thinking": False},
    ).episodes
    assert (made.environment_cls.__name__, made.reward_fn, made.history) == ("CalculatorEnvironment", one, "error")  # type: ignore[attr-defined]
    assert made.options == {"template_kwargs": {"enable_thinking": False}}


async def test_images_are_refused_where_replies_do_not_count_the_ids() -> None:
    """Before a request: verl's SGLang encodes a prompt with images again, and its reply has no ids of the prompt."""
    made = loop(recipe="calculator", images=True, tokenizer=load_tokenizer(DEMO_MODEL))
    with pytest.raises(ConfigError, match=r"images: got <.*ServerManagerPolicy.*expected none: requests of this"):
        await made.run({}, raw_prompt=QUESTION)


def one(sample: Any) -> float:
    return 1.0


# -- rows through verl -------------------------------------------------------------------------------------------------


def verl_config(**rollout: Any) -> Any:
    from omegaconf import OmegaConf

    values = {
        "prompt_length": 24, "response_length": 64, "n": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "calculate_log_probs": True, "val_kwargs": {"n": 1, "temperature": 0, "top_p": 1.0, "top_k": -1},
        "agent": {"default_agent_loop": "rollouts", "agent_loop_config_path": None},
    }  # fmt: skip
    return OmegaConf.create({"actor_rollout_ref": {"rollout": {**values, **rollout}}, "data": {}})


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture
def v0(demo_tokenizer: Any) -> Any:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    return worker(AgentLoopWorker, verl_config(), demo_tokenizer)


@pytest.fixture
def v1(demo_tokenizer: Any) -> Any:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    return worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class, verl_config(), demo_tokenizer)


@trainer_test
def test_an_output_is_its_sample(compared: Callable[..., None]) -> None:
    """Prompt, response, mask, logprobs, reward and versions, without the unanswered end; the fields that V1 needs."""
    worst = 0.0
    for sample in scored_groups(forks=True):
        (made,) = to_outputs([sample])
        row = split(sample)
        assert (made.prompt_ids, made.response_ids) == (row.prompt.tolist(), row.response.tolist())
        assert made.response_mask == row.mask.tolist()
        assert made.response_mask[-1] == 1, "the reward of GAE is lost on context"
        worst = max(worst, float(np.abs(np.array(made.response_logprobs) - row.logprobs).max()))
        assert made.reward_score == sample.reward
        fields = made.extra_fields
        assert (fields["min_global_steps"], type(fields["max_global_steps"])) == (3, int)
        assert (fields["tool_rewards"], fields["reward_extra_info"]) == ([], {})
    compared("verl 0.9.1", "b", "AgentLoopOutput: ids, mask, logprobs, reward", worst)


@trainer_test
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": None}, "reward"),
        ({"loss_multiplier": 0.0}, "verl has no field for it"),
        ({"status": "failed"}, "leave this one out"),
    ],
)
def test_a_sample_that_verl_cannot_take_is_refused(fields: dict[str, Any], message: str) -> None:
    """By name, before it reaches the batch."""
    sample = scored_groups(1, 1)[0]
    for name, value in fields.items():
        setattr(sample, name, value)
    with pytest.raises(ConfigError, match=message):
        to_outputs([sample])


@trainer_test
def test_a_version_that_is_no_number_needs_one() -> None:
    """A plain server says ``default``; verl computes with integers."""
    sample = scored_groups(1, 1)[0]
    sample.versions = []
    with pytest.raises(ConfigError, match="version="):
        to_outputs([sample])
    (made,) = to_outputs([sample], version=7)
    assert (made.extra_fields["min_global_steps"], made.extra_fields["max_global_steps"]) == (7, 7)


@trainer_test
async def test_samples_are_a_data_proto(v0: Any, compared: Callable[..., None]) -> None:
    """Padded left and right by verl; un-padded they are ours, and so are verl's advantages."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos

    from rollouts.training.batch import group_advantages

    samples = scored_groups()
    data = await to_data_proto(samples, v0)
    halves = data.chunk(2)
    data = DataProto.concat(halves)
    worst = 0.0
    for number, sample in enumerate(samples):
        row, batch = split(sample), {name: tensor[number] for name, tensor in data.batch.items()}
        real = batch["attention_mask"].bool()
        assert batch["input_ids"][real].tolist() == trimmed(sample).tokens
        assert batch["responses"][real[24:]].tolist() == row.response.tolist()
        assert batch["response_mask"][real[24:]].tolist() == row.mask.tolist()
        worst = max(worst, float(np.abs(batch["rollout_log_probs"][real[24:]].numpy() - row.logprobs).max()))
        assert batch["rm_scores"].sum() == sample.reward == batch["rm_scores"][len(row.response) - 1]
    compared("verl 0.9.1", "b", "DataProto (v0): ids, mask, logprobs, reward", worst)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=data.batch["rm_scores"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
    )
    got = [advantages[number][data.batch["response_mask"][number].bool()][0].item() for number in range(len(samples))]
    difference = float(np.abs(np.array(got, np.float32) - group_advantages(samples)).max())
    compared("verl 0.9.1", "b", "GRPO advantages of v0 and ours", difference, within=ROUNDING)


@trainer_test
async def test_their_grpo_compares_seats_as_the_samples_say(v0: Any, compared: Callable[..., None]) -> None:
    """By ``uid``: two seats of a game apart, solvers of one proposal with each other; equal to ours."""
    from verl.trainer.ppo import core_algos

    from rollouts.training.batch import group_advantages

    worst = 0.0
    for samples in (two_seats(), proposed()):
        data = await to_data_proto(samples, v0)
        scores = data.batch["rm_scores"].sum(-1).tolist()
        assert sorted(scores) == sorted(sample.reward or 0.0 for sample in samples)
        mask = data.batch["response_mask"]
        advantages, _ = core_algos.compute_grpo_outcome_advantage(
            token_level_rewards=data.batch["rm_scores"], response_mask=mask, index=data.non_tensor_batch["uid"]
        )
        got = np.array([row[one.bool()][0].item() for row, one in zip(advantages, mask, strict=True)], np.float32)
        worst = max(worst, float(np.abs(got - group_advantages(samples)).max()))
    compared("verl 0.9.1", "b", "GRPO of two seats, of solvers by episode (v0)", worst, within=ROUNDING)


@trainer_test
async def test_one_step_of_their_loss_follows_the_advantages(v0: Any, compared: Callable[..., None]) -> None:
    """verl's policy loss on our DataProto and a tiny model: good rollouts become likelier."""
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    data = await to_data_proto(scored_groups(), v0)
    mask = data.batch["response_mask"].float()
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        data.batch["rm_scores"], mask, index=data.non_tensor_batch["uid"]
    )
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def logprobs() -> Any:
        return token_logprobs(model, data.batch["input_ids"])[:, -mask.shape[1] :]

    before = logprobs()
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_mini_batch_size=16, ppo_micro_batch_size_per_gpu=4)
    loss, _ = core_algos.compute_policy_loss_vanilla(before.detach(), before, advantages, mask, "token-mean", config)
    loss.backward()
    optimizer.step()
    gained = float(((logprobs() - before) * advantages * mask).sum())
    assert gained > 0
    compared(
        "verl 0.9.1", "step", "one step of compute_policy_loss_vanilla follows the advantages", 0.0, note="tiny model"
    )


@trainer_test
async def test_a_batch_that_v0_would_not_survive_is_refused(v0: Any) -> None:
    """A row longer than verl's lengths ends the step, and a fork would count as one more rollout."""
    samples = scored_groups(1, 4, forks=True)
    with pytest.raises(ConfigError, match="no forks in v0"):
        await to_data_proto(samples, v0)
    v0.rollout_config.response_length = 1
    with pytest.raises(ConfigError, match="verl's lengths"):
        await to_data_proto(samples[:1], v0)


@trainer_test
def test_a_row_that_ends_in_context_would_lose_its_reward(compared: Callable[..., None]) -> None:
    """verl's GAE, on a row with its bridge and on the row that we hand over."""
    import torch
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    def advantages(mask: list[int]) -> Any:
        rewards, weights = torch.zeros(1, len(mask)), torch.tensor([mask], dtype=torch.float32)
        rewards[0, -1] = 1.0
        _, returns = compute_gae_advantage_return(rewards, torch.zeros_like(rewards), weights, 1.0, 1.0)
        return returns[0][weights[0].bool()]

    assert advantages([1, 1, 0, 0]).tolist() == [0, 0]
    compared("verl 0.9.1", "b", "GAE returns of a trimmed row", float((advantages([1, 1]) - 1).abs().max()))


def of_verl(model: VisionModel, family: str) -> Any:
    """The processor of a family as verl's ``hf_processor`` prepares it: with the positions of its model."""
    names = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v"}
    module = importlib.import_module(f"transformers.models.{family}")
    kind = getattr(module, f"{names[family]}Model")
    processor = copy.copy(model.processor)
    processor.config = getattr(module, f"{names[family]}Config")()
    for name in ("get_rope_index", "get_vision_position_ids"):
        if hasattr(kind, name):
            setattr(processor, name, types.MethodType(getattr(kind, name), processor))
    return processor


def check_arrays(row: dict[str, Any], sample: Any) -> None:
    """verl's arrays of the images of a row, without the arrays of their sizes."""
    import torch

    theirs = {**row}
    theirs.pop("images_seqlens", None)
    ours = row_images(sample)
    assert theirs.keys() == ours.keys()
    for name, array in ours.items():
        assert theirs[name].equal(torch.tensor(array)), name


@trainer_test
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
async def test_what_verl_makes_of_images_is_ours(
    family: str, store: Store, small_tokenizer_folder: Callable[[str], Path], compared: Callable[..., None]
) -> None:
    """v0 and V1 run their processor on decoded text: the ids stay ours, the arrays and positions are equal."""
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    model = vision_model(family, small_tokenizer_folder)
    processor = of_verl(model, family)
    samples = image_samples(model, [(1,), (2, 1), (0,), (1, 0, 2)], unanswered=[1, 2])
    config = verl_config(prompt_length=256, response_length=256)
    data = await to_data_proto(samples, worker(AgentLoopWorker, config, model.tokenizer, processor))
    of_v1 = worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class, config, model.tokenizer, processor)
    await put_group(samples, of_v1, uid="a", global_steps=1)
    for number, sample in enumerate(samples):
        tokens = torch.tensor(trimmed(sample).tokens)
        real = data.batch["attention_mask"][number].bool()
        row = store.rows["train"][f"a_{number}_0"]
        assert data.batch["input_ids"][number][real].equal(tokens)
        assert row["input_ids"].equal(tokens)
        check_arrays(data.non_tensor_batch["multi_modal_inputs"][number], sample)
        made = row["multi_modal_inputs"]
        check_arrays(getattr(made, "data", made), sample)
        grid = row_images(sample).get("image_grid_thw")
        positions, _ = processor.get_rope_index(
            tokens[None],
            mm_token_type_ids=(tokens == model.placeholder).long()[None],
            image_grid_thw=None if grid is None else torch.tensor(grid),
        )
        assert data.batch["position_ids"][number][1:, real].equal(positions[:, 0])
        assert row["position_ids"][1:].equal(positions[:, 0])
    compared("verl 0.9.1", "b", f"rows with images (v0, V1), {family}: ids, multi_modal_inputs, position_ids", 0.0)


@trainer_test
async def test_other_arrays_than_those_of_the_rollout_are_refused(
    v0: Any, small_tokenizer_folder: Callable[[str], Path]
) -> None:
    """Without a processor verl would train the row without its images, with other settings on other arrays."""
    model = vision_model("qwen2_5_vl", small_tokenizer_folder)
    (sample,) = image_samples(model, [(1,)], unanswered=[])
    v0.rollout_config.prompt_length = 256
    with pytest.raises(ConfigError, match=r"\.images: got '1 images'; expected none, or a worker with verl's"):
        await to_data_proto([sample], v0)
    v0.processor, v0.tokenizer = of_verl(model, "qwen2_5_vl"), model.tokenizer
    v0.mm_processor_kwargs = {"images_kwargs": {"size": {"shortest_edge": 28 * 28, "longest_edge": 2 * 28 * 28}}}
    with pytest.raises(ConfigError, match=r"arrays of verl's processor: got \{'pixel_values': .* those of the rollout"):
        await to_data_proto([sample], v0)


class Store:
    """A dict in the place of TransferQueue's store; the functions that verl calls."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(partition_id, {}).setdefault(key, {}).update(tag)

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        for number, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            await self.async_kv_put(key, partition_id, tag)
            row = {name: column[number] for name, column in fields.items()}
            self.rows.setdefault(partition_id, {})[key] = row

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {name: {key: dict(tag) for key, tag in keys.items()} for name, keys in self.tags.items()}

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[Any]]:
        return {name: [self.rows[partition_id][key][name] for key in keys] for name in select_fields}


@pytest.fixture
def store() -> Iterator[Store]:
    """The store of TransferQueue, which otherwise needs Ray and its own processes."""
    queue, store = importlib.import_module("transfer_queue"), Store()
    names = [name for name in dir(Store) if "kv_" in name]
    before = {name: getattr(queue, name) for name in names}
    for name in names:
        setattr(queue, name, getattr(store, name))
    yield store
    for name, function in before.items():
        setattr(queue, name, function)


@trainer_test
async def test_samples_are_rows_of_the_transfer_queue(v1: Any, store: Store, compared: Callable[..., None]) -> None:
    """verl's replay buffer takes whole groups of them, forks included, and its advantages are ours."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    from rollouts.training.batch import group_advantages

    samples = scored_groups(4, 4, forks=True)
    for number in range(4):
        members = [sample for sample in samples if sample.group_index == number]
        await put_group(members, v1, uid=f"uid{number}", global_steps=2)
    buffer = ReplayBuffer("sync", None, None, "drop", None, filter_groups_metric="reward", refill_fn=int,
                          train_batch_size=4, gen_batch_size=1)  # fmt: skip
    sampled, _ = buffer.sample(3, "train", 4)
    assert len(sampled.keys) == len(samples)
    steps = [(tag["global_steps"], tag["min_global_steps"], tag["max_global_steps"]) for tag in sampled.tags]
    assert np.array(steps, dtype=int).shape == (len(samples), 3)
    rows = [store.rows["train"][key] for key in sampled.keys]
    worst = 0.0
    for sample, row in zip(samples, rows, strict=True):
        ours = split(sample)
        assert row["input_ids"].tolist() == trimmed(sample).tokens
        assert row["responses"].tolist() == ours.response.tolist()
        assert row["loss_mask"].tolist() == row["response_mask"].tolist() == ours.mask.tolist()
        assert row["position_ids"].tolist() == [*range(len(trimmed(sample)))]
        worst = max(worst, float(np.abs(row["rollout_log_probs"].numpy() - ours.logprobs).max()))
        assert row["rm_scores"].tolist()[-1] == sample.reward == row["rm_scores"].sum()
    compared("verl 0.9.1", "b", "TransferQueue rows (V1): ids, mask, logprobs, reward", worst, note="store: a dict")
    width = max(len(row["responses"]) for row in rows)

    def padded(name: str) -> Any:
        columns = [torch.nn.functional.pad(row[name].float(), (0, width - len(row[name]))) for row in rows]
        return torch.stack(columns)

    batch = TensorDict(
        {"response_mask": padded("response_mask"), "token_level_rewards": padded("rm_scores")}, batch_size=len(rows)
    )
    uids = np.array([key.split("_")[0] for key in sampled.keys], dtype=object)
    data = compute_advantage_for_multi_trajectories(
        DataProto(batch, {"uid": uids}), sampled.keys, AdvantageEstimator.GRPO
    )
    first = data.batch["response_mask"].argmax(1)
    got = data.batch["advantages"][torch.arange(len(rows)), first].numpy()
    difference = float(np.abs(got - group_advantages(samples)).max())
    compared("verl 0.9.1", "b", "GRPO advantages of V1 and ours, with forks", difference, within=ROUNDING)


@trainer_test
async def test_a_column_of_advantages_reaches_verls_trainer(
    v0: Any, v1: Any, store: Store, compared: Callable[..., None]
) -> None:
    """As ``rm_scores`` of each token, through verl's registry, in v0 and V1, forks included; else it is refused."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    samples = scored_groups()
    assign_advantages(samples, returns_to_go)
    with pytest.raises(ConfigError, match="verl without advantages=True has no field for it"):
        await to_data_proto(samples, v0)
    register_advantages()
    register_advantages()
    data = await to_data_proto(samples, v0, advantages=True)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    got = compute_advantage(data, adv_estimator="rollouts").batch["advantages"]
    for row, sample in zip(got, samples, strict=True):
        column = split_advantages(sample)
        assert row[: len(column)].tolist() == column.tolist()
        assert not row[len(column) :].any()
    forked = scored_groups(1, 4, forks=True)
    assign_advantages(forked, returns_to_go)
    await put_group(forked, v1, uid="a", global_steps=1, advantages=True)
    rows = list(store.rows["train"].values())
    assert [row["rm_scores"].tolist() for row in rows] == [split_advantages(sample).tolist() for sample in forked]
    scores = rows[0]["rm_scores"][None]
    batch = TensorDict({"response_mask": rows[0]["response_mask"][None], "token_level_rewards": scores}, batch_size=1)
    uids = np.array(["a"], dtype=object)
    taken = compute_advantage_for_multi_trajectories(DataProto(batch, {"uid": uids}), ["a_0_0"], "rollouts")
    assert taken.batch["advantages"].tolist() == scores.tolist()
    compared("verl 0.9.1", "b", "advantages of credit by turn (v0, V1), through its registry", 0.0)


@trainer_test
async def test_a_teachers_columns_reach_verls_losses(
    v0: Any, v1: Any, store: Store, compared: Callable[..., None]
) -> None:
    """Top-k and sampled: the tensors and the loss equal what verl's own reader makes of the teacher's reply."""
    import torch
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.trainer.ppo.core_algos import kl_penalty
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    read = _verls_reader()
    samples = with_top(6)
    with pytest.raises(ConfigError, match="verl without teacher=True has no field for it"):
        await to_data_proto(samples, v0)
    loss = Namespace(use_chunked_topk=False, log_prob_min_clamp=-10.0)
    worst = 0.0
    for top_k in (5, 0):
        if not top_k:
            for sample in samples:
                del sample.metadata["scored_by"]
        data = await to_data_proto(samples, v0, teacher=True)
        batch = left_right_2_no_padding(data.to_tensordict())
        theirs_ids, theirs_logprobs = [], []
        for sample in samples:
            found: dict[str, Any] = {}
            row = trimmed(sample)
            meta = _reply_about(sample, row, top_k)
            read(meta, top_k, len(row), found)
            theirs_ids.append(torch.tensor(found["prompt_ids"], dtype=torch.int32))
            theirs_logprobs.append(torch.tensor(found["prompt_logprobs"]))
        logits = torch.randn(1, sum(map(len, theirs_ids)), 1024, generator=torch.Generator().manual_seed(3))
        taken = []
        for ids, logprobs in (
            (batch["teacher_ids"], batch["teacher_logprobs"]),
            (_nested(theirs_ids), _nested(theirs_logprobs)),
        ):
            if top_k:
                made = compute_forward_kl_topk(
                    logits, logprobs, _nested([one.long() for one in ids.unbind()]),
                    Namespace(distillation_loss=loss), "thd",
                )["distillation_losses"][0]  # fmt: skip
                values = no_padding_2_padding(made, batch)
            else:
                sampled = no_padding_2_padding(logprobs, batch).squeeze(-1)
                values = kl_penalty(logprob=torch.zeros_like(sampled), ref_logprob=sampled, kl_penalty="k3")
            taken.append(values * batch["response_mask"])
        assert taken[0].abs().sum() > 1
        worst = max(worst, float((taken[0] - taken[1]).abs().max()))
        assert tensordict_utils.get_non_tensor_data(batch, "max_response_len", 0)
    assert worst == 0.0
    compared("verl 0.9.1", "b", "a teacher's columns, top-k and sampled, through its losses", worst)
    scored = with_top(4)
    await put_group(scored, v1, uid="a", global_steps=1, teacher=True)
    for sample, put in zip(scored, store.rows["train"].values(), strict=True):
        for name, column in teacher_columns(sample).items():
            assert torch.equal(put[name], column)


def _verls_reader() -> Any:
    """Its function that reads the reply of a teacher, from the module of its server, whose imports need SGLang."""
    name = "_extract_prompt_logprobs_sglang"
    path = Path(importlib.import_module("verl").__file__ or "").parent
    tree = ast.parse((path / "workers/rollout/sglang_rollout/async_sglang_server.py").read_text(encoding="utf-8"))
    body: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    found: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), name, "exec"), found)
    return found[name]


def _nested(rows: list[Any]) -> Any:
    import torch

    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _reply_about(sample: Any, row: Any, top_k: int) -> dict[str, Any]:
    """SGLang's ``meta_info`` for all ids of a row, with the teacher's logprobs at its sampled ones."""
    top, column = top_of(sample), sample.teacher_column
    own: list[Any] = [[-1.0, token, None] for token in row.tokens]
    tops: list[Any] = [[[-5.0, 300 + one, None] for one in range(top_k)] for _ in row.tokens]
    for number, position in enumerate(np.flatnonzero(row.mask_column)):
        own[position][0] = float(column[position])
        if top is not None:
            pairs = zip(top.logprobs[number].tolist(), top.ids[number].tolist(), strict=True)
            tops[position] = [[value, one, None] for value, one in pairs]
    own[0][0] = tops[0] = None
    return {"input_token_logprobs": own, "input_top_logprobs": tops}


@trainer_test
async def test_a_key_that_verl_would_lose_is_refused(v1: Any, store: Store) -> None:
    """It splits the keys of rows at the first underscore."""
    with pytest.raises(ConfigError, match=r"uid.*without an underscore"):
        await put_group(scored_groups(1, 2), v1, uid="a_b", global_steps=1)
    assert not store.tags


# -- our agent inside verl ---------------------------------------------------------------------------------------------


class EngineServers:
    """verl's client of its servers, over the embedded engine."""

    def __init__(self, policy: SGLangPolicy) -> None:
        self.policy = policy
        self.replies: dict[tuple[int, ...], list[Any]] = {}

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Namespace:
        names = {"max_tokens": "max_new_tokens"}
        given = {names.get(name, name): value for name, value in sampling_params.items()}
        stop = tuple(given.pop("stop_token_ids"))
        assert given.pop("logprobs")
        reply = await self.policy.complete(
            CompletionRequest(
                np.array(prompt_ids, np.int32), SamplingParams(**given), stop_token_ids=stop, session=request_id
            )
        )
        self.replies.setdefault((*prompt_ids, *reply.tokens.tolist()), []).append(reply.logprobs)
        return output(reply.tokens.tolist(), log_probs=reply.logprobs.tolist(), stop_reason=reply.finish_reason)


QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@trainer_test
async def test_the_calculator_recipe_through_verls_agent_loop(
    demo_tokenizer: Any, engine_url: str, tmp_path: Path, compared: Callable[..., None]
) -> None:
    """hydra makes our loop from the YAML, and verl's worker pads what it returns: ids and logprobs of the server."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, _agent_loop_registry

    path = tmp_path / "loops.yaml"
    path.write_text(
        "- name: rollouts\n  _target_: rollouts.integrations.verl.RolloutsLoop\n  recipe: calculator\n"
        "  reward: tests.integrations.verl_recipe:kept\n  limits: {max_turns: 3}\n"
    )
    for entry in OmegaConf.load(path):
        _agent_loop_registry[entry.name] = entry
    config = verl_config(prompt_length=320, response_length=256)
    of_verl = worker(AgentLoopWorker, config, demo_tokenizer)
    of_verl.hf_model_type = of_verl.dataset_cls = None
    of_verl.tools, of_verl.teacher_key = [], "data_source"
    PLAYED.clear()
    async with SGLangPolicy(Endpoint(base_url=engine_url)) as policy:
        of_verl.llm_client = EngineServers(policy)
        columns = {
            "raw_prompt": [QUESTION] * 4,
            "reward_model": [{"ground_truth": "42"}] * 4,
            "data_source": ["calculator"] * 4,
            "index": [0] * 4,
            "uid": ["u"] * 4,
        }
        arrays = {}
        for name, values in columns.items():
            arrays[name] = np.empty(4, dtype=object)
            arrays[name][:] = values
        data = await of_verl.generate_sequences(DataProto(None, arrays, {"global_steps": 1}))
    assert data.batch["responses"].shape == (4, 256)
    rows = []
    for number in range(4):
        batch = {name: tensor[number] for name, tensor in data.batch.items()}
        real = batch["attention_mask"].bool()
        columns = [batch[name][real[320:]].tolist() for name in ("response_mask", "rollout_log_probs")]
        rows.append([batch["input_ids"][real].tolist(), *columns, batch["rm_scores"].sum().item()])
    played = [
        [trimmed(one).tokens, split(one).mask.tolist(), split(one).logprobs.tolist(), one.reward] for one in PLAYED
    ]
    assert sorted(rows) == sorted(played)
    sent = of_verl.llm_client.replies
    worst, replies = 0.0, 0
    for number in range(4):
        mask = data.batch["response_mask"][number].numpy().astype(bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        logprobs = data.batch["rollout_log_probs"][number].numpy()
        assert (logprobs[~mask] == 0).all()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            ids = data.batch["input_ids"][number][: 320 + stop]
            seen = tuple(ids[data.batch["attention_mask"][number][: 320 + stop].bool()].tolist())
            worst = max(worst, min(float(np.abs(logprobs[start:stop] - column).max()) for column in sent[seen]))
            replies += 1
    assert replies == sum(map(len, sent.values()))
    compared(
        "verl 0.9.1",
        "a",
        "calculator through AgentLoopWorker: ids, mask, logprobs, reward",
        worst,
        note="servers: our engine",
    )


@trainer_test
async def test_a_rollout_that_failed_raises_its_cause(demo_tokenizer: Any) -> None:
    """verl then marks the group as failed; there is no row without a response."""
    made = loop(recipe="calculator", tokenizer=demo_tokenizer)
    made.server_manager = Servers(output(()), output(()), output(()), output(()))
    made.rollout.prompt_length = 512
    with pytest.raises(GenerateFailure, match=r"failed in 2 attempts: .*returned 0 tokens"):
        await made.run({"temperature": 1.0}, raw_prompt=QUESTION, reward_model={"ground_truth": "42"})


@trainer_test
async def test_a_rollout_that_forks_is_several_outputs_of_v1() -> None:
    """In order, with the reward of the rollout; v0 takes one output a rollout, so the fork is refused there."""
    branches = scored_groups(1, 2, forks=True)[1:]

    class Forked:
        async def play(self, *arguments: Any, **options: Any) -> list[Any]:
            return branches

    made = loop(recipe="calculator")
    made.episodes = Forked()  # type: ignore[assignment]
    outputs = await made.run({}, raw_prompt=QUESTION, session_id=0, global_steps=3)
    assert [one.response_ids for one in outputs] == [split(branch).response.tolist() for branch in branches]
    assert {one.reward_score for one in outputs} == {branches[0].reward}
    with pytest.raises(ConfigError, match="only verl V1 takes several rows"):
        await made.run({}, raw_prompt=QUESTION)


@trainer_test
def test_a_rollout_without_a_reward_is_scored_by_verl() -> None:
    """Its score is none, and verl's reward function runs."""
    sample = scored_groups(1, 1)[0]
    sample.reward = None
    (made,) = to_outputs([sample], scored=False)
    assert made.reward_score is None


# -- our manager inside verl -------------------------------------------------------------------------------------------


class Alternating:
    """A server client whose replies are random texts of one or two tokens, so that rewards of a group differ."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts, self.count = texts, 0

    async def generate(self, **request: Any) -> Namespace:
        self.count += 1
        return output(self.texts[self.count % len(self.texts)], extra_fields={"global_steps": 5})


def submitted(step: int, uids: Sequence[str], *, validate: bool = False, **columns: list[Any]) -> Any:
    """The prompts of a step as verl's trainer submits them."""
    from verl.utils import tensordict_utils

    given = {"uid": list(uids), "index": [0] * len(uids), "raw_prompt": [QUESTION] * len(uids), **columns}
    batch = tensordict_utils.get_tensordict(given)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
    return batch


def managed(tokenizer: Any, client: Any, **options: Any) -> RolloutsManager:
    return RolloutsManager(verl_config(prompt_length=512, n=2), client, tokenizer, options)


@trainer_test
def test_our_manager_fills_verls_prompts(demo_tokenizer: Any, store: Store) -> None:
    """Each prompt that verl submits gets one whole group of the recipe, with over-sampling, and its first step."""
    end = demo_tokenizer.convert_tokens_to_ids("<|im_end|>")
    client = Alternating([[demo_tokenizer.encode(text)[0], end] for text in "123"])
    manager = managed(
        demo_tokenizer, client,
        recipe="tests/integrations/verl_recipe.py", over_sampling_factor=2.0,
    )  # fmt: skip
    try:
        for step, uids in ((4, ["a", "b"]), (5, ["c", "d"])):
            manager.generate_sequences(submitted(step, uids))
            for task in manager._tasks:
                task.result(timeout=60)
    finally:
        manager.close()
    tags = store.tags["train"]
    assert {key: tags[key]["status"] for key in "abcd"} == dict.fromkeys("abcd", "finished")
    assert {len([key for key in store.rows["train"] if key.split("_")[0] == uid]) for uid in "abcd"} == {2}
    assert {tags[key]["global_steps"] for key in "ab"} == {4}
    assert tags["c"]["global_steps"] == 4, "begun in step 4 by over-sampling, and carried over"


@trainer_test
def test_verl_makes_our_manager_from_its_configuration(tmp_path: Path) -> None:
    """With the entry ``rollouts`` of the YAML and the model's tokenizer; a reward model would replace the rewards."""
    from omegaconf import OmegaConf

    path = tmp_path / "loops.yaml"
    path.write_text("- name: rollouts\n  _target_: x\n  recipe: calculator\n  over_sampling_factor: 1.5\n")
    agent = {"agent_loop_config_path": str(path), "default_agent_loop": "rollouts"}
    config = verl_config(agent=agent)
    config.actor_rollout_ref.model = {"path": str(DEMO_MODEL)}
    config.reward = {"reward_model": {"enable": False}}
    made = RolloutsManager.create(config, None, None, reward_loop_worker_handles=[object()])
    made.close()
    assert (made.recipe.name, made.factor, made.tokenizer.name_or_path) == ("calculator", 1.5, str(DEMO_MODEL))
    for changes, message in (
        ({"reward.reward_model.enable": True}, "reward_model"),
        ({"actor_rollout_ref.rollout.agent.agent_loop_config_path": None}, "one entry named rollouts"),
    ):
        other = OmegaConf.create(OmegaConf.to_container(config))
        for name, value in changes.items():
            OmegaConf.update(other, name, value)
        with pytest.raises(ConfigError, match=message):
            RolloutsManager.create(other, None)
    with pytest.raises(ConfigError, match="distillation"):
        RolloutsManager.create(config, None, {"teacher": object()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "recipe, run"),
        ({"recipe": "calculator", "run": "runs/a"}, "recipe, run"),
        ({"recipe": "calculator", "limits": {}}, "limits.*expected one of"),
    ],
)
def test_a_wrong_option_of_the_manager_is_refused(options: dict[str, Any], message: str) -> None:
    """Its keys are fewer than those of the loop: the recipe has its own limits."""
    config = Namespace(actor_rollout_ref=Namespace(rollout=None))
    with pytest.raises(ConfigError, match=message):
        RolloutsManager(config, None, None, options)


@pytest.mark.parametrize(("seats", "by"), [(2, "seat"), (1, "episode")])
def test_seats_that_verl_would_compare_otherwise_are_refused_at_the_start(seats: int, by: str) -> None:
    """It compares all rows of a prompt; before, the first group of the run was refused."""
    options = {"recipe": "tests/integrations/verl_recipe.py", "recipe_options": {"seats": seats, "by": by}}
    config = Namespace(actor_rollout_ref=Namespace(rollout=None))
    with pytest.raises(
        ConfigError, match=r"recipe: comparisons of its seats: got .*verl compares all rows of a prompt"
    ):
        RolloutsManager(config, None, None, options)


@pytest.mark.parametrize(("seats", "by"), [(1, "seat"), (2, "group")])
def test_seats_that_verl_compares_alike_are_taken(seats: int, by: str) -> None:
    """One trained seat, or all compared with each other."""
    options = {"recipe": "tests/integrations/verl_recipe.py", "recipe_options": {"seats": seats, "by": by}}
    RolloutsManager(Namespace(actor_rollout_ref=Namespace(rollout=None)), None, None, options).close()


def test_a_stored_run_of_two_seats_is_refused_at_the_start(tmp_path: Path) -> None:
    """By its first group."""
    samples = scored_groups(1, 2)
    for sample, seat in zip(samples, ("black", "white"), strict=True):
        sample.seat = seat
    writer = RunWriter(tmp_path / "run", {"recipe": "test"})
    writer.write_batch(samples, {})
    writer.finish("finished")
    config = Namespace(actor_rollout_ref=Namespace(rollout=None))
    with pytest.raises(ConfigError, match=r"run: comparisons of its seats: got .*'black': 'seat'"):
        RolloutsManager(config, None, None, {"run": str(tmp_path / "run")})


async def test_a_branch_that_has_no_room_for_a_reply_is_no_row_of_our_manager() -> None:
    """Its rollout ended truncated, with the rows before: without its last branch, it failed in each attempt."""

    async def played(prompts: Sequence[Prompt], **options: Any) -> list[Sample]:
        first = scored_groups(1, 2, forks=True)[1]
        last = Sample(tokens=[1, 2, 3], loss_mask=[0, 0, 0], rollout_log_probs=[0, 0, 0])
        last.status = first.status = Status.TRUNCATED
        last.stop_reason, first.index, first.group_index = StopReason.CONTEXT_OVERFLOW, None, None
        first.prompt, first.label = prompts[0].prompt, prompts[0].label
        return [first, last]

    rollout = Namespace(prompt_length=512, response_length=64, n=2, temperature=1.0, top_p=1.0, top_k=-1)
    config = Namespace(actor_rollout_ref=Namespace(rollout=rollout))
    manager = RolloutsManager(config, None, None, {"recipe": "tests/integrations/verl_recipe.py"})
    manager.recipe = attrs.evolve(manager.recipe, config=attrs.evolve(manager.recipe.config, generate_fn=played))
    try:
        (group,) = [group async for group in manager._trained(1, 0)]
    finally:
        manager.close()
    assert [sample.stop_reason for sample in group] == [StopReason.FORKED] * 2
    assert all(sample.sampled_tokens for sample in group)


async def test_a_call_that_fails_keeps_what_was_accepted() -> None:
    """The next call of as many prompts continues with it: its rollouts are not played again."""
    played: Counter[int | None] = Counter()
    accepted, works = anyio.Event(), anyio.Event()

    async def some(prompts: Sequence[Prompt], **options: Any) -> list[Sample]:
        (prompt,) = prompts
        if prompt.group_index and not works.is_set():
            await accepted.wait()
            raise ValueError("not yet")
        sample = scored_groups(1, 2)[(prompt.index or 0) % 2]
        sample.group_index, sample.index, sample.rollout_id = prompt.group_index, prompt.index, prompt.index
        sample.prompt, sample.label = prompt.prompt, prompt.label
        played[prompt.group_index] += 1
        if played[0] == 2:
            accepted.set()
        return [sample]

    rollout = Namespace(prompt_length=512, response_length=64, n=2, temperature=1.0, top_p=1.0, top_k=-1)
    config = Namespace(actor_rollout_ref=Namespace(rollout=rollout))
    manager = RolloutsManager(config, None, None, {"recipe": "tests/integrations/verl_recipe.py"})
    failing = attrs.evolve(manager.recipe.config, generate_fn=some, reward_fn=None, on_failure="stop", max_attempts=1)
    manager.recipe = attrs.evolve(manager.recipe, config=failing)
    try:
        with pytest.raises(GenerateFailure, match="not yet"):
            [group async for group in manager._trained(2, 0)]
        works.set()
        groups = [group async for group in manager._trained(2, 1)]
    finally:
        manager.close()
    assert groups[0][0].group_index == 0
    assert played[0] == 2


async def test_the_rollouts_of_a_prompt_of_a_validation_are_compared() -> None:
    """Each was another group, which verl's one uid refused: a validation with ``n`` above 1 ended the training."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    client = Alternating([[tokenizer.encode("1")[0], tokenizer.convert_tokens_to_ids("<|im_end|>")]])
    greedy = Namespace(n=2, temperature=0, top_p=1.0, top_k=-1)
    rollout = Namespace(prompt_length=512, response_length=64, n=2, val_kwargs=greedy)
    config = Namespace(actor_rollout_ref=Namespace(rollout=rollout))
    manager = RolloutsManager(config, client, tokenizer, {"recipe": "tests/integrations/verl_recipe.py"})
    try:
        groups = [group async for group in manager._validated([{"raw_prompt": QUESTION}] * 2)]
    finally:
        manager.close()
    assert [len({comparison_name(sample) for sample in group}) for group in groups] == [1, 1]
    assert [len(by_rollout(group)) for group in groups] == [2, 2]


@trainer_test
def test_a_validation_plays_verls_own_prompts(demo_tokenizer: Any, store: Store) -> None:
    """Each of them ``val_kwargs.n`` times, greedily, into the partition of validations, with its data source."""
    client = Alternating([[demo_tokenizer.encode("1")[0], demo_tokenizer.convert_tokens_to_ids("<|im_end|>")]])
    manager = managed(demo_tokenizer, client, recipe="tests/integrations/verl_recipe.py")
    try:
        manager.generate_sequences(submitted(4, ["a", "b"], validate=True, data_source=["own"] * 2))
        manager._tasks[0].result(timeout=60)
    finally:
        manager.close()
    assert "train" not in store.tags
    assert {key: store.tags["val"][key]["status"] for key in "ab"} == dict.fromkeys("ab", "finished")
    rows = store.rows["val"]
    assert sorted(rows) == ["a_0_0", "b_0_0"]
    assert {getattr(row["data_source"], "data", row["data_source"]) for row in rows.values()} == {"own"}
    assert {float(row["rm_scores"].sum()) for row in rows.values()} == {1.0}


@trainer_test
def test_a_prompt_over_verls_length_fails_its_group_only(demo_tokenizer: Any, store: Store) -> None:
    """There would be a row without a response; the manager takes another prompt of the recipe."""
    end = demo_tokenizer.convert_tokens_to_ids("<|im_end|>")
    client = Alternating([[demo_tokenizer.encode("1")[0], end]])
    manager = managed(demo_tokenizer, client, recipe="tests/integrations/verl_recipe.py", recipe_options={"long": 1})
    try:
        manager.generate_sequences(submitted(1, ["a"]))
        manager._tasks[0].result(timeout=60)
    finally:
        manager.close()
    assert store.tags["train"]["a"]["status"] == "finished"
    assert all(len(row["prompts"]) < 512 for row in store.rows["train"].values())


@trainer_test
def test_a_prompt_without_a_group_is_a_failure(demo_tokenizer: Any, store: Store) -> None:
    """Generation that ends with an error marks its prompts, and the next call raises it."""

    class Broken:
        async def generate(self, **request: Any) -> Namespace:
            return output((), extra_fields={"global_steps": 5})

    manager = managed(demo_tokenizer, Broken(), recipe="tests/integrations/verl_recipe.py")
    try:
        manager.generate_sequences(submitted(1, ["a"]))
        (task,) = manager._tasks
        assert task.exception(timeout=60) is not None
        assert store.tags["train"]["a"]["status"] == "failure"
        with pytest.raises(GenerateFailure, match="an earlier step ended"):
            manager.generate_sequences(submitted(2, ["b"]))
    finally:
        manager.close()


@trainer_test
async def test_a_stored_run_feeds_verl(demo_tokenizer: Any, store: Store, tmp_path: Path) -> None:
    """Its groups fill the prompts in order; a prompt for which none is left is a failure."""
    samples = scored_groups(2, 2)
    writer = RunWriter(tmp_path / "run", {"recipe": "test"})
    writer.write_batch(samples, {})
    writer.finish("finished")
    manager = managed(demo_tokenizer, None, run=str(tmp_path / "run"))
    try:
        manager.generate_sequences(submitted(1, ["a", "b", "c"]))
        error = manager._tasks[0].exception(timeout=60)
        assert "no more groups: 2 of 3 prompts" in str(error)
    finally:
        manager.close()
    assert [store.tags["train"][key]["status"] for key in "abc"] == ["finished", "finished", "failure"]
    for uid, members in (("a", samples[:2]), ("b", samples[2:])):
        for session, rollout in enumerate(by_rollout(members)):
            assert store.rows["train"][f"{uid}_{session}_0"]["input_ids"].tolist() == trimmed(rollout[0]).tokens
