"""The embedded engine: a server of SGLang's protocol on torch and transformers, with a demo model of 0.7 MB.

It makes the whole way from prompt to batch testable without a GPU, and is exact before it is fast: the logprob of a
token is that of a teacher-forced forward pass of the same ids. Importing this package loads no torch; serving needs the
extra ``engine``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio

from rollouts.errors import ConfigError

__all__ = ["DEMO_MODEL", "running_server", "serve"]

DEMO_MODEL = Path(__file__).parent / "demo_model"
"""The folder of the demo model, which solves about a third of the calculator's problems."""


async def serve(
    model: Path, host: str = "127.0.0.1", port: int = 0, *, slots: int = 64, max_context: int | None = None,
    dtype: str = "float32", on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve a model folder until cancelled; ``on_ready`` gets the base URL. Arguments as :func:`running_server`."""
    async with running_server(model, host, port, slots=slots, max_context=max_context, dtype=dtype) as url:
        on_ready(url)
        await anyio.sleep_forever()


@contextlib.asynccontextmanager
async def running_server(
    model: Path, host: str = "127.0.0.1", port: int = 0, *, slots: int = 64, max_context: int | None = None,
    max_queued: int | None = None, health_seconds: float = 20.0, dtype: str = "float32",
    unflushed_updates: bool = False,
) -> AsyncIterator[str]:  # fmt: skip
    """Serve a model folder in this process while the context lasts; gives the base URL.

    Args:
        model: a local folder with a causal language model of transformers.
        host: the address to listen on.
        port: 0 takes a free one.
        slots: how many requests run at once; others wait.
        max_context: tokens of prompt and reply together; the positions of the model where not given.
        max_queued: how many requests may wait before others are answered with 503; no limit where not given.
        health_seconds: how long ``/health`` waits for a token.
        dtype: ``"float32"``, or ``"bfloat16"`` for half the memory: then a logprob depends, within its rounding, on
            the rows that it was computed beside.
        unflushed_updates: a fault, for tests: a weight update that finds requests running, and is sent without a pause,
            changes the weights, leaves the cache as it was, and answers 400. SGLang does so now and then.

    Raises:
        ConfigError: the extra ``engine`` is not installed, the folder does not load, or the address is taken.
    """
    if slots < 1:
        raise ConfigError.of("slots", slots, "at least 1")
    try:
        from rollouts.engine import server
    except ImportError as error:
        raise ConfigError(
            f'the engine needs torch and transformers: pip install "rollouts[engine]" ({error})'
        ) from error
    options = server.Options(slots, max_context, max_queued, health_seconds, dtype, unflushed_updates)
    async with server.running_server(Path(model), host, port, options) as url:
        yield url
