"""Parsers from assistant text to tool calls, one dialect a file. Token ids are never built from their results."""

from rollouts.tool_calls.base import Dialect, Reply, parse_stopped, thought_marks
from rollouts.tool_calls.registry import DIALECTS, dialect_of_template, get_dialect

__all__ = ["DIALECTS", "Dialect", "Reply", "dialect_of_template", "get_dialect", "parse_stopped", "thought_marks"]
