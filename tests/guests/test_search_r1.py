"""Search-R1: actions and texts of one turn, rows in the shapes of the data sets, retrieval, and the reward."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts.dtypes import Endpoint
from rollouts.engine import DEMO_MODEL
from rollouts.errors import ConfigError, EnvironmentFailure, RewardFailure
from rollouts.recipe.files import build, load_recipe
from rollouts.recipes.environments.search.index import Document
from rollouts.recipes.environments.search_r1 import (
    RetrievalServer,
    SearchR1Environment,
    instructed,
    load_search_r1,
    search_r1_reward,
)
from rollouts.testing.json_server import Asked, JsonServer
from rollouts.testing.playing import play
from rollouts.training import Sample

ROOT = Path(__file__).parents[2]
SUMS = Document("a", '"Sums"', "Two and two are 4.")


async def one(query: str, count: int) -> list[Document]:
    return [SUMS] * count if query == "2 + 2" else []


WORLD = partial(SearchR1Environment, one, top=2)


async def test_a_recorded_turn() -> None:
    """A search, a wrong action and an answer: one assistant message with the texts of Search-R1, and its reward."""
    replies = ["<think>I look.</think><search> 2 + 2 </search>", "Four.", "<answer> The 4 </answer>"]
    played = await play(WORLD(), instructed("2 + 2?"), replies)
    assert played.done
    found = '\n\n<information>Doc 1(Title: "Sums") Two and two are 4.\nDoc 2(Title: "Sums") Two and two are 4.'
    assert played.steps[0].continuation == f"{found}</information>\n\n"
    assert played.steps[1].continuation.startswith("\nMy previous action is invalid. If I want to search")
    assert [dict(step.metrics) for step in played.steps] == [{"searches": 1}, {"invalid_actions": 1}, {}]
    assert [message.role for message in played.messages] == ["user", "assistant"]
    assert search_r1_reward(Sample(messages=played.chat, label=["four", "4"])) == 1.0
    assert search_r1_reward(Sample(messages=played.chat, label=["5"])) == 0.0


async def test_a_search_without_results_is_an_empty_block() -> None:
    """The model reads that there is nothing."""
    played = await play(WORLD(), "?", ["<search>zebra</search>"])
    assert played.steps[0].continuation == "\n\n<information></information>\n\n"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("4", 0.0), ("<answer>3</answer> no, <answer>4</answer>", 1.0), ("<answer>4", 0.0), ("\\boxed{4}", 0.0)],
)
def test_only_an_answer_in_tags_counts(text: str, reward: float) -> None:
    """The last closed one is compared."""
    assert search_r1_reward(Sample(messages=[{"role": "assistant", "content": text}], label="4")) == reward


def test_a_label_is_needed() -> None:
    """A label that no answer could equal is a failure, also for a reply without an answer."""
    with pytest.raises(RewardFailure, match="label: got None"):
        search_r1_reward(Sample(messages=[{"role": "assistant", "content": "?"}]))


ROWS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"question": "Who?", "golden_answers": ["Ada", "A. Renn"]}, instructed("Who?"), ["Ada", "A. Renn"]),
    (
        {
            "prompt": [{"role": "user", "content": "Answer. Who?"}],
            "reward_model": {"ground_truth": {"target": ["Ada"]}, "style": "rule"},
        },
        "Answer. Who?",
        ["Ada"],
    ),
    ({"prompt": "Who?", "label": "Ada"}, instructed("Who?"), ["Ada"]),
]


def test_rows_in_each_shape(tmp_path: Path) -> None:
    """Search-R1's data and ours; only a question without messages gets the instruction."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row, _, _ in ROWS))
    prompts = load_search_r1(str(path))
    assert [(prompt.messages[0].content, prompt.label) for prompt in prompts] == [
        (text, answers) for _, text, answers in ROWS
    ]
    assert len(load_search_r1(str(path), limit=1)) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"question": "?"}', '{"question": "?", "answer": []}', '{"answer": "4"}'])
def test_invalid_rows_are_refused(text: str, tmp_path: Path) -> None:
    """The error names the row, before work starts."""
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"line 1: got|at least one row"):
        load_search_r1(str(path))


async def test_a_retrieval_server_is_asked_as_in_search_r1() -> None:
    """The request is Search-R1's, both forms of a document are read, and another response fails the step by name."""
    asked: list[Any] = []
    documents: list[Any] = [{"document": {"contents": '"Sums"\nTwo.\nFour.'}}, {"contents": "Odd"}]
    answer: dict[str, Any] = {"result": [documents]}

    def retrieve(request: Asked) -> Any:
        asked.append(request.body)
        return answer

    async with JsonServer(retrieve) as server:
        search = RetrievalServer(f"{server.url}/retrieve")
        assert await search("sums", 2) == [Document("0", '"Sums"', "Two.\nFour."), Document("1", "Odd", "")]
        assert asked == [{"queries": ["sums"], "topk": 2, "return_scores": False}]
        answer["result"] = "none"
        with pytest.raises(EnvironmentFailure, match=r"the response of http.*got .*none"):
            await search("sums", 2)


def test_the_sources_of_a_recipe_belong_together(tmp_path: Path) -> None:
    """Questions need documents, which come from one place."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0][0]))
    recipe = load_recipe(ROOT / "configs" / "search_r1.py")
    endpoint = Endpoint(model=str(DEMO_MODEL))
    for options in ({"data": rows}, {"corpus": rows}, {"retriever": "http://127.0.0.1:9"}):
        with pytest.raises(ConfigError, match="expected data and one of the others"):
            build(recipe, endpoint, {name: str(value) for name, value in options.items()})
    with pytest.raises(ConfigError, match="options corpus, retriever"):
        build(recipe, endpoint, {"data": str(rows), "corpus": str(rows), "retriever": "http://127.0.0.1:9"})
    made = build(recipe, endpoint, {"data": str(rows), "retriever": "http://127.0.0.1:9"})
    assert made.endpoint.sampling.stop == ("</search>", "</answer>")
    assert made.renderer().dialect.name == "plain"
    with pytest.raises(ConfigError, match=r"SearchR1Environment.top: got 0"):
        SearchR1Environment(one, top=0)
