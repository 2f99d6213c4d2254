"""The task: tools that find and read documents, questions with short answers, and a reward.

Invariant: an episode sees the index and nothing else; a reply without a tool call is the answer and ends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from rollouts.dtypes import Prompt
from rollouts.environments.base import ToolEnvironment, tool
from rollouts.errors import ConfigError, RewardFailure
from rollouts.recipes.environments.search.index import Index
from rollouts.rewards import exact_match, f1_score
from rollouts.rewards.rules import references
from rollouts.training import Sample, load_prompts
from rollouts.training.prompt_files import Columns

__all__ = ["SearchEnvironment", "load_questions", "search_reward"]

_SHOWN = 200
"""Characters of a document in a list of results."""
_MOST = 20


class SearchEnvironment(ToolEnvironment):
    """Two tools over an index; bind it with ``functools.partial(SearchEnvironment, index)``."""

    system_prompt = "Answer the question from the documents. Search and read, then finish with: The answer is X."

    def __init__(self, index: Index) -> None:
        self.index = index

    @tool
    async def search(self, query: str, count: int = 5) -> str:
        """Find documents by words, best first; gives their ids, titles and beginnings."""
        if not 1 <= count <= _MOST:
            raise ValueError(f"count is {count}; from 1 to {_MOST} is possible")
        found = await self.index.find(query, count)
        return "\n".join(f"[{entry.id}] {entry.title}: {entry.text[:_SHOWN]}" for entry in found) or "Nothing found."

    @tool
    def read(self, id: str) -> str:
        """Read a whole document by its id."""
        found = self.index.documents.get(id)
        if found is None:
            raise ValueError(f"there is no document {id!r}; ids are in the results of search")
        return f"{found.title}\n{found.text}"

    async def snapshot(self) -> None:
        """No state between steps."""

    async def restore(self, prompt: Prompt, snapshot: None) -> None:
        return None


def load_questions(path: str | Path, *, limit: int | None = None, **columns: Unpack[Columns]) -> list[Prompt]:
    """Load the rows of a JSONL file whose label is the answer, or a list of right answers.

    Raises:
        ConfigError: as :func:`rollouts.training.load_prompts`; or a row without an answer, with its number.
    """
    prompts = load_prompts(path, limit=limit, **columns)
    for number, prompt in enumerate(prompts, 1):
        try:
            references(Sample(label=prompt.label))
        except RewardFailure as error:
            raise ConfigError(f"{path}, row {number}: {error}") from None
    return prompts


def search_reward(sample: Sample, *, partial_credit: float = 0.0) -> float:
    """1.0 for an answer that is one of the label's, else ``partial_credit`` times the F1 score of the words."""
    exact: Any = exact_match(sample)
    return float(exact or partial_credit * f1_score(sample))
