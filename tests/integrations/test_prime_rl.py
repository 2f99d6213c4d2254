"""prime-rl 0.8: its own packing and its files of micro batches, written from our rows and read back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rollouts.dtypes import Endpoint, Message, Prompt, StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.integrations.prime_rl import MicroBatchFiles, to_training_samples, training_columns
from rollouts.recipe.files import build, load_recipe
from rollouts.renderer import Renderer
from rollouts.renderer.images import ImageProcessor
from rollouts.training import AsyncRolloutManager, Sample, Status, trajectory_to_samples
from rollouts.training.batch import group_advantages
from rollouts.trajectory import Trajectory
from tests.processors import CHATML, FAMILIES, build_processor, load_tokenizer_of, picture
from tests.trainer_samples import columns, completion, scored_groups, tiny_model, token_logprobs


def test_all_streams_are_as_long_as_the_row() -> None:
    """Tokens, mask, logprobs, the temperature of each completion, and the advantage on sampled tokens."""
    for sample in scored_groups(2, 3, temperature=0.7):
        tokens, mask, logprobs = columns(sample)
        row = training_columns(sample, 0.5, env_name="sums")
        assert (row["token_ids"], row["mask"], row["logprobs"]) == (tokens, mask, logprobs)
        assert row["temperatures"] == [0.7 if one else 1.0 for one in mask]
        assert row["advantages"] == [0.5 if one else 0.0 for one in mask]
        assert "rl_weights" not in row


def test_own_advantages_and_the_loss_multiplier_have_their_streams() -> None:
    """A weight for each token, and the sample's advantages in place of the group's."""
    (sample,) = scored_groups(1, 1)
    sample.loss_multiplier = 0.5
    sample.advantages = np.arange(len(sample), dtype=np.float32)
    row = training_columns(sample, 9.0, env_name="sums")
    assert row["rl_weights"] == [0.5] * len(sample)
    assert row["advantages"] == [float(place) if one else 0.0 for place, one in enumerate(row["mask"])]


@pytest.mark.parametrize(("field", "value"), [("status", Status.FAILED), ("rollout_log_probs", None)])
def test_what_prime_rl_cannot_carry_is_refused(field: str, value: Any) -> None:
    """By the name of the field."""
    (sample,) = scored_groups(1, 1)
    setattr(sample, field, value)
    with pytest.raises(ConfigError, match=rf"\.{field}: got"):
        training_columns(sample, 0.0, env_name="sums")


@pytest.mark.parametrize("name", ["all", ""])
def test_a_reserved_name_of_an_environment_is_refused(name: str) -> None:
    """prime-rl uses it for the sum over all."""
    (sample,) = scored_groups(1, 1)
    with pytest.raises(ConfigError, match="env_name"):
        training_columns(sample, 0.0, env_name=name)


def test_a_temperature_that_is_not_known_is_refused_unless_it_is_given() -> None:
    """prime-rl divides logits by it; runs of earlier versions have none."""
    (sample,) = scored_groups(1, 1)
    sample = attrs.evolve(sample, completions=[attrs.evolve(one, temperature=None) for one in sample.completions])
    with pytest.raises(ConfigError, match=r"completions\[0\].temperature: got None"):
        training_columns(sample, 0.0, env_name="sums")
    row = training_columns(sample, 0.0, env_name="sums", temperature=1.3)
    assert row["temperatures"] == [1.3 if one else 1.0 for one in row["mask"]]


# -- images ------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Vision:
    """A processor, and what our samples are rendered with."""

    processor: Any
    renderer: Renderer
    images: ImageProcessor


@pytest.fixture(scope="module")
def vision(small_tokenizer_folder: Callable[[str], Path]) -> Vision:
    """Qwen3-VL's processor with a small tokenizer."""
    pytest.importorskip("torch")
    family = FAMILIES["qwen3_vl"]
    tokenizer = load_tokenizer_of(family, str(small_tokenizer_folder("qwen3")))
    template = CHATML.replace("PLACEHOLDER", family.written)
    processor = build_processor(family, tokenizer)
    renderer = Renderer(tokenizer, chat_template=template, images=processor)
    assert renderer.images is not None
    return Vision(processor, renderer, renderer.images)


IMAGES = [picture(97, 61), picture(30, 150), picture(64, 64, seed=1)]
SHOWN = [[0, 1], [], [2], [0, 0, 2]]
"""The images of the rows of :func:`seen_groups` that a reply answers."""


def seen_groups(vision: Vision) -> list[Sample]:
    """A group of four: images in the prompt and in a result, one image twice, none; two end in an unanswered image."""
    rng, samples = random.Random(0), []
    for number, shown in enumerate(SHOWN):
        trajectory = Trajectory()
        cut = max(len(shown) - 1, 0)
        for turn, part in enumerate([shown[:cut], shown[cut:], *([[1]] if number % 2 else [])]):
            images = [IMAGES[place] for place in part]
            text = vision.renderer.opening([Message("user", (f"turn {turn} ", *images, " so?"))])
            trajectory.add_context(text, [], vision.images.spans(text, images))
            if turn < 2:
                reply = completion(trajectory, [rng.randrange(1, 500) for _ in range(3)], rng, "3")
                trajectory.add_reply(reply, Message("assistant", "reply"), temperature=0.7)
        trajectory.seal(StopReason.TASK_COMPLETED)
        prompt = Prompt("question", group_index=0, index=number)
        (sample,) = trajectory_to_samples([trajectory], prompt, vision.renderer.decode, vision.images.inputs)
        sample.reward, sample.rollout_id = number / 4, number
        samples.append(sample)
    return samples


def test_a_row_with_images_has_the_arrays_and_types_of_the_processor(vision: Vision) -> None:
    """Of the images that a reply answers; the processor itself gives the same for the text of the row."""
    for sample, shown in zip(seen_groups(vision), SHOWN, strict=True):
        row = training_columns(sample, 0.5, env_name="looks")
        if not shown:
            assert "mm_kwargs" not in row
            assert "mm_token_type_ids" not in row
            continue
        inputs = vision.processor.image_processor([IMAGES[place].to_pil() for place in shown], return_tensors="np")
        assert row["mm_kwargs"].keys() == inputs.keys()
        assert all(np.array_equal(row["mm_kwargs"][name], array) for name, array in inputs.items())
        assert row["mm_token_type_ids"] == list(vision.processor.create_mm_token_type_ids([row["token_ids"]])[0])
        assert 4 * sum(row["mm_token_type_ids"]) == len(row["mm_kwargs"]["pixel_values"])


def test_a_stored_sample_with_images_needs_a_processor(vision: Vision) -> None:
    """A sample without ``image_inputs`` is refused, never a row without its images."""
    sample = seen_groups(vision)[0]
    sample.image_inputs = None
    with pytest.raises(ConfigError, match=r"Sample\.image_inputs: got None"):
        training_columns(sample, 0.5, env_name="looks")


@pytest.mark.trainer
@pytest.mark.parametrize("ranks", [1, 2])
async def test_their_receiver_reads_images_back(
    tmp_path: Path, ranks: int, vision: Vision, compared: Callable[..., None]
) -> None:
    """Each micro batch has the arrays of the images whose ids it has, in order, and theirs for our rows are equal."""
    filesystem = pytest.importorskip("prime_rl.transports.rollouts.filesystem")
    trajectories = pytest.importorskip("prime_rl.orchestrator.trajectories")
    samples = seen_groups(vision)
    longest = max(len(columns(sample)[0]) for sample in samples)
    await MicroBatchFiles(tmp_path, ranks=ranks, seq_len=longest, env_name="looks", pad_to_multiple_of=8).send(samples)
    expected = {}
    for sample, made, shown in zip(samples, to_training_samples(samples, env_name="looks"), SHOWN, strict=True):
        items = [vision.images.inputs([IMAGES[place]]) for place in shown]
        assert made.mm_kwargs == trajectories._encode_mm_kwargs({"image": items})
        expected[tuple(columns(sample)[0])] = (made.mm_token_type_ids or [0] * len(made.token_ids), shown)
    read = {}
    for rank in range(ranks):
        for batch in filesystem.FileSystemMicroBatchReceiver(tmp_path, rank).receive():
            start, images = 0, []
            kinds = batch.mm_token_type_ids or [0] * len(batch.input_ids)  # a batch of text has none
            for length in batch.seq_lens:
                ids, types = (column[start : start + length] for column in (batch.input_ids, kinds))
                start += length
                found = next(row for row in expected if tuple(ids[: len(row)]) == row)
                read[found] = (types[: len(found)], expected[found][1])
                images += [IMAGES[place] for place in expected[found][1]]
            inputs = vision.images.inputs(images)
            for name, array in inputs.items():
                got = batch.mm_kwargs[name]
                assert np.array_equal(np.frombuffer(got.data, got.dtype).reshape(got.shape), array)
    assert read == expected
    compared("prime-rl 0.8.0", "a, b", f"images of {ranks} ranks: mm_kwargs, mm_token_type_ids", 0.0)


@pytest.mark.trainer
@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_their_receiver_reads_our_rows_back(
    tmp_path: Path, forks: bool, ranks: int, compared: Callable[..., None]
) -> None:
    """Two steps through prepare_batch, the sender and the receiver: every row once, advantages of group_advantages."""
    filesystem = pytest.importorskip("prime_rl.transports.rollouts.filesystem")
    pytest.importorskip("prime_rl.trainer.batch")
    files = MicroBatchFiles(tmp_path, ranks=ranks, seq_len=128, env_name="sums", pad_to_multiple_of=8)
    for step in range(2):
        samples = scored_groups(3 + step, forks=forks, temperature=0.7)
        assert files.step == step
        await files.send(samples)
        expected = sorted(
            (*columns(sample), float(advantage))
            for sample, advantage in zip(samples, group_advantages(samples), strict=True)
        )
        assert sorted(row for rank in range(ranks) for row in received(filesystem, tmp_path, rank, step)) == expected
    what = f"files of {ranks} ranks{', forks' if forks else ''}: tokens, mask, logprobs, advantages"
    compared("prime-rl 0.8.0", "a, b", what, 0.0, note="orchestrator replaced")


def received(
    filesystem: Any, folder: Path, rank: int, step: int, temperature: float = 0.7
) -> list[tuple[list[int], list[bool], list[float], float]]:
    """Tokens, mask, logprobs and advantage of the rows of a rank's file, un-padded; dummy batches train nothing."""
    receiver = filesystem.FileSystemMicroBatchReceiver(folder, rank, step)
    assert receiver.can_receive()
    rows = []
    for batch in receiver.receive():
        start = 0
        for length in batch.seq_lens:
            place = slice(start, start + length)
            start += length
            mask = batch.loss_mask[place]
            if not any(mask):
                continue
            stop = len(mask) - mask[::-1].index(True)  # padding is in the last segment, and every row ends sampled
            advantage = {a for a, one in zip(batch.advantages[place], mask, strict=True) if one}
            assert len(advantage) == 1
            assert {t for t, one in zip(batch.temperatures[place], mask, strict=True) if one} == {temperature}
            tokens, logprobs = batch.input_ids[place], batch.inference_logprobs[place]
            rows.append((tokens[:stop], mask[:stop], logprobs[:stop], advantage.pop()))
    return rows


@pytest.mark.trainer
@pytest.mark.timeout(600)  # it starts an engine
async def test_our_manager_takes_the_place_of_their_orchestrator(
    tmp_path: Path, engine_url: str, compared: Callable[..., None]
) -> None:
    """Two batches of the calculator recipe on the demo model, in the files of two ranks, read back."""
    filesystem = pytest.importorskip("prime_rl.transports.rollouts.filesystem")
    pytest.importorskip("prime_rl.trainer.batch")
    sizes = {"batch_size": "3", "n_samples_per_prompt": "4"}
    recipe = build(load_recipe("calculator"), Endpoint(model=str(DEMO_MODEL), base_url=engine_url), sizes)
    files = MicroBatchFiles(tmp_path, ranks=2, seq_len=4096, env_name="calculator")
    async with AsyncRolloutManager(recipe.config, recipe.data_buffer) as manager:
        for step in range(2):
            samples = await manager.generate_batch()
            await files.send(samples)
            expected = sorted(
                (*columns(sample), float(advantage))
                for sample, advantage in zip(samples, group_advantages(samples), strict=True)
            )
            rows = [row for rank in range(2) for row in received(filesystem, tmp_path, rank, step, 1.0)]
            assert sorted(rows) == expected
    compared("prime-rl 0.8.0", "a", "calculator recipe, 2 batches, 2 ranks", 0.0, note="orchestrator replaced")


@pytest.mark.trainer
@pytest.mark.filterwarnings("default")
async def test_one_step_of_their_loss_follows_the_advantages(tmp_path: Path, compared: Callable[..., None]) -> None:
    """compute_loss on the micro batches that the trainer reads, and a tiny model: good rollouts become likelier."""
    torch = pytest.importorskip("torch")
    filesystem = pytest.importorskip("prime_rl.transports.rollouts.filesystem")
    losses = pytest.importorskip("prime_rl.trainer.rl.loss")
    configs = pytest.importorskip("prime_rl.configs.trainer")
    await MicroBatchFiles(tmp_path, ranks=1, seq_len=128, env_name="sums").send(scored_groups())
    batches = filesystem.FileSystemMicroBatchReceiver(tmp_path, 0).receive()
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def columns_of(name: str, dtype: Any = torch.float32) -> list[Any]:
        return [part for one in batches for part in torch.tensor(getattr(one, name), dtype=dtype).split(one.seq_lens)]

    def logprobs() -> list[Any]:
        return [token_logprobs(model, tokens[None])[0] for tokens in columns_of("input_ids", torch.int64)]

    masks, advantages, before = columns_of("loss_mask", torch.bool), columns_of("advantages"), logprobs()
    sampled = [one.detach() for one in before]  # on-policy: the tiny model itself sampled
    trained = sum(int(mask.sum()) for mask in masks)
    loss_fn = losses.setup_rl_loss_fn(configs.DefaultLossConfig())
    streams = (None, advantages, masks, None, None, None)
    loss, _ = losses.compute_loss(before, sampled, *streams, loss_fn, trained, 1, 1)
    loss.backward()
    optimizer.step()
    gained = [
        ((a - b) * adv * mask).sum() for a, b, adv, mask in zip(logprobs(), before, advantages, masks, strict=True)
    ]
    assert sum(gained) > 0
    compared("prime-rl 0.8.0", "step", "one step of compute_loss follows the advantages", 0.0, note="tiny model")


@pytest.mark.trainer
async def test_a_row_that_prime_rl_would_cut_is_refused(tmp_path: Path) -> None:
    """It cuts at seq_len; nothing is written then."""
    pytest.importorskip("prime_rl.trainer.batch")
    files = MicroBatchFiles(tmp_path, ranks=1, seq_len=8, env_name="sums")
    with pytest.raises(ConfigError, match="expected at most seq_len=8"):
        await files.send(scored_groups(1))
    assert files.step == 0


@pytest.mark.trainer
def test_a_training_sample_survives_their_encoding() -> None:
    """msgpack and back, as the transport does it."""
    msgspec = pytest.importorskip("msgspec")
    types = pytest.importorskip("prime_rl.transports.rollouts.types")
    made = to_training_samples(scored_groups(1, 2), env_name="sums")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=list[types.TrainingSample]) == made
