"""Images of a run: each file once, records name them by hash, and a run that is killed, exported or read has them."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from rich.console import Console

from rollouts.agent.turn_log import Turn, message_from_dict
from rollouts.distributed.messages import received_sample, received_turn, sample_records, turn_record
from rollouts.dtypes import (
    Endpoint,
    Image,
    ImageSpan,
    Limits,
    Message,
    Prompt,
    SamplingParams,
    TokenColumn,
    packed_tokens,
)
from rollouts.engine import DEMO_MODEL
from rollouts.environments import SingleTurnEnvironment
from rollouts.environments.base import StepResult
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe
from rollouts.renderer import Renderer, renderer_for
from rollouts.runs.export import Kind, export_rows
from rollouts.runs.folder import read_rows
from rollouts.runs.images import ImageFolder, hashes_of_row
from rollouts.runs.journal import Journal
from rollouts.runs.reader import load_run
from rollouts.runs.record_bytes import read_framed
from rollouts.runs.recording import RECORDING, recorded
from rollouts.runs.replay import replay
from rollouts.runs.rescore import rescore
from rollouts.runs.resume import reopen
from rollouts.runs.run_history import RunHistory
from rollouts.runs.run_journal import RunJournal
from rollouts.runs.start import begin
from rollouts.runs.verify import verify_run
from rollouts.runs.writer import Format, RunWriter
from rollouts.testing.policy import ScriptedPolicy
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    RolloutConfig,
    Sample,
    continue_rollout,
    generate_rollout_batch,
)
from rollouts.training.evaluation import task_key
from rollouts.training.manager_state import ManagerState
from rollouts.training.metrics import Accounting
from rollouts.training.rows import trimmed
from rollouts.training.sample_laws import check_sample
from rollouts.trajectory import Trajectory
from rollouts.views.page.page import html_page
from rollouts.views.page.payload import build_payload
from rollouts.views.page.source import open_source
from rollouts.views.terminal.transcript import transcript
from tests.processors import picture

pytest.importorskip("torch")

PROMPTS, TURNS, SHOWN = 10, 3, 3


def image_of(prompt: int, number: int) -> Image:
    return picture(6 + prompt, 5 + number, prompt)


class Gallery(SingleTurnEnvironment):
    """Shows three more images after each of three replies, and has snapshots."""

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.prompt, self.step_number = prompt.label, 0
        return prompt.messages

    async def step(self, reply: Message) -> StepResult:
        if self.step_number == TURNS:
            return StepResult(done=True, reward=float(len(reply.text) % 2))
        first = 1 + SHOWN * self.step_number
        self.step_number += 1
        images = [image_of(self.prompt, number) for number in range(first, first + SHOWN)]
        return StepResult([Message("user", ("more: ", *images))])

    async def snapshot(self) -> list[int]:
        return [self.prompt, self.step_number]

    async def restore(self, prompt: Prompt, snapshot: list[int]) -> None:
        self.prompt, self.step_number = snapshot


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return renderer_for(DEMO_MODEL, images=True)


def buffer(prompts: int = PROMPTS) -> DataBuffer:
    rows = [Prompt([Message("user", ("Look ", image_of(number, 0)))], label=number) for number in range(prompts)]
    return DataBuffer(rows, seed=3)


def by_index(sample: Sample) -> float:
    assert sample.index is not None
    return float(sample.index % 2)


def config(renderer: Renderer, script: Callable[[TokenColumn], Any] | None = None) -> RolloutConfig:
    reply = renderer.encode("yes<|im_end|>").tolist()
    generate = partial(
        generate_rollout_batch,
        environment_cls=Gallery,
        endpoint=Endpoint(sampling=SamplingParams(max_new_tokens=8)),
        tokenizer=renderer,
        limits=Limits(max_turns=8),
        policy=ScriptedPolicy(script or (lambda tokens: reply)),
    )
    return RolloutConfig(
        generate_fn=generate, reward_fn=by_index, batch_size=2, n_samples_per_prompt=2, over_sampling_factor=1.0
    )


async def new_run(
    path: Path,
    settings: RolloutConfig,
    data: DataBuffer,
    batches: int,
    format: Format = "jsonl",
    *,
    record: bool = False,
) -> None:
    description = {"recipe": "test", "config": settings.describe()}
    writer, run_journal = RunWriter(path, description, format=format), begin(path, description, data)
    if record:
        tapes = Journal(path / RECORDING)
        bound: Any = settings.generate_fn
        generate = recorded(settings.generate_fn, tapes, Gallery, bound.keywords["policy"])
        settings = attrs.evolve(settings, generate_fn=generate)
    with run_journal.journal:
        manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
        await fill(manager, writer, batches)
    if record:
        tapes.close()


async def fill(manager: AsyncRolloutManager, writer: RunWriter, batches: int) -> None:
    async with manager:
        for _ in range(manager.batches, batches):
            samples = await manager.generate_batch()
            writer.write_batch(samples, manager.metrics, attrs.evolve(manager.accounting))
    writer.finish("finished", manager.accounting)


@pytest.fixture(scope="module")
def stored(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 prompts, 20 rollouts and 100 images, each of which is in two or more samples; not to be changed."""
    path = tmp_path_factory.mktemp("stored") / "run"
    anyio.run(partial(new_run, path, config(renderer), buffer(), PROMPTS // 2, record=True))
    return path


def check_images(sample: Sample) -> None:
    """A sample has the images of its prompt number, in order, at their placeholders."""
    assert [span.image for span in sample.images] == [image_of(sample.label, number) for number in range(10)]
    ids = [id for span in sample.images for id in sample.tokens[span.start : span.stop]]
    assert set(ids) == {500}
    assert len(ids) == sample.tokens.count(500) == 90


def test_a_run_of_100_images_has_each_once(stored: Path) -> None:
    """As a file that is named by its hash; no record contains the bytes of an image."""
    wanted = {image_of(prompt, number).sha256 for prompt in range(PROMPTS) for number in range(10)}
    files = sorted((stored / "images").iterdir())
    assert len(files) == 100
    assert {file.name for file in files} == {f"{sha256}.png" for sha256 in wanted}
    for file in stored.rglob("*"):
        if file.is_file() and file.suffix != ".png":
            content = file.read_bytes()
            assert b"data:image" not in content
            assert b"\x89PNG" not in content
    report = verify_run(stored)
    assert report.ok
    assert report.checked[4]["images"] == 100


def test_stored_samples_have_their_images(stored: Path, renderer: Renderer) -> None:
    """Read from the files and from the journal; samples of one image share it, and make their tensors of it."""
    samples = list(load_run(stored))
    assert len(samples) == 20
    for sample in samples:
        check_images(sample)
        assert sample.messages[0]["content"][1] == {
            "type": "image",
            "sha256": image_of(sample.label, 0).sha256,
            "width": 6 + sample.label,
            "height": 5,
        }
    first, second = samples[:2]
    assert first.images[0].image is second.images[0].image
    with pytest.raises(ConfigError, match=r"Sample.image_inputs: got None; expected ImageProcessor.inputs"):
        _ = first.multimodal_train_inputs
    assert renderer.images is not None
    first.image_inputs = renderer.images.inputs
    assert first.multimodal_train_inputs is not None
    assert first.multimodal_train_inputs["pixel_values"].shape == (10, 3, 48, 48)
    assert first.multimodal_inputs is not None
    assert [image.size for image in first.multimodal_inputs["images"]] == [
        (6 + first.label, 5 + number) for number in range(10)
    ]
    history = RunHistory.read(stored / "journal")
    assert [sample for number in sorted(history.settled) for sample in history.group_samples(number)] == samples


async def test_a_run_that_is_killed_inside_an_episode_goes_on_with_its_images(
    renderer: Renderer, tmp_path: Path
) -> None:
    """The folder as it is at the ninth reply: the resumed episodes have the tokens and images of an unbroken run."""
    reply = renderer.encode("yes<|im_end|>").tolist()
    calls: list[int] = []

    def killed(tokens: TokenColumn) -> list[int]:
        calls.append(len(tokens))
        if len(calls) == 9:
            shutil.copytree(tmp_path / "whole", tmp_path / "killed")
        return list(reply)

    await new_run(tmp_path / "whole", config(renderer, killed), buffer(4), 2)
    path, data = tmp_path / "killed", buffer(4)
    history = RunHistory.read(path / "journal")
    assert history.turns, "the run died inside an episode"
    assert any(turn.images for index in history.turns for turn in history.read_turns(index))
    settings = config(renderer)
    opened = reopen(path, {"recipe": "test", "config": settings.describe()}, data)
    with opened.run_journal.journal:
        manager = AsyncRolloutManager(settings, data, on_group=opened.writer.on_group, rollout_log=opened.run_journal)
        manager.restore(opened.state)
        await fill(manager, opened.writer, 2)
    assert verify_run(path).violations == []
    resumed = {sample.index: sample for sample in load_run(path)}
    assert {index for index, sample in resumed.items() if sample.metrics.get("turns_before_resume")} == {
        *history.turns
    } & {*resumed}
    for sample in load_run(tmp_path / "whole"):
        check_images(resumed[sample.index])
        assert np.array_equal(resumed[sample.index].tokens, sample.tokens)
        assert resumed[sample.index].messages == sample.messages
    assert ImageFolder(path).names() == ImageFolder(tmp_path / "whole").names()


class Ordered(Journal):
    """Records what its records name that has no file yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.named, self.early = 0, 0

    def append(self, kind: str, fields: Any, columns: Any = None) -> None:
        row = fields.get("sample") or fields.get("turn") or {}
        hashes = hashes_of_row(row)
        self.named += len(hashes)
        self.early += any(ImageFolder(self.path.parent).problem(sha256) for sha256 in hashes)
        super().append(kind, fields, columns)


async def test_an_image_is_on_disk_before_a_record_names_it(renderer: Renderer, tmp_path: Path) -> None:
    """Of turns and of samples: a run that dies between the two has a file that no record needs, never the reverse."""
    settings, data = config(renderer), buffer(2)
    description = {"recipe": "test", "config": settings.describe()}
    writer, journal = RunWriter(tmp_path / "run", description, format="jsonl"), Ordered(tmp_path / "run" / "journal")
    run_journal = RunJournal(journal)
    run_journal.began({"recipe": "test", "data": data.fingerprint})
    with journal:
        manager = AsyncRolloutManager(settings, data, on_group=writer.on_group, rollout_log=run_journal)
        await fill(manager, writer, 1)
    assert (journal.named > 40, journal.early) == (True, 0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_an_export_is_read_back_with_its_images(kind: Kind, stored: Path, tmp_path: Path) -> None:
    """The images are copied to a separate folder; the rows name them and their positions."""
    pytest.importorskip("pyarrow")
    out = tmp_path / ("out" if kind == "hf" else f"out.{kind}")
    (file,) = export_rows(stored, out, kind)
    if kind == "jsonl":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        rows = __import__("pyarrow.parquet").parquet.read_table(file).to_pylist()
    folder = ImageFolder(out if kind == "hf" else tmp_path)
    assert len(folder.names()) == 100
    assert len(rows) == 20
    for row, sample in zip(rows, load_run(stored), strict=True):
        spans = [(folder.load(each["sha256"]), each["start"], each["stop"]) for each in row["images"]]
        assert spans == [(span.image, span.start, span.stop) for span in sample.images]
        parts = json.loads(row["prompt_messages"][0]["content"])
        assert folder.load(parts[1]["sha256"]) == image_of(sample.label, 0)
    if kind == "hf":
        export_rows(stored, out, kind, overwrite=True)


async def test_a_run_in_parquet_has_its_images(renderer: Renderer, tmp_path: Path) -> None:
    """The positions are a column of the batches."""
    pytest.importorskip("pyarrow")
    await new_run(tmp_path / "run", config(renderer), buffer(2), 1, format="parquet")
    for sample in load_run(tmp_path / "run"):
        check_images(sample)
    assert verify_run(tmp_path / "run").ok


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), r"No such file or directory"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\0"), r"its bytes have another one"),
    ],
    ids=["missing", "changed"],
)
def test_a_damaged_image_is_named(damage: Any, message: str, stored: Path, tmp_path: Path) -> None:
    """By verify, and by whatever reads the sample; with the file and the hash."""
    shutil.copytree(stored, tmp_path / "run")
    sha256 = image_of(0, 0).sha256
    file = tmp_path / "run" / "images" / f"{sha256}.png"
    damage(file)
    violations = [str(violation) for violation in verify_run(tmp_path / "run").violations]
    assert any(f"expected the image with the SHA-256 {sha256}" in text for text in violations)
    with pytest.raises(ConfigError, match=message):
        ImageFolder(tmp_path / "run").read(sha256)


def test_a_moved_image_is_a_broken_law(stored: Path, tmp_path: Path) -> None:
    """Its ids must be one placeholder that was not sampled."""
    sample = load_run(stored)[0]
    row = next(iter(read_rows(stored))).data
    assert row["images"][0] == [sample.images[0].image.sha256, sample.images[0].start, sample.images[0].stop]
    assert check_sample(sample) == []
    spans = list(sample.images)
    start = sample.completions[0].start
    for moved, law in [
        (attrs.evolve(spans[0], start=spans[0].start - 1), "law 1"),
        (attrs.evolve(spans[0], start=start, stop=start + 1), "law 2"),
        (attrs.evolve(spans[0], stop=10**6), "law 1"),
    ]:
        changed = attrs.evolve(sample, images=[moved])
        assert [str(violation)[:5] for violation in check_sample(changed)] == [law]


def test_a_transcript_names_the_images(stored: Path, renderer: Renderer) -> None:
    """With their size and the start of their hash."""
    sample = load_run(stored)[0]
    image = image_of(sample.label, 0)
    for decode in (renderer.decode, None):
        console = Console(width=500, record=True, file=io.StringIO())
        console.print(transcript(sample, decode))
        text = console.export_text()
        assert f"Look {image.label}" in text
        assert image.label == f"[image {image.width}x{image.height} {image.sha256[:8]}]"
        assert "endoftext" not in text


def test_a_view_shows_each_image_once(stored: Path, renderer: Renderer) -> None:
    """As a URL in the data of the page, whose policy allows no other images."""
    payload = build_payload(open_source(stored, verify=False), renderer.decode)
    texts = [zlib.decompress(chunk.data) for chunk in payload.chunks]
    urls = [image_of(prompt, number).url.encode() for prompt in range(PROMPTS) for number in range(10)]
    assert [sum(text.count(url) for text in texts) for url in urls] == [1] * 100
    page = html_page([payload])
    assert "; img-src data:" in page


async def test_rescoring_and_replay_keep_the_images(stored: Path, renderer: Renderer, tmp_path: Path) -> None:
    """A new run has the files too; a replay compares tokens and images with the recording."""
    recipe = Recipe(
        name="test",
        config=config(renderer),
        data_buffer=buffer(),
        endpoint=Endpoint(),
        tokenizer=renderer,
        environment_cls=Gallery,
    )
    await rescore(stored, recipe, tmp_path / "again", format="jsonl")
    for sample in load_run(tmp_path / "again"):
        check_images(sample)
    assert len(ImageFolder(tmp_path / "again").names()) == 100
    assert (await replay(stored, attrs.evolve(recipe, data_buffer=buffer()))).samples == 20


def test_a_hash_is_no_path(tmp_path: Path) -> None:
    """A record cannot name another file."""
    with pytest.raises(ConfigError, match=r"image: got '../secret'; expected a SHA-256"):
        ImageFolder(tmp_path).load("../secret")


# -- samples in memory and between processes --------------------------------------------------------------------------


def test_a_worker_sends_the_images_that_its_prompt_has_not(stored: Path) -> None:
    """A sample and a turn arrive equal, with their images."""
    sample = load_run(stored)[0]
    prompt = Prompt(sample.prompt, label=sample.label, metadata=sample.metadata)
    ((fields, columns),) = read_framed(sample_records(1, prompt, [sample]))
    assert columns is not None
    assert len(fields["sample"]["image_data"]) == 9
    received = received_sample(fields["sample"], columns, prompt)
    assert received == sample
    assert received.compact is not None, "its records take a few bytes, as in one process"
    check_images(received)
    shown = Message("user", ("a", image_of(0, 0)))
    trajectory = Trajectory()
    trajectory.add_context(packed_tokens([1, 500, 500]), [shown], [ImageSpan(image_of(0, 0), 1, 3)])
    turn = Turn.since(trajectory, 0, 0, 0, 0)
    ((fields, columns),) = read_framed(turn_record(1, turn))
    assert columns is not None
    again = received_turn(fields["of"], columns)
    assert (again.images, again.fields["images"]) == (turn.images, turn.fields["images"])
    assert [message_from_dict(each, again.images.__getitem__) for each in again.fields["messages"]] == [shown]


def test_a_sample_without_its_images_is_refused_by_name(stored: Path) -> None:
    """Its dict names them; what reads it must load them."""
    sample = load_run(stored)[0]
    fields = json.loads(json.dumps(sample.to_dict()))
    with pytest.raises(ConfigError, match=r"from_dict\(load_image\): got None; expected load_image, which returns"):
        Sample.from_dict(fields)
    assert Sample.from_dict(fields, sample.named_images.__getitem__) == sample
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_a_row_has_the_images_of_its_tokens(stored: Path) -> None:
    """Tokens that are cut from the end take their images with them."""
    sample = load_run(stored)[0]
    cut = attrs.evolve(
        sample,
        loss_mask=[int(at < sample.completions[1].stop and one) for at, one in enumerate(sample.loss_mask)],
        versions=[],
    )
    assert [span.image for span in trimmed(cut).images] == [image_of(sample.label, number) for number in range(4)]


def test_a_saved_state_has_the_images(stored: Path) -> None:
    """As JSON, without a folder."""
    sample, data = load_run(stored)[0], buffer()
    state = ManagerState(accounting=Accounting(), batches=0, ready={0: [sample]}, finished={})
    loaded = ManagerState.load(json.loads(json.dumps(state.to_dict(data))), data)
    assert loaded.ready == {0: [sample]}
    check_images(loaded.ready[0][0])


def test_data_with_images_are_known_by_their_hashes() -> None:
    """The checksum of a data buffer and the key of a task do not depend on the form in which an image was given."""
    image = image_of(0, 0)
    part = {"type": "image_url", "image_url": {"url": image.url}}
    rows = [[Message("user", ("a", image))], [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]]
    one, other = (DataBuffer([Prompt(row)]) for row in rows)
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != DataBuffer([Prompt([Message("user", ("a", image_of(1, 0)))])]).fingerprint
    assert task_key(rows[0], 1) == task_key(rows[1], 1)


async def test_a_stored_rollout_continues_with_its_images(stored: Path, renderer: Renderer) -> None:
    """The request of the continued rollout has the images of the past, and the new one."""
    sample = load_run(stored)[0]
    reply = renderer.encode("yes<|im_end|>").tolist()
    policy = ScriptedPolicy([reply])
    new = [Message("user", ("And ", image_of(1, 1)))]
    (continued,) = await continue_rollout(sample, new, endpoint=Endpoint(), tokenizer=renderer, policy=policy)
    shown = [*(image_of(sample.label, number) for number in range(10)), image_of(1, 1)]
    assert [span.image for span in policy.images[0]] == shown
    assert [span.image for span in continued.images] == shown
    assert check_sample(continued) == []


def test_overwriting_a_run_removes_its_images_and_no_other_file(stored: Path, tmp_path: Path) -> None:
    """A folder with a folder of this name is not a run."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "holiday.png").write_bytes(b"mine")
    RunWriter(tmp_path).finish("finished")
    ImageFolder(tmp_path).write({image_of(0, 0).sha256: image_of(0, 0)})
    RunWriter(tmp_path, overwrite=True).finish("finished")
    assert [file.name for file in (tmp_path / "images").iterdir()] == ["holiday.png"]
    with pytest.raises(ConfigError, match="a place outside the files of the run"):
        export_rows(stored, stored / "images" / "out.jsonl", "jsonl")
