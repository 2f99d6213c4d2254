"""Rendering for callers on an event loop: in a worker thread where it takes long.

Invariant: at most two threads of an event loop render, because each thread that encodes keeps memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from rollouts.dtypes import Content, Message, TokenColumn, Tool
from rollouts.renderer.memory import BridgeMemory
from rollouts.renderer.renderer import Renderer

__all__ = ["bridged", "in_thread", "rendered"]

_LONG_TEXT = 8000
"""Characters from which rendering runs in a worker thread: some 2,000 tokens, 1 to 4 ms."""

_MANY_MESSAGES = 100
"""Number of messages from which their comparison counts as rendering them; long texts are shortened."""

Rendered = TypeVar("Rendered")


async def rendered(new: Sequence[Message], function: Callable[..., Rendered], *arguments: object) -> Rendered:
    """Call a rendering function, in a worker thread where the new messages are long or have images."""
    if sum([_length(message.content) for message in new]) < _LONG_TEXT:
        return function(*arguments)
    return await in_thread(function, *arguments)


def _length(content: Content) -> int:
    """Characters of the content; an image counts as a long text, because its processor takes 10 ms or more."""
    return len(content) if type(content) is str else _LONG_TEXT


async def in_thread(function: Callable[..., Rendered], *arguments: object) -> Rendered:
    """Call a rendering function in a worker thread."""
    return await anyio.to_thread.run_sync(function, *arguments, limiter=_threads())


async def bridged(
    renderer: Renderer,
    history: Sequence[Message],
    new: Sequence[Message],
    *,
    tools: Sequence[Tool],
    tail: TokenColumn,
    memory: BridgeMemory,
) -> TokenColumn:
    """Call :meth:`Renderer.bridge`, in a worker thread where it takes long.

    Raises:
        ConfigError: as :meth:`Renderer.bridge`.
    """
    compared = memory.compares_next and len(history) > _MANY_MESSAGES
    bridge = functools.partial(renderer.bridge, tools=tools, tail=tail, memory=memory)
    return await rendered([*history, *new] if compared else new, bridge, history, new)


_THREADS: RunVar[anyio.CapacityLimiter] = RunVar("rollouts_rendering_threads")


def _threads() -> anyio.CapacityLimiter:
    """The limiter of the event loop."""
    limiter = _THREADS.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(2)
        _THREADS.set(limiter)
    return limiter
