"""Recipes of agents, played on a chat API: the same environment, prompts and reward with another generate function.

Invariant: a recipe keeps everything but the part that makes tokens; an option of that part is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs

from rollouts.chat_api.account import Account
from rollouts.chat_api.endpoint import ChatEndpoint
from rollouts.chat_api.generate import generate_chat_batch
from rollouts.concurrency.boundary import function_name
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe
from rollouts.training.agent_integration import generate_rollout_batch
from rollouts.training.failures import FailurePolicy

__all__ = ["chat_recipe"]

_KEPT = ("environment_cls", "max_turns", "limits", "sampling")
_OF_TOKENS: Mapping[str, Any] = {
    "history": "append",
    "policy": None,
    "on_step": None,
    "dialect": None,
    "calls": None,
    "chat_template": None,
    "template_kwargs": None,
    "stop_token_ids": None,
    "special_text": None,
}
"""Arguments of the agent loop that only tokens need, with the values that ask for nothing."""


def chat_recipe(
    recipe: Recipe,
    *,
    account: Account | None = None,
    body: Mapping[str, Any] | None = None,
    send_reasoning: bool = False,
) -> Recipe:
    """A recipe of agents whose replies come from a chat API.

    Args:
        recipe: built with a :class:`ChatEndpoint`.
        account: counts the cost, and has the budget.
        body: further fields of each request.
        send_reasoning: send the thinking of earlier replies back.

    Returns:
        The recipe without a filter: a filter chooses groups for a trainer, and no trainer takes these samples. No more
        groups begin than a batch needs, because each costs money. A rollout whose reply does not come is not played
        again, because the client has repeated its request; nor is one whose request a filter refused, because that
        would hide refusals.

    Raises:
        ConfigError: the endpoint is of another kind, or the recipe's agents are programs, seats or functions, or it
            sets an option that only tokens have.
    """
    endpoint = recipe.endpoint
    if not isinstance(endpoint, ChatEndpoint):
        raise ConfigError.of("Recipe.endpoint", endpoint, "a ChatEndpoint")
    generate_fn = recipe.config.generate_fn
    if not isinstance(generate_fn, functools.partial) or generate_fn.func is not generate_rollout_batch:
        expected = "agents in an environment: a chat API plays no programs, seats or other generate functions"
        raise ConfigError.of(f"--provider openai, recipe {recipe.name}", function_name(generate_fn), expected)
    bound = generate_fn.keywords
    for name, neutral in _OF_TOKENS.items():
        if name in bound and bound[name] not in (None, neutral):
            raise ConfigError.of(name, bound[name], "no value with --provider openai: the API renders the conversation")
    options: dict[str, Any] = {name: bound[name] for name in _KEPT if bound.get(name) is not None}
    options |= {"endpoint": endpoint, "account": account or Account()}
    options |= {"body": dict(body)} if body else {}
    options |= {"send_reasoning": True} if send_reasoning else {}
    config = attrs.evolve(
        recipe.config,
        generate_fn=functools.partial(generate_chat_batch, **options),
        filter_fn=None,
        over_sampling_factor=1.0,
        failures={"endpoint": FailurePolicy(attempts=1), **recipe.config.failures},
    )
    return attrs.evolve(recipe, config=config, tokenizer=None)
