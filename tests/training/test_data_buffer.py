"""The data buffer: each prompt once an epoch, returned prompts first, and exact restore of a saved state."""

from __future__ import annotations

import fractions
import io
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.dtypes import Endpoint, Image, Message
from rollouts.environments import SingleTurnEnvironment
from rollouts.errors import ConfigError, DataExhausted
from rollouts.recipe import agent_recipe
from rollouts.training import BufferState, DataBuffer, Prompt


def texts(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def taken(buffer: DataBuffer, count: int) -> list[tuple[int | None, Any]]:
    return [(prompt.group_index, prompt.prompt) for prompt in buffer.get_prompts(count)]


def through_json(state: BufferState) -> BufferState:
    return BufferState.from_dict(json.loads(json.dumps(state.to_dict())))


class DataFrame:
    """Like a DataFrame of pandas: iterating it yields the names of its columns."""

    columns = ("prompt", "label")

    def to_dict(self, orient: str = "dict") -> Any:
        return [{"prompt": "a", "label": "b"}]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class PolarsFrame(DataFrame):
    """Like a DataFrame of polars."""

    def to_dicts(self) -> Any:
        return self.to_dict()


class LazyFrame:
    """Like a LazyFrame of polars."""

    columns = ("prompt", "label")

    def collect(self) -> PolarsFrame:
        return PolarsFrame()


class Table:
    """Like a table of pyarrow."""

    column_names = ("prompt", "label")
    columns = (["a"], ["b"])

    def to_pylist(self) -> Any:
        return [{"prompt": "a", "label": "b"}]

    def __iter__(self) -> Iterator[list[str]]:
        return iter([["a"], ["b"]])


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 7),
    seed=st.one_of(st.none(), st.integers(0, 99)),
    steps=st.lists(st.tuples(st.sampled_from(["take", "back", "settle"]), st.integers(0, 9)), max_size=25),
    ahead=st.integers(1, 20),
)
def test_a_loaded_buffer_continues_exactly(size: int, seed: int | None, steps: list[Any], ahead: int) -> None:
    """At any point, through JSON: the same prompts with the same indices; prompts that are out count as put back."""
    buffer = DataBuffer(texts(size), seed=seed)
    out: list[Prompt] = []
    for what, amount in steps:
        if what == "take":
            out += buffer.get_prompts(amount)
        else:
            some, out = out[:amount], out[amount:]
            for prompt in some if what == "settle" else ():
                buffer.mark_done(prompt)
            buffer.put_back(some if what == "back" else ())
    state = buffer.save_state()
    again = DataBuffer(texts(size), seed=seed)
    again.load_state(through_json(state))
    assert again.save_state() == state
    buffer.put_back(out)
    assert buffer.save_state() == state
    assert taken(again, ahead) == taken(buffer, ahead)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 6), epochs=st.integers(1, 3), seed=st.integers(0, 9), order=st.integers(0, 2**32))
def test_each_prompt_comes_out_once_an_epoch(size: int, epochs: int, seed: int, order: int) -> None:
    """However often prompts are put back, no prompt is lost or doubled, and no index is used for two prompts."""
    rng = random.Random(order)
    buffer = DataBuffer(texts(size), seed=seed, epochs=epochs)
    prompts_by_index: dict[int | None, Any] = {}
    settled: list[Any] = []
    while True:
        try:
            (prompt,) = buffer.get_prompts(1)
        except DataExhausted:
            break
        assert prompts_by_index.setdefault(prompt.group_index, prompt.prompt) == prompt.prompt
        if rng.random() < 0.4:
            buffer.put_back([prompt])
        else:
            buffer.mark_done(prompt)
            settled.append(prompt.prompt)
    assert Counter(settled) == dict.fromkeys(texts(size), epochs)
    assert sorted(index for index in prompts_by_index if index is not None) == list(range(size * epochs))


def test_each_epoch_is_shuffled_and_depends_on_the_seed_only() -> None:
    """The seed and the number of the epoch fix the order."""

    def epoch(buffer: DataBuffer) -> list[Any]:
        return [prompt.prompt for prompt in buffer.get_prompts(20)]

    one, two, other = DataBuffer(texts(20), seed=1), DataBuffer(texts(20), seed=1), DataBuffer(texts(20), seed=2)
    first, second = epoch(one), epoch(one)
    assert [first, second] == [epoch(two), epoch(two)]
    assert first != second
    assert first != epoch(other)
    assert sorted(first) == sorted(second) == sorted(texts(20))
    assert epoch(DataBuffer(texts(20))) == texts(20), "without a seed in the order of the data"


def test_leftovers_come_first_in_the_order_of_their_groups() -> None:
    """With the index they had."""
    buffer = DataBuffer(texts(9))
    prompts = buffer.get_prompts(4)
    buffer.put_back([prompts[3], prompts[1]])
    assert taken(buffer, 3) == [(1, "p1"), (3, "p3"), (4, "p4")]


@pytest.mark.parametrize("wrong", ["again", "twice", "settled", "unknown", "unnumbered"])
def test_only_what_is_out_comes_back(wrong: str) -> None:
    """A refusal changes nothing, also when sound prompts stand before the wrong one."""
    buffer = DataBuffer(texts(9))
    first, second, third = buffer.get_prompts(3)
    buffer.mark_done(third)
    bad = {"settled": third, "unknown": Prompt("x", group_index=77), "unnumbered": Prompt("p0"), "twice": second}
    if wrong == "again":
        buffer.put_back([first])
    before = buffer.save_state(), repr(buffer)
    with pytest.raises(ConfigError, match=r"put_back\(prompts\): got Prompt.*expected prompts taken from"):
        buffer.put_back([second, bad.get(wrong, first)])
    assert (buffer.save_state(), repr(buffer)) == before


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 5),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    count=st.integers(0, 16),
    unsettled=st.sets(st.integers(0, 15)),
)
def test_a_buffer_goes_on_after_the_groups_that_a_run_has_used(
    size: int, seed: int | None, count: int, unsettled: set[int]
) -> None:
    """Like a buffer that handed them out, and got back the unsettled prompts."""
    buffer = DataBuffer(texts(size), seed=seed)
    for prompt in buffer.get_prompts(count):
        if prompt.group_index not in unsettled:
            buffer.mark_done(prompt)
    other = DataBuffer(texts(size), seed=seed)
    other.get_prompts(size + 1)
    other.resume_after(count, {number for number in unsettled if number < count})
    assert other.save_state() == buffer.save_state()
    buffer.load_state(buffer.save_state())
    assert taken(other, 2 * size) == taken(buffer, 2 * size)


def test_a_prompt_that_was_put_back_is_taken_by_its_group_index() -> None:
    """It is out then: it may be put back, and does not come out a second time."""
    buffer = DataBuffer(texts(5))
    prompts = buffer.get_prompts(4)
    buffer.put_back(prompts[1:])
    assert buffer.take_by_index(2) == prompts[2]
    for number in (2, 0, 9):
        with pytest.raises(ConfigError, match=rf"take_by_index\(group_index\): got {number}; expected the index of"):
            buffer.take_by_index(number)
    assert taken(buffer, 2) == [(1, "p1"), (3, "p3")]
    buffer.put_back([prompts[2]])
    assert taken(buffer, 2) == [(2, "p2"), (4, "p4")]


def test_fewer_prompts_than_wanted_takes_none() -> None:
    """All or nothing, and the message says what is left."""
    buffer = DataBuffer(texts(3), epochs=1)
    with pytest.raises(DataExhausted, match="4 prompts wanted, 3 left in <DataBuffer epoch 0 of 1, 0/3"):
        buffer.get_prompts(4)
    assert len(buffer.get_prompts(3)) == 3
    assert buffer.get_prompts(0) == []


def test_fewer_epochs_than_a_state_has_leave_what_was_put_back() -> None:
    """They begin no new prompt, and hide none that is unfinished."""
    buffer, shorter = DataBuffer(texts(3), epochs=5), DataBuffer(texts(3), epochs=1)
    buffer.get_prompts(7)
    shorter.load_state(buffer.save_state())
    with pytest.raises(DataExhausted, match="8 prompts wanted, 7 left in <DataBuffer epoch 2 of 1, 1/3, 7 put back"):
        shorter.get_prompts(8)
    assert [number for number, _ in taken(shorter, 7)] == list(range(7))
    with pytest.raises(DataExhausted, match="1 prompts wanted, 0 left"):
        shorter.get_prompts(1)


class Opaque:
    """Its ``repr`` is another in each process, as that of most objects."""


def tasks(*metadata: Any, text: str = "") -> DataBuffer:
    return DataBuffer([{"prompt": text, "metadata": {"task": entry}} for entry in metadata], seed=1)


@pytest.mark.parametrize("text", ["", "x"])
def test_a_state_fits_its_metadata_only(text: str) -> None:
    """Of tasks that are only metadata, and of prompts with text; a state of an older version has no checksum of it.

    A value that may be written differently in each process refuses nothing.
    """
    state = through_json(tasks(1, {"a": 1, "b": (2, 2**70)}, text=text).save_state())
    tasks(1, {"b": [2, 2**70], "a": 1}, text=text).load_state(state)
    other = tasks(1, {"a": 1, "b": (2, 3)}, text=text)
    name = "metadata" if text else "fingerprint"
    with pytest.raises(ConfigError, match=rf"BufferState\.{name}: got \d+; expected \d+, that of this data"):
        other.load_state(state)
    old = {name: value for name, value in state.to_dict().items() if name != "metadata"}
    (other if text else tasks(1, {"a": 1, "b": (2, 2**70)})).load_state(BufferState.from_dict(old))
    circle: list[Any] = []
    circle.append(circle)
    for one, another in ((Opaque(), Opaque()), ({"a", "b"}, {"c"}), ({1: 0, "a": Opaque()}, {1: 0, "a": Opaque()})):
        tasks(one, circle, text=text).load_state(tasks(another, circle, text=text).save_state())


def test_ordinary_labels_keep_their_fingerprint() -> None:
    """The runs that are stored with it stay resumable."""
    labels: list[Any] = ["4", 4, None, {"x": [1, (2,)], "y": None}, 0.5]
    rows = [{"prompt": text, "label": label} for text, label in zip("abcde", labels, strict=True)]
    metadata_only = {"prompt": "", "metadata": {"t": 1}, "label": fractions.Fraction(1, 3)}
    assert DataBuffer([*rows, metadata_only], seed=3).fingerprint == 4_248_830_738


def test_every_process_has_the_same_fingerprint() -> None:
    """Also of labels that are sets, whose order differs, and of objects, whose address does."""
    code = (
        "from rollouts.training import DataBuffer; labels = ({*'abcdefgh'}, object(), [lambda: 0]); "
        "print(DataBuffer([{'prompt': 'x', 'label': label} for label in labels]).fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
    one, other = ([{"prompt": "x", "label": {"a", end}}] for end in "bc")
    assert DataBuffer(one).fingerprint != DataBuffer(other).fingerprint


def test_a_state_fits_its_data_only() -> None:
    """Other prompts, other labels or another seed are refused; more epochs are not."""
    state = DataBuffer(texts(3), seed=1).save_state()
    for other in (
        DataBuffer(texts(4), seed=1),
        DataBuffer(texts(3), seed=2),
        DataBuffer(texts(3)),
        DataBuffer([{"prompt": text, "label": 1} for text in texts(3)], seed=1),
    ):
        with pytest.raises(ConfigError, match=r"BufferState\.fingerprint: got"):
            other.load_state(state)
    DataBuffer(texts(3), seed=1, epochs=5).load_state(state)


@pytest.mark.parametrize(
    "change",
    [{"cursor": None}, {"extra": 1}, {"leftovers": 3}, {"leftovers": [[1]]}, {"cursor": "1"}],
    ids=str,
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    """As a ConfigError that names it, not as a KeyError later."""
    data = {**DataBuffer(texts(3)).save_state().to_dict(), **change}
    if change == {"cursor": None}:
        del data["cursor"]
    with pytest.raises(ConfigError, match="BufferState"):
        BufferState.from_dict(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cursor": 99}, "cursor: got 99; expected 0 to 3"),
        ({"cursor": -1}, "cursor: got -1; expected 0 to 3"),
        ({"epoch": -1}, "epoch: got -1; expected 0"),
        ({"epoch": 1, "cursor": 0}, "next_group_index: got 2; expected at least 3"),
        ({"next_group_index": -5}, "next_group_index: got -5; expected at least 2"),
        ({"leftovers": [[99, 0]]}, r"leftovers: got \[99, 0\]; expected"),
        ({"leftovers": [[-1, 1]]}, r"leftovers: got \[-1, 1\]; expected"),
        ({"leftovers": [[1, 2]]}, r"leftovers: got \[1, 2\]; expected"),
        ({"leftovers": [[0, 0], [1, 0]]}, r"leftovers: got \[1, 0\]; expected"),
        ({"leftovers": [[0, 0], [0, 1]]}, r"leftovers: got \[0, 1\]; expected"),
    ],
    ids=str,
)
def test_numbers_that_no_buffer_has_are_refused(change: dict[str, Any], words: str) -> None:
    """By name, not as an IndexError later or as one prompt under two indices; the buffer is as before."""
    saved, buffer = DataBuffer(texts(3)), DataBuffer(texts(3))
    saved.get_prompts(2)
    saved.mark_done(Prompt("", group_index=0))
    buffer.get_prompts(1)
    before = buffer.save_state()
    with pytest.raises(ConfigError, match=rf"BufferState\.{words}"):
        buffer.load_state(BufferState.from_dict({**saved.save_state().to_dict(), **change}))
    assert buffer.save_state() == before


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "DataBuffer.prompts: got []; expected at least one prompt"),
        ("What is 2 + 2?", {}, "DataBuffer.prompts: got 'What is 2 + 2?'; expected"),
        ({"prompt": "a"}, {}, "DataBuffer.prompts: got {'prompt': 'a'}; expected"),
        (Path("d.jsonl"), {}, "DataBuffer.prompts: got a path, 'd.jsonl'; expected load_prompts(path)"),
        *(
            (f"d.{kind}", {}, f"DataBuffer.prompts: got 'd.{kind}'; expected a list of prompts, or load_prompts(path)")
            for kind in ("jsonl", "json", "csv", "parquet")
        ),
        (io.StringIO("a"), {}, "DataBuffer.prompts: got an open file; expected load_prompts(path)"),
        (None, {}, "DataBuffer.prompts: got None; expected a list of prompts"),
        (texts, {}, "DataBuffer.prompts: got <function texts"),
        (DataFrame(), {}, "DataBuffer.prompts: got a DataFrame; expected rows: df.to_dict('records')"),
        (PolarsFrame(), {}, "DataBuffer.prompts: got a PolarsFrame; expected rows: df.to_dicts()"),
        (LazyFrame(), {}, "DataBuffer.prompts: got a LazyFrame; expected rows: df.collect().to_dicts()"),
        (Table(), {}, "DataBuffer.prompts: got a Table; expected rows: table.to_pylist()"),
        ([""], {}, "prompts[0]: prompt: got ''; expected some text"),
        (["a", {"prompt": " \n"}], {}, "prompts[1]: prompt: got ' \\n'; expected some text"),
        ([{"prompt": []}], {}, "prompts[0]: "),
        ([[{"role": "user", "content": ""}]], {}, "prompts[0]: prompt: got [{"),
        ([Prompt("")], {}, "prompts[0]: prompt: got ''; expected some text"),
        (["a", 3], {}, "prompts[1]: Prompt.prompt: got 3"),
        ([{"question": "a"}], {}, "prompts[0]: row: got ['question']"),
        ([{"question": "a"}], {}, "others: load_prompts(prompt=NAME)"),
        (
            [{"prompt": "a", "metadata": "x"}],
            {},
            "prompts[0]: Prompt.metadata: got 'x'; expected a mapping, or an object as JSON text",
        ),
        ([[{"role": "robot", "content": ""}]], {}, "prompts[0]: Message.role: got 'robot'"),
        (["a"], {"epochs": 0}, "DataBuffer.epochs: got 0; expected an integer >= 1, or None"),
        (["a"], {"epochs": 1.5}, "DataBuffer.epochs: got 1.5"),
        (["a"], {"epochs": "2"}, "DataBuffer.epochs: got '2'"),
    ],
)
def test_bad_data_is_refused_with_its_position(prompts: Any, options: dict[str, Any], words: str) -> None:
    """A text is a prompt without its list, not a list of letters."""
    with pytest.raises(ConfigError) as caught:
        DataBuffer(prompts, **options)
    assert words in str(caught.value)


def test_a_label_that_cannot_be_stored_is_refused_before_work() -> None:
    """A list that contains itself ended the run at its group, and one nested too deep failed each of its rollouts."""
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for label in (endless, deep, {"a": endless}):
        with pytest.raises(ConfigError, match=r"^prompts\[1\]: label: nested deeper than 100 levels, or in itself$"):
            DataBuffer(["a", {"prompt": "b", "label": label}])


def test_a_label_of_keys_of_several_types_is_held_out() -> None:
    """Duplicates are found by their labels, whatever their keys."""
    rows = [{"prompt": "a", "label": {1: "x", "b": {"y"}, (1, 2): 0}}]
    buffer = DataBuffer(["b", *rows, *rows])
    assert [prompt.prompt for prompt in buffer.hold_out(1)] == ["a"]
    assert len(buffer) == 1


def test_a_table_of_arrow_is_refused() -> None:
    """By the name of its class; iterating it yields columns."""
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.table({"prompt": ["a"], "label": ["b"]})
    for rows in (table, table.to_batches()[0]):
        with pytest.raises(ConfigError, match=r"got a (Table|RecordBatch); expected rows: table\.to_pylist\(\)"):
            DataBuffer(rows)
    assert DataBuffer(table.to_pylist()).prompts[0].label == "b"


def test_a_data_set_of_rows_is_read_by_iterating() -> None:
    """As those of ``datasets`` are, which also have names of columns and to_dict; so is a generator."""

    class Rows:
        column_names = ("prompt", "label")

        def to_dict(self) -> dict[str, list[str]]:
            return {"prompt": ["a"], "label": ["b"]}

        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"prompt": "a", "label": "b"}

    assert DataBuffer(Rows()).prompts == DataBuffer(iter(Rows())).prompts == (Prompt("a", label="b"),)


def test_a_recipe_refuses_a_table_too() -> None:
    """Before anything is built from it."""
    with pytest.raises(ConfigError, match=r"got a DataFrame; expected rows: df\.to_dict\('records'\)"):
        agent_recipe("mine", Endpoint(model="m"), SingleTurnEnvironment, DataFrame())


def test_an_empty_prompt_with_metadata_is_one() -> None:
    """Its environment writes the opening from them. So is one with an image or a call, and no text."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    image = Message("user", [Image.of(PIL.Image.new("RGB", (4, 3)))])
    rows = [
        {"prompt": "", "metadata": {"seed": 1}},
        [{"role": "assistant", "content": "", "tool_calls": [call]}],
        [image],
    ]
    assert len(DataBuffer(rows)) == 3


@pytest.mark.parametrize("count", [-1, 1.5, "3", True])
def test_a_count_is_a_count(count: Any) -> None:
    """Taking minus one prompt is a mistake, not nothing."""
    with pytest.raises(ConfigError, match=r"get_prompts\(count\): got .*; expected an integer >= 0"):
        DataBuffer(texts(3)).get_prompts(count)


def test_every_shape_of_a_row() -> None:
    """Texts, rows, messages and prompts; a prompt's own group index does not matter."""
    chat = [{"role": "user", "content": "c"}]
    rows = ["a", {"prompt": "b", "label": 2, "metadata": {"k": 1}}, chat, Prompt("d", group_index=9)]
    a, b, c, d = DataBuffer(rows).get_prompts(4)
    assert (a.prompt, b.label, b.metadata, d.group_index) == ("a", 2, {"k": 1}, 3)
    assert c.messages == (Message("user", "c"),)
    assert len(DataBuffer(rows)) == 4


def test_held_out_prompts_are_never_handed_out() -> None:
    """Nor their duplicates: the last distinct prompts of the data are held out for evaluation."""
    buffer = DataBuffer(["a", "b", "c", "b", "d"], seed=3, epochs=1)
    assert [prompt.prompt for prompt in buffer.hold_out(3)] == ["b", "c", "d"]
    assert [prompt.prompt for prompt in buffer.prompts] == ["a"]
    assert [prompt for _, prompt in taken(buffer, 1)] == ["a"]
    with pytest.raises(DataExhausted):
        buffer.get_prompts(1)


def test_duplicates_have_equal_labels_in_any_order_of_their_keys() -> None:
    """A prompt with another label is another prompt."""
    labels = [{"a": 1, "b": 2}, {"a": 2, "b": 2}, {"b": 2, "a": 1}]
    buffer = DataBuffer([{"prompt": "x", "label": label} for label in labels])
    assert [prompt.label for prompt in buffer.hold_out(1)] == [{"a": 2, "b": 2}]
    assert [prompt.label for prompt in buffer.prompts] == [labels[0], labels[2]]


def test_keys_of_several_types_in_a_label_are_no_error() -> None:
    """Also keys that JSON does not have."""
    labels: list[Any] = [{1: "a", "b": 2}, {"b": 2, 1: "a"}, {(1, 2): 3}]
    buffer = DataBuffer([{"prompt": "x", "label": label} for label in labels])
    assert [prompt.label for prompt in buffer.hold_out(1)] == labels[2:]
    assert [prompt.label for prompt in buffer.prompts] == labels[:2]


def test_prompts_that_are_only_metadata_are_different_prompts() -> None:
    """An environment writes their openings from it; with a text, metadata makes no difference."""
    rows: list[dict[str, Any]] = [{"prompt": "", "metadata": {"task": number}} for number in (1, 2, 2, 3)]
    buffer = DataBuffer([*rows, *({"prompt": "x", "metadata": {"row": number}} for number in (1, 2))])
    whole = buffer.save_state()
    assert [dict(prompt.metadata) for prompt in buffer.hold_out(2)] == [{"task": 3}, {"row": 2}]
    assert whole != buffer.save_state() == DataBuffer(buffer.prompts).save_state()
    assert [prompt.metadata["task"] for prompt in buffer.prompts] == [1, 2, 2]


def test_what_was_out_before_a_state_was_loaded_cannot_be_put_back() -> None:
    """It comes out again, if the state says so."""
    buffer = DataBuffer(texts(3))
    state = buffer.save_state()
    out = buffer.get_prompts(2)
    buffer.load_state(state)
    with pytest.raises(ConfigError, match="prompts taken from this buffer that are out"):
        buffer.put_back(out)
    assert taken(buffer, 3) == [(0, "p0"), (1, "p1"), (2, "p2")]


def test_holding_out_leaves_something_and_comes_first() -> None:
    """All of the data is too much; and after the first prompt was taken it is too late."""
    buffer = DataBuffer(texts(3))
    assert buffer.hold_out(0) == []
    for count in (-1, 3, 4):
        with pytest.raises(ConfigError, match="0 to 2"):
            buffer.hold_out(count)
    buffer.get_prompts(1)
    with pytest.raises(ConfigError, match="from which nothing was taken"):
        buffer.hold_out(1)
