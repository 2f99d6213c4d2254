"""``rollouts serve``: run the embedded engine alone, until a signal or the end of standard input."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from rollouts.base.terminal import say
from rollouts.commands.arguments import INTERRUPTED, add_verb, in_loop, port, positive, stop_signals
from rollouts.concurrency.interrupts import handling_interrupts
from rollouts.concurrency.task_groups import first_error
from rollouts.engine.process import READY
from rollouts.http.access import is_loopback

__all__ = ["add", "key_for", "serve_until_stopped"]

HOST = "address to listen on (default: 127.0.0.1); a public one needs a key in ROLLOUTS_API_KEY"


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "serve", _serve, "start the embedded engine as a server", "serve --port 30000")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of a causal LM (default: the demo model)")
    parser.add_argument("--host", default="127.0.0.1", help=HOST)
    parser.add_argument("--port", type=port, default=30000, help="0 picks a free port (default: 30000)")
    parser.add_argument("--slots", type=positive, metavar="N", help="concurrent requests (default: 64)")
    parser.add_argument(
        "--max-context", type=positive, metavar="N", help="most tokens of prompt plus reply (default: the model's)"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="weight dtype (default: float32)"
    )
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop at the end of standard input")


def _serve(args: argparse.Namespace) -> int:
    from rollouts.engine import DEMO_MODEL, serve  # here: without the engine's extra only this verb fails

    async def engine(on_ready: Callable[[str], None]) -> None:
        model = DEMO_MODEL if args.model is None else args.model
        options = {} if args.slots is None else {"slots": args.slots}
        await serve(
            model,
            args.host,
            args.port,
            max_context=args.max_context,
            dtype=args.dtype,
            api_key=key_for(args.host),
            on_ready=on_ready,
            **options,
        )

    return in_loop(serve_until_stopped, engine, args.stop_with_stdin)


def key_for(host: str) -> str | None:
    """The key of a server: ROLLOUTS_API_KEY on a public address, none on a loopback address."""
    return None if is_loopback(host) else os.environ.get("ROLLOUTS_API_KEY")


async def serve_until_stopped(serve: Callable[[Callable[[str], None]], Awaitable[None]], stop_with_stdin: bool) -> int:
    """Serve until a signal or, with ``stop_with_stdin``, the end of standard input; return the exit code.

    The next signal of the kind ends the process at once.
    """
    code, scope, loop = 0, anyio.CancelScope(), asyncio.get_running_loop()

    def stop(exit_code: int) -> None:
        nonlocal code
        code = exit_code
        scope.cancel()

    def on_signal(exit_code: int) -> Callable[[], object]:
        return functools.partial(loop.call_soon_threadsafe, stop, exit_code)

    async def standard_input() -> None:
        descriptor = sys.stdin.fileno()  # no reading in a thread: a blocked thread would outlive the server
        with contextlib.suppress(PermissionError):  # a file or /dev/null cannot be polled: it counts as ended
            while True:
                await anyio.wait_readable(descriptor)
                if not os.read(descriptor, 4096):
                    break
        scope.cancel()

    def ready(url: str) -> None:
        say(f"{READY}{url}", flush=True)

    interrupt, *others = stop_signals()
    interrupts = handling_interrupts(on_signal(INTERRUPTED), signals=(interrupt,))
    with interrupts, handling_interrupts(on_signal(0), signals=others), scope:
        async with first_error() as tasks:
            if stop_with_stdin:
                tasks.start_soon(standard_input)
            await serve(ready)
            tasks.cancel_scope.cancel()
    return code
