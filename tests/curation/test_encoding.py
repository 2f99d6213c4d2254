"""Text of chat APIs as token rows of a student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.commands import main
from rollouts.curation import Selection, curate
from rollouts.curation.encoding import REFUSED, SPECIAL, Student
from rollouts.curation.rows import CUT, EXACT, TEXT, UNSAMPLED
from rollouts.dtypes import StopReason
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError
from rollouts.renderer import load_tokenizer
from rollouts.runs.writer import RunWriter
from rollouts.training import Sample
from rollouts.training.metrics import Accounting
from tests.chat_api.sums import tasks
from tests.trainer_samples import scored_groups

TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
)


def text_sample(index: int, reply: str = "The answer is 7.", **fields: Any) -> Sample:
    """A rollout of a chat API with one call."""
    prompt = tasks(1, index)[0]
    call = {"type": "function", "id": f"c{index}", "function": {"name": "add", "arguments": {"a": index}}}
    messages = [
        {"role": "user", "content": prompt.prompt},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": f"c{index}"},
        {"role": "assistant", "content": reply},
    ]
    source = {"provider": "openai", "url": "http://x/v1", "model": "large", "served": ["large-2026"]}
    values: dict[str, Any] = {"reward": 1.0, "metrics": {"replies": 2, "completion_tokens": 20}, "tools": TOOLS}
    return Sample(
        prompt=prompt.prompt, label=prompt.label, status="completed", stop_reason=StopReason.TASK_COMPLETED,
        group_index=index, index=index, rollout_id=index,
        **{"messages": messages, "metadata": {"chat_api": source}, **values, **fields},
    )  # fmt: skip


def stored(path: Path, samples: list[Sample]) -> Path:
    description = {"recipe": "test", "config": {"batch_size": len(samples), "n_samples_per_prompt": 1}}
    writer = RunWriter(path, description)
    writer.write_batch(samples, {})
    writer.finish("finished", Accounting(taken=len(samples), in_batch=len(samples)))
    return path


def test_labels_are_the_replies_as_the_students_template_writes_them(tmp_path: Path) -> None:
    """The prompt, the headers and the results of tools are not trained; the end of each reply is."""
    run = stored(tmp_path / "run", [text_sample(4)])
    (row,) = curate(run, "tokens", tokenizer=str(DEMO_MODEL))
    decode = load_tokenizer(DEMO_MODEL).decode
    assert [label for label in row["labels"] if label != -100] == [
        one for one, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100
    ]
    trained = decode([label for label in row["labels"] if label != -100])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>'
    assert trained == f"{call}The answer is 7.<|im_end|>"
    assert "<tool_response>\n7\n</tool_response>" in decode(row["input_ids"])
    assert (row["source"]["by"], row["source"]["encoded"]) == ("openai/large-2026", "text")


def test_exact_rows_and_text_are_never_in_one_data_set(tmp_path: Path) -> None:
    """With a tokenizer rollouts with sampled ids are refused and counted, without one text is."""
    exact = scored_groups(1, 2)
    for sample in exact:
        sample.reward = 1.0
    runs = [stored(tmp_path / "exact", exact), stored(tmp_path / "text", [text_sample(1), text_sample(2)])]
    selection = Selection(select="all")
    for tokenizer, reason, encoded in ((None, TEXT, "sampled"), (str(DEMO_MODEL), EXACT, "text")):
        curation = curate(runs, "tokens", selection, tokenizer=tokenizer)
        assert {row["source"]["encoded"] for row in curation} == {encoded}
        assert (curation.account.read, curation.account.written) == (4, 2)
        assert curation.account.refused == {reason: 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reply": "The answer <|im_end|> is 7."}, SPECIAL),
        ({"reply": "The answer is 7.<|endoftext|>"}, SPECIAL),
        ({"reply": "<|im_start|>user\nIs it 7?"}, SPECIAL),
        ({"metrics": {"replies": 2, "cut_replies": 1}}, CUT),
        ({"messages": [{"role": "assistant", "content": "7"}], "metrics": {"replies": 1}}, REFUSED),
        ({"metrics": {"replies": 1}}, UNSAMPLED),
    ],
)
def test_text_that_the_student_cannot_have_said_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """A special token or no end in a reply, no prompt, an example reply in the prompt: counted, and not repaired."""
    curation = curate(stored(tmp_path / "run", [text_sample(1, **changes)]), "tokens", tokenizer=str(DEMO_MODEL))
    assert list(curation) == []
    assert curation.account.refused == {reason: 1}


def test_equal_replies_are_duplicates_although_their_ids_differ(tmp_path: Path) -> None:
    """The ids of calls are random; other replies to the same task stay."""
    first, again, other = text_sample(1), text_sample(1), text_sample(1, reply="It is 7.")
    for number, sample in enumerate((first, again, other)):
        sample.index = sample.rollout_id = sample.group_index = number
        sample.messages[1]["tool_calls"][0]["id"] = f"other{number}"
    curation = curate(stored(tmp_path / "run", [first, again, other]), "chat")
    assert len(list(curation)) == 2
    assert curation.account.refused == {"exact duplicate of an earlier one": 1}


def test_a_rollout_of_two_runs_counts_once(tmp_path: Path) -> None:
    """The API's names of its replies say so: a copy, such as one of a rescored run, is not another try at its task."""
    source = {"provider": "openai", "model": "large", "replies": ["r1", "r2"]}
    first = text_sample(1, metadata={"chat_api": source})
    other = text_sample(1, "No.", reward=0.0, metadata={"chat_api": {**source, "replies": ["r3"]}})
    runs = [stored(tmp_path / "a", [first]), stored(tmp_path / "b", [first]), stored(tmp_path / "c", [other])]
    (row,) = curate(runs, "chat", Selection(where="pass_rate == 0.5 and n == 2"))
    assert row["source"]["run"].endswith("a")


@pytest.mark.parametrize("where", [None, "pass_rate == 0.5 and n == 2"])
def test_replies_whose_names_are_equal_by_chance_are_no_copies(where: str | None, tmp_path: Path) -> None:
    """Some servers number their replies up to 999 (Ollama): another reply, or one to another task, counts."""
    source = {"chat_api": {"provider": "openai", "model": "large", "replies": ["chatcmpl-7"]}}
    named = [text_sample(1), text_sample(1, "No.", reward=0.0), text_sample(2), text_sample(2, "No.", reward=0.0)]
    for sample in named:
        sample.metadata = source
    runs = [stored(tmp_path / str(number), [sample]) for number, sample in enumerate(named)]
    assert len(list(curate(runs, "chat", Selection(where=where)))) == 2


def test_a_tokenizer_is_for_token_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the card of encoded rows says what they are, and the command that makes them again."""
    run = stored(tmp_path / "run", [text_sample(1)])
    with pytest.raises(ConfigError, match="none without --to tokens"):
        curate(run, "chat", tokenizer=str(DEMO_MODEL))
    command = ["curate", str(run), "--to", "tokens", "--tokenizer", str(DEMO_MODEL)]
    assert main([*command, "--out", str(tmp_path / "sft"), "--format", "jsonl"]) == 0
    card = (tmp_path / "sft" / "README.md").read_text()
    assert "**encoded from text**" in card
    assert f"--tokenizer {DEMO_MODEL}" in card
    assert "1 in the data set" in capsys.readouterr().out


def test_a_conversation_without_a_reply_has_no_row() -> None:
    """Nor one whose replies follow each other, which the student would not have sampled so."""
    student = Student(str(DEMO_MODEL))
    twice = [{"role": "user", "content": "x"}, *[{"role": "assistant", "content": "y"}] * 2]
    assert student.encode([{"role": "user", "content": "x"}], "[]") == REFUSED
    assert student.encode(twice, "[]") == REFUSED
