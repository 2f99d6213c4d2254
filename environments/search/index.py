"""Documents, and a BM25 index over them.

Invariant: the same query over the same documents returns the same results in the same order. An index is built once and
shared by all episodes; queries do not change it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs
import msgspec

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError

__all__ = ["Document", "Index", "load_documents"]

_WORD = re.compile(r"\w+")
_LARGE = 20_000
"""Number of documents from which queries run in a thread, because they would block the event loop."""


@attrs.frozen
class Document:
    """One searchable text."""

    id: str
    title: str
    text: str


class Index:
    """BM25 over titles and texts.

    Raises:
        ConfigError: no documents, or the extra ``search`` is missing.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        if not documents:
            raise ConfigError.of("documents", [], "at least one")
        if importlib.util.find_spec("bm25s") is None:
            raise ConfigError.of("the environment search", "no module bm25s", install_command("search"))
        self.documents = {document.id: document for document in documents}
        if len(self.documents) != len(documents):
            raise ConfigError.of("documents", f"{len(documents)} with {len(self.documents)} ids", "an id for each")
        self._order = list(documents)
        library: Any = importlib.import_module("bm25s")
        self._bm25 = library.BM25()
        self._bm25.index([_words(f"{entry.title} {entry.text}") for entry in documents], show_progress=False)
        self._known = set(self._bm25.vocab_dict)

    def __repr__(self) -> str:
        return f"<Index of {len(self._order)} documents>"

    def search(self, query: str, count: int) -> list[Document]:
        """The best ``count`` documents that share a word with the query, best first, ties in their own order."""
        words = [word for word in _words(query) if word in self._known]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
        return [self._order[number] for number in best[:count] if scores[number] > 0]

    async def find(self, query: str, count: int) -> list[Document]:
        """As :meth:`search`; in a thread if the collection is large."""
        if len(self._order) > _LARGE:
            return await anyio.to_thread.run_sync(self.search, query, count)
        return self.search(query, count)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def load_documents(path: str | Path) -> list[Document]:
    """Rows of a JSONL file: ``{"id": …, "title": …, "text": …}``.

    Raises:
        ConfigError: no such file, or a malformed row; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError.of("corpus", str(path), "a JSONL file that exists")
    documents = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
                documents.append(Document(str(row["id"]), str(row["title"]), str(row["text"])))
            except (msgspec.DecodeError, KeyError) as error:
                raise ConfigError(f'{path}, line {number}: {error}; expected {{"id", "title", "text"}}') from None
    if not documents:
        raise ConfigError.of("corpus", str(path), "at least one document")
    return documents
