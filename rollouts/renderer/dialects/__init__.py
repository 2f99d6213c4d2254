"""Parsers from assistant text to tool calls, one dialect a file. Token ids are never built from their results."""

from typing import TYPE_CHECKING

from rollouts.base.lazy_face import lazy_face

if TYPE_CHECKING:
    from rollouts.renderer.dialects.base import Dialect, Reply, parse_stopped, thought_marks
    from rollouts.renderer.dialects.registry import DIALECTS, dialect_of_template, get_dialect

__all__ = ["DIALECTS", "Dialect", "Reply", "dialect_of_template", "get_dialect", "parse_stopped", "thought_marks"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "rollouts.renderer.dialects.base": ("Dialect", "Reply", "parse_stopped", "thought_marks"),
        "rollouts.renderer.dialects.registry": ("DIALECTS", "dialect_of_template", "get_dialect"),
    },
)
