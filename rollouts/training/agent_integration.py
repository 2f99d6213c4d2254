"""Generation of samples by an agent: a prompt and an environment class in, a sample out.

Invariant: one rollout for each prompt, in order: one sample, or one for each of its branches. A rollout whose
environment or reply fails is a sample with status FAILED; it raises no exception and does not affect other rollouts.

This module does not know groups, reward functions or batches.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Required, Unpack, get_args

import anyio
import anyio.to_thread
import attrs

from rollouts.agent.episode import OnStep
from rollouts.agent.loop import begin_episode, play_to_end
from rollouts.agent.prior_turns import PriorTurns
from rollouts.concurrency.task_groups import first_error
from rollouts.dtypes import Endpoint, Limits, Message, OnRewrite, Prompt, SamplingParams
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError
from rollouts.inference.base import Policy, describe_once
from rollouts.inference.policy import ServerPolicy
from rollouts.inference.resumable import ResumablePolicy
from rollouts.inference.shared import shared_policy
from rollouts.renderer import Renderer, RendererOptions, renderer_for, with_prompt_options
from rollouts.training.sample_validator import copied
from rollouts.training.samples import trajectory_to_samples
from rollouts.training.types import Sample

if TYPE_CHECKING:
    from rollouts.inference.reply_parts import Decode

__all__ = [
    "agent_rollout_to_sample",
    "agent_rollout_to_samples",
    "check_limits",
    "generate_all",
    "generate_rollout_batch",
    "loaded_renderer",
    "resuming",
]


async def agent_rollout_to_sample(prompt: Prompt | str | Sequence[Message | dict[str, Any]], **options: Any) -> Sample:
    """Run one agent in a fresh environment, and return its tokens as one sample.

    Args:
        prompt: text, messages, or a :class:`Prompt` with label and metadata.
        **options: as for :func:`agent_rollout_to_samples`, without ``history="fork"``.

    Returns:
        A sample whose ``tokens``, ``loss_mask`` and ``rollout_log_probs`` have one length.
    """
    if options.get("history") == "fork":
        raise ConfigError.of("history", "fork", '"append" or "error" here: agent_rollout_to_samples returns several')
    (sample,) = await agent_rollout_to_samples(prompt, **options)
    return sample


async def agent_rollout_to_samples(
    prompt: Prompt | str | Sequence[Message | dict[str, Any]],
    *,
    environment_cls: EnvironmentFactory,
    endpoint: Endpoint,
    tokenizer: Any,
    max_turns: int | None = None,
    limits: Limits | None = None,
    sampling: SamplingParams | None = None,
    policy: Policy | None = None,
    on_step: OnStep | None = None,
    history: OnRewrite = "append",
    prior: PriorTurns | None = None,
    **options: Unpack[RendererOptions],
) -> list[Sample]:
    """Run one agent in a fresh environment, and return the tokens that the model saw and sampled as samples.

    Args:
        prompt: text, messages, or a :class:`Prompt` with label and metadata. ``metadata["template_kwargs"]`` overrides
            variables of the chat template for this prompt.
        environment_cls: called without arguments to create the environment.
        endpoint: the inference server and its options.
        tokenizer: a transformers tokenizer, the name or folder of one, or a :class:`Renderer`.
        max_turns: short for ``limits=Limits(max_turns=…)``.
        limits: limits of the episode: turns, tokens, seconds.
        sampling: replaces ``endpoint.sampling``.
        policy: replaces the client of ``endpoint``, which all rollouts of one event loop share.
        on_step: callback that observes the trajectory as it grows.
        history: what to do where the chat template rewrites the history: keep the ids (``"append"``), continue in a new
            branch (``"fork"``), or fail the rollout (``"error"``).
        prior: a conversation to continue; see :func:`continue_rollout`.
        **options: options of the renderer: ``template_kwargs``, ``chat_template``, ``stop_token_ids``, and ``dialect``,
            the notation of tool calls (by default that of the chat template; ``"plain"`` parses no tool calls, and
            allows environments with tools nevertheless). ``images=True`` loads the model's processor, so that messages
            may have images.

    Returns:
        The rollout's branches as samples: one unless ``history`` is ``"fork"``. In each, ``tokens``, ``loss_mask`` and
        ``rollout_log_probs`` have one length. The reward is the sum of the environment's step rewards, ``None`` if
        there are none. A failed rollout has status FAILED and a ``failure``.

    Raises:
        ConfigError: the tokenizer, template, dialect or prompt is invalid, so that every rollout would fail.
        EndpointError: the server does not describe itself, or no server answers for too long.
    """
    if history not in get_args(OnRewrite):
        raise ConfigError.of("history", history, f"one of {get_args(OnRewrite)}")
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    label = copied(prompt.label)  # for the sample: an environment may change its label in place
    unedited = prompt if label is prompt.label else attrs.evolve(prompt, label=label)
    renderer = await loaded_renderer(tokenizer, with_prompt_options(options, prompt.metadata))
    client = policy if policy is not None else shared_policy(endpoint, renderer.vocab_size)
    episode = await begin_episode(
        prompt,
        resuming(client, renderer.decode, prompt.urgency),
        renderer,
        sampling=sampling or endpoint.sampling,
        limits=check_limits(limits, max_turns),
        max_context=(await describe_once(client)).max_context,
        on_step=on_step,
        history=history,
        prior=prior,
    )
    await play_to_end(episode, environment_cls)
    image_inputs = None if renderer.images is None else renderer.images.inputs
    return trajectory_to_samples(episode.branches, unedited, renderer.decode, image_inputs)


class AgentOptions(RendererOptions, total=False):
    """The arguments of :func:`agent_rollout_to_samples` that are the same for all prompts."""

    environment_cls: Required[EnvironmentFactory]
    endpoint: Required[Endpoint]
    tokenizer: Required[Any]
    max_turns: int | None
    limits: Limits | None
    sampling: SamplingParams | None
    policy: Policy | None
    on_step: OnStep | None
    history: OnRewrite


def generate_rollout_batch(
    prompts: Iterable[Prompt | str | Sequence[Message | dict[str, Any]]],
    *others: Never,
    **options: Unpack[AgentOptions],
) -> Coroutine[Any, Any, list[Sample]]:
    """Run :func:`agent_rollout_to_samples` with ``options`` for all prompts concurrently; await the result.

    With the options bound by ``functools.partial``, it is the ``generate_fn`` of a ``RolloutConfig``.

    Returns:
        One sample for each prompt, in order; several where a rollout forks.

    Raises:
        ConfigError: at the call, if it has the arguments of slime's function for ``--rollout-function-path``.
    """
    if others:  # slime does not await what it calls, so that an error of a coroutine would be lost
        expected = "prompts, and options by name; slime takes rollouts.integrations.slime.generate_rollout_batch"
        raise ConfigError.of("generate_rollout_batch", f"{1 + len(others)} arguments in order", expected)
    prompts = list(prompts)
    if len(prompts) == 1:  # as the manager calls it
        return agent_rollout_to_samples(prompts[0], **options)
    return generate_all(agent_rollout_to_samples, prompts, options)


async def generate_all(
    generate: Callable[..., Awaitable[list[Sample]]], prompts: Iterable[Any], options: Mapping[str, Any]
) -> list[Sample]:
    """The samples of one generate function for all prompts, which run concurrently, in the order of the prompts."""
    prompts = list(prompts)
    if len(prompts) == 1:  # as the manager calls it: the prompt has a task already
        return await generate(prompts[0], **options)
    samples: list[list[Sample]] = [[] for _ in prompts]

    async def run(number: int) -> None:
        samples[number] = await generate(prompts[number], **options)

    async with first_error() as rollouts:
        for number in range(len(prompts)):
            rollouts.start_soon(run, number)
    return list(itertools.chain.from_iterable(samples))


def resuming(policy: Policy, decode: Decode, urgency: Callable[[], int] | None = None) -> Policy:
    """The policy of one rollout. A server may abort a reply for an update of weights; its policy then continues it.

    ``decode`` returns the text of ids, special tokens included; ``urgency`` is that of the prompt.
    """
    return ResumablePolicy(policy.of_rollout(urgency), decode=decode) if isinstance(policy, ServerPolicy) else policy


_DEFAULT_LIMITS = Limits()


def check_limits(limits: Limits | None, max_turns: int | None) -> Limits:
    """The limits of an episode.

    Raises:
        ConfigError: both arguments are given, and differ.
    """
    if limits is None:
        return _DEFAULT_LIMITS if max_turns is None else Limits(max_turns=max_turns)
    if max_turns is not None and max_turns != limits.max_turns:
        raise ConfigError.of("max_turns", max_turns, f"nothing, since limits={limits} is given")
    return limits


async def loaded_renderer(tokenizer: Any, options: RendererOptions) -> Renderer:
    """Return the shared renderer; a tokenizer given by name is loaded once, in a worker thread."""
    if isinstance(tokenizer, Renderer):
        return renderer_for(tokenizer, **options)
    name = (str(tokenizer), repr(options) if options else "") if isinstance(tokenizer, str | Path) else None
    renderer = None if name is None else _LOADED.get(name)
    if renderer is None:
        renderer = await anyio.to_thread.run_sync(functools.partial(renderer_for, tokenizer, **options))
        if name is not None:
            _LOADED[name] = renderer
    return renderer


_LOADED: weakref.WeakValueDictionary[tuple[str, str], Renderer] = weakref.WeakValueDictionary()
