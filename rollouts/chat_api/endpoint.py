"""The endpoint of a chat API: its URL, its model, its key and its prices.

Invariant: it is an :class:`Endpoint` whose provider is ``openai``, so that it holds sampling parameters as any other;
a client that sends token ids refuses it by its provider.
"""

from __future__ import annotations

import os
from typing import Any

import attrs

from rollouts.base.validators import check, number
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError

__all__ = ["OPENAI_URL", "ChatEndpoint", "Prices", "key_of"]

OPENAI_URL = "https://api.openai.com/v1"
AT_ONCE = 32
"""Requests in flight, unless the endpoint says otherwise."""


@attrs.frozen
class Prices:
    """Dollars for a million tokens."""

    input: float = attrs.field(validator=number(least=0))
    output: float = attrs.field(validator=number(least=0))
    """Also of reasoning tokens, which an API counts among the tokens of the reply."""

    def dollars(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The price of one reply."""
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


@attrs.frozen
class ChatEndpoint(Endpoint):
    """A model behind a chat API.

    ``base_url`` is the URL before ``/chat/completions``; ``concurrency`` the most requests in flight, 32 by default,
    which rate limits lower; ``max_retries`` those of a request that fails; ``outage_seconds`` the longest wait for a
    rate limit.
    """

    provider: Any = attrs.field(default="openai", validator=check('"openai"', lambda v: v == "openai"))
    key_variable: str | None = None
    """The environment variable that the key is from, for messages."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if len(self.base_url) != 1:
            raise ConfigError.of("ChatEndpoint.base_url", self.base_url, "one URL")
        if self.concurrency == "adaptive":
            raise ConfigError.of("ChatEndpoint.concurrency", self.concurrency, "an integer >= 1, or None")

    @property
    def url(self) -> str:
        """The URL of requests."""
        return f"{self.base_url[0]}/chat/completions"

    @property
    def at_once(self) -> int:
        """The most requests in flight."""
        return self.concurrency if isinstance(self.concurrency, int) else AT_ONCE


def key_of(variable: str, *, required: bool) -> str | None:
    """The API key of an environment variable.

    Raises:
        ConfigError: the variable is not set, and a key is required.
    """
    key = os.environ.get(variable, "").strip()
    if not key and required:
        raise ConfigError.of("--api-key-env", variable, "an environment variable that is set")
    return key or None
