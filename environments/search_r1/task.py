"""The task: one assistant turn in which the model thinks, searches and answers between tags.

Invariant: an episode sees the retriever and nothing else. Results are text in the model's own turn; an answer in tags
ends the episode. The texts of the environment, ids included, equal those of Search-R1 and of slime's example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from rollouts.base.validators import is_int
from rollouts.dtypes import Message, Prompt, as_messages
from rollouts.environments.base import StepResult
from rollouts.environments.single_turn import SingleTurnEnvironment
from rollouts.errors import ConfigError
from rollouts.recipes.environments.search.index import Document
from rollouts.recipes.environments.search_r1.retrieval import Retrieve
from rollouts.rewards import exact_match
from rollouts.rewards.answers import final_reply, tagged_text
from rollouts.training import Sample
from rollouts.training.prompt_files import Columns, rows_of

__all__ = ["STOP", "SearchR1Environment", "instructed", "load_search_r1", "search_r1_reward"]

STOP = ("</search>", "</answer>")
"""The stop strings of a completion."""

_INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
"""The prompt of Search-R1's data, as it is there."""
_INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_OPENING = re.compile(r"<(search|answer)>")
_EXPECTED = "prompt or question, and label, golden_answers, answer or reward_model.ground_truth.target"


class SearchR1Environment(SingleTurnEnvironment):
    """Search results between tags; bind the retriever with ``functools.partial(SearchR1Environment, index.find)``.

    Args:
        retrieve: finds documents.
        top: number of documents of a search.
    """

    def __init__(self, retrieve: Retrieve, *, top: int = 3) -> None:
        super().__init__()
        if not is_int(top, 1):
            raise ConfigError.of("SearchR1Environment.top", top, "an integer >= 1")
        self.retrieve = retrieve
        self.top = top

    async def step(self, reply: Message) -> StepResult:
        action = _action(f"{reply.reasoning or ''}{reply.text}")
        if action is None:
            return StepResult(continuation=_INVALID, metrics={"invalid_actions": 1})
        if action[0] == "answer":
            return StepResult(done=True)
        found = await self.retrieve(action[1].strip(), self.top)
        text = f"\n\n<information>{_shown(found).strip()}</information>\n\n"
        return StepResult(continuation=text, metrics={"searches": 1})


def _action(text: str) -> tuple[str, str] | None:
    """The first tag that is closed, and the text in it; an opening that a model repeats is read once."""
    unclosed: set[str] = set()
    for opening in _OPENING.finditer(text):
        if opening[1] not in unclosed:
            end = text.find(f"</{opening[1]}>", opening.end())
            if end >= 0:
                return opening[1], text[opening.end() : end]
            unclosed.add(opening[1])
    return None


def _shown(found: Sequence[Document]) -> str:
    return "".join(f"Doc {number}(Title: {entry.title}) {entry.text}\n" for number, entry in enumerate(found, 1))


def instructed(question: str) -> str:
    """The prompt of Search-R1 for a question."""
    return _INSTRUCTION.format(question=question)


def load_search_r1(source: str, *, limit: int | None = None, **columns: Unpack[Columns]) -> list[Prompt]:
    """Load questions whose label is the list of right answers; a question without messages gets the instruction.

    Args:
        source: as for :func:`~rollouts.training.prompt_files.rows_of`, e.g.
            ``hub:PeterJinGo/nq_hotpotqa_train/train.parquet``.
        limit: number of questions to take, from the start.
        columns: names of the columns, as for :func:`rollouts.training.load_prompts`.

    Raises:
        ConfigError: a missing file, a failed download, or a row of another shape, with its number.
    """
    prompts: list[Prompt] = []
    for place, row in rows_of(source, **columns):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(_prompt(row, place))
    if not prompts:
        raise ConfigError.of("data", source, "at least one row")
    return prompts


def _prompt(row: Any, place: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise ConfigError.of(place, row, f"an object with {_EXPECTED}")
    asked = row.get("prompt", row.get("question"))
    given = (row.get("label"), row.get("reward_model"), row.get("golden_answers"), row.get("answer"))
    answers = next((_answers(value) for value in given if value is not None), [])
    if not asked or not answers or not all(answers):
        raise ConfigError.of(place, sorted(row), _EXPECTED)
    try:
        return Prompt(as_messages(instructed(asked) if isinstance(asked, str) else asked), answers)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _answers(value: Any) -> list[str]:
    """The right answers of a label: text, several texts, or an object of Search-R1's data that contains them."""
    for name in ("ground_truth", "target"):
        value = value.get(name) if isinstance(value, Mapping) and name in value else value
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return [str(text).strip() for text in (value if several else [value])]


def search_r1_reward(sample: Sample) -> float:
    """1.0 if the last answer in tags is one of the label's, without case, articles and punctuation; else 0.0."""
    exact: Any = exact_match(sample)  # also checks the label of a reply without an answer
    return 0.0 if tagged_text(final_reply(sample)) is None else float(exact)
