"""The sample: columns read as read-only lists once packed; checked at construction and when packed."""

from __future__ import annotations

import copy
import enum
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.dtypes import Message, StopReason, VersionSpan
from rollouts.errors import ConfigError, Failure
from rollouts.training import Group, Prompt, Sample, Status
from rollouts.trajectory import CompletionRecord


def packed(**fields: Any) -> Sample:
    """A packed sample, as the manager returns it."""
    sound: dict[str, Any] = {
        "tokens": [7, 8, 9, 10],
        "loss_mask": [0, 1, 0, 1],
        "rollout_log_probs": [0.0, -0.5, 0.0, -0.25],
        "versions": [VersionSpan("v1", 1, 2), VersionSpan("v2", 3, 4)],
    }
    return Sample(**{**sound, **fields}).pack()


def full() -> Sample:
    """A sample with every field set."""
    return packed(
        prompt=(Message("user", "hi"),),
        response="ho",
        reward=0.1,
        metadata={"a": [1, {"b": None}]},
        group_index=3,
        index=24,
        rollout_id=24,
        status="truncated",
        label={"x": 1},
        messages=[{"role": "user", "content": "hi"}],
        stop_reason=StopReason.MAX_TOKENS,
        failure=Failure("K", "m", "p", "t"),
        completions=[CompletionRecord("r", 1, 2, "length", 5, 0, 0.5)],
        metrics={"turns": 2},
    )


# -- columns as lists ------------------------------------------------------------------------------------------------


def test_columns_read_as_lists() -> None:
    """Truth, length, slices, iteration, equality, JSON: as filters and rewards written for slime use them."""
    sample = packed()
    for column, values in (
        (sample.tokens, [7, 8, 9, 10]),
        (sample.loss_mask, [0, 1, 0, 1]),
        (sample.rollout_log_probs, [0.0, -0.5, 0.0, -0.25]),
    ):
        assert isinstance(column, list)
        assert column == values
        assert values == column
        assert [*column] == values
        assert column[1:3] == values[1:3]
        plain = [column[:], copy.deepcopy(column), pickle.loads(pickle.dumps(column))]
        assert {type(copied) for copied in plain} == {list}
        assert column + column == values * 2
        assert json.loads(json.dumps(column)) == values
        assert {type(value) for value in column} <= {int, float}
    assert not Sample().tokens
    assert Sample().rollout_log_probs is None
    assert sum(sample.loss_mask) == 2
    assert bool(Sample()), "a sample without tokens is still a sample"
    assert len(sample) == 4


COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")
EDITS: dict[str, Callable[[Any], object]] = {
    "item": lambda column: column.__setitem__(0, 1),
    "del": lambda column: column.__delitem__(0),
    "append": lambda column: column.append(1),
    "+=": lambda column: column.__iadd__([1]),
    "*=": lambda column: column.__imul__(2),
    "sort": lambda column: column.sort(key=abs),
    **{name: operator.methodcaller(name) for name in ("clear", "pop", "reverse")},
    "extend": lambda column: column.extend([1]),
    "insert": lambda column: column.insert(0, 1),
    "remove": lambda column: column.remove(column[0]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("name", COLUMNS)
def test_an_edit_in_place_of_a_packed_column_is_refused(name: str, edit: Callable[[Any], object]) -> None:
    """It would be lost; the error names the field."""
    sample = packed()
    with pytest.raises(TypeError, match=f"Sample.{name}: got an edit in place"):
        edit(getattr(sample, name))
    assert sample == packed()


@pytest.mark.parametrize("values", [[0, 0, 0, 1], (0.0, 0.0, False, np.int64(1)), np.array([0, 0, 0, 1])])
def test_an_assigned_column_is_the_new_one(values: Any) -> None:
    """Of lists, other sequences and arrays; an array is copied, so that a later edit of it changes no sample."""
    sample = packed(versions=[])
    sample.loss_mask = values
    if isinstance(values, np.ndarray):
        values[:] = 1
    assert sample.pack().loss_mask == [0, 0, 0, 1]


def test_no_reader_changes_a_sample() -> None:
    """Every field and property reads twice the same, and leaves the stored objects in place."""
    sample = full()
    slots = [field.name for field in attrs.fields(Sample)]
    before = {name: getattr(sample, name) for name in slots}
    for name in dir(sample):
        if not name.startswith("_") and not callable(getattr(type(sample), name, None)):
            first, second = getattr(sample, name), getattr(sample, name)
            assert np.array_equal(first, second) if isinstance(first, np.ndarray) else repr(first) == repr(second)
    sample.to_dict()
    assert all(getattr(sample, name) is before[name] for name in slots)


def test_packed_columns_are_small() -> None:
    """Nine bytes a token until a list is read; the column properties create none."""
    sample = packed()
    columns = (sample.token_column, sample.mask_column, sample.logprob_column)
    assert [column.dtype for column in columns if column is not None] == [np.int32, np.bool_, np.float32]
    assert sum(column.nbytes for column in columns if column is not None) == 9 * 4
    assert sample.token_column is sample.token_column


# -- checked --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_mask": [1]}, "columns of one length"),
        ({"rollout_log_probs": [0.0]}, "columns of one length"),
        ({"tokens": []}, "columns of one length"),
        ({"versions": [VersionSpan("v1", 1, 2)]}, "spans that cover exactly the mask"),
        ({"versions": [VersionSpan("v1", 0, 4)]}, "spans that cover exactly the mask"),
        ({"versions": [VersionSpan("v1", 1, 2), VersionSpan("v2", 3, 400)]}, "spans that cover exactly the mask"),
        ({"versions": [VersionSpan("v1", 1, 2), VersionSpan("v2", -1, 4)]}, "spans that cover exactly the mask"),
        ({"versions": [VersionSpan("v1", 1, 2), VersionSpan("v2", 3, 4)] * 2}, "spans that cover exactly the mask"),
        ({"versions": ["v1"]}, "spans that cover exactly the mask"),
        ({"status": "done"}, "Sample.status: got 'done'; expected one of ['pending', 'completed'"),
        ({"metrics": {"note": "x"}}, "Sample.metrics: got {'note': 'x'}; expected a dict of numbers"),
        ({"completions": [{"request_id": "r"}]}, "a list of CompletionRecord"),
        ({"metadata": None}, "Sample.metadata: got None; expected a dict"),
        ({"history": "keep"}, "Sample.history: got 'keep'; expected one of ('append', 'fork', 'error')"),
        ({"conversation": -1}, "Sample.conversation: got -1; expected an integer >= 0"),
        ({"conversation": True}, "Sample.conversation: got True; expected an integer >= 0"),
        ({"shared": 1.0}, "Sample.shared: got 1.0; expected an integer >= 0"),
    ],
)
def test_a_malformed_sample_is_not_made(fields: dict[str, Any], words: str) -> None:
    """By field, value and expectation."""
    with pytest.raises(ConfigError) as caught:
        packed(**fields)
    assert words in str(caught.value)


def test_a_subclass_of_a_fields_type_is_one() -> None:
    """The members of enumerations too, which name a user's options."""
    history = enum.Enum("History", {"KEPT": "append"}, type=str)
    number = enum.IntEnum("Number", {"SECOND": 1})
    sample = packed(history=history.KEPT, conversation=number.SECOND, seat=np.str_("judge"), shared=number.SECOND)
    assert json.loads(json.dumps(sample.to_dict()))["history"] == "append"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", [0.5, 1, 2, 3]),
        ("tokens", ["a", "b", "c", "d"]),
        ("tokens", [2**31, 0, 0, 0]),
        ("tokens", [None] * 4),
        ("tokens", [True, False, True, True]),
        ("tokens", [7, True, 7, 7]),
        ("tokens", [7, np.True_, 7, 7]),
        ("tokens", np.ones(4, np.bool_)),
        ("rollout_log_probs", [0.0, False, 0.0, -1.0]),
        ("advantages", [0.5, True, 0.5, 0.5]),
        ("advantages", np.ones(4, np.bool_)),
        ("teacher_log_probs", [False] * 4),
        ("tokens", [[1], [2], [3], [4]]),
        ("tokens", [[1, 2], [3], 4, 5]),
        ("loss_mask", [0, 2, 0, 1]),
        ("loss_mask", [0, 0.5, 0, 1]),
        ("loss_mask", None),
        ("rollout_log_probs", ["x"] * 4),
        ("rollout_log_probs", ["-0.5"] * 4),
        ("rollout_log_probs", [-1 + 2j] * 4),
        ("rollout_log_probs", [0.0, None, 0.0, -1.0]),
        ("rollout_log_probs", [0.0, float("nan"), 0.0, -1.0]),
        ("rollout_log_probs", np.full(4, np.nan, np.float32)),
        ("tokens", np.zeros((4, 1), np.int32)),
    ],
)
def test_a_column_spoiled_later_does_not_leave(name: str, value: Any) -> None:
    """Packing raises an error that names the column."""
    sample = packed(versions=[])
    setattr(sample, name, value)
    with pytest.raises(ConfigError, match=rf"Sample.*{name}"):
        sample.pack()


def test_a_mask_edited_after_versions_were_given_is_found() -> None:
    """Versions cover exactly what is trained, also after an edit."""
    sample = packed()
    sample.loss_mask = [1, *sample.loss_mask[1:]]
    with pytest.raises(ConfigError, match="cover exactly the mask"):
        sample.pack()


def test_the_response_is_what_follows_the_first_prompt() -> None:
    """From the first sampled token on; none without one."""
    assert packed().response_length == 3
    assert Sample(tokens=[1, 2]).response_length == 0
    assert packed().weight_versions == ["v1", "v2"]


# -- as plain data --------------------------------------------------------------------------------------------------


def test_every_field_comes_back() -> None:
    """Through a dict, JSON, pickle and copies."""
    sample = full()
    for again in (
        Sample.from_dict(sample.to_dict()),
        Sample.from_dict(json.loads(json.dumps(sample.to_dict()))),
        pickle.loads(pickle.dumps(sample)),
        copy.deepcopy(sample),
        copy.copy(sample),
    ):
        assert again == sample
        assert again.to_dict() == sample.to_dict()
        assert again.status is Status.TRUNCATED
        assert (again.completions, again.failure, again.versions) == (
            sample.completions,
            sample.failure,
            sample.versions,
        )
    assert sample != full().tokens
    with pytest.raises(TypeError, match="unhashable"):
        hash(sample)


@given(st.lists(st.floats(width=32, max_value=0, allow_nan=False, allow_infinity=False), max_size=20))
def test_logprobs_come_back_bit_for_bit(values: list[float]) -> None:
    """float32 through JSON's doubles loses nothing."""
    sample = Sample(tokens=range(len(values)), rollout_log_probs=np.array(values, np.float32))
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).pack()
    assert again.logprob_column is not None
    assert again.logprob_column.tobytes() == np.array(values, np.float32).tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward_model": 1}, "Sample: got ['reward_model']; expected fields of a sample"),
        ({"stop_reason": "tired"}, "Sample.stop_reason: got 'tired'"),
        ({"versions": [[1]]}, "Sample.versions: got [[1]]"),
        ({"completions": [{"x": 1}]}, "Sample.completions: got [{'x': 1}]"),
        ({"failure": {"kind": "K"}}, "Sample.failure: got {'kind': 'K'}"),
        ({"status": "tired"}, "Sample.status: got 'tired'"),
    ],
)
def test_damaged_data_is_refused_by_field(change: dict[str, Any], words: str) -> None:
    """As a ConfigError, whatever is wrong in it."""
    with pytest.raises(ConfigError) as caught:
        Sample.from_dict({**full().to_dict(), **change})
    assert words in str(caught.value)


def test_a_group_knows_its_number_and_rewards() -> None:
    """From its prompt and its samples."""
    group = Group(Prompt("a", group_index=4), (Sample(reward=1.0), Sample()), "kept")
    assert (group.group_index, group.rewards) == (4, [1.0, None])


def test_a_sample_is_printed_short() -> None:
    """Whatever its length, and also when a column is spoiled."""
    sample = packed(group_index=1, index=9)
    assert repr(sample) == "<Sample group 1 · index 9: 4 tokens, 2 trained, reward None, pending>"
    assert len(repr(Sample(tokens=range(10_000)))) < 120


# -- fields for trainers -----------------------------------------------------------------------------------------------

FOR_TRAINERS: dict[str, Any] = {
    "advantages": [0.0, 1.5, 0.0, -0.1],
    "teacher_log_probs": [0.0, -0.75, 0.0, -0.1],
    "loss_multiplier": 0.5,
    "step_rewards": [0.25, 0.5],
    "step_completions": [0, -1],
    "completions": [CompletionRecord("r", 1, 2, "stop", 5, 0, 0.5, temperature=0.7, logprobs_of="tempered")],
}


def test_fields_for_trainers_go_through_json() -> None:
    """Per-token advantages and teacher logprobs are float32 columns; completions have temperature and distribution."""
    sample = packed(**FOR_TRAINERS)
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).pack()
    assert again == sample
    for name in ("advantages", "teacher_log_probs"):
        expected = np.array(FOR_TRAINERS[name], np.float32)
        assert getattr(again, name) == expected.tolist()
    assert again.advantage_column is not None
    assert again.advantage_column.dtype == np.float32
    assert again.teacher_column is not None
    assert (again.loss_multiplier, again.step_completions) == (0.5, [0, -1])
    assert (again.completions[0].temperature, again.completions[0].logprobs_of) == (0.7, "tempered")
    for copied in (copy.copy(sample), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert copied == sample


def test_a_sample_of_before_has_none_of_them() -> None:
    """Rows of earlier versions lack the fields, and read as before."""
    fields = packed().to_dict()
    for name in ("advantages", "teacher_log_probs", "loss_multiplier", "step_completions"):
        del fields[name]
    sample = Sample.from_dict(fields)
    assert (sample.advantages, sample.teacher_log_probs, sample.loss_multiplier) == (None, None, 1.0)
    assert sample.step_completions is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("advantages", [0.0], "columns of one length"),
        ("teacher_log_probs", [0.0] * 5, "columns of one length"),
        ("advantages", [0.0, float("nan"), 0.0, 0.0], "finite numbers"),
        ("loss_multiplier", -1.0, "a finite number >= 0"),
        ("loss_multiplier", float("inf"), "a finite number >= 0"),
        ("loss_multiplier", None, "a finite number >= 0"),
        ("step_completions", [0], "empty, or for each of the 2 step rewards"),
        ("step_completions", [0, 1], "empty, or for each of the 2 step rewards"),
        ("step_completions", [0, -2], "empty, or for each of the 2 step rewards"),
        ("step_completions", [0, "1"], "empty, or for each of the 2 step rewards"),
    ],
)
def test_a_field_for_trainers_that_does_not_fit_is_refused(name: str, value: Any, expected: str) -> None:
    """Columns are as wide as the tokens; a step reward belongs to one of the completions, or to none that is known."""
    with pytest.raises(ConfigError, match=expected):
        packed(**{**FOR_TRAINERS, name: value})
