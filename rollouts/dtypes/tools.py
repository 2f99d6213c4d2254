"""The tools that a model was shown, as the text by which samples name them.

Invariant: equal tools in one order give equal texts, so that a run stores them once. This module knows no sample.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollouts.base.storable import to_json
from rollouts.dtypes.messages import Tool

__all__ = ["tools_json"]


def tools_json(tools: Iterable[Tool]) -> str:
    """The tools as a JSON list in chat format; ``[]`` without any."""
    return to_json([tool.to_chat() for tool in tools]).decode()
