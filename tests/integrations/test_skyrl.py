"""SkyRL 0.3: its checks, tensors and advantages on our rows, and our agent as its generator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.dtypes import Image, Limits, Message, SamplingParams, packed_tokens
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError, EndpointRefused, GenerateFailure
from rollouts.inference.base import CompletionRequest
from rollouts.integrations.episodes import Episodes
from rollouts.integrations.skyrl import (
    Generator,
    SkyRLPolicy,
    register_advantages,
    sampling_of,
    to_generator_output,
    write_batch,
)
from rollouts.renderer import load_tokenizer
from rollouts.training import Sample, Status
from rollouts.training.batch import group_advantages
from rollouts.training.credit import assign_advantages, returns_to_go
from rollouts.training.rows import image_column, trimmed
from tests.image_samples import VisionModel, image_samples, vision_model
from tests.processors import picture
from tests.trainer_samples import columns, proposed, scored_groups, tiny_model, token_logprobs, two_seats


def rows_of(output: dict[str, Any]) -> list[tuple[list[int], list[bool], list[float]]]:
    """Tokens, mask and logprobs of the rows, as wide as prompt and response."""
    rows = []
    for number, prompt in enumerate(output["prompt_token_ids"]):
        context = len(prompt)
        mask = [False] * context + [bool(one) for one in output["loss_masks"][number]]
        logprobs = [0.0] * context + output["rollout_logprobs"][number]
        rows.append((prompt + output["response_ids"][number], mask, logprobs))
    return rows


def ids(count: int) -> list[Any]:
    return [SimpleNamespace(instance_id=str(number), repetition_id=0) for number in range(count)]


def test_an_output_has_one_exact_row_for_each_rollout() -> None:
    """Tokens, mask, logprobs, reward; a row that ends in context is cut: the reward lands on a sampled token."""
    samples = scored_groups(2, 3)
    output = to_generator_output(samples, trajectory_ids=ids(6))
    assert rows_of(output) == [columns(sample) for sample in samples]
    assert output["rewards"] == [sample.reward for sample in samples]
    assert all(mask[0] == mask[-1] == 1 for mask in output["loss_masks"])
    assert output["stop_reasons"] == ["stop", "stop", "length"] * 2
    assert output["is_last_step"] is None


def test_forks_need_step_wise_training() -> None:
    """There each branch is a row, and the last one ends the trajectory."""
    samples = scored_groups(1, 2, forks=True)
    with pytest.raises(ConfigError, match=r"got '2 branches'; expected one row each"):
        to_generator_output(samples, trajectory_ids=ids(2))
    output = to_generator_output(samples, step_wise=True, trajectory_ids=ids(2))
    assert output["is_last_step"] == [True, False, True]
    assert rows_of(output) == [columns(sample) for sample in samples]


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", Status.FAILED), ("reward", None), ("loss_multiplier", 0.0), ("reward", float("nan"))],
)
def test_what_skyrl_cannot_carry_is_refused(field: str, value: Any) -> None:
    """By the name of the field."""
    (sample,) = scored_groups(1, 1)
    setattr(sample, field, value)
    with pytest.raises(ConfigError, match=rf"\.{field}: got"):
        to_generator_output([sample], trajectory_ids=ids(1))


def test_no_sample_is_refused() -> None:
    """Their checks would fail later."""
    with pytest.raises(ConfigError, match="at least one sample"):
        to_generator_output([])


def test_a_batch_has_images_in_every_row_or_in_none(small_tokenizer_folder: Callable[[str], Path]) -> None:
    """SkyRL concatenates the tensors of all rows; a row of text, or arrays without sizes, would end the step."""
    model = vision_model("qwen3_vl", small_tokenizer_folder)
    with pytest.raises(ConfigError, match=r"index 1.*multimodal_train_inputs: got \[\]; expected .* of each row"):
        to_generator_output(image_samples(model, [(1,), (0,)], unanswered=[1]), trajectory_ids=ids(2))
    text = to_generator_output(image_samples(model, [(0,)], unanswered=[0]), trajectory_ids=ids(1))
    assert (text["pixel_values"], text["image_grid_thw"]) == (None, None)
    other = vision_model("internvl", small_tokenizer_folder)
    with pytest.raises(ConfigError, match=r"got \['pixel_values'\]; expected pixel_values and image_grid_thw of each"):
        to_generator_output(image_samples(other, [(1,)], unanswered=[]), trajectory_ids=ids(1))


def test_a_file_has_no_images(tmp_path: Path, small_tokenizer_folder: Callable[[str], Path]) -> None:
    """It is JSON, which has no tensors."""
    samples = image_samples(vision_model("qwen3_vl", small_tokenizer_folder), [(1,)], unanswered=[])
    with pytest.raises(ConfigError, match=r"\.images: got '1 images'.*SkyRL's file in JSON has no field for it"):
        write_batch(samples, tmp_path / "batch.json")


@pytest.mark.trainer
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_batch_with_images_reaches_their_model(
    family: str, small_tokenizer_folder: Callable[[str], Path], compared: Callable[..., None]
) -> None:
    """validate_generator_output, convert_to_training_input with its padding, and the chunks of micro batches."""
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("skyrl.train.trainer")
    trainer_utils = pytest.importorskip("skyrl.train.utils.trainer_utils")
    model = vision_model(family, small_tokenizer_folder)
    samples = image_samples(model)
    output = to_generator_output(samples)
    trainer_utils.validate_generator_output(4, output, step_wise=False)
    assert rows_of(output) == [columns(sample) for sample in samples]
    output["rewards"] = [[0.0] * len(response) for response in output["response_ids"]]
    algorithm = SimpleNamespace(
        max_seq_len=4096, off_policy_correction=SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    )
    settings = SimpleNamespace(
        algorithm=algorithm, train_batch_size=1, policy_mini_batch_size=1,
        critic=SimpleNamespace(model=SimpleNamespace(path=None)),
    )  # fmt: skip
    generator = SimpleNamespace(n_samples_per_prompt=4, step_wise_trajectories=False)
    given = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=0),
        cfg=SimpleNamespace(trainer=settings, generator=generator),
        all_metrics={},
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 6),
    )
    batch = trainer.RayPPOTrainer.convert_to_training_input(given, output, ["0"] * 4)
    assert len(batch["pixel_values"]) == 6, "padded with its first row"
    rows = [*samples, samples[0], samples[0]]
    for number, chunk in enumerate(batch.chunk(2)):
        members = rows[2 * number : 2 * number + 2]
        shown = [span.image for row in members for span in trimmed(row).images]
        for name, array in model.images.inputs(shown).items():
            assert torch.cat(chunk[name].tensors, dim=0).equal(torch.tensor(array)), name
        tokens = [chunk["sequences"][at][chunk["attention_mask"][at] == 1].tolist() for at in range(2)]
        assert tokens == [columns(row)[0] for row in members]
        types = [(chunk["sequences"][at] == model.placeholder)[chunk["attention_mask"][at] == 1] for at in range(2)]
        assert all(np.array_equal(one, image_column(row)) for one, row in zip(types, members, strict=True))
    compared("SkyRL 0.3.0", "b", f"rows with images, {family}: ids, pixel_values, image_grid_thw of a batch", 0.0)


@pytest.mark.trainer
@pytest.mark.parametrize("forks", [False, True])
def test_their_checks_tensors_and_advantages(forks: bool, compared: Callable[..., None]) -> None:
    """validate_generator_output, the padded batch back un-padded, and GRPO equal to group_advantages, difference 0."""
    torch = pytest.importorskip("torch")
    preprocess = pytest.importorskip("skyrl.train.dataset.preprocess")
    trainer_utils = pytest.importorskip("skyrl.train.utils.trainer_utils")
    ppo_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    samples = scored_groups(forks=forks)
    output = to_generator_output(samples, step_wise=forks)
    trainer_utils.validate_generator_output(16, output, step_wise=forks)
    rewards = [
        [0.0] * (len(response) - 1) + [reward]
        for response, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    tokenizer = SimpleNamespace(pad_token_id=0)
    sequences, attention, responses, token_rewards, masks, logprobs, *_ = (
        preprocess.convert_prompts_responses_to_batch_tensors(
            tokenizer,
            output["prompt_token_ids"],
            output["response_ids"],
            rewards,
            output["loss_masks"],
            output["rollout_logprobs"],
        )
    )
    del responses
    for number, sample in enumerate(samples):
        tokens, mask, expected = columns(sample)
        start = mask.index(True)
        assert sequences[number][attention[number] == 1].tolist() == tokens
        width = len(tokens) - start
        assert masks[number][-width:].tolist() == [float(one) for one in mask[start:]]
        assert np.array_equal(logprobs[number][-width:].numpy(), np.array(expected[start:], np.float32))
    last = output["is_last_step"] or [True] * len(samples)
    chosen = [number for number, one in enumerate(last) if one]
    uids = np.array([output["trajectory_ids"][number].instance_id for number in chosen])
    advantages, _ = ppo_utils.compute_grpo_outcome_advantage(
        token_rewards[chosen], torch.ones_like(masks[chosen]), uids, epsilon=1e-6
    )
    ours = group_advantages(samples)[chosen]
    what = "rows of forks, step-wise" if forks else "rows"
    compared("SkyRL 0.3.0", "b", f"tokens, mask, logprobs of {what}", 0.0)
    worst = float(np.abs(advantages[:, -1].numpy() - ours).max())
    compared("SkyRL 0.3.0", "b", f"GRPO of {what}", worst, within=1e-6, note="float32 there")


def credited(samples: list[Sample]) -> list[Sample]:
    """The samples with an advantage for each turn."""
    assign_advantages(samples, returns_to_go)
    return samples


def test_a_column_of_advantages_is_taken_where_it_is_named() -> None:
    """In place of the rewards, one number a token; refused without the option, and where SkyRL would copy it."""
    samples = credited(scored_groups(2))
    with pytest.raises(ConfigError, match="SkyRL without advantages=True has no field for it"):
        to_generator_output(samples, trajectory_ids=ids(8))
    rewards = to_generator_output(samples, trajectory_ids=ids(8), advantages=True)["rewards"]
    for sample, row in zip(samples, rewards, strict=True):
        assert sample.advantages is not None
        start = columns(sample)[1].index(True)
        assert row == sample.advantages[start : start + len(row)]
    with pytest.raises(ConfigError, match="advantages: got True; expected False with step_wise"):
        to_generator_output(samples, trajectory_ids=ids(8), advantages=True, step_wise=True)
    samples[0].advantages = None
    with pytest.raises(ConfigError, match="advantages: got None; expected a column"):
        to_generator_output(samples, trajectory_ids=ids(8), advantages=True)


@pytest.mark.trainer
def test_their_trainer_has_our_advantages(compared: Callable[..., None]) -> None:
    """compute_advantages_and_returns of the trainer with our estimator: the column of each row, difference 0."""
    torch = pytest.importorskip("torch")
    preprocess = pytest.importorskip("skyrl.train.dataset.preprocess")
    ppo_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    samples = credited(scored_groups())
    output = to_generator_output(samples, advantages=True)
    tokenizer = SimpleNamespace(pad_token_id=0)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    batch = preprocess.convert_prompts_responses_to_batch_tensors(tokenizer, *(output[name] for name in names))
    rewards, masks = batch[3], batch[4]
    register_advantages()
    register_advantages()
    uids = np.array([one.instance_id for one in output["trajectory_ids"]])
    got, _ = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=rewards, response_mask=masks, index=uids, adv_estimator="rollouts", values=None,
        config=None, gamma=1.0, lambd=1.0, grpo_norm_by_std=True,
    )  # fmt: skip
    for number, sample in enumerate(samples):
        start, width = columns(sample)[1].index(True), len(output["response_ids"][number])
        assert sample.advantages is not None
        expected = torch.tensor(sample.advantages[start : start + width])
        assert torch.equal(got[number][-width:], expected)
    assert any(len(set(sample.advantages or ()) - {0.0}) > 1 for sample in samples), "turns have unlike advantages"
    compared("SkyRL 0.3.0", "b", "advantages of credit by turn, through its registry", 0.0)


@pytest.mark.trainer
def test_their_grpo_compares_seats_as_the_samples_say(compared: Callable[..., None]) -> None:
    """By ``instance_id``: two seats of a game apart, solvers of one proposal with each other; equal to ours."""
    ppo_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    torch = pytest.importorskip("torch")
    worst = 0.0
    for samples in (two_seats(), proposed()):
        output = to_generator_output(samples)
        assert sorted(output["rewards"]) == sorted(sample.reward or 0.0 for sample in samples)
        rewards, uids = torch.tensor(output["rewards"])[:, None], [one.instance_id for one in output["trajectory_ids"]]
        got, _ = ppo_utils.compute_grpo_outcome_advantage(rewards, torch.ones(len(samples), 1), np.array(uids))
        worst = max(worst, float(np.abs(got[:, 0].numpy() - group_advantages(samples)).max()))
    compared("SkyRL 0.3.0", "b", "GRPO of two seats, of solvers by episode", worst, within=1e-5, note="its epsilon")


@pytest.mark.trainer
def test_one_step_of_their_loss_follows_the_advantages(compared: Callable[..., None]) -> None:
    """ppo_policy_loss on our batch and a tiny model: good rollouts become likelier."""
    torch = pytest.importorskip("torch")
    preprocess = pytest.importorskip("skyrl.train.dataset.preprocess")
    ppo_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    samples = scored_groups()
    output = to_generator_output(samples)
    rewards = [[0.0] * len(response) for response in output["response_ids"]]
    fields = ("prompt_token_ids", "response_ids")
    batch = preprocess.convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0), *(output[name] for name in fields), rewards, output["loss_masks"]
    )
    sequences, masks = batch[0], batch[4].float()
    advantages = torch.from_numpy(group_advantages(samples))[:, None] * masks
    config = SimpleNamespace(
        policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2, off_policy_correction=None
    )
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = token_logprobs(model, sequences)[:, -masks.shape[1] :]
    loss, _ = ppo_utils.ppo_policy_loss(before, before.detach(), advantages, config, loss_mask=masks)
    loss.backward()
    optimizer.step()
    after = token_logprobs(model, sequences)[:, -masks.shape[1] :]
    assert ((after - before) * advantages).sum() > 0
    compared("SkyRL 0.3.0", "step", "one step of ppo_policy_loss follows the advantages", 0.0, note="tiny model")


class Client:
    """A strict fake of SkyRL's inference client, with the fields of its ``InferenceEngineInput`` and output."""

    def __init__(self, ids: list[int], *, logprobs: bool = True) -> None:
        self.ids, self.logprobs, self.requests = ids, logprobs, list[dict[str, Any]]()

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        fields = {"prompts", "prompt_token_ids", "sampling_params", "session_ids", "mm_features", "cache_salt"}
        assert input_batch.keys() == fields
        assert input_batch["prompts"] is None
        self.requests.append(input_batch)
        given = [[-0.5] * len(self.ids)] if self.logprobs else None
        answer = {"responses": [""], "response_ids": [self.ids], "stop_reasons": ["stop"], "response_logprobs": given}
        return {**answer, "prompt_logprobs": None, "rollout_expert_indices": None}


async def test_the_inference_client_is_a_policy() -> None:
    """Ids out and back, the step as the version, one session for the turns of a rollout."""
    client = Client([7, 8])
    policy = SkyRLPolicy(client, version=3, max_context=64)
    done = await policy.complete(
        CompletionRequest(packed_tokens([1, 2]), SamplingParams(max_new_tokens=4), stop_token_ids=(9,), session="s")
    )
    assert (done.tokens.tolist(), done.finish_reason, done.versions[0].version) == ([7, 8], "stop", "3")
    (request,) = client.requests
    assert (request["prompt_token_ids"], request["session_ids"]) == ([[1, 2]], ["s"])
    assert request["sampling_params"]["stop_token_ids"] == [9]
    with pytest.raises(ConfigError, match=r"SamplingParams.seed: got 1"):
        await policy.complete(CompletionRequest(packed_tokens([1]), SamplingParams(seed=1)))
    with pytest.raises(EndpointRefused, match="no logprobs"):
        await SkyRLPolicy(Client([7], logprobs=False), version=3).complete(
            CompletionRequest(packed_tokens([1]), SamplingParams())
        )


def rendered(model: VisionModel, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of vLLM's endpoint ``/v1/chat/completions/render``, with the processor of the model."""
    (message,) = body["messages"]
    shown = [Image.of(part["image_url"]["url"]) for part in message["content"]]
    messages = [Message("user", shown)]
    tokens = model.renderer.opening(messages)
    places = [
        {"offset": span.start, "length": span.stop - span.start}
        for span in model.renderer.image_spans(tokens, messages)
    ]
    features = {
        "mm_hashes": {"image": [image.sha256 for image in shown]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": [f"arrays of {image.sha256}" for image in shown]},
    }
    return {"token_ids": tokens.tolist(), "features": features}


class Rendering(Client):
    """A client whose server has the processor of a model."""

    model_name = "model"

    def __init__(self, ids: list[int], renders: VisionModel) -> None:
        super().__init__(ids)
        self.renders = renders

    async def render_chat_completion(self, payload: dict[str, Any]) -> dict[str, Any]:
        assert payload["json"]["model"] == "model"
        return rendered(self.renders, payload["json"])


async def test_the_generator_plays_prompts_with_images(small_tokenizer_folder: Callable[[str], Path]) -> None:
    """Each row has the tensors of exactly its images."""
    model = vision_model("qwen3_vl", small_tokenizer_folder)
    options = {"images": model.processor, "chat_template": model.template}
    episodes = Episodes(environment_cls=SingleTurnEnvironment, reward_fn=length_reward, options=options)
    batch, shown = batch_of(2), [picture(97, 61), picture(30, 150)]
    for prompt, image in zip(batch["prompts"], shown, strict=True):
        prompt[0]["content"] = [{"type": "image_url", "image_url": {"url": image.url}}]
    client = Rendering(model.renderer.encode("5<|im_end|>").tolist(), model)
    output = await Generator(episodes, client, model.tokenizer).generate(batch)
    for number, image in enumerate(shown):
        for name, array in model.images.inputs([image]).items():
            assert np.array_equal(output[name][number].numpy(), array)


async def test_a_request_with_images_has_what_the_server_makes_of_them(
    small_tokenizer_folder: Callable[[str], Path],
) -> None:
    """At their positions among all ids; ids that the server would write otherwise are refused, unsent."""
    model, other = (vision_model(name, small_tokenizer_folder) for name in ("qwen3_vl", "glm4v"))
    client = Rendering([7, 8], model)
    (sample,) = image_samples(model, [(2, 1)], unanswered=[])
    policy = SkyRLPolicy(client, version=3)
    await policy.complete(CompletionRequest(sample.token_column, SamplingParams(), images=sample.images))
    (request,) = client.requests
    (features,) = request["mm_features"]
    assert request["prompt_token_ids"] == [sample.tokens]
    assert features == {
        "mm_hashes": {"image": [span.image.sha256 for span in sample.images]},
        "mm_placeholders": {
            "image": [{"offset": span.start, "length": span.stop - span.start} for span in sample.images]
        },
        "kwargs_data": {"image": [f"arrays of {span.image.sha256}" for span in sample.images]},
    }
    client.renders = other
    with pytest.raises(EndpointRefused, match=r"SkyRL's server writes \[.*\] ids for the images; expected the \["):
        await policy.complete(CompletionRequest(sample.token_column, SamplingParams(), images=sample.images))
    assert len(client.requests) == 1


@pytest.mark.trainer
async def test_a_request_with_images_is_that_of_their_client(
    small_tokenizer_folder: Callable[[str], Path], compared: Callable[..., None]
) -> None:
    """Their ``RemoteInferenceClient`` posts the ids and features that its ``sample`` posts for the same images."""
    remote = pytest.importorskip("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
    model = vision_model("qwen3_vl", small_tokenizer_folder)
    posted = []

    class Served(remote.RemoteInferenceClient):  # type: ignore[misc, name-defined]
        async def _post(self, url: str, json: dict[str, Any], headers: Any = None) -> dict[str, Any]:
            if url.endswith("/render"):
                return rendered(model, json)
            posted.append(json)
            reply = {"token_ids": [7, 8], "finish_reason": "stop"}
            return {"choices": [{**reply, "logprobs": {"content": [{"logprob": -0.5}] * 2}}]}

    client = Served(
        "http://nowhere", ["http://nowhere"], data_parallel_size=1, model_name="model", tokenizer=model.tokenizer
    )
    (sample,) = image_samples(model, [(2, 1)], unanswered=[])
    done = await SkyRLPolicy(client, version=3).complete(
        CompletionRequest(sample.token_column, SamplingParams(), images=sample.images)
    )
    assert done.tokens.tolist() == [7, 8]
    chunks: list[dict[str, Any]] = []
    ends = [0, *(span.stop for span in sample.images)]
    for before, span in zip(ends, sample.images, strict=False):
        data = span.image.url.partition(",")[2]
        chunks += [
            {"type": "encoded_text", "tokens": sample.tokens[before : span.start]},
            {"type": "image", "data": data, "format": "png"},
        ]
    chunks.append({"type": "encoded_text", "tokens": sample.tokens[sample.images[-1].stop :]})
    await client.sample({"json": {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 4}}})
    ours, theirs = posted
    assert (ours["token_ids"], ours["features"]) == (theirs["token_ids"], theirs["features"])
    compared("SkyRL 0.3.0", "a", "a request with images and that of RemoteInferenceClient.sample: ids, features", 0.0)


def test_their_sampling_parameters_are_ours() -> None:
    """An unknown one is refused."""
    given = {"max_generate_length": 64, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs": 1, "stop": None}
    assert sampling_of(given) == SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9)
    with pytest.raises(ConfigError, match=r"sampling_params: got \['beams'\]"):
        sampling_of({"beams": 4})


def batch_of(count: int) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": f"question {number // 2}"}] for number in range(count)],
        "env_classes": ["rollouts"] * count,
        "env_extras": [{"reward_spec": {"ground_truth": str(number // 2)}} for number in range(count)],
        "sampling_params": {"max_generate_length": 16, "temperature": 1.0},
        "trajectory_ids": ids(count),
        "batch_metadata": SimpleNamespace(global_step=5, training_phase="train"),
    }


def length_reward(sample: Any) -> float:
    return float(len(sample.label))


async def test_the_generator_plays_every_prompt_of_a_batch() -> None:
    """In the order of the prompts, with their labels, and the ids that the trainer gave."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    reply = tokenizer.encode("5<|im_end|>", add_special_tokens=False)
    episodes = Episodes(environment_cls=SingleTurnEnvironment, limits=Limits(), reward_fn=length_reward)
    batch = batch_of(4)
    output = await Generator(episodes, Client(reply), tokenizer).generate(batch)
    assert output["response_ids"] == [reply] * 4
    assert output["rewards"] == [1.0] * 4
    assert output["trajectory_ids"] == batch["trajectory_ids"]
    shown = [tokenizer.decode(prompt) for prompt in output["prompt_token_ids"]]
    assert [f"question {number // 2}" in text for number, text in enumerate(shown)] == [True] * 4


async def test_a_rollout_that_fails_ends_the_step_with_its_cause() -> None:
    """SkyRL has no row for it, and an invented one would be trained."""

    class Broken(SingleTurnEnvironment):
        async def start(self, prompt: Any) -> Any:
            raise RuntimeError("no such table")

    episodes = Episodes(environment_cls=Broken, limits=Limits(), attempts=1)
    generator = Generator(episodes, Client([1]), load_tokenizer(DEMO_MODEL))
    with pytest.raises(GenerateFailure, match="no such table"):
        await generator.generate(batch_of(1))
