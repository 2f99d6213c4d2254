"""``rollouts play``: play one prompt and watch it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from rollouts.commands.arguments import add_target, add_verb, in_loop, target_of
from rollouts.commands.chat_options import CHAT_PROVIDER
from rollouts.commands.target import RunTarget, open_target
from rollouts.concurrency.boundary import boundary, function_name
from rollouts.dtypes import Prompt
from rollouts.errors import GenerateFailure, RewardFailure
from rollouts.recipe import Recipe, preflight
from rollouts.training.scoring import score
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory
from rollouts.views.terminal.console import SafeConsole
from rollouts.views.terminal.transcript import heading, pieces_of, pieces_table, transcript, visible

__all__ = ["add", "play_one"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "play", _play, "play one prompt and print its turns", "play calculator")
    add_target(parser)
    parser.add_argument("--text", metavar="PROMPT", help="prompt to play (default: the recipe's first)")


def _play(args: argparse.Namespace) -> int:
    in_loop(play_one, target_of(args), args.text, SafeConsole())
    return 0


async def play_one(target: RunTarget, text: str | None, console: Console) -> None:
    """Play one prompt and print each turn when it ends.

    Raises:
        RolloutsError: the target cannot be opened, or the rollout failed.
    """
    async with open_target(target) as (recipe, _):
        await preflight(recipe)
        prompt = recipe.data_buffer.get_prompts(1)[0] if text is None else Prompt(text, group_index=0)
        sample = await _play_rollout(recipe, attrs.evolve(prompt, index=0), console)
        if not recipe.config.group_rm:  # a group's reward needs the group
            try:
                await score(sample, recipe.config.reward_fn, seconds=recipe.config.reward_seconds)
            except RewardFailure as error:
                console.print(Text(visible(f"no reward: {error}"), "yellow"), soft_wrap=True)
        console.print(heading(sample), soft_wrap=True)
        if target.provider == CHAT_PROVIDER:
            from rollouts.commands.chat_target import cost_of  # here: most plays are on a server of tokens

            console.print(Text(visible(cost_of(recipe))), soft_wrap=True, highlight=False)


async def _play_rollout(recipe: Recipe, prompt: Prompt, console: Console) -> Sample:
    """Play a rollout; print it turn by turn if the generate function takes ``on_step``, else at its end."""
    generate_fn: Callable[..., Any] = recipe.config.generate_fn
    decode = None if recipe.tokenizer is None else recipe.renderer().decode
    printed = 0
    watched: Trajectory | None = None

    def on_step(trajectory: Trajectory) -> None:
        nonlocal printed, watched
        assert decode is not None, "a generate function of tokens"
        if trajectory is not watched:  # the first, or a branch: print its history again
            watched, printed = trajectory, 0
        pieces = [piece for piece in pieces_of(trajectory.completions, len(trajectory)) if piece.start >= printed]
        columns = (trajectory.tokens, trajectory.logprobs, trajectory.versions)
        console.print(pieces_table(pieces, *columns, decode, trajectory.images))
        printed = len(trajectory)

    parameters = inspect.signature(generate_fn).parameters.values()
    takes_it = any(each.name == "on_step" or each.kind is each.VAR_KEYWORD for each in parameters)
    # A program's calls are a tree, seen at its end; a chat API has no tokens to watch.
    live = takes_it and recipe.environment_cls is not None and decode is not None
    with boundary(GenerateFailure, f"generate_fn {function_name(generate_fn)}", seconds=recipe.config.rollout_seconds):
        samples: list[Sample] = await (generate_fn([prompt], on_step=on_step) if live else generate_fn([prompt]))
    if not live or not printed:
        for sample in samples:
            console.print(transcript(sample, decode))
    return samples[-1]
