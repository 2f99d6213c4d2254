"""The recipe of a command with ``--provider openai``: agents on a chat API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import msgspec

from rollouts.chat_api import Account, ChatEndpoint, Prices, chat_recipe
from rollouts.chat_api.endpoint import key_of
from rollouts.commands.target import OPENAI_KEY, OPENAI_URL, ChatOptions, RunTarget, with_batches
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe
from rollouts.recipe_files import RecipeFunction, build

__all__ = ["account_of", "built_on_api", "cost_of", "endpoint_of", "extra_body", "stored_chat", "with_url"]


def built_on_api(function: RecipeFunction, target: RunTarget) -> Recipe:
    """The recipe of a target on its chat API; no request is sent.

    Raises:
        ConfigError: an option is wrong, the key is missing, or the recipe's agents are of another kind.
    """
    if target.slots is not None:
        raise ConfigError.of("--slots", target.slots, "none with --provider openai: --at-once limits its requests")
    endpoint = endpoint_of(target.chat, target.model, target.urls)
    recipe = with_batches(build(function, endpoint, target.options), target)
    body = extra_body(target.chat.body)
    account = account_of(target.chat)
    return chat_recipe(recipe, account=account, body=body, send_reasoning=target.chat.send_reasoning)


def with_url(target: RunTarget) -> RunTarget:
    """The target with the URL of its chat API among its servers, as a run stores it."""
    return attrs.evolve(target, urls=(target.chat.base_url or next(iter(target.urls), OPENAI_URL),))


def endpoint_of(chat: ChatOptions, model: str | None, urls: tuple[str, ...] = ()) -> ChatEndpoint:
    """The endpoint of the options.

    Args:
        chat: the options.
        model: its name.
        urls: the URL of a resumed run, where the options have none.

    Raises:
        ConfigError: there is no model, or the variable of the key that is named is not set.
    """
    if not model:
        raise ConfigError.of("--model", model, "the name of a model of the API, with --provider openai")
    variable = chat.key_variable or OPENAI_KEY
    options: dict[str, Any] = {} if chat.at_once is None else {"concurrency": chat.at_once}
    return ChatEndpoint(
        model=model,
        base_url=chat.base_url or urls or OPENAI_URL,
        api_key=key_of(variable, required=chat.key_variable is not None),
        key_variable=variable,
        **options,
    )


def account_of(chat: ChatOptions) -> Account:
    """The account of the options.

    Raises:
        ConfigError: a budget without prices.
    """
    priced = chat.price_in is not None and chat.price_out is not None
    prices = Prices(chat.price_in, chat.price_out) if priced else None  # type: ignore[arg-type]  # both are numbers
    return Account(prices=prices, budget=chat.budget)


def extra_body(texts: Iterable[str]) -> dict[str, Any]:
    """The fields of ``--body``; a value that is not JSON is text.

    Raises:
        ConfigError: no name, or a field that the episode sets.
    """
    body: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in ("model", "messages", "tools", "stream", "n"):
            raise ConfigError.of("--body", text, "NAME=JSON, and not model, messages, tools, stream or n")
        try:
            body[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            body[name] = value
    return body


def stored_chat(chat: ChatOptions) -> Mapping[str, Any]:
    """The options that a resumed run uses again: all but the URL, which is among the endpoints, and the budget."""
    fields = attrs.asdict(chat)
    return {name: value for name, value in fields.items() if name not in ("base_url", "budget") and value}


def cost_of(recipe: Recipe) -> str:
    """The requests of a recipe on a chat API and their cost, as a line."""
    return f"chat API: {recipe.bound['account']}"
