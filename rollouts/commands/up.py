"""``rollouts up``: run a recipe as a service, whose groups a trainer leases over HTTP.

Invariant: the command continues the run that is in its folder. It says where it serves once recipe and folder are
accepted. Requests of trainers are answered with 503 until its first workers have started. This module knows neither the
routes nor the leases.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import attrs

from rollouts import __version__
from rollouts.base.extras import install_command
from rollouts.base.terminal import say
from rollouts.commands.arguments import (
    add_target,
    add_verb,
    at_least_0,
    in_loop,
    port,
    positive,
    target_of,
    worker_range,
)
from rollouts.commands.chat_options import CHAT_PROVIDER
from rollouts.commands.run import description_of, in_workers
from rollouts.commands.serve import serve_until_stopped
from rollouts.commands.target import ENGINE_LOG, RunTarget, open_target
from rollouts.distributed.join import recipe_sha256
from rollouts.distributed.messages import check_plain
from rollouts.errors import ConfigError
from rollouts.inference.pauses import watch_pauses
from rollouts.inference.shared import shared_policies
from rollouts.inference.weights import update_weights
from rollouts.recipe import Recipe, preflight
from rollouts.recipe.files import absolute
from rollouts.service import leased_run
from rollouts.service.fed_buffer import FedBuffer, fed_recipe
from rollouts.training.manager import AsyncRolloutManager
from rollouts.training.rows import NO_IDS

if TYPE_CHECKING:
    from rollouts.distributed.joined import JoinedWorkers

__all__ = ["KEY", "add"]

KEY = "ROLLOUTS_SERVICE_KEY"
"""The variable with the service's key."""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "up", _up, "serve a recipe's groups to a trainer, which leases them", "up calculator --out runs/a"
    )
    add_target(parser, chat=False)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the run; a run that is there is continued"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"address to listen on (default: 127.0.0.1); a public one needs {KEY}"
    )
    parser.add_argument("--port", type=port, default=8700, help="0 picks a free port (default: 8700)")
    parser.add_argument("--batches", type=positive, metavar="N", help="number of batches (default: the recipe's)")
    parser.add_argument(
        "--groups-in-work", type=positive, metavar="N", help="most groups ready or leased (default: two batches)"
    )
    parser.add_argument(
        "--max-staleness", type=at_least_0, metavar="N", help="drop groups that are more than N versions old"
    )
    parser.add_argument(
        "--fed", action="store_true", help="play prompts that clients give, in place of the recipe's data"
    )
    parser.add_argument(
        "--allow-changes", action="store_true", help="continue the run of DIR with other settings, and record them"
    )
    players = parser.add_mutually_exclusive_group()
    players.add_argument(
        "--workers", type=worker_range, metavar="N", help="play in N processes of this machine; MIN:MAX begins with MIN"
    )
    players.add_argument(
        "--remote-workers",
        type=worker_range,
        metavar="N",
        help="play in N workers that join over HTTP, by rollouts work --join; MIN:MAX begins with MIN",
    )
    parser.add_argument(
        "--per-worker",
        type=positive,
        default=64,
        metavar="N",
        help="rollouts of a worker, for workers_wanted (default: 64)",
    )
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop at the end of standard input")


def _up(args: argparse.Namespace) -> int:
    if args.provider == CHAT_PROVIDER:
        raise ConfigError(f"up --provider openai: {NO_IDS}; rollouts run --provider openai --text stores text for SFT")
    try:
        import aiohttp  # noqa: F401 - part of an extra; refused before an engine starts
    except ImportError as error:
        raise ConfigError(f"up needs aiohttp: {install_command('serve')} ({error})") from error
    return in_loop(serve_until_stopped, functools.partial(_serve, args), args.stop_with_stdin)


async def _serve(args: argparse.Namespace, on_ready: Callable[[str], None]) -> None:
    from rollouts.service.server import Service, serving  # here: aiohttp is part of an extra

    service = Service(facts={"run": str(args.out)})
    joined: JoinedWorkers | None = None
    if args.remote_workers is not None:
        from rollouts.distributed.joined import JoinedWorkers  # here: aiohttp is part of an extra

        joined = JoinedWorkers(per_worker=args.per_worker)
        service.routes, service.numbers = joined.routes, joined.numbers
    target, sha256 = target_of(args), ""
    if joined is not None and target.recipe is not None:
        sha256 = await anyio.to_thread.run_sync(recipe_sha256, target.recipe)  # before it is imported
    tell = functools.partial(say, file=sys.stderr, flush=True)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(service, args.host, args.port, os.environ.get(KEY)))
        recipe, engine = await stack.enter_async_context(open_target(target, args.out / ENGINE_LOG, tell))
        recipe.check_spread()
        _check_groups_in_work(args.groups_in_work, recipe.config.batch_size)
        played = fed_recipe(recipe) if args.fed else recipe
        server = await preflight(recipe)
        recipe = played
        service.fed = recipe.data_buffer if isinstance(recipe.data_buffer, FedBuffer) else None
        description = await anyio.to_thread.run_sync(description_of, target, recipe, server)
        service.publish = functools.partial(_publish, recipe.endpoint)
        if joined is not None:
            await anyio.to_thread.run_sync(check_plain, recipe.data_buffer.prompts)
            if recipe.endpoint.priority:
                expected = "False with --remote-workers: the requests of workers on a network have no priorities"
                raise ConfigError.of("Endpoint.priority", True, expected)
            joined.facts = _facts(target, recipe, sha256)

        @contextlib.asynccontextmanager
        async def players() -> AsyncIterator[Recipe]:
            on_ready(url)  # the folder is open, and workers may join
            async with _players(args, target, recipe, joined, url) as (played, numbers):
                service.numbers = numbers or service.numbers
                yield played

        options: Mapping[str, Any] = {"groups_in_work": args.groups_in_work, "max_staleness": args.max_staleness}
        options = {**options, "description": description, "allow_changes": args.allow_changes}
        service.leases = await stack.enter_async_context(
            leased_run(args.out, recipe, watch=_watch, trains_here=False, players=players, **options)
        )
        stack.callback(setattr, service, "leases", None)  # from here on 503: the trainer waits for the next process
        tell(f"run: {recipe.name}, {recipe.batches} batches of {recipe.config.batch_size} groups, in {args.out}")
        if engine is not None:
            raise await engine.death()
        await anyio.sleep_forever()


@contextlib.asynccontextmanager
async def _players(
    args: argparse.Namespace, target: RunTarget, recipe: Recipe, joined: JoinedWorkers | None, url: str
) -> AsyncIterator[tuple[Recipe, Callable[[], Mapping[str, float]] | None]]:
    """Start the workers, if any; yields the recipe that plays in them, and the gauges of local ones."""
    if joined is not None:
        first = f"workers: waiting for the first of {args.remote_workers}: rollouts work --join {url}"
        say(first, file=sys.stderr, flush=True)
        async with joined.dispatcher(args.remote_workers) as workers:
            yield attrs.evolve(recipe, config=workers.config(recipe.config), lifetime=None), None
    elif args.workers is not None:
        async with in_workers(args.workers, target, recipe) as (config, workers):
            yield attrs.evolve(recipe, config=config, lifetime=None), workers.numbers  # its rollouts are not here
    else:
        yield recipe, None


def _check_groups_in_work(groups: int | None, batch_size: int) -> None:
    """Refuse fewer groups than the lease of a whole batch needs, see :meth:`Leases.take`; raises ConfigError."""
    least = 2 * batch_size - 1
    if groups is not None and groups < least:
        expected = f"at least {least}, 2 * batch_size - 1: with fewer, a batch of {batch_size} cannot be leased whole"
        raise ConfigError.of("--groups-in-work", groups, expected)


def _facts(target: RunTarget, recipe: Recipe, sha256: str) -> dict[str, Any]:
    """The recipe and servers of workers; see :class:`rollouts.distributed.join.Facts`."""
    assert target.recipe is not None, "the recipe was built from a file"
    endpoint = recipe.endpoint
    servers = {"provider": endpoint.provider, "model": endpoint.model, "base_url": endpoint.base_url}
    source = {"recipe": str(absolute(target.recipe)), "sha256": sha256, "options": target.options}
    return {"version": __version__, **source, **servers}


async def _publish(endpoint: Any, folder: str, version: str, while_running: Any) -> None:
    await update_weights(endpoint, folder, version, while_running=while_running or "retract")


async def _watch(manager: AsyncRolloutManager) -> None:
    await watch_pauses(shared_policies)
