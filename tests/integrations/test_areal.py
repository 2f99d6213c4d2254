"""AReaL 1.0.4: our agent in its engine, our samples in its actor. ``scripts/test --trainers areal`` runs all."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import SamplingParams
from rollouts.errors import ConfigError, GenerateFailure
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.areal import ServersPolicy, Workflow, to_tensors, write_batch
from rollouts.training import Sample
from rollouts.training.comparisons import by_comparison
from rollouts.training.rows import row_columns, split, trimmed, turn_column, version_column
from tests.image_samples import image_samples, vision_model
from tests.integrations.verl_recipe import PLAYED
from tests.processors import own_text, picture
from tests.trainer_samples import proposed, scored_groups, tiny_model, token_logprobs, two_seats

needs_areal = pytest.mark.skipif(
    importlib.util.find_spec("areal") is None, reason="scripts/test --trainers areal runs it"
)
trainer = [pytest.mark.trainer, needs_areal, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def trainer_test(test: Any) -> Any:
    for mark in trainer:
        test = mark(test)
    return test


# -- what needs nothing of AReaL ---------------------------------------------------------------------------------------


def hyperparameters(**fields: Any) -> Namespace:
    values = {
        "greedy": False, "temperature": 0.5, "top_p": 0.9, "top_k": int(1e8), "max_new_tokens": 64, "max_tokens": 512,
        "stop": None, "frequency_penalty": 0.0, "ignore_eos": False, "min_new_tokens": 0,
    }  # fmt: skip
    return Namespace(**{**values, **fields})


def test_sampling_is_areals() -> None:
    """Its huge ``top_k`` is none, and greedy is temperature 0."""
    made = Workflow(hyperparameters(), "tokenizer", recipe="calculator")
    assert made.sampling == SamplingParams(temperature=0.5, top_p=0.9, max_new_tokens=64)
    greedy = Workflow(hyperparameters(greedy=True, top_k=20), "tokenizer", recipe="calculator")
    assert (greedy.sampling.temperature, greedy.sampling.top_k) == (0, 20)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"stop": ["x"]}, {}, r"gconfig\.stop"),
        ({"frequency_penalty": 0.5}, {}, r"gconfig\.frequency_penalty"),
        ({"ignore_eos": True}, {}, r"gconfig\.ignore_eos"),
        ({}, {"inference": "grpc"}, "inference"),
        ({}, {"reward_norm": "rollout"}, 'reward_norm.*"group" or "batch"'),
        ({}, {"history": "fork"}, r'history: got .fork.*several rows; or reward_norm="batch"'),
        ({}, {"images": True}, 'images.*inference="http": engine.agenerate reports no number of prompt ids'),
        ({}, {"recipe": None}, "one of recipe and environment"),
    ],
)
def test_what_the_agent_does_not_send_is_refused(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    """When the workflow is made, not in each rollout."""
    with pytest.raises(ConfigError, match=message):
        Workflow(hyperparameters(**fields), "tokenizer", **{"recipe": "calculator", **options})


async def test_a_paused_engine_gets_no_request() -> None:
    """During an update AReaL pauses its executor; the version of a part is the one before its request."""
    paused = iter([True, False])
    inner = Namespace(requests=[])

    async def complete(request: CompletionRequest) -> Any:
        from rollouts.testing.policy import ScriptedPolicy

        inner.requests.append(engine.version)
        reply = await ScriptedPolicy([[5, 6]]).complete(request)
        engine.version = 4
        return reply

    inner.complete = complete
    engine = Namespace(
        addresses=["127.0.0.1:1"],
        version=3,
        get_version=lambda: engine.version,
        workflow_executor=Namespace(is_paused=lambda: next(paused)),
    )
    policy = ServersPolicy(engine, hyperparameters())
    policy.inner = inner  # type: ignore[assignment]
    reply = await policy.complete(CompletionRequest(np.array([1, 2], np.int32), SamplingParams()))
    assert ([span.version for span in reply.versions], next(paused, None)) == (["3"], None)


@attrs.define
class Playing:
    """Episodes that return rows, or raise an error."""

    outcomes: list[list[Sample] | Exception]

    async def play(self, *arguments: Any) -> list[Sample]:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def playing(*outcomes: list[Sample] | Exception, **options: Any) -> Workflow:
    made = Workflow(hyperparameters(), "tokenizer", recipe="calculator", **options)
    made.episodes = Playing([*outcomes])  # type: ignore[assignment]
    return made


async def test_a_failed_rollout_is_counted_and_costs_its_group() -> None:
    """AReaL rejects a group with an exception; ``None`` would leave a group of fewer rows, and later slices cross."""
    failure = GenerateFailure("the rollout failed")
    by_group, by_batch = playing(failure), playing(failure, ConfigError("wrong"), reward_norm="batch")
    with pytest.raises(GenerateFailure, match="the rollout failed"):
        await by_group.arun_episode(None, {"messages": "2 + 3?"})
    assert await by_batch.arun_episode(None, {"messages": "2 + 3?"}) is None
    assert by_group.failures == by_batch.failures == {"GenerateFailure": 1}
    with pytest.raises(ConfigError, match="wrong"):
        await by_batch.arun_episode(None, {"messages": "2 + 3?"})


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (proposed(), r"rows of a comparison: got \[2, 3\]; expected as many for each comparison"),
        (scored_groups(2, 4)[1:], r"rows of a comparison: got \[3, 4\]"),
        (scored_groups(2, 2, forks=True), "reward_norm by group takes no forks"),
    ],
    ids=["seats", "a group without a rollout", "forks"],
)
def test_comparisons_that_areal_would_cross_are_refused(samples: list[Sample], message: str, tmp_path: Path) -> None:
    """By name, in the file of a stored batch: AReaL knows a group by its position only."""
    with pytest.raises(ConfigError, match=message):
        write_batch(samples, tmp_path / "batch.pt")


# -- rows through AReaL ------------------------------------------------------------------------------------------------


@trainer_test
def test_samples_are_tensors(compared: Callable[..., None]) -> None:
    """Un-padded they are ours, forks included; each branch is a row of the dict of its rollout."""
    from areal.infra.workflow_executor import check_trajectory_format

    samples = scored_groups(forks=True)
    data = to_tensors(samples)
    assert check_trajectory_format(data, batch_size=len(samples))
    worst = 0.0
    for number, sample in enumerate(samples):
        row = {name: tensor[number].numpy() for name, tensor in data.items()}
        real, ours = row["attention_mask"].astype(bool), trimmed(sample)
        assert row["input_ids"][real].tolist() == ours.tokens
        assert row["loss_mask"][real].tolist() == ours.loss_mask
        assert row["versions"][real].tolist() == version_column(sample).tolist()
        assert row["turn_ids"][real].tolist() == turn_column(sample).tolist()
        assert (row["loss_mask"][real][-1], row["rewards"]) == (1, sample.reward)
        worst = max(worst, float(np.abs(row["logprobs"][real] - np.array(ours.rollout_log_probs)).max()))
    compared("AReaL 1.0.4", "b", "tensors: ids, mask, logprobs, versions, turns, reward", worst)


@trainer_test
@pytest.mark.parametrize("fields", [{"reward": None}, {"loss_multiplier": 0.5}, {"status": "failed"}, {"versions": []}])
def test_a_sample_that_areal_cannot_take_is_refused(fields: dict[str, Any]) -> None:
    """By name; a version for all tokens can be given."""
    sample = scored_groups(1, 1)[0]
    for name, value in fields.items():
        setattr(sample, name, value)
    with pytest.raises(ConfigError, match=next(iter(fields))):
        to_tensors([sample])
    if "versions" in fields:
        assert to_tensors([sample], version=7)["versions"].max() == 7


class Answering:
    """AReaL's engine, whose reply is the one of a sample."""

    def __init__(self, sample: Sample) -> None:
        self.row = split(sample)

    async def agenerate(self, request: Any) -> Any:
        from areal.api import ModelResponse

        reply = self.row.response.tolist()
        return ModelResponse(
            input_tokens=request.input_ids, output_tokens=reply, output_logprobs=self.row.logprobs.tolist(),
            output_versions=[3] * len(reply), stop_reason="stop", tokenizer=request.tokenizer,
        )  # fmt: skip


@trainer_test
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
async def test_rows_with_images_are_those_of_areals_vision_workflow(
    family: str, small_tokenizer_folder: Callable[[str], Path], compared: Callable[..., None]
) -> None:
    """The same prompts, images and replies through ``VisionRLVRWorkflow``: equal ids, types, arrays and columns."""
    from areal.api.cli_args import GenerationHyperparameters
    from areal.workflow.vision_rlvr import VisionRLVRWorkflow

    model = vision_model(family, small_tokenizer_folder)
    samples = image_samples(model, [(1,), (3,)], unanswered=[1])
    for sample in samples:
        workflow = VisionRLVRWorkflow(
            lambda *given, **named: 0.0, GenerationHyperparameters(), model.tokenizer, model.processor, False
        )

        async def scored(*given: Any, sample: Sample = sample, **named: Any) -> float:
            return sample.reward or 0.0

        workflow.async_reward_fn = scored
        text = own_text(model.tokenizer, model.template, sample.prompt)
        shown = [image.to_pil() for image in sample.prompt[0].images]
        theirs = await workflow.arun_episode(Answering(sample), {"images": shown, "messages": text})
        ours = to_tensors([sample])
        assert ours.keys() == theirs.keys() | {"turn_ids"}
        (arrays,), (own,) = ours.pop("multi_modal_input"), theirs.pop("multi_modal_input")
        assert [*arrays] == [*own]
        for name, tensor in own.items():
            assert arrays[name].dtype == tensor.dtype
            assert arrays[name].equal(tensor), name
        for name, tensor in theirs.items():
            assert ours[name].to(tensor.dtype).equal(tensor), name
    what = f"VisionRLVRWorkflow with {family}: ids, types, arrays, columns"
    compared("AReaL 1.0.4", "b", what, 0.0)


@trainer_test
def test_a_batch_with_images_reaches_areals_model(
    actor: Any, small_tokenizer_folder: Callable[[str], Path], compared: Callable[..., None]
) -> None:
    """Through its own padding, advantages, micro batches and forward inputs; images after the last reply are cut."""
    import torch
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.fsdp_engine import _prepare_multimodal_forward_inputs
    from areal.utils.data import split_padded_tensor_dict_into_mb_list

    model = vision_model("qwen3_vl", small_tokenizer_folder)
    samples = image_samples(model, [(1,), (2, 1), (0,), (1, 0, 2)], unanswered=[1, 2])
    (data,) = actor.compute_advantages([to_tensors(samples)])
    assert [len(row) for row in data["multi_modal_input"]] == [2, 2, 0, 2]
    assert data["mm_token_type_ids"].bool().equal(data["input_ids"] == model.placeholder)
    data["position_ids"] = torch.arange(4)[:, None].expand(data["input_ids"].shape).contiguous()
    seen = 0
    for batch in split_padded_tensor_dict_into_mb_list(data, MicroBatchSpec(n_mbs=2)).mbs:
        rows = [samples[number] for number in batch["position_ids"][:, 0].tolist()]
        forward = {**batch}
        _prepare_multimodal_forward_inputs({**batch}, forward)
        shown = [span.image for row in rows for span in trimmed(row).images]
        for name, array in model.images.inputs(shown).items():
            assert forward[name].equal(torch.tensor(array)), name
        seen += len(shown)
    assert seen == 7, "not the image after the last reply of the second row"
    what = "padding, advantages and micro batches of rows with images: what the model gets"
    compared("AReaL 1.0.4", "b", what, 0.0)


@trainer_test
def test_rows_of_text_have_the_keys_of_images_where_others_may_have_them() -> None:
    """AReaL joins only dicts of equal keys, and its models of the Qwen-VL families need the types of every row."""
    data = to_tensors(scored_groups(1, 2), images=True)
    assert data["multi_modal_input"] == [{}, {}]
    assert not data["mm_token_type_ids"].any()
    assert "multi_modal_input" not in to_tensors(scored_groups(1, 2))


@pytest.fixture(scope="module")
def actor() -> Any:
    return actor_of(group_size=4)


def actor_of(group_size: int) -> Any:
    from areal.api.cli_args import NormConfig, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor

    norm = NormConfig(mean_level="group", std_level="group", group_size=group_size)
    return PPOActor(PPOActorConfig(reward_norm=norm, adv_norm=None, kl_ctl=0), engine=object())


def trained_advantages(actor: Any, groups: Sequence[Sequence[Sample]]) -> list[Any]:
    """The advantages of the trained tokens of each row, by AReaL."""
    batch = [{**to_tensors(members)} for members in groups]
    done = actor.compute_advantages(batch)
    rows = []
    for data in done:
        for advantages, mask in zip(data["advantages"], data["loss_mask"].bool(), strict=True):
            rows.append(advantages[mask].numpy())
    return rows


@trainer_test
def test_areals_advantages_are_ours(actor: Any, compared: Callable[..., None]) -> None:
    """The real ``PPOActor``, normalised by group: each trained token has our advantage, but for its epsilon."""
    from rollouts.training.batch import group_advantages

    samples = scored_groups(4, 4)
    groups = [samples[start : start + 4] for start in range(0, 16, 4)]
    rows = trained_advantages(actor, groups)
    deviations = [float(np.std([one.reward for one in members], ddof=1)) for members in groups for _ in members]
    ours = [own * (std + 1e-6) / (std + 1e-5) for own, std in zip(group_advantages(samples), deviations, strict=True)]
    worst = max(float(np.abs(row - own).max()) for row, own in zip(rows, ours, strict=True))
    assert [len(row) for row in rows] == [sample.sampled_tokens for sample in samples]
    what = "PPOActor.compute_advantages and ours, with its epsilon of 1e-5"
    compared("AReaL 1.0.4", "b", what, worst, within=1e-6, note="float32 there")


@trainer_test
@pytest.mark.parametrize("samples", [two_seats(), proposed(3)], ids=["players", "proposers and solvers"])
def test_areals_advantages_of_seats_are_ours(
    samples: list[Sample], tmp_path: Path, compared: Callable[..., None]
) -> None:
    """A stored batch of three plays through the real ``PPOActor``: each is compared with what the samples name."""
    import torch

    from rollouts.training.batch import group_advantages

    write_batch(samples, tmp_path / "batch.pt")
    done = actor_of(group_size=3).compute_advantages(torch.load(tmp_path / "batch.pt"))
    worst = 0.0
    for data, members in zip(done, by_comparison(samples), strict=True):
        deviation = float(np.std([one.reward for one in members], ddof=1))
        ours = [own * (deviation + 1e-6) / (deviation + 1e-5) for own in group_advantages(members)]
        for row, mask, own in zip(data["advantages"], data["loss_mask"].bool(), ours, strict=True):
            worst = max(worst, float((row[mask] - own).abs().max()))
    what = f"PPOActor.compute_advantages of {len(done)} comparisons of seats and ours, with its epsilon of 1e-5"
    compared("AReaL 1.0.4", "b", what, worst, within=1e-6, note="float32 there")


@trainer_test
def test_areal_crosses_groups_of_unlike_sizes(actor: Any) -> None:
    """The reason for the refusal: one row less in the first group moves all slices, and the rest is divided by 1e-5."""
    from rollouts.training.batch import group_advantages

    samples = scored_groups(4, 4)[1:]
    groups = [samples[:3], samples[3:7], samples[7:11], samples[11:]]
    rows = trained_advantages(actor, groups)
    wrong = [float(np.abs(row - own).max()) for row, own in zip(rows, group_advantages(samples), strict=True)]
    print(f"{sum(one > 0.01 for one in wrong)} of 15 rows, by up to {max(wrong[:12]):.2f} and {max(wrong[12:]):,.0f}")
    assert sum(one > 0.01 for one in wrong) >= 12
    assert max(wrong[12:]) > 1000


@trainer_test
def test_a_row_that_ends_in_context_would_lose_its_reward(actor: Any) -> None:
    """AReaL puts the reward on the token before the last: on a row with its bridge all advantages are 0."""
    import torch

    from rollouts.training.batch import group_advantages

    samples = scored_groups(1, 4, tails=False)
    data = to_tensors(samples)
    tail = {"input_ids": 7, "loss_mask": 0, "logprobs": 0, "versions": -1, "turn_ids": -1, "attention_mask": 1}
    longer = {
        name: torch.cat([tensor, torch.full((4, 2), tail[name], dtype=tensor.dtype)], 1) if name in tail else tensor
        for name, tensor in data.items()
    }
    width = data["input_ids"].shape[1]
    row = int(data["attention_mask"].sum(1).argmax())  # without padding before its tail
    assert group_advantages(samples)[row] != 0
    (done,) = actor.compute_advantages([longer])
    trained = longer["loss_mask"][row][:width].bool()
    assert done["advantages"][row][:width][trained].abs().max() == 0


class TinyEngine:
    """AReaL's training engine around a tiny model: what ``PPOActor.ppo_update`` calls."""

    def __init__(self) -> None:
        import torch

        self.model = tiny_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self) -> None:
        return None

    def get_version(self) -> int:
        return 3

    def logprobs(self, ids: Any) -> Any:
        """The logprob of the token after each position, as AReaL aligns them."""
        return token_logprobs(self.model, ids.long()).roll(-1, dims=-1)

    def train_batch(self, batch: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        logprobs = self.logprobs(batch["input_ids"])
        loss = loss_fn(logprobs, logprobs.detach() * 0, batch)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}


@trainer_test
def test_one_step_of_ppo_update_follows_the_advantages(compared: Callable[..., None]) -> None:
    """The real ``PPOActor`` on our tensors and a tiny model: good rollouts become likelier."""
    from areal.api.cli_args import NormConfig, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor

    norm = NormConfig(mean_level="group", std_level="group", group_size=4)
    config = PPOActorConfig(reward_norm=norm, adv_norm=None, kl_ctl=0, ppo_n_minibatches=1)
    engine = TinyEngine()
    samples = scored_groups(4, 4)
    (data,) = PPOActor(config, engine=engine).compute_advantages([to_tensors(samples)])
    before = engine.logprobs(data["input_ids"]).detach()
    weights = data["advantages"] * data["loss_mask"]
    ids = data["input_ids"]
    PPOActor(config, engine=engine).ppo_update([{**data, "logprobs": before, "prox_logp": before}])
    assert float(((engine.logprobs(ids) - before) * weights).sum()) > 0
    compared("AReaL 1.0.4", "step", "one step of PPOActor.ppo_update follows the advantages", 0.0, note="tiny model")


# -- our agent inside AReaL --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(engine_url: str) -> Iterator[Any]:
    """AReaL's engine, with the embedded engine as its SGLang server."""
    from areal.api.cli_args import InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine

    config = InferenceEngineConfig(
        backend="sglang:d1", consumer_batch_size=2, max_concurrent_rollouts=8, max_head_offpolicyness=8,
        check_trajectory_format=True,
    )  # fmt: skip
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=engine_url.removeprefix("http://"), train_data_parallel_size=1)
    engine.set_version(3)
    yield engine
    engine.destroy()


@trainer_test
@pytest.mark.parametrize("inference", ["engine", "http"])
def test_the_calculator_recipe_through_areals_executor(
    engine: Any, inference: str, compared: Callable[..., None]
) -> None:
    """Groups of the real executor, which checks their format; the logprobs equal the server's for the ids."""
    from areal.api.cli_args import GenerationHyperparameters

    from rollouts.engine import DEMO_MODEL
    from rollouts.engine.teacher import Teacher
    from rollouts.integrations.areal import RolloutsWorkflow

    workflow = RolloutsWorkflow(
        GenerationHyperparameters(max_tokens=1024, max_new_tokens=96, temperature=1.0),
        str(DEMO_MODEL),
        inference=inference,
        prompt_key="prompt",
        recipe="calculator",
        reward="tests.integrations.verl_recipe:kept",
        limits={"max_turns": 3},
    )
    PLAYED.clear()
    for number in range(2):
        prompt = [{"role": "user", "content": f"What is 12 + {number}?"}]
        engine.submit({"prompt": prompt, "answer": str(12 + number)}, workflow=workflow, group_size=2)
    results = engine.wait(count=2, timeout=120)
    assert workflow.failures == {}
    teacher, worst, turns, rows = Teacher(DEMO_MODEL, "float32"), 0.0, 0, []
    for data in results:
        assert data["input_ids"].shape[0] == 2
        for row in range(2):
            one = {name: tensor[row].numpy() for name, tensor in data.items()}
            real = one["attention_mask"].astype(bool)
            mask = one["loss_mask"][real].astype(bool)
            assert mask[-1]
            assert set(one["versions"][real][mask]) == {3}
            assert set(one["versions"][real][~mask]) == {-1}
            assert (one["turn_ids"][real] >= 0).tolist() == mask.tolist()
            turns = max(turns, int(one["turn_ids"][real].max()) + 1)
            ids = one["input_ids"][real]
            rows.append([ids.tolist(), mask.tolist(), one["logprobs"][real].tolist(), float(one["rewards"])])
            exact = teacher.logprobs(ids, np.flatnonzero(mask), 1.0)
            worst = max(worst, float(np.abs(exact - one["logprobs"][real][mask]).max()))
    assert turns > 1
    played = [(row_columns(sample, "AReaL"), sample.reward) for sample in PLAYED]
    assert sorted(rows) == sorted([*[column.tolist() for column in columns], reward] for columns, reward in played)
    compared("AReaL 1.0.4", "a", f"calculator through its executor ({inference}): ids, mask, logprobs, reward", 0.0)
    what = f"calculator through its executor ({inference}): logprobs and a forward pass"
    compared("AReaL 1.0.4", "a", what, worst, within=1e-3, note="server: our engine; float32")


@trainer_test
@pytest.mark.parametrize(("reward_norm", "rows"), [("group", [0, 2, 2]), ("batch", [1, 2, 2])])
def test_a_failed_rollout_through_areals_executor(engine: Any, reward_norm: str, rows: list[int]) -> None:
    """Groups that are compared by their position keep their size: the group of the failure is rejected."""
    from rollouts.integrations.areal import RolloutsWorkflow

    workflow = RolloutsWorkflow(hyperparameters(), "tokenizer", recipe="calculator", reward_norm=reward_norm)
    samples = scored_groups(1, 5, temperature=0.5)
    workflow.episodes = Playing([GenerateFailure("it failed"), *([sample] for sample in samples)])
    for _ in range(3):
        engine.submit({"messages": "2 + 3?"}, workflow=workflow, group_size=2)
    results = engine.wait(count=3, timeout=60)
    assert sorted(0 if data is None else len(data["rewards"]) for data in results) == rows
    assert workflow.failures == {"GenerateFailure": 1}


@trainer_test
def test_a_prompt_with_an_image_through_areals_executor(engine: Any, compared: Callable[..., None]) -> None:
    """Our client sends the image to the engine's server, which counts the ids; the row has its array and its types."""
    import torch
    from areal.api.cli_args import GenerationHyperparameters

    from rollouts.engine import DEMO_MODEL
    from rollouts.integrations.areal import RolloutsWorkflow

    workflow = RolloutsWorkflow(
        GenerationHyperparameters(max_tokens=1024, max_new_tokens=16, temperature=1.0),
        str(DEMO_MODEL),
        inference="http",
        environment="rollouts.environments:SingleTurnEnvironment",
        reward="tests.integrations.verl_recipe:kept",
        images=True,
    )
    PLAYED.clear()
    shown = {"type": "image_url", "image_url": {"url": picture(40, 30).url}}
    content = [{"type": "text", "text": "What is this?"}, shown]
    engine.submit({"messages": [{"role": "user", "content": content}], "answer": "4"}, workflow=workflow, group_size=2)
    (data,) = engine.wait(count=1, timeout=120)
    assert workflow.failures == {}
    by_ids = {tuple(sample.tokens): sample for sample in PLAYED}
    for row in range(2):
        real = data["attention_mask"][row].bool()
        sample = by_ids[tuple(data["input_ids"][row][real].tolist())]
        (span,) = sample.images
        assert data["mm_token_type_ids"][row].nonzero()[:, 0].tolist() == [*range(span.start, span.stop)]
        arrays = sample.multimodal_train_inputs or {}
        assert data["multi_modal_input"][row].keys() == arrays.keys() == {"pixel_values"}
        assert data["multi_modal_input"][row]["pixel_values"].equal(torch.tensor(arrays["pixel_values"]))
    compared("AReaL 1.0.4", "a", "an image through its executor (http): ids, types, pixel_values", 0.0)
