"""The common part of the adapters: calls of foreign synchronous code, and an observation as a part of the prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import attrs

from rollouts.base.validators import finite
from rollouts.dtypes import Content, Message
from rollouts.errors import ConfigError

__all__ = ["call", "in_thread", "numbers_of", "with_content"]

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], /, *arguments: Any, **named: Any) -> Result:
    """Call a synchronous function in a worker thread; a cancelled call is abandoned, so that deadlines hold."""
    return await anyio.to_thread.run_sync(functools.partial(function, *arguments, **named), abandon_on_cancel=True)


async def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function: an ``async`` one in the event loop, another one in a worker thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    return await in_thread(function, *arguments, **named)


def with_content(messages: Sequence[Message], more: Content) -> Sequence[Message]:
    """The prompt with more at the end of its last user message; a separate message follows any other role."""
    if not more:
        return messages
    if not messages or messages[-1].role != "user":
        return (*messages, Message("user", more))
    content = messages[-1].content
    parts = (content,) if isinstance(content, str) else content
    first, *rest = (more,) if isinstance(more, str) else more
    first = f"\n\n{first}" if isinstance(first, str) and content else first
    return (*messages[:-1], attrs.evolve(messages[-1], content=(*parts, first, *rest)))


def numbers_of(values: Any, what: str) -> dict[str, float]:
    """The finite numbers of a mapping, as metrics; strings, lists and other values are left out.

    Raises:
        ConfigError: it is not a mapping.
    """
    if not isinstance(values, Mapping):
        raise ConfigError.of(what, values, "a mapping of names to values")
    return {str(name): number for name, value in values.items() if (number := finite(value)) is not None}
