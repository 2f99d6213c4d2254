"""Looking: at a stored run, and at one episode while it is played.

Invariant: it changes nothing on disk; what it shows is decoded from stored tokens wherever the tokenizer loads.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from rollouts.display import groups_table, samples_table
from rollouts.dtypes import Prompt
from rollouts.errors import ConfigError, GenerateFailure, RewardFailure, boundary, function_name
from rollouts.launching import Aim, aimed
from rollouts.recipe import Recipe, preflight
from rollouts.renderer import load_tokenizer
from rollouts.renderer.tokenizer import Codec
from rollouts.training.rewards import score
from rollouts.training.run_folder import Row, Which, read_info, read_rows
from rollouts.training.types import Sample
from rollouts.trajectory import Trajectory
from rollouts.transcript import heading, pieces_of, pieces_table, transcript, visible

__all__ = ["play_one", "show_run"]


def show_run(
    path: Path,
    console: Console,
    *,
    group: int | None = None,
    number: int | None = None,
    outcome: Which = "all",
    limit: int = 60,
    tokenizer: str | None = None,
) -> None:
    """Print a table of groups, of one group's samples, or one transcript.

    Args:
        path: the run's folder.
        console: where to.
        group: only this group.
        number: the transcript of one sample: its place in ``group`` from 0, or its ``index`` in the run.
        outcome: which groups.
        limit: groups in the table.
        tokenizer: instead of the one that the run names.

    Raises:
        ConfigError: no such run, group or sample.
    """
    info = read_info(path)
    groups: Iterator[list[Row]] = (
        list(rows) for _, rows in itertools.groupby(read_rows(path, outcome), lambda row: row.data.get("group_index"))
    )
    if group is not None:
        groups = (rows for rows in groups if rows[0].data.get("group_index") == group)
        members = next(groups, None)
        if members is None:
            raise ConfigError.of("--group", group, f"a group of {path} (rollouts show {path} lists them)")
        groups = iter([members])
    if number is not None:
        console.print(transcript(_sample(groups, group, number), _decoder(tokenizer or info.get("tokenizer"), console)))
        return
    shown = list(itertools.islice(groups, limit))
    if group is not None:
        console.print(samples_table(shown[0]))
        _say_next(path, group, console)
        return
    if not shown:
        console.print(Text(visible(f"{path} holds no groups of outcome {outcome}")), soft_wrap=True)
        return
    console.print(groups_table(shown))
    more = sum(1 for _ in groups)
    if more:
        console.print(f"... and {more} more: --limit", style="dim")
    _say_next(path, shown[0][0].data.get("group_index"), console)


def _say_next(path: Path, group: Any, console: Console) -> None:
    console.print(Text(visible(f"next: rollouts show {path} --group {group} --sample 0"), "dim"), soft_wrap=True)


def _sample(groups: Iterator[list[Row]], group: int | None, number: int) -> Sample:
    if group is None:
        for row in itertools.chain.from_iterable(groups):
            if row.data.get("index") == number:
                return row.sample()
        raise ConfigError.of("--sample", number, "the index of a sample of the run")
    (members,) = groups
    if not 0 <= number < len(members):
        raise ConfigError.of("--sample", number, f"0 to {len(members) - 1}, in group {group}")
    return members[number].sample()


def _decoder(tokenizer: Any, console: Console) -> Callable[[Any], str] | None:
    try:
        if not isinstance(tokenizer, str):
            raise ConfigError.of("tokenizer", tokenizer, "a name or a folder: --tokenizer gives one")
        return Codec(load_tokenizer(tokenizer, local_files_only=True)).decode  # a look must not wait for the network
    except ConfigError as error:
        console.print(Text(visible(f"messages instead of tokens: {error}"), "yellow"), soft_wrap=True)
        return None


async def play_one(aim: Aim, text: str | None, console: Console) -> None:
    """Play one prompt and print each turn when it is there.

    Raises:
        RolloutsError: something was wrong before it began, or it failed.
    """
    async with aimed(aim) as (recipe, _):
        await preflight(recipe)
        prompt = recipe.data_buffer.get_prompts(1)[0] if text is None else Prompt(text, group_index=0)
        sample = await _played(recipe, attrs.evolve(prompt, index=0), console)
        if not recipe.config.group_rm:  # a group's reward needs the group
            try:
                await score(sample, recipe.config.reward_fn, seconds=recipe.config.reward_seconds)
            except RewardFailure as error:
                console.print(Text(visible(f"no reward: {error}"), "yellow"), soft_wrap=True)
        console.print(heading(sample), soft_wrap=True)


async def _played(recipe: Recipe, prompt: Prompt, console: Console) -> Sample:
    """One rollout; shown turn by turn where the generate function tells of turns, else at its end."""
    generate_fn: Callable[..., Any] = recipe.config.generate_fn
    decode = recipe.renderer().decode
    shown = 0
    watched: Trajectory | None = None

    def on_step(trajectory: Trajectory) -> None:
        nonlocal shown, watched
        if trajectory is not watched:  # the first, or a branch: its history is shown as the model now sees it
            watched, shown = trajectory, 0
        pieces = [piece for piece in pieces_of(trajectory.calls, len(trajectory)) if piece.start >= shown]
        columns = (trajectory.tokens, trajectory.logprobs, trajectory.versions)
        console.print(pieces_table(pieces, *columns, decode))
        shown = len(trajectory)

    parameters = inspect.signature(generate_fn).parameters.values()
    live = any(each.name == "on_step" or each.kind is each.VAR_KEYWORD for each in parameters)
    with boundary(GenerateFailure, f"generate_fn {function_name(generate_fn)}", seconds=recipe.config.rollout_seconds):
        samples: list[Sample] = await (generate_fn([prompt], on_step=on_step) if live else generate_fn([prompt]))
    if not live or not shown:
        for sample in samples:
            console.print(transcript(sample, decode))
    return samples[-1]
