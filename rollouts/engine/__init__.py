"""The embedded engine: a server of SGLang's protocol on torch and transformers, with a demo model of 0.7 MB.

It makes the full path from prompt to batch testable without a GPU. Exactness comes before speed: the logprob of a token
equals that of a teacher-forced forward pass of the same ids. Importing this package does not load torch; serving needs
the extra ``engine``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio

from rollouts.base.extras import install_command
from rollouts.errors import ConfigError

__all__ = ["DEMO_MODEL", "running_server", "serve"]

DEMO_MODEL = Path(__file__).parent / "demo_model"
"""Folder of the demo model. At temperature 1 it calls tools and solves about a third of the calculator's problems, so a
run shows episodes of several turns and groups with spread; greedy, it solves almost all of them."""


async def serve(
    model: Path, host: str = "127.0.0.1", port: int = 0, *, slots: int = 64, max_context: int | None = None,
    dtype: str = "float32", api_key: str | None = None, on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve a model folder until cancelled; ``on_ready`` gets the base URL. Arguments as :func:`running_server`."""
    async with running_server(
        model, host, port, slots=slots, max_context=max_context, dtype=dtype, api_key=api_key
    ) as url:
        on_ready(url)
        await anyio.sleep_forever()


@contextlib.asynccontextmanager
async def running_server(
    model: Path, host: str = "127.0.0.1", port: int = 0, *, slots: int = 64, max_context: int | None = None,
    max_queued: int | None = None, health_seconds: float = 20.0, keep_alive_seconds: float = 5.0,
    dtype: str = "float32", api_key: str | None = None, unflushed_updates: bool = False, stale_cache: bool = False,
    shared_prefixes: bool = False, reported_model: Path | None = None,
    original_logprobs: bool = False,
) -> AsyncIterator[str]:  # fmt: skip
    """Serve a model folder in this process while the context lasts; yields the base URL.

    Args:
        model: a local folder with a causal language model of transformers.
        host: the address to listen on; any but a loopback address needs a key.
        port: 0 selects a free port.
        slots: maximum number of concurrent requests; others wait.
        max_context: limit for prompt and reply together, in tokens; by default the model's positions.
        max_queued: maximum number of waiting requests, further ones get a 503; by default no limit.
        health_seconds: how long ``/health`` waits for a token.
        keep_alive_seconds: after how long an idle connection is closed.
        dtype: ``"float32"``, or ``"bfloat16"`` for half the memory; a logprob then depends, within its rounding, on the
            other rows of its batch.
        api_key: the key that every request must have, except requests of ``/health``.
        unflushed_updates: inject a fault for tests: a weight update without a pause while requests run changes the
            weights, does not flush the cache, and answers 400. SGLang does this occasionally.
        stale_cache: inject a fault for tests: a flush succeeds, and the cached prefixes stay.
        shared_prefixes: inject a fault for tests: ``extra_key`` is ignored.
        reported_model: inject a fault for tests: the server reports this folder, and serves ``model``.
        original_logprobs: inject a fault for tests: logprobs are those before the temperature, as from SGLang with
            ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``.

    Raises:
        ConfigError: the extra ``engine`` is not installed, the folder does not load, the address is not available, or
            it is public and there is no key.
    """
    if slots < 1:
        raise ConfigError.of("slots", slots, "at least 1")
    try:
        from rollouts.engine import server
        from rollouts.engine.frontend import Faults
    except ImportError as error:
        raise ConfigError(
            f"the engine needs torch, safetensors and aiohttp: {install_command('engine')} ({error})"
        ) from error
    faults = Faults(unflushed_updates, stale_cache, shared_prefixes, reported_model, original_logprobs)
    options = server.Options(slots, max_context, max_queued, health_seconds, dtype, keep_alive_seconds, faults, api_key)
    async with server.running_server(Path(model), host, port, options) as url:
        yield url
