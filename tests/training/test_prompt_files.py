"""Prompts from the files that users have: each row becomes a prompt, or is refused by file, row and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training import Prompt, load_prompts
from rollouts.training.prompt_files import rows_of

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n} for n in range(3)]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def json_lines(folder: Path) -> Path:
    return written(folder / "rows.jsonl", "\n\n".join(map(json.dumps, ROWS)))


def json_array(folder: Path) -> Path:
    return written(folder / "rows.json", json.dumps(ROWS, indent=1))


def lines_named_json(folder: Path) -> Path:
    return written(folder / "rows.json", "\n" + "\n".join(map(json.dumps, ROWS)))


def comma_separated(folder: Path) -> Path:
    lines = [",".join(ROWS[0]), *(",".join(map(str, row.values())) for row in ROWS)]
    return written(folder / "rows.csv", "\ufeff" + "\n".join(lines) + "\n\n")


def parquet(folder: Path) -> Path:
    arrow: Any = pytest.importorskip("pyarrow")
    module: Any = pytest.importorskip("pyarrow.parquet")
    module.write_table(arrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def parts(folder: Path) -> Path:
    for number, row in enumerate(ROWS):
        written(folder / "data" / f"train-{number:05}-of-00003.jsonl", json.dumps(row))
    written(folder / "data" / "README.md", "a card")
    return folder / "data"


def saved_data_set(folder: Path) -> Path:
    """The files of a data set that ``save_to_disk`` wrote; a further test has them from ``datasets``."""
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(ROWS)
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, rows in zip(names, (table.slice(0, 2), table.slice(2)), strict=True):
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(rows)
    written(folder / "dataset_info.json", "{}")
    written(folder / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


KINDS = [json_lines, json_array, lines_named_json, comma_separated, parquet, parts, saved_data_set]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_gives_the_same_prompts(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    """The columns have the names of the user's data; others are left out."""
    source = kind(tmp_path)
    expected = [Prompt(str(row["question"]), label=row["answer"]) for row in ROWS]
    assert load_prompts(source, prompt="question", label="answer") == expected
    assert load_prompts(str(source), prompt="question", label="answer", limit=2) == expected[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_are_the_columns_that_are_named(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    """Each is a field; a cell of CSV is a string."""
    last = load_prompts(kind(tmp_path), prompt="question", metadata=["level", "answer"])[-1]
    assert {name: str(value) for name, value in last.metadata.items()} == {"level": "2", "answer": "4"}
    assert last.label is None


def test_rows_in_memory_are_read_as_those_of_a_file() -> None:
    """For example a list, or a data set of ``datasets``."""
    loaded = load_prompts(iter(ROWS), prompt="question", label="answer")
    assert [prompt.label for prompt in loaded] == ["0", "2", "4"]
    with pytest.raises(ConfigError, match=r"data, row 1: row: got .*'question'"):
        load_prompts(ROWS)


@pytest.mark.extra
def test_a_data_set_that_the_library_saved_is_read(tmp_path: Path) -> None:
    """Also a selection of its rows; of several splits one has to be named."""
    datasets: Any = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.select([2, 0]).save_to_disk(str(tmp_path / "two"))
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "splits"))
    named = {"prompt": "question", "label": "answer"}
    assert [prompt.label for prompt in load_prompts(tmp_path / "two", **named)] == ["4", "0"]
    assert load_prompts(data, **named) == load_prompts(tmp_path / "splits" / "test", **named)
    with pytest.raises(ConfigError, match=r"expected one of its splits: test, train, e\.g\. .*splits/test"):
        load_prompts(tmp_path / "splits", **named)


def test_an_empty_cell_is_a_missing_value(tmp_path: Path) -> None:
    """So that a missing label is refused by the reward, and never compared with a reply."""
    path = written(tmp_path / "rows.csv", 'prompt,label\n"a, b",\nc,1\n')
    assert [(prompt.prompt, prompt.label) for prompt in load_prompts(path)] == [("a, b", None), ("c", "1")]


def test_a_folder_with_several_splits_is_refused(tmp_path: Path) -> None:
    """Rows for tests are not trained by accident."""
    written(tmp_path / "main" / "train-00000-of-00001.jsonl", '{"prompt": "a"}')
    written(tmp_path / "main" / "contest.jsonl", '{"prompt": "b"}')
    assert len(load_prompts(tmp_path)) == 2
    written(tmp_path / "main" / "test-00000-of-00001.jsonl", '{"prompt": "c"}')
    with pytest.raises(ConfigError, match="expected one split; the folder has files of test, train"):
        load_prompts(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.jsonl", None, "expected a .jsonl, .json, .csv or .parquet file, a folder of them"),
        ("rows.xlsx", "a", "expected a .jsonl, .json, .csv or .parquet file, a folder of them"),
        ("rows.jsonl", "", "expected at least one row"),
        ("rows.csv", "prompt,label\n", "expected at least one row"),
        ("rows.json", "[]", "expected at least one row"),
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt"\n', "rows.jsonl, line 2: not JSON"),
        ("rows.json", '[{"prompt": "a"},', "rows.json: not JSON"),
        ("rows.jsonl", '{"prompt": "a"}\n[1]\n', "rows.jsonl, line 2: got [1]; expected an object"),
        ("rows.json", '[{"prompt": "a"}, 1]', "rows.json, row 2: got 1; expected an object"),
        ("rows.jsonl", '{"prompt": "a"}\n\n{"text": "b"}\n', "rows.jsonl, line 3: row: got ['text']"),
        ("rows.csv", "prompt,label\na,1,2\n", "rows.csv, line 2: got ['a', '1', '2']; expected 2 cells"),
        (
            "rows.csv",
            "prompt;label\na;1\n",
            "rows.csv, line 1: got 'prompt;label'; expected columns separated by commas",
        ),
        ("rows.jsonl", "PAR1...", "rows.jsonl, line 1: got Parquet; expected JSON, or a name that ends in .parquet"),
        ("rows.json", "PAR1...", "rows.json, line 1: got Parquet; expected JSON, or a name that ends in .parquet"),
        ("rows.csv", 'prompt\n"a\n', "rows.csv: not CSV in UTF-8 (unexpected end of data)"),
        ("rows.parquet", "no", "rows.parquet: not Parquet"),
    ],
)
def test_a_bad_file_is_refused_with_its_row(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    """File, line or row, what was there and what was expected."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if text is not None:
        written(tmp_path / name, text)
    with pytest.raises(ConfigError) as caught:
        load_prompts(tmp_path / name)
    assert words in str(caught.value)


def test_a_missing_column_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    """File, row, column; whether it is a row of the task or of any loader."""
    message = "rows.jsonl, line 1: column: got 'problem'; expected one of question, answer, level"
    for load in (load_prompts, lambda path, prompt: [*rows_of(path, prompt=prompt)]):
        with pytest.raises(ConfigError) as caught:
            load(json_lines(tmp_path), prompt="problem")
        assert message in str(caught.value)


def test_a_state_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """A folder with such a file is a saved data set."""
    written(tmp_path / "state.json", '{"_data_files": 3}')
    with pytest.raises(ConfigError, match=r"state\.json: not the state of a data set"):
        load_prompts(tmp_path)
