"""The columns of exports: plain types, the same in every format, and nothing of a sample is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Message, ToolCall
from rollouts.errors import EnvironmentFailure, Failure
from rollouts.runs.columns import COLUMNS, columns_table, plain_row
from rollouts.runs.export import Kind, export_rows
from rollouts.runs.folder import read_rows
from rollouts.runs.writer import RunWriter
from rollouts.training.types import Sample

DOCS = Path(__file__).parents[2] / "docs"


def a_sample(index: int, **fields: Any) -> Sample:
    given = {"prompt": "What is 2 + 3?", "tokens": [1, 2], "loss_mask": [0, 1], "rollout_log_probs": [0.0, -0.5]}
    return Sample(**{**given, "reward": 1, "group_index": 0, "index": index, **fields})


CALL = ToolCall("add", {"a": 2, "b": [3, None]}, id="call_0")
CONVERSATION = [
    Message("user", "What is 2 + 3?").to_chat(),
    Message("assistant", "", tool_calls=[CALL], reasoning="easy").to_chat(),
    Message("tool", "5", tool_call_id="call_0", name="add").to_chat(),
]
SAMPLES = [
    a_sample(0, label="5", messages=CONVERSATION, metrics={"turns": 1, "seconds": 0.5}, step_rewards=[1]),
    a_sample(1, label={"answer": 5}, metadata={"level": 3, "tags": ["a"]}, messages=[]),
    a_sample(2, prompt=[Message("system", "be short"), Message("user", "2 + 3?")], label=5),
    a_sample(3, reward=None, failure=Failure.of(EnvironmentFailure("the world ended")), status="failed"),
]


def exported(folder: Path, kind: Kind, format: str) -> list[dict[str, Any]]:
    writer = RunWriter(folder / "run", {"recipe": "test"}, format=format)  # type: ignore[arg-type]
    writer.write_batch(SAMPLES, {})
    writer.finish("finished")
    export_rows(folder / "run", folder / "out", kind)
    if kind == "jsonl":
        return [json.loads(line) for line in (folder / "out").read_bytes().splitlines()]
    pyarrow = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = pyarrow.read_table(folder / "out").to_pylist()
    return rows


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_are_plain(tmp_path: Path, kind: Kind, format: str) -> None:
    """Texts are texts, messages are structs, in each format of the export and of the run."""
    text, data, chat, failed = exported(tmp_path, kind, format)
    assert (text["prompt"], text["prompt_messages"]) == ("What is 2 + 3?", None)
    assert [text["label"], data["label"], chat["label"], failed["label"]] == ["5", '{"answer":5}', "5", None]
    asked, called, answered = text["messages"]
    assert [asked["role"], asked["content"], asked["tool_calls"]] == ["user", "What is 2 + 3?", None]
    assert called["reasoning_content"] == "easy"
    function = {"name": "add", "arguments": '{"a":2,"b":[3,null]}'}
    assert called["tool_calls"] == [{"type": "function", "id": "call_0", "function": function}]
    assert (answered["tool_call_id"], answered["name"], answered["content"]) == ("call_0", "add", "5")
    assert text["metrics"] == [{"name": "turns", "value": 1.0}, {"name": "seconds", "value": 0.5}]
    assert data["metadata"] == '{"level":3,"tags":["a"]}'
    assert chat["prompt"] is None
    assert [message["content"] for message in chat["prompt_messages"]] == ["be short", "2 + 3?"]
    assert (failed["reward"], failed["failure"]["kind"]) == (None, "EnvironmentFailure")
    assert all(type(row["reward"]) is float for row in (text, data, chat))


def test_each_format_has_the_same_rows(tmp_path: Path) -> None:
    """Equal in value and in type, also where a JSON reader and a Parquet reader could differ."""
    first, *others = (
        exported(tmp_path / f"{kind}-{format}", kind, format)
        for kind in ("jsonl", "parquet")
        for format in ("jsonl", "parquet")
    )
    for other in others:
        assert json.dumps(other) == json.dumps(first)


def test_every_field_of_a_sample_has_a_column(tmp_path: Path) -> None:
    """A field that is added to a sample needs a column, too."""
    exported(tmp_path, "jsonl", "jsonl")
    (row, *_) = read_rows(tmp_path / "run")
    assert {*COLUMNS} == {*row.data, "prompt_messages"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"content": '[{"type":"text","text":"hi"}]'}),
        ({"role": "user", "content": "hi", "weight": 2}, {"content": "hi", "other": '{"weight":2}'}),
        ({"role": "assistant", "tool_calls": "odd"}, {"tool_calls": None, "other": '{"tool_calls":"odd"}'}),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}, "extra": 1}]},
            {
                "tool_calls": None,
                "other": '{"tool_calls":[{"function":{"name":"f","arguments":{}},"extra":1}]}',
            },
        ),
        ("a text", {"role": None, "other": '"a text"'}),
    ],
)
def test_a_message_of_another_shape_loses_nothing(message: Any, expected: dict[str, Any]) -> None:
    """An entry without a field is JSON in ``other``."""
    row = plain_row(a_sample(0, messages=[message]).to_dict())
    assert row["messages"][0].items() >= expected.items()


def test_the_documentation_lists_the_columns() -> None:
    """The table in the page on runs is that of the code."""
    assert columns_table() in (DOCS / "runs.md").read_text(encoding="utf-8")


def test_a_data_set_says_what_its_columns_are(tmp_path: Path) -> None:
    """The card of an ``hf`` export has the table."""
    pytest.importorskip("pyarrow")
    exported(tmp_path, "jsonl", "jsonl")
    export_rows(tmp_path / "run", tmp_path / "card", "hf")
    assert columns_table() in (tmp_path / "card" / "README.md").read_text(encoding="utf-8")
