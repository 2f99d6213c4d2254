"""Recipes on a chat API."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import attrs
import pytest

from rollouts.chat_api import ChatEndpoint, chat_recipe, generate_chat_batch
from rollouts.dtypes import Endpoint
from rollouts.environments.calculator import CalculatorEnvironment
from rollouts.errors import ConfigError
from rollouts.recipe import Recipe, agent_recipe, preflight
from rollouts.service import leased_run
from rollouts.training.failures import FailurePolicy
from tests.chat_api.sums import sums, tasks

ENDPOINT = ChatEndpoint(model="stub", base_url="http://127.0.0.1:1/v1")


def recipe(**options: Any) -> Recipe:
    return agent_recipe("sums", ENDPOINT, CalculatorEnvironment, tasks(3), **options)


def test_a_recipe_keeps_everything_but_its_tokens() -> None:
    """Environment, prompts, limits, reward and sampling stay; the filter, the tokenizer and repeated attempts go."""
    before = recipe(max_turns=3, temperature=0.5)
    after = chat_recipe(before)
    assert before.config.filter_fn is not None
    assert (after.config.filter_fn, after.tokenizer, after.config.over_sampling_factor) == (None, None, 1.0)
    assert after.config.failures == {"endpoint": FailurePolicy(attempts=1)}
    assert (after.environment_cls, after.data_buffer) == (before.environment_cls, before.data_buffer)
    assert after.bound["max_turns"] == 3
    assert "tokenizer" not in after.bound
    greedy = after.with_sampling(temperature=0.0)
    assert (greedy.endpoint.sampling.temperature, greedy.bound["endpoint"].sampling.temperature) == (0.0, 0.0)


@pytest.mark.parametrize(
    "option", [{"history": "fork"}, {"dialect": "plain"}, {"template_kwargs": {"x": 1}}, {"special_text": "as_text"}]
)
def test_an_option_of_tokens_is_refused(option: dict[str, Any]) -> None:
    """By name: it would have no effect."""
    with pytest.raises(ConfigError, match=f"{next(iter(option))}: .*the API renders the conversation"):
        chat_recipe(recipe(**option))


def test_another_endpoint_or_another_kind_of_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="a ChatEndpoint"):
        chat_recipe(sums(Endpoint(model="m"), tasks(1)))
    own = functools.partial(generate_chat_batch)
    with pytest.raises(ConfigError, match="plays no programs, seats"):
        chat_recipe(attrs.evolve(recipe(), config=attrs.evolve(recipe().config, generate_fn=own)))


async def test_no_groups_of_a_chat_api_are_leased(tmp_path: Path) -> None:
    """A service gives groups to trainers: it is refused before a rollout is paid for, and before a folder is made."""
    with pytest.raises(ConfigError, match="this API has none"):
        async with leased_run(tmp_path / "run", chat_recipe(recipe())):
            pass
    assert not (tmp_path / "run").exists()


async def test_the_preflight_sends_nothing_and_needs_no_tokenizer() -> None:
    """It checks the environment and the sampling parameters; each request costs money."""
    assert (await preflight(chat_recipe(recipe()))).model == "stub"
    with pytest.raises(ConfigError, match="top_k"):
        await preflight(chat_recipe(recipe(top_k=5)))
