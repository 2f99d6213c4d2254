"""The data source: groups in flight are in the checkpoint, and come out first after a restart."""

from __future__ import annotations

import datetime
import decimal
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import PIL.Image
import pytest

from rollouts.errors import ConfigError
from rollouts.integrations.slime import CheckpointedDataSource, close_rollouts, generate_rollout_batch
from rollouts.integrations.slime.convert import leaves
from rollouts.integrations.slime.saved_values import check_plain
from rollouts.training import Prompt, Sample
from tests.integrations.slime.launches import Launch, Source, made_sample


class Cursor(Source):
    """slime's read-only data source: it saves only its cursor."""

    saved: dict[int | None, int] = {}  # noqa: RUF012 - one process, as one disk

    def __init__(self, args: Any) -> None:
        super().__init__(args.n_samples_per_prompt)

    def save(self, rollout_id: int) -> None:
        self.saved[rollout_id] = len(self.given)

    def load(self, rollout_id: int | None = None) -> None:
        self.given = list(range(self.saved[rollout_id]))


def with_source(launch: Launch, folder: Path, **overrides: Any) -> Namespace:
    path = f"{__name__}.Cursor"
    return launch.args(rollouts_inner_data_source_path=path, save=str(folder), load=str(folder), **overrides)


def test_no_group_is_lost_over_a_checkpoint(tmp_path: Path) -> None:
    """Batches before and after it, together with what is still carried, are every group that was taken; none twice."""
    launch = Launch(batch_size=3, n=2, over_sampling_factor=2.0)
    args = with_source(launch, tmp_path)
    source = CheckpointedDataSource(args)
    used = [
        group[0].group_index
        for rollout_id in range(3)
        for group in generate_rollout_batch(args, rollout_id, source).samples
    ]
    source.save(2)
    taken = len(source.inner.given)
    assert taken > len(used)
    close_rollouts()  # the process ends without a word to the data source that is loaded below

    again = CheckpointedDataSource(args)
    again.load(2)
    assert {group[0].group_index for group in again.buffer} == set(range(taken)) - set(used)
    after = [
        group[0].group_index
        for rollout_id in range(3, 6)
        for group in generate_rollout_batch(args, rollout_id, again).samples
    ]
    close_rollouts()
    carried = {group[0].group_index for group in again.buffer}
    assert len({*used, *after}) == 18
    assert carried.isdisjoint({*used, *after})
    assert set(range(taken)) <= {*used, *after, *carried}


def test_accepted_groups_are_saved_with_their_rollouts(tmp_path: Path) -> None:
    """Ready groups are restored with tokens and rewards."""
    launch = Launch(batch_size=1, n=2, over_sampling_factor=4.0)
    args = with_source(launch, tmp_path)
    source = CheckpointedDataSource(args)
    generate_rollout_batch(args, 0, source)
    generate_rollout_batch(args, 1, source)
    close_rollouts()
    source.save(1)
    again = CheckpointedDataSource(args)
    again.load(1)
    here, there = ([(s.index, s.tokens, s.reward) for s in leaves(it.buffer)] for it in (source, again))
    assert sorted(here) == sorted(there)


def penalises(args: Any, group: list[Any], **_: Any) -> bool:
    """A dynamic filter with a penalty, as one for long responses."""
    for sample in group:
        sample.reward -= 0.25
    return True


def test_a_filter_changes_a_reward_once_over_a_checkpoint(tmp_path: Path) -> None:
    """Accepted groups of a checkpoint meet the filter again, with the rewards that they had before it."""
    launch = Launch(batch_size=1, n=2, over_sampling_factor=4.0)
    args = with_source(launch, tmp_path, dynamic_sampling_filter_path=f"{__name__}.penalises")
    source = CheckpointedDataSource(args)
    before = list(leaves([generate_rollout_batch(args, number, source).samples for number in range(2)]))
    source.save(1)
    close_rollouts()
    again = CheckpointedDataSource(args)
    again.load(1)
    assert {sample.reward for sample in leaves(again.buffer)} >= {0.0, 1.0}
    after = list(leaves([generate_rollout_batch(args, number, again).samples for number in range(2, 5)]))
    assert {sample.reward for sample in (*before, *after)} == {-0.25, 0.75}


SAVING: list[CheckpointedDataSource] = []


def saves(args: Any, group: list[Any], **_: Any) -> bool:
    """A filter that changes the rewards, during which the trainer saves once."""
    penalises(args, group)
    while SAVING:
        SAVING.pop().save(1)
    return True


def test_a_group_that_is_being_filtered_is_saved_with_its_rewards_before(tmp_path: Path) -> None:
    """The filter meets it again after a restart; what it changed here is not lost either."""
    launch = Launch(batch_size=1, n=2, over_sampling_factor=1.0)
    args = with_source(launch, tmp_path, dynamic_sampling_filter_path=f"{__name__}.saves")
    source = CheckpointedDataSource(args)
    SAVING.append(source)
    batch = generate_rollout_batch(args, 0, source).samples
    close_rollouts()
    again = CheckpointedDataSource(args)
    again.load(1)
    assert {sample.reward for sample in leaves(batch)} == {-0.25, 0.75}
    assert {sample.reward for sample in leaves(again.buffer)} == {0.0, 1.0}


def test_finished_rollouts_of_groups_under_way_are_saved(tmp_path: Path) -> None:
    """A group with a finished rollout and a hanging rollout: the restored group plays only the unfinished rollout."""
    hung, scored, patient = set(), set(), {0}

    async def reward(sample: Sample) -> float:
        scored.add(sample.index)
        return float(sample.index or 0)

    async def play(prompt: Prompt) -> list[Any]:
        assert prompt.index is not None
        if prompt.group_index != 0 and prompt.index % 2 and prompt.index not in hung:
            hung.add(prompt.index)
            await anyio.sleep_forever()
        if not patient and (prompt.group_index or 0) >= 2:  # beyond what was loaded: not to be sooner
            await anyio.sleep_forever()
        while prompt.group_index in patient and not (len(hung) == 2 and scored >= {2, 4}):
            await anyio.lowlevel.checkpoint()
        for _ in range(100 if prompt.group_index in patient else 0):  # until the others have finished
            await anyio.lowlevel.checkpoint()
        return [made_sample(prompt)]

    launch = Launch(batch_size=1, n=2, over_sampling_factor=3.0, play=play, reward=reward)
    args = with_source(launch, tmp_path)
    source = CheckpointedDataSource(args)
    (first,) = generate_rollout_batch(args, 0, source).samples
    assert first[0].group_index == 0
    source.save(0)
    close_rollouts()

    again = CheckpointedDataSource(args)
    again.load(0)
    tokens = {group[0].group_index: [len(sample.tokens) for sample in group] for group in again.buffer}
    assert {number: [bool(length) for length in lengths] for number, lengths in tokens.items()} == {
        1: [True, False],
        2: [True, False],
    }
    launch.played.clear()
    hung.update(range(100))  # from here on nothing that was loaded hangs or waits
    patient.clear()
    groups = [generate_rollout_batch(args, number, again).samples[0][0].group_index for number in (1, 2)]
    assert sorted(groups) == [1, 2]
    assert [launch.played[number] for number in (0, 1)] == [1, 1]


def test_a_rollout_function_that_is_not_ours_leaves_nothing_in_flight(tmp_path: Path) -> None:
    """slime's own never says which groups it used: only what it returned is in the checkpoint, and no group twice."""
    pytest.importorskip("torch")
    args = with_source(Launch(batch_size=3, n=2), tmp_path)
    source = CheckpointedDataSource(args)
    groups = source.get_samples(5)
    source.add_samples(groups[4:])
    source.save(0)
    again = CheckpointedDataSource(args)
    again.load(0)
    assert [group[0].group_index for group in again.buffer] == [4]
    assert [group[0].group_index for group in again.get_samples(2)] == [4, 5]


def test_the_buffer_filter_chooses(tmp_path: Path) -> None:
    """``--buffer-filter-path`` applies to the waiting groups."""
    launch = Launch(n=2)
    path = "rollouts.integrations.slime.filters.pop_most_advanced"
    source = CheckpointedDataSource(with_source(launch, tmp_path, buffer_filter_path=path))
    groups = source.get_samples(3)
    groups[1][0].response_length = 9
    source.add_samples(groups)
    assert source.get_samples(1) == [groups[1]]
    assert [group[0].group_index for group in source.get_samples(3)] == [0, 2, 3]


def test_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    """As slime refuses them."""
    launch = Launch(n=2)
    source = CheckpointedDataSource(with_source(launch, tmp_path))
    with pytest.raises(ConfigError, match="groups of 2 samples"):
        source.add_samples([source.get_samples(1)[0][:1]])


def test_the_rest_is_the_inner_sources(tmp_path: Path) -> None:
    """Its length and its other attributes."""
    source = CheckpointedDataSource(with_source(Launch(n=2), tmp_path))
    assert len(source) == 1000
    assert source.n_samples_per_prompt == 2


class Harmful:
    """Unpickling it would run code."""

    def __reduce__(self) -> Any:
        return (open, ("/dev/null",))


def test_28_a_checkpoint_that_contains_code_is_refused(tmp_path: Path) -> None:
    """Loading names the file and the object, and runs nothing."""
    torch = pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.inner.save(0)
    file = tmp_path / "rollout" / "rollouts_buffer_0.pt"
    file.parent.mkdir()
    torch.save({"groups": [[Harmful()]]}, file)
    with pytest.raises(ConfigError, match=r"rollouts_buffer_0\.pt: got .*open.*; expected .*plain data only"):
        source.load(0)


class WithSandboxes(Cursor):
    """A data set whose rows have an object in their metadata."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = super().get_samples(num_samples)
        groups[0][1].metadata["task"] = {"files": [1, Harmful()]}
        return groups


def test_a_value_that_no_checkpoint_can_have_is_refused_when_it_is_taken(tmp_path: Path) -> None:
    """With the sample, its field and the value: not at the first checkpoint, hours later."""
    args = with_source(Launch(), tmp_path)
    args.rollouts_inner_data_source_path = f"{__name__}.WithSandboxes"
    named = r"slime sample 1\.metadata\['task'\]\['files'\]\[1\]: got .*Harmful.*; expected .*plain data only"
    with pytest.raises(ConfigError, match=named):
        CheckpointedDataSource(args).get_samples(1)


def test_an_attribute_that_is_not_plain_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A function's attribute on a sample never ends training: the warning names it, and all else is saved."""
    pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.add_samples(source.get_samples(1))
    source.buffer[0][0].env = Harmful()
    source.buffer[0][0].calls = 3
    source.buffer[0][1].metadata |= {"seen": Harmful(), "step": {"at": 1, "by": [Harmful()]}}
    source.save(1)
    for named in (
        "slime sample 0.env (Harmful)",
        "sample 1.metadata['seen'] (H",
        "sample 1.metadata['step']['by'][0] (H",
    ):
        assert named in caplog.text
    again = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    again.load(1)
    first, second = again.get_samples(1)[0]
    assert (first.calls, hasattr(first, "env")) == (3, False)
    assert second.metadata == {"row": 0, "step": {"at": 1}}


def test_a_rollout_whose_column_cannot_be_saved_is_played_again(tmp_path: Path) -> None:
    """It is never restored without that column."""
    pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.add_samples(source.get_samples(1))
    for sample in source.buffer[0]:
        sample.tokens, sample.response, sample.response_length = [1, 2], "a", 1
        sample.reward, sample.status = 1.0, type(sample).Status.COMPLETED
    source.buffer[0][1].multimodal_train_inputs = {"pixels": Harmful()}
    source.save(1)
    source.load(1)
    kept, again = source.buffer[0]
    assert (kept.tokens, kept.reward) == ([1, 2], 1.0)
    assert again == type(again)(group_index=0, index=1, prompt="prompt 0", label="0", metadata={"row": 0})


def test_the_values_of_parquet_columns_stay_in_a_checkpoint(tmp_path: Path) -> None:
    """Times and decimals are data."""
    pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.add_samples(source.get_samples(1))
    noon = datetime.datetime(2026, 8, 21, 12, tzinfo=datetime.UTC)
    values = {"at": noon, "day": noon.date(), "took": datetime.timedelta(1), "cost": decimal.Decimal("1.5"), "c": 1j}
    source.buffer[0][0].metadata = values | {"clock": noon.time(), "counts": Counter("aab")}
    source.save(1)
    source.load(1)
    assert source.buffer[0][0].metadata == values | {"clock": noon.time(), "counts": Counter("aab")}


def test_28_arrays_and_tensors_stay_in_a_checkpoint(tmp_path: Path) -> None:
    """They are data, with their types."""
    torch = pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.buffer = source.inner.get_samples(1)
    held = {"array": np.arange(3, dtype=np.int16), "scalar": np.float32(0.5), "tensor": torch.ones(2), "set": {1, 2}}
    source.buffer[0][0].metadata = held
    source.save(0)
    source.load(0)
    loaded = source.buffer[0][0].metadata
    assert loaded["array"].dtype == np.int16
    assert loaded["array"].tolist() == [0, 1, 2]
    assert (loaded["scalar"], loaded["tensor"].tolist(), loaded["set"]) == (0.5, [1.0, 1.0], {1, 2})


@pytest.mark.parametrize("value", [np.zeros(0), np.zeros((0, 3), "i4"), b"", {"empty": [b""]}, 1j, 2**2000, "\ud800"])
def test_what_a_data_set_may_give_is_read_back(tmp_path: Path, value: Any) -> None:
    """Empty arrays and bytes, large integers: otherwise the whole checkpoint could not be loaded."""
    pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.buffer = source.get_samples(1)
    source.buffer[0][0].metadata["value"] = value
    check_plain(source.buffer[0][0])
    source.save(1)
    source.load(1)
    assert np.array_equal(source.buffer[0][0].metadata["value"], value)


def others() -> list[Any]:
    records_of_numpy = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    masked = np.ma.masked_array([1, 2], mask=[0, 1])
    return [records_of_numpy, np.asarray(records_of_numpy), records_of_numpy[0], masked, 2**3000, [-(2**3000)]]


@pytest.mark.parametrize("value", others(), ids=lambda value: type(value).__name__)
def test_what_could_not_be_read_back_is_left_out(tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Subclasses of arrays, and integers of more than 255 bytes: refused when taken, and in no file."""
    pytest.importorskip("torch")
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.buffer = source.get_samples(1)
    source.buffer[0][0].found = value
    with pytest.raises(ConfigError, match=r"found.*a checkpoint cannot have this value"):
        check_plain(source.buffer[0][0])
    source.save(1)
    source.load(1)
    assert not hasattr(source.buffer[0][0], "found")
    assert "found" in caplog.text


def test_images_stay_in_a_checkpoint(tmp_path: Path) -> None:
    """The pixels of a sample's images, each in the file once; other values of the field stay as they are."""
    pytest.importorskip("torch")
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    source = CheckpointedDataSource(with_source(Launch(batch_size=3, n=2), tmp_path))
    source.buffer = source.get_samples(1)
    for sample in source.buffer[0]:
        sample.multimodal_inputs = {"images": [PIL.Image.fromarray(noise.copy())], "videos": None}
    source.save(1)
    (file,) = (tmp_path / "rollout").glob("*buffer_1.pt")
    assert noise.size < file.stat().st_size < 1.7 * noise.size
    source.load(1)
    for sample in source.get_samples(1)[0]:
        assert np.array_equal(np.asarray(sample.multimodal_inputs["images"][0]), noise)
        assert sample.multimodal_inputs["videos"] is None


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A process that is killed while it saves leaves the last file complete: no byte of that file is overwritten."""
    source = CheckpointedDataSource(with_source(Launch(), tmp_path))
    source.save(0)
    path = tmp_path / "rollout" / "rollouts_buffer_0.pt"
    with path.open("rb") as earlier:
        before = path.read_bytes()
        source.add_samples(source.get_samples(1))
        source.save(0)
        assert earlier.read() == before != path.read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
