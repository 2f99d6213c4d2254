"""What a dialect is: one way in which models write tool calls, read strictly and for meaning only.

Invariant: every block that looks like a call becomes a ToolCall, sound or with ``error`` set; nothing is repaired,
nothing is dropped, and what stands inside reasoning is never a call. No token id is ever made from what is read here.
This module knows no tokenizer and no template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import attrs

from rollouts.dtypes import Tool, ToolCall

__all__ = ["BlockDialect", "Dialect", "Reply"]


@attrs.frozen
class Reply:
    """The text of one assistant turn, taken apart."""

    content: str
    """What is neither reasoning nor a call; text after the last call included."""
    reasoning: str | None = None
    """What stood in the thinking block; ``None`` when there was no such block."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls in the order in which they were written, malformed ones among them."""


class Dialect(Protocol):
    """Text of an assistant turn to its meaning."""

    name: ClassVar[str]

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        """Read one turn, without its stop token.

        Args:
            text: the decoded reply, special tokens written out.
            tools: what the model was told of; dialects that write values untyped take the types from here.
            reasoning_open: whether the prompt ended inside a thinking block. ``None``: not known, and then a
                ``</think>`` that nothing opened ends one.
        """
        ...


class BlockDialect:
    """A dialect whose calls stand in blocks of text with an opening mark.

    A subclass gives ``block``, a pattern that runs from the opening mark to the closing one or, where that is missing,
    to the end of the text, and :meth:`read`.
    """

    name: ClassVar[str]
    block: ClassVar[re.Pattern[str]]
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts with one of which each block begins; none where one may begin in another way. They go with ``block``."""
    reasoning: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "block" in vars(cls) and "marks" not in vars(cls):
            cls.marks = ()

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        """The calls of one block; at least one, malformed when nothing can be made of it."""
        raise NotImplementedError

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        """The calls of one block and the place behind it, for blocks whose end only reading them tells."""
        return self.read(block, tools), block.end()

    def first(self, text: str, at: int) -> re.Match[str] | None:
        """The first block from a place on."""
        if self.marks:  # to look for these first is many times as fast
            places = [place for mark in self.marks if (place := text.find(mark, at)) >= 0]
            if not places:
                return None
            at = min(places)
        return self.block.search(text, at)

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        opening, closing = self.reasoning
        thoughts: list[str] = []
        said: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if reasoning_open is None:
            end = text.find(closing)
            reasoning_open = end >= 0 and opening not in text[:end]
        if reasoning_open and not text.lstrip().startswith(opening):
            thought, at = _up_to(text, closing, 0)
            thoughts.append(thought)
        # From left to right: a call quoted in a thought is no call, a thought quoted in an argument no thought. What is
        # found further on is kept, so that a reply that says one mark over and over is not searched over and over.
        think, block = text.find(opening, at), self.first(text, at)
        while at < len(text):
            if 0 <= think < at:
                think = text.find(opening, at)
            if block is not None and block.start() < at:
                block = self.block.search(text, at)
            if think >= 0 and (block is None or think < block.start()):
                said.append(text[at:think])
                thought, at = _up_to(text, closing, think + len(opening))
                thoughts.append(thought)
            elif block is not None:
                said.append(text[at : block.start()])
                found, end = self.take(block, tools)
                calls.extend(found)
                at = max(end, at + 1)
            else:
                said.append(text[at:])
                break
        if not thoughts and not calls:
            return Reply(text)
        return Reply(
            content="\n".join(part.strip() for part in said if part.strip()),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def _up_to(text: str, mark: str, at: int) -> tuple[str, int]:
    """The text from ``at`` to the mark, and the place behind the mark; without one, all of it."""
    end = text.find(mark, at)
    return (text[at:end], end + len(mark)) if end >= 0 else (text[at:], len(text))
