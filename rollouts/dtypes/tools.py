"""The tools that a model was shown, as the text by which samples name them.

Invariant: equal tools in one order give equal texts, so that a run stores them once. This module knows no sample.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from rollouts.base.storable import to_json
from rollouts.dtypes.messages import Tool

__all__ = ["tools_json"]


def tools_json(tools: Sequence[Tool]) -> str:
    """The tools as a JSON list in chat format; ``[]`` without any."""
    known, text = _last[0]
    if len(known) != len(tools) or not all(map(operator.is_, known, tools)):
        text = to_json([tool.to_chat() for tool in tools]).decode()
        _last[0] = tuple(tools), text
    return text


_last: list[tuple[tuple[Tool, ...], str]] = [((), "[]")]
