"""The rehearsal of a run: up to three episodes with random replies, with their reward and filter, then each tool once.

Invariant: no prompt is taken, nothing is stored or counted, and no server is asked. A rehearsal refuses a run only if
every episode, or every call of a tool, fails for the same reason, or a server of rewards is away; not for different
failures or slow episodes.

This module rehearses recipes of agents; it does not know other generate functions.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import attrs

from rollouts.commands.metric_reads import ReadNames
from rollouts.concurrency.boundary import function_name
from rollouts.concurrency.deadlines import pauses
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Message, Prompt, Tool
from rollouts.environments.base import Environment, EnvironmentFactory
from rollouts.errors import ConfigError, Failure, GenerateFailure, RewardFailure, at
from rollouts.recipe import Recipe
from rollouts.renderer import Renderer
from rollouts.testing.policy import ScriptedPolicy
from rollouts.testing.random_replies import RandomModel
from rollouts.training.agent_integration import generate_rollout_batch
from rollouts.training.config import RolloutConfig
from rollouts.training.failures import FailureStats, same_cause
from rollouts.training.group_runner import GroupRunner
from rollouts.training.rollout_attempt import attempt, ends, is_lost, number_sample
from rollouts.training.scoring import score, score_group
from rollouts.training.types import GenerateFn, Sample

__all__ = ["rehearse"]

_SECONDS, _POLL_SECONDS = 30.0, 0.1
_NEVERTHELESS = "--no-rehearsal starts the run nevertheless"
_SHARE_OF_CALLS = (0.9, 0.9, 0.0)
"""How often the replies of each episode call a tool; the last episode shows a tool that fails on random arguments."""


async def rehearse(recipe: Recipe) -> list[str]:
    """Play the first prompts of a recipe with random replies, score them, apply the filter, and call each tool.

    Returns:
        Doubtful points that do not refuse the run, each as one line.

    Raises:
        GenerateFailure: every episode, or every call of a tool, failed for the same reason, which the message has; or a
            server of rewards is away.
        ConfigError: prompts lack the label that their reward needs; a tool has no description; a
            function of the recipe, its template or its tokenizer is invalid.
    """
    generate_fn = recipe.config.generate_fn
    if not isinstance(generate_fn, functools.partial) or generate_fn.func is not generate_rollout_batch:
        return []
    from rollouts.commands.recipe_doubts import doubts_of, shared_lengths  # here: a resumed run has no rehearsal
    from rollouts.commands.tool_calls import check_tools  # here: a resumed run, and one of programs, calls no tool

    factory: EnvironmentFactory = generate_fn.keywords["environment_cls"]
    shared = shared_lengths(factory)

    renderer = await anyio.to_thread.run_sync(recipe.renderer)
    prompts = list(itertools.islice(itertools.cycle(recipe.data_buffer.prompts), len(_SHARE_OF_CALLS)))
    read = ReadNames()
    sound = None
    with anyio.move_on_after(_SECONDS), at("the rehearsal"):
        async with first_error() as tasks:
            tasks.start_soon(_refuse_waits)
            replies = functools.partial(_with_random_replies, generate_fn, renderer, read)
            sound = await _played_one(recipe, prompts, replies)
            if sound is not None:
                await _check_labels(recipe, sound)
            await check_tools(factory, prompts, generate_fn.keywords.get("limits"))
            tasks.cancel_scope.cancel()
    played = None if sound is None else sound[0]
    return [*read.doubts(), *doubts_of(recipe, played, renderer.stop_texts, shared, shared_lengths(factory))]


async def _refuse_waits() -> None:
    """End the rehearsal when a server of its rewards or tools is away, for which a run would wait."""
    while True:
        if found := pauses():
            raise GenerateFailure(f"the rehearsal waits: {found[0].what}. No prompt was taken; {_NEVERTHELESS}")
        await anyio.sleep(_POLL_SECONDS)


async def _played_one(
    recipe: Recipe, prompts: Sequence[Prompt], with_replies: Callable[[RandomModel], Any]
) -> list[Sample] | None:
    """The samples of the first episode that goes well; ``None`` if each fails for another reason.

    Raises:
        GenerateFailure: all fail for the same reason.
    """
    failures: list[Failure] = []
    for seed, (prompt, calls) in enumerate(zip(prompts, _SHARE_OF_CALLS, strict=True)):
        config = attrs.evolve(recipe.config, generate_fn=with_replies(RandomModel(seed, calls=calls)))
        failure, samples = await _played(config, attrs.evolve(prompt, group_index=0, index=0))
        if failure is None:
            return samples
        failures.append(failure)
    if len({same_cause(failure) for failure in failures}) > 1:
        return None
    first = failures[0]
    if first.kind == RewardFailure.__name__ and all(prompt.label is None for prompt in prompts):
        labelled = attrs.evolve(prompts[-1], label="0", group_index=0, index=0)
        other, _ = await _played(config, labelled)
        if other is None or same_cause(other) != same_cause(first):
            raise _no_label(recipe, first.message)
    raise GenerateFailure(
        f"{len(failures)} of {len(failures)} rehearsals with random replies failed alike: {first.kind}: "
        f"{first.message}. No prompt was taken; {_NEVERTHELESS}"
    )


async def _check_labels(recipe: Recipe, samples: Sequence[Sample]) -> None:
    """Score a sound rollout again as that of a prompt without a label, if only some of the prompts have one."""
    prompts, reward_fn = recipe.data_buffer.prompts, recipe.config.reward_fn
    missing = [number for number, prompt in enumerate(prompts) if prompt.label is None]
    if reward_fn is None or not missing or len(missing) == len(prompts):
        return
    first = prompts[missing[0]]
    scored = [copy.deepcopy(sample) for sample in ends(samples)]
    for sample in scored:
        sample.label, sample.prompt, sample.metadata = None, first.prompt, dict(first.metadata)
    try:
        if recipe.config.group_rm:
            await score_group(scored, reward_fn, seconds=recipe.config.reward_seconds)
        else:
            await score(scored[-1], reward_fn, seconds=recipe.config.reward_seconds)
    except RewardFailure as error:
        raise _no_label(recipe, str(error)) from error


def _no_label(recipe: Recipe, why: str) -> ConfigError:
    """The error of a reward that needs the label that some prompts, or all, do not have."""
    labels = [prompt.label for prompt in recipe.data_buffer.prompts]
    missing = sum(label is None for label in labels)
    column = "; load_prompts(label=NAME) names its column" if missing == len(labels) else ""
    return ConfigError(
        f"prompts[{labels.index(None)}].label: got None, as {missing} of {len(labels)} prompts; expected a label: "
        f"{why}{column}; {_NEVERTHELESS}"
    )


async def _played(config: RolloutConfig, request: Prompt) -> tuple[Failure | None, list[Sample]]:
    """Play, score and filter one rollout, as a group of copies; return why that failed, and the samples."""
    samples = await attempt(config, request)
    if not is_lost(samples):
        group = tuple(_copies(samples, config.n_samples_per_prompt))
        runner = GroupRunner(config, FailureStats(None, 1), None, {}, lambda: False)
        await runner.score_and_filter(request, group)
        samples = list(group)
    return next((sample.failure for sample in samples if sample.failure is not None), None), samples


def _copies(samples: Sequence[Sample], count: int) -> list[Sample]:
    numbered = [(sample, Prompt("", group_index=0, index=number)) for number in range(count) for sample in samples]
    return [number_sample(copy.deepcopy(sample), place) for sample, place in numbered]


def _with_random_replies(
    generate_fn: functools.partial[Any], renderer: Renderer, read: ReadNames, model: RandomModel
) -> GenerateFn:
    """The generate function with a policy that replies at random, with calls of the environment's tools."""
    factory: EnvironmentFactory = generate_fn.keywords["environment_cls"]
    created: list[Environment] = []

    def create() -> Environment:
        created.append(factory())
        return created[-1]

    def reply(_: object) -> Sequence[int]:
        tools = tuple(created[-1].tools)
        return _reply_tokens(renderer, model.reply(tools), tools)

    create.__name__ = function_name(factory)
    play = functools.partial(generate_fn, environment_cls=create, policy=ScriptedPolicy(reply))

    async def generate(prompts: Sequence[Prompt]) -> list[Sample]:
        samples: list[Sample] = await play(prompts)
        for sample in samples:
            sample.metrics = read.of(sample.metrics)
        return samples

    return generate


def _reply_tokens(renderer: Renderer, reply: Message, tools: Sequence[Tool]) -> list[int]:
    """A reply as the chat template writes it; its text alone where the template writes no such reply."""
    question = [Message("user", "?")]
    try:
        before = renderer.render(question, tools)
        whole = renderer.render([*question, reply], tools, generation_prompt=False)
    except ConfigError:
        before = whole = ""
    text = whole.removeprefix(before) if before and whole.startswith(before) else reply.text
    ids = [int(token) for token in renderer.encode(text)]
    ends = [number for number, token in enumerate(ids) if token in renderer.stop_token_ids]
    return ids[: ends[0] + 1] if ends else [*ids, *renderer.stop_token_ids[:1]]
