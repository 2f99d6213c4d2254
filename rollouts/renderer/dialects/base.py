"""The dialect protocol: a strict parser for one notation of tool calls, and a base class for block notations.

Invariant: every block that looks like a call becomes a ToolCall, valid or with ``error`` set. Nothing is repaired or
dropped, and text inside reasoning is never a call. No token id is ever built from a parsed reply.
This module does not know tokenizers or templates.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import attrs

from rollouts.dtypes import Tool, ToolCall

__all__ = ["BlockDialect", "Dialect", "Reply", "parse_stopped", "thought_marks"]


@attrs.frozen
class Reply:
    """The parts of the text of one assistant turn."""

    content: str
    """The text outside of reasoning and calls, also after the last call."""
    reasoning: str | None = None
    """The text of the thinking blocks; ``None`` if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in the order of the text, malformed ones included."""


class Dialect(Protocol):
    """A parser for the assistant turns of a model family."""

    name: ClassVar[str]

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        """Parse one turn, without its stop token.

        Args:
            text: the decoded reply, with special tokens as text.
            tools: the tools in the prompt; dialects with untyped values take the types from their schemas.
            reasoning_open: whether the prompt ends inside a thinking block. ``None``: unknown; then a ``</think>``
                without an opening mark ends one.
        """
        ...


def thought_marks(dialect: Dialect) -> tuple[str, str]:
    """The marks around a thinking block: the dialect's ``reasoning``, by default ``<think>`` and ``</think>``."""
    marks: tuple[str, str] = getattr(dialect, "reasoning", ("<think>", "</think>"))
    return marks


def parse_stopped(
    dialect: Dialect,
    text: str,
    stop: str,
    *,
    tools: Sequence[Tool] = (),
    reasoning_open: bool | None = None,
    prefix: str = "",
) -> Reply:
    """Parse one turn that ended with a stop token.

    The stop token belongs to the last call if it is the mark that closes it. It also stands for the mark
    ``stop_replaces`` of a dialect whose calls are complete without it: servers run such a call.

    Args:
        dialect: the dialect.
        text: the reply without its stop token.
        stop: the stop token as text; empty if the reply has none.
        tools: the tools in the prompt.
        reasoning_open: whether the prompt ends inside a thinking block; ``None``: unknown.
        prefix: the end of the prompt, for a dialect with ``reads_prefix``.
    """
    parse = functools.partial(dialect.parse, tools=tools, reasoning_open=reasoning_open)
    if getattr(dialect, "reads_prefix", False):
        parse = functools.partial(parse, prefix=prefix)
    reply = parse(text)
    if not stop or not reply.tool_calls or reply.tool_calls[-1].fault != "unclosed":
        return reply
    last = reply.tool_calls[-1]
    for mark in dict.fromkeys((stop, getattr(dialect, "stop_replaces", ""))):
        closed = parse(text + mark)
        if mark and closed.tool_calls and closed.tool_calls[-1].error is None:
            raw = closed.tool_calls[-1].raw if mark == stop else last.raw
            return attrs.evolve(
                closed, tool_calls=(*closed.tool_calls[:-1], attrs.evolve(closed.tool_calls[-1], raw=raw))
            )
    return reply


class BlockDialect:
    """A dialect whose calls are blocks of text with an opening mark.

    A subclass defines :meth:`read` and ``block``, a pattern from the opening mark to the closing mark or, if that is
    missing, to the end of the text.
    """

    name: ClassVar[str]
    block: ClassVar[re.Pattern[str]]
    marks: ClassVar[tuple[str, ...]] = ()
    """Each block begins with one of these marks; empty if a block may begin otherwise. They belong to ``block``."""
    reasoning: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    wrapping: ClassVar[tuple[str, ...]] = ()
    """Marks around the text for the user; they are removed from the content."""
    stop_replaces: ClassVar[str] = ""
    """The mark that may be missing after a complete call that a stop token ends; empty if it must be there."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "block" in vars(cls) and "marks" not in vars(cls):
            cls.marks = ()

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        """The calls of one block: at least one, malformed if the block cannot be parsed."""
        raise NotImplementedError

    def take(self, block: re.Match[str], tools: Sequence[Tool]) -> tuple[Iterable[ToolCall], int]:
        """The calls of one block and its end position, for notations in which only parsing finds the end."""
        return self.read(block, tools), block.end()

    def first(self, text: str, at: int) -> re.Match[str] | None:
        """The first block at or after a position."""
        if self.marks:  # str.find is many times as fast as the pattern
            positions = [position for mark in self.marks if (position := text.find(mark, at)) >= 0]
            if not positions:
                return None
            at = min(positions)
        return self.block.search(text, at)

    def parse(self, text: str, *, tools: Sequence[Tool] = (), reasoning_open: bool | None = None) -> Reply:
        opening, closing = self.reasoning
        thoughts: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if reasoning_open is None:
            end = text.find(closing)
            reasoning_open = end >= 0 and opening not in text[:end]
        if reasoning_open and not text.lstrip().startswith(opening):
            thought, at = _up_to(text, closing, 0)
            thoughts.append(thought)
        # From left to right: marks of calls inside a thought do not count, nor marks of thoughts inside an argument.
        # Marks found further on are remembered, so that a reply that repeats one mark is parsed in linear time.
        think, block = text.find(opening, at), self.first(text, at)
        while at < len(text):
            if 0 <= think < at:
                think = text.find(opening, at)
            if block is not None and block.start() < at:
                block = self.block.search(text, at)
            if think >= 0 and (block is None or think < block.start()):
                content.append(text[at:think])
                thought, at = _up_to(text, closing, think + len(opening))
                thoughts.append(thought)
            elif block is not None:
                content.append(text[at : block.start()])
                block_calls, end = self.take(block, tools)
                calls.extend(block_calls)
                at = max(end, at + 1)
            else:
                content.append(text[at:])
                break
        shown = "\n".join(part.strip() for part in content if part.strip()) if thoughts or calls else text
        plain = shown
        for mark in self.wrapping:
            plain = plain.replace(mark, "")
        if not thoughts and not calls:
            return Reply(plain if plain == text else plain.strip())
        return Reply(
            content=plain if plain == shown else plain.strip(),
            reasoning="\n".join(thought.strip() for thought in thoughts) if thoughts else None,
            tool_calls=tuple(calls),
        )


def _up_to(text: str, mark: str, at: int) -> tuple[str, int]:
    """The text from ``at`` to the mark, and the position after the mark; the rest of the text if there is no mark."""
    end = text.find(mark, at)
    return (text[at:end], end + len(mark)) if end >= 0 else (text[at:], len(text))
