"""The options of a chat API as values: what ``--provider openai`` and its arguments say.

This module knows no recipe and no API.
"""

from __future__ import annotations

from typing import Final

import attrs

__all__ = ["CHAT_PROVIDER", "OPENAI_KEY", "OPENAI_URL", "ChatOptions"]

CHAT_PROVIDER: Final = "openai"
"""The value of ``--provider`` for a chat API, which has no token ids."""
OPENAI_URL, OPENAI_KEY = "https://api.openai.com/v1", "OPENAI_API_KEY"


@attrs.frozen(kw_only=True)
class ChatOptions:
    """The options of a chat API, as on the command line; ``None`` for their defaults."""

    base_url: str | None = None
    key_variable: str | None = None
    price_in: float | None = None
    """Dollars for a million tokens, as ``price_out``."""
    price_out: float | None = None
    budget: float | None = None
    at_once: int | None = None
    body: tuple[str, ...] = ()
    """``NAME=JSON``."""
    send_reasoning: bool = False
