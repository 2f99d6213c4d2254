"""The folder of a curated data set, its card, and the verb that writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollouts.commands import main
from rollouts.curation import Selection, curate, write_folder
from rollouts.curation.rows import chat_messages
from rollouts.errors import ConfigError
from rollouts.runs.folder import read_rows
from rollouts.runs.writer import RunWriter
from tests.curation.branched_runs import TOOLS, random_run
from tests.stored_runs import edit_line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    random_run(tmp_path / "run", 2)
    return tmp_path / "run"


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [
        msgspec.json.decode(line)
        for file in sorted((folder / "data").glob("*.jsonl"))
        for line in file.read_bytes().splitlines()
    ]


def test_the_account_in_the_folder_is_that_of_its_rows(run: Path, tmp_path: Path) -> None:
    """C3 can be checked from the folder: rows and rollouts are those of the files, and the counts add up."""
    write_folder(curate(run), tmp_path / "out", format="jsonl")
    rows = rows_in(tmp_path / "out")
    facts = msgspec.json.decode((tmp_path / "out" / "curation.json").read_bytes())
    account = facts["account"]
    assert account["rows"] == len(rows)
    assert account["written"] == len({(row["source"]["run"], row["source"]["index"]) for row in rows})
    assert account["read"] == account["written"] + sum(account["refused"].values())
    assert account["trained"] == sum(label != -100 for row in rows for label in row["labels"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert facts["command"] in card
    assert f"| read | {account['read']} |" in card
    assert facts["runs"][0]["sha256"] in card


def test_files_are_split_by_size_and_are_the_same_rows(run: Path, tmp_path: Path) -> None:
    """Many small files have the rows of one."""
    write_folder(curate(run), tmp_path / "one", format="jsonl")
    write_folder(curate(run), tmp_path / "many", format="jsonl", shard_bytes=1000)
    assert len(list((tmp_path / "many" / "data").iterdir())) > 1
    assert rows_in(tmp_path / "one") == rows_in(tmp_path / "many")


@pytest.mark.parametrize("target", ["tokens", "chat", "pairs", "kto"])
def test_parquet_has_the_rows_of_jsonl(target: Any, run: Path, tmp_path: Path) -> None:
    """The values of both formats are equal."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow.parquet import read_table

    write_folder(curate(run, target), tmp_path / "lines", format="jsonl")
    write_folder(curate(run, target), tmp_path / "parquet", format="parquet")
    assert read_table(tmp_path / "parquet" / "data").to_pylist() == rows_in(tmp_path / "lines")


def test_other_rows_have_other_file_names(run: Path, tmp_path: Path) -> None:
    """``datasets`` caches by the names in the card: two folders of one name must not have the same."""
    for target, folder in (("tokens", "a"), ("chat", "b")):
        write_folder(curate(run, target), tmp_path / folder / "data")  # type: ignore[arg-type]
    one, two = ((tmp_path / folder / "data" / "README.md").read_text().splitlines()[5] for folder in "ab")
    assert one.strip().startswith("path: data/train-")
    assert one != two
    (file,) = (tmp_path / "a" / "data" / "data").iterdir()
    assert file.match(one.strip().removeprefix("path: "))


def test_chat_rows_have_the_tools_that_the_model_saw(run: Path, tmp_path: Path) -> None:
    """The schemas of the run, not a hash; a file names those of a run that has none."""
    for row in curate(run, "chat"):
        assert row["tools"] == TOOLS
        assert row["source"]["encoded"] == "text"
        assert [message["role"] for message in row["messages"]][:2] == ["system", "user"]
    file = tmp_path / "tools.json"
    file.write_text('[{"name": "other"}]')
    bare = tmp_path / "bare"
    _without_tools(run, bare)
    assert not list(curate(bare, "chat"))
    assert {row["tools"] for row in curate(bare, "chat", Selection(tools=file))} == {
        '[{"type":"function","function":{"name":"other"}}]'
    }


def test_calls_are_written_as_templates_render_them() -> None:
    """A template that takes arguments as text writes what it would write of an object: the form that models sample."""
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": '{"a":7,"b":"é"}'}}
    broken = {"type": "function", "id": "c", "function": {"name": "add", "arguments": '{"a":7'}}
    (row,) = chat_messages([{"role": "assistant", "content": "", "tool_calls": [call, broken]}])
    assert [one["function"]["arguments"] for one in row["tool_calls"]] == ['{"a": 7, "b": "é"}', '{"a":7']


def _without_tools(run: Path, bare: Path) -> None:
    writer = RunWriter(bare, format="jsonl")
    samples = [row.sample() for row in read_rows(run)]
    for sample in samples:
        sample.tools = None
    writer.write_batch(samples, {})
    writer.finish("finished")


@pytest.mark.parametrize("field", ["tokens", "loss_mask", "versions", "metrics", "status"])
def test_a_row_that_is_not_a_sample_is_named(field: str, run: Path) -> None:
    """A folder that a stranger made ends in one line with the file and the row, whatever is in it."""
    (file, *_) = sorted((run / "batches").glob("*.jsonl"))
    edit_line(file, 1, lambda row: row.update({field: [{"x": 1}, 7]}))
    with pytest.raises(ConfigError, match=rf"{file.name}, line"):
        list(curate(run, "tokens", Selection(select="all")))


def test_the_verb_writes_and_a_dry_run_does_not(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both print the same account."""
    arguments = ["curate", str(run), "--to", "tokens", "--where", "pass_rate in 0.1..0.9"]
    assert main([*arguments, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(dry)
    assert "refused: no verdict" in dry
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "out"), "--overwrite"]) == 0
    (tmp_path / "out" / "README.md").write_text("Mine.")
    assert main([*arguments, "--out", str(tmp_path / "out"), "--overwrite"]) == 2
    assert (tmp_path / "out" / "README.md").read_text() == "Mine."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--out"),
        (["--out", "o", "--dry-run"], "--dry-run"),
        (["--dry-run", "--where", "len(label)"], "--where"),
        (["--dry-run", "--not-in", "missing.jsonl"], "missing.jsonl"),
        (["--dry-run", "--tools", "missing.json"], "--tools"),
        (["--dry-run", "--select", "worst"], "--select"),
    ],
)
def test_bad_options_are_one_line(
    run: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option, and nothing is written."""
    assert main(["curate", str(run), "--to", "tokens", *options]) == 2
    assert words in capsys.readouterr().err


def test_nothing_left_is_an_error_with_the_reasons(run: Path, tmp_path: Path) -> None:
    """An empty data set is not written; the message says where the rollouts are."""
    with pytest.raises(ConfigError, match=r"not in --where.*at least one row"):
        write_folder(curate(run, "tokens", Selection(where="turns > 100")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_held_out_prompts_are_in_no_row(run: Path, tmp_path: Path) -> None:
    """``--not-in`` takes a file and a run; their tasks are in no row, and are counted."""
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"question": "Question 1  and more and more ", "answer": 3}) + "\n")
    rows = list(curate(run, "tokens", Selection(select="all")))
    curation = curate(run, "tokens", Selection(select="all", not_in=[file]))
    kept = {row["source"]["task"] for row in curation}
    assert len({row["source"]["task"] for row in rows} - kept) == 1
    assert curation.account.refused["overlap with held-out texts"] > 0
    assert not list(curate(run, "tokens", Selection(select="all", not_in=[run])))
