"""The recipe of a command with ``--provider openai``: agents on a chat API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from rollouts.chat_api import Account, ChatEndpoint, Prices, chat_recipe, generate_chat_batch
from rollouts.chat_api.endpoint import key_of
from rollouts.chat_api.wire import check_fields
from rollouts.commands.chat_options import OPENAI_KEY, OPENAI_URL, ChatOptions
from rollouts.dtypes import Prompt
from rollouts.dtypes.messages import REPLIES
from rollouts.environments.base import EnvironmentFactory
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe
from rollouts.recipe.files import RecipeFunction, build
from rollouts.testing.environment_check import Finding, Verdict

__all__ = [
    "account_of",
    "built_on_api",
    "cost_of",
    "endpoint_of",
    "extra_body",
    "played_by_api",
    "stored_chat",
    "url_of",
]


def built_on_api(
    function: RecipeFunction,
    options: Mapping[str, str],
    chat: ChatOptions,
    model: str | None,
    urls: tuple[str, ...] = (),
) -> Recipe:
    """A recipe on a chat API; no request is sent.

    Args:
        function: of the recipe.
        options: of the recipe, as texts.
        chat: the options of the API.
        model: its model.
        urls: the URL of a resumed run, where ``chat`` has none.

    Raises:
        ConfigError: an option is wrong, the key is missing, or the recipe's agents are of another kind.
    """
    recipe = build(function, endpoint_of(chat, model, urls), options)
    body = extra_body(chat.body)
    return chat_recipe(recipe, account=account_of(chat), body=body, send_reasoning=chat.send_reasoning)


def url_of(chat: ChatOptions, urls: tuple[str, ...] = ()) -> str:
    """The URL of an API: that of its options, of a resumed run, or OpenAI's."""
    return chat.base_url or next(iter(urls), OPENAI_URL)


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
    variable, url = chat.key_variable or OPENAI_KEY, url_of(chat, urls)
    options: dict[str, Any] = {} if chat.at_once is None else {"concurrency": chat.at_once}
    return ChatEndpoint(
        model=model,
        base_url=url,
        api_key=key_of(variable, required=chat.key_variable is not None or url == OPENAI_URL),
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
        check_fields([name if equals else ""])
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


async def played_by_api(
    environment_cls: EnvironmentFactory, prompts: Sequence[Prompt], chat: ChatOptions, model: str | None
) -> list[Finding]:
    """Play an episode for each prompt with a model of a chat API; a failure is a bad finding.

    Raises:
        ConfigError: an option is wrong, or the API refuses the key or the model.
        EndpointAway: the budget or the quota is spent.
    """
    account = account_of(chat)
    endpoint, body = endpoint_of(chat, model), extra_body(chat.body)
    numbered = [attrs.evolve(prompt, index=number) for number, prompt in enumerate(prompts)]
    samples = await generate_chat_batch(
        numbered,
        environment_cls=environment_cls,
        endpoint=endpoint,
        account=account,
        body=body,
        send_reasoning=chat.send_reasoning,
    )
    findings = []
    for number, sample in enumerate(samples):
        about = f"{endpoint.model}, prompt {number}"
        if sample.failure is not None:
            findings.append(Finding(about, "bad", f"{sample.failure.kind}: {sample.failure.message}"))
            continue
        counts = {name: int(sample.metrics.get(name, 0)) for name in (REPLIES, "tool_calls", "malformed_tool_calls")}
        counts["unknown_tool_calls"] = int(sample.metrics.get("unknown_tool_calls", 0))
        said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        reward = "no step reward" if sample.reward is None else f"step rewards {sample.reward:g}"
        wrong = counts["malformed_tool_calls"] + counts["unknown_tool_calls"]
        verdict: Verdict = "note" if wrong else "good"
        findings.append(Finding(about, verdict, f"{sample.stop_reason}; {said}; {reward}"))
    findings.append(Finding(f"{endpoint.model}, cost", "note", str(account)))
    return findings
