"""``rollouts serve-env``: serve a recipe's environment over the Open Reward Standard."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import anyio

from rollouts.base.extras import install_command
from rollouts.commands.arguments import add_options, add_recipe, add_verb, all_options_of, in_loop, port
from rollouts.commands.serve import HOST, key_for, serve_until_stopped
from rollouts.dtypes import Endpoint
from rollouts.errors import ConfigError
from rollouts.recipe.files import build, load_recipe

__all__ = ["add"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    does = "serve a recipe's environment (Open Reward Standard)"
    parser = add_verb(verbs, "serve-env", _serve_env, does, "serve-env calculator")
    add_recipe(parser)
    add_options(parser, "--data", "--seed", "--set")
    parser.add_argument("--split", default="train", metavar="NAME", help="split name of its prompts (default: train)")
    parser.add_argument("--host", default="127.0.0.1", help=HOST)
    parser.add_argument("--port", type=port, default=8080, help="0 picks a free port (default: 8080)")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop at the end of standard input")


def _serve_env(args: argparse.Namespace) -> int:
    try:
        from rollouts.integrations.ors_server.app import environment_server  # here: aiohttp is part of an extra
    except ImportError as error:
        raise ConfigError(f"serve-env needs aiohttp: {install_command('serve')} ({error})") from error
    recipe = build(load_recipe(args.recipe), Endpoint(), all_options_of(args))

    async def environment(on_ready: Callable[[str], None]) -> None:
        options = {"host": args.host, "port": args.port, "split": args.split, "api_key": key_for(args.host)}
        async with environment_server(recipe, **options) as url:
            on_ready(url)
            await anyio.sleep_forever()

    return in_loop(serve_until_stopped, environment, args.stop_with_stdin)
