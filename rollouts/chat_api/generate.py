"""Generation of samples by a chat API: a prompt and an environment class in, a sample of messages out.

Invariant: one sample for each prompt. It has no token, and every function that makes rows for a trainer refuses it by
name. ``metadata["chat_api"]`` names the model that was asked and the models that answered. A rollout whose reply does
not come is a sample with status FAILED, without a reward.

This module does not know groups, reward functions or batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from rollouts.agent.budget import Budget
from rollouts.chat_api.account import Account
from rollouts.chat_api.client import client_of
from rollouts.chat_api.endpoint import ChatEndpoint
from rollouts.chat_api.episode import ChatEpisode
from rollouts.chat_api.wire import check_fields, check_sampling
from rollouts.dtypes import Limits, Message, Prompt, SamplingParams, TokenColumn
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError, without_password
from rollouts.inference.base import ServerInfo
from rollouts.recipe import Recipe, check_environment
from rollouts.training.agent_integration import check_limits, generate_all
from rollouts.training.rows import CHAT_API
from rollouts.training.sample_validator import copied
from rollouts.training.samples import trajectory_to_sample
from rollouts.training.types import Sample

__all__ = ["chat_rollout_to_samples", "generate_chat_batch"]

_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


async def chat_rollout_to_samples(
    prompt: Prompt | str | Sequence[Message | dict[str, Any]],
    *,
    environment_cls: EnvironmentFactory,
    endpoint: ChatEndpoint,
    account: Account | None = None,
    max_turns: int | None = None,
    limits: Limits | None = None,
    sampling: SamplingParams | None = None,
    body: Mapping[str, Any] = _NO_FIELDS,
    send_reasoning: bool = False,
) -> list[Sample]:
    """Run one agent in a fresh environment on a chat API.

    Args:
        prompt: text, messages, or a :class:`Prompt` with label and metadata.
        environment_cls: called without arguments to create the environment.
        endpoint: the API, its model and its sampling parameters.
        account: counts the cost, and has the budget; rollouts share one.
        max_turns: short for ``limits=Limits(max_turns=…)``.
        limits: limits of the episode. Tokens are as the API counts them.
        sampling: replaces ``endpoint.sampling``.
        body: further fields of each request, such as ``{"reasoning_effort": "low"}``; they replace ours, and ``None``
            leaves one out.
        send_reasoning: send the thinking of earlier replies back, as ``reasoning_content``, which some APIs need and
            others refuse.

    Returns:
        One sample without tokens. Its reward is the sum of the environment's step rewards, ``None`` if there are none.

    Raises:
        ConfigError: the API refuses the key, the model or a sampling parameter, so that every rollout would fail.
        EndpointAway: the budget or the quota is spent, or the rate limit refuses a request for too long.
    """
    if not isinstance(endpoint, ChatEndpoint):
        raise ConfigError.of("endpoint", endpoint, "a ChatEndpoint")
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    unedited = attrs.evolve(prompt, label=copied(prompt.label))  # an environment may change its label in place
    sampling = sampling or endpoint.sampling
    check_sampling(sampling)
    check_fields(body)
    episode = ChatEpisode(
        prompt=attrs.evolve(prompt, turn_log=None, urgency=None),
        endpoint=endpoint,
        client=client_of(endpoint),
        account=Account() if account is None else account,
        budget=Budget(check_limits(limits, max_turns), sampling),
        extra=body,
        send_reasoning=send_reasoning,
    )
    await episode.play(environment_cls)
    trajectory = episode.trajectory
    response = "\n".join(message.text for message in trajectory.messages[episode.first_reply :])

    def text_of(tokens: TokenColumn) -> str:
        return response

    sample = trajectory_to_sample(trajectory, unedited, text_of)
    sample.metadata[CHAT_API] = {
        "provider": endpoint.provider,
        "url": without_password(endpoint.base_url[0]),
        "model": endpoint.model,
        "served": list(episode.served),
        "fingerprints": list(episode.fingerprints),
        "replies": episode.ids,
    }
    return [sample]


async def generate_chat_batch(
    prompts: Iterable[Prompt | str | Sequence[Message | dict[str, Any]]], **options: Any
) -> list[Sample]:
    """Run :func:`chat_rollout_to_samples` with ``options`` for all prompts concurrently.

    With the options bound by ``functools.partial``, it is the ``generate_fn`` of a ``RolloutConfig``.
    """
    return await generate_all(chat_rollout_to_samples, prompts, options)


async def preflight_chat(recipe: Recipe) -> ServerInfo:
    """The preflight of a recipe on a chat API; no request is sent, since each costs money.

    Raises:
        ConfigError: the environment lacks a method, or the API has no field for a sampling parameter.
        EnvironmentFailure: the environment cannot be created or closed.
    """
    check_sampling(recipe.endpoint.sampling)
    check_fields(recipe.bound.get("body") or ())
    check_limits(recipe.bound.get("limits"), recipe.bound.get("max_turns"))
    await check_environment(recipe)
    return ServerInfo(model=recipe.endpoint.model)


generate_chat_batch.preflight = preflight_chat  # type: ignore[attr-defined]  # the preflight of a recipe calls it
