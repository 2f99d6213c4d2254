"""Search: the results of the tools, a recorded search and its reward, and invalid files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.testing.playing import calling, play
from rollouts.training import Sample

pytest.importorskip("bm25s")

from rollouts.recipes.environments.search import (
    Document,
    Index,
    SearchEnvironment,
    load_documents,
    load_questions,
    made_up_world,
    search_reward,
)

DOCUMENTS = [
    Document("a", "Ada Renn", "Ada Renn works for Bell Works."),
    Document("b", "Bell Works", "Bell Works makes clocks in the town of Loria."),
    Document("c", "Loria", "Loria is a town on a river."),
]


async def test_a_recorded_search() -> None:
    """Two hops: find the person, read the firm, answer; the reward scores the answer."""
    replies = [calling("search", query="Ada Renn", count=1), calling("read", id="b"), "The answer is Loria."]
    played = await play(SearchEnvironment(Index(DOCUMENTS)), "In which town is the employer of Ada Renn?", replies)
    assert [message.content for message in played.messages if message.role == "tool"] == [
        "[a] Ada Renn: Ada Renn works for Bell Works.",
        "Bell Works\nBell Works makes clocks in the town of Loria.",
    ]
    assert played.done
    assert search_reward(Sample(messages=played.chat, label="loria")) == 1.0
    assert search_reward(Sample(messages=played.chat, label="Bell")) == 0.0
    assert search_reward(Sample(messages=played.chat, label="Loria town"), partial_credit=0.5) == pytest.approx(1 / 3)


async def test_a_missing_document_is_a_message() -> None:
    """A missing document is an error message to the model, not a failure of the environment."""
    calls = [calling("search", query="zebra"), calling("read", id="z"), calling("search", query="town", count=99)]
    played = await play(SearchEnvironment(Index(DOCUMENTS)), "?", calls)
    found = [message.content for message in played.messages if message.role == "tool"]
    assert found[0] == "Nothing found."
    assert found[1].startswith("Error: there is no document 'z'")
    assert found[2].startswith("Error: count is 99")


def test_the_generated_world_answers_its_questions() -> None:
    """The world is the same for the same seed; its documents lead to the label of every two-step question."""
    documents, questions = made_up_world(3)
    assert (documents, questions) == made_up_world(3)
    index = Index(documents)
    for question in questions:
        name = re.search(r"(?:Who does|employer of) (\w+ \w+)", str(question.prompt))
        assert name is not None
        person = next(found for found in index.search(name[1], 5) if found.title == name[1])
        firm = person.text.partition("works for ")[2].rstrip(".")
        assert question.label in (firm, *re.findall(r"\w+", index.search(firm, 1)[0].text))


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    """The error names the file and line, or the row."""
    path = tmp_path / "rows.jsonl"
    for text, words in (('{"id": 1}', "line 1: 'title'"), ("x", "line 1"), ("", "at least one document")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_documents(path)
    with pytest.raises(ConfigError, match="a JSONL file that exists"):
        load_documents(tmp_path / "none")
    path.write_text('{"prompt": "?", "label": []}')
    with pytest.raises(ConfigError, match="row 1: label: got"):
        load_questions(path)
    with pytest.raises(ConfigError, match="an id for each"):
        Index([DOCUMENTS[0], DOCUMENTS[0]])
    with pytest.raises(ConfigError, match="people: got 3"):
        made_up_world(0, people=3)
