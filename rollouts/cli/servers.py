"""The verbs that serve until they are told to stop: the embedded engine, and a recipe's environment."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from rollouts.cli.words import (
    INTERRUPTED,
    add_verb,
    all_options_of,
    in_loop,
    positive,
)
from rollouts.dtypes import Endpoint
from rollouts.errors import RolloutsError
from rollouts.recipe import build, load_recipe
from rollouts.serving import READY
from rollouts.serving_environments import environment_server

__all__ = ["add_servers"]


def add_servers(verbs: Any) -> None:
    """Add them to the command line."""
    serve = add_verb(verbs, "serve", _serve, "run the embedded engine alone", "serve --port 30000")
    serve.add_argument("--model", type=Path, metavar="DIR", help="a folder with a causal LM (the demo model)")
    serve.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=30000, help="0 takes a free one (30000)")
    serve.add_argument("--slots", type=positive, metavar="N", help="requests that run at once")
    serve.add_argument("--max-context", type=positive, metavar="N", help="tokens of prompt and reply together")
    serve.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights (float32)")
    serve.add_argument("--stop-with-stdin", action="store_true", help="end when standard input does; for a parent")

    host = add_verb(
        verbs, "serve-env", _serve_env, "a recipe's environment as an ORS server", "serve-env configs/calculator.py"
    )
    host.add_argument("recipe", type=Path, metavar="RECIPE", help="a Python file with a function recipe(...)")
    host.add_argument("--data", type=Path, metavar="PATH", help="the recipe's option data")
    host.add_argument("--seed", type=int, metavar="N", help="the recipe's option seed")
    host.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of the recipe")
    host.add_argument("--split", default="train", metavar="NAME", help="what its prompts are called (train)")
    host.add_argument("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    host.add_argument("--port", type=int, default=8080, help="0 takes a free one (8080)")
    host.add_argument("--stop-with-stdin", action="store_true", help="end when standard input does; for a parent")


def _serve(args: argparse.Namespace) -> int:
    from rollouts.engine import DEMO_MODEL, serve  # here: its extra may be missing, and then only this verb is

    async def engine(on_ready: Callable[[str], None]) -> None:
        model = DEMO_MODEL if args.model is None else args.model
        options = {} if args.slots is None else {"slots": args.slots}
        await serve(
            model, args.host, args.port, max_context=args.max_context, dtype=args.dtype, on_ready=on_ready, **options
        )

    return in_loop(_until_told, engine, args.stop_with_stdin)


def _serve_env(args: argparse.Namespace) -> int:
    recipe = build(load_recipe(args.recipe), Endpoint(), all_options_of(args))

    async def environment(on_ready: Callable[[str], None]) -> None:
        async with environment_server(recipe, host=args.host, port=args.port, split=args.split) as url:
            on_ready(url)
            await anyio.sleep_forever()

    return in_loop(_until_told, environment, args.stop_with_stdin)


async def _until_told(serve: Callable[[Callable[[str], None]], Awaitable[None]], stop_with_stdin: bool) -> int:
    """Serve until a signal, or the end of standard input."""
    code = 0

    async def signals(scope: anyio.CancelScope) -> None:
        nonlocal code
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            async for number in received:
                code = INTERRUPTED if number == signal.SIGINT else 0
                scope.cancel()

    async def standard_input(scope: anyio.CancelScope) -> None:
        descriptor = sys.stdin.fileno()  # waited for, not read in a thread: a blocked thread would outlive the server
        with contextlib.suppress(PermissionError):  # a file or /dev/null cannot be waited for: it is at its end
            while True:
                await anyio.wait_readable(descriptor)
                if not os.read(descriptor, 4096):
                    break
        scope.cancel()

    def ready(url: str) -> None:
        print(f"{READY}{url}", flush=True)

    failure: RolloutsError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(signals, tasks.cancel_scope)
        if stop_with_stdin:
            tasks.start_soon(standard_input, tasks.cancel_scope)
        try:
            await serve(ready)
        except RolloutsError as error:  # not through the task group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return code
