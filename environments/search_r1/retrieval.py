"""Retrieval over HTTP, in the format of Search-R1's retrieval server.

Invariant: a search returns documents or raises; a server that does not answer is never a search without results.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollouts.errors import ConfigError, EnvironmentFailure
from rollouts.recipes.environments.search.index import Document
from rollouts.rewards.http import Poster

__all__ = ["RetrievalServer", "Retrieve"]

Retrieve = Callable[[str, int], Awaitable[Sequence[Document]]]
"""Returns at most so many documents for a query, best first."""


class RetrievalServer:
    """A :data:`Retrieve` that posts ``{"queries": [query], "topk": count, "return_scores": false}``.

    Args:
        url: e.g. ``http://HOST:8000/retrieve``.
        seconds: deadline of one search, including retries.
        at_once: maximum number of concurrent searches.

    Raises:
        ConfigError: an invalid argument.
    """

    def __init__(self, url: str, *, seconds: float = 60.0, at_once: int = 256) -> None:
        self._post = Poster(url, seconds=seconds, at_once=at_once)

    def __repr__(self) -> str:
        return f"<RetrievalServer {self._post.place}>"

    async def __call__(self, query: str, count: int) -> list[Document]:
        """The documents of one query; the first line of ``contents`` is the title."""
        answer = await self._post({"queries": [query], "topk": count, "return_scores": False}, "search")
        try:
            (found,) = answer["result"]
            contents = [(entry.get("document") or entry)["contents"] for entry in found]
            return [_document(number, text) for number, text in enumerate(contents)]
        except (AttributeError, KeyError, TypeError, ValueError):
            expected = 'a search\'s {"result": [[{"document": {"contents": "TITLE\\nTEXT"}}, …]]}'
            error = ConfigError.of(f"the response of {self._post.place}", answer, expected)
            raise EnvironmentFailure(str(error)) from None


def _document(number: int, contents: Any) -> Document:
    title, _, text = contents.partition("\n")
    return Document(str(number), title, text)
