"""Shared by several dialects: sections of several calls, and arguments in tags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from rollouts.dtypes import Tool, ToolCall
from rollouts.renderer.dialects.base import BlockDialect
from rollouts.renderer.dialects.json import MalformedCallError, checked_arguments, json_value, unclosed, unreadable

__all__ = ["NumberedCalls", "SectionDialect", "section", "tagged_arguments"]


def section(begin: str, end: str, call: str) -> re.Pattern[str]:
    """A pattern for a section, from its mark to its end mark or the end of the text. A stray call begins one too."""
    begin, end, call = re.escape(begin), re.escape(end), re.escape(call)
    return re.compile(f"(?:{begin}|(?={call}))(?P<body>.*?)(?:{end}|\\Z)", re.DOTALL)


class SectionDialect(BlockDialect):
    """A dialect whose calls follow each other between two marks.

    A subclass defines ``block`` (from :func:`section`), :meth:`read_call`, :meth:`name_of`, and ``call``, a pattern
    whose group ``close`` is unset if the call's closing mark is missing.
    """

    call: ClassVar[re.Pattern[str]]
    closing: ClassVar[str]
    """The mark that closes a call."""

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        """Parse a closed call.

        Raises:
            MalformedCallError: the call is malformed.
        """
        raise NotImplementedError

    def name_of(self, call: re.Match[str]) -> str:
        """The name in a call that may be malformed, or ``""``."""
        raise NotImplementedError

    def read(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterable[ToolCall]:
        return list(self._calls(block, tools)) or [unreadable(block[0], MalformedCallError("there is no call in it"))]

    def _calls(self, block: re.Match[str], tools: Sequence[Tool]) -> Iterator[ToolCall]:
        body, at = block["body"], 0
        for call in self.call.finditer(body):
            yield from _stray(body[at : call.start()])
            at = call.end()
            if call["close"] is None:
                yield unclosed(call[0], self.closing, self.name_of(call))
                continue
            try:
                yield self.read_call(call, tools)
            except MalformedCallError as error:
                yield unreadable(call[0], error, self.name_of(call))
        yield from _stray(body[at:])


class NumberedCalls(SectionDialect):
    """A dialect whose calls have an id and JSON arguments: ``call`` has the groups ``id`` and ``arguments``."""

    about_name: ClassVar[str]
    """The error of a call without a name."""
    arguments_mark: ClassVar[str]
    """The mark before the arguments."""

    def read_call(self, call: re.Match[str], tools: Sequence[Tool]) -> ToolCall:
        name = self.name_of(call)
        if not name:
            raise MalformedCallError(self.about_name, "no_name")
        if call["arguments"] is None:
            raise MalformedCallError(f"{self.arguments_mark} and the arguments are missing", "no_arguments")
        return ToolCall(name, checked_arguments(json_value(call["arguments"])), id=call["id"].strip(), raw=call[0])


def _stray(text: str) -> Iterator[ToolCall]:
    if text.strip():
        yield unreadable(text, MalformedCallError("there is text between the calls that belongs to none"))


def tagged_arguments(pattern: re.Pattern[str], body: str) -> Iterator[re.Match[str]]:
    """Iterate over the arguments of a call that are each in a tag. The pattern has a group ``key``.

    Raises:
        MalformedCallError: there is other text between the arguments, or an argument occurs twice.
    """
    at = 0
    seen: set[Any] = set()
    while at < (end := len(body.rstrip())):
        at += len(body[at:end]) - len(body[at:end].lstrip())
        argument = pattern.match(body, at)
        if argument is None:
            raise MalformedCallError(f"this is not an argument with its tags: {body[at : at + 80]!r}", "bad_arguments")
        at = argument.end()
        if argument["key"] in seen:
            raise MalformedCallError(f'the argument "{argument["key"]}" is given more than once', "bad_arguments")
        seen.add(argument["key"])
        yield argument
